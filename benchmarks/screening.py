"""Screened sweeps of heads: what they save where prompts differ early and in ablations, and what they miss.

Speed: a random Llama of 8 layers with 8 heads, float32 on the CPU, one prompt of 448 tokens. Patched is z of every head
from the clean prompt into one whose labels were corrupted, from token 15 on; ablated is every head, to its mean over
tokens of the same kind. `patch_heads` and `ablate_heads` run screened (a quarter of the heads) and in full, beside
TransformerLens: its `patching`, and for ablations a loop of `run_with_hooks`. Every edited run of TransformerLens costs
the same, so it edits evenly spread heads only, and the time of that part is scaled up. Contestants take turns,
processor time of one thread is counted, and the ratio is the median over rounds of the ratio within a round.

Misses: on planted circuits of the zoo (`--circuits`; 30 to 84 heads) and on models that `load` takes (`--models`),
heads are ranked by the estimate and by the exact effect. The best ten are those of the largest exact effect, up or
down, without heads that change the answer by less than a hundredth of a nat. A sweep misses one if its estimate ranks
it behind the share. The smallest circuits have fewer heads in a quarter than ten.

    python benchmarks/screening.py [--rounds 5] [--circuits 40] [--models smollm2] [--seeds 3] [--out FOLDER]
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from contest import Row, command_line, in_turn, keep, ratios, rows_of, show, timed
from patching import HEADS, TASK, random_model
from transformer_lens import patching

import align_circuits as ac
from align_circuits.hooks.edits import groups_of
from align_circuits.models.planted.zoo import zoo_circuit
from align_circuits.tables.intervals import binomial_interval, proportion, weighted_mean
from align_circuits.tables.tables import Table

LAYERS, WIDTH = 8, 256
SHARE, SHARES = 0.25, (0.1, 0.25, 0.5)
"""The share that others are compared with, and those that misses are counted for."""

BEST, LEAST = 10, 0.01
"""How many heads must not be missed, and the least effect, in nats, of one that counts."""

REAL_TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4)
"""For a model that is given."""

Contestant = Callable[[], tuple[float, torch.Tensor]]
"""Returns how long a sweep took, and the effects of some heads."""


def speed(rounds: int, sample: int) -> Iterator[Row]:
    """Yields what each contestant takes in both sweeps."""
    model = random_model(LAYERS, WIDTH)
    clean = TASK.sample(1, model.tokenizer, references=False)
    corrupted = TASK.corrupt(clean, "labels")
    first = int((clean.tokens != corrupted.tokens).any(0).nonzero()[0, 0])
    query, gold = clean.column("query_pos"), clean.column("token")
    every = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    some = every[:: len(every) // sample]

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, query].log_softmax(-1).gather(1, gold[:, None]).mean()

    def cached(tokens: torch.Tensor) -> Any:
        return model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_z"))[1]

    def their_patches() -> tuple[float, torch.Tensor]:
        once, (cache, before) = timed(lambda: (cached(clean.tokens), metric(model(corrupted.tokens))))
        options: Any = {"index_axis_names": None, "index_df": pd.DataFrame(some, columns=["layer", "head"])}
        run = patching.get_act_patch_attn_head_out_all_pos
        each, values = timed(lambda: run(model, corrupted.tokens, cache, metric, **options))
        return once + each * len(every) / len(some), values - before

    def their_ablations() -> tuple[float, torch.Tensor]:
        group = groups_of(clean)[0]

        def prepare() -> tuple[list[torch.Tensor], torch.Tensor]:
            means, cache = [], cached(clean.tokens)
            for layer in range(LAYERS):
                z = cache["z", layer][0]
                sums = z.new_zeros(int(group.max()) + 1, *z.shape[1:]).index_add(0, group, z)
                means.append((sums / group.bincount()[:, None, None])[group])
            return means, metric(model(clean.tokens))

        def ablated(layer: int, head: int, means: list[torch.Tensor]) -> torch.Tensor:
            def replace(z: torch.Tensor, **_: Any) -> torch.Tensor:
                z[0, :, head] = means[layer][:, head]
                return z

            return metric(model.run_with_hooks(clean.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", replace)]))

        once, (means, before) = timed(prepare)
        each, values = timed(lambda: torch.stack([ablated(*head, means) for head in some]))
        return once + each * len(every) / len(some), values - before

    def contestants(ours: Callable[[float | None], Table], theirs: Contestant) -> dict[str, Contestant]:
        """Screened sweeps, a full one, and TransformerLens's."""

        def run(share: float | None) -> tuple[float, torch.Tensor]:
            seconds, table = timed(lambda: ours(share))
            if share is not None:
                return seconds, torch.empty(0)
            effect = table.where(kind="all", metric="log_prob").frame.set_index(["layer", "head"])["value"]
            return seconds, torch.tensor(effect.loc[some].to_numpy())

        screened = {f"screened, {share:.0%}": partial(run, share) for share in (0.1, SHARE)}
        return {**screened, "in full": partial(run, None), f"TransformerLens ({len(some)} of 64 heads)": theirs}

    pair = ac.Pair(clean, corrupted)
    sweeps = {
        f"patches, all but the first {first} of {clean.mask.shape[1]} tokens": contestants(
            lambda share: ac.patch_heads(model, pair, screen=share), their_patches
        ),
        "mean ablations": contestants(lambda share: ac.ablate_heads(model, clean, screen=share), their_ablations),
    }
    for sweep, runs in sweeps.items():
        with torch.no_grad():
            turns = in_turn(runs, rounds, lambda run: run())
        *_, full, theirs = (turn[-1][1] for turn in turns.values())
        apart = float((full - theirs).abs().max())
        assert apart < 1e-4, f"{sweep}: {apart} nats apart"
        times = {name: [spent for spent, _ in turn] for name, turn in turns.items()}
        compared = f"screened, {SHARE:.0%}"
        measured: dict[tuple[str, str], list[float]] = {}
        for name, spent in times.items():
            measured[name, "seconds"] = spent
            if name != compared:
                measured[name, f"times {compared}"] = ratios(spent, times[compared])
        yield from rows_of(sweep, measured)


