"""Scores every head on prompts whose relations say which tokens it should attend to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.checks import checked, listed
from align_circuits.heads.attention_metrics import entropy, hit_rate
from align_circuits.hooks.edits import Edit, edits_provenance
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.jobs.similar_names import did_you_mean
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import Relation, first_token
from align_circuits.run.forward_pass import forward
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import check_returned, checked_names
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table, with_level

STANDARD = {
    "align_query": "hit",  # the alignment accuracy of Agarwal & Sarawagi (2025) is an argmax
    "align_key": "hit",
    "lookup": "mass",  # their printed IC-lookup is a ratio of sums in the test example
    "induction": "mass",  # equal to TransformerLens's head detector, as are the next two
    "previous": "mass",
    "duplicate": "mass",
}
"""What a relation's plain name measures; relations of one's own measure `"mass"`."""

OwnScore = Callable[[Float[Tensor, "target head pos"], pd.DataFrame], Float[Tensor, "target head"]]
"""A metric of attention of your own. It takes the attention of some targets, each from the position that predicts it,
and their rows of `Prompts.targets`, with their index; and returns a number for each target and head, NaN where there is
nothing to measure. Attention is on the model's device, sums to 1 over the columns of `Prompts.tokens`, and is 0 at
padding. Each head is to be measured by itself: the attention averaged over a layer's heads comes as a single head."""

_NUMBERS_AT_ONCE = 2**22
"""Attention probabilities in a chunk of a batch: so many are copied and masked at a time."""


@checked
@leaves_as_found
def score_heads(
    model: HookedModel,
    prompts: Prompts,
    metrics: str | OwnScore | Sequence[str | OwnScore] | None = None,
    *,
    edits: Sequence[Edit] = (),
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns every metric of every head, and of every layer's attention averaged over its heads, over the prompts.

    A metric named like a relation is that relation's standard measure (`STANDARD`). `_hit`, `_mass`, `_attention` and
    `_mean` after the name select one of the four:

    - `hit`: the share of targets whose most attended candidate is a key (`attention_metrics.hit_rate`);
    - `mass`: Σ_targets Σ_keys α / Σ_targets Σ_candidates α, attention to keys over attention to candidates, each summed
      over the targets of a prompt first, so that a target counts by the attention that it pays to candidates. Prompts
      then count by their targets, not by attention: else the few that pay candidates much would decide;
    - `attention`: the attention to keys itself, its mean over targets: how much of the head the relation explains;
    - `mean`: the mean over targets of Σ_keys α / Σ_candidates α, as in the notebook released with Agarwal &
      Sarawagi (2025) for lookup. Where all tokens are candidates it equals `mass`, and each target's ratio is the "mul"
      measure of TransformerLens's `head_detector` (which averages over all positions, those without a key included, as
      0).

    All four lie in [0, 1]; uniform attention scores keys / candidates on all but `attention`. `mass` misleads where a
    target of a prompt holds most of its attention to candidates, and both it and `mean` where the candidates get next
    to nothing: a ratio of two tiny numbers weighs as much as one of two large ones. Both are refuted by ablating the
    head.

    Beside the relations there are `sink`, the attention to a prompt's first token, and `entropy` of the attention in
    nats; both at the positions that predict a target, the first token of a prompt left out. A function of your own
    (`OwnScore`) is measured at the same positions, needs no relation, and stands in the table under its name.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with at least one relation, or with targets for a function.
        metrics: Names or functions, one or several; by default each relation's standard measure, `lookup_mean`,
            `sink` and `entropy`.
        edits: What is changed while the model runs.
        options: Engine and batch size.

    Returns:
        A table keyed by level, layer, head and metric, with 95% intervals over prompts. Rows of the level
        `"layer"` measure the attention averaged over a layer's heads, as Agarwal & Sarawagi (2025) do, and have no
        head. `n` counts the rows of the relation (in tasks one a target) with a value; without any, 0 and the value
        NaN, as of induction without a repeated token, or of the mass of a head that pays no candidate any attention.

    Raises:
        KeyError: A metric that is not known.
        ValueError: No prompts, no relations, prompts that do not fit the model, two metrics of one name, or a function
            that takes or returns something else.
    """
    if not len(prompts):
        raise ValueError("no prompts to score: give at least one")
    measures = resolve(prompts, None if metrics is None else listed(metrics))
    scores = ScoreAccumulator(measures, model.cfg.n_layers, model.cfg.n_heads, len(prompts))
    engine = forward(
        model, prompts, prompt=scores.prompt, query=scores.query, on_pattern=scores.add, edits=edits, options=options
    )
    settings = {"metrics": list(scores.metrics), **edits_provenance(edits)}
    return scores.table(provenance_of("score_heads", model, prompts, engine, settings), prompts.group)


@dataclass(frozen=True, eq=False)
class _Entries:
    """The entries (a query with its keys and candidates) of one relation in a chunk; the same for every layer."""

    relation: Relation
    row: Int[Tensor, " entry"]
    """The row of the chunk at which each is."""
    prompt: Int[Tensor, " entry"]
    """The prompt of each, on the CPU."""
    target: Int[Tensor, " entry"]
    """Its row of the targets, on the CPU."""
    window: slice
    """The positions from the first to the last candidate of any entry: others need no look."""
    keys: Bool[Tensor, "entry window"]
    candidates: Bool[Tensor, "entry window"]
    columns: Int[Tensor, "entry two"]
    """The columns of the chunk's masks that hold its keys and its candidates."""


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some rows of a batch, and the entries of all relations there."""

    rows: Int[Tensor, " row"]
    entries: list[_Entries]
    masks: Float[Tensor, "row pos column"]
    """All keys and candidates side by side, so that one product sums the attention to each."""


@dataclass(frozen=True, eq=False)
class _Attention:
    """One layer's attention at the entries of a relation; the last head is the mean of all."""

    entries: _Entries
    pattern: Float[Tensor, "row head pos"]
    """Of the whole chunk, without the mean."""
    on_keys: Float[Tensor, "entry heads"]
    on_candidates: Float[Tensor, "entry heads"]

    @property
    def in_window(self) -> Float[Tensor, "entry heads window"]:
        """The attention of each entry to the positions of the window."""
        return _with_mean(self.pattern[..., self.entries.window].index_select(0, self.entries.row))


