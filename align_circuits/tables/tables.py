"""A table of measurements with intervals."""

import csv
import html
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from io import StringIO
from itertools import product
from lzma import LZMAError
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from align_circuits.checks import checked, described
from align_circuits.jobs.files import is_path, replacing
from align_circuits.jobs.folders import read_whole, replacing_in
from align_circuits.prompts.prompts import SAME_INPUTS
from align_circuits.tables import baselines, calls
from align_circuits.tables import intervals as stats
from align_circuits.tables.provenance import EMPTY, TEXTS, Provenance
from align_circuits.tables.ranking import End, best_end

VALUES = ("value", "low", "high", "n")
"""The columns that are measured; every other column is a key."""

INTEGER_KEYS = ("layer", "head", "offset", "draw", "seed", "step", "query", "key")
"""Key columns of whole numbers that may be missing (`<NA>`): a layer's mean attention has a layer and no head."""

FILES = ("table.csv", "table.csv.xz")
"""The names under which a table is saved: as text, or compressed."""

PER_PROMPT = "values.safetensors"
"""The name under which `values` and `weights` are saved."""

BASELINES = "baselines"
"""The folder within that of a table that holds its baselines."""

SHARES = ("accuracy", "choice_accuracy", "prob", "interchange", "corrupted_correct")
"""Metrics in [0, 1]."""

YES_OR_NO = tuple(metric for metric in SHARES if metric != "prob")
"""Those of which each target of a model gives 0 or 1."""

LIMITS = {"log_prob": (-np.inf, 0.0), "kl": (0.0, np.inf)}
"""The least and the most that other metrics can be."""

_LEVELS = ("interchange_accuracy", "interchange")
"""Verbs whose numbers are metrics of edited runs, not changes of them."""

_ESTIMATES = ("attribute_heads", "attribute_edges", "attribute", "direct_logit_attribution")
"""Verbs whose numbers are no differences of measured metrics, and have no bounds."""


