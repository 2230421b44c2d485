"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): do the heads that tuning makes cause what it does?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.circuits.edge_patching import patch_paths
from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.localize_heads import localize
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Ablate, Clamp, Edit, Patch
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.heads import Head, describe, heads_of
from align_circuits.hooks.names import name_of
from align_circuits.papers.claims import Check, Claim, Measured, both, difference_of, mean_of, over_seeds, share_of
from align_circuits.papers.icatune.tuned_models import (
    ICA,
    PAPER_ICA,
    SMOKE_ICA,
    Arm,
    Tunings,
    before_and_after,
    best_head,
    of_tuned,
    tuned_study,
)
from align_circuits.papers.study import Experiment, Inputs, Measurement, Rows
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.evaluation import evaluate
from align_circuits.run.forward_pass import capture
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import VALUES, Table
from align_circuits.tasks.automaton import NONE
from align_circuits.tasks.grammar import in_support

CIRCUIT = ("align_query", "align_key", "lookup")
"""The roles that make the circuit of alignment and lookup."""

FEWEST = 8
"""The fewest prompts that `localize` takes."""

DECIDED = 0.5
"""By how much one of two alignments must be more accurate than the other."""


def causes(*, prompts: int, **run: Any) -> pd.DataFrame:
    """Ablates, clamps and patches the heads that tuning made; the function of a job.

    The heads are those that `localize` names in the tuned model; of a role for which it names none, the head with the
    highest score. Controls take as many other heads of the same layers, from anywhere where there are too few; for
    paths, from below the highest lookup head, since from above there is no path.

    Args:
        prompts: How many for each measurement.
        **run: As for `tuned`.

    Returns:
        First-token accuracy by what was done (`done`), beside the history ceiling; for each role the number of heads
        that `localize` names before and after, with their names; and what aligners do through the queries and the keys
        of lookup heads (`_paths`), before and after.
    """
    models, task, seed = before_and_after(**run)
    before, after = models.values()
    generator = np.random.default_rng(run["seed"])
    drawn, other = (task.sample(prompts, after.tokenizer, seed + shift) for shift in (0, 2))
    rows: list[dict[str, Any]] = []

    def add(done: str, metric: str, values: Mapping[str, Any], of: str = "-") -> None:
        rows.append({"done": done, "metric": metric, "heads": of, **values})

    heads: dict[str, Sequence[Head]] = {}
    for part, model in models.items():
        localization = localize(model, task, max(prompts, FEWEST), seed=seed + 1, draws=0)
        heads = {role: localization.heads(role) for role in CIRCUIT}
        for role, named in heads.items():
            count = dict.fromkeys(("value", "low", "high"), len(named))
            add(part, f"named {role}", {**count, "n": prompts}, describe(named) or "none")
    heads = {role: named or [best_head(score_heads(after, drawn, [role]), role)] for role, named in heads.items()}
    aligners = _joined(heads, CIRCUIT[:2])
    for part, model in models.items():
        add(part, "first", _first(model, drawn))
    add("history ceiling", "first", _first(before, drawn, predictor="history"))
    highest = max(layer for layer, _ in heads["lookup"])
    for part, model in models.items():
        for name, senders in (("", aligners), (", control", _others(after, aligners, generator, below=highest))):
            for side, effect in _paths(model, drawn, other, senders, heads["lookup"]).items():
                add(f"{part}: through {side}{name}", "path", *effect)
    baseline = ablation_baseline(after, drawn, "mean")
    outputs = capture(after, drawn, [name_of("z", layer) for layer in range(after.cfg.n_layers)])
    for control in ("", ", control"):
        # Drawn in both rounds, though only the second needs it: the draws below go on from here.
        others = {role: _others(after, of_role, generator) for role, of_role in heads.items()}
        by_role = others if control else heads
        for name, roles in (("aligners", CIRCUIT[:2]), ("aligners and lookup heads", CIRCUIT)):
            group = _joined(heads, roles)
            chosen = _others(after, group, generator) if control else group
            clamps = [Clamp(by_role[role], role) for role in roles]
            edits: dict[str, tuple[Any, Sequence[Edit], Sequence[Head]]] = {
                "ablated": (after, [Ablate(chosen, how="mean", reference=baseline)], chosen),
                "patched": (before, [Patch(chosen, values=outputs)], chosen),
                "clamped": (before, clamps, _joined(by_role, roles)),
            }
            for edit, (model, parts, edited) in edits.items():
                add(f"{edit}: {name}{control}", "first", _first(model, drawn, parts), describe(edited) or "-")
    return pd.DataFrame(rows)


def _joined(heads: Mapping[str, Sequence[Head]], roles: Sequence[str]) -> list[Head]:
    return sorted({head for role in roles for head in heads[role]})