def _with_mean(values: Float[Tensor, "row head last"]) -> Float[Tensor, "row heads last"]:
    """Appends the mean over heads as one more head."""
    return torch.cat([values, values.mean(1, keepdim=True)], 1)


def _hit(attention: _Attention) -> tuple[Tensor, Tensor]:
    hits = hit_rate(attention.in_window, attention.entries.keys, attention.entries.candidates)
    return hits, torch.ones_like(hits)


def _mass(attention: _Attention) -> tuple[Tensor, Tensor]:
    return attention.on_keys, attention.on_candidates


def _attention(attention: _Attention) -> tuple[Tensor, Tensor]:
    return attention.on_keys, torch.ones_like(attention.on_keys)


def _mean(attention: _Attention) -> tuple[Tensor, Tensor]:
    return _where_attended(attention.on_keys / attention.on_candidates, attention)


def _entropy(attention: _Attention) -> tuple[Tensor, Tensor]:
    return _where_attended(entropy(attention.in_window, attention.entries.candidates), attention)


def _where_attended(values: Tensor, attention: _Attention) -> tuple[Tensor, Tensor]:
    """Gives weight 0 to entries without attention to any candidate, whose ratio is undefined."""
    attended = attention.on_candidates != 0
    return values.where(attended, 0), attended.to(values.dtype)


def _own(score: OwnScore, targets: pd.DataFrame) -> "Measure":
    """The measure of a function of the user's own."""

    def measure(attention: _Attention) -> tuple[Tensor, Tensor]:
        pattern, rows = attention.pattern[attention.entries.row], targets.iloc[attention.entries.target.numpy()]
        if not len(rows):
            return attention.on_keys, attention.on_keys
        measured = []
        for heads in (pattern, pattern.mean(1, keepdim=True)):
            values = score(heads.clone(), rows)  # it may change them, as others must not see
            shape = (len(rows), heads.shape[1])
            check_returned(score, values, shape, f"{shape[0]} targets and {shape[1]} heads")
            measured.append(values.to(attention.on_keys))
        values = torch.cat(measured, 1)
        known = ~values.isnan()
        return values.where(known, 0), known.to(values.dtype)

    return measure


Measure = Callable[[_Attention], tuple[Float[Tensor, "entry head"], Float[Tensor, "entry head"]]]
"""Attention -> (part, whole): the metric of a prompt is Σ part / Σ whole over its entries."""

