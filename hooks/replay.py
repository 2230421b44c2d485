"""The causal cone: one run is kept, and edits of it are run at the price of what they change.

An edit in layer l at positions from p on changes nothing below l, and nothing before p. So its run starts in the kept
residual stream of layer l at p, and attends to kept keys and values of earlier positions; many edits run side by side.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface

from align_circuits.hooks.names import Site, name_of, site_of
from align_circuits.hooks.probes import Change

HOOKED_SITES: tuple[Site, ...] = ("q", "k")
"""What hooks of the bridge meet, where they fire under Hugging Face's own attention."""

REPLAY_SITES: tuple[Site, ...] = ("resid_pre", *HOOKED_SITES, "rot_q", "rot_k", "v", "z", "mlp_out", "resid_post")
"""What can be edited, in the order in which a layer computes it."""

_STARTS_FROM: dict[Site, tuple[Site, ...]] = {
    **dict.fromkeys(REPLAY_SITES, ("resid_pre",)),
    "z": ("resid_pre", "z"),
    "mlp_out": ("mlp_out", "resid_post"),
    "resid_post": ("resid_post",),
}
"""What of the kept run a cell starts from, by the site of its first edit."""

_LOGITS_AT_ONCE = 2**24

Cell = Mapping[str, Change]
"""One edited run: by hook point, what happens to the activation `[prompt pos ...]`, at the columns that are run."""


def order_of(cell: Cell) -> tuple[int, int]:
    """Returns layer and place in the layer of a cell's first edit; a cell without edits comes last."""
    places = [place for name in cell if (place := site_of(name)) is not None]
    return min(((layer, REPLAY_SITES.index(site)) for layer, site in places), default=(2**31, 0))


def starts_from(cells: Collection[Collection[str]]) -> set[str]:
    """Returns the hook points of the kept run that cells start from, given the hook points that they edit."""
    needed: set[str] = set()
    for cell in cells:
        layer, stage = order_of(dict.fromkeys(cell, lambda _: None))
        if cell:
            needed |= {name_of(site, layer) for site in _STARTS_FROM[REPLAY_SITES[stage]]}
    return needed


@dataclass
class _Pass:
    """Cells that run side by side, from a column on."""

    start: int
    queries: Int[Tensor, " query"]
    """The columns whose end is asked for, counted from `start`."""
    cells: Sequence[Cell]
    keep: Collection[str] = ()
    """The hook points whose activations are kept."""
    running: list[int] = field(default_factory=list)
    """Which cells have started, in the order of the batch."""
    kept: dict[str, Float[Tensor, "prompt pos ..."]] = field(default_factory=dict)
    """What was kept of the first cell."""

    def __post_init__(self):
        self.waiting: dict[tuple[int, int], list[int]] = {}
        for index, cell in enumerate(self.cells):
            self.waiting.setdefault(order_of(cell), []).append(index)

    def starting(self, site: Site, layer: int) -> list[int]:
        """Takes up the cells whose first edit is here."""
        new = self.waiting.pop((layer, REPLAY_SITES.index(site)), [])
        self.running += new
        return new

    def touches(self, site: Site, layer: int) -> bool:
        """Whether an activation is edited or kept."""
        name = name_of(site, layer)
        return name in self.keep or any(name in cell for cell in self.cells)

    def met(self, site: Site, layer: int, activation: Float[Tensor, "cell prompt pos ..."]) -> Tensor:
        """Edits an activation of the cells that run, and keeps it if asked."""
        name = name_of(site, layer)
        edited = {row: cell for row, index in enumerate(self.running) if name in (cell := self.cells[index])}
        if edited:
            activation = torch.stack(
                [_changed(edited[row], name, part) if row in edited else part for row, part in enumerate(activation)]
            )
        if name in self.keep:
            self.kept[name] = activation[0]
        return activation

    def met_by_row(
        self,
        site: Site,
        layer: int,
        activation: Float[Tensor, "row ..."],
        hook: Any = None,  # noqa: ARG002 - a hook's
    ) -> Tensor:
        """The same for an activation whose cells and prompts share a dimension."""
        if not self.touches(site, layer):
            return activation
        return self.met(site, layer, activation.unflatten(0, (len(self.running), -1))).flatten(0, 1)


