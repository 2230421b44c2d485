"""Theorems 1 and 2 and their lemmas, printed and corrected, beside the measured steps of finetuning."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.special import stdtrit
from torch import Tensor

from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows
from align_circuits.papers.recall.figures.propositions_1_to_4 import all_correct
from align_circuits.papers.recall.figures.studies import SOURCE, bars, study
from align_circuits.papers.recall.models.attention_only import AttentionOnly
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import Correction
from align_circuits.papers.recall.theory.finetuning_steps import HEADS, Batches, Finetuning, Form, Update
from align_circuits.papers.statistics import Statistic, of_each, the_row
from align_circuits.report import plots
from align_circuits.tables.intervals import TAILS, proportion
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

UPDATES: tuple[Update, ...] = get_args(Update)
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class Setting:
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
    """Sequences of an expectation; None for all sequences."""
    groups: int = 8
    tested: int = 500
    """Sequences of an accuracy, with seen and with held-out queries."""

    def finetuning(self) -> Finetuning:
        """Returns the finetuning."""
        values = (self.n_values,) * self.n_types
        world = RecallWorld(self.n_subjects, values, self.n_grammar, div=None, relation_tokens=True)
        corrections: tuple[Correction, ...] = ("values",) if self.corrected_start else ()
        return Finetuning(world, world.split(self.n_seen)[0], self.n_demos, self.n_slots, corrections=corrections)


@dataclass(frozen=True)
class Settings:
    """Several settings of finetuning."""

    settings: tuple[Setting, ...]


def measure_steps(*, seed: int, **config: Any) -> list[dict[str, Any]]:
    """Returns the coefficients and cosines of each update, and accuracies; the function of a job."""
    setting = Setting(**config)
    finetuning = setting.finetuning()
    rows: list[dict[str, Any]] = []
    for step, (model, updates) in enumerate(finetuning.steps(Batches(setting.n, setting.groups, seed=1000 * seed))):
        if step != 1:
            rows += _accuracies(finetuning, model, setting.tested, "before" if step == 0 else "two steps")
        for update in UPDATES[:2] if step == 0 else UPDATES[2:]:
            if updates:
                rows += _beside_formulas(finetuning, update, updates[update])
    for form in FORMS:
        rows += _accuracies(finetuning, finetuning.by_formula(form), setting.tested, f"two steps, {form} formula")
    return rows


def _beside_formulas(
    finetuning: Finetuning, update: Update, groups: Float[Tensor, "group ..."]
) -> list[dict[str, Any]]:
    """Coefficients and cosines, with intervals over groups of sequences."""
    rows: list[dict[str, Any]] = []
    # the closed form is for α_2 = 1, the step is 1 / N_ft
    scale = finetuning.n_demos if update == "relation KQ" else 1.0
    formulas = {form: finetuning.coefficients(form)[update] for form in FORMS}
    for term, coefficients in finetuning.decomposed(update, scale * groups).items():
        values = coefficients.numpy()
        half = _reach(values.std(ddof=1) / len(values) ** 0.5, len(values)) if len(values) > 1 else 0.0
        printed_and_corrected = {form: formulas[form].get(term, 0.0) for form in FORMS}
        keys = {"metric": "coefficient", "update": update, "term": term, **printed_and_corrected}
        rows.append({**keys, "value": values.mean(), "low": values.mean() - half, "high": values.mean() + half})
    for form in FORMS:
        value, half = _jackknife(groups.flatten(1), finetuning.closed(form)[update].flatten())
        keys = {"metric": "cosine", "update": update, "formula": form}
        rows.append({**keys, "value": value, "low": value - half, "high": value + half})
    return [{"n": len(groups), **row} for row in rows]


def _jackknife(groups: Float[Tensor, "group entry"], direction: Float[Tensor, " entry"]) -> tuple[float, float]:
    """The cosine of the expectation with a direction, and half of its 95% interval; 0 if it is exact."""
    gram, on = (groups @ groups.T).double(), (groups @ direction).double()
    length = direction.norm().item()

    def cosine(kept: ndarray) -> float:
        """Noise adds to the squared norm of a mean, but not to inner products of different groups."""
        inner = gram[kept][:, kept]
        n = len(kept)
        square = inner.sum() - inner.diagonal().sum() if n > 1 else inner.sum()
        return (on[kept].mean() / (square / max(1, n * (n - 1))).clamp(min=1e-30).sqrt() / length).item()

    everything = np.arange(len(groups))
    if len(groups) == 1:
        return cosine(everything), 0.0
    without = np.array([cosine(everything[everything != left_out]) for left_out in everything])
    return cosine(everything), _reach(((len(groups) - 1) * without.var()) ** 0.5, len(groups))


def _reach(standard_error: float, groups: int) -> float:
    """Half of the 95% t interval of what groups of sequences estimate."""
    return float(stdtrit(groups - 1, TAILS[1]) * standard_error)


def _accuracies(finetuning: Finetuning, model: AttentionOnly, n: int, name: str) -> list[dict[str, Any]]:
    """The share of sequences whose answer alone has the highest logit, for seen and for held-out queries."""
    seen = set(finetuning.seen)
    held_out = tuple(subject for subject in finetuning.world.subject_ids if subject not in seen)
    rows: list[dict[str, Any]] = []
    for queries, caption in ((finetuning.seen, "seen"), (held_out, "held-out")):
        if queries:
            tokens, answers = finetuning.drawn(10**6, n, queries)
            correct = _correct(model, tokens, answers)
            low, high = (float(bound[0]) for bound in proportion(correct, np.ones_like(correct)))
            keys = {"metric": "accuracy", "model": name, "queries": caption}
            rows.append({**keys, "value": float(correct.mean()), "low": low, "high": high, "n": n})
    return rows


def _correct(model: AttentionOnly, tokens: Tensor, answers: Tensor) -> Float[ndarray, "1 prompt"]:
    with torch.no_grad():
        logits = torch.cat([model.last(batch) for batch in tokens.split(128)])
    allowed = torch.nn.functional.one_hot(answers, logits.shape[1]).bool()
    return all_correct(logits, allowed)[None].double().numpy()


KEYS = ["name", "n_seen", "n_values", "n_demos", "n_slots", "corrected_start"]
"""The numbers of a setting that the table has."""


def _theorem_jobs(config: Settings, _: Inputs) -> list[Measurement]:
    settings = [asdict(setting) for setting in config.settings]
    return [Measurement(measure_steps, each, keys={name: each[name] for name in KEYS}) for each in settings]


def _theorem_table(_: Settings, rows: Rows) -> pd.DataFrame:
    numbers = [*FORMS, "value", "low", "high"]
    columns = [*KEYS, "metric", "update", "term", "formula", "model", "queries", *numbers, "n"]
    frame: Any = rows["measure_steps"].reindex(columns=columns)
    return frame.assign(**{name: [float(f"{value:.6g}") for value in frame[name].astype(float)] for name in numbers})


PAPER_SIZE, ENOUGH = "the paper's size", "enough subjects"


def _cosine(update: Update, form: Form) -> Statistic:
    return the_row(metric="cosine", name=PAPER_SIZE, update=update, formula=form)


def _held_out(name: str, model: str = "two steps") -> Statistic:
    return the_row(metric="accuracy", name=name, model=model, queries="held-out")


def _draw_cosines(table: Table) -> go.Figure:
    cosines = table.where(metric="cosine").frame.groupby("formula", sort=False)
    label = "cosine with the measured update"
    return bars({str(form): rows for form, rows in cosines}, ["name", "update"], label, (-0.3, 1.05), height=460)


def _draw_held_out(table: Table) -> go.Figure:
    accuracy: Any = table.where(metric="accuracy", queries="held-out").frame
    n_values = accuracy[accuracy["name"] == ENOUGH]["n_values"].iloc[0]
    by_seen = accuracy[(accuracy["n_slots"] == accuracy["n_slots"].max()) & (accuracy["n_values"] == n_values)]
    label = "M_ft, the subjects finetuned on"
    return plots.curves({"": by_seen.sort_values("n_seen")}, x="n_seen", by="model", label=label)


def _theorem(n: int, tested: int, varied: Mapping[str, int], seen: Sequence[int]) -> Settings:
    """The paper's size, and a world of another size in which M_ft varies up to 3.75 U²/(m-1)."""
    sequences: dict[str, Any] = {"n": n, "tested": tested}
    another: dict[str, Any] = {**sequences, **varied, "n_slots": 15}
    return Settings(
        (
            Setting("exact", 8, 8, 4, 2, 4, n_demos=2, n_slots=6, n=None, groups=1, tested=100),
            Setting(PAPER_SIZE, 128, **sequences),
            Setting("the paper's size, W_OV^subj as printed", 128, corrected_start=False, **sequences),
            Setting("the paper's size, T <= S + 2", 128, n_slots=15, **sequences),
            *(Setting(f"U = {varied['n_values']}, M_ft = {n_seen}", n_seen, **another) for n_seen in seen[:-1]),
            Setting(ENOUGH, seen[-1], **another),
        )
    )


