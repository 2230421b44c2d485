"""The command line: one verb per public function, each writing `table.csv`, `report.html` and `provenance.json`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import tyro

from align_circuits.files import writable_folder
from align_circuits.heads.localize_heads import localize
from align_circuits.heads.score import score_heads
from align_circuits.models.loading import load
from align_circuits.models.planted.model import planted_circuit
from align_circuits.papers.claims import Scale, checks_html
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.icatune.tuned_models import TOY
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.report.page import write_report
from align_circuits.run.evaluation import ALL_OFFSETS, evaluate
from align_circuits.run.options import RunOptions
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.toy_llama import RECIPES, pretrain
from align_circuits.training.tuning import TuneConfig, tune

SHOWN = ("align_query", "align_key", "lookup", "induction", "previous", "duplicate")
"""The metrics that reports draw, in this order."""


SMALL = 20_000_000
"""Parameters below which a verb runs on one thread if not told otherwise."""

MOST_ROWS = 15_000
"""The longest table that a report shows; of more it says where they stand."""


@dataclass(frozen=True)
class Job:
    """What every verb needs: a model, a task, and where the results go."""

    model: str = "planted"
    """A folder, a hub name, or "planted": a circuit built by hand for the task."""
    task: tyro.conf.OmitArgPrefixes[Seq2SeqTask] = field(default_factory=Seq2SeqTask)
    """The task that prompts are sampled from."""
    n: int = 64
    """How many prompts."""
    seed: int = 0
    """Of the prompts, and of where a planted circuit's heads lie."""
    out: Path = Path("runs/latest")
    """The folder for the results."""
    engine: Literal["auto", "fast", "reference"] = "auto"
    """How attention is computed."""
    batch_size: int | Literal["auto"] = "auto"
    """Prompts at a time; results do not depend on it."""
    device: str | None = None
    """Such as "cuda"; the GPU where there is one."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """Of the weights; as they are stored by default."""
    threads: int | None = None
    """Of the CPU. By default one for models below twenty million parameters, all cores for others: on an idle machine
    small models take nearly half the time with two, on a busy one many times as long."""

    def prepare(self) -> tuple[Any, Prompts]:
        """Loads the model and samples the prompts; fails before any long work."""
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads {self.threads}: give at least 1, or leave it out")
        writable_folder(self.out)
        if self.model == "planted":
            if self.device or self.dtype:
                raise ValueError("the planted circuit runs on the CPU in float32: leave out --device and --dtype")
            model: Any = planted_circuit(self.task, seed=self.seed)
        else:
            model = load(self.model, device=self.device, dtype=getattr(torch, self.dtype) if self.dtype else None)
        small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
        if threads := self.threads or int(small):  # waiting for each other on a busy machine, threads lose most time
            torch.set_num_threads(threads)
        if model.tokenizer is None:
            raise ValueError(
                f"{self.model!r} has no tokenizer, and the task is written in words: add one to its folder"
            )
        return model, self.task.sample(self.n, model.tokenizer, seed=self.seed)

    @property
    def _options(self) -> RunOptions:
        return RunOptions(self.engine, self.batch_size)

    def finish(self, verb: str, table: Table, **report: Any) -> None:
        """Writes the results."""
        provenance = replace(table.provenance, verb=verb, settings=_as_json(self))
        _write(self.out, replace(table, provenance=provenance), **report)


@dataclass(frozen=True)
class Score(Job):
    """Score every attention head: which align, which look up, which do neither."""

    def __call__(self) -> None:
        """Runs the verb."""
        model, prompts = self.prepare()
        table, correct = (
            score_heads(model, prompts, options=self._options),
            evaluate(model, prompts, options=self._options),
        )
        known: Any = table.frame[table.frame["value"].notna()]
        metrics = [metric for metric in SHOWN if metric in set(known["metric"])]
        best = {metric: table.top(metric, 3).frame for metric in metrics}
        roles = getattr(model, "roles", None)
        print(
            f"{self.model}: {len(prompts)} prompts of {prompts.inputs.shape[1]} tokens, "
            f"{table.provenance.engine} engine"
        )
        print(f"\n  {'metric':<12} best heads (95% interval over prompts{'; true role' if roles else ''})")
        for metric, rows in best.items():
            print(f"  {metric:<12} " + "   ".join(_head(row, roles) for _, row in rows.iterrows()))
        first = correct.where(metric="accuracy", kind="first", predictor="model").frame.iloc[0]
        leaders = ", ".join(
            f"{metric} {_head(rows.iloc[0])}"
            for metric, rows in best.items()
            if metric in ("align_query", "align_key", "lookup")
        )
        verdict = (
            f"Highest scores: {leaders}. First token of a phrase right in {_interval(first)} of cases. "
            "Scores say where heads look, not what the model uses: no head was ablated."
        )
        self.finish(
            "score",
            table,
            title=f"Attention heads of {self.model}",
            verdict=verdict,
            sections=[
                ("What the model gets right", "Beside what needs no alignment.", plots.accuracy(correct)),
                ("The best heads", "By each metric, with 95% intervals over prompts.", plots.top_heads(table, metrics)),
                ("All heads", "Hover for the number and its interval.", plots.head_maps(table, metrics)),
                ("A prompt", "One number: a phrase, its symbol, and where to look it up.", prompts.drawing(0)),
            ],
        )


@dataclass(frozen=True)
class Evaluate(Job):
    """Evaluate a model: accuracy by target kind and offset, beside chance, blind ceilings and oracle."""

    def __call__(self) -> None:
        """Runs the verb."""
        model, prompts = self.prepare()
        table = evaluate(model, prompts, options=self._options)
        print(table)
        rows = table.where(metric="accuracy", kind="all", offset=ALL_OFFSETS).frame
        said = {row["predictor"]: _interval(row) for _, row in rows.iterrows()}
        self.finish(
            "evaluate",
            table,
            title=f"Accuracy of {self.model}",
            verdict=f"Right in {said['model']} of all target tokens"
            + (f"; the history ceiling, which sees no alignment, is {said['history']}." if "history" in said else "."),
            sections=[("Accuracy", "", plots.accuracy(table)), ("All numbers", "", table)],
        )


@dataclass(frozen=True)
class Localize(Job):
    """Find the heads that align and those that look up, and test that the model needs them."""

    model: str = "toy-llama-ica"
    """A folder, a hub name, "toy-llama", "toy-llama-ica" (the same tuned in context), or "planted": a circuit built by
    hand for the task."""
    draws: int = 20
    """Sets of random heads to ablate beside those that were found."""
    out: Path = Path("runs/localize")
    """The folder for the results."""

    def __call__(self) -> None:
        """Runs the verb."""
        model, _ = self.prepare()
        found = localize(model, self.task, self.n, self.seed, draws=self.draws, options=self._options)
        roles = getattr(model, "roles", None)
        print(f"{self.model}: {self.n} prompts, half to find candidates, half to test them\n")
        for role, heads in found.heads_by_role.items():
            scores = found.table.where(role=role, metric="score")
            rows = [scores.where(layer=layer, head=head).frame.iloc[0] for layer, head in heads]
            print(f"  {role:<12} " + ("   ".join(_head(row, roles) for row in rows) or "nobody"))
        print(f"\n{found.summary}")
        provenance = replace(found.table.provenance, settings=_as_json(self))
        report = replace(found, table=replace(found.table, provenance=provenance)).save(self.out)
        print(f"\nreport: {report}")


@dataclass(frozen=True)
class Tune(Job):
    """Tune a model with LoRA, watch alignment emerge, and name the heads; a killed run goes on where it was."""

    model: str = "toy-llama"
    """A folder, a hub name, or "toy-llama", which takes some three minutes."""
    config: tyro.conf.OmitArgPrefixes[TuneConfig] = field(default_factory=TuneConfig)
    """How it is tuned."""
    defaults: Literal["toy-llama", "paper"] | None = None
    """Whose settings hold where none is given: those made for "toy-llama" (of `reproduce icatune/fig4`), or the
    paper's. By default the former with that model, the latter with others."""
    heads: bool = True
    """Whether `localize` names the tuned model's heads and ablates them."""

    def __call__(self) -> None:
        """Runs the verb."""
        naming = self.heads and self.config.method == "ica"
        if naming and self.n < 8:
            raise ValueError(f"n={self.n}: give at least 8 prompts to find heads on and to test them, or --no-heads")
        model, prompts = self.prepare()
        if self.config.method == "standard":
            prompts = replace(self.task, n_examples=0).sample(self.n, model.tokenizer, seed=self.seed)
        run = tune(model, self.task, self.config, seed=self.seed, out=self.out)
        print(run.log.to_string(index=False, float_format="{:.3f}".format))
        asked = {"metric": "accuracy", "kind": "first", "predictor": "model"}
        before, after = (evaluate(one, prompts, options=self._options) for one in (model, run.model))
        then, now = (table.where(**asked).frame.iloc[0] for table in (before, after))
        scores = score_heads(run.model, prompts, options=self._options)
        metrics = [name for name in SHOWN[:3] if len(prompts.relations[name])]
        best = ", ".join(f"{name} {_head(scores.top(name, 1).frame.iloc[0])}" for name in metrics)
        verdict = f"First token of a phrase right in {_interval(then)} of cases before, {_interval(now)} after"
        if "history" in set(after.frame["predictor"]):
            ceiling = after.where(metric="accuracy", kind="first", predictor="history").frame.iloc[0]
            verdict += f" (history ceiling {_interval(ceiling)})"
        print(f"\n{verdict}.")
        sections: list[tuple[str, str, Any]] = []
        if naming:
            found = localize(run.model, self.task, self.n, self.seed, options=self._options)
            print(f"{found.summary}\nheads: {found.save(self.out / 'heads')}")
            sections = [("Is it the heads?", found.summary, plots.ablation(found.group_ablations))]
        print(f"adapter: {self.out / 'adapter'}")
        self.finish(
            "tune",
            run.table,
            title=f"{self.model} tuned: {self.config.method}",
            verdict=f"{verdict}. Highest scores: {best}.",
            sections=[
                ("Accuracy over steps", "Probes with 95% intervals over few prompts.", run.figures["accuracy"]),
                ("The best head over steps", "Another head may be the best at each step.", run.figures["best heads"]),
                ("Afterwards", "On fresh prompts, beside what needs no alignment.", plots.accuracy(after)),
                ("All heads afterwards", "Hover for the number.", plots.head_maps(scores, metrics)),
                *sections,
            ],
        )