MEASURES: Mapping[str, Measure] = {"hit": _hit, "mass": _mass, "attention": _attention, "mean": _mean}
"""How a relation can be measured, by suffix."""


def resolve(prompts: Prompts, metrics: Sequence[str | OwnScore] | None) -> dict[str, tuple[Relation, Measure]]:
    """The metrics by name, or all that are on by default."""
    if not prompts.relations and metrics is None:
        raise ValueError("these prompts hold no relation, so there is nothing to score: give them one in `relations`")
    predicting = {"prompt": prompts.column("prompt"), "query": prompts.column("query_pos")}
    sink = first_token(prompts.inputs, prompts.mask, target=torch.arange(len(prompts.targets)), **predicting)
    plain = {name: (relation, MEASURES[STANDARD.get(name, "mass")]) for name, relation in prompts.relations.items()}
    suffixed = {
        f"{name}_{suffix}": (relation, measure)
        for name, relation in prompts.relations.items()
        for suffix, measure in MEASURES.items()
    }
    known = suffixed | {"sink": (sink, _attention), "entropy": (sink, _entropy)}
    if taken := [name for name in plain if name in known]:
        raise ValueError(f"relation {taken[0]!r} has the name of a metric of heads: give it another name")
    known |= plain
    if metrics is None:
        metrics = [name for name in (*plain, "lookup_mean", "sink", "entropy") if name in known]
    if unknown := [metric for metric in metrics if not callable(metric) and metric not in known]:
        raise KeyError(
            f"no metric {unknown[0]!r} for these prompts: {did_you_mean(unknown[0], known)}they have "
            f"{', '.join(plain)}, each also with the suffix _{', _'.join(MEASURES)}; sink and entropy; and in Python "
            "functions of attention and targets"
        )
    if not metrics:
        raise ValueError("no metrics to score: name some, or leave `metrics` out for the standard ones")
    return {
        name: (sink, _own(metric, prompts.targets)) if callable(metric) else known[metric]
        for name, metric in zip(checked_names(metrics, "(attention, targets)"), metrics, strict=True)
    }


