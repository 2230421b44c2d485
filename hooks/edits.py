"""Edits: what a model computes, changed while it runs, as plain TransformerLens hooks."""

import hashlib
import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import index
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.hooks.compat import architectures, bridges
from align_circuits.hooks.head_names import HeadLike, describe, head_of, layers_of, shared_at
from align_circuits.hooks.hooked_model import HookedModel, token_positions
from align_circuits.hooks.names import Site, at_padding, has_heads_first, is_pattern, name_of
from align_circuits.hooks.probes import Change, Probes, check_lands, dry_run
from align_circuits.prompts.prompts import Prompts


@dataclass(frozen=True, eq=False)
class BatchContext:
    """What an edit needs to know of the prompts of one batch."""

    prompts: Prompts
    rows: Int[Tensor, " prompt"]
    """The prompts in the batch, in order."""
    span: slice | None = None
    """The columns that run; None for all, except for columns of padding that are left out on the left."""
    source: Mapping[str, Float[Tensor, "batch ..."]] = field(default_factory=dict)
    """By hook point, the activations of the source run of the batch, at the columns of `span`, for a `Patch` without
    values."""

    @classmethod
    def all_of(cls, prompts: Prompts) -> "BatchContext":
        """All prompts at once."""
        return cls(prompts, torch.arange(len(prompts)))

    def check(self, name: str, batch: int, length: int) -> None:
        """Raises unless an activation has the shape of these prompts; columns of padding may be left out.

        Raises:
            ValueError: Another number of prompts, or another length.
        """
        mask = self.prompts.mask[self.rows]
        missing = mask.shape[1] - length
        if self.span is not None:
            fits = length == self.span.stop - self.span.start
        else:
            fits = missing >= 0 and not bool(mask[:, :missing].any())
        if batch != len(mask) or not fits:
            raise ValueError(
                f"at {name!r} the model runs on {batch} prompts of {length} tokens, but the edit was made for "
                f"{len(mask)} of {mask.shape[1]}: run it on those, all at once, or pass the edit as `edits=`"
            )


@dataclass(frozen=True, eq=False)
class Edit(ABC):
    """A change of activations; a value that serves any number of models and runs."""

    def __repr__(self) -> str:
        settings = [text if name == "heads" else f"{name}={text}" for name, text in _settings(self).items()]
        return f"{type(self).__name__}({', '.join(settings)})"

    def _repr_html_(self) -> str:
        settings = {name: html.escape(text) for name, text in _settings(self).items()}
        rows = "".join(f"<tr><td>{name}</td><td>{text}</td></tr>" for name, text in settings.items())
        return f"<table><tr><th colspan=2>{type(self).__name__}</th></tr>{rows}</table>"

    def fwd_hooks(
        self, model: HookedModel, prompts: Prompts | None = None
    ) -> list[tuple[str, Callable[..., Tensor | None]]]:
        """Returns the edit as hooks for `model.hooks(fwd_hooks=...)` or `model.run_with_hooks(..., fwd_hooks=...)`.

        The hooks first run on two tokens: one that would never fire, or whose change the model would drop, raises here
        instead of changing nothing.

        Args:
            model: A model with TransformerLens's hooks.
            prompts: The prompts of the run, all in one batch. Edits that depend on the prompts need them: `Clamp`, and
                `Ablate` by means or resampling. To run in batches, pass the edit instead:
                `evaluate(model, prompts, edits=[edit])`.

        Raises:
            ValueError: A head that the model does not have, a hook that never fires or is not read, or `prompts`
                missing (means and resampling raise it when they run).
        """
        context = None if prompts is None else BatchContext.all_of(prompts)
        changes = as_hooked(changes_of([self], model, context), model)
        dry_run(model, changes).check()
        check_lands(model, changes)
        return Probes(model, changes).fwd_hooks

    @abstractmethod
    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:
        """Returns a function for each activation that changes, by the name of its hook point."""

    def start(self, context: BatchContext) -> int:  # noqa: ARG002 - for subclasses
        """Returns the first column of the prompts in the batch that may change: 0 unless an edit overrides it."""
        return 0


