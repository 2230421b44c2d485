"""Scores every head on prompts that know who should look at whom."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.heads import metrics as m
from align_circuits.hooks.edits import Edit, edits_provenance
from align_circuits.models.protocol import model_provenance
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import Relation, first_token
from align_circuits.run.forward_pass import forward
from align_circuits.tables.tables import Provenance, Table, with_level

STANDARD = {
    "align_query": "hit",  # paper 1's alignment accuracy is an argmax
    "align_key": "hit",
    "lookup": "mass",  # paper 1's printed IC-lookup is a ratio of sums
    "induction": "mass",  # equal to TransformerLens's head detector, as are the next two
    "previous": "mass",
    "duplicate": "mass",
}
"""What a relation's plain name measures; relations of one's own measure `"mass"`."""

_CELLS_AT_ONCE = 2**22


def score_heads(
    model: Any,
    prompts: Prompts,
    metrics: Sequence[str] | None = None,
    *,
    edits: Sequence[Edit] = (),
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> Table:
    """Returns every metric of every head, and of every layer's attention averaged over its heads, over the prompts.

    A metric named like a relation is that relation's standard measure (`STANDARD`). `_hit`, `_mass`, `_attention` and
    `_mean` after the name ask for one of the four:

    - `hit`: the share of targets whose most attended candidate is a key (`metrics.hit_rate`);
    - `mass`: attention to keys over attention to candidates, each summed over targets first (`metrics.pooled_mass`);
    - `attention`: the attention to keys itself, its mean over targets: how much of the head the relation explains;
    - `mean`: the mean over targets of that ratio (`metrics.mass`), as in paper 1's released notebook for lookup. Where
      all tokens are candidates it equals `mass`.

    Beside the relations there are `sink`, the attention to a prompt's first token, and `entropy` of the attention in
    nats; both at the positions that predict a target, the first token of a prompt left out.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with at least one relation.
        metrics: Names; by default each relation's standard measure, `lookup_mean`, `sink` and `entropy`.
        edits: What is changed while the model runs.
        engine: `"fast"`, `"reference"` (TransformerLens's own hooks), or the fast one where it fits.
        batch_size: Prompts at a time; it changes memory and time, never a result.

    Returns:
        A table keyed by level, layer, head and metric, with 95% bootstrap intervals over prompts. Rows of the level
        `"layer"` measure the attention averaged over a layer's heads, as paper 1 does, and have no head. `n` counts the
        targets that have a value; a metric without any, such as the induction of prompts without a repeated token, or a
        head that pays no candidate any attention, has n = 0 and the value NaN.

    Raises:
        KeyError: A metric that is not known.
        ValueError: No prompts, no relations, or prompts that do not fit the model.
    """
    if not len(prompts):
        raise ValueError("no prompts to score: give at least one")
    tally = ScoreAccumulator(resolve(prompts, metrics), model.cfg.n_layers, model.cfg.n_heads, len(prompts))
    ran = forward(
        model,
        prompts,
        prompt=tally.prompt,
        query=tally.query,
        on_pattern=tally.add,
        edits=edits,
        engine=engine,
        batch_size=batch_size,
    )
    provenance = Provenance(
        "score_heads",
        settings={"metrics": list(tally.wanted), **edits_provenance(edits)},
        model=model_provenance(model),
        data=prompts.provenance,
        engine=ran,
    )
    return tally.table(provenance)


@dataclass(frozen=True)
class _Asked:
    """The rows of one relation in a chunk of a batch; the same for every layer."""

    relation: Relation
    place: Int[Tensor, " row"]
    """Where each lies in the chunk."""
    prompt: Int[Tensor, " row"]
    """The prompt of each, on the CPU."""
    keys: Bool[Tensor, "row pos"]
    candidates: Bool[Tensor, "row pos"]
    column: Int[Tensor, "row two"]
    """The columns of the chunk's masks that hold its keys and its candidates."""


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a batch, and who asks there."""

    rows: Int[Tensor, " row"]
    asked: list[_Asked]
    masks: Float[Tensor, "row pos column"]
    """All keys and candidates side by side, so that one product sums the attention on each."""


def _hit(asked: _Asked, pattern: Tensor, on_keys: Tensor, on_candidates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    hits = m.hit_rate(pattern[asked.place], asked.keys, asked.candidates)
    return hits, torch.ones_like(hits)


def _mass(asked: _Asked, pattern: Tensor, on_keys: Tensor, on_candidates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return on_keys, on_candidates


def _attention(asked: _Asked, pattern: Tensor, on_keys: Tensor, on_candidates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return on_keys, torch.ones_like(on_keys)


def _mean(asked: _Asked, pattern: Tensor, on_keys: Tensor, on_candidates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _where_attended(on_keys / on_candidates, on_candidates)


def _entropy(asked: _Asked, pattern: Tensor, on_keys: Tensor, on_candidates: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _where_attended(m.entropy(pattern[asked.place], asked.candidates), on_candidates)


def _where_attended(values: Tensor, on_candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Gives weight 0 to rows without attention to any candidate, whose ratio is undefined."""
    attended = on_candidates != 0
    return values.where(attended, 0), attended.to(values.dtype)


Measure = Callable[[_Asked, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(who asks, pattern of the chunk, attention on keys, on candidates) -> (part, whole), each [row head]: the metric is
Σ part / Σ whole over rows."""

MEASURES: Mapping[str, Measure] = {"hit": _hit, "mass": _mass, "attention": _attention, "mean": _mean}
"""How a relation can be measured, by suffix."""


def resolve(prompts: Prompts, names: Sequence[str] | None) -> dict[str, tuple[Relation, Measure]]:
    """The metrics by name, or all that are on by default."""
    if not prompts.relations:
        raise ValueError("these prompts hold no relation, so there is nothing to score: give them one in `relations`")
    predicting = {"prompt": prompts.column("prompt"), "query": prompts.column("query_pos")}
    sink = first_token(prompts.inputs, prompts.mask, target=torch.arange(len(prompts.targets)), **predicting)
    plain = {name: (relation, MEASURES[STANDARD.get(name, "mass")]) for name, relation in prompts.relations.items()}
    suffixed = {
        f"{name}_{suffix}": (relation, measure)
        for name, relation in prompts.relations.items()
        for suffix, measure in MEASURES.items()
    }
    known = suffixed | {"sink": (sink, _mass), "entropy": (sink, _entropy)} | plain
    if names is None:
        names = [name for name in (*plain, "lookup_mean", "sink", "entropy") if name in known]
    if unknown := [name for name in names if name not in known]:
        raise KeyError(f"no metric {unknown[0]!r} for these prompts; they have {', '.join(known)}")
    if not names:
        raise ValueError("no metrics to score: name some, or leave `metrics` out for the standard ones")
    return {name: known[name] for name in names}


class ScoreAccumulator:
    """Sums over rows: memory grows with layers, heads, metrics and prompts, not with the length of the prompts."""

    def __init__(self, wanted: dict[str, tuple[Relation, Measure]], layers: int, heads: int, prompts: int):
        self.wanted = wanted
        self.relations = list({id(relation): relation for relation, _ in wanted.values()}.values())
        asked = torch.cat([torch.stack([relation.prompt, relation.query], 1) for relation in self.relations])
        rows, row_of = asked.unique(dim=0, return_inverse=True)  # sorted by prompt, then by query
        self.prompt, self.query = rows.T.contiguous()
        self.askers = [part.sort() for part in row_of.split([len(relation) for relation in self.relations])]
        self.on_device = cache(lambda device: [relation.to(device) for relation in self.relations])
        # part, whole, and the number of rows with a whole
        self.sums = {name: torch.zeros(3, layers, prompts, heads + 1, dtype=torch.float64) for name in wanted}
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
            measured = self._measure(chunk, torch.cat([some, some.mean(1, keepdim=True)], 1))
            for name, prompt, values in measured:  # all of them or, if memory ran out above, none
                self.sums[name][:, layer].index_add_(1, prompt, values)
            self.seen[layer, chunk.rows] = True

    def _chunks(self, rows: Tensor, pattern: Tensor) -> Iterator[tuple[_Chunk, Tensor]]:
        """Cuts a batch so that little is in memory at once; the layers of a batch share what is found out about it."""
        size = max(1, _CELLS_AT_ONCE // max(1, pattern[:1].numel()))
        parts = pattern.split(size)
        for index, (part, some) in enumerate(zip(rows.split(size), parts, strict=True)):
            known = self.chunks.get(index)
            if known is None or not torch.equal(known.rows, part):
                self.chunks[index] = known = self._chunk(part, some)
            yield known, some

    def _chunk(self, rows: Tensor, pattern: Tensor) -> _Chunk:
        """Finds out who asks at some rows, with keys and candidates as masks."""
        asked, columns = [], 0
        for here, there, (asker, order) in zip(
            self.relations, self.on_device(pattern.device), self.askers, strict=True
        ):
            first, end = torch.searchsorted(asker, rows), torch.searchsorted(asker, rows, right=True)
            place = torch.arange(len(rows)).repeat_interleave(end - first)
            time = torch.arange(len(place)) - ((end - first).cumsum(0) - (end - first))[place]  # asked here before
            which = order[first[place] + time]
            keys, candidates = there.expand(which.to(pattern.device))
            times = int(time.max()) + 1 if len(time) else 0
            column = torch.stack([columns + time, columns + times + time], 1).to(pattern.device)
            asked.append(_Asked(here, place.to(pattern.device), here.prompt[which], keys, candidates, column))
            columns += 2 * times
        masks = pattern.new_zeros(len(rows), columns, pattern.shape[2], dtype=torch.float32)
        for some in asked:
            masks[some.place[:, None], some.column] = torch.stack([some.keys, some.candidates], 1).float()
        return _Chunk(rows, asked, masks.to(pattern.dtype).mT)

    def _measure(self, chunk: _Chunk, pattern: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Each metric's name, prompts and [part whole count] at some rows of one layer."""
        measured = []
        on = pattern @ chunk.masks
        for asked in chunk.asked:
            on_keys, on_candidates = on[asked.place[:, None], :, asked.column].unbind(1)
            for name, (relation, measure) in self.wanted.items():
                if relation is asked.relation:
                    part, whole = measure(asked, pattern, on_keys, on_candidates)
                    values = torch.stack([part, whole, (whole > 0).to(whole.dtype)])
                    measured.append((name, asked.prompt, values.cpu().double()))
        return measured

    def measured(
        self,
    ) -> tuple[pd.DataFrame, Float[ndarray, "row prompt"], Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
        """The keys of `score_heads`'s rows, each row's ratio in each prompt, its denominator, its number of targets."""
        if not self.seen.all():
            layer = int((~self.seen).any(1).nonzero()[0])
            raise RuntimeError(f"the engine gave no attention for layer {layer}: this model's patterns cannot be read")
        layers, _, columns = next(iter(self.sums.values())).shape[1:]
        heads = [*range(columns - 1), None]  # the last column is the mean over heads
        keys = pd.DataFrame(
            [(layer, head, name) for name in self.wanted for layer in range(layers) for head in heads],
            columns=["layer", "head", "metric"],
        )
        by_row = (
            torch.stack(list(self.sums.values()), 1).movedim(-1, 3).flatten(1, 3)
        )  # [part whole count, row, prompt]
        part, whole, count = by_row.numpy()
        return with_level(keys), np.divide(part, whole, out=np.full_like(part, np.nan), where=whole != 0), whole, count

    def table(self, provenance: Provenance) -> Table:
        """The ratios, with intervals over prompts."""
        keys, values, whole, count = self.measured()
        return Table.from_prompts(
            keys, values, whole, provenance, counts=count, bounded=(keys["metric"] != "entropy").to_numpy()
        )