@dataclass(frozen=True)
class Pretrain:
    """Train a small Llama from scratch, by a recipe of the package; a killed run goes on where it was."""

    recipe: Literal["toy-llama", "smoke"] = "toy-llama"
    """"toy-llama" made the bundled model; "smoke" takes seconds and teaches nothing."""
    seed: int = 0
    """Of the weights and the documents."""
    out: Path = Path("runs/pretrain")
    """The folder for checkpoints, the log and the model."""

    def __call__(self) -> None:
        """Runs the verb."""
        run = pretrain(RECIPES[self.recipe], seed=self.seed, out=self.out)
        print(run.log.to_string(index=False, float_format="{:.3f}".format))
        print(f"\nmodel: {self.out / 'model'}")


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a figure or table of a paper, with its claims tested."""

    name: tyro.conf.Positional[str] = ""
    """Such as icatune/fig3; see --list."""
    list: bool = False
    """Name all experiments and stop."""
    scale: Scale = "cpu"
    """smoke takes seconds, cpu up to 30 minutes on two cores, paper is the paper's setting."""
    model: tuple[str, ...] = ("toy-llama",)
    """What is measured: one model, or several where the figure compares models."""
    jobs: int = 1
    """Local processes."""
    out: Path | None = None
    """The folder for the results and what they were made from; by default runs/NAME/SCALE, and runs for the latter,
    so that experiments share the models that they tune."""

    def __call__(self) -> None:
        """Runs the verb."""
        if self.list or self.name not in EXPERIMENTS:
            for experiment in EXPERIMENTS.values():
                print(f"{experiment.name:<20} {experiment.title} [{experiment.source}]")
            if not self.list:
                raise ValueError(f"no experiment {self.name!r}: give one of the names above")
            return
        experiment = EXPERIMENTS[self.name]
        config = experiment.scales[self.scale]
        if len(self.model) != 1 and not experiment.compares_models:
            raise ValueError(
                f"{self.name} measures one model, but {len(self.model)} were given: {', '.join(self.model)}"
            )
        if experiment.makes_models and self.model != Reproduce.model:
            raise ValueError(f"{self.name} makes its own models and takes none: leave out --model")
        models = () if experiment.makes_models else self.model
        out = writable_folder(self.out or Path("runs") / self.name / self.scale)
        shared = self.out or Path("runs")
        table = experiment.run(config, models=models, jobs=self.jobs, folder=shared)
        checks = experiment.check(table)
        for check in checks:
            print("\n".join(f"  {key}: {value}" for key, value in check.row().items() if value), end="\n\n")
        settings = {
            "name": self.name,
            "scale": self.scale,
            "models": list(models),
            "config": _as_json(config),
            **table.provenance.settings,
        }
        provenance = replace(table.provenance, verb="reproduce", settings=settings)
        _write(
            out,
            replace(table, provenance=provenance),
            title=f"{experiment.name}: {experiment.title}",
            verdict=f"{sum(check.holds for check in checks)} of {len(checks)} claims hold. {experiment.published}",
            sections=[
                ("Claims", f"Thresholds were fixed before the run; {experiment.source}.", checks_html(checks)),
                *[(name, "", figure) for name, figure in experiment.draw(table).items()],
                ("All numbers", "", table if len(table) <= MOST_ROWS else f"{len(table):,} rows: see table.csv."),
            ],
        )