def changes_of(edits: Sequence[Edit], model: HookedModel, context: BatchContext | None) -> dict[str, Change]:
    """Returns the changes of several edits; at the same hook point they apply in order."""
    changes_at: dict[str, list[Change]] = {}
    for edit in edits:
        _check_heads_apart(edit, model)
        for name, change in edit.changes(model.cfg, context).items():
            changes_at.setdefault(name, []).append(change)
    return {name: in_order(changes) for name, changes in changes_at.items()}


def _check_heads_apart(edit: Edit, model: HookedModel) -> None:
    """Raises where an edit of some heads' queries or keys would change those of the others (`check_heads_apart`)."""
    if not isinstance(edit, _AtSite) or not len(edit.heads) or edit.site not in ("q", "k"):
        return
    for layer, columns in layers_of(model.cfg, edit.site, edit.heads, ()).items():
        if columns is not None and len(columns) < model.cfg.n_heads // shared_at(model.cfg, edit.site):
            check_heads_apart(model, layer, edit.site)


def check_heads_apart(model: HookedModel, layer: int, site: str) -> None:
    """Raises where single heads' queries or keys cannot be changed without those of the other heads.

    Raises:
        ValueError: The model norms the queries or keys of all heads of the layer together, after the site.
    """
    if architectures.norms_heads_together(model, layer, site):
        raise ValueError(
            f"site={site!r}: this model norms the {'queries' if site == 'q' else 'keys'} of all heads of layer {layer} "
            f"together, so a change of one head there rescales the others: take 'rot_{site}', which comes after the "
            "norm, or name all heads of the layer"
        )


def as_hooked(changes: Mapping[str, Change], model: HookedModel) -> dict[str, Change]:
    """Returns changes of activations as changes at a model's hook points: the same, but for the stream within a layer.

    Where the hook point between attention and MLP holds only what the MLP reads (`bridges.is_copy_for_mlp`), what
    changes there is added to the stream after the layer too, which it reaches unchanged in a `HookedTransformer`.

    Raises:
        ValueError: It would reach it changed, since the layer scales or norms its stream, or goes on after the MLP.
    """
    hooked = dict(changes)
    for name, change in changes.items():
        if bridges.is_copy_for_mlp(model, name):
            if architectures.scales_stream(model):
                raise ValueError(
                    f"a change at {name!r} would reach the MLP alone: after it this {model.cfg.architecture} scales "
                    "or norms the stream, or adds to it; take 'resid_pre', 'attn_out' or 'resid_post'"
                )
            after = name.replace("hook_resid_mid", "hook_resid_post")
            hooked[name], carried = _of_the_stream(change)
            hooked[after] = in_order([carried, changes[after]]) if after in changes else carried
    return hooked


def _of_the_stream(change: Change) -> tuple[Change, Change]:
    """A change of what the MLP reads, and one that adds the same to the stream after the layer."""
    differences: list[Tensor] = []

    def read(stream: Tensor) -> Tensor | None:
        new = change(stream)
        # Replaced, not appended: a run that was stopped before the second hook has left one behind.
        differences[:] = [] if new is None else [new - stream]
        return new

    def carried(stream: Tensor) -> Tensor | None:
        return stream + differences.pop() if differences else None

    return read, carried


def _settings(edit: Edit) -> dict[str, str]:
    """The fields of an edit that are not left at their defaults, each in a few words."""
    settings = {}
    for setting in fields(edit):
        value = getattr(edit, setting.name)
        # By identity, since a comparison with a tensor gives a tensor; by value what compares to one truth value.
        empty = isinstance(value, Sequence | Mapping) and not len(value)
        at_default = value is setting.default or (isinstance(value, str | float) and value == setting.default)
        if not empty and not at_default:
            settings[setting.name] = _in_short(setting.name, value)
    return settings