class ScoreAccumulator:
    """Adds up metrics as attention arrives, batch by batch and layer by layer.

    Memory grows with layers, heads, metrics and prompts, not with the length of the prompts.
    """

    def __init__(self, metrics: dict[str, tuple[Relation, Measure]], layers: int, heads: int, prompts: int):
        self.metrics = metrics
        self.relations = list({id(relation): relation for relation, _ in metrics.values()}.values())
        pairs = torch.cat([torch.stack([relation.prompt, relation.query], 1) for relation in self.relations])
        # Several relations, and several entries of one, may read the same row (prompt, query): each row runs once, and
        # the entries are sorted by row, so that a binary search finds those of any batch.
        rows, row_of = pairs.unique(dim=0, return_inverse=True)  # sorted by prompt, then by query
        self.prompt, self.query = rows.T.contiguous()
        self.sorted_rows = [index.sort() for index in row_of.split([len(relation) for relation in self.relations])]
        self.relations_on = cache(lambda device: [relation.to(device) for relation in self.relations])
        # part, whole, and the number of entries with a whole
        self.sums = {name: torch.zeros(3, layers, prompts, heads + 1, dtype=torch.float64) for name in metrics}
        self.seen = torch.zeros(layers, len(rows), dtype=torch.bool)
        self.chunks: dict[int, _Chunk] = {}

    def add(self, rows: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        """Adds one layer's attention at `rows`; a row that comes again, after a batch that failed, counts once."""
        rows = rows.cpu()
        new = ~self.seen[layer, rows]
        if not new.all():
            rows, pattern = rows[new], pattern[new.to(pattern.device)]
        pattern = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
        for chunk, some in self._chunks(rows, pattern):
            measured = self._measure(chunk, some)
            for name, prompt, values in measured:  # all of them or, if memory ran out above, none
                self.sums[name][:, layer].index_add_(1, prompt, values)
            self.seen[layer, chunk.rows] = True

    def _chunks(self, rows: Tensor, pattern: Tensor) -> Iterator[tuple[_Chunk, Tensor]]:
        """Cuts a batch into chunks, so that little is in memory at once; the layers of a batch share them."""
        # The layers of a batch come one by one with the same rows, so masks made at the first serve all.
        size = max(1, _NUMBERS_AT_ONCE // max(1, pattern[:1].numel()))
        for index, (chunk_rows, some) in enumerate(zip(rows.split(size), pattern.split(size), strict=True)):
            chunk = self.chunks.get(index)
            if chunk is None or not torch.equal(chunk.rows, chunk_rows):
                self.chunks[index] = chunk = self._chunk(chunk_rows, some)
            yield chunk, some

    def _chunk(self, rows: Tensor, pattern: Tensor) -> _Chunk:
        """Collects the entries of each relation at some rows, with keys and candidates as masks."""
        # All keys and candidates of a row become columns of one mask, so that one matrix product sums the attention to
        # each. Rows have different numbers of entries: an entry takes the columns of its place among those of its row.
        device, chunk_entries, n_columns = pattern.device, [], 0
        for relation, on_device, (sorted_rows, order) in zip(
            self.relations, self.relations_on(device), self.sorted_rows, strict=True
        ):
            first, end = torch.searchsorted(sorted_rows, rows), torch.searchsorted(sorted_rows, rows, right=True)
            count = end - first
            row = torch.arange(len(rows)).repeat_interleave(count)
            rank = torch.arange(len(row)) - (count.cumsum(0) - count)[row]  # among the entries at the same row
            entry = order[first[row] + rank]
            keys, candidates = on_device.expand(entry.to(device))
            seen = candidates.any(0).nonzero()
            window = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
            most = int(rank.max()) + 1 if len(rank) else 0
            columns = torch.stack([n_columns + rank, n_columns + most + rank], 1).to(device)
            in_window = keys[:, window], candidates[:, window]
            chunk_entries.append(
                _Entries(
                    relation,
                    row.to(device),
                    relation.prompt[entry],
                    relation.target[entry],
                    window,
                    *in_window,
                    columns,
                )
            )
            n_columns += 2 * most
        masks = pattern.new_zeros(len(rows), n_columns, pattern.shape[2])
        for entries in chunk_entries:
            in_window = torch.stack([entries.keys, entries.candidates], 1).to(masks.dtype)
            masks[..., entries.window][entries.row[:, None], entries.columns] = in_window
        return _Chunk(rows, chunk_entries, masks.mT)

    def _measure(self, chunk: _Chunk, pattern: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Each metric's name, and the prompt and [part whole count] of its entries at some rows of one layer."""
        measured = []
        on_columns = _with_mean(pattern @ chunk.masks)
        for entries in chunk.entries:
            on_keys, on_candidates = on_columns[entries.row[:, None], :, entries.columns].unbind(1)
            attention = _Attention(entries, pattern, on_keys, on_candidates)
            for name, (relation, measure) in self.metrics.items():
                if relation is entries.relation:
                    part, whole = measure(attention)
                    values = torch.stack([part, whole, (whole > 0).to(whole.dtype)])
                    measured.append((name, entries.prompt, values.cpu().double()))
        return measured

    def measured(self) -> tuple[pd.DataFrame, Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
        """The keys of `score_heads`'s rows, each row's ratio in each prompt, and its number of targets there."""
        if not self.seen.all():
            layer = int((~self.seen).any(1).nonzero()[0])
            raise RuntimeError(f"the engine gave no attention for layer {layer}: this model's patterns cannot be read")
        layers, _, columns = next(iter(self.sums.values())).shape[1:]
        heads = [*range(columns - 1), None]  # the last column is the mean over heads
        keys = pd.DataFrame(
            [(layer, head, name) for name in self.metrics for layer in range(layers) for head in heads],
            columns=["layer", "head", "metric"],
        )
        sums = rearrange(list(self.sums.values()), "metric sum layer prompt head -> sum (metric layer head) prompt")
        part, whole, count = sums.numpy()
        return with_level(keys), np.divide(part, whole, out=np.full_like(part, np.nan), where=whole != 0), count

    def table(self, provenance: Provenance, group: Int[Tensor, " prompt"] | None) -> Table:
        """The ratios, with intervals over prompts or groups of them."""
        keys, values, count = self.measured()
        unbounded = [name for name, (_, measure) in self.metrics.items() if measure not in MEASURES.values()]
        bounded = ~keys["metric"].isin(unbounded).to_numpy()
        return Table.from_prompts(keys, values, count, provenance, bounded=bounded, group=group)
