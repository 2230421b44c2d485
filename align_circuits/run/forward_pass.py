"""Runs a model on prompts, and passes rows of attention and logits to callbacks, batch by batch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from align_circuits.hooks.attention import AttentionParts, PatternProbe, raw_attention, why_not_fast
from align_circuits.hooks.compat import bridges
from align_circuits.hooks.decoders import Decoder, HasDecoder, decoder_of, why_no_decoder
from align_circuits.hooks.edits import BatchContext, Edit, as_hooked, changes_of, in_order
from align_circuits.hooks.hooked_model import HookedModel, token_positions
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import INSIDE_SITES, at_padding, is_pattern, name_of, site_of
from align_circuits.hooks.probes import Change, Probes, dry_run, evaluating
from align_circuits.hooks.replay import Replay
from align_circuits.models.parameters import device_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.batch_sizes import fitting_prompts, in_batches, is_padded_float64
from align_circuits.run.options import RunOptions
from align_circuits.run.prompt_checks import check_fits

OnPattern = Callable[[Int[Tensor, " row"], int, Float[Tensor, "row head pos"]], None]
OnLogits = Callable[[Int[Tensor, " row"], Float[Tensor, "row d_vocab"]], None]
OnActivation = Callable[[Int[Tensor, " batch"], Float[Tensor, "batch ..."]], None]


@leaves_as_found
def forward(
    model: HookedModel,
    prompts: Prompts,
    *,
    prompt: Int[Tensor, " row"],
    query: Int[Tensor, " row"],
    on_pattern: OnPattern | None = None,
    on_logits: OnLogits | None = None,
    on_activation: Mapping[str, OnActivation] | None = None,
    edits: Sequence[Edit] = (),
    options: RunOptions = RunOptions(),
) -> str:
    """Runs a model and passes the attention and the logits of chosen positions to callbacks, keeping nothing.

    Memory does not grow with the number of prompts. The callbacks get the indices of their rows (on the CPU) and the
    rows themselves (on the model's device; all but activations float32 or wider). Assign by row, do not add up: after
    an out-of-memory the same rows come again in smaller batches.

    Args:
        model: A model with TransformerLens's hooks. It runs in evaluation mode, without gradients.
        prompts: What it reads.
        prompt: The prompt of each row, ascending.
        query: The position of each row.
        on_pattern: Called with rows, layer and their attention `[row head pos]`, 0 at padding.
        on_logits: Called with rows and their logits `[row d_vocab]`.
        on_activation: By hook point, called with the prompts of a batch and the activation, after the edits. Columns of
            padding that all of a batch share are left out on the left.
        edits: What is changed while the model runs.
        options: Engine and batch size. `"auto"` takes the fast engine on a `TransformerBridge` of a tested architecture
            without hooks attached, where all hook points of `edits` and `on_activation` fire; and on a model that
            offers its parts (`HasDecoder`), as one built by hand, where there are neither.

    Returns:
        The engine that ran, `"fast"` or `"reference"`.

    Raises:
        ValueError: The prompts do not fit the model, a row is not a token, the fast engine does not apply, a hook never
            fires, or the logits are NaN.
    """
    check_fits(model, prompts)
    check_rows(prompts, prompt, query)
    reads = dict(on_activation or {})
    # Which hook points an edit reaches does not depend on the prompts: an empty batch gives them all.
    names = {*reads, *as_hooked(changes_of(edits, model, BatchContext(prompts, prompt[:0])), model)}
    engine = choose_engine(model, options, names)
    device = device_of(model)
    selected, length = prompt.unique(), prompts.mask.shape[1]
    fitting = fitting_prompts(model, prompts, device, engine)
    size = 1 if is_padded_float64(model, prompts) else options.prompts_at_once(fitting)
    # No more than the prompts fill, or halving it after an out-of-memory would first try the same batch again.
    tokens = min(size, max(1, len(selected))) * length

    def run_batch(run: Run, batch_prompts: Int[Tensor, " prompt"], _: int) -> None:
        batch = Batch.of(prompts, batch_prompts, prompt, query, device)
        batch = replace(batch, whole_logits=any(map(is_behind_selection, names)))
        edited = as_hooked(changes_of(edits, model, BatchContext(prompts, batch_prompts)), model)
        reading: dict[str, Change] = {name: partial(read, batch_prompts) for name, read in reads.items()}
        hooked = Probes(model, edited), Probes(model, reading)  # in this order: readers see edited activations
        hooks = [hook for probes in hooked for hook in probes.fwd_hooks]
        within = [hook for hook in hooks if engine == "fast" and is_inside(hook[0])]
        with model.hooks(fwd_hooks=[hook for hook in hooks if hook not in within]):
            logits = run(batch, on_pattern, within, keep_logits=on_logits is not None)
        for probes in hooked:
            if engine == "fast" and probes.silent:
                raise not_fast(f"{probes.silent[0]} does not fire under it")
            probes.check()
        check_logits(logits)
        if on_logits is not None:
            on_logits(batch.rows, widened(logits))

    with torch.no_grad(), evaluating(model), decoder_of(model) if engine == "fast" else nullcontext() as decoder:
        if decoder is None:
            run = partial(_run_reference, model)
        else:
            # Parts skip what no logits need; where a hook is to fire, the model itself runs.
            by_parts = isinstance(model, HasDecoder) or not (names or why_no_decoder(model))
            run = partial(_run_decoder, decoder) if by_parts else partial(_run_fast, model)
        in_batches(partial(run_batch, run), selected, length, tokens, halve_to=options.halve_to(length))
    return engine


def capture(
    model: HookedModel,
    prompts: Prompts,
    names: Sequence[str],
    *,
    prompt: Int[Tensor, " row"] | None = None,
    query: Int[Tensor, " row"] | None = None,
    on_logits: OnLogits | None = None,
    edits: Sequence[Edit] = (),
    options: RunOptions = RunOptions(),
) -> dict[str, Float[Tensor, "prompt ..."]]:
    """Returns the activations at the given hook points, after the edits, on the CPU; 0 at padding (`hook_scale` 1).

    Memory grows with the prompts: take one layer at a time where they are many or long.
    Where rows are given, as for `forward`, only their prompts run, the activations of the others are 0, and `on_logits`
    is called with the logits of the rows.
    """
    kept: dict[str, Tensor] = {}
    length = prompts.mask.shape[1]
    if prompt is None or query is None:
        prompt = torch.arange(len(prompts))
        # Only prompts with a row run. The last column holds a token in all, since padding stands on the left.
        query = torch.full_like(prompt, length - 1)

    def keep(name: str, rows: Int[Tensor, " batch"], activation: Float[Tensor, "batch ..."]) -> None:
        of_queries = is_pattern(name)
        missing = length - activation.shape[2 if of_queries else 1]
        # `pad` counts axes from the last one: keys before queries, and the features before the tokens.
        padding = [missing, 0, missing, 0] if of_queries else [0, 0] * (activation.ndim - 2) + [missing, 0]
        whole = nn.functional.pad(activation.cpu(), padding)
        if name not in kept:
            kept[name] = torch.zeros(len(prompts), *whole.shape[1:], dtype=whole.dtype)
        real = prompts.mask[rows]
        real = real[:, None, :, None] if of_queries else real.reshape(*real.shape, *[1] * (whole.ndim - 2))
        kept[name][rows] = whole.where(real, at_padding(name))

    forward(
        model,
        prompts,
        prompt=prompt,
        query=query,
        on_logits=on_logits,
        on_activation={name: partial(keep, name) for name in names},
        edits=edits,
        options=options,
    )
    return kept


def choose_engine(
    model: HookedModel, options: RunOptions, names: Collection[str] = (), *, by_hooks: bool = False
) -> Literal["fast", "reference"]:
    """Returns the engine that the options mean for this model, if the hook points `names` are to be read or edited.

    Whether they fire is checked here for `"auto"` alone: with `"fast"`, `forward` raises if one does not. With
    `by_hooks` the attention function serves no hook point, as where gradients are read, and `"fast"` is checked too.

    Raises:
        ValueError: `"fast"` does not apply to this model.
    """
    if options.engine == "reference":
        return "reference"
    reason = model.why_no_decoder() if isinstance(model, HasDecoder) else why_not_fast(model)
    if not reason and (options.engine == "auto" or by_hooks):
        reason = why_silent(model, names, by_hooks=by_hooks)
    if options.engine == "fast" and reason:
        raise not_fast(reason)
    return "reference" if reason else "fast"


def not_fast(reason: str) -> ValueError:
    """Returns the error of a fast engine that does not apply."""
    return ValueError(
        f"the fast engine cannot run this model: {reason}; leave the engine at 'auto', or take 'reference'"
    )


def why_silent(model: HookedModel, names: Collection[str], *, by_hooks: bool = False) -> str | None:
    """Returns why a hook point does not fire under the fast engine, by a run of two tokens; None if all do.

    Without `by_hooks`, those inside its attention function do.
    """
    if isinstance(model, HasDecoder):
        return f"{min(names)} does not fire under it" if names else None
    names = [name for name in names if by_hooks or not is_inside(name)]
    if not names:
        return None
    with raw_attention(model):
        silent = dry_run(model, names).silent
    return f"{silent[0]} does not fire under it" if silent else None


def check_logits(logits: Float[Tensor, "... d_vocab"]) -> None:
    """Raises a ValueError where logits are NaN."""
    # amax passes NaN on, and makes no mask as large as the logits.
    if logits.amax(-1).isnan().any():
        raise ValueError("the model's logits are NaN: its weights are broken, or its dtype is too narrow")


def widened(numbers: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Returns numbers in float32, or as they are where they are wider; bfloat16 would round what is made of them."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def is_behind_selection(name: str) -> bool:
    """Returns whether a hook point lies where a bridge keeps only the columns whose logits are asked for."""
    return name.startswith("unembed.")


def is_inside(name: str) -> bool:
    """Returns whether an activation is inside the fast engine's attention function, on any architecture."""
    layer_and_site = site_of(name)
    return layer_and_site is not None and layer_and_site[1] in INSIDE_SITES


@dataclass(frozen=True, eq=False)
class Batch:
    """Some prompts on the model's device, without columns that are padding in all of them."""

    tokens: Int[Tensor, "prompt pos"]
    mask: Bool[Tensor, "prompt pos"]
    rows: Int[Tensor, " row"]
    """The caller's indices, on the CPU."""
    prompt: Int[Tensor, " row"]
    query: Int[Tensor, " row"]
    cropped: int
    """The number of columns left out."""
    whole_logits: bool = False
    """Whether a bridge computes the logits of every column, as where what makes them is read or edited."""

    @classmethod
    def of(
        cls, prompts: Prompts, selected: Int[Tensor, " selected"], prompt: Tensor, query: Tensor, device: torch.device
    ) -> "Batch":
        """Takes the selected prompts, ascending, with their rows."""
        # Rows ascend by prompt, so those of a batch, which is a run of the selected prompts, are contiguous.
        first = int(torch.searchsorted(prompt, selected[0]))
        rows = torch.arange(first, int(torch.searchsorted(prompt, selected[-1], right=True)))
        mask = prompts.mask[selected]
        # `argmax` takes the first of equal entries: the first column in which any prompt has a token.
        cropped = int(mask.any(0).int().argmax())
        return cls(
            prompts.tokens[selected, cropped:].to(device),
            mask[:, cropped:].to(device),
            rows,
            torch.searchsorted(selected, prompt[rows]).to(device),
            (query[rows] - cropped).to(device),
            cropped,
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The mask, where there is padding."""
        return {} if bool(self.mask.all()) else {"attention_mask": self.mask.long()}

    def probe(self, on_pattern: OnPattern | None) -> PatternProbe | None:
        """Returns what gives the rows of the pattern to a callback."""
        return (
            None if on_pattern is None else PatternProbe(self.prompt, self.query, partial(self.hand_over, on_pattern))
        )

    def kept(self, keep_logits: bool) -> Int[Tensor, " query"]:
        """Returns the columns of which a bridge computes logits, ascending.

        One is computed even where no logits are needed: NaN in it shows that the weights are broken.
        """
        if self.whole_logits:
            return torch.arange(self.tokens.shape[1], device=self.query.device)
        return self.query.unique() if keep_logits else self.query[:1]

    def rows_of(self, logits: Tensor, kept: Int[Tensor, " query"]) -> Float[Tensor, "row d_vocab"]:
        """Returns the rows of logits `[prompt query d_vocab]` that were computed at some queries, ascending."""
        return logits[self.prompt, torch.searchsorted(kept, self.query)]

    def hand_over(self, on_pattern: OnPattern, layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        """Gives rows in the caller's coordinates."""
        wide = widened(pattern.to(self.query.device))
        on_pattern(self.rows, layer, nn.functional.pad(wide, (self.cropped, 0)) if self.cropped else wide)


Hooks = Sequence[tuple[str, Callable[..., Tensor | None]]]
Run = Callable[..., Float[Tensor, "row d_vocab"]]


def _run_fast(
    model: HookedModel, batch: Batch, on_pattern: OnPattern | None, within: Hooks, *, keep_logits: bool
) -> Float[Tensor, "row d_vocab"]:
    changes_at: dict[str, list[Change]] = {}
    for name, change in within:
        changes_at.setdefault(name, []).append(change)
    inside = AttentionParts({name: in_order(changes) for name, changes in changes_at.items()}) if within else None
    probe = batch.probe(on_pattern)
    logits = _bridge_logits(batch, keep_logits, partial(model, attention_probe=probe, attention_parts=inside))
    if probe is not None and probe.layers_read != model.cfg.n_layers:
        raise ValueError(
            f"the fast engine read {probe.layers_read} of {model.cfg.n_layers} layers: use "
            "RunOptions(engine='reference')"
        )
    return logits


def _run_decoder(
    decoder: Decoder, batch: Batch, on_pattern: OnPattern | None, _within: Hooks, *, keep_logits: bool
) -> Float[Tensor, "row d_vocab"]:
    """Runs the parts of a model; hooks do not fire."""
    kept = batch.kept(keep_logits)
    run = Replay.run(
        decoder, batch.tokens, batch.mask, queries=kept, keep=(), starts=[0], probe=batch.probe(on_pattern)
    )
    return batch.rows_of(run.logits, kept) if keep_logits else run.logits[:, 0]


def _run_reference(
    model: HookedModel, batch: Batch, on_pattern: OnPattern | None, _within: Hooks, *, keep_logits: bool
) -> Float[Tensor, "row d_vocab"]:
    def rows_of(layer: int, pattern: Float[Tensor, "prompt head pos pos"]) -> None:
        if on_pattern is not None:
            prompt, query = batch.prompt.to(pattern.device), batch.query.to(pattern.device)
            batch.hand_over(on_pattern, layer, pattern[prompt, :, query])

    layers = range(model.cfg.n_layers) if on_pattern is not None else ()
    probes = Probes(model, {name_of("pattern", layer): partial(rows_of, layer) for layer in layers})
    run = partial(model.run_with_hooks, fwd_hooks=probes.fwd_hooks)
    if bridges.is_bridge(model):
        logits = _bridge_logits(batch, keep_logits, run)
    else:
        logits = run(batch.tokens, **batch.inputs)[batch.prompt, batch.query]
    probes.check()
    return logits


def _bridge_logits(batch: Batch, keep_logits: bool, run: Callable[..., Tensor]) -> Float[Tensor, "row d_vocab"]:
    """Runs a bridge and returns the logits of the rows; no others are computed, so a large vocabulary costs little."""
    kept = batch.kept(keep_logits)
    inputs: dict[str, Any] = dict(batch.inputs)
    if inputs:
        inputs["position_ids"] = token_positions(batch.mask)
    # Indices on the CPU serve on whatever device the last layer is.
    logits = run(batch.tokens, logits_to_keep=kept.cpu(), use_cache=False, **inputs).to(batch.tokens.device)
    return batch.rows_of(logits, kept) if keep_logits or batch.whole_logits else logits[:, 0]


def check_rows(prompts: Prompts, prompt: Int[Tensor, " row"], query: Int[Tensor, " row"]) -> None:
    """Raises a ValueError unless rows ascend by prompt and their queries are tokens."""
    if len(prompt) != len(query) or (prompt[1:] < prompt[:-1]).any():
        raise ValueError("rows need a prompt and a query each, and prompts ascend: sort the rows by prompt")
    if len(prompt) and (int(prompt[0]) < 0 or int(prompt[-1]) >= len(prompts)):
        raise ValueError(f"rows of prompts {int(prompt[0])} to {int(prompt[-1])}, but there are {len(prompts)}")
    length = prompts.mask.shape[1]
    if not ((query >= 0) & (query < length) & prompts.mask[prompt, query.clamp(0, length - 1)]).all():
        raise ValueError("a query lies at a position that holds no token: queries are positions of real tokens")