@dataclass(frozen=True)
class Rerun:
    """Repeat a run from its provenance, and say whether the numbers came out the same."""

    folder: tyro.conf.Positional[Path]
    """A folder that another verb wrote."""
    out: Path | None = None
    """Where the repetition goes; FOLDER/rerun by default."""

    def __call__(self) -> None:
        """Runs the verb."""
        before = Table.load(self.folder)
        verb, settings = before.provenance.verb, dict(before.provenance.settings)
        out = self.out or self.folder / "rerun"
        if verb == "reproduce":
            model = tuple(settings["models"]) or Reproduce.model
            Reproduce(settings["name"], scale=settings["scale"], model=model, out=out)()
        elif verb in ("score", "evaluate", "localize", "tune") and "model" in settings:
            _from_settings(VERBS[verb], settings | {"out": str(out)})()
        else:
            raise ValueError(
                f"{str(self.folder)!r} was written by {verb!r}, or from Python, which does not tell what repeats it: "
                "give a folder that align-circuits score, evaluate, localize, tune or reproduce wrote"
            )
        after = Table.load(out)
        then, now = (table.frame["value"].to_numpy(dtype=float) for table in (before, after))
        if len(then) != len(now) or (np.isnan(then) != np.isnan(now)).any():
            raise ValueError(
                f"the rows differ: {len(then)} in the first run, {len(now)} in this one; compare the tables"
            )
        print(f"largest difference to the first run: {np.nanmax(np.abs(now - then)):.2g}")
        for part in ("versions", "model"):
            first, second = getattr(before.provenance, part), getattr(after.provenance, part)
            for name in first.keys() | second.keys():
                if first.get(name) != second.get(name):
                    print(f"  changed since then: {name}, {first.get(name)} -> {second.get(name)}")