def ranks(table: Table) -> torch.Tensor:
    """Returns for each of the best heads the share of all heads that the estimate ranks before it.

    Args:
        table: Two rows a head: its estimate, and its effect.
    """
    both = table.frame.pivot(index=["layer", "head"], columns="made", values="value").abs()
    rank = (both["estimate"].rank(ascending=False, method="first") - 1) / len(both)
    best = both["exact"][both["exact"] >= LEAST].nlargest(BEST)
    return torch.tensor(rank[best.index].to_numpy())


def best_heads(model: Any, clean: ac.Prompts, corrupted: ac.Prompts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the ranks that estimates give the best heads, for each kind of sweep."""
    pairs: dict[str, ac.Pair] = {
        f"patches, {direction}": ac.Pair(clean, corrupted, "log_prob", "all", direction)
        for direction in ("denoise", "noise")
    }
    for sweep, pair in pairs.items():
        found = {"exact": ac.patch_heads(model, pair), "estimate": ac.attribute_heads(model, pair, method="atp_star")}
        yield sweep, ranks(Table.concat({name: _heads(table) for name, table in found.items()}, "made"))
    exact = ac.ablate_heads(model, clean, metrics=("log_prob",))
    # One head is ablated: that of the largest estimate, whose effect then stands first.
    least = ac.ablate_heads(model, clean, metrics=("log_prob",), screen=1e-6)
    frame = least.frame.assign(value=least.frame["value"].where(least.frame["estimated"], float("inf")))
    found = {"exact": exact, "estimate": Table(frame.drop(columns="estimated"), least.provenance)}
    yield "mean ablations", ranks(Table.concat({name: _heads(table) for name, table in found.items()}, "made"))


def _heads(table: Table) -> Table:
    """The rows of all targets, with layer, head and value alone."""
    table = table.where(kind="all") if "kind" in table.keys else table
    return Table(table.frame[["layer", "head", "value", "low", "high", "n"]], table.provenance)


def misses(models: str, draws: Iterator[tuple[Any, ac.Prompts, ac.Prompts]]) -> Iterator[Row]:
    """Yields how often one of the best heads is missed on some models."""
    found: dict[str, list[torch.Tensor]] = {}
    for model, clean, corrupted in draws:
        for sweep, places in best_heads(model, clean, corrupted):
            found.setdefault(sweep, []).append(places)
            print(models, sweep, "ranks:", *(f"{place:.3f}" for place in places.tolist()), flush=True)
    for sweep, places in found.items():
        yield from show(chances(f"{models}: {sweep}", [each for each in places if len(each)]))


def chances(sweep: str, places: list[torch.Tensor]) -> Iterator[Row]:
    """Yields how often one of the best heads is missed, by share, with intervals over sweeps.

    Args:
        sweep: What was measured.
        places: For each sweep what `ranks` returns.
    """
    for share in SHARES:
        # `screen` rounds up: a head is run if fewer than the share are ranked before it.
        missed = [(each > share - 1e-9).double() for each in places]
        count = sum(bool(each.any()) for each in missed)
        ends = binomial_interval(count, len(missed))
        yield sweep, f"screened, {share:.0%}", "any of the best missed", count / len(missed), *ends, len(missed)
        means = np.array([[float(each.mean()) for each in missed]])
        weights = np.array([[float(len(each)) for each in missed]])
        low, high = proportion(means, weights)
        mean = float(weighted_mean(means, weights)[0])
        yield sweep, f"screened, {share:.0%}", "a best head missed", mean, float(low[0]), float(high[0]), len(missed)


def circuits(count: int) -> Iterator[tuple[Any, ac.Prompts, ac.Prompts]]:
    """Yields circuits of the zoo with prompts whose labels are corrupted."""
    for seed in range(count):
        model = zoo_circuit(seed).build()
        clean = model.task.sample(16, model.tokenizer, seed=seed, references=False)
        yield model, clean, model.task.corrupt(clean, "labels", seed=seed)


def prompts_of(name: str, seeds: int) -> Iterator[tuple[Any, ac.Prompts, ac.Prompts]]:
    """Yields a model that `load` takes with several sets of prompts."""
    model = ac.load(name)
    for seed in range(seeds):
        clean = REAL_TASK.sample(2, model.tokenizer, seed=seed, references=False)
        yield model, clean, REAL_TASK.corrupt(clean, "labels", seed=seed)


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5, out=True)
    parser.add_argument("--sample", type=int, default=8, help="heads that TransformerLens edits")
    parser.add_argument("--circuits", type=int, default=40)
    parser.add_argument("--models", default="", help="one or more, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="sets of prompts for each of these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [*speed(arguments.rounds, arguments.sample)] if arguments.rounds else []
    if arguments.circuits:
        rows += misses(f"{arguments.circuits} planted circuits", circuits(arguments.circuits))
    for name in filter(None, arguments.models.split(",")):
        rows += misses(f"{name}, {arguments.seeds} sets of prompts", prompts_of(name, arguments.seeds))
    keep(rows, arguments, width=WIDTH)
