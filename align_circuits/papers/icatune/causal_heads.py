"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): do the heads that tuning makes cause what it does?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from align_circuits.circuits.edge_patching import patch_paths
from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.localize_heads import localize
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Ablate, Clamp, Edit, Patch
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.heads import Head, describe, heads_of
from align_circuits.hooks.names import name_of
from align_circuits.papers.claims import Check, Experiment, Measured, difference_of, mean_of, over_seeds, share_of
from align_circuits.papers.icatune.fig_4_tuning import ICA, PAPER_ICA, SMOKE_ICA
from align_circuits.papers.icatune.tuned_models import FRESH, Arm, loaded, measure_tuned, task_of, tuned
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.evaluation import ALL_OFFSETS, evaluate
from align_circuits.run.forward_pass import capture
from align_circuits.tables.tables import VALUES, Provenance, Table
from align_circuits.tasks.automaton import NONE
from align_circuits.tasks.grammar import in_support

ROLES = ("align_query", "align_key", "lookup")
"""The roles that make the circuit of alignment and lookup."""

FEWEST = 8
"""The fewest prompts that `localize` takes."""

DECIDED = 0.5
"""By how much one of two alignments must be more accurate than the other."""


@dataclass(frozen=True)
class Causal:
    """Which tunings are taken apart."""

    arm: Arm = ICA
    twofold: Arm = field(default_factory=lambda: replace(ICA, name="m = 4", task={**ICA.task, "x_len": 4}))
    """Tunings on inputs of length 4, where two alignments explain the examples equally well."""
    n: int = 64


