"""Whether a change of the code left its numbers as they were, to the bit.

A fixed list of measurements is run with the `align_circuits` that Python imports, and compared with the digests in
`same_numbers.json`. A digest depends neither on names nor on the order of rows: of a table it takes value, low, high
and n of every row, as float64, sorts the rows and hashes them; of a tensor its bytes. The last digits may differ
between processors and versions of torch: write the file and compare with it on the same machine, on one thread.

    python benchmarks/same_numbers.py [--write] [--only demo] [--only kept/recall-fig1]

It prints a line for each table: rows, digest before, digest now, and "same" or "DIFFERENT", with both sums and, where
the file holds them, the largest distance of sorted values. Status 1 if anything differs, fails or is not in the file;
with `--write` it says so too, and keeps the numbers of now. Of a kept run it also prints whether running it again gives
the kept table, which does not change the status, since that table may stem from another machine. After a renaming in
the package, change the functions above MEASUREMENTS and keep the names of all measurements.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np
import pandas as pd
import torch
from transformer_lens import patching
from transformers import LlamaConfig, LlamaForCausalLM

import align_circuits as ac
from align_circuits import cli
from align_circuits.papers.abrupt.task import ExemplarTask
from align_circuits.papers.recall.task.next_token import SlotsTask
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld

FILE = Path(__file__).with_suffix(".json")
KEPT_VALUES = 500
"""Of tables with at most so many rows, the file holds the sorted values themselves."""

Numbers = pd.DataFrame | torch.Tensor
"""Measured columns, in any order of rows; or a tensor, whose order counts."""


# What follows, up to MEASUREMENTS, is all that knows the names of the package.

TASK = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=4)
VALUES = ["value", "low", "high", "n"]
RUNS = {
    "icatune-fig1": "icatune/fig1",
    "icatune-fig2": "icatune/fig2",
    "icatune-fig8": "icatune/fig8",
    "icatune-prior": "icatune/prior",
    "icatune-table1": "icatune/table1",
    "recall-fig1": "recall/fig1",
    "recall-lemmas": "recall/lemmas",
    "recall-propositions": "recall/propositions",
    "recall-theorem": "recall/theorem",
    "abrupt-figA4": "abrupt/figA4",
}
"""Experiments of all three papers that take at most two minutes each at the cpu scale, by their names in the file."""


PARTS = {"effects": "patching_effects", "damage": "ablation_effects", "verdict": "set_ablations"}
"""The tables of `localize`, by their names in the file of numbers."""


def measured(table: ac.Table) -> pd.DataFrame:
    """Returns the measured columns of a table."""
    return table.frame[VALUES]


def command(*arguments: str, out: str) -> None:
    """Runs `align-circuits` with these arguments, without a word; it must leave a table."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        cli.main([*arguments, "--out", out])
    if not (Path(out) / "table.csv").is_file():  # its status is 2 also where the kept table has other rows
        raise RuntimeError(f"align-circuits {' '.join(arguments)}: {printed.getvalue()[-500:]}")


def saved(folder: Path) -> pd.DataFrame:
    """Reads the measured columns of a table that a command wrote."""
    return pd.read_csv(folder / "table.csv", dtype=str)[VALUES].astype(float)  # text to float64 is exact so


def demo(name: str) -> dict[str, Numbers]:
    """One of the two runs of `make demo`, all its tables; of the planted circuit also the same call in Python."""
    with tempfile.TemporaryDirectory() as folder:
        command("localize", "--model", name, out=folder)
        found: dict[str, Numbers] = {"table": saved(Path(folder))}
        found |= {part: saved(Path(folder) / now) for part, now in PARTS.items()}
    if name == "planted":  # of a network it takes minutes
        task = ac.Seq2SeqTask()
        again = ac.localize(ac.planted_circuit(task, seed=0), task, n=64, seed=0, n_controls=20)
        tables = {"table": again.table} | {part: getattr(again.evidence, now) for part, now in PARTS.items()}
        found |= {f"{part}, in Python": measured(table) for part, table in tables.items()}
    return found