@dataclass(frozen=True, eq=False)
class Table:
    """Measurements in long form: key columns, then value, low, high and n.

    `low` and `high` are the ends of a 95% interval over prompts; `n` is the number of targets that the value rests on.
    An interval of length zero says that all prompts gave the same value, such as a head that does nothing: these
    prompts show no spread, which does not exclude others. A share that is the same in all prompts has an exact bound
    instead. NaN: fewer than two prompts, or nothing to tell.
    """

    frame: pd.DataFrame
    """One row a measurement. Key columns such as level, layer, head, metric; then `VALUES`. `level` says what a row is
    about (`"model"`, `"layer"`, `"head"`, `"kv_head"`, `"edge"`, `"set"`); keys that it lacks are missing (`<NA>`)."""
    provenance: Provenance
    values: Float[ndarray, "row prompt"] | None = None
    """The same measurement prompt by prompt, or by groups of related prompts (`Prompts.group`), where it was kept: what
    paired differences are computed from."""
    weights: Float[ndarray, "row prompt"] | None = None
    """How much each of `values` weighs: its number of targets."""
    baselines: "Table | None" = None
    """Of effects: the metrics without any edit, keyed by `run`, `metric`, and `kind` if the effects are. Runs are
    `"clean"`, `"corrupted"`, their paired difference `"clean - corrupted"`, and `"chance"`, what a guess would get."""
    call: calls.Call | None = None
    """The call that made it, which `align-circuits rerun` repeats once the table is saved; None of what was computed
    from tables, and of tables that were read."""

    def __post_init__(self):
        if missing := [column for column in VALUES if column not in self.frame.columns]:
            raise ValueError(f"a table needs the columns {', '.join(VALUES)}; {', '.join(missing)} is missing")
        if self.values is not None and len(self.values) != len(self.frame):
            raise ValueError(f"{len(self.values)} rows of per-prompt values for a frame of {len(self.frame)}: cut both")
        values, weights = (None if each is None else each.shape for each in (self.values, self.weights))
        if values not in (None, weights):
            raise ValueError(f"values of shape {values} and weights of shape {weights}: give both, in one shape")
        object.__setattr__(self, "frame", _with_integer_keys(self.frame))

    @classmethod
    def from_prompts(
        cls,
        keys: pd.DataFrame,
        values: Float[ndarray, "row prompt"],
        weights: Float[ndarray, "row prompt"],
        provenance: Provenance,
        *,
        bounded: Bool[ndarray, " row"] | bool = True,
        changes: Bool[ndarray, " row"] | bool = False,
        levels: Bool[ndarray, " row"] | bool = False,
        group: Any = None,
    ) -> "Table":
        """Makes a table of means over prompts with 95% intervals.

        Args:
            keys: The key columns, one row for each row of `values`.
            values: Each row's mean in each prompt; anything where the weight is 0.
            weights: How much it weighs: the number of its targets.
            provenance: Where the values came from.
            bounded: Which rows lie in [0, 1] and get `stats.proportion`'s interval.
            changes: Which others are changes of such rows, in [-1, 1], and get `stats.proportion_change`'s. The rest
                get `stats.mean_interval`'s.
            levels: Which of the rest are metrics themselves, no changes of them, so that intervals end at `LIMITS`.
            group: `Prompts.group`, an integer for each prompt; related prompts have the same. Values and intervals are
                then those of groups.
        """
        if group is not None:
            values, weights = stats.by_group(values, weights, np.asarray(group))
        low, high = np.full((2, len(values)), np.nan)
        # A share that is 1 in every prompt has no spread, but an exact bound; other metrics have no bound.
        rest = ~(np.broadcast_to(bounded, len(values)) | changes)
        changes = np.broadcast_to(changes, len(values))
        yes_or_no = "metric" in keys and keys["metric"].isin(YES_OR_NO).to_numpy(bool)[changes]
        of_changes = partial(stats.proportion_change, yes_or_no=yes_or_no)
        for rows, interval in ((bounded, stats.proportion), (changes, of_changes), (rest, stats.mean_interval)):
            rows = np.broadcast_to(rows, len(values))
            low[rows], high[rows] = interval(values[rows], weights[rows])
        for metric, (least, most) in LIMITS.items():
            rows = levels & np.isin(keys["metric"], [metric]) if "metric" in keys else np.zeros(len(keys), dtype=bool)
            low[rows], high[rows] = low[rows].clip(least), high[rows].clip(max=most)
        frame = keys.reset_index(drop=True).assign(
            value=stats.weighted_mean(values, weights), low=low, high=high, n=weights.sum(1).astype(int)
        )
        return cls(frame, provenance, values, weights)

    @property
    def keys(self) -> list[str]:
        """The names of the key columns."""
        return [column for column in self.frame.columns if column not in VALUES]

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        return "\n".join([self._shown.to_string(max_rows=20, float_format="{:.3f}".format), *self._footnotes])

    def _repr_html_(self) -> str:
        rows = self._shown.to_html(max_rows=20, float_format="{:.3f}".format)
        return rows + "".join(f"<div>{html.escape(line)}</div>" for line in self._footnotes)

    @property
    def _footnotes(self) -> list[str]:
        shown, rows = len(self._shown), f"{len(self)} rows"
        if shown < len(self):
            rows = f"{shown} of {rows}: the others are about part of the targets, and equal these, about all"
        return [f"[{self.provenance.verb}, {rows}]", *self.remarks]

    @property
    def _shown(self) -> pd.DataFrame:
        """The rows, without those of some targets that are all targets: the first tokens of one-token answers."""
        of_targets = [key for key in ("kind", "offset") if key in self.keys]
        if not of_targets or not (whole := self._of_all).any():
            return self.frame
        # As texts, since a missing key equals nothing, not even another missing one.
        measured = self.frame[[*(key for key in self.keys if key not in of_targets), "n"]].astype(str)
        rows = pd.Series(list(measured.itertuples(index=False, name=None)))
        return self._rows(np.flatnonzero(whole | ~rows.isin(rows[whole]).to_numpy())).frame

    @property
    def _of_all(self) -> Bool[ndarray, " row"]:
        """Which rows are over all targets of a prompt, of any kind and at any place."""
        of_all = np.ones(len(self), dtype=bool)
        for key, value in (("kind", "all"), ("offset", None)):
            if key in self.keys:
                of_all &= (self.frame[key].isna() if value is None else self.frame[key] == value).to_numpy(dtype=bool)
        return of_all

    @property
    def remarks(self) -> list[str]:
        """What is shown below the rows: the baselines of each metric, and the warnings."""
        lines = [] if self.baselines is None else baselines.described(self._own_baselines.frame)
        return [*lines, *(f"Note: {warning}." for warning in self.warnings)]

    @property
    def is_paired(self) -> bool:
        """Whether the baselines have clean and corrupted prompts, so that the effects can be normalised."""
        return self.baselines is not None and baselines.GAP in set(self.baselines.frame["run"])

    @property
    def _own_baselines(self) -> "Table":
        """The baselines of the metrics and kinds that are in the table."""
        assert self.baselines is not None
        keys = [key for key in ("kind", "metric") if key in self.keys and key in self.baselines.keys]
        frame = self.baselines.frame
        in_table = {key: self.frame[key].tolist() for key in keys}
        return self.baselines._rows(np.flatnonzero(frame[keys].isin(in_table).all(axis=1)))

    @property
    def warnings(self) -> list[str]:
        """What leaves effects without a meaning, told by the baselines.

        That is a model that is no better than a guess on the clean prompts, or not shown to be better (the interval of
        its metric reaches that of a guess), and clean and corrupted prompts that differ by less than the interval of
        their difference. Of normalised effects it says where none has a value for this reason.
        """
        if self.baselines is None:
            undefined = "normalized" in self.provenance.settings and np.isnan(self.frame["value"].to_numpy(float)).all()
            why = "no row has a value: effects are not normalised where the interval of clean - corrupted holds 0"
            return [why] * bool(undefined)
        values = self.baselines.values
        counted = {} if values is None else {"n": values.shape[1], "unit": self.unit}
        return [*baselines.warnings_of(self._own_baselines.frame, **counted)]

    @property
    def unit(self) -> Literal["prompts", "groups"]:
        """What intervals are over: prompts, or groups of related prompts (`Prompts.group`)."""
        return "groups" if "groups" in self.provenance.data else "prompts"

    def normalized(self) -> "Table":
        """Returns effects on the scale of the baselines: (patched - corrupted) / (clean - corrupted).

        With `direction="denoise"` 0 is a patch that changes nothing, and 1 one that brings the metric of the clean
        prompts back. With `"noise"` 1 is a patch that changes nothing, and 0 one that brings the metric of the
        corrupted prompts. The metric may leave [0, 1]. Source: Wang et al. (2022), "Interpretability in the Wild";
        Heimersheim and Nanda (2024), "How to use and interpret activation patching".

        Returns:
            The same rows, without per-prompt values and baselines. The 95% interval is that of a ratio over prompts
            (`intervals.ratio`). Value and interval are NaN where the interval of clean - corrupted holds 0: a share of
            what may be nothing says nothing.

        Raises:
            ValueError: A table without corrupted prompts to compare with, or one whose per-prompt values or signs were
                left out.
        """
        if not self.is_paired:
            verb = self.provenance.verb
            if self.baselines is not None:  # of ablation
                raise ValueError(
                    f"effects of {verb!r} have no scale from corrupted to clean prompts, since it runs no corrupted "
                    "ones: call patch_heads(model, Pair(clean, corrupted)), or divide by the metric of the intact "
                    "model, in table.baselines"
                )
            raise ValueError(
                f"a table of {verb!r} without the metric on clean and corrupted prompts: give one of patch_heads, "
                "patch_sites, attribute_heads, patch_edges, patch_paths, attribute_edges or interchange_accuracy, and "
                "normalise tables before they are joined or subtracted"
            )
        runs = self._own_baselines
        if self.values is None or runs.values is None or runs.weights is None:
            raise ValueError("the per-prompt values were left out, of which the intervals are made: keep them in save")
        if self.provenance.settings.get("grad_drop"):
            raise ValueError("scores without a sign (grad_drop) are no changes of the metric: leave grad_drop off")
        by = [key for key in ("kind", "metric") if key in runs.keys and key in self.keys]
        row_keys, run_keys = ([*frame[by].itertuples(index=False, name=None)] for frame in (self.frame, runs.frame))
        of_run = {(run, *key): row for row, (run, key) in enumerate(zip(runs.frame["run"], run_keys, strict=True))}
        value, low, high = np.full((3, len(self)), np.nan)
        for key in dict.fromkeys(row_keys):
            rows, gap_row = np.array([row_key == key for row_key in row_keys]), of_run[baselines.GAP, *key]
            gap, above = runs.values[gap_row], self.values[rows]
            if self.provenance.verb in _LEVELS:
                above = above - runs.values[of_run[baselines.CORRUPTED, *key]]
            elif "noise" in directions_of(self):
                # (patched - clean) + (clean - corrupted) = patched - corrupted, which effects of denoising are already.
                above = above + gap
            if baselines.is_apart(runs.frame.iloc[gap_row]):
                shares = runs.frame["metric"].iloc[gap_row] in SHARES
                value[rows], low[rows], high[rows] = stats.ratio(above, gap, runs.weights[gap_row], shares)
        settings = {**self.provenance.settings, "normalized": True}
        return Table(self.frame.assign(value=value, low=low, high=high), replace(self.provenance, settings=settings))

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
            # To pandas a tensor of any shape is a scalar.
            if odd := [value for value in values if not pd.api.types.is_scalar(value) or np.ndim(value)]:
                raise KeyError(f"{column} is {described(odd[0])}: give a value of that column, or a list of values")
            # a missing value equals nothing, not even itself
            present = [None if pd.isna(key) else key for key in self.frame[column].unique()]
            values = [None if pd.isna(value) else value for value in values]
            if absent := [value for value in values if value not in present]:
                raise KeyError(f"no {column} {absent[0]!r} in this table; it has {', '.join(map(str, present[:20]))}")
            selected = self.frame[column].isin([value for value in values if value is not None])
            keep &= (selected | (self.frame[column].isna() & (None in values))).to_numpy(dtype=bool)
        return self._rows(np.flatnonzero(keep))

    def of_all_targets(self) -> "Table":
        """Returns the rows over all targets of a prompt, where some are of its first or later ones or of one place.

        `top`, `to_array` and the figures take them so. With `.where(kind="first")` before they take those of that kind.
        """
        of_all: dict[str, Any] = {}
        for key, value in (("kind", "all"), ("offset", None)):
            present = self.frame[key].unique() if key in self.keys else []
            present = [None if pd.isna(entry) else entry for entry in present]
            if value in present and len(present) > 1:
                of_all[key] = value
        return self.where(**of_all)

    def heads(self) -> "Table":
        """Returns the rows of single heads, without those of layers and of the whole model.

        Raises:
            ValueError: A table that is not about heads.
        """
        if not {"level", "head"} & {*self.keys}:
            raise ValueError(f"no heads: this table has the keys {', '.join(self.keys)}; give one of single heads")
        single = self.frame["level"] == "head" if "level" in self.frame else self.frame["head"].notna()
        return self._rows(np.flatnonzero(single))

    @property
    def head_indices(self) -> list[tuple[int, int]]:
        """The head of each row as `(layer, head)`, in the table's order: what `heads=` of every verb takes.

        Raises:
            ValueError: Rows that are not of single heads.
        """
        if not {"layer", "head"} <= set(self.keys) or self.frame[["layer", "head"]].isna().to_numpy().any():
            raise ValueError("some rows are of no single head: select those of heads with .heads() first")
        return [(int(layer), int(head)) for layer, head in zip(self.frame["layer"], self.frame["head"], strict=True)]

    @checked
    def top(
        self, metric: str | None = None, n: int = 5, *, by: Literal["highest", "lowest", "absolute"] | None = None
    ) -> "Table":
        """Returns the `n` rows of a metric that matter most, in order; rows without a value are left out.

        They are rows of heads if the metric has any, else of layers, else of edges; and those over all targets, where
        no kind of targets was chosen (`of_all_targets`).

        Args:
            metric: Which to rank by; may be left out where the table has one.
            n: How many rows at most.
            by: What comes first: the `"highest"` value, the `"lowest"`, or the largest `"absolute"` one. By default
                the end that matters: the lowest for what ablation or noise takes away, and for p values; the highest
                for scores, and for what denoising brings back (`tables.ranking.best_end` lists them all).

        Raises:
            KeyError: A metric that the table does not have.
            ValueError: Several rows for a head, a layer or an edge; estimates among measured values (of a screen);
                nothing to rank; or another `by`.
        """
        if by not in (None, "highest", "lowest", "absolute"):
            raise ValueError(f"by={by!r}: choose 'highest', 'lowest' or 'absolute', or leave it out")
        if n < 0:
            raise ValueError(f"n={n}: give how many rows, 0 or more")
        metric = metric or self.only_metric("top({!r})")
        table, part_keys = self.where(metric=metric).of_all_targets()._parts()
        table.check_not_mixed()
        table._check_one_row(part_keys)
        value = table.frame["value"].to_numpy(dtype=float)
        if by is None:
            columns: dict[str, Any] = {key: table.frame[key] for key in table.keys}
            common = {key: column.iloc[0] for key, column in columns.items() if column.nunique(dropna=False) == 1}
            by = best_end(joined_in(self), common)
        order = {"highest": -value, "lowest": value, "absolute": -np.abs(value)}[by]
        # NaN sorts last; stable, so that ties keep the order of the table on every machine.
        best = np.argsort(order, kind="stable")[: min(n, int((~np.isnan(value)).sum()))]
        return table._rows(best)

    def only_metric(self, example: str) -> str:
        """Returns the metric of a table that has one; a message shows `example`, with the name of a metric in it.

        Raises:
            ValueError: The table has several metrics, or none.
        """
        metrics: list[str] = [*dict.fromkeys(self.frame["metric"])] if "metric" in self.frame else []
        if len(metrics) > 1:
            raise ValueError(f"this table has the metrics {', '.join(metrics)}: name one, {example.format(metrics[0])}")
        if not metrics:
            raise ValueError(f"no metric in this table, which has {len(self)} rows by {', '.join(self.keys)}")
        return metrics[0]

    @checked
    def to_array(self, metric: str | None = None) -> Float[ndarray, "layer head"]:
        """Returns `metric` as an array over the layers and heads of the model, over all targets if no kind was chosen.

        The metric may be left out where the table has one. Heads without a row are NaN. Where the provenance does not
        tell the model's size, the rows do.

        Raises:
            ValueError: A head has more than one row, or some are estimates: select by the other key columns first.
        """
        table = self.where(metric=metric or self.only_metric("to_array({!r})")).of_all_targets().heads()
        table.check_not_mixed()
        table._check_one_row(("layer", "head"))
        indices = table.frame[["layer", "head"]].to_numpy(dtype=int)
        model = [self.provenance.model.get(name, 0) for name in ("n_layers", "n_heads")]
        array = np.full(np.maximum(model, indices.max(0, initial=-1) + 1), np.nan)
        array[tuple(indices.T)] = table.frame["value"]
        return array

    def over_seeds(self) -> "Table":
        """Returns the mean over seeds of the rows that agree in every key but `seed`, with its 95% interval over seeds.

        Numbers get Student's t interval (`t_interval` of `tables/intervals.py`; none where all seeds have the same
        number). Where each `value` is True or False, the mean is the share of seeds with True, and the interval is the
        exact binomial one (`binomial_interval`); 0.0 and 1.0 are numbers. `n` is the number of seeds that have a value:
        those without one (NaN) are left out, and one seed has no interval (NaN). Intervals over prompts and per-prompt
        values are dropped. For a paired difference subtract first: `(left - right).over_seeds()`.

        Returns:
            The table without the column `seed`, its rows in the order in which they first occur.

        Raises:
            ValueError: No column `seed`, rows without a seed, or several rows of one seed with equal keys.

        >>> rows = {"arm": ["a", "a", "b", "b"], "seed": [0, 1, 0, 1], "value": [0.4, 0.8, 0.5, np.nan]}
        >>> table = Table(pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=1), Provenance("each"))
        >>> table.over_seeds().frame.round(2)
          arm  value   low  high  n
        0   a    0.6 -1.94  3.14  2
        1   b    0.5   NaN   NaN  1
        """
        frame: Any = self.frame
        if "seed" not in frame or frame["seed"].isna().any():
            raise ValueError("rows without a seed: give each row one, in the key column 'seed'")
        if frame.duplicated(self.keys).any():
            raise ValueError("several rows of one seed with equal keys: tell them apart by a further key column")
        keys = [key for key in self.keys if key != "seed"]
        group = frame.groupby(keys, dropna=False, sort=False).ngroup() if keys else pd.Series(0, frame.index)
        seed = pd.factorize(frame["seed"], sort=True)[0]
        values = np.full((len(set(group)), len(set(seed))), np.nan)
        values[group, seed] = frame["value"].to_numpy(float, na_value=np.nan)
        # One by one, since a column that holds both numbers and truth values is of type object.
        number = frame["value"].notna() & ~frame["value"].map(lambda value: isinstance(value, bool | np.bool_))
        numbers = np.zeros(len(values), dtype=bool)
        numbers[group[number]] = True
        means = frame.loc[~group.duplicated(), keys].reset_index(drop=True)
        return Table(means.assign(**stats.over_seeds(values, ~numbers)), self.provenance)

    def __sub__(self, other: "Table") -> "Table":
        """Returns the difference, row paired with row by the key columns.

        A key that one table lacks is left out, as long as it is the same in all rows of the other that are over all
        targets: so effects by patching can be compared with their estimates by attribution.

        Where both tables kept their prompts, and they are the same prompts, the interval is that of the paired
        difference. That of accuracy and other shares (`SHARES`) stays within its bounds
        (`intervals.proportion_change`), which are -1 and 1, or -2 and 2 for differences of changes; it is NaN where a
        prompt weighs differently on both sides. Where the prompts are known to differ, the interval is that of
        independent prompts (`intervals.unpaired_difference`), mostly too wide where some are the same. Else, as for
        clean and corrupted prompts, the same prompts with other targets, or differences that share a side
        (`in_common`), there is no honest interval, and low and high are NaN. A difference has no baselines.

        Raises:
            ValueError: Tables of other rows, or of patches in different directions, or a key that one table lacks and
                that tells rows of the other apart.
        """
        if not isinstance(other, Table):
            return NotImplemented
        left, right = (directions_of(table) for table in (self, other))
        if left and right and left != right:
            raise ValueError(
                f"tables of direction {' and '.join(map(repr, left))} and of {' and '.join(map(repr, right))}: what "
                "noise takes away and what denoising brings back are different questions, measured in different runs; "
                "measure both tables with one direction, or select it with .where(direction=...) on both sides"
            )
        shared = [key for key in self.keys if key in other.keys]
        if not shared:
            raise ValueError(f"tables without a common key: {', '.join(self.keys)} and {', '.join(other.keys)}")
        scales = {bool(each.settings.get("normalized")) for table in (self, other) for each in joined_in(table)}
        if len(scales) > 1:
            raise ValueError("some effects are normalized() and others not: subtract those of one scale")
        for key in ("kind", "positions"):  # a table of one value may have it as a setting alone
            ours, theirs = _asked(self, key), _asked(other, key)
            if (key in self.keys) != (key in other.keys) and ours != theirs:
                raise ValueError(
                    f"one table is of {key} {_some(ours)}, the other of {key} {_some(theirs)}: "
                    "measure or select the same"
                )
        self, other = self.with_keys(shared), other.with_keys(shared)
        # merge pairs missing keys with missing keys, which an index does not
        positions = other.frame[self.keys].assign(_place=np.arange(len(other)))
        try:
            paired = self.frame[self.keys].merge(positions, how="left", on=self.keys)["_place"]
        except ValueError as error:  # pandas's words
            raise ValueError(f"the tables have keys of different types: {error}") from error
        if len(self) != len(other) or sorted(paired.fillna(-1)) != list(range(len(other))):
            values = ((key, *({*table.frame[key].dropna()} for table in (self, other))) for key in shared)
            unlike = [f"{key} ({_some(ours)} and {_some(theirs)})" for key, ours, theirs in values if ours != theirs]
            raise ValueError(
                "the tables do not hold the same rows: select the same keys with .where(...) on both sides"
                + f"; they differ in {', '.join(unlike)}" * bool(unlike)
            )
        right = other._rows(paired.to_numpy(dtype=int))
        same = _same_data(self, other) and bool(self.provenance.data)
        low = high = np.full(len(self), np.nan)
        if same and self.values is not None and right.values is not None:
            low, high = self._interval_of_difference(right)
        elif not same and not in_common(self, other):
            low, high = stats.unpaired_difference(
                *(table.frame[[*VALUES[:3]]].to_numpy(float) for table in (self, right))
            )
        frame = self.frame.assign(
            value=self.frame["value"].to_numpy(float) - right.frame["value"].to_numpy(float),
            low=low,
            high=high,
            n=np.minimum(self.frame["n"].to_numpy(), right.frame["n"].to_numpy()),
        )
        settings = {"left": asdict(self.provenance), "right": asdict(other.provenance)}
        settings |= {"normalized": True} if True in scales else {}
        return Table(frame, replace(self.provenance, verb="difference", settings=settings))

    def with_keys(self, keys: Sequence[str]) -> "Table":
        """Returns the rows by these keys alone; over all targets, if that leaves a key out.

        Raises:
            ValueError: Another key tells rows apart.
        """
        if not (others := [key for key in self.keys if key not in keys]):
            return self
        table = self.of_all_targets()
        frame = table.frame
        if several := [key for key in others if len(frame[key].unique()) > 1]:
            raise ValueError(
                f"one table of {self.provenance.verb!r} has rows by {' and '.join(several)}, the other has not: give "
                f"two of the same rows, or choose a value with .where({several[0]}={frame[several[0]].tolist()[0]!r})"
            )
        return replace(table, frame=frame.drop(columns=others))

    def _interval_of_difference(self, right: "Table") -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
        """The interval of each row minus that of `right`, which has the same rows, measured on the same prompts."""
        values, weights, other, other_weights = self.values, self.weights, right.values, right.weights
        assert values is not None and weights is not None and other is not None and other_weights is not None
        low, high = stats.mean_interval(values, weights, minus=(other, other_weights))
        if (shares := _measured_shares(self) & _measured_shares(right)).any():
            reach = 1 if _are_levels(self) and _are_levels(right) else 2
            change = (values[shares] - other[shares]) / reach
            yes_or_no = (reach == 1) & np.isin(self.frame["metric"].to_numpy()[shares], YES_OR_NO)
            bounded = np.stack(stats.proportion_change(change, weights[shares], yes_or_no)) * reach
            unlike = (weights[shares] != other_weights[shares]).any(1)
            low[shares], high[shares] = np.where(unlike, np.nan, bounded)
        return low, high

    @classmethod
    @checked
    def concat(cls, tables: "Sequence[Table] | Mapping[str, Table]", key: str | None = None) -> "Table":
        """Returns the rows of several tables as one table.

        A key that only some of the tables have is missing (`<NA>`) in the rows of the others. Per-prompt values stay
        where all tables kept them and measured the same prompts. Baselines are left out: those of one table need not
        be those of another.

        Args:
            tables: The tables; or tables by name, which then stands in the column `key`.
            key: The name of that column, such as `"model"`.

        Raises:
            ValueError: No tables, names without a `key` or a `key` without names, a column that is there already, or
                rows with equal keys.
        """
        if not tables:
            raise ValueError("no tables to join: give at least one")
        if isinstance(tables, Mapping) != (key is not None):
            raise ValueError(
                "tables by name need key=, the column that holds the names, and key= needs tables by name: "
                "Table.concat({'before': a, 'after': b}, key='model')"
            )
        joined = list(tables.values()) if isinstance(tables, Mapping) else list(tables)
        frames: list[Any] = [table.frame.copy() for table in joined]
        if isinstance(tables, Mapping) and key is not None:
            if any(key in frame for frame in frames):
                raise ValueError(f"key={key!r} is a column already: give the names another")
            for name, frame in zip(tables, frames, strict=True):
                frame.insert(0, key, name)
        keys = list(dict.fromkeys(column for frame in frames for column in frame if column not in VALUES))
        # Joined as objects, or missing keys would turn integers into floats.
        frame = pd.concat([frame.astype(object) for frame in frames], ignore_index=True).loc[:, [*keys, *VALUES]]
        types = frames[0].dtypes.to_dict()
        shared = {name: kind for name, kind in types.items() if all(frame.dtypes.get(name) == kind for frame in frames)}
        frame = frame.astype(shared).infer_objects()
        if (twice := frame.duplicated(keys)).any():
            row = ", ".join(f"{name} {value}" for name, value in frame.loc[twice, keys].iloc[0].items())
            raise ValueError(
                f"two rows of {row}: give the tables by name, Table.concat({{'before': a, 'after': b}}, key='model')"
            )
        provenances = [table.provenance for table in joined]
        kept: dict[str, Any] = {}
        widths = {None if table.values is None else table.values.shape[1] for table in joined}
        if None not in widths and len(widths) == 1 and all(_same_data(table, joined[0]) for table in joined):
            kept = {name: np.concatenate([getattr(table, name) for table in joined]) for name in ("values", "weights")}
        names, records = list(tables) if key else [], [asdict(provenance) for provenance in provenances]
        model, data = (_common([record[name] for record in records]) for name in ("model", "data"))
        engines = {provenance.engine for provenance in provenances}
        engine = engines.pop() if len(engines) == 1 else ""
        settings = {"key": key, "names": names, "tables": records}
        return cls(frame, Provenance("concat", settings, model, data, engine), **kept)

    def to_parquet(self, path: str | Path) -> None:
        """Writes the rows as one Parquet file, for pandas, polars or DuckDB; per-prompt values are left out.

        `pandas.read_parquet(path).attrs["provenance"]` is where the table came from.

        Raises:
            ImportError: pyarrow is not installed.
        """
        _needs("pyarrow", "to_parquet")
        # A copy: the provenance goes into this file, not into the table's own frame.
        frame = self.frame.copy()
        frame.attrs = {"provenance": asdict(self.provenance)}
        with replacing(path) as temporary:
            frame.to_parquet(temporary, engine="pyarrow", index=False)

    def to_dataset(self) -> Any:
        """Returns the rows as a Hugging Face `datasets.Dataset`, with the provenance, as JSON, as its description.

        Raises:
            ImportError: datasets is not installed.
        """
        datasets = _needs("datasets", "to_dataset")
        info = datasets.DatasetInfo(description=self.provenance.to_json())
        return datasets.Dataset.from_pandas(self.frame, info=info, preserve_index=False)

    @checked
    def save(self, folder: str | Path, *, compress: bool = False, per_prompt: bool = True) -> None:
        """Writes the table, `provenance.json`, and `values.safetensors` if the table has per-prompt values.

        The arguments of the call that made it are kept in the folder `call`, prompts too, for `align-circuits rerun`.

        Args:
            folder: Where to; made if it does not exist. An earlier table there is replaced as a whole.
            compress: Whether to write `table.csv.xz` instead of `table.csv`.
            per_prompt: Whether to keep the per-prompt values, without which a difference of loaded tables has no
                interval. They take up to 16 bytes for each row and prompt.

        Raises:
            ValueError: The folder cannot be written, or a key is an empty text in some rows and missing in others:
                a file does not tell these apart.
        """
        frame: Any = self.frame
        empty = [key for key in self.keys if (frame[key] == "").any()]
        for key in empty:
            if frame[key].isna().any():
                raise ValueError(f"{key} is an empty text in some rows and missing in others: give these texts a name")
        going = (*FILES, PER_PROMPT, BASELINES, calls.FOLDER)
        with replacing_in(folder, going=going) as new:  # of an earlier save: one table to a folder
            name, compression = (FILES[1], "xz") if compress else (FILES[0], None)
            texts = (str(text) for key in self.keys for text in self.frame[key].unique())
            # Without quotes a carriage return ends a row.
            quoting = csv.QUOTE_NONNUMERIC if any("\r" in text for text in texts) else csv.QUOTE_MINIMAL
            self.frame.to_csv(new / name, index=False, compression=compression, quoting=quoting)
            if per_prompt and self.values is not None and self.weights is not None:
                # Where every row rests on the same targets, one row of weights tells all.
                weights = self.weights[:1] if (self.weights == self.weights[:1]).all() else self.weights
                save_file({"values": _narrow(self.values), "weights": _narrow(weights)}, new / PER_PROMPT)
            record = json.loads(self.provenance.to_json())
            if texts := _texts_like_numbers(self.frame):
                record[TEXTS] = texts
            if empty:
                record[EMPTY] = empty
            (new / "provenance.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            if self.baselines is not None:
                self.baselines.save(new / BASELINES, compress=compress, per_prompt=per_prompt)
            if self.call is not None:
                self.call.save(new / calls.FOLDER)

    @classmethod
    @checked
    def load(cls, folder: str | Path) -> "Table":
        """Reads what `save` wrote, with the per-prompt values if they were kept.

        Raises:
            ValueError: `folder` does not hold table and provenance, or holds per-prompt values of other rows.
        """
        folder = Path(folder)
        if not is_path(folder):
            raise ValueError(f"{str(folder)[:60]!r}... is not a folder: give one that Table.save wrote")
        return read_whole(folder, cls._load)

    @classmethod
    def _load(cls, folder: Path) -> "Table":
        path = next((folder / name for name in FILES if (folder / name).is_file()), folder / FILES[0])
        if missing := [file.name for file in (path, folder / "provenance.json") if not file.is_file()]:
            raise ValueError(
                f"no table in {str(folder)!r}: {' and '.join(missing)} missing; give a folder that Table.save wrote"
            )
        try:
            text = (folder / "provenance.json").read_text(encoding="utf-8")
            provenance = Provenance.from_json(text)
        except ValueError as error:
            raise ValueError(f"{str(folder / 'provenance.json')!r}: {error}") from error
        try:
            texts, empty = (json.loads(text).get(name, []) for name in (TEXTS, EMPTY))
            frame = pd.read_csv(path, low_memory=False)  # whole, or each part of a column could get a type of its own
            written = path.read_bytes() if path.name == FILES[0] else b"\n"
            # Of a row that ends too early pandas makes one without n.
            lengths = csv.reader(StringIO(written.decode(), newline="")) if frame["n"].isna().to_numpy().any() else ()
            if not written.endswith(b"\n") or len({len(row) for row in lengths} - {0}) > 1:
                raise ValueError("a part is missing")
            if not isinstance(frame.index, pd.RangeIndex):
                raise ValueError("rows have more fields than the header")
            if texts:
                # Among texts, "None" and "NA" are names.
                missing = {name: [] if name in empty else [""] for name in texts}
                as_texts = pd.read_csv(path, usecols=texts, dtype=str, keep_default_na=False, na_values=missing)
                frame = frame.assign(**{name: as_texts[name].astype(object) for name in texts})
            if whole := [name for name in INTEGER_KEYS if name in frame and frame[name].dtype == float]:
                for name, column in pd.read_csv(path, usecols=whole, dtype=str).items():
                    with suppress(ValueError):  # others than whole numbers; as floats large ones would be rounded
                        frame[name] = pd.array([pd.NA if text != text else int(text) for text in column], "Int64")
            if pd.api.types.is_string_dtype(frame["value"]):  # some are True or False
                truth = {"True": True, "False": False}
                frame["value"] = [truth[text] if text in truth else float(text) for text in frame["value"]]
            table = cls(frame, provenance)
            # Only to find out here, where the error can name the file, whether they are numbers.
            table.frame[list(VALUES)].astype(float)
        except (ValueError, TypeError, OverflowError, KeyError, EOFError, LZMAError, csv.Error) as error:
            raise ValueError(f"{str(path)!r} is no table ({error}): give what Table.save wrote") from error
        if (folder / BASELINES).is_dir():
            table = replace(table, baselines=cls.load(folder / BASELINES))
        if not (folder / PER_PROMPT).is_file():
            return table
        try:
            kept = load_file(folder / PER_PROMPT)
            values, weights = (kept[name].astype(np.float64) for name in ("values", "weights"))
            if values.ndim != 2:
                raise ValueError(f"shape {values.shape}")
            # One row may stand for all (`save`). Copied, since a broadcast array cannot be written to.
            weights = np.broadcast_to(weights, values.shape).copy()
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{str(folder / PER_PROMPT)!r} holds no per-prompt values ({error}): delete it to read the table alone"
            ) from error
        if len(values) != len(table):
            raise ValueError(
                f"the rows differ: {len(table)} in {path.name}, {len(values)} in {PER_PROMPT}; if the table was edited "
                f"by hand, delete {PER_PROMPT} to read it without per-prompt values"
            )
        return replace(table, values=values, weights=weights)

    def _parts(self) -> tuple["Table", tuple[str, ...]]:
        """The rows of the smallest parts of the model that the table is about, and the keys that name one."""
        frame: Any = self.frame
        for level, part_keys in _PLACES.items():
            if "level" in frame:
                rows = frame["level"] == level
            elif set(part_keys) <= set(frame):
                rows = frame[list(part_keys)].notna().all(axis=1)
            else:
                continue
            if rows.any():
                return self._rows(np.flatnonzero(rows)), (*part_keys, *(key for key in ("position",) if key in frame))
        levels = f", and rows of the level {', '.join(sorted(set(frame['level'])))}" if "level" in frame else ""
        raise ValueError(f"no heads, layers or edges to rank: this table has the keys {', '.join(self.keys)}{levels}")

    def check_not_mixed(self) -> None:
        """Raises a ValueError if some rows are estimates and others measured, as after a screen."""
        frame = self.frame
        if "estimated" in frame and len(frame["estimated"].unique()) > 1:
            raise ValueError(
                "measured effects and estimates, which are not to be mixed: choose with .where(estimated=False) first"
            )

    def _check_one_row(self, part_keys: tuple[str, ...]) -> None:
        """Raises unless a part of the model has one row only, and says which keys tell several apart."""
        frame = self.frame
        if frame.duplicated(list(part_keys)).any():
            several = [key for key in self.keys if len(frame[key].unique()) > 1]
            free_keys = [key for key in several if key not in ("level", *part_keys)]
            level = next(level for level, keys in _PLACES.items() if keys == part_keys[: len(keys)])
            one_part = f"an {level}" if level == "edge" else f"a {level}"
            raise ValueError(
                f"several rows {one_part}: choose one value of {' and '.join(free_keys)} with .where(...) first"
                if free_keys
                else f"several rows {one_part} with equal keys: leave out those that are repeated"
            )

    def _rows(self, index: ndarray) -> "Table":
        arrays = {"values": self.values, "weights": self.weights}
        kept = {name: None if array is None else array[index] for name, array in arrays.items()}
        return replace(self, frame=self.frame.iloc[index].reset_index(drop=True), **kept)