def causes(*, prompts: int, **run: Any) -> pd.DataFrame:
    """Ablates, clamps and patches the heads that tuning made; the function of a cell.

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
    seed, generator = FRESH + run["seed"], np.random.default_rng(run["seed"])
    before, after, task = loaded(run["model"]), tuned(**run).model, task_of(run["task"], run["seed"])
    drawn = task.sample(prompts, after.tokenizer, seed)
    heads: dict[str, Sequence[Head]] = {}
    rows: list[dict[str, Any]] = []
    for part, model in (("before", before), ("after", after)):
        found = localize(model, task, max(prompts, FEWEST), seed=seed + 1, draws=0)
        for role in ROLES:
            heads[role] = found.heads(role)
            count = len(heads[role])
            said = {"done": part, "metric": f"named {role}", "heads": describe(heads[role]) or "nobody"}
            rows.append({**said, "value": count, "low": count, "high": count, "n": prompts})
    heads = {role: named or _best(after, drawn, role) for role, named in heads.items()}
    aligners = sorted({*heads["align_query"], *heads["align_key"]})
    both = sorted({*aligners, *heads["lookup"]})

    def measure(done: str, model: Any, edits: Sequence[Edit] = (), some: Sequence[Head] = ()) -> None:
        rows.append({"done": done, "metric": "first", "heads": describe(some) or "-", **_first(model, drawn, edits)})

    measure("before", before)
    measure("after", after)
    rows.append(
        {"done": "history ceiling", "metric": "first", "heads": "-", **_first(before, drawn, predictor="history")}
    )
    other = task.sample(prompts, after.tokenizer, seed + 2)
    highest = max(layer for layer, _ in heads["lookup"])
    for part, model in (("before", before), ("after", after)):
        for name, senders in (("", aligners), (", control", _others(after, aligners, generator, below=highest))):
            found = _paths(model, drawn, other, senders, heads["lookup"])
            rows += [{"done": f"{part}: through {side}{name}", "metric": "path", **row} for side, row in found.items()]
    held = ablation_baseline(after, drawn, "mean")
    said = capture(after, drawn, [name_of("z", layer) for layer in range(after.cfg.n_layers)])
    for control in (False, True):
        others = {role: _others(after, some, generator) for role, some in heads.items()}
        clamped = others if control else heads
        for name, roles, some in (("aligners", ROLES[:2], aligners), ("aligners and lookup heads", ROLES, both)):
            chosen = _others(after, some, generator) if control else some
            what = f"{name}, control" if control else name
            measure(f"ablated: {what}", after, [Ablate(chosen, how="mean", reference=held)], chosen)
            measure(f"patched: {what}", before, [Patch(chosen, values=said)], chosen)
            at = sorted({head for role in roles for head in clamped[role]})
            measure(f"clamped: {what}", before, [Clamp(clamped[role], role) for role in roles], at)
    return pd.DataFrame(rows)


def _paths(
    model: Any, prompts: Prompts, other: Prompts, senders: Sequence[Head], receivers: Sequence[Head]
) -> dict[str, dict[str, Any]]:
    """What senders do through the queries and through the keys of receivers, in nats of the gold first token.

    Each sender says to one receiver what it says on other prompts, written by other automata on other symbols; below
    zero, the path is needed. The value is the sum over all pairs in which the receiver comes later, 0 where none does;
    its ends are those of the pairs added up, so the interval is wide rather than narrow.
    """
    graph = Graph.of(model.cfg)
    found: dict[str, dict[str, Any]] = {}
    for side, site in (("queries", "q"), ("keys", "k")):
        names = sorted(
            {
                read.name
                for read in graph.receivers
                for layer, head in receivers
                if (read.site, read.layer) == (site, layer) and head // read.shared == read.head
            }
        )
        later = [layer for layer, _ in receivers if any(layer > lower for lower, _ in senders)]
        about = {"heads": f"{describe(senders) or 'nobody'} to {' '.join(names)}", "n": len(prompts)}
        effect = np.zeros(len(VALUES) - 1)
        if later:
            table = patch_paths(
                model,
                clean=prompts,
                corrupted=replace(other, targets=prompts.targets),
                kind="first",
                senders=[describe([head]) for head in senders],
                receivers=names,
            )
            effect = table.frame[["value", "low", "high"]].to_numpy().sum(0)
        found[side] = {**about, **dict(zip(("value", "low", "high"), effect.tolist(), strict=True))}
    return found


def _first(model: Any, prompts: Prompts, edits: Sequence[Edit] = (), predictor: str = "model") -> dict[str, float]:
    """First-token accuracy, with its interval."""
    table = evaluate(model, prompts, edits=edits).where(metric="accuracy", kind="first", offset=ALL_OFFSETS)
    row = table.where(predictor=predictor).frame.iloc[0]
    return {name: float(row[name]) for name in VALUES}


def _best(model: Any, prompts: Prompts, role: str) -> list[Head]:
    best = score_heads(model, prompts, [role]).top(role, 1).frame.iloc[0]
    return [(int(best["layer"]), int(best["head"]))]


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
    """Tells which of two alignments a model tuned at m = 4 learned; the function of a cell.

    With parts of two symbols, the identity and the alignment that swaps neighbours, with the automata of the symbols of
    a part swapped, explain all inputs of the grammar equally well. They part where the test input is no input of the
    grammar: the letter that phrase p begins with is that of x_p, or that of the partner of p's neighbour in the input.

    Args:
        prompts: How many, all with test inputs out of the grammar.
        **run: As for `tuned`.

    Returns:
        By `part` (before, after) and `alignment` (monotonic, swapped): first-token accuracy, and the best head's score.
    """
    after, task = tuned(**run).model, replace(task_of(run["task"], run["seed"]), ood=True)
    drawn = task.sample(2 * prompts, after.tokenizer, FRESH + run["seed"])
    drawn = drawn[~in_support(drawn.latent["order"][:, -1])]
    frames = []
    for part, model in (("before", loaded(run["model"])), ("after", after)):
        for alignment, asked in (("monotonic", drawn), ("swapped", _swapped(drawn))):
            about = {"part": part, "alignment": alignment}
            frames.append(pd.DataFrame([{**about, "metric": "first", "layer": -1, **_first(model, asked)}]))
            best: Any = score_heads(model, asked, ["align_query"]).top("align_query", 1).frame
            frames.append(best.drop(columns="head").assign(**about))
    return pd.concat(frames, ignore_index=True)


def _swapped(prompts: Prompts) -> Prompts:
    """The same prompts with the gold of the other alignment, as far as first tokens go."""
    order, first = prompts.latent["order"][:, -1], prompts.latent["letter"][:, :, 0].long()
    partner = order[:, [1, 0, 3, 2]] ^ 1  # [prompt phrase]
    letters = first.gather(1, partner[..., None].expand(-1, -1, first.shape[2]))
    accepted = torch.zeros(*partner.shape, len(prompts.answer_tokens) + 1, dtype=torch.bool)
    accepted = accepted.scatter_(2, letters.where(letters != NONE, accepted.shape[2] - 1), True)[..., :-1]
    assert prompts.correct is not None
    whole = prompts.correct.clone()
    whole[prompts.column("offset") == 0] = accepted.flatten(0, 1)
    gold = prompts.relations["align_query"]
    relations = {**prompts.relations, "align_query": replace(gold, key_value=gold.key_value ^ 1)}
    return replace(prompts, correct=whole, relations=relations)


def _run(config: Causal, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    common: dict[str, Any] = {"jobs": jobs, "folder": folder, "module": __name__, "prompts": config.n}
    done, about = measure_tuned("causes", models[0], [config.arm], **common)
    two, _ = measure_tuned("twofold", models[0], [config.twofold], **common)
    two = two.assign(done=two["part"] + ": " + two["alignment"], heads="-")
    columns = ["arm", "seed", "done", "metric", "heads", *VALUES]
    frame: Any = pd.concat([done[columns], two[columns]], ignore_index=True)
    return Table(frame, Provenance("measure", {"n": config.n}, model=about))


def _check(table: Table) -> list[Check]:
    def done(name: str) -> Table:
        return table.where(done=name, metric="first")

    def against(name: str, base: str) -> Measured:
        return difference_of(done(name), done(base))

    def named(part: str, role: str) -> Measured:
        return share_of(table.where(done=part, metric=f"named {role}").frame["value"].to_numpy() > 0)

    def explained(name: str) -> Measured:
        right = {
            done: table.where(done=done, metric="first").frame.set_index("seed")["value"]
            for done in ("before", "after", name)
        }
        gain = right["after"] - right["before"]
        share = (right[name] - right["before"]) / gain
        return over_seeds(share.where(gain != 0, 0.0).to_numpy(float))  # where nothing is gained, nothing is explained

    both = "aligners and lookup heads"
    checks = [
        *(
            Check(
                claim=f"localize names {role} heads (share of seeds)",
                measured=named("after", role),
                relation=">=",
                threshold=0.8,
                control=named("before", role),
                control_is="before tuning",
            )
            for role in ROLES
        ),
        Check(
            claim="Without its aligners the first token falls to the history ceiling (difference)",
            measured=against("ablated: aligners", "history ceiling"),
            relation="<=",
            threshold=0.0,
            control=against("ablated: aligners, control", "history ceiling"),
            control_is="as many other heads ablated",
        ),
        Check(
            claim="What the tuned aligners and lookup heads say lifts the untuned model (first token, gain)",
            measured=against(f"patched: {both}", "before"),
            relation=">=",
            threshold=0.2,
            control=against(f"patched: {both}, control", "before"),
            control_is="as many other heads patched",
        ),
        Check(
            claim="Clamping the untuned model's heads onto gold lifts it: attention alone (first token, gain)",
            measured=against(f"clamped: {both}", "before"),
            relation=">=",
            threshold=0.2,
            control=against(f"clamped: {both}, control", "before"),
            control_is="as many other heads clamped",
        ),
        Check(
            claim="Attention alone explains most of what tuning does to the first token (share of the gain)",
            measured=explained(f"clamped: {both}"),
            relation=">=",
            threshold=0.5,
            control=explained(f"clamped: {both}, control"),
            control_is="as many other heads clamped",
        ),
    ]
    paths = [
        Check(
            claim=f"Lookup uses alignment through its {side} (nats of the gold first token without that path)",
            measured=mean_of(table.where(done=f"after: through {side}")),
            relation="<=",
            threshold=-0.1,
            control=mean_of(table.where(done=f"after: through {side}, control")),
            control_is="as many other heads in place of the aligners",
        )
        for side in ("queries", "keys")
    ]
    return [*checks, *paths, *_twofold_checks(table)]


def _twofold_checks(table: Table) -> list[Check]:
    def apart(part: str, metric: str) -> Any:
        """By how much the monotonic alignment is ahead, seed by seed."""
        monotonic, swapped = (
            table.where(done=f"{part}: {name}", metric=metric).frame.set_index("seed")["value"]
            for name in ("monotonic", "swapped")
        )
        return (monotonic - swapped).to_numpy()

    def decided(part: str) -> Measured:
        return share_of(np.abs(apart(part, "first")) >= DECIDED)

    def agree(part: str) -> Measured:
        return share_of(
            (apart(part, "first") * apart(part, "align_query") > 0) & (np.abs(apart(part, "first")) >= DECIDED)
        )

    return [
        Check(
            claim=f"m = 4: each seed settles on one of two alignments (accuracies OOD at least {DECIDED:g} apart)",
            measured=decided("after"),
            relation=">=",
            threshold=0.8,
            control=decided("before"),
            control_is="before tuning",
        ),
        Check(
            claim="m = 4: the heads tell which (share of seeds in which the better aligner agrees)",
            measured=agree("after"),
            relation=">=",
            threshold=0.8,
            control=agree("before"),
            control_is="before tuning",
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


CAUSAL = Experiment(
    name="icatune/causal",
    title="Are the heads that tuning makes the cause of what it does?",
    source="beyond Agarwal and Sarawagi (2025)",
    scales={
        "smoke": Causal(
            replace(SMOKE_ICA, seeds=(0,)),
            replace(SMOKE_ICA, name="m = 4", task={**SMOKE_ICA.task, "x_len": 4}, seeds=(0,)),
            n=8,
        ),
        "cpu": Causal(),
        "paper": Causal(PAPER_ICA, replace(PAPER_ICA, name="m = 4", task={**PAPER_ICA.task, "x_len": 4})),
    },
    run=_run,
    draw=_draw,
    check=_check,
)