_SMALL: dict[str, Any] = {"n_subjects": 64, "n_values": 4, "n_types": 2, "n_grammar": 4, "n_demos": 2, "n_slots": 6}
_SMALL |= {"n": 512, "groups": 2, "tested": 60}

THEOREM = Experiment(
    "recall/theorem",
    "The first two steps of finetuning, beside their closed forms",
    f"{SOURCE}, Theorems 1 and 2",
    study(
        "recall/theorem",
        Settings((Setting(PAPER_SIZE, 6, **_SMALL), Setting(ENOUGH, 48, **_SMALL))),
        _theorem(8192, 500, {"n_subjects": 256, "n_values": 16}, (24, 48, 96, 192)),
        _theorem(65536, 2000, {"n_subjects": 896, "n_values": 32}, (64, 128, 192, 256, 384, 512, 768)),
        jobs=_theorem_jobs,
        summarize=_theorem_table,
    ),
    {"cosines": _draw_cosines, "held-out subjects": _draw_held_out},
    [
        *(
            Claim(
                f"The {update} update is the corrected closed form (cosine)", "'the updated weights satisfy'"
            ).at_least(0.99, _cosine(update, "corrected"), _cosine(update, "printed"), "the printed one")
            for update in UPDATES
        ),
        Claim(
            "After two steps held-out subjects are recalled at the paper's size, M_ft = 128 (accuracy)",
            "'the model attains perfect accuracy' for M_ft >> U",
        ).at_least(0.95, _held_out(PAPER_SIZE), _held_out(PAPER_SIZE, "before"), "before finetuning"),
        Claim("They are where M_ft is well above U²/(m-1) (accuracy)").at_least(
            0.95, _held_out(ENOUGH), _held_out(PAPER_SIZE), "M_ft = 128, where U²/(m-1) is 205"
        ),
        Claim("The corrected formula predicts that failure (its accuracy at the paper's size)").at_most(
            0.05,
            _held_out(PAPER_SIZE, "two steps, corrected formula"),
            _held_out(PAPER_SIZE, "two steps, printed formula"),
            "the printed formula",
        ),
    ],
    "'These weights, with sufficiently large β, lead the model to attain perfect accuracy on ICL sequences.'",
)


