"""Contextual recall (Vasudeva et al., 2026): Theorems 1 and 2 and their lemmas, printed and corrected."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from align_circuits.jobs import Job, run_jobs
from align_circuits.papers.claims import Check, Experiment, Measured
from align_circuits.papers.recall.attention_only import AttentionOnly
from align_circuits.papers.recall.constructions import Correction
from align_circuits.papers.recall.finetuning_theory import HEADS, Batches, Finetuning, Form, Update
from align_circuits.papers.recall.propositions import SOURCE, all_right
from align_circuits.papers.recall.world import RecallWorld
from align_circuits.report import plots
from align_circuits.tables.intervals import proportion
from align_circuits.tables.tables import Provenance, Table

UPDATES: tuple[Update, ...] = get_args(Update)
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class TheoremCell:
    """One setting of finetuning."""

    name: str
    n_seen: int
    """M_ft."""
    n_subjects: int = 256
    n_values: int = 32
    """U."""
    n_types: int = 8
    n_grammar: int = 20
    n_demos: int = 5
    n_slots: int = 10
    corrected_start: bool = True
    """Whether W_OV^subj of the construction sums over unique values; as printed it counts owners."""
    n: int | None = 4096
    """Sequences; None for all there are."""
    groups: int = 8
    tested: int = 500
    """Sequences that accuracy is measured on, and the same number with held-out queries."""

    def setting(self) -> Finetuning:
        """Returns the setting."""
        world = RecallWorld(
            self.n_subjects, (self.n_values,) * self.n_types, self.n_grammar, div=None, relation_tokens=True
        )
        corrections: tuple[Correction, ...] = ("values",) if self.corrected_start else ()
        return Finetuning(world, world.split(self.n_seen)[0], self.n_demos, self.n_slots, corrections=corrections)


@dataclass(frozen=True)
class Settings:
    """Several settings of finetuning."""

    cells: tuple[TheoremCell, ...]


def theorem_cell(seed: int, **config: Any) -> list[dict[str, Any]]:
    """Returns the measured coefficients and cosines of each update, and the accuracy before, after, and by formula."""
    cell = TheoremCell(**config)
    setting = cell.setting()
    steps = setting.steps(Batches(cell.n, cell.groups, seed=1000 * seed))
    rows: list[dict[str, Any]] = []
    for step, (model, updates) in enumerate(steps):
        if step != 1:
            rows += _accuracies(setting, model, cell, "before" if step == 0 else "two steps")
        for update in UPDATES[:2] if step == 0 else UPDATES[2:]:
            if updates:
                rows += _beside_formulas(setting, update, updates[update])
    for form in FORMS:
        rows += _accuracies(setting, setting.by_formula(form), cell, f"two steps, {form} formula")
    return rows


def _beside_formulas(setting: Finetuning, update: Update, groups: Float[Tensor, "group ..."]) -> list[dict[str, Any]]:
    """Coefficients and cosines with jackknife intervals over groups of sequences."""
    rows: list[dict[str, Any]] = []
    scale = setting.n_demos if update == "relation KQ" else 1.0  # the closed form is for α_2 = 1, the step is 1 / N_ft
    formulas = {form: setting.coefficients(form)[update] for form in FORMS}
    for term, found in setting.decomposed(update, scale * groups).items():
        values = found.numpy()
        reach = 1.96 * values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        beside = {form: formulas[form].get(term, 0.0) for form in FORMS}
        rows.append(
            {
                "metric": "coefficient",
                "update": update,
                "term": term,
                **beside,
                "value": values.mean(),
                "low": values.mean() - reach,
                "high": values.mean() + reach,
            }
        )
    for form in FORMS:
        direction = setting.closed(form)[update]
        value, reach = _jackknife(groups.flatten(1), direction.flatten())
        rows.append(
            {
                "metric": "cosine",
                "update": update,
                "formula": form,
                "value": value,
                "low": value - reach,
                "high": value + reach,
            }
        )
    return [{"n": len(groups), **row} for row in rows]


def _jackknife(groups: Float[Tensor, "group entry"], direction: Float[Tensor, " entry"]) -> tuple[float, float]:
    """The cosine of the expectation with a direction, and half its 95% interval; 0 if it is exact."""
    gram, on = (groups @ groups.T).double(), (groups @ direction).double()
    length = direction.norm().item()

    def cosine(kept: ndarray) -> float:
        """Noise lengthens a mean; products of different groups have none."""
        inner = gram[kept][:, kept]
        n = len(kept)
        square = inner.sum() - inner.diagonal().sum() if n > 1 else inner.sum()
        return (on[kept].mean() / (square / max(1, n * (n - 1))).clamp(min=1e-30).sqrt() / length).item()

    everyone = np.arange(len(groups))
    if len(groups) == 1:
        return cosine(everyone), 0.0
    without = np.array([cosine(everyone[everyone != left]) for left in everyone])
    return cosine(everyone), float(1.96 * ((len(groups) - 1) * without.var()) ** 0.5)


def _accuracies(setting: Finetuning, model: AttentionOnly, cell: TheoremCell, name: str) -> list[dict[str, Any]]:
    """The share of sequences whose answer alone has the highest logit, for seen and for held-out queries."""
    held_out = tuple(j for j in setting.world.subject_ids if j not in set(setting.seen))
    rows: list[dict[str, Any]] = []
    for queries, who in ((setting.seen, "seen"), (held_out, "held-out")):
        if queries:
            tokens, answers = setting.drawn(10**6, cell.tested, queries)
            right = _right(model, tokens, answers)
            low, high = proportion(right, np.ones_like(right))
            rows.append(
                {
                    "metric": "accuracy",
                    "model": name,
                    "queries": who,
                    "value": float(right.mean()),
                    "low": float(low[0]),
                    "high": float(high[0]),
                    "n": cell.tested,
                }
            )
    return rows


def _right(model: AttentionOnly, tokens: Tensor, answers: Tensor) -> Float[ndarray, "1 prompt"]:
    with torch.no_grad():
        logits = torch.cat([model.last(some) for some in tokens.split(128)])
    allowed = torch.nn.functional.one_hot(answers, logits.shape[1]).bool()
    return all_right(logits, allowed)[None].double().numpy()


def _run_theorem(config: Settings, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    cells = [Job(f"{__name__}:theorem_cell", asdict(cell)) for cell in config.cells]
    kept = [
        "name",
        "n_seen",
        "n_values",
        "n_demos",
        "n_slots",
        "corrected_start",
        "metric",
        "update",
        "term",
        "formula",
        "model",
        "queries",
        *FORMS,
        "value",
        "low",
        "high",
        "n",
    ]
    frame: Any = run_jobs(cells, folder, processes=jobs).all_rows().reindex(columns=kept)
    for column in (*FORMS, "value", "low", "high"):
        frame[column] = [float(f"{value:.6g}") for value in frame[column].astype(float)]
    return Table(frame, Provenance("theorem", asdict(config)))


PAPER_SIZE, ENOUGH = "the paper's size", "enough subjects"


def _one(table: Table, **where: Any) -> Measured:
    row = table.where(**where).frame.iloc[0]
    return Measured(float(row["value"]), float(row["low"]), float(row["high"]))


def _check_theorem(table: Table) -> list[Check]:
    closed = [
        Check(
            f"The {update} update is the corrected closed form (cosine)",
            relation=">=",
            threshold=0.99,
            measured=_one(table, name=PAPER_SIZE, metric="cosine", update=update, formula="corrected"),
            control=_one(table, name=PAPER_SIZE, metric="cosine", update=update, formula="printed"),
            control_is="the printed one",
            published="'the updated weights satisfy'",
        )
        for update in UPDATES
    ]
    after = {"metric": "accuracy", "model": "two steps", "queries": "held-out"}
    before = _one(table, name=PAPER_SIZE, **(after | {"model": "before"}))
    return [
        *closed,
        Check(
            "After two steps held-out subjects are recalled at the paper's size, M_ft = 128 (accuracy)",
            relation=">=",
            threshold=0.95,
            measured=_one(table, name=PAPER_SIZE, **after),
            control=before,
            control_is="before finetuning",
            published="'the model attains perfect accuracy' for M_ft >> U",
        ),
        Check(
            "They are where M_ft is well above U²/(m-1) (accuracy)",
            relation=">=",
            threshold=0.95,
            measured=_one(table, name=ENOUGH, **after),
            control=_one(table, name=PAPER_SIZE, **after),
            control_is="M_ft = 128, where U²/(m-1) is 205",
        ),
        Check(
            "The corrected formula predicts that failure (its accuracy at the paper's size)",
            relation="<=",
            threshold=0.05,
            measured=_one(table, name=PAPER_SIZE, **(after | {"model": "two steps, corrected formula"})),
            control=_one(table, name=PAPER_SIZE, **(after | {"model": "two steps, printed formula"})),
            control_is="the printed formula",
        ),
    ]


def _draw_theorem(table: Table) -> dict[str, go.Figure]:
    cosines = table.where(metric="cosine").frame
    accuracy: Any = table.where(metric="accuracy", queries="held-out").frame
    several = accuracy[accuracy["name"] == ENOUGH]["n_values"].iloc[0]
    sweep = accuracy[(accuracy["n_slots"] == accuracy["n_slots"].max()) & (accuracy["n_values"] == several)]
    drawn = {}
    figure = go.Figure()
    for place, (form, rows) in enumerate(cosines.groupby("formula", sort=False)):
        figure.add_bar(
            x=[rows["name"], rows["update"]],
            y=rows["value"],
            name=str(form),
            marker_color=plots.COLOURS[place],
            error_y={"array": rows["high"] - rows["value"], "arrayminus": rows["value"] - rows["low"]},
        )
    figure.update_yaxes(title="cosine with the measured update", range=[-0.3, 1.05])
    drawn["cosines"] = plots.styled(figure, "", height=460)
    drawn["held-out subjects"] = plots.curves(
        {"": sweep.sort_values("n_seen")}, x="n_seen", by="model", label="M_ft, the subjects finetuned on"
    )
    return drawn


def _of(base: Mapping[str, Any], name: str, n_seen: int, **changes: Any) -> TheoremCell:
    return TheoremCell(name, n_seen, **{**base, **changes})


_SMALL = {
    "n_subjects": 64,
    "n_values": 4,
    "n_types": 2,
    "n_grammar": 4,
    "n_demos": 2,
    "n_slots": 6,
    "n": 512,
    "groups": 2,
    "tested": 60,
}
_EXACT = TheoremCell("exact", 8, 8, 4, 2, 4, n_demos=2, n_slots=6, n=None, groups=1, tested=100)


def _theorem(n: int, tested: int, sweep: Mapping[str, int], seen: Sequence[int]) -> Settings:
    """The paper's size, and a world of other size in which M_ft varies up to 3.75 U²/(m-1)."""
    options = {"n": n, "tested": tested}
    several = {**options, **sweep, "n_slots": 15}
    return Settings(
        (
            _EXACT,
            _of(options, PAPER_SIZE, 128),
            _of(options, "the paper's size, W_OV^subj as printed", 128, corrected_start=False),
            _of(options, "the paper's size, T <= S + 2", 128, n_slots=15),
            *(_of(several, f"U = {sweep['n_values']}, M_ft = {n_seen}", n_seen) for n_seen in seen[:-1]),
            _of(several, ENOUGH, seen[-1]),
        )
    )


