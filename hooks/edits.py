"""Edits: what a model computes, changed while it runs, as plain TransformerLens hooks."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from align_circuits.hooks.heads import Head, layers_of
from align_circuits.hooks.names import Site, name_of
from align_circuits.hooks.probes import Change, Probes, dry_run
from align_circuits.prompts.prompts import Prompts


@dataclass(frozen=True, eq=False)
class BatchContext:
    """The prompts that a model is context on, as far as an edit must know."""

    prompts: Prompts
    rows: Int[Tensor, " prompt"]
    """Which of them are in the batch, in order."""
    span: slice | None = None
    """Which of their columns run; None for all, but for columns of padding left out on the left."""
    source: Mapping[str, Float[Tensor, "batch ..."]] = field(default_factory=dict)
    """By hook point, the activations of another run of the batch, at the columns of `span`: what a `Patch` without
    values of its own puts in."""

    @classmethod
    def all_of(cls, prompts: Prompts) -> "BatchContext":
        """All prompts at once."""
        return cls(prompts, torch.arange(len(prompts)))

    def check(self, name: str, batch: int, length: int) -> None:
        """Raises unless an activation is that of these prompts, of which columns of padding may be left out.

        Raises:
            ValueError: Their number or length is another.
        """
        mask = self.prompts.mask[self.rows]
        left_out = mask.shape[1] - length
        if self.span is not None:
            fits = length == self.span.stop - self.span.start
        else:
            fits = left_out >= 0 and not bool(mask[:, :left_out].any())
        if batch != len(mask) or not fits:
            raise ValueError(
                f"at {name!r} the model runs on {batch} prompts of {length} tokens, but the edit was made for "
                f"{len(mask)} of {mask.shape[1]}: run it on those, all at once, or hand the edit over as `edits=`"
            )


@dataclass(frozen=True, eq=False)
class Edit(ABC):
    """A change of activations; a value, good for any number of models and runs."""

    def fwd_hooks(self, model: Any, prompts: Prompts | None = None) -> list[tuple[str, Callable[..., Tensor | None]]]:
        """Returns the edit as hooks for `model.hooks(fwd_hooks=...)` or `model.run_with_hooks(..., fwd_hooks=...)`.

        Every hook is tried on two tokens first: one that would never fire raises here and changes nothing in silence.

        Args:
            model: A model with TransformerLens's hooks.
            prompts: What the model will run on, all in one batch. An edit that depends on the prompt needs it: `Clamp`,
                and `Ablate` by means or resampling. To run in batches, hand the edit over instead:
                `evaluate(model, prompts, edits=[edit])`.

        Raises:
            ValueError: A head that the model does not have, a hook that never fires, or `prompts` missing.
        """
        changes = changes_of([self], model, None if prompts is None else BatchContext.all_of(prompts))
        dry_run(model, changes).check()
        return Probes(model, changes).fwd_hooks

    @abstractmethod
    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:
        """Returns what happens to each activation, by the name of its hook point."""

    def start(self, context: BatchContext) -> int:  # noqa: ARG002 - what an edit does not know of itself
        """Returns the first column of the prompts in the batch that may change: 0 unless the edit says more."""
        return 0


def changes_of(edits: Sequence[Edit], model: Any, context: BatchContext | None) -> dict[str, Change]:
    """Returns the changes of several edits, applied in order where they meet."""
    together: dict[str, list[Change]] = {}
    for edit in edits:
        for name, change in edit.changes(model.cfg, context).items():
            together.setdefault(name, []).append(change)
    return {name: in_order(changes) for name, changes in together.items()}


def edits_provenance(edits: Sequence[Edit]) -> dict[str, Any]:
    """Returns what tells edits apart, as JSON, tensors by a hash; nothing where there are none."""
    told = [
        {
            "edit": type(edit).__name__,
            **{
                name: value if isinstance(value, str | float | int) else [list(some) for some in value]
                for name, value in vars(edit).items()
                if name in ("site", "how", "relation", "scale") or (name == "heads" and value)
            },
            **({"layers": list(layers)} if (layers := getattr(edit, "layers", ())) else {}),
            **{
                name: _digest(value)
                for name, value in vars(edit).items()
                if isinstance(value, Tensor) or (name == "values" and value)
            },
        }
        for edit in edits
    ]
    return {"edits": told} if told else {}


def _digest(value: Tensor | Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, part in [("", value)] if isinstance(value, Tensor) else sorted(value.items()):
        sha.update(f"{name} {tuple(part.shape)} {part.dtype}".encode())
        sha.update(part.detach().cpu().flatten().view(torch.uint8).numpy())
    return sha.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class _Spot:
    """One activation that is about to change, or the part of it that belongs to some heads."""

    name: str
    old: Float[Tensor, "..."]
    columns: Int[Tensor, " column"] | None
    """The heads, or key heads, that it was taken from; None for all there is."""
    dim: int
    """The dimension of heads: 1 in a pattern, else 2."""
    context: BatchContext | None

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.old.shape[3 - self.dim]

    @property
    def columns_run(self) -> slice:
        """Which columns of the prompts these tokens are."""
        given = None if self.context is None else self.context.span
        return slice(-self.length, None) if given is None else given

    def of_tokens(self, values: Shaped[Tensor, "prompt pos"]) -> Shaped[Tensor, "batch token"]:
        """Returns the entries of the tokens in the batch; columns of padding that the engine left out are left out."""
        self._check(values.shape[0], values.shape[1])
        values = values if self.context is None else values[self.context.rows]
        return values[:, self.columns_run].to(self.old.device)

    def of_run(self, values: Float[Tensor, "prompt ..."], rows: Int[Tensor, " batch"] | None = None) -> Tensor:
        """Returns the same part of another run's activation, for the prompts of the batch or for `rows`."""
        self._check(values.shape[0], values.shape[3 - self.dim])
        if rows is None and self.context is not None:
            rows = self.context.rows
        values = values if rows is None else values[rows]
        run = self.columns_run
        values = (values[:, :, run, run] if self.dim == 1 else values[:, run]).to(self.old.device)
        return values if self.columns is None else values.index_select(self.dim, self.columns)

    def of_source(self) -> Tensor | None:
        """Returns the same part of the run that `context` holds beside, if it does."""
        values = None if self.context is None else self.context.source.get(self.name)
        return values if values is None or self.columns is None else values.index_select(self.dim, self.columns)

    def _check(self, prompts: int, tokens: int) -> None:
        """Raises unless what an edit holds, for so many prompts and tokens, is for this run."""
        runs = len(self.old), self.length
        if self.context is not None:
            self.context.check(self.name, *runs)
            runs = tuple(self.context.prompts.mask.shape)
        if (prompts, tokens) != runs:
            raise ValueError(
                f"at {self.name!r} the edit holds {prompts} prompts of {tokens} tokens, but the model runs on "
                f"{runs[0]} of {runs[1]}: they must match, prompt by prompt and token by token"
            )


