"""The engine: runs a model on prompts, and hands rows of attention and logits to whoever asked, batch by batch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from align_circuits.hooks.attention import Probe, Within, raw_attention, why_not_fast
from align_circuits.hooks.edits import BatchContext, Edit, changes_of, in_order
from align_circuits.hooks.names import INSIDE_SITES, name_of, site_of
from align_circuits.hooks.probes import Change, Probes, dry_run, evaluating
from align_circuits.models.protocol import HookedModel, check_fits, device_of
from align_circuits.prompts.prompts import Prompts

CPU_TOKENS = 2048
"""Tokens a batch on the CPU: from about a thousand on, more were not faster (8 layers, width 512), only larger."""

OnPattern = Callable[[Int[Tensor, " row"], int, Float[Tensor, "row head pos"]], None]
OnLogits = Callable[[Int[Tensor, " row"], Float[Tensor, "row d_vocab"]], None]
OnActivation = Callable[[Int[Tensor, " batch"], Float[Tensor, "batch ..."]], None]


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
    """Runs a model and hands over the attention and the logits of chosen positions, keeping nothing.

    Memory does not grow with the number of prompts. The callbacks get the indices of their rows (on the CPU) and the
    rows themselves (on the model's device, float32 or wider). Assign by row, do not add up: after an out-of-memory
    the same rows come again in smaller batches.

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
        engine: `"fast"` is Hugging Face's own attention with exact rows on the side, `"reference"` is TransformerLens's
            hooks; `"auto"` is fast on a `TransformerBridge` of a tested architecture without hooks attached, where all
            hook points of `edits` and `on_activation` fire.
        batch_size: Prompts a batch; `"auto"` fits it to the device and halves it on out-of-memory. It changes no
            result.

    Returns:
        The engine that ran, `"fast"` or `"reference"`.

    Raises:
        ValueError: The prompts do not fit the model, a row is not a token, the fast engine does not apply, a hook never
            fires, or the logits are NaN.
    """
    check_fits(model, prompts)
    check_rows(prompts, prompt, query)
    reads = dict(on_activation or {})
    touched = {*reads, *changes_of(edits, model, BatchContext(prompts, prompt[:0]))}
    ran = choose(model, engine, touched)
    device = device_of(model)
    size = _fitting_size(model, prompts, device, ran) if batch_size == "auto" else batch_size
    if size < 1:
        raise ValueError(f"batch_size={batch_size}: give a positive number of prompts, or 'auto'")
    run = _run_fast if ran == "fast" else _run_reference
    chosen, length = prompt.unique(), prompts.mask.shape[1]
    size = min(size, max(1, len(chosen)))

    def run_batch(some: Int[Tensor, " prompt"], _: int) -> None:
        batch = Batch.of(prompts, some, prompt, query, device)
        hooked = _hooked(model, edits, reads, BatchContext(prompts, some))
        hooks = [hook for probes in hooked for hook in probes.fwd_hooks]
        within = [hook for hook in hooks if ran == "fast" and _is_inside(hook[0])]
        with model.hooks(fwd_hooks=[hook for hook in hooks if hook not in within]):
            logits = run(model, batch, on_pattern, within, keep_logits=on_logits is not None)
        for probes in hooked:
            if ran == "fast" and probes.silent:
                raise cannot(f"{probes.silent[0]} does not fire under it")
            probes.check()
        if logits.amax(-1).isnan().any():
            raise ValueError("the model's logits are NaN: its weights are broken, or its dtype is too narrow")
        if on_logits is not None:
            on_logits(batch.rows, logits.to(torch.promote_types(logits.dtype, torch.float32)))

    with torch.no_grad(), evaluating(model), raw_attention(model) if ran == "fast" else nullcontext():
        in_batches(run_batch, chosen, length, size * length, halve_to=length if batch_size == "auto" else None)
    return ran


def in_batches(
    run: Callable[[Int[Tensor, " prompt"], int], None],
    chosen: Int[Tensor, " prompt"],
    length: int,
    tokens: int,
    *,
    halve_to: int | None,
) -> None:
    """Runs prompts batch by batch; when memory runs out, the same prompts come again in smaller batches.

    Args:
        run: Called with some prompts and with how many tokens a batch may hold; what it did before it ran out of memory
            must do no harm.
        chosen: All prompts.
        length: Tokens in a prompt.
        tokens: In a batch, which holds at least one prompt.
        halve_to: Down to how many the tokens of a batch are halved on out-of-memory; None: never.
    """
    while len(chosen):
        batch = chosen[: max(1, tokens // length)]
        try:
            run(batch, tokens)
        except RuntimeError as error:
            if halve_to is None or tokens // 2 < halve_to or not _out_of_memory(error):
                raise
            tokens //= 2
        else:
            chosen = chosen[len(batch) :]


def capture(
    model: HookedModel,
    prompts: Prompts,
    names: Sequence[str],
    *,
    edits: Sequence[Edit] = (),
    options: RunOptions = RunOptions(),
) -> dict[str, Float[Tensor, "prompt ..."]]:
    """Returns the activations at some hook points, after the edits, on the CPU; 0 at padding.

    Memory grows with the prompts: take one layer at a time where they are many or long.
    """
    kept: dict[str, Tensor] = {}
    length = prompts.mask.shape[1]

    def keep(name: str, rows: Int[Tensor, " batch"], activation: Float[Tensor, "batch ..."]) -> None:
        is_pattern = name.endswith(("hook_pattern", "hook_attn_scores"))
        missing = length - activation.shape[2 if is_pattern else 1]
        padding = [missing, 0, missing, 0] if is_pattern else [0, 0] * (activation.ndim - 2) + [missing, 0]
        whole = nn.functional.pad(activation.cpu(), padding)
        if name not in kept:
            kept[name] = torch.zeros(len(prompts), *whole.shape[1:], dtype=whole.dtype)
        real = prompts.mask[rows]
        real = real[:, None, :, None] if is_pattern else real.reshape(*real.shape, *[1] * (whole.ndim - 2))
        kept[name][rows] = whole.where(real, 0)

    last = torch.full((len(prompts),), length - 1)
    forward(
        model,
        prompts,
        prompt=torch.arange(len(prompts)),
        query=last,
        on_activation={name: partial(keep, name) for name in names},
        edits=edits,
        options=options,
    )
    return kept


def choose(
    model: HookedModel, engine: str, touched: Collection[str] = (), *, by_hooks: bool = False
) -> Literal["fast", "reference"]:
    """Returns the engine that `engine` means for this model, if the hook points `touched` are to be read or edited.

    Whether they fire is found out here for `"auto"` alone: `"fast"` is taken at its word, and `forward` raises if one
    does not. With `by_hooks` nobody meets them in the attention function, as where gradients are read, and `"fast"` is
    refused here.

    Raises:
        ValueError: `"fast"` does not apply to this model, or the name is unknown.
    """
    if engine not in ("auto", "fast", "reference"):
        raise ValueError(f"engine={engine!r}: choose 'auto', 'fast' or 'reference'")
    if engine == "reference":
        return "reference"
    reason = why_not_fast(model)
    if not reason and (engine == "auto" or by_hooks):
        reason = why_silent(model, touched, by_hooks=by_hooks)
    if engine == "fast" and reason:
        raise cannot(reason)
    return "reference" if reason else "fast"


def cannot(reason: str) -> ValueError:
    """Returns the error of a fast engine that does not apply."""
    return ValueError(f"the fast engine cannot run this model: {reason}; use engine='reference'")


def why_silent(model: Any, touched: Collection[str], *, by_hooks: bool = False) -> str | None:
    """Returns which hook point does not fire under the fast engine, found out on two tokens; None if all do.

    Without `by_hooks`, those that it meets in its attention function do.
    """
    touched = [name for name in touched if by_hooks or not _is_inside(name)]
    if not touched:
        return None
    with raw_attention(model):
        silent = dry_run(model, touched).silent
    return f"{silent[0]} does not fire under it" if silent else None


def _is_inside(name: str) -> bool:
    """Whether the fast engine meets an activation in its attention function, on any architecture."""
    place = site_of(name)
    return place is not None and place[1] in INSIDE_SITES


def _hooked(
    model: Any, edits: Sequence[Edit], reads: Mapping[str, OnActivation], context: BatchContext
) -> tuple[Probes, Probes]:
    """The edits, then the readers, which so see what was edited."""
    changes: dict[str, Change] = {name: partial(read, context.rows) for name, read in reads.items()}
    return Probes(model, changes_of(edits, model, context)), Probes(model, changes)


@dataclass(frozen=True)
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

    @classmethod
    def of(
        cls, prompts: Prompts, chosen: Int[Tensor, " chosen"], prompt: Tensor, query: Tensor, device: torch.device
    ) -> "Batch":
        """Takes the chosen prompts, ascending, with their rows."""
        rows = torch.arange(
            int(torch.searchsorted(prompt, chosen[0])), int(torch.searchsorted(prompt, chosen[-1], right=True))
        )
        mask = prompts.mask[chosen]
        cropped = int(mask.any(0).int().argmax())
        return cls(
            prompts.tokens[chosen, cropped:].to(device),
            mask[:, cropped:].to(device),
            rows,
            torch.searchsorted(chosen, prompt[rows]).to(device),
            (query[rows] - cropped).to(device),
            cropped,
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The mask, where there is padding."""
        return {} if bool(self.mask.all()) else {"attention_mask": self.mask.long()}

    def hand_over(self, on_pattern: OnPattern, layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        """Gives rows in the caller's coordinates."""
        wide = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
        on_pattern(self.rows, layer, nn.functional.pad(wide, (self.cropped, 0)) if self.cropped else wide)


Hooks = Sequence[tuple[str, Callable[..., Tensor | None]]]


def _run_fast(
    model: Any, batch: Batch, on_pattern: OnPattern | None, within: Hooks, *, keep_logits: bool
) -> Float[Tensor, "row d_vocab"]:
    named: dict[str, list[Change]] = {}
    for name, change in within:
        named.setdefault(name, []).append(change)
    parts = Within({name: in_order(changes) for name, changes in named.items()}) if within else None
    probe = None if on_pattern is None else Probe(batch.prompt, batch.query, partial(batch.hand_over, on_pattern))
    logits = _bridge_logits(batch, keep_logits, partial(model, attention_probe=probe, attention_within=parts))
    if probe is not None and probe.seen != model.cfg.n_layers:
        raise ValueError(f"the fast engine saw {probe.seen} of {model.cfg.n_layers} layers: use engine='reference'")
    return logits


def _run_reference(
    model: Any, batch: Batch, on_pattern: OnPattern | None, _within: Hooks, *, keep_logits: bool
) -> Float[Tensor, "row d_vocab"]:
    def rows_of(layer: int, pattern: Float[Tensor, "prompt head pos pos"]) -> None:
        if on_pattern is not None:
            batch.hand_over(on_pattern, layer, pattern[batch.prompt, :, batch.query])

    layers = range(model.cfg.n_layers) if on_pattern is not None else ()
    probes = Probes(model, {name_of("pattern", layer): partial(rows_of, layer) for layer in layers})
    run = partial(model.run_with_hooks, fwd_hooks=probes.fwd_hooks)
    if isinstance(getattr(model, "original_model", None), PreTrainedModel):
        logits = _bridge_logits(batch, keep_logits, run)
    else:
        logits = run(batch.tokens, **batch.inputs)[batch.prompt, batch.query]
    probes.check()
    return logits


def _bridge_logits(batch: Batch, keep_logits: bool, run: Callable[..., Tensor]) -> Float[Tensor, "row d_vocab"]:
    """Runs a bridge and returns the logits of the rows; no others are computed, so a large vocabulary costs little."""
    kept = batch.query.unique() if keep_logits else batch.query[:1]
    inputs: dict[str, Any] = dict(batch.inputs)
    if inputs:
        inputs["position_ids"] = (batch.mask.cumsum(1) - 1).clamp(min=0)
    logits = run(batch.tokens, logits_to_keep=kept, use_cache=False, **inputs)
    return logits[batch.prompt, torch.searchsorted(kept, batch.query)] if keep_logits else logits[:, 0]


def check_rows(prompts: Prompts, prompt: Int[Tensor, " row"], query: Int[Tensor, " row"]) -> None:
    """Raises unless rows ascend by prompt and ask at tokens.

    Raises:
        ValueError: They do not.
    """
    if len(prompt) != len(query) or (prompt[1:] < prompt[:-1]).any():
        raise ValueError("rows need a prompt and a query each, and prompts ascend: sort the rows by prompt")
    if len(prompt) and (int(prompt[0]) < 0 or int(prompt[-1]) >= len(prompts)):
        raise ValueError(f"rows of prompts {int(prompt[0])} to {int(prompt[-1])}, but there are {len(prompts)}")
    length = prompts.mask.shape[1]
    if not ((query >= 0) & (query < length) & prompts.mask[prompt, query.clamp(0, length - 1)]).all():
        raise ValueError("a row asks at a position that holds no token: queries are positions of real tokens")


def _fitting_size(model: Any, prompts: Prompts, device: torch.device, ran: str) -> int:
    """How many prompts keep the device busy without filling its memory."""
    length, config = prompts.mask.shape[1], model.cfg
    if device.type != "cuda":
        return max(1, CPU_TOKENS // length)
    wide = getattr(config, "d_mlp", None) or 4 * config.d_model
    numbers = length * (12 * config.d_model + 4 * wide) + 2 * length * config.d_vocab
    numbers += 4 * config.n_heads * length * (length if ran == "reference" else 64)
    return max(1, int(torch.cuda.mem_get_info(device)[0] / 2 / (4 * numbers)))


def _out_of_memory(error: RuntimeError) -> bool:
    """Whether smaller batches may help."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