def _paths(
    model: Any, prompts: Prompts, other: Prompts, senders: Sequence[Head], receivers: Sequence[Head]
) -> dict[str, tuple[dict[str, float], str]]:
    """What senders do through the queries and through the keys of receivers, in nats of the target's first token.

    Each sender passes to one receiver its output on other prompts, written by other automata on other symbols; below
    zero, the path is needed. The value is the sum over all pairs in which the receiver comes later, 0 where none does;
    its ends are those of the pairs added up, so the interval is wide rather than narrow.
    """
    pair = Pair(prompts, replace(other, targets=prompts.targets), kind="first", direction="noise")
    columns, effects = ["value", "low", "high"], {}
    for side, site in (("queries", "q"), ("keys", "k")):
        names = sorted(
            read.name
            for read in Graph.of(model.cfg).receivers
            if read.site == site
            and (read.layer, read.head) in {(layer, head // read.shared) for layer, head in receivers}
        )
        effect = dict.fromkeys(columns, 0.0)
        if any(layer > lower for layer, _ in receivers for lower, _ in senders):
            table = patch_paths(model, pair, senders=[describe([head]) for head in senders], receivers=names)
            effect = dict(zip(columns, table.frame[columns].to_numpy().sum(0).tolist(), strict=True))
        effects[side] = {**effect, "n": len(prompts)}, f"{describe(senders) or 'none'} to {' '.join(names)}"
    return effects


def _first(model: Any, prompts: Prompts, edits: Sequence[Edit] = (), predictor: str = "model") -> dict[str, float]:
    """First-token accuracy, with its interval."""
    table = evaluate(model, prompts, edits=edits).where(metric="accuracy", kind="first", offset=None)
    row = table.where(predictor=predictor).frame.iloc[0]
    return {name: float(row[name]) for name in VALUES}


def _others(model: Any, heads: Sequence[Head], generator: np.random.Generator, below: int | None = None) -> list[Head]:
    """As many heads of each layer that are not among `heads`; where it has too few, from anywhere, or below a layer."""
    rest = [head for head in heads_of(model.cfg) if head not in heads and (below is None or head[0] < below)]
    rest = [rest[at] for at in generator.permutation(len(rest))]
    drawn: list[Head] = []
    for layer, _ in heads:
        free = [head for head in rest if head not in drawn]
        drawn += ([head for head in free if head[0] == layer] or free)[:1]
    return drawn


def twofold(*, prompts: int, **run: Any) -> pd.DataFrame:
    """Tells which of two alignments a model tuned at m = 4 learned; the function of a job.

    With parts of two symbols, the identity and the alignment that swaps neighbours, with the automata of the symbols of
    a part swapped, explain all inputs of the grammar equally well. They part where the test input is no input of the
    grammar: the letter that phrase p begins with is that of x_p, or that of the partner of p's neighbour in the input.

    Args:
        prompts: How many, all with test inputs out of the grammar.
        **run: As for `tuned`.

    Returns:
        By `done`, the part (before, after) and the alignment (monotonic, swapped): first-token accuracy, and the best
        head's score.
    """
    models, task, seed = before_and_after(**run)
    drawn = replace(task, ood=True).sample(2 * prompts, models["after"].tokenizer, seed)
    drawn = drawn[~in_support(drawn.latent["order"][:, -1])]
    frames = []
    for part, model in models.items():
        for alignment, prompts_of in (("monotonic", drawn), ("swapped", _swapped(drawn))):
            first = pd.DataFrame([{"metric": "first", **_first(model, prompts_of)}])
            best = score_heads(model, prompts_of, ["align_query"]).top("align_query", 1).frame
            measured = pd.concat([first, best[["metric", *VALUES]]])
            frames.append(measured.assign(done=f"{part}: {alignment}", heads="-"))
    return pd.concat(frames, ignore_index=True)


def _swapped(prompts: Prompts) -> Prompts:
    """The same prompts with the targets of the other alignment, as far as first tokens go."""
    order, first = prompts.latent["order"][:, -1], prompts.latent["letter"][:, :, 0].long()
    partner = order[:, [1, 0, 3, 2]] ^ 1  # [prompt phrase]
    letters = first.gather(1, partner[..., None].expand(-1, -1, first.shape[2]))
    accepted = torch.zeros(*partner.shape, len(prompts.answer_tokens) + 1, dtype=torch.bool)
    accepted = accepted.scatter_(2, letters.where(letters != NONE, accepted.shape[2] - 1), True)[..., :-1]
    assert prompts.correct is not None
    correct = prompts.correct.clone()
    correct[prompts.column("offset") == 0] = accepted.flatten(0, 1)
    labels = prompts.relations["align_query"]
    relations = {**prompts.relations, "align_query": replace(labels, key_value=labels.key_value ^ 1)}
    return replace(prompts, correct=correct, relations=relations)


def _jobs(config: Tunings, inputs: Inputs) -> list[Measurement]:
    """The first arm is taken apart; in the second two alignments explain the examples equally well."""
    return [
        each
        for function, arm in zip((causes, twofold), config.arms, strict=True)
        for each in of_tuned(function, [arm], inputs, prompts=config.n)
    ]


def _summarize(_: Tunings, rows: Rows) -> pd.DataFrame:
    return pd.concat([rows["causes"], rows["twofold"]]).loc[:, ["arm", "seed", "done", "metric", "heads", *VALUES]]


def _by_seed(table: Table, metric: str) -> pd.DataFrame:
    """A metric with seeds down, and what was done across."""
    return table.where(metric=metric).frame.pivot(index="seed", columns="done", values="value")


def _check(table: Table) -> list[Check]:
    first, heads = _by_seed(table, "first"), "aligners and lookup heads"

    def with_control(statistic: Callable[[str], Measured], name: str) -> tuple[Measured, Measured]:
        return both(statistic, name, f"{name}, control")

    def named(part: str, role: str) -> Measured:
        return share_of(_by_seed(table, f"named {role}")[part].to_numpy() > 0)

    def above(base: str) -> Callable[[str], Measured]:
        return lambda name: difference_of(*(table.where(done=done, metric="first") for done in (name, base)))

    def explained(name: str) -> Measured:
        gain = first["after"] - first["before"]
        share = (first[name] - first["before"]) / gain
        return over_seeds(share.where(gain != 0, 0.0).to_numpy(float))  # where nothing is gained, nothing is explained

    return [
        *(
            Claim(f"localize names {role} heads (share of seeds)").at_least(
                0.8, named("after", role), named("before", role), "before tuning"
            )
            for role in CIRCUIT
        ),
        Claim("Without its aligners the first token falls to the history ceiling (difference)").at_most(
            0.0, *with_control(above("history ceiling"), "ablated: aligners"), "as many other heads ablated"
        ),
        Claim("What the tuned aligners and lookup heads say lifts the untuned model (first token, gain)").at_least(
            0.2, *with_control(above("before"), f"patched: {heads}"), "as many other heads patched"
        ),
        Claim("Clamping the untuned model's heads onto gold lifts it: attention alone (first token, gain)").at_least(
            0.2, *with_control(above("before"), f"clamped: {heads}"), "as many other heads clamped"
        ),
        Claim("Attention alone explains most of what tuning does to the first token (share of the gain)").at_least(
            0.5, *with_control(explained, f"clamped: {heads}"), "as many other heads clamped"
        ),
        *(
            Claim(f"Lookup uses alignment through its {side} (nats of the gold first token without that path)").at_most(
                -0.1,
                *with_control(lambda name: mean_of(table.where(done=name)), f"after: through {side}"),
                "as many other heads in place of the aligners",
            )
            for side in ("queries", "keys")
        ),
        *_twofold_checks(table),
    ]


def _twofold_checks(table: Table) -> list[Check]:
    first, aligned = _by_seed(table, "first"), _by_seed(table, "align_query")

    def ahead(wide: pd.DataFrame, part: str) -> Float[ndarray, " seed"]:
        """By how much the monotonic alignment is ahead."""
        return (wide[f"{part}: monotonic"] - wide[f"{part}: swapped"]).to_numpy()

    def decided(part: str) -> Bool[ndarray, " seed"]:
        return np.abs(ahead(first, part)) >= DECIDED

    def agree(part: str) -> Measured:
        return share_of(decided(part) & (ahead(first, part) * ahead(aligned, part) > 0))

    return [
        Claim(
            f"m = 4: each seed settles on one of two alignments (accuracies OOD at least {DECIDED:g} apart)"
        ).at_least(0.8, share_of(decided("after")), share_of(decided("before")), "before tuning"),
        Claim("m = 4: the heads tell which (share of seeds in which the better aligner agrees)").at_least(
            0.8, agree("after"), agree("before"), "before tuning"
        ),
    ]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    rows: Any = table.frame
    rows = rows.assign(seed="seed " + rows["seed"].astype(str))
    first, two = rows["metric"] == "first", rows["done"].str.endswith(("monotonic", "swapped"))
    panels = {"m = 5": first & ~two, "m = 4, OOD": first & two, "paths": rows["metric"] == "path"}
    return {
        name: plots.dots(rows[mask], "done", "seed", "effect (nats)" if name == "paths" else "first token (accuracy)")
        for name, mask in panels.items()
    }


def _with_twofold(arm: Arm, **size: int) -> Tunings:
    return Tunings((arm, replace(arm, name="m = 4", task={**arm.task, "x_len": 4})), **size)


CAUSAL = Experiment(
    "icatune/causal",
    "Are the heads that tuning makes the cause of what it does?",
    "beyond Agarwal and Sarawagi (2025)",
    replace(
        tuned_study(
            "icatune/causal",
            _summarize,
            smoke=_with_twofold(replace(SMOKE_ICA, seeds=(0,)), n=8),
            cpu=_with_twofold(ICA),
            paper=_with_twofold(PAPER_ICA),
        ),
        jobs=_jobs,
    ),
    _draw,
    _check,
)