@dataclass(frozen=True, eq=False)
class _AtSite(Edit):
    """An edit of one kind of activation, at some heads or layers and at some positions."""

    heads: Sequence[Head] = ()
    """Where, for the sites of heads. For `k` and `v` under grouped-query attention name all the heads that share a key
    head: they cannot be changed apart."""
    site: Site = "z"
    layers: Sequence[int] = ()
    """Where, for the sites of layers."""
    positions: Bool[Tensor, "prompt pos"] | None = None
    """At which tokens; at all by default. For a pattern: in which of its rows."""

    @abstractmethod
    def value(self, spot: _Spot) -> Tensor:
        """Returns what replaces `spot.old`, broadcastable to it."""

    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:
        """One change for each layer that is named."""
        where = layers_of(cfg, self.site, self.heads, self.layers)
        return {
            name_of(self.site, layer): partial(self._change, name_of(self.site, layer), columns, context)
            for layer, columns in where.items()
        }

    def start(self, context: BatchContext) -> int:
        """The first of `positions` in any prompt of the batch; the number of columns if there is none."""
        if self.positions is None:
            return 0
        if self.positions.shape != context.prompts.mask.shape:
            raise ValueError(
                f"positions: the edit holds {len(self.positions)} prompts of {self.positions.shape[-1]} tokens, but "
                f"the model runs on {len(context.prompts)} of {context.prompts.mask.shape[1]}: give an entry a token"
            )
        columns = self.positions[context.rows].any(0).nonzero()
        return int(columns[0]) if len(columns) else self.positions.shape[1]

    def _change(self, name: str, columns: Tensor | None, context: BatchContext | None, activation: Tensor) -> Tensor:
        dim = 1 if self.site == "pattern" else 2
        columns = None if columns is None else columns.to(activation.device)
        old = activation if columns is None else activation.index_select(dim, columns)
        spot = _Spot(name, old, columns, dim, context)
        new = self.value(spot).to(old).expand_as(old)
        if self.positions is not None:
            here = spot.of_tokens(self.positions)
            here = here.reshape(*here.shape, *[1] * (old.ndim - 2))
            new = torch.where(here.transpose(1, 2) if dim == 1 else here, new, old)
        return new if columns is None else activation.index_copy(dim, columns, new)