def _texts_like_numbers(frame: pd.DataFrame) -> list[str]:
    """The columns of texts that pandas would read as something else, such as "1" or "None"."""
    text_columns: list[str] = []
    for name in (name for name in frame if pd.api.types.infer_dtype(frame[name], skipna=True) == "string"):
        texts = pd.Series(frame[name].dropna().unique(), dtype=object)
        if [*pd.read_csv(StringIO(texts.to_frame("text").to_csv(index=False)))["text"]] != [*texts]:
            text_columns.append(str(name))
    return text_columns


def best_end_of(table: Table, metric: str) -> End:
    """Returns which end of a metric matters most in a table."""
    of_metric = table.frame.loc[table.frame["metric"] == metric]
    direction = {"direction": of_metric["direction"].iloc[0]} if "direction" in table.keys else {}
    return best_end(joined_in(table), {"metric": metric, **direction})


def _same_data(one: Table, other: Table) -> bool:
    """Whether two tables were measured on the same prompts; tuples are lists once they were saved."""
    first, second = (json.dumps(_of_prompts(each.provenance), sort_keys=True, default=str) for each in (one, other))
    return first == second


def _of_prompts(made: Provenance) -> dict[str, Any]:
    """What a provenance says of the prompts; to what the command line ablated heads stands beside it."""
    return {name: value for name, value in made.data.items() if name != "ablated to"}