def kept(name: str) -> dict[str, Numbers]:
    """Runs an experiment again, in a folder of its own; the kept table comes along as "before"."""
    with tempfile.TemporaryDirectory() as folder:
        command("reproduce", RUNS[name], out=folder)
        table = Path(ac.__file__).parents[1] / "docs" / "results" / name / "cpu"
        return {"again": saved(Path(folder)), "before": measured(ac.Table.load(table)).astype(float)}


@cache
def model_of(name: str) -> Any:
    """Returns the planted circuit, a bundled Llama in float32, or a random Llama whose heads share keys and values."""
    if name == "planted":
        return ac.planted_circuit(TASK, seed=0)
    bundled = ac.load("toy-llama", dtype=torch.float32)
    if name == "toy-llama":
        return bundled
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, **heads, initializer_range=0.3)
        return ac.load(LlamaForCausalLM(config).eval(), tokenizer=bundled.tokenizer)


def verbs(name: str) -> dict[str, Numbers]:
    """The public verbs on one model."""
    model = model_of(name)
    clean = TASK.sample(4, model.tokenizer, seed=0)
    corrupted, shuffled = (TASK.corrupt(clean, kind, seed=1) for kind in ("query", "labels"))
    pair, noise = (ac.Pair(clean, corrupted, direction=direction) for direction in ("denoise", "noise"))
    tasks = [ac.Pair(clean, shuffled)]
    edges = ac.attribute_edges(model, noise)
    tables: dict[str, ac.Table] = {"attribute_edges, eap_ig_inputs": edges}
    tables["attribute_edges, eap"] = ac.attribute_edges(model, noise, method="eap")
    engines: Any = ("auto", "reference")
    for engine in engines:
        options = ac.RunOptions(engine=engine)
        tables |= {
            f"score_heads, {engine}": ac.score_heads(model, clean, options=options),
            f"evaluate, {engine}": ac.evaluate(model, clean, options=options),
            f"ablate_heads, {engine}": ac.ablate_heads(model, clean, options=options),
            f"patch_heads, {engine}": ac.patch_heads(model, pair, options=options),
            f"direct_logits, {engine}": ac.direct_logit_attribution(model, clean, options=options),
            f"function_vectors, {engine}": ac.function_vectors(model, tasks, options=options),
        }
    tables |= {f"ablate_heads, {how}": ac.ablate_heads(model, clean, how) for how in ("zero", "resample")}
    sites: Any = ["q", "k", "v", "pattern", "mlp_out", "resid_post"]
    tables["patch_heads, noise, groups"] = ac.patch_heads(model, noise, positions="groups")
    tables["patch_heads, other sites"] = ac.patch_heads(model, pair, sites=sites)
    for method in ("atp", "ig_inputs"):
        tables[f"attribute_heads, {method}"] = ac.attribute_heads(model, noise, method=method)
    tables["attribute_heads, atp_star"] = ac.attribute_heads(model, noise, method="atp_star", sites=["q", "k", "z"])
    tables["attribute_heads, other sites"] = ac.attribute_heads(model, noise, sites=sites[:3], grad_drop=True)
    tables["patch_paths"] = ac.patch_paths(model, noise)
    if name == "random":
        tables["patch_edges"] = ac.patch_edges(model, noise)
    tables["faithfulness"] = ac.faithfulness(model, noise, edges, fractions=(0.01, 0.1, 0.5))
    tables["head_profile"] = ac.head_profile(model, clean, tasks)
    return {verb: measured(table) for verb, table in tables.items()}


def tuned(method: Any) -> dict[str, Numbers]:
    """Ten steps of tuning."""
    task = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=4, automata="task")
    config = ac.TuneConfig(method, steps=10, batch=2, lr=3e-3, probe_every=5, probe_prompts=4)
    run = ac.tune(model_of("toy-llama"), task, config, progress=False)
    log = run.log.select_dtypes("number").to_numpy(dtype=float)
    return {"table": measured(run.table), "log": pd.DataFrame({"number": log.ravel()})}


