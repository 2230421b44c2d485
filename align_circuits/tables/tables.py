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

INTEGER_KEYS = ("layer", "head", "offset", "draw", "seed", "step", "query", "key")
"""Key columns of whole numbers that may be missing (`<NA>`): a layer's mean attention has a layer and no head."""

FILES = ("table.csv", "table.csv.xz")
"""The names under which a table is saved: as text, or compressed."""


@dataclass(frozen=True)
class Provenance:
    """Enough to repeat a measurement, and to distinguish two tables."""

    verb: str
    """The public function that made it, such as `"score_heads"`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments, as JSON."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Name, shape, dtype, device and a hash of the weights."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The task and its seed, and a hash of the tokens."""
    engine: str = ""
    """What ran: `"replay"`, `"fast"` or `"reference"`."""
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
    """One row a measurement. Key columns such as level, layer, head, metric; then `VALUES`. `level` says what a row is
    about (`"model"`, `"layer"`, `"head"`, `"kv_head"`, `"edge"`); keys that it does not have are missing (`<NA>`)."""
    provenance: Provenance
    values: Float[ndarray, "row prompt"] | None = None
    """The same measurement prompt by prompt, where it was kept: what paired differences are computed from."""
    weights: Float[ndarray, "row prompt"] | None = None
    """How much each of `values` weighs: its number of targets, or the denominator of a ratio of sums."""

    def __post_init__(self):
        if missing := [column for column in VALUES if column not in self.frame.columns]:
            raise ValueError(f"a table needs the columns {', '.join(VALUES)}; {', '.join(missing)} is missing")
        object.__setattr__(self, "frame", _with_integer_keys(self.frame))

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
        # A share that is 1 in every prompt has a bootstrap interval of length 0; other metrics have no bound to fall
        # back on.
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

        None stands for a missing value: `where(head=None)` selects the rows that are about no head.

        Raises:
            KeyError: A column or a value that the table does not have.
        """
        keep = np.ones(len(self), dtype=bool)
        for column, value in keys.items():
            if column not in self.keys:
                raise KeyError(f"no key column {column!r}; this table has {', '.join(self.keys)}")
            values = list(value) if isinstance(value, list | tuple | set) else [value]
            # a missing value equals nothing, not even itself
            present = [None if pd.isna(key) else key for key in self.frame[column].unique()]
            values = [None if pd.isna(value) else value for value in values]
            if absent := [value for value in values if value not in present]:
                known = ", ".join(map(str, present[:20]))
                raise KeyError(f"no {column} {absent[0]!r} in this table; it has {known}")
            selected = self.frame[column].isin([value for value in values if value is not None])
            keep &= (selected | (self.frame[column].isna() & (None in values))).to_numpy(dtype=bool)
        return self._rows(np.flatnonzero(keep))

    def heads(self) -> "Table":
        """Returns the rows of single heads, without those of layers and of the whole model."""
        single = self.frame["level"] == "head" if "level" in self.frame else self.frame["head"].notna()
        return self._rows(np.flatnonzero(single))

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
            others = [key for key in self.keys if key not in ("level", "layer", "head", "metric")]
            raise ValueError(f"several rows a head: choose one value of {' and '.join(others)} with .where(...) first")
        return frame.pivot(index="layer", columns="head", values="value").to_numpy(dtype=float)

    def __sub__(self, other: "Table") -> "Table":
        """Returns the difference, row paired with row by the key columns.

        Where both tables kept their prompts, and they are the same prompts, the interval is that of the paired
        difference; else there is no honest interval, and low and high are NaN.

        Raises:
            ValueError: Tables of other rows, or of patches in different directions.
        """
        left, right = (_directions(table) for table in (self, other))
        if left and right and left != right:
            raise ValueError(
                f"tables of direction {' and '.join(map(repr, left))} and of {' and '.join(map(repr, right))}: what "
                "noise takes away and what denoising brings back are different questions, measured in different runs; "
                "measure both tables with one direction, or select it with .where(direction=...) on both sides"
            )
        if sorted(self.keys) != sorted(other.keys):
            raise ValueError(f"tables with different key columns: {self.keys} and {other.keys}")
        # merge pairs missing keys with missing keys, which an index does not
        places = other.frame[self.keys].assign(_place=np.arange(len(other)))
        paired = self.frame[self.keys].merge(places, how="left", on=self.keys)["_place"]
        if len(self) != len(other) or sorted(paired.fillna(-1)) != list(range(len(other))):
            raise ValueError(
                "the tables do not hold the same rows: select the same keys with .where(...) on both sides"
            )
        right = other._rows(paired.to_numpy(dtype=int))
        same = self.provenance.data == other.provenance.data
        low = high = np.full(len(self), np.nan)
        if same and self.values is not None and right.values is not None:
            low, high = stats.bootstrap(self.values, self.weights, minus=(right.values, right.weights))  # pyright: ignore[reportArgumentType]
        frame = self.frame.assign(
            value=self.frame["value"].to_numpy() - right.frame["value"].to_numpy(),
            low=low,
            high=high,
            n=np.minimum(self.frame["n"].to_numpy(), right.frame["n"].to_numpy()),
        )
        settings = {"left": asdict(self.provenance), "right": asdict(other.provenance)}
        return Table(frame, replace(self.provenance, verb="difference", settings=settings))

    def save(self, folder: str | Path, *, compress: bool = False) -> None:
        """Writes the table and `provenance.json` into `folder`; per-prompt values are not kept.

        Args:
            folder: Where to; made if it does not exist.
            compress: Whether to write `table.csv.xz` instead of `table.csv`.
        """
        folder = Path(folder)
        written, other = FILES[::-1] if compress else FILES
        with replacing(folder / written) as path:
            self.frame.to_csv(path, index=False, compression="xz" if compress else None)
        (folder / other).unlink(missing_ok=True)  # of an earlier save: one table to a folder
        with replacing(folder / "provenance.json") as path:
            path.write_text(self.provenance.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Table":
        """Reads what `save` wrote.

        Raises:
            ValueError: `folder` does not hold both files.
        """
        folder = Path(folder)
        path = next((folder / name for name in FILES if (folder / name).is_file()), folder / FILES[0])
        if missing := [file.name for file in (path, folder / "provenance.json") if not file.is_file()]:
            raise ValueError(
                f"no table in {str(folder)!r}: {' and '.join(missing)} missing; give a folder that Table.save wrote"
            )
        provenance = Provenance.from_json((folder / "provenance.json").read_text(encoding="utf-8"))
        try:
            return cls(pd.read_csv(path), provenance)
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            raise ValueError(f"{str(path)!r} is no table ({error})") from error

    def _rows(self, index: ndarray) -> "Table":
        kept = {name: None if (part := getattr(self, name)) is None else part[index] for name in ("values", "weights")}
        return replace(self, frame=self.frame.iloc[index].reset_index(drop=True), **kept)


def _directions(table: Table) -> list[str]:
    """The directions of the patches that a table measures; those kept before they had a column name it as a setting."""
    if "direction" in table.keys:
        return sorted(table.frame["direction"].dropna().unique())
    direction = table.provenance.settings.get("direction")
    return [direction] if direction else []


def with_level(keys: pd.DataFrame) -> pd.DataFrame:
    """Returns key columns with `level` before `layer`: a row without a head is about a layer, or about the model."""
    of_head = keys["head"].notna() if "head" in keys else np.zeros(len(keys), dtype=bool)
    level = np.select([of_head, keys["layer"].notna()], ["head", "layer"], "model")
    place = keys.columns.tolist().index("layer")
    return pd.concat([keys.iloc[:, :place], pd.Series(level, keys.index, name="level"), keys.iloc[:, place:]], axis=1)


def _with_integer_keys(frame: pd.DataFrame) -> pd.DataFrame:
    """Makes `INTEGER_KEYS` whole numbers, which pandas turns into floats or objects where some are missing."""
    types = {}
    for name in (name for name in INTEGER_KEYS if name in frame):
        column: Any = frame[name]
        if pd.api.types.infer_dtype(column, skipna=True) in _NUMBERS and (column.dropna() % 1 == 0).all():
            # Nullable only where a key is missing, so that whole columns merge and save as plain integers.
            types[name] = "Int64" if column.isna().any() else "int64"
    return frame.astype(types)


_NUMBERS = ("integer", "integer-na", "floating", "empty")


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("align-circuits", "torch", "transformers", "transformer-lens", "peft"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
