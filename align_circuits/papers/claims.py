"""What an experiment is: a config for each scale, a table, figures, and checks that can fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import pandas as pd
import plotly.graph_objects as go

from align_circuits.tables.tables import Table

Scale = Literal["smoke", "cpu", "paper"]
"""`smoke` takes seconds, `cpu` at most 30 minutes on two cores, `paper` is the paper's own setting."""

SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")


@dataclass(frozen=True)
class Measured:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec or '.2f'}} [{self.low:{spec or '.2f'}}, {self.high:{spec or '.2f'}}]"


@dataclass(frozen=True)
class Check:
    """One claim of a paper beside what was measured.

    The claim holds if the measured value is at least (`">="`) or at most (`"<="`) the threshold. The same statistic
    measured on a negative control must miss the threshold: a check that its control passes proves nothing.
    """

    claim: str
    """The paper's claim, in words."""
    measured: Measured
    relation: Literal[">=", "<="]
    threshold: float
    """Fixed before the run."""
    control: Measured
    """The same statistic where the claim should not hold."""
    control_is: str
    """What the control is."""
    published: str = ""
    """The paper's own number, where it gives one."""

    @property
    def holds(self) -> bool:
        """Whether the measured value meets the threshold."""
        return self._meets(self.measured.value)

    @property
    def control_fails(self) -> bool:
        """Whether the control misses the threshold, as it should."""
        return not self._meets(self.control.value)

    def _meets(self, value: float) -> bool:
        return value >= self.threshold if self.relation == ">=" else value <= self.threshold

    def row(self) -> dict[str, str]:
        """Returns the check as a row for people."""
        return {
            "claim": self.claim,
            "measured": str(self.measured),
            "needed": f"{self.relation} {self.threshold:g}",
            "holds": "yes" if self.holds else "no",
            "control": f"{self.control_is}: {self.control}",
            "control fails": "yes" if self.control_fails else "no",
            "published": self.published,
        }


@runtime_checkable
class Run(Protocol):
    """Measures an experiment."""

    def __call__(self, config: Any, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
        """Returns the table; cells that are finished in `folder` are not run again."""
        ...


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper, reproducible by name."""

    name: str
    """Such as `"icatune/fig3"`."""
    title: str
    source: str
    """Author, year, figure."""
    scales: Mapping[Scale, Any]
    """A frozen config for each scale."""
    run: Run
    draw: Callable[[Table], Mapping[str, go.Figure]]
    """From the table alone to figures by panel."""
    check: Callable[[Table], list[Check]] = field(default=lambda _: [])
    """From the table alone to the paper's claims."""
    published: str = ""
    """What the paper reports, in a sentence, beside which ours is read."""
    compares_models: bool = False
    """Whether it takes several models; the others measure one."""
    makes_models: bool = False
    """Whether it makes the models that it measures, or measures none: it takes no model."""


def checks_html(checks: Sequence[Check]) -> str:
    """Returns the checks as an HTML table."""
    return pd.DataFrame([check.row() for check in checks]).to_html(index=False, border=0)