class Replay:
    """A run of some prompts, kept as far as edits of it need it."""

    def __init__(
        self,
        bridge: Any,
        tokens: Int[Tensor, "prompt pos"],
        mask: Bool[Tensor, "prompt pos"],
        *,
        queries: Int[Tensor, " query"],
        keep: Collection[str],
        starts: Collection[int],
    ):
        """Runs the prompts.

        Args:
            bridge: A TransformerLens bridge, inside `raw_attention` and without gradients.
            tokens: What it reads, up to the last column of interest.
            mask: Where a token stands.
            queries: The columns whose logits are asked for.
            keep: The hook points to start from (`starts_from`).
            starts: The columns from which replays will run.
        """
        self.bridge, self.tokens, self.queries = bridge, tokens, queries
        self.start, self._furthest = min(starts), max(starts)
        self.real = None if bool(mask.all()) else mask
        self.positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if self.real is not None:
            self.positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._past: dict[int, tuple[Tensor, Tensor]] = {}
        own = _Pass(0, queries, [{}], keep, [0])
        x = self._embedded(tokens, 0)
        rotary = getattr(bridge, "rotary_emb", None)
        self._rotation = None if rotary is None else rotary.original_component(x[0], self.positions)
        self._filling = True
        ends = self._through(own, x, 0, bridge.cfg.n_layers)
        self._filling = False
        self.logits: Float[Tensor, "prompt query d_vocab"] = self._unembedded(ends)[0]
        self.kept = {name: value[:, self.start :] for name, value in own.kept.items()}

    def other(
        self, tokens: Int[Tensor, "prompt pos"], names: Collection[str]
    ) -> dict[str, Float[Tensor, "prompt later ..."]]:
        """Returns the activations of other prompts of the same shape at some hook points, from `start` on.

        Only the columns from the first other token on are run.
        """
        apart = (tokens != self.tokens).any(0).nonzero()
        first = min(int(apart[0]) if len(apart) else self.start, self.start)
        beside = _Pass(first, self.queries[self.queries >= first] - first, [{}], names, [0])
        last = max(place[0] for name in names if (place := site_of(name)) is not None)
        self._through(beside, self._embedded(tokens, first), 0, last + 1)
        return {name: value[:, self.start - first :] for name, value in beside.kept.items()}

    def replay(self, cells: Sequence[Cell], start: int) -> Iterator[tuple[int, Float[Tensor, "prompt query d_vocab"]]]:
        """Runs cells side by side from a column on, and yields the index and the logits of each."""
        before = self.logits[:, self.queries < start]
        some = _Pass(start, self.queries[self.queries >= start] - start, cells)
        none = self.kept[next(iter(self.kept))].new_zeros(0, *self._shape(start), self.bridge.cfg.d_model)
        ends = self._through(some, none, min(map(order_of, cells))[0], self.bridge.cfg.n_layers)
        step = max(1, _LOGITS_AT_ONCE // max(1, self.bridge.cfg.d_vocab * ends[0, :, :, 0].numel()))
        for first, part in zip(range(0, len(ends), step), ends.split(step), strict=True):
            for index, after in zip(some.running[first:], self._unembedded(part), strict=False):
                yield index, torch.cat([before, after], 1) if before.shape[1] else after

    def _shape(self, start: int) -> tuple[int, int]:
        return self.tokens.shape[0], self.tokens.shape[1] - start

    def _embedded(self, tokens: Tensor, start: int) -> Float[Tensor, "cell prompt pos d_model"]:
        x = self.bridge.embed.original_component(tokens[:, start:])
        if (places := getattr(self.bridge, "pos_embed", None)) is not None:
            x = x + places.original_component(self.positions[:, start:])
        return x[None]

    def _unembedded(self, ends: Float[Tensor, "cell prompt query d_model"]) -> Tensor:
        return self.bridge.unembed.original_component(self.bridge.ln_final.original_component(ends))

    def _through(self, some: _Pass, x: Tensor, first: int, end: int) -> Float[Tensor, "cell prompt query d_model"]:
        """Runs layers; after the last of them only the queries are left."""
        last = self.bridge.cfg.n_layers - 1
        whole = True
        for layer in range(first, end):
            whole = layer < last or some.touches("mlp_out", last) or some.touches("resid_post", last)
            x = self._layer(some, layer, x, None if whole else some.queries)
        return x[:, :, some.queries] if whole and end > last else x

    def _layer(self, some: _Pass, layer: int, x: Tensor, queries: Int[Tensor, " query"] | None) -> Tensor:
        """Runs the cells that have started through a layer, and those that start in it from where they do."""
        block = self.bridge.blocks[layer]
        x = some.met("resid_pre", layer, self._joined(some, "resid_pre", layer, x))
        for site in ("q", "k", "rot_q", "rot_k", "v"):
            x = self._joined(some, site, layer, x)
        attended = self._attended(some, layer, x, queries) if len(x) else x
        if new := some.starting("z", layer):
            before, z = (self._kept(some, site, layer) for site in ("resid_pre", "z"))
            name = name_of("z", layer)
            z = torch.stack([_changed(some.cells[index], name, z) for index in new])
            x, attended = (part if queries is None else part[:, :, queries] for part in (x, attended))
            before, z = (before, z) if queries is None else (before[:, queries], z[:, :, queries])
            x = torch.cat([x, before.expand(len(new), *before.shape)])
            attended = torch.cat([attended, block.attn.o.original_component(z.flatten(-2))])
        elif queries is not None:
            x, attended = x[:, :, queries], attended[:, :, queries]
        middle = x + attended
        parallel = getattr(block.original_component, "use_parallel_residual", False)
        said = _said(block.mlp.original_component, _normed(block.ln2.original_component, x if parallel else middle))
        x = middle + some.met("mlp_out", layer, said)
        if new := some.starting("mlp_out", layer):
            said, after = (self._kept(some, site, layer) for site in ("mlp_out", "resid_post"))
            name = name_of("mlp_out", layer)
            others = torch.stack([_changed(some.cells[index], name, said) - said for index in new])
            x = torch.cat([x, after + others])
        return some.met("resid_post", layer, self._joined(some, "resid_post", layer, x))

    def _joined(self, some: _Pass, site: Site, layer: int, x: Tensor) -> Tensor:
        """Lets the cells start that begin in the residual stream, not edited yet."""
        new = some.starting(site, layer)
        if not new:
            return x
        start = self._kept(some, _STARTS_FROM[site][0], layer)
        return torch.cat([x, start.expand(len(new), *start.shape)])

    def _kept(self, some: _Pass, site: Site, layer: int) -> Float[Tensor, "prompt pos ..."]:
        return self.kept[name_of(site, layer)][:, some.start - self.start :]

    def _attended(self, some: _Pass, layer: int, x: Tensor, queries: Tensor | None) -> Tensor:
        """What attention adds to the residual stream."""
        block, rotation = self.bridge.blocks[layer], self._rotation
        options: dict[str, Any] = {}
        if rotation is not None:
            many = len(x) if self.real is not None else 1
            options["position_embeddings"] = tuple(part[:, some.start :].repeat(many, 1, 1) for part in rotation)
        rows = _normed(block.ln1.original_component, x).flatten(0, 1)
        options["attention_inside"] = partial(self._inside, some, layer, queries)
        hooks = [
            (name_of(site, layer), partial(some.met_by_row, site, layer))
            for site in HOOKED_SITES
            if some.touches(site, layer)
        ]
        with self.bridge.hooks(fwd_hooks=hooks) if hooks else nullcontext():
            attended = block.attn.original_component.forward(rows, attention_mask=None, **options)[0]
        return attended.view_as(x)

    def _inside(
        self,
        some: _Pass,
        layer: int,
        queries: Tensor | None,
        module: nn.Module,
        query: Float[Tensor, "row head pos d_head"],
        key: Float[Tensor, "row key_head pos d_head"],
        value: Float[Tensor, "row key_head pos d_head"],
        scaling: float,
        window: int | None,
    ) -> Float[Tensor, "row pos head d_head"]:
        """Attention of some cells to their own tokens and, before them, to those of the kept run."""
        parts: tuple[tuple[Site, Tensor], ...] = (("rot_q", query), ("rot_k", key), ("v", value))
        query, key, value = (some.met_by_row(site, layer, part.transpose(1, 2)).transpose(1, 2) for site, part in parts)
        if self._filling and self._furthest:
            self._past[layer] = key[:, :, : self._furthest], value[:, :, : self._furthest]
        asked = query if queries is None else query[:, :, queries]
        if some.start:
            z = self._with_past(some, layer, queries, asked, key, value, scaling, window)
        else:
            mask = None
            if queries is not None or window is not None or self.real is not None:
                mask = self._visible(0, window, queries).repeat(len(some.running) if self.real is not None else 1, 1, 1)
                mask = mask[:, None]
            z, _ = AttentionInterface._global_mapping["sdpa"](module, asked, key, value, mask, scaling=scaling)
        if queries is not None:
            whole = z.new_zeros(len(query), query.shape[2], *z.shape[2:])
            whole[:, queries] = z
            z = whole
        return some.met_by_row("z", layer, z)

    def _with_past(
        self,
        some: _Pass,
        layer: int,
        queries: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Float[Tensor, "row pos head d_head"]:
        """Attention to the past, by all cells at once, and to themselves; weighed by what either softmax divides by."""
        start, cells, (key_heads, _, width) = some.start, len(some.running), key.shape[1:]
        shared, asked = query.shape[1] // key_heads, query.shape[2]
        folded = query.reshape(cells, -1, key_heads, shared * asked, width)
        seen = self._visible(start, window, queries).repeat(1, shared, 1)
        all_seen = window is None and self.real is None
        keys, values = self._past[layer]
        before, weight = _attention(
            folded.permute(1, 2, 0, 3, 4).flatten(2, 3),
            keys[:, :, :start],
            values[:, :, :start],
            scaling,
            None if all_seen else seen[:, None, :, :start].repeat(1, 1, cells, 1),
        )
        own = seen[:, None, :, start:].repeat(1 if len(seen) == 1 else cells, 1, 1, 1)
        after, other = _attention(folded.flatten(0, 1), key, value, scaling, own)
        split = (-1, key_heads, cells, shared, asked)
        before = before.reshape(*split, width).permute(2, 0, 4, 1, 3, 5)
        weight = weight.reshape(split).permute(2, 0, 4, 1, 3)
        split = (cells, -1, key_heads, shared, asked)
        after = after.reshape(*split, width).permute(0, 1, 4, 2, 3, 5)
        other = other.reshape(split).permute(0, 1, 4, 2, 3)
        share = torch.sigmoid(weight - other)[..., None].to(after)
        return torch.lerp(after, before, share).reshape(len(query), asked, -1, width)

    def _visible(self, start: int, window: int | None, queries: Tensor | None) -> Bool[Tensor, "#prompt query pos"]:
        """Which columns each query sees: earlier ones in its window that hold a token, and itself."""
        if (start, window) not in self._masks:
            place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
            back = place[start:, None] - place
            seen = (back >= 0)[None]
            if window is not None:
                seen = seen & (back < window)
            if self.real is not None:
                seen = seen & self.real[:, None] | (back == 0)  # padding sees itself, or it would be NaN
            self._masks[start, window] = seen
        seen = self._masks[start, window]
        return seen if queries is None else seen[:, queries]


def _normed(norm: Any, x: Float[Tensor, "cell prompt pos d_model"]) -> Float[Tensor, "cell prompt pos d_model"]:
    """What a norm makes of the residual stream. RMSNorm in float32, with fewer passes over memory."""
    if x.dtype != torch.float32 or not hasattr(norm, "variance_epsilon"):
        return norm(x)
    mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return torch.mul(x, mean.add_(norm.variance_epsilon).rsqrt_()).mul_(norm.weight)


def _said(mlp: Any, x: Float[Tensor, "cell prompt pos d_model"]) -> Float[Tensor, "cell prompt pos d_model"]:
    """What an MLP adds. SwiGLU makes transformers' operations, but writes over what it needs no longer."""
    if not hasattr(mlp, "gate_proj") or mlp.config.hidden_act != "silu":
        return mlp(x)
    return mlp.down_proj(nn.functional.silu(mlp.gate_proj(x), inplace=True).mul_(mlp.up_proj(x)))


def _attention(
    query: Float[Tensor, "row head query d_head"],
    key: Float[Tensor, "row head pos d_head"],
    value: Float[Tensor, "row head pos d_head"],
    scaling: float,
    seen: Bool[Tensor, "#row #head query pos"] | None,
) -> tuple[Float[Tensor, "row head query d_head"], Float[Tensor, "row head query"]]:
    """Attention, and the logarithm of what its softmax divides by."""
    mask = None
    if seen is not None:
        mask = query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)
    attend = _fused if query.device.type == "cpu" else _plain
    return attend(query, key, value, scaling, mask)


def _fused(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, attn_mask=mask, scale=scaling)


def _plain(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) + (0 if mask is None else mask)
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().to(value) @ value, total


def _changed(cell: Cell, name: str, activation: Float[Tensor, "prompt pos ..."]) -> Tensor:
    new = cell[name](activation)
    return activation if new is None else new
