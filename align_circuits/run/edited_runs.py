"""Many edited runs of the same prompts, each at the cost of what its edits change."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.hooks.compat import lora_merging
from align_circuits.hooks.decoders import Decoder, HasDecoder, decoder_of, why_no_decoder
from align_circuits.hooks.edits import BatchContext, Edit, Patch, as_hooked, changes_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found, modules_in
from align_circuits.hooks.names import is_pattern, site_of
from align_circuits.hooks.probes import check_hook_points, evaluating
from align_circuits.hooks.replay import HOOKED_SITES, REPLAY_SITES, Replay, first_difference, order_of, starts_from
from align_circuits.models.parameters import device_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.batch_sizes import NUMBERS_CACHED, fitting_tokens, in_batches
from align_circuits.run.forward_pass import (
    Batch,
    capture,
    check_logits,
    check_rows,
    choose_engine,
    forward,
    is_inside,
    not_fast,
    why_silent,
    widened,
)
from align_circuits.run.options import RunOptions
from align_circuits.run.prompt_checks import check_fits
from align_circuits.run.unedited_runs import kept_runs

OnLogits = Callable[[int, Int[Tensor, " row"], Float[Tensor, "row d_vocab"]], None]
"""Takes the index of an edit set, rows and their logits, which it only reads."""


@leaves_as_found
def run_edited(
    model: HookedModel,
    prompts: Prompts,
    edit_sets: Sequence[Sequence[Edit]],
    *,
    prompt: Int[Tensor, " row"],
    query: Int[Tensor, " row"],
    on_logits: OnLogits,
    source: Prompts | None = None,
    on_source: Callable[[Int[Tensor, " row"], Float[Tensor, "row d_vocab"]], None] | None = None,
    options: RunOptions = RunOptions(),
) -> str:
    """Runs a model once for each set of edits, and passes the logits of chosen positions to a callback.

    Where it can, by replay (`hooks.replay`): only the layers and positions that an edit can change are run, many edit
    sets in a batch.

    Args:
        model: A model with TransformerLens's hooks.
        prompts: What it reads.
        edit_sets: The edits of each run; an empty set is the unedited run.
        prompt: The prompt of each row, ascending.
        query: The position of each row.
        on_logits: Called with the index of an edit set, rows and their logits; assign by row, since after an
            out-of-memory the same rows come again.
        source: Other prompts, token by token alike in shape, whose activations a `Patch` without values puts in.
        on_source: Called with rows and the logits of the unedited run of the source, which is made for its activations.
        options: Engines `"fast"` and `"auto"` take replay where the fast engine applies and every edit is at one of
            `hooks.replay.REPLAY_SITES`, unless patterns of other prompts are put in, which would take too much memory;
            else the edit sets run one by one, as `forward` does. Models that offer their parts (`HasDecoder`), as those
            built by hand, are replayed too; of those `"fast"` means replay alone. The batch size is that of whole
            prompts, of all edit sets together.

    Returns:
        What ran: `"replay"`, `"fast"` or `"reference"`.

    Raises:
        ValueError: As `forward` does.
    """
    check_fits(model, prompts)
    check_rows(prompts, prompt, query)
    if source is not None and not torch.equal(source.mask, prompts.mask):
        raise ValueError(
            f"the other run holds {len(source)} prompts of up to {source.mask.shape[1]} tokens, but the model runs on "
            f"{len(prompts)} of {prompts.mask.shape[1]}: they must match, prompt by prompt and token by token"
        )
    no_prompts = BatchContext(prompts, prompt[:0])
    names = [set(changes_of(edits, model, no_prompts)) for edits in edit_sets]
    check_hook_points(model, sorted(name for name in set().union(*names) if not is_inside(name)))
    runs = _EditedRuns(model, prompts, edit_sets, names, source, prompt, query, on_logits, on_source)
    patterns_of_source = any(
        _needs_source(edit) and any(map(is_pattern, changes_of([edit], model, no_prompts)))
        for edits in edit_sets
        for edit in edits
    )
    if options.engine != "reference":
        reason = _why_not_replayed(model, set().union(*names), patterns_of_source)
        if reason is None:
            with replaying(model) as decoder:
                _replay_in_batches(runs, decoder, options)
            return "replay"
        if options.engine == "fast" and isinstance(model, HasDecoder):  # a bridge may be fast without replay
            raise not_fast(reason)
    hooked = set().union(*(as_hooked(changes_of(edits, model, no_prompts), model) for edits in edit_sets))
    engine = choose_engine(model, options, hooked)
    # All edit sets run under one engine, so that their differences are effects and not rounding.
    options = replace(options, engine=engine)
    for index, edits in _with_source_values(runs, options):
        forward(
            model,
            prompts,
            prompt=prompt,
            query=query,
            on_logits=lambda *rows, index=index: on_logits(index, *rows),
            edits=edits,
            options=options,
        )
    return engine


@contextmanager
def replaying(model: HookedModel) -> Iterator[Decoder]:
    """Gives the parts of a model for replay: in evaluation mode, with merged adapters, without gradients."""
    with (
        torch.no_grad(),
        evaluating(model),
        lora_merging.merged_adapters(modules_in(model)),
        decoder_of(model) as decoder,
    ):
        yield decoder


def _why_not_replayed(model: HookedModel, names: Collection[str], patterns_of_source: bool) -> str | None:
    """Why replay cannot make edits at these hook points; None where it can."""
    if reason := why_no_decoder(model):
        return reason
    if patterns_of_source:
        return "replay does not keep the patterns of other prompts, which take too much memory"
    sites = {name: layer_and_site[1] for name in names if (layer_and_site := site_of(name)) is not None}
    if unknown := sorted(name for name in names if sites.get(name) not in REPLAY_SITES):
        return f"replay does not edit {unknown[0]}"
    if isinstance(model, HasDecoder):
        missing = sorted(name for name in names if name not in model.hook_dict)
        return f"it has no hook point {missing[0]}" if missing else None
    return why_silent(model, [name for name, site in sites.items() if site in HOOKED_SITES])


@dataclass(frozen=True, eq=False)
class _EditedRuns:
    """The arguments of `run_edited`."""

    model: HookedModel
    prompts: Prompts
    edit_sets: Sequence[Sequence[Edit]]
    names: Sequence[Collection[str]]
    """The hook points that each edit set edits."""
    source: Prompts | None
    prompt: Int[Tensor, " row"]
    query: Int[Tensor, " row"]
    on_logits: OnLogits
    on_source: Callable[[Tensor, Tensor], None] | None


def _replay_in_batches(runs: _EditedRuns, decoder: Decoder, options: RunOptions) -> None:
    """Runs all edit sets on a batch of prompts, then on the next."""
    device, selected, length = device_of(runs.model), runs.prompt.unique(), runs.prompts.mask.shape[1]

    def run(batch: Int[Tensor, " prompt"], budget: int) -> None:
        _replay_batch(runs, decoder, batch, device, budget)

    if options.batch_size == "auto":
        tokens = fitting_tokens(runs.model, runs.prompts, device)
        in_batches(run, selected, length, tokens, halve_to=1)  # below a prompt's tokens, fewer edit sets run at once
    else:
        in_batches(run, selected, length, options.batch_size * length, halve_to=None)


def _replay_batch(
    runs: _EditedRuns, decoder: Decoder, selected: Int[Tensor, " prompt"], device: torch.device, budget: int
) -> None:
    """Runs every edit set on some prompts, at most `budget` tokens a batch, but at least one edit set."""
    batch = Batch.of(runs.prompts, selected, runs.prompt, runs.query, device)
    end, queries = int(batch.query.max()) + 1, batch.query.unique()
    context = BatchContext(runs.prompts, selected)
    # A patch from other prompts starts where these first differ: before, its values are those of the run itself.
    differs = _first_difference(runs, selected)
    first_edited = [
        [max(edit.start(context), differs if _needs_source(edit) else 0) - batch.cropped for edit in edits]
        for edits in runs.edit_sets
    ]
    # An edit set that changes nothing up to the last query starts at `end`: its logits are those of the unedited run.
    starts = [min(max(0, min(columns, default=end)), end) for columns in first_edited]
    inputs: dict[str, Any] = {"tokens": batch.tokens[:, :end], "mask": batch.mask[:, :end], "queries": queries}
    keep, begun = starts_from(runs.names), [start for start in starts if start < end] or [end]
    kept = kept_runs()
    replay = (
        Replay.run(decoder, **inputs, keep=keep, starts=begun)
        if kept is None
        else kept.run(runs.model, decoder, inputs, keep, begun)
    )
    logit_rows = batch.prompt * len(queries) + torch.searchsorted(queries, batch.query)
    # Where all prompts have the same queries, the rows are the logits as they stand: no copy is made.
    in_order = torch.equal(logit_rows, torch.arange(len(selected) * len(queries), device=logit_rows.device))

    def hand_over(on_logits: Callable[[Tensor, Tensor], None], logits: Float[Tensor, "prompt query d_vocab"]) -> None:
        check_logits(logits)
        rows = logits.flatten(0, 1) if in_order else logits.flatten(0, 1)[logit_rows]
        on_logits(batch.rows, widened(rows))

    source_run: Mapping[str, Tensor] = {}
    first_start = min(begun)
    if runs.source is not None and (first_start < end or runs.on_source is not None):
        tokens = runs.source.tokens[selected, batch.cropped :][:, :end].to(device)
        names = set().union(*runs.names) if first_start < end else set()
        source_run, logits = replay.other(tokens, names, first_start, to_logits=runs.on_source is not None)
        if runs.on_source is not None and logits is not None:
            hand_over(runs.on_source, logits)
    # Edit sets that start at the same column share batches, ordered by the layer of their first edit: so each joins its
    # batch as late as it can, and those beside it in a batch do not run layers for nothing.
    for start in sorted(set(starts)):
        group = [index for index, first in enumerate(starts) if first == start]
        if start == end:
            for index in group:
                hand_over(partial(runs.on_logits, index), replay.logits)
            continue
        group.sort(key=lambda index: order_of(runs.names[index]))
        at_once = max(1, budget // (len(selected) * (end - start)))
        span = slice(batch.cropped + start, batch.cropped + end)
        source = {name: values[:, start - first_start :] for name, values in source_run.items()}
        context = BatchContext(runs.prompts, selected, span, source)
        for indices in (group[first : first + at_once] for first in range(0, len(group), at_once)):
            changes = [changes_of(runs.edit_sets[index], runs.model, context) for index in indices]
            for run, logits in replay.replay(changes, start):
                hand_over(partial(runs.on_logits, indices[run]), logits)


def _first_difference(runs: _EditedRuns, selected: Int[Tensor, " prompt"]) -> int:
    """The first column at which the source prompts differ."""
    if runs.source is None:
        return 0
    return first_difference(runs.prompts.tokens[selected], runs.source.tokens[selected])


def _needs_source(edit: Edit) -> bool:
    """Whether an edit takes its values from the source prompts."""
    return isinstance(edit, Patch) and not edit.values


def _with_source_values(runs: _EditedRuns, options: RunOptions) -> Iterator[tuple[int, list[Edit]]]:
    """The edit sets by index, their patches with values from `source`; few activations are in memory at a time."""
    if runs.source is None:
        yield from enumerate([list(edits) for edits in runs.edit_sets])
        return
    cached: dict[str, Tensor] = {}
    on_source = runs.on_source
    for index, edits in enumerate(runs.edit_sets):
        # Edit sets mostly come layer by layer, so what is captured for one serves many that follow.
        if not set(runs.names[index]) <= cached.keys():
            names = _next_names(runs, index)
            cached = capture(
                runs.model,
                runs.source,
                names,
                prompt=runs.prompt,
                query=runs.query,
                on_logits=on_source,
                options=options,
            )
            on_source = None  # the first of these runs has shown it
        yield index, [replace(edit, values=cached) if _needs_source(edit) else edit for edit in edits]
    if on_source is not None:  # no edit took anything from it
        rows: dict[str, Any] = {"prompt": runs.prompt, "query": runs.query}
        forward(runs.model, runs.source, **rows, on_logits=on_source, options=options)


def _next_names(runs: _EditedRuns, index: int) -> list[str]:
    """The hook points of an edit set and of those after it, as many as memory should hold."""
    config, mask = runs.model.cfg, runs.prompts.mask
    following = list(dict.fromkeys(name for names in runs.names[index:] for name in names))
    size = 0
    for count, name in enumerate(following):
        size += mask.numel() * _width(config, name, mask.shape[1])
        # The edit set itself needs all of its hook points, however large they are.
        if size > NUMBERS_CACHED and count >= len(runs.names[index]):
            return following[:count]
    return following


def _width(config: Any, name: str, length: int) -> int:
    """About how many numbers an activation has for each token."""
    if is_pattern(name):
        return config.n_heads * length
    return config.d_mlp if ".mlp." in name and getattr(config, "d_mlp", None) else config.d_model