def samples() -> dict[str, Numbers]:
    """What the tasks draw: tokens, and positions and tokens of targets."""
    tokenizer = model_of("toy-llama").tokenizer
    options: dict[str, Any] = {"x_len": 5, "phrase_len": 2, "n_examples": 6}
    world, other = (RecallWorld(16, (4, 4, 4), 6, *more) for more in ((None, True), (0.5, False)))
    drawn: dict[str, Any] = {
        "Seq2SeqTask": ac.Seq2SeqTask(**options),
        "Seq2SeqTask, pre-aligned": ac.Seq2SeqTask(**options, style="pre-aligned", alignment="permutation"),
        "Seq2SeqTask, marked": ac.Seq2SeqTask(**options, style="marked", ood=True),
        "Seq2SeqTask, prior": ac.Seq2SeqTask(**options, alignment="prior", decay=4.0, automata="task"),
        "RepeatedTokensTask": ac.RepeatedTokensTask(length=20),
        "FactsTask, relation tokens": FactsTask(world, 3, 4, 0.0),
        "FactsTask": FactsTask(other, 3, 4, 0.2),
        "DemonstrationsTask": DemonstrationsTask(other, 4),
        "SlotsTask": SlotsTask(world, n_facts=2, grammar_len=4),
        "ExemplarTask": ExemplarTask(n_classes=64, n_pairs=4),
    }
    found = {}
    for name, task in drawn.items():
        words = () if name == "ExemplarTask" else (tokenizer,)
        prompts = task.sample(16, *words, seed=3)
        found[name] = prompts.inputs
        found[f"{name}: targets"] = torch.tensor(prompts.targets[["prompt", "query_pos", "token"]].to_numpy(dtype=int))
    task = drawn["Seq2SeqTask"]
    for kind in ("query", "labels", "alignment"):
        found[f"Seq2SeqTask, corrupted: {kind}"] = task.corrupt(task.sample(16, tokenizer, seed=3), kind, seed=4).inputs
    return found


def equalities() -> dict[str, Numbers]:
    """How far apart two ways to the same number lie."""
    model = model_of("toy-llama")
    clean = TASK.sample(4, model.tokenizer, seed=0)
    corrupted, shuffled = (TASK.corrupt(clean, kind, seed=1) for kind in ("query", "labels"))
    row, query, gold = (clean.column(name) for name in ("prompt", "query_pos", "token"))
    hooks = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    _, cache = model.run_with_cache(clean.tokens, names_filter=hooks)
    by_hooks = torch.zeros(2, model.cfg.n_layers, model.cfg.n_heads)

    def chances(logits: torch.Tensor) -> torch.Tensor:
        return logits[row, query].log_softmax(-1).gather(1, gold[:, None])

    with torch.no_grad():
        by_hand = patching.get_act_patch_attn_head_out_all_pos
        by_hooks[0] = by_hand(model, corrupted.tokens, cache, lambda logits: chances(logits).mean())
        by_hooks[0] -= chances(model(corrupted.tokens)).mean()
        for layer, head in product(*map(range, by_hooks.shape[1:])):

            def put(z: torch.Tensor, hook: Any, head: int = head) -> torch.Tensor:
                z[row, query, head] = cache[hook.name][row, query, head].mean(0)
                return z

            logits = model.run_with_hooks(shuffled.tokens, fwd_hooks=[(hooks[layer], put)])
            by_hooks[1, layer, head] = chances(logits).exp().mean()
        by_hooks[1] -= chances(model(shuffled.tokens)).exp().mean()
    patched = ac.patch_heads(model, ac.Pair(clean, corrupted)).where(kind="all").to_array("log_prob")
    vectors = ac.function_vectors(model, [ac.Pair(clean, shuffled)]).to_array("function_vector")
    one, two = (
        measured(ac.score_heads(model, clean, options=ac.RunOptions(engine=engine)))["value"]
        for engine in ("fast", "reference")
    )
    apart = {
        "patch_heads and TransformerLens": patched - by_hooks[0].numpy(),
        "function_vectors and hooks": vectors - by_hooks[1].numpy(),
        "fast and reference engine": one.to_numpy() - two.to_numpy(),
    }
    return {name: pd.DataFrame({"apart": np.abs(values).ravel()}) for name, values in apart.items()}


MEASUREMENTS: Mapping[str, Callable[[], dict[str, Numbers]]] = {
    "samples": samples,
    **{f"verbs/{name}": lambda name=name: verbs(name) for name in ("random", "planted", "toy-llama")},
    **{f"tune/{method}": lambda method=method: tuned(method) for method in ("ica", "standard")},
    "equalities": equalities,
    **{f"demo/{name}": lambda name=name: demo(name) for name in ("planted", "toy-llama-ica")},
    **{f"kept/{name}": lambda name=name: kept(name) for name in RUNS},
}


