"""Abrupt learning (Reddy, 2024): the four operations of an induction head, Fig. 5, and what happens without them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.edits import Patch
from align_circuits.hooks.names import HeadSite, name_of
from align_circuits.papers.abrupt.ensemble_runs import (
    CPU,
    PAPER,
    SMOKE,
    Size,
    Sweep,
    at_end,
    by_seed,
    curves_only,
    mean_curves,
    train_sweep,
    transitions,
)
from align_circuits.papers.abrupt.exemplar_task import Exemplars
from align_circuits.papers.abrupt.figs_1_3_4_network import NAMES, SOURCE, on
from align_circuits.papers.abrupt.overrides import (
    OPERATIONS,
    Hold,
    Hook,
    Operation,
    clamped_to_label,
    clamped_to_previous,
)
from align_circuits.papers.claims import Check, Experiment, Measured, Scale, controlled, measured, over_seeds, share_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table

NOTHING = "nothing"


@dataclass(frozen=True)
class Carrier:
    """One of the four operations, and the activation that carries it."""

    said: str
    site: HeadSite
    layer: int
    tokens: str
    """At which tokens: labels, items, or the target."""
    others: str
    """At which tokens the same activation should not matter: the control."""


CARRIERS: dict[Operation, Carrier] = {
    "look back": Carrier("(i) labels attend to the item before", "pattern", 0, "labels", "items"),
    "write": Carrier("(ii) the item's content is written to its label", "v", 0, "items", "labels"),
    "match": Carrier("(iii) the target matches what was written", "q", 1, "target", "items"),
    "read": Carrier("(iv) the label's content is written to the target", "v", 1, "labels", "items"),
}

GIVEN: dict[Operation, tuple[Callable[[Any], Hold], Callable[[Any], Hold]]] = {
    "look back": (partial(clamped_to_previous, tokens="labels"), partial(clamped_to_previous, tokens="items")),
    "match": (clamped_to_label, partial(clamped_to_label, right=False)),
}
"""Attention has a gold to be clamped to, and a place beside it; what a matrix writes has none."""


def accuracy_under(net: Any, batch: Exemplars, hooks: Sequence[Hook] = ()) -> float:
    """Returns the accuracy of one member under hooks."""
    with torch.no_grad():
        logits = net.run_with_hooks(batch.inputs, fwd_hooks=list(hooks))
    return (logits.argmax(-1) == batch.label).float().mean().item()


def replaced(
    net: Any, inputs: Float[Tensor, "member prompt pos d_in"], carrier: Carrier, tokens: str, how: str
) -> Patch:
    """Returns the patch that puts another activation in.

    Args:
        net: One member.
        inputs: Its sequences.
        carrier: Which activation.
        tokens: Where: `"labels"`, `"items"` (without the target) or `"target"`.
        how: `"patched"`: that of another sequence, the next one. `"ablated"`: the mean over sequences; of attention,
            which sequences share but for their content, even attention.
    """
    name = name_of(carrier.site, carrier.layer)
    with torch.no_grad():
        _, cache = net.run_with_cache(inputs)
    values: Tensor = cache[name]
    if how == "patched":
        values = values.roll(1, 0)
    elif carrier.site == "pattern":
        even = torch.ones_like(values).tril()
        values = even / even.sum(-1, keepdim=True)
    else:
        values = values.mean(0, keepdim=True).expand_as(values)
    positions = _positions(values.shape[0], inputs.shape[-2], tokens).to(inputs.device)
    return Patch(heads=[(carrier.layer, 0)], site=carrier.site, positions=positions, values={name: values})


def _positions(prompts: int, length: int, tokens: str) -> Bool[Tensor, "prompt pos"]:
    pos = torch.arange(length)
    target = pos == length - 1
    chosen = {"labels": pos % 2 == 1, "items": (pos % 2 == 0) & ~target, "target": target}[tokens]
    return chosen.expand(prompts, -1)


def _run_fig5(config: Sweep, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    table, (trained,) = train_sweep(config, folder)
    rows = []
    for seed in range(config.size.seeds):
        net, batch = trained.net.member(seed), trained.worlds.of(seed).batch(0, config.size.probe, "icl")
        rows += [
            {"operation": operation, "how": how, "at": at, "seed": seed, "value": accuracy_under(net, batch, hooks)}
            for operation, how, at, hooks in _changes(net, batch)
        ]
    frame = pd.DataFrame(rows).assign(measure="icl", low=np.nan, high=np.nan, n=config.size.probe)
    return replace(table, frame=frame)


def _changes(net: Any, batch: Exemplars) -> Iterator[tuple[str, str, str, Sequence[Hook]]]:
    """Each operation, how it is changed and where, and the hooks that do it; first, nothing."""
    yield NOTHING, NOTHING, NOTHING, ()
    for operation, carrier in CARRIERS.items():
        for at, tokens in (("operation", carrier.tokens), ("elsewhere", carrier.others)):
            for how in ("patched", "ablated"):
                yield operation, how, at, replaced(net, batch.inputs, carrier, tokens, how).fwd_hooks(net)
    for operation, holds in GIVEN.items():
        for at, hold in zip(("operation", "elsewhere"), holds, strict=True):
            yield operation, "clamped", at, hold(net)(batch)


def _loss_of(table: Table, operation: str, how: str, at: str = "operation") -> Float[ndarray, " seed"]:
    """How much accuracy each seed loses."""
    whole, left = (
        table.where(operation=name, how=what, at=where).frame.sort_values("seed")["value"].to_numpy()
        for name, what, where in ((NOTHING, NOTHING, NOTHING), (operation, how, at))
    )
    return whole - left


def _draw_fig5(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for at, said in (("operation", "where the operation is"), ("elsewhere", "the same elsewhere")):
        here: Any = table.where(at=at).frame
        rows = [
            {
                "operation": list(CARRIERS).index(operation) + 1,
                "how": how,
                **vars(over_seeds(found["value"].to_numpy())),
            }
            for (operation, how), found in here.groupby(["operation", "how"], sort=False)
        ]
        panels[said] = pd.DataFrame(rows).sort_values(["how", "operation"])
    return {
        "accuracy in context with one operation changed": plots.curves(
            panels, x="operation", by="how", label="operation (i) to (iv)"
        )
    }


def _check_fig5(table: Table) -> list[Check]:
    taken = [
        Check(
            f"Without it the answer is lost: {carrier.said} ({how}; accuracy lost)",
            relation=">=",
            threshold=0.4,
            **measured(_loss_of(table, operation, how)),
            **controlled(_loss_of(table, operation, how, "elsewhere"), f"the same activation at {carrier.others}"),
        )
        for operation, carrier in CARRIERS.items()
        for how in ("patched", "ablated")
        if (operation, how) != ("look back", "patched")
    ]
    positional = Check(
        "(i) goes by position: the attention of another sequence does as well (accuracy lost)",
        relation="<=",
        threshold=0.1,
        **measured(_loss_of(table, "look back", "patched")),
        **controlled(_loss_of(table, "look back", "ablated"), "even attention"),
    )
    given = Check(
        "(iii) is to attend to the right label: clamped to it the answer stays (accuracy lost)",
        relation="<=",
        threshold=0.05,
        **measured(_loss_of(table, "match", "clamped")),
        **controlled(_loss_of(table, "match", "clamped", "elsewhere"), "clamped to the other labels"),
    )
    back = Check(
        "(i) is to attend to the item before: clamped to it the answer stays (accuracy lost)",
        relation="<=",
        threshold=0.05,
        **measured(_loss_of(table, "look back", "clamped")),
        **controlled(_loss_of(table, "look back", "ablated"), "even attention"),
    )
    return [*taken, positional, back, given]


def _base(size: Size, n_classes: int) -> Size:
    return on(size, n_classes=n_classes, burst=1, noise=0.0, p_context=0.8)


def _fig5(size: Size, n_classes: int) -> Sweep:
    return Sweep(_base(size, n_classes), ({"p_context": 0.8},))


FIG5 = Experiment(
    name="abrupt/fig5",
    title="The four operations of an induction head, each patched, ablated and clamped",
    source=f"{SOURCE}, Fig. 5",
    scales={"smoke": _fig5(SMOKE, 16), "cpu": _fig5(CPU, 64), "paper": _fig5(PAPER, 256)},
    run=_run_fig5,
    draw=_draw_fig5,
    check=_check_fig5,
    makes_models=True,
    published="A drawing; here each operation is tested on trained networks.",
)


# Beyond the paper: the same operations held fixed while the network trains.


def _draw_held(table: Table) -> dict[str, go.Figure]:
    shown = {"icl": NAMES["icl"], "tila2": NAMES["tila2"], "tla2": NAMES["tla2"]}
    there = set(table.frame["clamp"].unique())
    panels = {clamp: mean_curves(table, shown, clamp=clamp) for clamp in there}
    return {
        title: plots.curves(
            {clamp: panels[clamp] for clamp in (NOTHING, *clamps)},
            x="step",
            by="measure",
            label="step",
            value="measure",
        )
        for title, clamps in FAMILIES.items()
        if there.issuperset(clamps)
    }


def brought_forward(table: Table, clamp: str) -> Float[ndarray, " seed"]:
    """Returns how much sooner the transition comes, as a share of its step; without one it counts at the end."""
    last = float(table.frame["step"].to_numpy().max())
    free, held = (np.nan_to_num(transitions(table, clamp=name), nan=last) for name in (NOTHING, clamp))
    return (free - held) / free


def _check_clamped(table: Table) -> list[Check]:
    items = controlled(brought_forward(table, "previous, items"), "only items clamped")
    return [
        Check(
            "Layer 1 clamped to the previous token from the start brings the transition forward (share of its step)",
            relation=">=",
            threshold=0.2,
            **measured(brought_forward(table, "previous")),
            **items,
        ),
        Check(
            "It is the labels' attention that matters (only labels clamped; share of its step)",
            relation=">=",
            threshold=0.2,
            **measured(brought_forward(table, "previous, labels")),
            **items,
        ),
        Check(
            "TLA2 is not needed (accuracy at the end while the target cannot prefer labels): H1 and H2 are excluded",
            relation=">=",
            threshold=0.9,
            **measured(at_end(table, "icl", clamp="labels")),
            **controlled(at_end(table, "tla2", clamp="labels"), "TLA2 there, which must stay low"),
        ),
        Check(
            "CLA need not be learned (accuracy at the end while labels outside the context are ruled out): H1 and H3 "
            "are excluded",
            relation=">=",
            threshold=0.9,
            **measured(at_end(table, "icl", clamp="context")),
            **controlled(by_seed(table, "icl", clamp="context").iloc[0].to_numpy(), "there before training"),
        ),
    ]


def _check_without(table: Table) -> list[Check]:
    free = at_end(table, "icl", clamp=NOTHING)

    def lost(operation: str, at: str = "") -> Float[ndarray, " seed"]:
        return free - at_end(table, "icl", clamp=f"no {operation}{at}")

    return [
        Check(
            f"Taken away from the start, nothing takes its place: {carrier.said} (accuracy lost at the end)",
            relation=">=",
            threshold=0.4,
            **measured(lost(operation)),
            **controlled(lost(operation, ", elsewhere"), "the same where the operation is not"),
        )
        for operation, carrier in CARRIERS.items()
    ]


HYPOTHESES = {
    "H1: CLA → TLA2 → ILA1 and TILA2": ("labels", "context"),
    "H2: TLA2 → ILA1 and TILA2": ("labels",),
    "H3: CLA → ILA1 and TILA2": ("context",),
}
"""What the paper considers as the cause of the transition, and the clamps under which the cause cannot act."""


def formed(table: Table, clamp: str) -> Bool[ndarray, " seed"]:
    """Returns in which seeds the head forms while something is held from the start.

    A seed makes the transition, and ends with ILA1 above one half and TILA2 above one half of TLA2, which bounds it.
    """
    back, right, labels = (at_end(table, measure, clamp=clamp) for measure in ("ila1", "tila2", "tla2"))
    return ~np.isnan(transitions(table, clamp=clamp)) & (back > 0.5) & (right > labels / 2)


def hypotheses(table: Table) -> pd.DataFrame:
    """Returns which of H1 to H3 the interventions exclude.

    A hypothesis is excluded if some cause that it names was held fixed from the start and the head formed in every seed
    all the same (`formed`). The bound on TILA2 was set after the kept results of `abrupt/clamped` were seen; the first,
    one half, cannot be reached while TLA2 is held. `abrupt/confirmed` asks again, on seeds that had no part in that.

    Args:
        table: Of `abrupt/clamped` or `abrupt/confirmed`.
    """
    rows = []
    for hypothesis, clamps in HYPOTHESES.items():
        for clamp in clamps:
            there = formed(table, clamp)
            rows.append(
                {
                    "hypothesis": hypothesis,
                    "held": {"labels": "TLA2", "context": "CLA"}[clamp],
                    "seeds in which the head forms": str(over_seeds(there.astype(float))),
                    "step": f"{over_seeds(transitions(table, clamp=clamp)):.0f}",
                    "step, nothing held": f"{over_seeds(transitions(table, clamp=NOTHING)):.0f}",
                    "excluded": "yes" if there.all() else "no",
                }
            )
    return pd.DataFrame(rows)


FAMILIES = {
    "given while training": ("previous", "previous, labels", "previous, items", "target's label"),
    "held while training": ("labels", "context"),
    "taken away while training": tuple(f"no {operation}" for operation in OPERATIONS),
    "the same elsewhere": tuple(f"no {operation}, elsewhere" for operation in OPERATIONS),
}
"""Which clamps a figure shows, beside nothing clamped."""


def _holding(size: Size, n_classes: int, clamps: Sequence[str]) -> Sweep:
    return Sweep(_base(size, n_classes), tuple({"clamp": clamp} for clamp in (NOTHING, *clamps)))


def _scales(*families: str) -> dict[Scale, Sweep]:
    clamps = [clamp for family in families for clamp in FAMILIES[family]]
    return {
        "smoke": _holding(SMOKE, 16, clamps),
        "cpu": _holding(replace(CPU, seeds=4, steps=2000), 64, clamps),
        "paper": _holding(PAPER, 256, clamps),
    }


CLAMPED = Experiment(
    name="abrupt/clamped",
    title="Operations and their suspected causes given or held while the network trains",
    source=f"beyond {SOURCE}: its hypotheses H1 to H3 by intervention",
    scales=_scales("given while training", "held while training"),
    run=curves_only,
    draw=_draw_held,
    check=_check_clamped,
    makes_models=True,
    published="Not in the paper, which holds beta_2 = 0 in the reduced model (Fig. 6 b) and sets L = N (Fig. 6 c).",
)

WITHOUT = Experiment(
    name="abrupt/without",
    title="Each operation taken away while the network trains",
    source=f"beyond {SOURCE}: Fig. 5 by intervention",
    scales=_scales("taken away while training", "the same elsewhere"),
    run=curves_only,
    draw=_draw_held,
    check=_check_without,
    makes_models=True,
    published="Not in the paper.",
)


# The same question once more, by a criterion that was fixed before the seeds were seen.

_ASKED = ("labels", "context", "no match")
"""TLA2 held, CLA held, and the control of the criterion: a network that cannot have the third operation."""


def _check_confirmed(table: Table) -> list[Check]:
    def share(clamp: str) -> Measured:
        return share_of(formed(table, clamp))

    without = {"control": share("no match"), "control_is": "the target cannot match"}
    return [
        Check(
            "With nothing held the head forms in every seed (share of seeds)",
            relation=">=",
            threshold=1.0,
            measured=share(NOTHING),
            **without,
        ),
        Check(
            "With TLA2 held the head forms in every seed: H1 and H2 are excluded (share of seeds)",
            relation=">=",
            threshold=1.0,
            measured=share("labels"),
            **without,
        ),
        Check(
            "With CLA held the head forms in no seed: H3 is not excluded (share of seeds)",
            relation="<=",
            threshold=0.0,
            measured=share("context"),
            control=share(NOTHING),
            control_is="nothing held",
        ),
    ]


def _draw_confirmed(table: Table) -> dict[str, go.Figure]:
    shown = {measure: NAMES[measure] for measure in ("icl", "ila1", "tila2", "tla2", "cla")}
    panels = {clamp: mean_curves(table, shown, clamp=clamp) for clamp in (NOTHING, *_ASKED)}
    return {"held from the start": plots.curves(panels, x="step", by="measure", label="step", value="measure")}


CONFIRMED = Experiment(
    name="abrupt/confirmed",
    title="TLA2 and CLA held, on fresh seeds and by a criterion fixed beforehand",
    source=f"beyond {SOURCE}: its hypotheses H1 to H3 by intervention",
    scales={
        "smoke": _holding(replace(SMOKE, first_seed=SMOKE.seeds), 16, _ASKED),
        "cpu": _holding(replace(CPU, first_seed=6), 64, _ASKED),
        "paper": _holding(replace(PAPER, first_seed=6), 256, _ASKED),
    },
    run=curves_only,
    draw=_draw_confirmed,
    check=_check_confirmed,
    makes_models=True,
    published="Not in the paper. What abrupt/clamped found, stated as claims before these seeds were trained.",
)
