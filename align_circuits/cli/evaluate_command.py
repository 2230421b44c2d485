"""`align-circuits evaluate`."""

from dataclasses import dataclass
from math import isnan
from typing import Any, Literal

import pandas as pd

from align_circuits.cli.command_base import PromptVerb, accuracy_sections, counted, distinct, interval, intervals_over
from align_circuits.cli.folders import Results
from align_circuits.report.page import Section
from align_circuits.run.evaluation import answers, evaluate
from align_circuits.run.target_metrics import CHOICE_ACCURACY, Metric
from align_circuits.tables.baselines import unsolved
from align_circuits.tables.tables import Table

MOST_SHOWN = 200
"""Letters of a text that are shown before an answer; of a longer one the last."""


@dataclass(frozen=True)
class Evaluate(PromptVerb):
    """Measures accuracy and other metrics with `evaluate`."""

    metrics: tuple[Literal["log_prob", "logit", "logit_diff", "prob", "accuracy", "choice_accuracy"], ...] | None = None
    """What is measured beside the accuracy: by default log_prob, and choice_accuracy and logit_diff where the file has
    wrong answers."""

    @property
    def wrong_for(self) -> str | None:
        """The option that needs wrong answers."""
        asked = [metric for metric in ("logit_diff", CHOICE_ACCURACY) if metric in (self.metrics or ())]
        return f"--metrics {asked[0]}" if asked else None

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        model, prompts, _ = self.prepare()
        chosen: list[Metric] = [*dict.fromkeys(("accuracy", *(self.metrics or ())))]
        table = evaluate(model, prompts, metrics=chosen if self.metrics else None, options=self.options)
        shown = distinct(table)
        rows = table.where(metric="accuracy", kind="all", offset=None).frame
        accuracy = {row["predictor"]: interval(row) for _, row in rows.iterrows()}
        summary = f"{accuracy['model']} of all target tokens are correct"
        if "history" in accuracy:
            summary += f"; the history ceiling, which needs no alignment, is {accuracy['history']}"
        if CHOICE_ACCURACY in set(table.frame["metric"]):
            row = table.where(metric=CHOICE_ACCURACY, kind="all", offset=None).frame.iloc[0]
            told = unsolved(row, 0.5, prompts.n_groups, table.unit)
            told = "; ".join(filter(None, ["a guess: 0.50", told]))
            summary += f". Between right and wrong answer it is right in {interval(row)} of cases ({told})"
        print(f"{self.model}: {counted(prompts)}; {intervals_over(table)}\n\n{summary}.\n")
        print(_readable(shown))
        sections: list[Section] = [*accuracy_sections(table), ("All numbers", f"With {intervals_over(table)}.", shown)]
        if self.prompts is not None or self.own_task is not None:
            answered: Any = answers(model, prompts, options=self.options)
            before = [
                "".join(
                    text
                    for text, real in zip(prompts.texts_at(row)[: end + 1], prompts.mask[row], strict=False)
                    if real
                )
                for row, end in prompts.targets[["prompt", "query_pos"]].itertuples(index=False, name=None)
            ]
            shown_texts = [f"…{text[-MOST_SHOWN:]}" if len(text) > MOST_SHOWN else text for text in before]
            answered.insert(1, "text", shown_texts)
            wrong = answered[~answered["right"]]
            rows = wrong.head(5).to_dict("records")
            told = [f"\nWrong answers, {len(rows)} of {len(wrong)}: that of the model, then the right one.\n"] * bool(
                rows
            )
            print("\n".join([*told, *(f"  {row['answer']!r}, not {row['target']!r}: {row['text']}" for row in rows)]))
            answered = answered.sort_values(["right", "p"], kind="stable").head(200)
            quoted = answered.assign(**{name: answered[name].map(repr) for name in ("answer", "target")})  # " " is seen
            page = quoted.to_html(index=False, border=0, float_format="{:.2f}".format)
            note = "What the model answers after each text: wrong answers first. p: the probability of the right token."
            sections.insert(-1, ("Answers", note, f'<div class="wide wrapped answers">{page}</div>'))
        self.finish(results, table, title=f"Accuracy of {self.model}", summary=f"{summary}.", sections=sections)


def _readable(table: Table) -> str:
    """The rows of a table in columns: the predictor if there are several, the metric, the targets, the value, and n."""
    frame = table.frame
    offsets = frame["offset"]
    printed = pd.DataFrame(
        {
            "predictor": frame["predictor"],
            "metric": frame["metric"],
            "targets": frame["kind"].where(offsets.isna(), "offset " + offsets.astype(str)),
            "value": frame["value"].map("{:.3f}".format),
            "95% interval": [
                "" if isnan(low) else f"[{low:.3f}, {high:.3f}]"
                for low, high in zip(frame["low"], frame["high"], strict=True)
            ],
            "n": frame["n"],
        }
    )
    same = [column for column in ("predictor", "targets") if len({*printed[column]}) == 1]
    return printed.drop(columns=same).to_string(index=False)