def _in_short(name: str, value: Any) -> str:
    """A value in a few words: heads by name, tensors by their shape, mappings by their hook points."""
    if name == "heads":
        try:
            named = describe([head_of(head) for head in value[:_SHOWN]])
        except ValueError:  # refused where the edit is used; to show it must not fail
            return repr(value)
        return named if len(value) <= _SHOWN else f"{named} ... ({len(value)} heads)"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(list(value)[:_SHOWN])}{', ...' if len(value) > _SHOWN else ''}}}"
    return repr(value) if isinstance(value, str | int | float | Sequence | AblationBaseline) else type(value).__name__


_SHOWN = 8
"""Heads, or hook points, that are named one by one."""


def edits_provenance(edits: Sequence[Edit]) -> dict[str, Any]:
    """Returns the settings that distinguish edits, as JSON, with tensors by a hash; an empty dict for no edits."""
    records = []
    for edit in edits:
        record: dict[str, Any] = {"edit": type(edit).__name__}
        for name, value in vars(edit).items():
            # A hook point leaves the site at its default, which then says nothing.
            if name == "site" and getattr(edit, "hook", None) is not None:
                continue
            if name in ("site", "how", "relation", "scale"):
                record[name] = value
            elif name in ("hook", "neurons", "positions") and value is not None and not isinstance(value, Tensor):
                record[name] = value if isinstance(value, str) else list(value)
            elif name in ("heads", "layers") and value:
                record[name] = [list(head_of(head)) for head in value] if name == "heads" else list(value)
            elif isinstance(value, Tensor) or (name == "values" and value):
                record[name] = _digest(value)
            elif name == "baseline" and value is not None:
                by = value.by if isinstance(value.by, str) else list(value.by)
                record[name] = {"by": by, "digest": _digest({**value.means, **value.values})}
        records.append(record)
    return {"edits": records} if records else {}