# Lemmas C.1 and C.2


@dataclass(frozen=True)
class Lemmas:
    """Random worlds."""

    n_worlds: int
    n: int
    """Sequences of each."""


def _lemma_jobs(config: Lemmas, _: Inputs) -> list[Measurement]:
    rng, jobs = np.random.default_rng(0), []
    for _world in range(config.n_worlds):
        n_values, n_types = int(rng.integers(2, 9)), int(rng.integers(2, 6))
        n_subjects = n_values * int(rng.integers(3, 12))  # M >= C U with C > e
        world = {"n_subjects": n_subjects, "n_values": (n_values,) * n_types, "n_grammar": int(rng.integers(2, 20))}
        world["world_seed"] = int(rng.integers(2**31))
        n_demos = int(rng.integers(1, 6))
        n_seen = int(rng.integers(n_values, n_subjects + 1))
        settings = {"world": world, "n_demos": n_demos, "n_seen": n_seen, "n": config.n}
        jobs.append(Measurement(measure_lemmas, settings, seed=None))
    return jobs


def measure_lemmas(*, world: Mapping[str, Any], n_demos: int, n_seen: int, n: int) -> list[dict[str, Any]]:
    """Returns the largest prediction of each lemma's model, over its bound; the function of a job."""
    made = RecallWorld(**world, div=None, relation_tokens=True)
    seen, _ = made.split(n_seen)
    starts: dict[str, tuple[Correction, ...]] = {"unique values": ("values",), "as printed": ()}
    rows = []
    for start, corrections in starts.items():
        finetuning = Finetuning(made, seen, n_demos, 3 * n_demos, corrections=corrections)
        tokens, _ = finetuning.drawn(0, n)
        for lemma, bound, model in _lemma_models(finetuning):
            with torch.no_grad():
                largest = model.last(tokens).softmax(1).amax().item()
            holds = float(largest <= bound * (1 + 1e-6))
            rows.append({"lemma": lemma, "start": start, "holds": holds, "largest": largest / bound})
    return rows