VERBS: dict[str, type] = {
    "score": Score,
    "evaluate": Evaluate,
    "localize": Localize,
    "tune": Tune,
    "pretrain": Pretrain,
    "reproduce": Reproduce,
    "rerun": Rerun,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `align-circuits VERB ...` and returns the exit status.

    Bad input ends in one line on stderr and status 2; folders that `--out` made for it, still empty, are removed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = tyro.extras.subcommand_cli_from_dict(VERBS, args=arguments, prog="align-circuits", description=__doc__)
    if isinstance(verb, Tune) and (verb.defaults or verb.model) == "toy-llama":
        verb = _made_for_toy_llama(verb, arguments)
    out: Path | None = getattr(verb, "out", None)
    if isinstance(verb, Rerun) and out is None:
        out = verb.folder / "rerun"
    ours = [] if out is None else [place for place in (out, *out.parents) if not place.exists()]
    try:
        verb()
    except (ValueError, KeyError, FloatingPointError, ImportError) as error:
        for place in ours:
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()
        message = error.args[0] if error.args else str(error)
        print(f"align-circuits: {message}", file=sys.stderr)
        return 2
    return 0


def _made_for_toy_llama(asked: Tune, arguments: Sequence[str]) -> Tune:
    """Reads the arguments of `tune` again, with other defaults."""
    # Without examples there is one line to take the loss on.
    made = {name: value for name, value in TOY.items() if name != "loss_on" or asked.config.method == "ica"}
    default = Tune(config=TuneConfig(**made), dtype="float32")
    verb = tyro.cli(Tune, args=arguments[1:], default=default, prog="align-circuits tune")
    kept = ", ".join(f"{name} {value}" for name, value in made.items() if getattr(verb.config, name) == value)
    print(f"settings made for toy-llama: {kept}")
    return verb


def _write(out: Path, table: Table, **report: Any) -> None:
    """Writes report, table and provenance; a folder with a `provenance.json` is whole."""
    (out / "provenance.json").unlink(missing_ok=True)
    path = write_report(out / "report.html", provenance=table.provenance, **report)
    table.save(out)
    print(f"\nreport: {path}")


def _as_json(settings: Any) -> dict[str, Any]:
    """A dataclass as JSON."""
    return json.loads(json.dumps(asdict(settings), default=str))


def _from_settings(verb: type, settings: dict[str, Any]) -> Any:
    """Makes a verb from the JSON that `Job.finish` wrote."""
    known = {f.name: f for f in fields(verb)}
    kinds: dict[str, Any] = {"task": Seq2SeqTask, "config": TuneConfig}
    made: dict[str, Any] = {"out": Path(settings["out"])}
    for name in kinds.keys() & known.keys():
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in settings[name].items()}
        made[name] = kinds[name](**values)
    return verb(**{name: value for name, value in settings.items() if name in known} | made)


def _interval(row: pd.Series) -> str:
    return f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _head(row: pd.Series, roles: Any = None) -> str:
    text = f"L{row['layer']}H{row['head']} {_interval(row)}"
    return text if roles is None else f"{text} ({roles.get((row['layer'], row['head'])) or 'none'})"