def _digest(value: Tensor | Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in [("", value)] if isinstance(value, Tensor) else sorted(value.items()):
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # As bytes, since numpy has no bfloat16.
        sha.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _columns_run(context: BatchContext | None, tokens: int) -> slice:
    """Which columns of the prompts the tokens of an activation are."""
    span = None if context is None else context.span
    # Engines leave out columns of padding on the left, so tokens that run are the last ones.
    return slice(-tokens, None) if span is None else span


def _keys_run(context: BatchContext | None, keys: int) -> slice:
    """Which columns of the prompts the keys of a pattern are: where not all columns run, those before them too."""
    span = None if context is None else context.span
    return slice(-keys, None) if span is None else slice(span.stop - keys, span.stop)


@dataclass(frozen=True, eq=False)
class _Activation:
    """An activation before it is edited, or the part of it that belongs to the edited heads."""

    name: str
    values: Float[Tensor, "..."]
    columns: Int[Tensor, " column"] | None
    """The heads, or key heads, that it was taken from; None for the whole activation."""
    dim: int
    """The dimension of heads: 1 in a pattern, else 2."""
    context: BatchContext | None

    @property
    def length(self) -> int:
        """The number of tokens."""
        # Of a pattern the queries, dimension 2; else dimension 1.
        return self.values.shape[3 - self.dim]

    @property
    def columns_run(self) -> slice:
        """Which columns of the prompts these tokens are."""
        return _columns_run(self.context, self.length)

    def of_tokens(self, values: Shaped[Tensor, "prompt pos"]) -> Shaped[Tensor, "batch token"]:
        """Returns the entries of the tokens in the batch, without the columns of padding that the engine left out."""
        self._check(values.shape[0], values.shape[1])
        values = values if self.context is None else values[self.context.rows]
        return values[:, self.columns_run].to(self.values.device)

    def of_run(self, values: Float[Tensor, "prompt ..."], rows: Int[Tensor, " batch"] | None = None) -> Tensor:
        """Returns the same part of another run's activation, for the prompts of the batch or for `rows`."""
        self._check(values.shape[0], values.shape[3 - self.dim])
        if self.dim == 2:
            given, own = tuple(values.shape[2:]), tuple(self.values.shape[2:])
            # Where heads are selected, how many the layer has is not known here: their own must be there.
            fits = len(given) == len(own) and given[1:] == own[1:]
            if fits and own:
                fits = given[0] == own[0] if self.columns is None else given[0] > int(self.columns.max())
            if not fits:
                raise ValueError(
                    f"values for {self.name!r} are {given} at a token, which the model's own are not: {own}"
                )
        if rows is None and self.context is not None:
            rows = self.context.rows
        values = values if rows is None else values[rows]
        run, keys = self.columns_run, _keys_run(self.context, self.values.shape[-1])
        values = (values[:, :, run, keys] if self.dim == 1 else values[:, run]).to(self.values.device)
        return values if self.columns is None else values.index_select(self.dim, self.columns)

    def of_source(self) -> Tensor | None:
        """Returns the same part of the source run of `context`, if it has one."""
        values = None if self.context is None else self.context.source.get(self.name)
        return values if values is None or self.columns is None else values.index_select(self.dim, self.columns)

    def _check(self, prompts: int, tokens: int) -> None:
        """Raises unless the values of an edit are for as many prompts and tokens as this run has."""
        runs = len(self.values), self.length
        if self.context is not None:
            self.context.check(self.name, *runs)
            runs = tuple(self.context.prompts.mask.shape)
        if (prompts, tokens) != runs:
            raise ValueError(
                f"at {self.name!r} the edit holds {prompts} prompts of {tokens} tokens, but the model runs on "
                f"{runs[0]} of {runs[1]}: they must match, prompt by prompt and token by token"
            )


@dataclass(frozen=True, eq=False, repr=False)
class _AtSite(Edit):
    """An edit of one kind of activation, at given heads or layers and positions: all of it, or a part.

    Raises:
        ValueError: Neurons and a direction at once, no neurons, a direction of length 0, rows that are not orthonormal,
            or a hook point named together with heads, layers or a site.
    """

    heads: Sequence[HeadLike] = ()
    """Which heads, for the sites of heads. For `k` and `v` under grouped-query attention name all the heads that share
    a key head: they cannot be changed apart."""
    site: Site = "z"
    layers: Sequence[int] = ()
    """Which layers, for the sites of layers."""
    positions: Bool[Tensor, "prompt pos"] | str | Sequence[str] | None = None
    """Which tokens, as a mask, or as names of `Prompts.positions`; all by default. Of a pattern: which of its rows."""
    hook: str | None = field(default=None, kw_only=True)
    """Any other hook point by its full name, such as `"hook_embed"` or `"ln_final.hook_normalized"`, in place of a site
    with heads or layers."""
    neurons: Sequence[int] | None = field(default=None, kw_only=True)
    """Which columns of the activation's last dimension; all by default."""
    direction: Float[Tensor, " d"] | Float[Tensor, "k d"] | None = field(default=None, kw_only=True)
    """A vector of any length, or orthonormal rows, in the activation's last dimension: only the component within their
    span changes. With `Patch` this is a distributed interchange intervention (Geiger et al., 2024, "Finding Alignments
    Between Interpretable Causal Variables and Distributed Neural Representations"); with `Ablate` the direction is
    projected out."""

    def __post_init__(self):
        if self.hook is not None and (len(self.heads) or len(self.layers) or self.site != "z"):
            raise ValueError(f"hook={self.hook!r} already names the activation: name no site, heads or layers")
        if self.hook is not None and has_heads_first(self.hook):
            raise ValueError(
                f"hook={self.hook!r} has heads before tokens, where positions cannot be told from heads: edit the site "
                "'q', 'k', 'rot_q' or 'rot_k'"
            )
        if self.site.startswith(("hook_", "blocks.")) or "." in self.site:
            raise ValueError(f"site={self.site!r} is the name of a hook point: give it as hook={self.site!r}")
        if self.neurons is not None and self.direction is not None:
            raise ValueError("neurons and a direction at once: an edit takes one of them")
        if self.neurons is not None and not len(self.neurons):
            raise ValueError("neurons=[]: name at least one, or leave them out for the whole activation")
        if self.direction is not None:
            _basis_of(self.direction)
        if isinstance(self.positions, Tensor) and self.positions.dtype != torch.bool:
            raise ValueError(f"positions of {self.positions.dtype}: give a mask of True and False, positions.bool()")

    @abstractmethod
    def replacement(self, old: _Activation) -> Tensor:
        """Returns what replaces `old.values`, broadcastable to it."""

    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:
        """One change for each layer that is named, or for the hook point."""
        mask = self._mask(context)
        if self.hook is not None:
            return {self.hook: partial(self._change, self.hook, None, mask, context)}
        columns_by_layer = layers_of(cfg, self.site, self.heads, self.layers)
        names = {name_of(self.site, layer): columns for layer, columns in columns_by_layer.items()}
        return {name: partial(self._change, name, columns, mask, context) for name, columns in names.items()}

    def start(self, context: BatchContext) -> int:
        """The first of `positions` in any prompt of the batch; the number of columns if there is none."""
        mask = self._mask(context)
        if mask is None:
            return 0
        # Asked here too: replay calls this before any activation is there to be checked.
        if mask.shape != context.prompts.mask.shape:
            raise ValueError(
                f"positions: the edit holds {len(mask)} prompts of {mask.shape[-1]} tokens, but "
                f"the model runs on {len(context.prompts)} of {context.prompts.mask.shape[1]}: give an entry a token"
            )
        columns = mask[context.rows].any(0).nonzero()
        return int(columns[0]) if len(columns) else mask.shape[1]

    def _mask(self, context: BatchContext | None) -> Bool[Tensor, "prompt pos"] | None:
        """The tokens to edit; None for all."""
        if self.positions is None or isinstance(self.positions, Tensor):
            return self.positions
        if context is None:
            raise ValueError("named positions depend on the prompts: give them, as in fwd_hooks(model, prompts)")
        return context.prompts.mask_of(self.positions)

    def _change(
        self, name: str, columns: Tensor | None, mask: Tensor | None, context: BatchContext | None, activation: Tensor
    ) -> Tensor:
        dim = 1 if is_pattern(name) else 2
        columns = None if columns is None else columns.to(activation.device)
        values = activation if columns is None else activation.index_select(dim, columns)
        old = _Activation(name, values, columns, dim, context)
        new = self._within(name, values, self.replacement(old).to(values).expand_as(values))
        if mask is not None:
            edited = old.of_tokens(mask)
            # Behind its tokens an activation has heads and columns, a pattern heads before and keys behind its queries.
            edited = edited.reshape(*edited.shape, *[1] * (values.ndim - 2))
            new = torch.where(edited.transpose(1, 2) if dim == 1 else edited, new, values)
        # Out of place: the activation may be in a cache or in the graph of gradients, which must keep the unedited one.
        return new if columns is None else activation.index_copy(dim, columns, new)

    def _within(self, name: str, old: Float[Tensor, "*shape d"], new: Float[Tensor, "*shape d"]) -> Tensor:
        """The new activation at `neurons`, or its component along `direction`, and the old one elsewhere."""
        if self.neurons is None and self.direction is None:
            return new
        width = old.shape[-1]
        if is_pattern(name):
            raise ValueError(f"{name!r} has neither neurons nor directions: its last dimension is that of keys")
        if self.neurons is not None:
            columns = [index(neuron) for neuron in self.neurons]
            if unknown := [neuron for neuron in columns if not 0 <= neuron < width]:
                raise ValueError(f"no neuron {unknown[0]} at {name!r}: it has {width}, counted from 0")
            chosen = torch.zeros(width, dtype=torch.bool, device=old.device)
            chosen[columns] = True
            return torch.where(chosen, new, old)
        assert self.direction is not None
        if self.direction.shape[-1] != width:
            raise ValueError(f"a direction of {self.direction.shape[-1]} numbers at {name!r}: give {width}")
        wide = torch.promote_types(old.dtype, torch.float32)  # bfloat16 would round the projection
        basis = _basis_of(self.direction).to(old.device, wide)
        return (old.to(wide) + (new.to(wide) - old.to(wide)) @ basis.T @ basis).to(old.dtype)


def _basis_of(direction: Float[Tensor, "*k d"]) -> Float[Tensor, "k d"]:
    """Orthonormal rows: those given, or a vector divided by its length."""
    direction = direction.detach().to(torch.promote_types(direction.dtype, torch.float32))
    if direction.ndim == 1:
        length = direction.norm()
        if not 0 < float(length) < torch.inf:
            raise ValueError(f"a direction of length {float(length)}: give a vector that is not zero")
        return direction[None] / length
    if direction.ndim != 2:
        raise ValueError(f"a direction of shape {tuple(direction.shape)}: give a vector, or orthonormal rows")
    products = direction @ direction.T
    # Rows of a QR decomposition in float32 miss it by about 1e-6.
    if not len(direction) or (products - torch.eye(len(direction)).to(products)).abs().max() > 1e-4:
        raise ValueError(
            f"direction {tuple(direction.shape)}: its rows are not orthonormal; take torch.linalg.qr(rows.T).Q.T"
        )
    return direction


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Patch(_AtSite):
    """Replaces activations by those of another run: activation patching.

    Source: Vig et al. (2020), "Investigating Gender Bias in Language Models Using Causal Mediation Analysis"; Zhang and
    Nanda (2024), "Towards Best Practices of Activation Patching".
    """

    values: Mapping[str, Float[Tensor, "prompt ..."]] = field(default_factory=dict)
    """By hook point, the activations of the other run, all heads of them (`run.forward_pass.capture`). Leave them
    out where `run.edited_runs.run_edited` is given the source prompts."""

    def replacement(self, old: _Activation) -> Tensor:
        """The other run's activation."""
        if not self.values and (source := old.of_source()) is not None:
            return source
        if old.name not in self.values:
            raise ValueError(f"no values for {old.name!r}: this patch has {', '.join(self.values) or 'none'}")
        return old.of_run(self.values[old.name])


MeansBy = Literal["kind", "position"] | tuple[str, ...]
"""How tokens are grouped for mean ablation (`groups_of`)."""


@dataclass(frozen=True, eq=False)
class AblationBaseline:
    """What replaces ablated activations; `ablation_baseline` measures it."""

    means: Mapping[str, Float[Tensor, "group ..."]] = field(default_factory=dict)
    """By hook point, the mean over the reference prompts of each group of tokens (`groups_of`); NaN for groups without
    tokens."""
    values: Mapping[str, Float[Tensor, "prompt ..."]] = field(default_factory=dict)
    """By hook point, the activations of the reference prompts, for resampling: row i + 1 stands in for prompt i."""
    by: MeansBy = "kind"
    """What the groups of `means` are."""

    def __repr__(self) -> str:
        by_name = {name: held for name, held in vars(self).items() if name != "by" and held}
        held = [f"{name} at {len(by_hook_point)} hook points" for name, by_hook_point in by_name.items()]
        return f"AblationBaseline({', '.join(held)})"


def default_groups(prompts: Prompts) -> MeansBy:
    """Returns `"position"` for aligned texts, and `"kind"` for all other prompts.

    Aligned are at least eight prompts of one length, each of whose named positions (`Prompts.positions`) lies at the
    same place in all. Of fewer, too much of a mean is the prompt's own activation.
    """
    named = prompts.positions.values()
    aligned = len(prompts) >= 8 and prompts.of_one_length and all(len(columns.unique()) == 1 for columns in named)
    return "position" if named and aligned else "kind"


def groups_of(prompts: Prompts, by: MeansBy = "kind") -> Int[Tensor, "prompt pos"]:
    """Returns the group of each token, over which mean ablation takes its means.

    Means over groups keep what all prompts have in common at such tokens, so that ablating a head removes only what it
    carries about this prompt. Means over single positions keep more than that where all prompts share a layout (a
    previous-token head, ablated so, still works); means over all positions keep less.

    Args:
        prompts: The prompts.
        by: `"kind"`: the kind of a token, and whether it belongs to the test example. `"position"`: its place in its
            prompt, from 0. Names of positions: the one that it is, and one group for all tokens that have none.

    Raises:
        KeyError: A named position that the prompts do not have.
    """
    if by == "kind":
        tested = prompts.example == prompts.example.amax(1, keepdim=True)
        return 2 * prompts.token_kinds + tested.long()
    if by == "position":
        return token_positions(prompts.mask)
    group = torch.zeros(prompts.mask.shape, dtype=torch.long)
    for number, name in enumerate([by] if isinstance(by, str) else by, 1):
        group[prompts.mask_of(name)] = number
    return group


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Ablate(_AtSite):
    """Removes the output of heads or layers.

    - `"zero"`: it becomes 0; of attention scores (`hook_attn_scores`) those that are not masked, so that a head attends
      equally to all that it may attend to.
    - `"mean"`: its mean over tokens of the same group in the reference prompts: of one kind, at one position, or at
      one named position (`groups_of`).
    - `"resample"`: its value at the same position of the next reference prompt: prompt i gets i + 1, the last the
      first. The reference prompts must be as many and as long as those that run.

    Misleads: zero is far from all that later layers have seen in training, and under all three later layers may
    compensate (McGrath et al., 2023, "The Hydra Effect"). The control is the same ablation of as many other heads.
    """

    how: Literal["zero", "mean", "resample"] = "mean"
    """What replaces the output."""
    baseline: AblationBaseline | None = None
    """For `"mean"` and `"resample"`: what `ablation_baseline` returned."""

    def replacement(self, old: _Activation) -> Tensor:
        """The ablated activation."""
        if self.how == "zero":
            zero = old.values.new_zeros(())
            if not old.name.endswith("hook_attn_scores"):
                return zero
            # Scores of later tokens and of padding are masked, and 0 would let a head attend to them. They are -inf in
            # TransformerLens; transformers adds the dtype's minimum, to scores of either sign.
            return old.values.where(old.values <= torch.finfo(old.values.dtype).min / 2, zero)
        if self.how not in ("mean", "resample"):
            raise ValueError(f"how={self.how!r}: choose 'zero', 'mean' or 'resample'")
        baseline = self.baseline or AblationBaseline()
        by_name = baseline.means if self.how == "mean" else baseline.values
        if old.name not in by_name:
            site = f"site={self.site!r}" if self.hook is None else f"hook={self.hook!r}"
            raise ValueError(
                f"how={self.how!r} needs a baseline that has {old.name!r}: make it with "
                f"ablation_baseline(model, prompts, how={self.how!r}, {site})"
            )
        if old.context is None:
            raise ValueError(
                f"how={self.how!r} depends on the prompts: give them, as in fwd_hooks(model, prompts), or pass the "
                "edit as `edits=`"
            )
        if self.how == "resample":
            # The next prompt and not a random one: no prompt gets its own activation back, and nothing is drawn.
            return old.of_run(by_name[old.name], (old.context.rows + 1) % len(by_name[old.name]))
        means = by_name[old.name].to(old.values.device)
        means = means if old.columns is None else means.index_select(1, old.columns)
        group = old.of_tokens(groups_of(old.context.prompts, baseline.by))
        # Means of groups that the baseline lacks are NaN. At padding there is none to take.
        by_token = means[group.clamp(max=len(means) - 1)]
        if (by_token.flatten(2).isnan().any(2) | (group >= len(means)))[old.of_tokens(old.context.prompts.mask)].any():
            group_name = "at a position" if baseline.by == "position" else "of a kind"
            raise ValueError(
                f"the prompts have tokens {group_name} that the reference prompts lack: give others as baseline"
            )
        return by_token.nan_to_num(at_padding(old.name))


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Clamp(Edit):
    """Sets the attention of heads by a relation: from each of its queries, equally to all of its keys.

    With k keys each gets 1/k, and every other token 0. The effect on the output is the part that attention alone
    explains. Queries without a row of the relation keep their attention.

    Raises:
        KeyError: When it runs, a relation that the prompts do not have.
        ValueError: When it runs, a relation with two rows at one query, or prompts that are missing.
    """

    heads: Sequence[HeadLike]
    """Which heads, as `(2, 3)` or `"L2H3"`."""
    relation: str
    """The name of a relation of the prompts that run."""

    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:
        """One change for each layer that is named."""
        if context is None:
            raise ValueError("a clamp depends on the prompts: give them, as in fwd_hooks(model, prompts)")
        if self.relation not in context.prompts.relations:
            raise KeyError(
                f"no relation {self.relation!r} in these prompts; they have {', '.join(context.prompts.relations)}"
            )
        relation = context.prompts.relations[self.relation]
        # The relation covers all prompts, a batch some of them; -1 for those that are not in it.
        row_in_batch = torch.full((len(context.prompts),), -1)
        row_in_batch[context.rows] = torch.arange(len(context.rows))
        in_batch = (row_in_batch[relation.prompt] >= 0).nonzero()[:, 0]
        prompt, query = row_in_batch[relation.prompt[in_batch]], relation.query[in_batch]
        if len(torch.stack([prompt, query]).unique(dim=1).T) != len(in_batch):
            raise ValueError(f"relation {self.relation!r} has two rows at one query, which can attend only one way")
        keys = relation.expand(in_batch)[0].float()
        attention, columns = keys / keys.sum(1, keepdim=True), context.prompts.mask.shape[1]

        def change(name: str, heads: Tensor, activation: Tensor) -> Tensor:
            context.check(name, len(activation), activation.shape[2])
            new = activation.clone()
            first, end, _ = _columns_run(context, activation.shape[2]).indices(columns)
            runs = (query >= first) & (query < end)
            rows = attention[runs][:, _keys_run(context, activation.shape[3])]
            new[prompt[runs, None], heads, query[runs, None] - first] = rows[:, None].expand(-1, len(heads), -1).to(new)
            return new

        names = {name_of("pattern", layer): heads for layer, heads in layers_of(cfg, "pattern", self.heads).items()}
        return {name: partial(change, name, heads) for name, heads in names.items() if heads is not None}

    def start(self, context: BatchContext) -> int:
        """The first query of the relation in any prompt of the batch; the number of columns if there is none."""
        relation = context.prompts.relations[self.relation]
        in_batch = relation.query[torch.isin(relation.prompt, context.rows)]
        return int(in_batch.min()) if len(in_batch) else context.prompts.mask.shape[1]


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Steer(_AtSite):
    """Adds a vector.

    Source: Turner et al. (2023), "Activation Addition: Steering Language Models Without Optimization".
    """

    vector: Float[Tensor, " d"] | None = None
    """d_model numbers at a layer's site (d_mlp at `mlp_post`), d_head at a head's; not at the site `"pattern"`."""
    scale: float = 1.0
    """The factor of the vector."""

    def replacement(self, old: _Activation) -> Tensor:
        """The activation plus the scaled vector."""
        if is_pattern(old.name) or self.vector is None or self.vector.shape != old.values.shape[-1:]:
            shape = None if self.vector is None else tuple(self.vector.shape)
            given = "no vector= is given to add" if shape is None else f"a vector of shape {shape} cannot be added"
            raise ValueError(f"{given} at {old.name!r}: give {old.values.shape[-1]} numbers, at any site but 'pattern'")
        return old.values + self.scale * self.vector.to(old.values)


def in_order(changes: Sequence[Change]) -> Change:
    """Returns one change that applies several in order."""

    def in_sequence(activation: Tensor) -> Tensor:
        for change in changes:
            new = change(activation)
            activation = activation if new is None else new
        return activation

    return in_sequence