@dataclass(frozen=True, eq=False)
class Patch(_AtSite):
    """Puts the activations of another run in place: activation patching.

    Source: Vig et al. (2020), "Investigating Gender Bias in Language Models Using Causal Mediation Analysis"; Zhang and
    Nanda (2024), "Towards Best Practices of Activation Patching".
    """

    values: Mapping[str, Float[Tensor, "prompt ..."]] = field(default_factory=dict)
    """By hook point, the activations of the other run, all heads of them (`engine.capture`). Leave them out where
    `sweep.sweep` is given the other prompts."""

    def value(self, spot: _Spot) -> Tensor:
        """The other run's activation."""
        if not self.values and (beside := spot.of_source()) is not None:
            return beside
        if spot.name not in self.values:
            raise ValueError(f"no values for {spot.name!r}: this patch holds {', '.join(self.values) or 'none'}")
        return spot.of_run(self.values[spot.name])


@dataclass(frozen=True, eq=False)
class AblationBaseline:
    """What stands in for activations that are ablated; `ablation.ablation_baseline` makes it."""

    means: Mapping[str, Float[Tensor, "group ..."]] = field(default_factory=dict)
    """By hook point, the mean over the reference prompts of each group of tokens (`groups_of`); NaN where the reference
    has no such token."""
    values: Mapping[str, Float[Tensor, "prompt ..."]] = field(default_factory=dict)
    """By hook point, the activations of the reference prompts, for resampling."""


def groups_of(prompts: Prompts) -> Int[Tensor, "prompt pos"]:
    """Returns the group of each token: its role, and whether it belongs to the test example.

    Means over groups keep what every prompt has in common at such tokens, so that ablating a head takes away what it
    says about this prompt and no more. Means over single positions keep more than that where all prompts share a layout
    (a previous-token head, ablated so, still does its work); means over all positions keep less.
    """
    tested = prompts.example == prompts.example.amax(1, keepdim=True)
    return 2 * prompts.roles + tested.long()


