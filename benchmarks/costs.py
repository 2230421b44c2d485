"""What the verbs cost beside what `align_circuits.validation.costs` predicts, from 1 million to 135 million parameters.

Random Llamas on the CPU, one thread, time of the processor. What is predicted is the verb's work as a multiple of the
forward pass over the same prompts, times what that pass took in the same round; so the prediction knows one number of
the machine. Intervals, permutation tests and tables are part of what is measured, and not of what is predicted. The
largest model has SmolLM2's shape, and a few heads stand for all of its 270 where a verb takes heads. `localize` runs on
the bundled model, whose heads have roles.

    python benchmarks/costs.py [--rounds 3] [--models 1M,8M,27M,135M] [--verbs tune,score] [--out FOLDER]

In a folder that has a table, rows that are measured again take the place of earlier ones.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from contest import command_line, processor, random_llama, seconds

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.run.forward_pass import forward
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.validation.costs import (
    ModelShape,
    PromptSizes,
    Work,
    ablate_work,
    attribute_work,
    evaluate_work,
    forward_work,
    localize_work,
    patch_work,
    score_work,
    tune_work,
)

# Layers, width, heads, key heads, width of the MLP, vocabulary.
MODELS = {
    "1M": (6, 128, 4, 2, 352, 64),
    "8M": (8, 288, 6, 3, 792, 64),
    "27M": (10, 480, 8, 4, 1320, 64),
    "135M": (30, 576, 9, 3, 1536, 49_152),
}
PROMPTS = {"1M": 32, "8M": 16, "27M": 8, "135M": 2}
"""So many that a pass takes about as long in each model, and what does not grow with the work weighs little."""
STEPS = {"1M": 12, "8M": 12, "27M": 8, "135M": 4}
"""Of a tuning, each of eight prompts at most, for the same reason."""
TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15)

Case = tuple[str, Callable[[], Any], Work]
"""A verb, its call, and its work."""


def network(name: str) -> Any:
    """Returns a random Llama."""
    layers, width, heads, key_heads, d_mlp, vocabulary = MODELS[name]
    more: dict[str, Any] = {"intermediate_size": d_mlp, "tie_word_embeddings": True}
    return ac.load(random_llama(layers, width, heads, key_heads, vocabulary, **more), tokenizer=char_tokenizer())


def run_once(model: Any, prompts: ac.Prompts) -> None:
    """Runs the prompts: the unit of all costs."""
    prompt, query = prompts.column("prompt"), prompts.column("query_pos")
    forward(model, prompts, prompt=prompt, query=query, on_logits=lambda *_: None)


def cases(model: Any, clean: ac.Prompts, steps: int) -> Iterator[Case]:
    """Yields the verbs on one model, but for `localize`; a tuning has so many `steps`."""
    shape = ModelShape.of(model)
    query = ac.Pair(clean, TASK.corrupt(clean, "query"))
    labels = ac.Pair(clean, TASK.corrupt(clean, "labels"))
    sizes, whole = PromptSizes.of(query), PromptSizes.of(labels)
    every = max(1, shape.layers // 10)
    some = [(layer, 0) for layer in range(every // 2, shape.layers, every)]
    yield "evaluate", lambda: ac.evaluate(model, clean), evaluate_work(shape, sizes)
    yield "score", lambda: ac.score_heads(model, clean), score_work(shape, sizes)
    above = sum(shape.layers - 1 - layer for layer, _ in some)
    yield "ablate", lambda: ac.ablate_heads(model, clean, heads=some), ablate_work(shape, sizes, len(some), above)
    yield "patch, last example", lambda: ac.patch_heads(model, query), patch_work(shape, sizes)
    of_some = patch_work(shape, whole, len(some), above)
    yield "patch, all examples", lambda: ac.patch_heads(model, labels, heads=some), of_some
    yield "attribute heads", lambda: ac.attribute_heads(model, query), attribute_work(shape, sizes)
    by_steps = attribute_work(shape, sizes, 5)
    yield "attribute heads, 5 steps", lambda: ac.attribute_heads(model, query, method="ig_inputs", steps=5), by_steps
    edges = attribute_work(shape, sizes, edges=True)
    yield "attribute edges", lambda: ac.attribute_edges(model, query, method="eap"), edges
    step = replace(sizes, prompts=min(sizes.prompts, 8))
    config = ac.TuneConfig(steps=steps, batch=step.prompts, probe_every=steps, probe_prompts=1)
    tuned = tune_work(shape, step, steps, probes=2, probe_prompts=1)
    yield "tune", lambda: ac.tune(model, TASK, config, progress=False), tuned


def localized(model: Any, n: int) -> Case:
    """Returns `localize`: how many candidates and sets it measures is known from a first call."""
    found = ac.localize(model, TASK, n=n)
    prompts = TASK.sample(n, model.tokenizer, references=False)
    sizes = replace(PromptSizes.of(ac.Pair(*TASK.pairs(prompts[n // 2 :], 0))), prompts=n)
    whole = found.evidence.set_ablations.where(kind="all", ablated="nothing").frame["n"].iloc[0]
    controls = [draws for verdict in found.verdicts if verdict.role for draws in verdict.controls.values()]
    drawn = sum(math.isfinite(accuracy) for draws in controls for accuracy in draws)
    sets = found.evidence.set_ablations.where(kind="all").frame["n"].sum() / whole + drawn / 2
    candidates = len(found.evidence.ablation_effects.frame[["layer", "head"]].drop_duplicates())
    exchanged = 0 if found.evidence.interchanges is None else len(found.evidence.interchanges.frame) // 2
    work = localize_work(ModelShape.of(model), sizes, candidates, sets, exchanged)
    return f"localize, {candidates} candidates, {sets} sets", lambda: ac.localize(model, TASK, n=n), work


def compare(name: str, model: Any, n: int, given: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Prints, and returns, how long the verbs took beside what was predicted."""
    clean = TASK.sample(n, model.tokenizer, references=False)
    shape, sizes = ModelShape.of(model), PromptSizes.of(ac.Pair(clean, TASK.corrupt(clean, "query")))
    unit = forward_work(shape, sizes)
    found = []
    for verb, call, work in given:
        seconds(call)
        ratios = []
        for _ in range(rounds):
            bare = min(seconds(lambda: run_once(model, clean)) for _ in range(3))
            predicted = bare * work.passes(shape, unit)
            measured = seconds(call)
            ratios.append((measured / predicted, measured, predicted))
        ratio, measured, predicted = (median(values) for values in zip(*ratios, strict=True))
        low, high = min(ratios)[0], max(ratios)[0]
        row = {"sweep": f"{name}, {verb}", "contestant": f"{shape.parameters / 1e6:.1f}M parameters"}
        row |= {"passes": work.passes(shape, unit), "predicted s": predicted, "measured s": measured}
        row |= {"measure": "times as long as predicted", "value": ratio, "low": low, "high": high, "n": rounds}
        print(
            f"{name:10s} {verb:38s} {row['passes']:7.1f} passes {predicted:8.2f} s predicted {measured:8.2f} s "
            f"measured {ratio:5.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
        found.append(row)
    return found


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=3, out=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--verbs", default="", help="the beginnings of verbs, separated by commas; by default all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    wanted = tuple(arguments.verbs.split(","))
    for name in arguments.models.split(","):
        model = network(name)
        count = PROMPTS[name]
        clean = TASK.sample(count, model.tokenizer, references=False)
        chosen = [case for case in cases(model, clean, STEPS[name]) if case[0].startswith(wanted)]
        rows += compare(name, model, count, chosen, arguments.rounds)
    if "localize".startswith(wanted):
        bundled = ac.load("toy-llama")
        rows += compare("toy-llama", bundled, 32, [localized(bundled, 32)], arguments.rounds)
    if arguments.out:
        settings = {"rounds": arguments.rounds, "threads": 1, "width": "by model"}
        settings |= {"processor": processor(), "time": "of the processor"}
        frame = pd.DataFrame(rows)
        if (Path(arguments.out) / "provenance.json").exists():
            frame = pd.concat([Table.load(arguments.out).frame, frame])
            order = frame["sweep"].unique()
            frame = frame.drop_duplicates("sweep", keep="last").set_index("sweep").loc[order].reset_index()
        Table(frame, Provenance("benchmark", settings)).save(arguments.out)
