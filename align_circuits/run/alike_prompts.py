"""Runs a model on several sets of prompts that begin alike: what they share is run once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.hooks.attention import PatternProbe
from align_circuits.hooks.decoders import Decoder, why_no_decoder
from align_circuits.hooks.edits import Edit
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.probes import Change
from align_circuits.hooks.replay import Replay
from align_circuits.models.parameters import device_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.batch_sizes import fitting_prompts, in_batches
from align_circuits.run.edited_runs import replaying
from align_circuits.run.forward_pass import Batch, OnLogits, OnPattern, check_logits, check_rows, forward, widened
from align_circuits.run.options import RunOptions
from align_circuits.run.prompt_checks import check_fits

Reader = tuple[Tensor, Tensor, Callable[..., None]]
"""Prompts and queries of the rows that something reads, then what is called as `OnPattern`, or as `OnLogits`, is."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Prompts, the positions whose attention and logits are read, and what reads them: arguments of `forward`."""

    prompts: Prompts
    prompt: Int[Tensor, " row"]
    query: Int[Tensor, " row"]
    on_pattern: OnPattern
    on_logits: OnLogits | None = None

    @classmethod
    def joined(cls, prompts: Prompts, of_pattern: Sequence[Reader], of_logits: Sequence[Reader] = ()) -> "Rows":
        """Returns the rows of several readers, each position once; every reader is called with its own row indices."""
        read = [torch.stack([prompt, query], 1) for prompt, query, _ in (*of_pattern, *of_logits)]
        # `unique` sorts by prompt, then by query: `forward` requires rows that ascend.
        rows, inverse = torch.cat(read).unique(dim=0, return_inverse=True)
        rows_of = inverse.split([len(positions) for positions in read])

        def hand_on(readers: Sequence[Reader], rows_of: Sequence[Tensor], batch: Tensor, *layer: int, values: Tensor):
            for (*_, read), of_reader in zip(readers, rows_of, strict=True):
                in_batch = torch.isin(of_reader, batch)
                if in_batch.any():
                    position = torch.searchsorted(batch, of_reader[in_batch]).to(values.device)
                    read(in_batch.nonzero()[:, 0], *layer, values[position])

        split = len(of_pattern)
        # Columns of `rows` are strided, which `searchsorted` warns about and copies each time.
        prompt, query = rows.T.contiguous()
        return cls(
            prompts,
            prompt,
            query,
            lambda batch, layer, pattern: hand_on(of_pattern, rows_of[:split], batch, layer, values=pattern),
            (lambda batch, logits: hand_on(of_logits, rows_of[split:], batch, values=logits)) if of_logits else None,
        )


@leaves_as_found
def forward_alike(
    model: HookedModel, sets: Sequence[Rows], *, edits: Sequence[Edit] = (), options: RunOptions = RunOptions()
) -> str:
    """Does what `forward` does for each set; where prompts of all sets begin alike, the beginnings are run once.

    That is so where prompt i of every set has the same tokens in at least the first half of its columns, and no row is
    read there. The numbers then differ from those of `forward` by rounding. Edits, engines other than the fast one, and
    prompts of other lengths than those of the first set make `forward` run each set.
    The batch size is in prompts of one set. Returns the engine that ran, and raises, as `forward` does.
    """
    shared = 0 if edits or options.engine == "reference" or why_no_decoder(model) else _shared_columns(sets)
    if not shared:
        engines = [forward(model, **vars(rows), edits=edits, options=options) for rows in sets]
        # The engine depends on the model and the options alone, so it was the same for all sets.
        return engines[0]
    for rows in sets:
        check_fits(model, rows.prompts)
        check_rows(rows.prompts, rows.prompt, rows.query)
    device, prompts = device_of(model), sets[0].prompts
    count, length = prompts.tokens.shape
    fitting = fitting_prompts(model, prompts, device, "fast")
    # A few more at once: a small second batch would cost about as much as a whole one.
    size = options.prompts_at_once(count if 2 * count <= 3 * fitting else fitting)

    def run_batch(decoder: Decoder, selected: Int[Tensor, " prompt"], _: int) -> None:
        batches = [Batch.of(rows.prompts, selected, rows.prompt, rows.query, device) for rows in sets]
        start = shared - batches[0].cropped
        beginnings = Replay.run(
            decoder,
            batches[0].tokens[:, :start],
            batches[0].mask[:, :start],
            # Replay needs a query. The logits of one column cost little, and nobody reads them.
            queries=torch.tensor([start - 1], device=device),
            keep=(),
            starts=[start],
        )
        _continue(beginnings, sets, batches)

    with replaying(model) as decoder:
        run = partial(run_batch, decoder)
        in_batches(run, torch.arange(count), length, size * length, halve_to=options.halve_to(length))
    return "fast"


def _shared_columns(sets: Sequence[Rows]) -> int:
    """How many columns of prompts are run once; 0 where that does not pay."""
    prompts = sets[0].prompts
    if len(sets) < 2 or any(rows.prompts.tokens.shape != prompts.tokens.shape for rows in sets):
        return 0
    if not all(torch.equal(rows.prompts.mask, prompts.mask) and len(rows.query) for rows in sets):
        return 0
    differs = torch.stack([rows.prompts.tokens != prompts.tokens for rows in sets]).any(0).any(0).nonzero()
    first = min(int(rows.query.min()) for rows in sets)
    shared = min(first, int(differs[0])) if len(differs) else first
    # A prompt whose padding reached past the shared columns would have no beginning.
    pays = 2 * shared >= prompts.tokens.shape[1] and bool(prompts.mask[:, shared - 1 :].all())
    return shared if pays else 0


def _continue(beginnings: Replay, sets: Sequence[Rows], batches: Sequence[Batch]) -> None:
    """Runs some prompts of each set, side by side, from where their beginnings end, and hands over what is read."""
    start, prompts = beginnings.start, len(beginnings.tokens)
    queries = torch.cat([batch.query for batch in batches]).unique()

    # To replay, prompts of another set are those of the first with another residual stream at the first layer.
    runs = [beginnings.continued(batch.tokens, batch.mask, queries) for batch in batches]
    edit_sets: list[dict[str, Change]] = [
        {name: lambda _, stream=stream: stream for name, stream in run.kept.items()} for run in runs
    ]

    def read(layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        patterns = pattern.split([len(batch.rows) for batch in batches])
        for rows, batch, of_set in zip(sets, batches, patterns, strict=True):
            batch.hand_over(rows.on_pattern, layer, of_set)

    probe = PatternProbe(
        torch.cat([batch.prompt + index * prompts for index, batch in enumerate(batches)]),
        torch.cat([batch.query - start for batch in batches]),
        read,
    )
    for index, logits in runs[0].replay(edit_sets, start, probe):
        rows, batch = sets[index], batches[index]
        check_logits(logits)
        if rows.on_logits is not None:
            rows.on_logits(batch.rows, widened(batch.rows_of(logits, queries)))