def digest_of(numbers: Numbers) -> dict[str, Any]:
    """Returns rows, digest and sum, and the sorted values where they are few."""
    if isinstance(numbers, torch.Tensor):
        array = np.ascontiguousarray(numbers.numpy())
        digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()[:16]
        return {"rows": len(array), "digest": digest, "sum": math.fsum(array.ravel().tolist())}
    rows = numbers.to_numpy(dtype=float)  # float.hex() writes every NaN alike
    lines = sorted(" ".join(number.hex() for number in row) for row in rows.tolist())
    values = sorted(number for number in rows[:, 0].tolist() if not math.isnan(number))
    found = {"rows": len(rows), "digest": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]}
    return found | {"sum": math.fsum(values)} | ({"values": values} if len(values) <= KEPT_VALUES else {})


def against_kept(again: pd.DataFrame, before: pd.DataFrame) -> str:
    """Says how a kept run that ran again compares with what was kept, row by row."""
    then, now = (table["value"].to_numpy(dtype=float) for table in (before, again))
    if len(then) != len(now) or (np.isnan(then) != np.isnan(now)).any():
        return "other rows"
    largest = float(np.nanmax(np.abs(now - then)))
    return "same" if largest == 0 else f"differs by {largest:.2g}"


def line_of(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Says in a line whether a table is what it was, and how far off it is."""
    line = f"{name}  {now['rows']} rows  {then['digest']}  {now['digest']}  "
    line += "same" if then["digest"] == now["digest"] else f"DIFFERENT: sum {then['sum']!r} -> {now['sum']!r}"
    one, two = (np.asarray(part.get("values", ())) for part in (then, now))
    if then["digest"] != now["digest"] and len(one) == len(two) > 0:
        line += f", sorted values at most {np.abs(one - two).max():.2g} apart"
    return line + (f"  kept table: {now['kept table']}" if "kept table" in now else "")


def run(name: str) -> dict[str, dict[str, Any]]:
    """Runs a measurement on one thread, and returns what is known of each of its tables."""
    torch.set_num_threads(1)
    tables = MEASUREMENTS[name]()
    before = tables.pop("before", None)
    found = {f"{name}: {part}": digest_of(numbers) for part, numbers in tables.items()}
    if isinstance(before, pd.DataFrame) and isinstance(again := tables["again"], pd.DataFrame):
        found[f"{name}: again"]["kept table"] = against_kept(again, before)
    return found


def main() -> int:
    """Runs the measurements, compares them or writes them down, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the numbers of now as those of before")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="measurements that begin so")
    arguments = parser.parse_args()
    wanted = [name for name in MEASUREMENTS if name.startswith(tuple(arguments.only or [""]))]
    if not wanted:
        parser.error(f"no measurement begins so: choose from {', '.join(MEASUREMENTS)}")
    made = {"torch": torch.__version__, "instructions": torch.backends.cpu.get_cpu_capability()}
    print(f"align_circuits from {ac.__file__}, {made}")
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    if arguments.write:
        known["made with"] = made
    elif known.get("made with") != made:
        print(f"the file was made with {known.get('made with')}: last digits may differ for that")
    bad, absent = 0, {"rows": "no", "digest": "-", "sum": math.nan}
    for name in wanted:
        started = time.perf_counter()
        try:
            found = run(name)
        except Exception:  # a name that has changed, say: the others are still worth knowing
            bad += 1
            print(f"{name}  FAILED\n{traceback.format_exc()}", flush=True)
            continue
        parts = [*found, *(part for part in known if part.startswith(f"{name}:") and part not in found)]
        for then, now, part in ((known.get(part, absent), found.get(part, absent), part) for part in parts):
            bad += then["digest"] != now["digest"]
            print(line_of(part, then, now), flush=True)
        if arguments.write:
            known = {part: what for part, what in known.items() if part not in parts} | found
            lines = ",\n".join(f"{json.dumps(part)}: {json.dumps(what)}" for part, what in known.items())
            FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        print(f"    {name} took {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{bad} DIFFERENT" if bad else "all the same")
    return int(bad > 0 and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
