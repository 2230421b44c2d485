"""A sweep: many edited runs of the same prompts, at the price of what each edit changes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.hooks.attention import raw_attention
from align_circuits.hooks.edits import BatchContext, Edit, Patch, changes_of
from align_circuits.hooks.names import site_of
from align_circuits.hooks.probes import evaluating
from align_circuits.hooks.replay import HOOKED_SITES, REPLAY_SITES, Replay, order_of, starts_from
from align_circuits.models.protocol import check_fits, device_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import (
    CPU_TOKENS,
    Batch,
    capture,
    check_rows,
    choose,
    forward,
    in_batches,
    why_silent,
)

_KEPT = 2**28

OnLogits = Callable[[int, Int[Tensor, " row"], Float[Tensor, "row d_vocab"]], None]
"""Takes a cell, rows and their logits, which it only reads."""


def sweep(
    model: Any,
    prompts: Prompts,
    cells: Sequence[Sequence[Edit]],
    *,
    prompt: Int[Tensor, " row"],
    query: Int[Tensor, " row"],
    on_logits: OnLogits,
    source: Prompts | None = None,
    options: RunOptions = RunOptions(),
) -> str:
    """Runs a model once for each cell, a set of edits, and hands over the logits of chosen positions.

    Where it can, by the causal cone: an edit in layer l at positions from p on changes nothing below l and nothing
    before p, so only the layers above and the positions from p on are run, with the keys and values of earlier
    positions kept from one unedited run; many cells make one batch.

    Args:
        model: A model with TransformerLens's hooks.
        prompts: What it reads.
        cells: The edits of each run; none at all for the unedited one.
        prompt: The prompt of each row, ascending.
        query: The position of each row.
        on_logits: Called with the cell, rows and their logits; assign by row, since after an out-of-memory the same
            rows come again.
        source: Other prompts, token by token alike in shape, whose activations a `Patch` without values puts in.
        engine: `"fast"` and `"auto"` take the cone where the fast engine applies and every edit is at one of
            `hooks.cone.REPLAY_SITES`; else they run the cells one by one, as `forward` does.
        batch_size: Whole prompts a batch, those of all cells together; `"auto"` fits them to the device and halves
            them on out-of-memory. It changes no result.

    Returns:
        What ran: `"cone"`, `"fast"` or `"reference"`.

    Raises:
        ValueError: As `forward` does.
    """
    check_fits(model, prompts)
    check_rows(prompts, prompt, query)
    if batch_size != "auto" and batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give a positive number of prompts, or 'auto'")
    if source is not None and not torch.equal(source.mask, prompts.mask):
        raise ValueError(
            f"the other run holds {len(source)} prompts of up to {source.mask.shape[1]} tokens, but the model runs on "
            f"{len(prompts)} of {prompts.mask.shape[1]}: they must match, prompt by prompt and token by token"
        )
    nothing = BatchContext(prompts, prompt[:0])
    names = [set(changes_of(edits, model, nothing)) for edits in cells]
    job = _Job(model, prompts, cells, names, source, prompt, query, on_logits)
    if choose(model, engine) == "fast" and _in_cone(model, set().union(*names)):
        with torch.no_grad(), evaluating(model), raw_attention(model):
            _in_batches(job, batch_size)
        return "cone"
    ran = choose(model, engine, set().union(*names))
    options: dict[str, Any] = {"prompt": prompt, "query": query, "engine": ran, "batch_size": batch_size}
    for index, edits in _filled(job, ran, batch_size):
        forward(model, prompts, on_logits=lambda *found, index=index: on_logits(index, *found), edits=edits, **options)
    return ran


def _in_cone(model: Any, names: Collection[str]) -> bool:
    """Whether the cone can make edits at these hook points."""
    sites = {name: place[1] for name in names if (place := site_of(name)) is not None}
    hooked = [name for name, site in sites.items() if site in HOOKED_SITES]
    return len(sites) == len(names) and set(sites.values()) <= set(REPLAY_SITES) and why_silent(model, hooked) is None


@dataclass(frozen=True)
class _Job:
    """What `sweep` was asked for."""

    model: Any
    prompts: Prompts
    cells: Sequence[Sequence[Edit]]
    names: Sequence[Collection[str]]
    """The hook points that each cell edits."""
    source: Prompts | None
    prompt: Int[Tensor, " row"]
    query: Int[Tensor, " row"]
    on_logits: OnLogits


def _in_batches(job: _Job, batch_size: int | Literal["auto"]) -> None:
    """Runs all cells on a batch of prompts, then on the next."""
    device, chosen, length = device_of(job.model), job.prompt.unique(), job.prompts.mask.shape[1]

    def run(some: Int[Tensor, " prompt"], budget: int) -> None:
        _all_cells(job, some, device, budget)

    if batch_size == "auto":
        in_batches(run, chosen, length, _budget(job, device), halve_to=1)  # below a prompt's, fewer cells run at once
    else:
        in_batches(run, chosen, length, batch_size * length, halve_to=None)


def _all_cells(job: _Job, chosen: Int[Tensor, " prompt"], device: torch.device, budget: int) -> None:
    """Runs every cell on some prompts, at most `budget` tokens a batch, but at least one cell."""
    batch = Batch.of(job.prompts, chosen, job.prompt, job.query, device)
    end, queries = int(batch.query.max()) + 1, batch.query.unique()
    here = BatchContext(job.prompts, chosen)
    apart = _apart(job, chosen)
    starts = [
        min((max(edit.start(here), apart if _waits(edit) else 0) for edit in edits), default=end + batch.cropped)
        for edits in job.cells
    ]
    starts = [min(max(0, start - batch.cropped), end) for start in starts]
    cone = Replay(
        job.model,
        batch.tokens[:, :end],
        batch.mask[:, :end],
        queries=queries,
        keep=starts_from(job.names),
        starts=[start for start in starts if start < end] or [end],
    )

    asked = batch.prompt * len(queries) + torch.searchsorted(queries, batch.query)
    everywhere = torch.equal(asked, torch.arange(len(chosen) * len(queries), device=asked.device))

    def hand_over(index: int, logits: Float[Tensor, "prompt query d_vocab"]) -> None:
        if logits.amax(-1).isnan().any():
            raise ValueError("the model's logits are NaN: its weights are broken, or its dtype is too narrow")
        found = logits.flatten(0, 1) if everywhere else logits.flatten(0, 1)[asked]
        job.on_logits(index, batch.rows, found.to(torch.promote_types(found.dtype, torch.float32)))

    beside: Mapping[str, Tensor] = {}
    if job.source is not None and cone.start < end:
        others = job.source.tokens[chosen, batch.cropped :][:, :end].to(device)
        beside = cone.other(others, set().union(*job.names))
    for start in sorted(set(starts)):
        group = [index for index, first in enumerate(starts) if first == start]
        if start == end:
            for index in group:
                hand_over(index, cone.logits)
            continue
        group.sort(key=lambda index: order_of(dict.fromkeys(job.names[index], lambda _: None)))
        at_once = max(1, budget // (len(chosen) * (end - start)))
        span = slice(batch.cropped + start, batch.cropped + end)
        source = {name: values[:, start - cone.start :] for name, values in beside.items()}
        running = BatchContext(job.prompts, chosen, span, source)
        for some in (group[first : first + at_once] for first in range(0, len(group), at_once)):
            edited = [changes_of(job.cells[index], job.model, running) for index in some]
            for place, logits in cone.replay(edited, start):
                hand_over(some[place], logits)


def _apart(job: _Job, chosen: Int[Tensor, " prompt"]) -> int:
    """The first column at which the other prompts differ: before it, what they put in is what there is."""
    if job.source is None:
        return 0
    columns = (job.source.tokens[chosen] != job.prompts.tokens[chosen]).any(0).nonzero()
    return int(columns[0]) if len(columns) else job.prompts.mask.shape[1]


def _waits(edit: Edit) -> bool:
    """Whether an edit puts in what the other prompts give."""
    return isinstance(edit, Patch) and not edit.values


def _budget(job: _Job, device: torch.device) -> int:
    """How many tokens keep the device busy without filling its memory."""
    if device.type != "cuda":
        return CPU_TOKENS
    length, config = job.prompts.mask.shape[1], job.model.cfg
    wide = getattr(config, "d_mlp", None) or 4 * config.d_model
    kept = 4 * config.n_layers * config.d_model
    numbers = kept + 16 * config.d_model + 4 * wide + 4 * config.n_heads * length + 2 * config.d_vocab
    return max(length, int(torch.cuda.mem_get_info(device)[0] / 2 / (4 * numbers)))


def _filled(
    job: _Job, engine: Literal["fast", "reference"], batch_size: int | Literal["auto"]
) -> Iterator[tuple[int, list[Edit]]]:
    """The cells by index, with the values that their patches take from `source`; few of them in memory at a time."""
    if job.source is None:
        yield from enumerate([list(edits) for edits in job.cells])
        return
    held: dict[str, Tensor] = {}
    for index, edits in enumerate(job.cells):
        if not set(job.names[index]) <= held.keys():
            held = capture(job.model, job.source, _next_names(job, index), options=options)
        yield (index, [replace(edit, values=held) if _waits(edit) else edit for edit in edits])


def _next_names(job: _Job, index: int) -> list[str]:
    """The hook points of a cell and of those after it, as many as memory should hold."""
    config, mask = job.model.cfg, job.prompts.mask
    wanted = list(dict.fromkeys(name for names in job.names[index:] for name in names))
    size = 0
    for place, name in enumerate(wanted):
        size += mask.numel() * (config.n_heads * mask.shape[1] if "pattern" in name else config.d_model)
        if size > _KEPT and place >= len(job.names[index]):
            return wanted[:place]
    return wanted