def _lemma_models(finetuning: Finetuning) -> list[tuple[str, float, AttentionOnly]]:
    """Each lemma, its bound, and the model that it is about."""
    world, m, n_values = finetuning.world, finetuning.n_demos + 1, finetuning.n_values
    size, v = world.n_types * n_values, world.d_vocab
    constant = world.n_subjects / n_values
    before = finetuning.model()
    l1 = (m - 1) * finetuning.n_demos / finetuning.length
    l2 = n_values**2 / (len(finetuning.seen) * finetuning.length)
    largest = 1 / (l1 + m * l2)
    terms, closed = finetuning.terms["relation OV"], finetuning.coefficients("printed")["relation OV"]
    rel, subj = (HEADS.index(head) for head in HEADS)

    def after(alpha: float) -> AttentionOnly:
        """After the first step as printed, with this α_2."""
        kq, ov = before.kq.detach().clone(), before.ov.detach().clone()
        scale = alpha * world.n_types * finetuning.length * n_values**2
        ov[rel] += torch.stack([scale * value * terms[name] for name, value in closed.items()]).sum(0)
        kq[subj, v + 1, world.separator] += finetuning.beta
        return AttentionOnly.of_products(kq, ov)

    second = np.e / (v - (1 - 1 / np.e) * size)
    return [
        ("C.1 as printed", 1 / (v + (constant / np.e - 1) * size), before),
        ("C.1 corrected", 1 / (v - (1 - 1 / np.e) * size), before),
        ("C.2 as printed", second, after(largest)),
        ("C.2, α_2 ten times too large", second, after(10 * largest)),
    ]


def _lemma_table(_: Lemmas, rows: Rows) -> pd.DataFrame:
    by_lemma = rows["measure_lemmas"].groupby(["lemma", "start"], sort=False)
    keys: Any = pd.DataFrame([key for key, _ in by_lemma], columns=["lemma", "start"])
    holds = np.stack([of_lemma["holds"].to_numpy() for _, of_lemma in by_lemma])
    table = Table.from_prompts(keys, holds, np.ones_like(holds), Provenance("lemmas"))
    return table.frame.assign(largest=[round(max(of_lemma["largest"]), 4) for _, of_lemma in by_lemma])


def _draw_lemmas(table: Table) -> go.Figure:
    frame = table.frame
    kinds = [frame["start"], frame["lemma"]]
    figure = go.Figure(go.Bar(x=frame["largest"], y=kinds, orientation="h", marker_color=plots.COLOURS[0]))
    figure.add_vline(1.0).update_xaxes(title="largest prediction in any world, over the bound")
    return plots.styled(figure, "", height=120 + 26 * len(frame))


def _share(lemma: str, start: str = "unique values") -> Statistic:
    return of_each(lemma=lemma, start=start)


LEMMAS = Experiment(
    "recall/lemmas",
    "The bounds of Lemmas C.1 and C.2 over random worlds",
    f"{SOURCE}, Appendix C.2.1",
    study("recall/lemmas", Lemmas(4, 16), Lemmas(60, 64), Lemmas(1000, 256), jobs=_lemma_jobs, summarize=_lemma_table),
    {"bounds": _draw_lemmas},
    [
        Claim(
            "Lemma C.1: no prediction is above 1 / (V + (C/e - 1) L U) (share of worlds)",
            "'the prediction probabilities are bounded'",
        ).at_least(1.0, _share("C.1 as printed"), _share("C.1 as printed", "as printed"), "W_OV^subj as printed"),
        Claim("Lemma C.1, corrected: none is above 1 / (V - (1 - 1/e) L U) (share of worlds)").at_least(
            1.0, _share("C.1 corrected"), _share("C.1 as printed"), "the printed bound"
        ),
        Claim("Lemma C.2: none is above e / (V - (1 - 1/e) L U) (share of worlds)").at_least(
            1.0, _share("C.2 as printed"), _share("C.2, α_2 ten times too large"), "α_2 ten times larger than assumed"
        ),
    ],
    "π_v ≤ 1 / (V + (C/e - 1) L U), with C > e.",
)
