"""A table of measurements with intervals, and where they came from."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.files import replacing
from align_circuits.tables import intervals as stats

VALUES = ("value", "low", "high", "n")
"""The columns that are measured; every other column is a key."""


@dataclass(frozen=True)
class Provenance:
    """Enough to run a table again, and to tell two tables apart."""

    verb: str
    """The public function that made it, such as `"score_heads"`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments, as JSON."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Name, shape, dtype, device and a hash of the weights."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The task and its seed, and a hash of the tokens."""
    engine: str = ""
    """What ran: `"cone"` (a sweep, only what each edit changes), `"fast"` or `"reference"`."""
    versions: Mapping[str, str] = field(default_factory=lambda: dict(_versions()))

    def to_json(self) -> str:
        """Returns the provenance as indented JSON."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Provenance":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: Another text.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"no provenance of a table ({error}): give what Table.save wrote") from error


@dataclass(frozen=True, eq=False)
class Table:
    """Measurements in long form: key columns, then value, low, high and n.

    `low` and `high` are the ends of a 95% interval over prompts; `n` is the number of targets that the value rests on.
    """

    frame: pd.DataFrame
    """One row a measurement. Key columns such as layer, head, metric; then `VALUES`."""
    provenance: Provenance
    values: Float[ndarray, "row prompt"] | None = None
    """The same measurement prompt by prompt, where it was kept: what paired differences are computed from."""
    weights: Float[ndarray, "row prompt"] | None = None
    """How much each of `values` weighs: its number of targets, or the denominator of a ratio of sums."""

    def __post_init__(self):
        if missing := [column for column in VALUES if column not in self.frame.columns]:
            raise ValueError(f"a table needs the columns {', '.join(VALUES)}; {', '.join(missing)} is missing")

    @classmethod
    def from_prompts(
        cls,
        keys: pd.DataFrame,
        values: Float[ndarray, "row prompt"],
        weights: Float[ndarray, "row prompt"],
        provenance: Provenance,
        *,
        counts: Float[ndarray, "row prompt"] | None = None,
        bounded: Bool[ndarray, " row"] | bool = True,
    ) -> "Table":
        """Makes a table of means over prompts with bootstrap intervals.

        Args:
            keys: The key columns, one row for each row of `values`.
            values: Each row's mean in each prompt; anything where the weight is 0.
            weights: How much it weighs: the number of its targets, or the denominator of a ratio of sums.
            provenance: Where the values came from.
            counts: The number of targets where that is not the weight.
            bounded: Which rows lie in [0, 1] and get `stats.proportion`'s interval; others get `stats.bootstrap`'s.
        """
        low, high = np.full((2, len(values)), np.nan)
        for rows, interval in ((bounded, stats.proportion), (np.logical_not(bounded), stats.bootstrap)):
            rows = np.broadcast_to(rows, len(values))
            low[rows], high[rows] = interval(values[rows], weights[rows])
        frame = keys.reset_index(drop=True).assign(
            value=stats.weighted_mean(values, weights),
            low=low,
            high=high,
            n=(weights if counts is None else counts).sum(1).astype(int),
        )
        return cls(frame, provenance, values, weights)

    @property
    def keys(self) -> list[str]:
        """The names of the key columns."""
        return [column for column in self.frame.columns if column not in VALUES]

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        rows = self.frame.to_string(max_rows=20, float_format="{:.3f}".format)
        return f"{rows}\n[{self.provenance.verb}, {len(self)} rows]"

    def _repr_html_(self) -> str:
        return self.frame.to_html(max_rows=20, float_format="{:.3f}".format)

    def where(self, **keys: Any) -> "Table":
        """Returns the rows whose key columns have the given values; a list of values means any of them.

        Raises:
            KeyError: A column or a value that the table does not have.
        """
        keep = np.ones(len(self), dtype=bool)
        for column, wanted in keys.items():
            if column not in self.keys:
                raise KeyError(f"no key column {column!r}; this table has {', '.join(self.keys)}")
            wanted = wanted if isinstance(wanted, list | tuple | set) else [wanted]
            if absent := [value for value in wanted if value not in set(self.frame[column])]:
                known = ", ".join(map(str, self.frame[column].unique()[:20]))
                raise KeyError(f"no {column} {absent[0]!r} in this table; it has {known}")
            keep &= self.frame[column].isin(list(wanted)).to_numpy()
        return self._rows(np.flatnonzero(keep))

    def heads(self) -> "Table":
        """Returns the rows of single heads, without the layer means (head = -1)."""
        return self._rows(np.flatnonzero((self.frame["head"] >= 0).to_numpy()))

    def top(self, metric: str, n: int = 5) -> "Table":
        """Returns the `n` heads with the highest value of `metric`, best first; heads without a value are left out."""
        table = self.where(metric=metric).heads()
        value = table.frame["value"].to_numpy(dtype=float)
        best = np.argsort(-value, kind="stable")[: min(n, int((~np.isnan(value)).sum()))]  # NaN sorts last
        return table._rows(best)

    def grid(self, metric: str) -> Float[ndarray, "layer head"]:
        """Returns `metric` as an array over layers and heads.

        Raises:
            ValueError: A head has more than one row: select by the other key columns first.
        """
        frame = self.where(metric=metric).heads().frame
        if frame.duplicated(["layer", "head"]).any():
            others = [key for key in self.keys if key not in ("layer", "head", "metric")]
            raise ValueError(f"several rows a head: choose one value of {' and '.join(others)} with .where(...) first")
        return frame.pivot(index="layer", columns="head", values="value").to_numpy(dtype=float)

    def __sub__(self, other: "Table") -> "Table":
        """Returns the difference, row paired with row by the key columns.

        Where both tables kept their prompts, and they are the same prompts, the interval is that of the paired
        difference; else there is no honest interval, and low and high are NaN.
        """
        if sorted(self.keys) != sorted(other.keys):
            raise ValueError(f"tables with different key columns: {self.keys} and {other.keys}")
        at = other.frame.reset_index().set_index(self.keys)["index"]
        mine = self.frame.set_index(self.keys).index
        if at.index.has_duplicates or not mine.isin(at.index).all() or len(at) != len(mine):
            raise ValueError(
                "the tables do not hold the same rows: select the same keys with .where(...) on both sides"
            )
        order = at.loc[mine].to_numpy()
        there = other._rows(order)
        same = self.provenance.data == other.provenance.data
        low = high = np.full(len(self), np.nan)
        if same and self.values is not None and there.values is not None:
            low, high = stats.bootstrap(self.values, self.weights, minus=(there.values, there.weights))  # pyright: ignore[reportArgumentType]
        frame = self.frame.assign(
            value=self.frame["value"].to_numpy() - there.frame["value"].to_numpy(),
            low=low,
            high=high,
            n=np.minimum(self.frame["n"].to_numpy(), there.frame["n"].to_numpy()),
        )
        settings = {"left": asdict(self.provenance), "right": asdict(other.provenance)}
        return Table(frame, replace(self.provenance, verb="difference", settings=settings))

    def save(self, folder: str | Path) -> None:
        """Writes `table.csv` and `provenance.json` into `folder`; per-prompt values are not kept."""
        folder = Path(folder)
        with replacing(folder / "table.csv") as path:
            self.frame.to_csv(path, index=False)
        with replacing(folder / "provenance.json") as path:
            path.write_text(self.provenance.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Table":
        """Reads what `save` wrote.

        Raises:
            ValueError: `folder` does not hold both files.
        """
        folder = Path(folder)
        if missing := [name for name in ("table.csv", "provenance.json") if not (folder / name).is_file()]:
            raise ValueError(
                f"no table in {str(folder)!r}: {' and '.join(missing)} missing; give a folder that Table.save wrote"
            )
        provenance = Provenance.from_json((folder / "provenance.json").read_text(encoding="utf-8"))
        try:
            return cls(pd.read_csv(folder / "table.csv"), provenance)
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            raise ValueError(f"{str(folder / 'table.csv')!r} is no table ({error})") from error

    def _rows(self, index: ndarray) -> "Table":
        kept = {name: None if (part := getattr(self, name)) is None else part[index] for name in ("values", "weights")}
        return replace(self, frame=self.frame.iloc[index].reset_index(drop=True), **kept)


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("align-circuits", "torch", "transformers", "transformer-lens", "peft"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
