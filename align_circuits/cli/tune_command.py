"""`align-circuits tune`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tyro

from align_circuits.cli.command_base import PromptVerb, accuracy_sections, counted, first_token, head_value
from align_circuits.cli.folders import Results
from align_circuits.cli.score_command import ranked, with_shares
from align_circuits.heads.localize_heads import localize
from align_circuits.heads.one_pass import score_and_evaluate
from align_circuits.heads.score import resolve
from align_circuits.models.loading import parameters_in
from align_circuits.report import plots
from align_circuits.report.localize_report import headline_of, save_localization
from align_circuits.report.page import Section
from align_circuits.run.evaluation import evaluate
from align_circuits.tasks.own_prompts import OwnPrompts
from align_circuits.training.tuning import TuneConfig, described, preset_for, tune

MOST_MAPS = 3
"""Roles whose maps of heads are drawn, the first ones of the task."""


@dataclass(frozen=True)
class Tune(PromptVerb):
    """Tunes a model with `tune`."""

    model: str = "toy-llama"
    """A folder, a GGUF file, a hub name, "smollm2" (a pretrained Llama, if its package is installed), or "toy-llama",
    which takes about three minutes."""
    prompts: Path | None = None
    """A file with a JSON object a line, as for `align-circuits patch`: see docs/your-own-data.md. The model learns from
    four fifths of the prompts; on the others it is evaluated and its heads are named. By default prompts of the task
    are sampled."""
    n: int | None = None
    """Of a task the prompts on which the model is evaluated before and after and on which heads are named, by default
    64; training uses --steps times --batch others. Of a file its first N lines, by default all."""
    seed: int = 0
    """Of the tuning and of the prompts."""
    config: tyro.conf.OmitArgPrefixes[TuneConfig] = field(default_factory=TuneConfig)
    """How it is tuned."""
    preset: Literal["small", "paper"] | None = None
    """Which defaults apply to settings that are left out: "small" (200 steps, batch 8, lr 3e-3, alpha 64, no dropout,
    projections q, k, v and o, loss on all examples, a probe of 10 prompts every 5 steps) or the paper's for 8B models,
    which are shown here. By default the former below a billion parameters, the latter above."""
    heads: bool = True
    """Whether `localize` names the heads of a model tuned in context and ablates them."""

    def with_defaults(self, arguments: Sequence[str]) -> "Tune":
        """Returns the verb with the settings of its preset where none are given."""
        try:
            preset = self.preset or preset_for(parameters_in(self.model, self.revision))
        except (ValueError, OSError):  # `load` says what is wrong with the model
            return self
        default = Tune(preset=preset, config=TuneConfig.preset(preset, method=self.config.method))
        return tyro.cli(Tune, args=arguments, default=default, prog="align-circuits tune")

    @property
    def default(self) -> "Tune":
        """The verb with the settings that the preset gives to a command, which names the preset and the method."""
        if self.preset is None:
            return Tune()
        config = TuneConfig.preset(self.preset, method=self.config.method)
        return Tune(config=replace(config, method=TuneConfig().method))

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        naming = self.heads and self.config.method == "ica"
        own = self.prompts is not None
        if naming and not own and self.count < 8:
            raise ValueError(f"n={self.count}: give at least 8 prompts to choose heads and to test them, or --no-heads")
        for name in ("method", "loss_on", "dataset_size") if own or self.own_task is not None else ():
            if (given := getattr(self.config, name)) != getattr(self.default.config, name):
                raise ValueError(f"{name}={given} is for the translation task: leave it out, or --prompts and --task")
        model, prompts, corrupted = self.prepare(with_corrupted=naming)
        task = unseen = OwnPrompts(prompts, corrupted) if own else self.source
        if isinstance(task, OwnPrompts):
            _, unseen = task.split(self.seed)  # as `tune` does
            if naming and (len(unseen.prompts) < 8 or unseen.prompts.n_groups < 2):
                raise ValueError(
                    f"{counted(unseen.prompts)}, of {len(prompts)}, are not learned from: to choose heads and to test "
                    "them takes 8, of two groups or more; give a file of at least 40, or --no-heads"
                )
            prompts = unseen.prompts
        preset = f" of preset {self.preset}, but for what was given" if self.preset else ""
        print(f"settings{preset}: {described(self.config, self.preset)}", flush=True)
        if self.config.method == "standard":
            prompts = replace(self.task, n_examples=0).sample(self.count, model.tokenizer, seed=self.seed)
        roles = [name for name in task.roles if len(prompts.relations.get(name, ()))]
        if naming and not roles:
            raise ValueError(f"the prompts have no row of {', '.join(task.roles)}, so no head can be named: --no-heads")
        run = tune(model, task, self.config, seed=self.seed, out=results.new, state=results.folder)
        print(run.log.to_string(index=False, float_format="{:.3g}".format, na_rep="–"))
        before = evaluate(model, prompts, options=self.options)
        asked = with_shares(prompts, resolve(prompts, None))
        scores, after = score_and_evaluate(run.model, prompts, asked, options=self.options)
        highest = {name: ranked(scores, name) for name in roles[:MOST_MAPS]}
        highest = {name: rows for name, rows in highest.items() if len(rows)}  # no head need have a query of a relation
        best = ", ".join(f"{name} {head_value(rows.iloc[0])}" for name, rows in highest.items()) or "none"
        of = f", on the {counted(prompts)} that it did not learn from" if own else ""
        summary = (
            f"{task.target_name} is correct in {first_token(before)} of cases before tuning and in "
            f"{first_token(after)} after it{of}"
        )
        if "history" in set(after.frame["predictor"]):
            summary += f" (history ceiling {first_token(after, 'history')})"
        print(f"\n{summary}.")
        references = ", with reference accuracies" if task.references else ""
        sections: list[Section] = [
            ("Accuracy over steps", "Probes with 95% intervals over few prompts.", run.figures["accuracy"])
        ]
        if (best_heads := run.figures.get("best heads")) is not None:
            sections.append(("The best head over steps", "It may be another head at each step.", best_heads))
        sections += accuracy_sections(after, f"On fresh prompts{references}.", "Accuracy after tuning")
        if highest:
            maps = plots.head_maps(scores, [*highest])
            sections.append(("All heads after tuning", "Tap or hover for a number.", maps))
        if naming:
            result = localize(run.model, unseen, len(prompts), self.seed, options=self.options)
            save_localization(result, results.new / "heads")
            print(f"{headline_of(result)}\nheads: {results.folder / 'heads' / 'report.html'}")
            ablated = plots.ablation(result.evidence.set_ablations) if result.named_heads else ""
            sections.append(("Heads named after tuning", headline_of(result), ablated))
        print(f"adapter: {results.folder / 'adapter'}")
        self.finish(
            results,
            run.table,
            title=f"{self.model} tuned: {self.config.method}",
            summary=f"{summary}. Highest scores: {best}.",
            sections=sections,
        )