def in_common(one: Table, other: Table) -> str:
    """Returns why the prompts of two tables that cannot be paired may not be independent either; "" where they are."""
    runs = (table.provenance.subtracted() for table in (one, other))
    return next(filter(None, (_in_both(_of_prompts(one), _of_prompts(other)) for one, other in product(*runs))), "")


def _in_both(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Why prompts of two runs may not be independent; "" where they are."""
    if first == second and first:
        return "both rest on the same prompts"
    if "digest" not in first or "digest" not in second:
        return "not both runs kept which prompts they measured"
    if ("groups" in first) != ("groups" in second):
        return "one run alone has groups, so the prompts may be the same"
    if first["digest"][:SAME_INPUTS] == second["digest"][:SAME_INPUTS]:
        return "the prompts are the same, and their targets or groups are not"
    tasks = [data.get("task") for data in (first, second)]
    if len({isinstance(task, Mapping) and "corrupted" in task for task in tasks}) > 1:
        return "one run is on corrupted prompts, which may be partners of the other's"
    return ""


def _measured_shares(table: Table) -> Bool[ndarray, " row"]:
    """Which rows are shares, or changes of them, that were measured and not estimated by gradients."""
    frame = table.frame
    if "metric" not in frame or any(each.verb in _ESTIMATES for each in joined_in(table)):
        return np.zeros(len(table), dtype=bool)
    shares = frame["metric"].isin(SHARES)
    return (shares & ~frame["estimated"].eq(True) if "estimated" in frame else shares).to_numpy(dtype=bool)


def _asked(table: Table, key: str) -> set[str]:
    """The kinds of targets, or the positions, that the rows of a table are about; all, where it also has all."""
    if key in table.keys:
        given = set(table.frame[key].dropna())
    else:
        given = {each.settings.get(key) for each in joined_in(table)}
    return {value if isinstance(value, str) else "all" for value in ({"all"} if "all" in given else given)}


def _are_levels(table: Table) -> bool:
    """Whether the numbers of a table are metrics themselves, as with sets of heads ablated, and not changes of them."""
    return "ablated" in table.keys or all(each.verb in (*_LEVELS, "evaluate") for each in joined_in(table))


def joined_in(table: Table) -> list[Provenance]:
    """Returns where the tables came from that `concat` made one of; of another table where it came from."""
    return table.provenance.joined(table.frame)


def _some(values: set[Any]) -> str:
    """Some values of a key, as a message lists them."""
    ordered = sorted(map(str, values))
    return ", ".join(ordered[:4]) + ", ..." * (len(ordered) > 4) or "none"


def _common(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that all of several mappings share."""
    return {name: value for name, value in parts[0].items() if all(mapping.get(name) == value for mapping in parts)}


def _needs(package: str, method: str) -> Any:
    """Imports a package that only one method needs."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(f"{method} needs {package}: pip install 'align-circuits[tables]'") from error


def _narrow(numbers: Float[ndarray, "row prompt"]) -> Float[ndarray, "row prompt"]:
    """Returns the same numbers in 4 bytes each where these hold them exactly, else in 8."""
    # What float32 cannot hold becomes infinite, and then is not equal.
    with np.errstate(over="ignore"):
        single = numbers.astype(np.float32)
    return np.ascontiguousarray(single if np.array_equal(single, numbers, equal_nan=True) else numbers)


def directions_of(table: Table) -> list[str]:
    """Returns the directions of the patches that a table measures: its column, or settings where there is none."""
    if "direction" in table.keys:
        return sorted(table.frame["direction"].dropna().unique())
    settings = [each.settings for each in joined_in(table)]
    of_parts = [each["left"]["settings"] if "left" in each else each for each in settings]  # differences have one
    return sorted({each["direction"] for each in of_parts if each.get("direction")})


def with_level(keys: pd.DataFrame) -> pd.DataFrame:
    """Returns key columns with `level` before `layer`: a row without a head is about a layer, or about the model."""
    of_head = keys["head"].notna() if "head" in keys else np.zeros(len(keys), dtype=bool)
    level = np.select([of_head, keys["layer"].notna()], ["head", "layer"], "model")
    before = keys.columns.tolist().index("layer")
    return pd.concat([keys.iloc[:, :before], pd.Series(level, keys.index, name="level"), keys.iloc[:, before:]], axis=1)


def _with_integer_keys(frame: pd.DataFrame) -> pd.DataFrame:
    """Makes `INTEGER_KEYS` whole numbers, which pandas turns into floats or objects where some are missing."""
    types = {}
    for name in (name for name in INTEGER_KEYS if name in frame):
        column: Any = frame[name]
        if column.dtype == np.int64:
            continue
        nullable = column.dtype == pd.Int64Dtype()
        is_number = pd.api.types.infer_dtype(column, skipna=True) in ("integer", "integer-na", "floating", "empty")
        if nullable or (is_number and (column.dropna() % 1 == 0).all()):
            if not nullable and (column.dropna().abs() >= 2**63).any():
                raise ValueError(f"{name} up to {column.abs().max()}: give whole numbers below 2**63")
            # Nullable only where a key is missing, so that whole columns merge and save as plain integers.
            needed = "Int64" if column.isna().any() else "int64"
            if not (nullable and needed == "Int64"):
                types[name] = needed
    return frame.assign(**{name: frame[name].astype(types[name]) for name in types}) if types else frame


_PLACES = {"head": ("layer", "head"), "kv_head": ("layer", "head"), "layer": ("layer",), "edge": ("sender", "receiver")}
"""The parts of a model by level, and the keys that name one."""