@dataclass(frozen=True, eq=False)
class Ablate(_AtSite):
    """Takes away what heads or layers say.

    - `"zero"`: nothing is said.
    - `"mean"`: what tokens of the same role say on average in the reference prompts (`groups_of`).
    - `"resample"`: what is said at the same position of the next reference prompt: prompt i gets i + 1, the last the
      first. The reference prompts must be as many and as long as those that run.

    Misleads: zero is far from anything that later layers have seen, and under all three they may repair what is missing
    (McGrath et al., 2023, "The Hydra Effect"). The control is the same ablation of as many other heads.
    """

    how: Literal["zero", "mean", "resample"] = "zero"
    reference: AblationBaseline | None = None
    """For `"mean"` and `"resample"`."""

    def value(self, spot: _Spot) -> Tensor:
        """What stands in for the activation."""
        if self.how == "zero":
            return spot.old.new_zeros(())
        if self.how not in ("mean", "resample"):
            raise ValueError(f"how={self.how!r}: choose 'zero', 'mean' or 'resample'")
        reference = self.reference or AblationBaseline()
        held = reference.means if self.how == "mean" else reference.values
        if spot.name not in held:
            raise ValueError(
                f"how={self.how!r} needs a reference that holds {spot.name!r}: make it with "
                f"ablation_baseline(model, prompts, how={self.how!r}, site={self.site!r})"
            )
        if spot.context is None:
            raise ValueError(
                f"how={self.how!r} depends on the prompts: give them, as in fwd_hooks(model, prompts), or hand the "
                "edit over as `edits=`"
            )
        if self.how == "resample":
            return spot.of_run(held[spot.name], (spot.context.rows + 1) % len(held[spot.name]))
        means = held[spot.name].to(spot.old.device)
        means = means if spot.columns is None else means.index_select(1, spot.columns)
        stand_in = means[spot.of_tokens(groups_of(spot.context.prompts))]
        if stand_in[spot.of_tokens(spot.context.prompts.mask)].isnan().any():
            raise ValueError("the prompts hold tokens of a role that the reference prompts lack: take others")
        return stand_in.nan_to_num(0)


@dataclass(frozen=True, eq=False)
class Clamp(Edit):
    """Makes heads attend where a relation says: equally to all its keys, at the positions that ask.

    What it does to the output is what the attention alone explains.
    """

    heads: Sequence[Head]
    relation: str
    """A relation of the prompts that run."""

    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:
        """One change for each layer that is named."""
        if context is None:
            raise ValueError("a clamp depends on the prompts: give them, as in fwd_hooks(model, prompts)")
        if self.relation not in context.prompts.relations:
            raise KeyError(
                f"no relation {self.relation!r} in these prompts; they have {', '.join(context.prompts.relations)}"
            )
        relation = context.prompts.relations[self.relation]
        place = torch.full((len(context.prompts),), -1)
        place[context.rows] = torch.arange(len(context.rows))
        mine = (place[relation.prompt] >= 0).nonzero()[:, 0]
        prompt, query = place[relation.prompt[mine]], relation.query[mine]
        if len(torch.stack([prompt, query]).unique(dim=1).T) != len(mine):
            raise ValueError(f"relation {self.relation!r} asks twice at one position, which then has no one gold")
        keys = relation.expand(mine)[0].float()
        gold = keys / keys.sum(1, keepdim=True)

        def change(name: str, heads: Tensor, activation: Tensor) -> Tensor:
            context.check(name, len(activation), activation.shape[2])
            new = activation.clone()
            there = query - (context.prompts.mask.shape[1] - activation.shape[2])
            rows = gold[:, None, -activation.shape[3] :].expand(-1, len(heads), -1).to(new)
            new[prompt[:, None], heads, there[:, None]] = rows
            return new

        where = layers_of(cfg, "pattern", self.heads)
        return {
            name_of("pattern", layer): partial(change, name_of("pattern", layer), heads)
            for layer, heads in where.items()
            if heads is not None
        }


@dataclass(frozen=True, eq=False)
class Steer(_AtSite):
    """Adds a vector.

    Source: Turner et al. (2023), "Activation Addition: Steering Language Models Without Optimization".
    """

    vector: Float[Tensor, " d"] | None = None
    """What is added: d_model numbers at a layer's site, d_head at a head's."""
    scale: float = 1.0
    """By what it is multiplied."""

    def value(self, spot: _Spot) -> Tensor:
        """The activation and the vector."""
        if self.site == "pattern" or self.vector is None or self.vector.shape != spot.old.shape[-1:]:
            came = None if self.vector is None else tuple(self.vector.shape)
            raise ValueError(
                f"a vector of shape {came} cannot be added at {spot.name!r}: give {spot.old.shape[-1]} numbers, at any "
                "site but 'pattern'"
            )
        return spot.old + self.scale * self.vector.to(spot.old)


def in_order(changes: Sequence[Change]) -> Change:
    """Returns one change that makes several, each on what the last one left."""

    def all_of_them(activation: Tensor) -> Tensor:
        for change in changes:
            new = change(activation)
            activation = activation if new is None else new
        return activation

    return all_of_them