THEOREM = Experiment(
    name="recall/theorem",
    title="The first two steps of finetuning, beside their closed forms",
    source=f"{SOURCE}, Theorems 1 and 2",
    scales={
        "smoke": Settings((_of(_SMALL, PAPER_SIZE, 6), _of(_SMALL, ENOUGH, 48))),
        "cpu": _theorem(8192, 500, {"n_subjects": 256, "n_values": 16}, (24, 48, 96, 192)),
        "paper": _theorem(65536, 2000, {"n_subjects": 896, "n_values": 32}, (64, 128, 192, 256, 384, 512, 768)),
    },
    run=_run_theorem,
    draw=_draw_theorem,
    check=_check_theorem,
    makes_models=True,
    published="'These weights, with sufficiently large β, lead the model to attain perfect accuracy on ICL sequences.'",
)


# Lemmas C.1 and C.2


@dataclass(frozen=True)
class Lemmas:
    """Random worlds."""

    n_worlds: int
    n: int
    """Sequences of each."""


def _run_lemmas(config: Lemmas, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    draws = np.random.default_rng(0)
    holds: dict[tuple[str, str], list[float]] = {}
    nearest: dict[tuple[str, str], float] = {}
    for _ in range(config.n_worlds):
        n_values, n_types = int(draws.integers(2, 9)), int(draws.integers(2, 6))
        n_subjects = n_values * int(draws.integers(3, 12))  # M >= C U with C > e
        world = RecallWorld(
            n_subjects,
            (n_values,) * n_types,
            int(draws.integers(2, 20)),
            div=None,
            relation_tokens=True,
            world_seed=int(draws.integers(2**31)),
        )
        n_demos = int(draws.integers(1, 6))
        seen, _ = world.split(int(draws.integers(n_values, n_subjects + 1)))
        for start, corrections in (("unique values", ("values",)), ("as printed", ())):
            setting = Finetuning(
                world, seen, n_demos, 3 * n_demos, corrections=cast(tuple[Correction, ...], corrections)
            )
            tokens, _ = setting.drawn(0, config.n)
            for (lemma, bound), model in _lemma_models(setting):
                with torch.no_grad():
                    largest = model.last(tokens).softmax(1).amax().item()
                holds.setdefault((lemma, start), []).append(float(largest <= bound * (1 + 1e-6)))
                nearest[lemma, start] = max(nearest.get((lemma, start), 0.0), largest / bound)
    values = np.array(list(holds.values()))
    keys = pd.DataFrame(list(holds), columns=["lemma", "start"])
    table = Table.from_prompts(keys, values, np.ones_like(values), Provenance("lemmas", asdict(config)))
    return Table(table.frame.assign(largest=[round(nearest[key], 4) for key in holds]), table.provenance)


def _lemma_models(setting: Finetuning) -> list[tuple[tuple[str, float], AttentionOnly]]:
    """Each lemma with its bound, and the model that it is about."""
    world, m, n_values = setting.world, setting.n_demos + 1, setting.n_values
    size, v = world.n_types * n_values, world.d_vocab
    constant = world.n_subjects / n_values
    before = setting.model()
    l1, l2 = (m - 1) * setting.n_demos / setting.length, n_values**2 / (len(setting.seen) * setting.length)
    largest = 1 / (l1 + m * l2)
    terms, closed = setting.terms["relation OV"], setting.coefficients("printed")["relation OV"]
    rel, subj = (HEADS.index(head) for head in HEADS)

    def after(alpha: float) -> AttentionOnly:
        """After the first step as printed, with this α_2."""
        kq, ov = before.kq.detach().clone(), before.ov.detach().clone()
        scale = alpha * world.n_types * setting.length * n_values**2
        ov[rel] += torch.stack([scale * value * terms[name] for name, value in closed.items()]).sum(0)
        kq[subj, v + 1, world.separator] += setting.beta
        return AttentionOnly.of_products(kq, ov)

    second = np.e / (v - (1 - 1 / np.e) * size)
    return [
        (("C.1 as printed", 1 / (v + (constant / np.e - 1) * size)), before),
        (("C.1 corrected", 1 / (v - (1 - 1 / np.e) * size)), before),
        (("C.2 as printed", second), after(largest)),
        (("C.2, α_2 ten times too large", second), after(10 * largest)),
    ]


def _check_lemmas(table: Table) -> list[Check]:
    corrected = _one(table, lemma="C.1 corrected", start="unique values")
    return [
        Check(
            "Lemma C.1: no prediction is above 1 / (V + (C/e - 1) L U) (share of worlds)",
            relation=">=",
            threshold=1.0,
            measured=_one(table, lemma="C.1 as printed", start="unique values"),
            control=_one(table, lemma="C.1 as printed", start="as printed"),
            control_is="W_OV^subj as printed",
            published="'the prediction probabilities are bounded'",
        ),
        Check(
            "Lemma C.1, corrected: none is above 1 / (V - (1 - 1/e) L U) (share of worlds)",
            relation=">=",
            threshold=1.0,
            measured=corrected,
            control=_one(table, lemma="C.1 as printed", start="unique values"),
            control_is="the printed bound",
        ),
        Check(
            "Lemma C.2: none is above e / (V - (1 - 1/e) L U) (share of worlds)",
            relation=">=",
            threshold=1.0,
            measured=_one(table, lemma="C.2 as printed", start="unique values"),
            control=_one(table, lemma="C.2, α_2 ten times too large", start="unique values"),
            control_is="α_2 ten times larger than assumed",
        ),
    ]


def _draw_lemmas(table: Table) -> dict[str, go.Figure]:
    frame = table.frame
    bars = go.Bar(x=[frame["start"], frame["lemma"]], y=frame["largest"], marker_color=plots.COLOURS[0])
    figure = go.Figure(bars).add_hline(1.0)
    figure.update_yaxes(title="largest prediction in any world, over the bound")
    return {"bounds": plots.styled(figure, "", height=380)}


LEMMAS = Experiment(
    name="recall/lemmas",
    title="The bounds of Lemmas C.1 and C.2 over random worlds",
    source=f"{SOURCE}, Appendix C.2.1",
    scales={"smoke": Lemmas(4, 16), "cpu": Lemmas(60, 64), "paper": Lemmas(1000, 256)},
    run=_run_lemmas,
    draw=_draw_lemmas,
    check=_check_lemmas,
    makes_models=True,
    published="π_v ≤ 1 / (V + (C/e - 1) L U), with C > e.",
)
