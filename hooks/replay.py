"""Replay: one run is kept, and edited runs of the same prompts are computed at the cost of what their edits change.

An edit in layer l at positions from p on changes nothing below l and nothing before p. So its run starts in the kept
residual stream of layer l at p, and attends to the kept keys and values of earlier positions; many edited runs share
a batch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from align_circuits.hooks.attention import PatternProbe, attended_by, pattern_of
from align_circuits.hooks.compat import attention_functions
from align_circuits.hooks.decoders import Decoder
from align_circuits.hooks.hooked_model import token_positions
from align_circuits.hooks.names import Site, is_pattern, name_of, site_of
from align_circuits.hooks.probes import Change, applied

_ATTENTION_INPUTS: tuple[Site, ...] = ("q", "k")

HOOKED_SITES: tuple[Site, ...] = (*_ATTENTION_INPUTS, "mlp_post")
"""Sites inside a part of the decoder, which edits them itself: a bridge by hooks, where these fire under Hugging Face's
own attention."""

_AFTER_ATTENTION: tuple[Site, ...] = ("attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post")

_IN_ATTENTION: tuple[Site, ...] = (*_ATTENTION_INPUTS, "rot_q", "rot_k", "v", "pattern")

REPLAY_SITES: tuple[Site, ...] = ("resid_pre", *_IN_ATTENTION, "z", *_AFTER_ATTENTION)
"""Sites that replay can edit, in the order in which a layer computes them."""

_STARTS_FROM: dict[Site, tuple[Site, ...]] = {
    **dict.fromkeys(REPLAY_SITES, ("resid_pre",)),
    "z": ("resid_pre", "z"),
    "attn_out": ("resid_pre", "attn_out"),
    "resid_mid": ("resid_mid",),
    "mlp_post": ("resid_pre", "resid_mid"),
    "mlp_out": ("mlp_out", "resid_post"),
    "resid_post": ("resid_post",),
}
"""The activations of the kept run that an edit set starts from, by the site of its first edit."""

# Logits are the largest tensors of a replay, since the vocabulary is wider than any layer: they are made in parts.
_LOGITS_AT_ONCE = 2**24

EditSet = Mapping[str, Change]
"""The edits of one run: by hook point, a change of the activation `[prompt pos ...]` at the columns that run."""


def order_of(names: Collection[str]) -> tuple[int, int]:
    """Returns the layer and the place in `REPLAY_SITES` of the first of some hook points; none at all come last."""
    sites = [at_site for name in names if (at_site := site_of(name)) is not None]
    return min(((layer, REPLAY_SITES.index(site)) for layer, site in sites), default=(2**31, 0))


def starts_from(edited: Collection[Collection[str]]) -> set[str]:
    """Returns the hook points to keep of the unedited run, given the hook points that each edit set edits."""
    needed: set[str] = set()
    for names in edited:
        if names:
            layer, order = order_of(names)
            needed |= {name_of(site, layer) for site in _STARTS_FROM[REPLAY_SITES[order]]}
    return needed


@dataclass(eq=False)
class _Batch:
    """Runs side by side, from a column on: one for each edit set, which joins at the site of its first edit.

    Activations hold the running ones alone, `[edit_set prompt pos ...]`, in the order in which they joined.
    """

    start: int
    """The first column."""
    queries: Int[Tensor, " query"]
    """The columns whose logits are needed, counted from `start`."""
    edit_sets: Sequence[EditSet]
    running: list[int] = field(default_factory=list)
    """The edit sets that have joined, in order."""
    keep: Collection[str] = ()
    """The hook points whose activations are kept."""
    kept: dict[str, Float[Tensor, "prompt pos ..."]] = field(default_factory=dict)
    """Those of the first run."""
    past: dict[int, tuple[Tensor, Tensor]] | None = None
    """Where keys and values of each layer are kept, if they are."""
    probe: PatternProbe | None = None
    """What reads rows of the pattern, of prompts of all edit sets in a row and of positions counted from `start`."""

    @cached_property
    def joining(self) -> dict[tuple[int, int], list[int]]:
        """The edit sets by layer and place of their first edit."""
        joining: dict[tuple[int, int], list[int]] = {}
        for index, edits in enumerate(self.edit_sets):
            joining.setdefault(order_of(edits), []).append(index)
        return joining

    def join(self, site: Site, layer: int) -> list[int]:
        """Returns the edit sets whose first edit is at a site, which run from now on."""
        indices = self.joining.get((layer, REPLAY_SITES.index(site)), [])
        indices = [index for index in indices if index not in self.running]
        self.running += indices
        return indices

    def needs(self, site: Site, layer: int) -> bool:
        """Whether an activation is edited or kept."""
        name = name_of(site, layer)
        return name in self.keep or any(name in edits for edits in self.edit_sets)

    def edit(self, site: Site, layer: int, activation: Float[Tensor, "edit_set prompt pos ..."]) -> Tensor:
        """Returns an activation of the running edit sets after their edits, and keeps it if that is needed."""
        name = name_of(site, layer)
        edits = [self.edit_sets[index] for index in self.running]
        if any(name in changes for changes in edits):
            pairs = zip(edits, activation, strict=True)
            activation = torch.stack([applied(changes, name, of_edit_set) for changes, of_edit_set in pairs])
        if name in self.keep:
            # Only the unedited run keeps anything, and it is the only one in its batch.
            self.kept[name] = activation[0]
        return activation

    def edit_rows(self, site: Site, layer: int, activation: Float[Tensor, "row ..."]) -> Tensor:
        """The same for an activation whose edit sets and prompts share a dimension."""
        if not self.needs(site, layer):
            return activation
        return self.edit(site, layer, activation.unflatten(0, (len(self.running), -1))).flatten(0, 1)

    def edits(self, sites: Collection[Site], layer: int) -> dict[Site, Change]:
        """Returns `edit_rows` at those of some sites where it does anything."""
        return {
            site: partial(self.edit_rows, site, layer) for site in sites if self.running and self.needs(site, layer)
        }


@dataclass(eq=False)
class Replay:
    """A run of some prompts, kept as far as edited runs need it; `run` makes it."""

    decoder: Decoder
    tokens: Int[Tensor, "prompt pos"]
    real: Bool[Tensor, "prompt pos"] | None
    """Where a token stands; None without padding."""
    positions: Int[Tensor, "#prompt pos"]
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines of rotary embeddings."""
    queries: Int[Tensor, " query"]
    """The columns whose logits are needed."""
    start: int
    """The first column from which edited runs start."""
    last_start: int
    """The last one."""
    kept: dict[str, Float[Tensor, "prompt later ..."]] = field(default_factory=dict)
    """By hook point, activations from `start` on."""
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of each layer, before the last column from which an edited run starts."""
    logits: Float[Tensor, "prompt query d_vocab"] = field(default_factory=lambda: torch.empty(0, 0, 0))
    _masks: dict[tuple[int, int | None, torch.device], Tensor] = field(default_factory=dict)

    @classmethod
    def run(
        cls,
        decoder: Decoder,
        tokens: Int[Tensor, "prompt pos"],
        mask: Bool[Tensor, "prompt pos"],
        *,
        queries: Int[Tensor, " query"],
        keep: Collection[str],
        starts: Collection[int],
        probe: PatternProbe | None = None,
        edits: EditSet = MappingProxyType({}),
    ) -> "Replay":
        """Runs prompts, and keeps what edited runs start from.

        Args:
            decoder: The model, inside `decoders.decoder_of` and without gradients.
            tokens: The prompts, up to the last column of interest.
            mask: Where a token stands.
            queries: The columns whose logits are needed.
            keep: The hook points to start from (`starts_from`).
            starts: The columns from which edited runs will start.
            probe: Reads rows of the pattern of every layer.
            edits: What is edited in this run already, at columns before `starts`; edited runs add theirs.
        """
        real, positions = _places(mask)
        residual = decoder.embed(tokens, positions)
        rotation = decoder.rotation(residual, positions)
        replay = cls(decoder, tokens, real, positions, rotation, queries, min(starts), max(starts))
        # Runs from the first column on compute all keys and values themselves.
        past: dict[int, tuple[Tensor, Tensor]] | None = {} if max(starts) else None
        kept = _Batch(0, queries, [edits], [0], keep, past=past, probe=probe)
        last = replay._through(kept, residual[None], 0, decoder.cfg.n_layers)
        replay.logits = decoder.unembed(last)[0]
        replay.kept = {name: value[:, replay.start :] for name, value in kept.kept.items()}
        # A run that starts at a column computes the keys from there on itself, so later ones are never read from here.
        end = replay.last_start
        replay.past = {layer: (_first(key, end), _first(value, end)) for layer, (key, value) in (past or {}).items()}
        return replay

    def beside(self, tokens: Int[Tensor, "prompt pos"]) -> "Replay":
        """Returns what `run` returns for other prompts of this mask, with what this run has kept.

        Where their tokens are the same both runs are, so only the columns from the first other token on are run.

        Args:
            tokens: The other prompts. This run has kept what `starts` of 0 and of their first other token need.
        """
        first = first_difference(self.tokens, tokens)
        later = _Batch(first, self.queries[self.queries >= first] - first, [{}], [0], self.kept.keys(), past={})
        residual = self.decoder.embed(tokens[:, first:], self.positions[:, first:])
        last = self._through(later, residual[None], 0, self.decoder.cfg.n_layers)
        return replace(
            self,
            tokens=tokens,
            kept={name: torch.cat([kept[:, :first], later.kept[name]], 1) for name, kept in self.kept.items()},
            past={
                layer: tuple(
                    torch.cat([past[:, :, :first], new[:, :, : self.last_start - first]], 2)
                    for past, new in zip(self.past[layer], added, strict=True)
                )
                for layer, added in (later.past or {}).items()
            },
            logits=torch.cat([self.logits[:, self.queries < first], self.decoder.unembed(last)[0]], 1),
        )

    def continued(
        self, tokens: Int[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"], queries: Int[Tensor, " query"]
    ) -> "Replay":
        """Returns a run of longer prompts, kept where edited runs of them start: behind what this run has read.

        Args:
            tokens: Prompts that begin with those of this run, which ended at `start`.
            mask: Where a token stands; from `start` on, everywhere.
            queries: The columns whose logits are needed, from `start` on.
        """
        real, positions = _places(mask)
        residual = self.decoder.embed(tokens[:, self.start :], positions[:, self.start :])
        return Replay(
            self.decoder,
            tokens,
            real,
            positions,
            self.decoder.rotation(residual, positions),
            queries,
            self.start,
            self.start,
            {name_of("resid_pre", 0): residual},
            self.past,
            # No logits: this run is never read, only replayed.
            residual.new_empty(len(tokens), len(queries), 0),
        )

    def other(
        self, tokens: Int[Tensor, "prompt pos"], names: Collection[str], start: int, *, to_logits: bool = False
    ) -> tuple[dict[str, Float[Tensor, "prompt later ..."]], Float[Tensor, "prompt query d_vocab"] | None]:
        """Returns the activations of other prompts of the same shape at some hook points, from the column `start` on.

        Only the columns from the first other token on are run, and only the layers up to the last hook point, unless
        the logits at the queries are asked for, too.
        """
        # Before the first other token both runs are the same, so the kept keys and values of one serve the other.
        first = min(first_difference(self.tokens, tokens), start)
        if first == tokens.shape[1]:  # the same prompts, of which nothing is edited
            return {}, self.logits if to_logits else None
        batch = _Batch(first, self.queries[self.queries >= first] - first, [{}], [0], names)
        last = max((at_site[0] for name in names if (at_site := site_of(name)) is not None), default=0)
        residual = self.decoder.embed(tokens[:, first:], self.positions[:, first:])
        end = self._through(batch, residual[None], 0, self.decoder.cfg.n_layers if to_logits else last + 1)
        logits = (
            torch.cat([self.logits[:, self.queries < first], self.decoder.unembed(end)[0]], 1) if to_logits else None
        )
        return {
            name: value[:, :, start - first :] if is_pattern(name) else value[:, start - first :]
            for name, value in batch.kept.items()
        }, logits

    def serves(self, keep: Collection[str], starts: Collection[int]) -> bool:
        """Whether all that edited runs start from is kept; if they edit nothing, the logits are all they need."""
        return not keep or (
            set(keep) <= self.kept.keys() and self.start <= min(starts) and max(starts) <= self.last_start
        )

    @property
    def size(self) -> int:
        """How many numbers are kept."""
        tensors = [*self.kept.values(), *chain.from_iterable(self.past.values()), self.logits]
        return sum(tensor.numel() for tensor in tensors)

    def replay(
        self, edit_sets: Sequence[EditSet], start: int, probe: PatternProbe | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "prompt query d_vocab"]]]:
        """Runs edit sets side by side from a column on, and yields the index and the logits of each.

        The batch begins empty in the layer of the first edit. An edit set joins it where its own first edit is, with
        the activations that the unedited run has there: all that it would have computed before is the same. Queries
        before `start` keep the logits of the unedited run.

        Args:
            edit_sets: The edits of each run.
            start: The column.
            probe: Reads rows of the pattern in layers that all edit sets run. Prompt i of edit set s is its prompt
                s n + i, of n; its queries count from `start`.
        """
        batch = _Batch(start, self.queries[self.queries >= start] - start, edit_sets, probe=probe)
        prompts, length = self.tokens.shape
        kept = self.kept[next(iter(self.kept))]
        # No edit set runs yet: each joins where its own first edit is.
        empty = kept.new_zeros(0, prompts, length - start, self.decoder.cfg.d_model)
        last = self._through(batch, empty, min(map(order_of, edit_sets))[0], self.decoder.cfg.n_layers)
        before = self.logits[:, self.queries < start]
        step = max(1, _LOGITS_AT_ONCE // max(1, self.decoder.cfg.d_vocab * last[0, :, :, 0].numel()))
        for first, some_rows in zip(range(0, len(last), step), last.split(step), strict=True):
            # Not strict: `running` goes on beyond these rows.
            for index, after in zip(batch.running[first:], self.decoder.unembed(some_rows), strict=False):
                yield index, torch.cat([before, after], 1) if before.shape[1] else after

    def _through(
        self, batch: _Batch, residual: Tensor, first: int, end: int
    ) -> Float[Tensor, "edit_set prompt query d_model"]:
        """Runs layers `first` to `end` - 1; after the model's last layer only the queries remain.

        The last layer computes no other position, unless an edit or a kept activation of its pattern, or after its
        attention, needs them.
        """
        last = self.decoder.cfg.n_layers - 1
        all_positions = True
        for layer in range(first, end):
            all_positions = layer < last or any(batch.needs(site, last) for site in ("pattern", *_AFTER_ATTENTION))
            residual = self._layer(batch, layer, residual, None if all_positions else batch.queries)
        return residual[:, :, batch.queries.to(residual.device)] if all_positions and end > last else residual

    def _layer(self, batch: _Batch, layer: int, residual: Tensor, queries: Int[Tensor, " query"] | None) -> Tensor:
        """Runs the running edit sets through a layer; others join at the site of their first edit.

        - At the residual stream, queries, keys, values or the pattern they join with the kept residual stream, since
          attention computes the rest anew.
        - At z they join with the kept z, edited, so the layer's attention is not computed for them.
        - At the attention layer's output, and at the residual stream after it, they join there.
        - At the MLP's neurons they join before the MLP, which is computed for them.
        - At the MLP's output they join after the layer: with the kept residual stream and the difference by the edit.
        """
        device = self.decoder.device_of(layer)
        residual, queries = residual.to(device), None if queries is None else queries.to(device)
        # Rows stand in the order of `batch.running`, to which `join` appends: whoever joins is concatenated at the end
        # of every tensor, and no tensor is ever reordered.
        residual = batch.edit("resid_pre", layer, self._with_joining(batch, "resid_pre", layer, residual))
        # These too join with the kept residual stream: attention computes what is between, and edits it in its middle.
        for site in _IN_ATTENTION:
            residual = self._with_joining(batch, site, layer, residual)
        attended = self._attended(batch, layer, residual, queries) if len(residual) else residual
        # With z kept and edited, the layer's attention need not be computed for these.
        if joining := batch.join("z", layer):
            before, z = (self._kept(batch, site, layer) for site in ("resid_pre", "z"))
            name = name_of("z", layer)
            # Edited before the columns are cut down to the queries: an edit knows all columns of the batch.
            z = torch.stack([applied(batch.edit_sets[index], name, z) for index in joining])
            if queries is not None:
                residual, attended = residual[:, :, queries], attended[:, :, queries]
                before, z = before[:, queries], z[:, :, queries]
            residual = torch.cat([residual, before.expand(len(joining), *before.shape)])
            # 8-bit layers take no 4 axes.
            rows = rearrange(z, "edit_set prompt pos head d -> (edit_set prompt) pos (head d)")
            attended = torch.cat([attended, self.decoder.output(layer, rows).unflatten(0, z.shape[:2])])
        elif queries is not None:
            residual, attended = residual[:, :, queries], attended[:, :, queries]
        if joining := batch.join("attn_out", layer):
            residual = self._appended(batch, residual, joining, "resid_pre", layer)
            attended = self._appended(batch, attended, joining, "attn_out", layer)
        middle = residual + batch.edit("attn_out", layer, attended)
        middle = batch.edit("resid_mid", layer, self._with_joining(batch, "resid_mid", layer, middle))
        parallel = self.decoder.is_parallel(layer)
        if joining := batch.join("mlp_post", layer):
            middle = self._appended(batch, middle, joining, "resid_mid", layer)
            if parallel:
                residual = self._appended(batch, residual, joining, "resid_pre", layer)
        mlp_out = self._mlp(batch, layer, residual if parallel else middle)
        residual = middle + batch.edit("mlp_out", layer, mlp_out)
        # These skip the layer but for one sum: the kept stream after it, and the difference that the edit makes.
        if joining := batch.join("mlp_out", layer):
            mlp_out, after = (self._kept(batch, site, layer) for site in ("mlp_out", "resid_post"))
            name = name_of("mlp_out", layer)
            change = torch.stack([applied(batch.edit_sets[index], name, mlp_out) - mlp_out for index in joining])
            residual = torch.cat([residual, after + change])
        return batch.edit("resid_post", layer, self._with_joining(batch, "resid_post", layer, residual))

    def _with_joining(self, batch: _Batch, site: Site, layer: int, residual: Tensor) -> Tensor:
        """Appends the kept residual stream for each edit set that joins at a site; it is edited later."""
        joining = batch.join(site, layer)
        return self._appended(batch, residual, joining, _STARTS_FROM[site][0], layer) if joining else residual

    def _appended(self, batch: _Batch, running: Tensor, joining: Sequence[int], site: Site, layer: int) -> Tensor:
        """An activation of the running edit sets, then the kept one for each that joins."""
        kept = self._kept(batch, site, layer)
        return torch.cat([running, kept.expand(len(joining), *kept.shape)])

    def _mlp(self, batch: _Batch, layer: int, stream: Float[Tensor, "edit_set prompt pos d_model"]) -> Tensor:
        """What the MLP makes of the stream that it reads."""
        return self.decoder.mlp(layer, stream.flatten(0, 1), batch.edits(["mlp_post"], layer)).view_as(stream)

    def _kept(self, batch: _Batch, site: Site, layer: int) -> Float[Tensor, "prompt pos ..."]:
        return self.kept[name_of(site, layer)][:, batch.start - self.start :]

    def _attended(self, batch: _Batch, layer: int, residual: Tensor, queries: Tensor | None) -> Tensor:
        """What attention adds to the residual stream: the model's own layer, with `_attention` in its middle."""
        rotation = None
        if self.rotation is not None:
            copies = len(residual) if self.real is not None else 1
            # With padding every prompt has positions of its own, once for each edit set; else one row of angles serves
            # all.
            cos, sin = (angles[:, batch.start :].repeat(copies, 1, 1).to(residual.device) for angles in self.rotation)
            rotation = cos, sin
        attention, edits = partial(self._attention, batch, layer, queries), batch.edits(_ATTENTION_INPUTS, layer)
        return self.decoder.attend(layer, residual.flatten(0, 1), attention, rotation, edits).view_as(residual)

    def _attention(
        self,
        batch: _Batch,
        layer: int,
        queries: Tensor | None,
        _module: nn.Module,
        query: Float[Tensor, "row head pos d_head"],
        key: Float[Tensor, "row key_head pos d_head"],
        value: Float[Tensor, "row key_head pos d_head"],
        scaling: float,
        window: int | None,
    ) -> Float[Tensor, "row pos head d_head"]:
        """Attention from the columns of a batch to themselves and, before them, to those of the unedited run."""
        inputs: tuple[tuple[Site, Tensor], ...] = (("rot_q", query), ("rot_k", key), ("v", value))
        query, key, value = (
            batch.edit_rows(site, layer, activation.transpose(1, 2)).transpose(1, 2) for site, activation in inputs
        )
        if batch.past is not None:
            batch.past[layer] = key, value
        if batch.probe is not None:
            keys, mask = key, None
            if batch.start:
                past = self.past[layer][0][:, :, : batch.start]
                keys = torch.cat([past.repeat(len(batch.running), 1, 1, 1), key], 2)
            if batch.start or window is not None or self.real is not None:
                copies = len(batch.running) if self.real is not None else 1
                mask = self._visible(batch.start, window, None, key.device).repeat(copies, 1, 1)[:, None]
            batch.probe.reduce(layer, batch.probe.rows(query, keys, mask, scaling))
        at_queries = query if queries is None else query[:, :, queries]
        if batch.start:
            z = self._with_past(batch, layer, queries, at_queries, key, value, scaling, window)
        else:
            mask = None
            if queries is not None or window is not None or self.real is not None:
                copies = len(batch.running) if self.real is not None else 1
                mask = self._visible(0, window, queries, key.device).repeat(copies, 1, 1)[:, None]
            edited = any(batch.needs(site, layer) for site in (*_ATTENTION_INPUTS, "rot_q", "rot_k", "v"))
            z = self.decoder.sdpa(layer, at_queries, key, value, mask, scaling, edited=edited)
        name = name_of("pattern", layer)
        for n, index in enumerate(batch.running):
            if name in batch.edit_sets[index] or name in batch.keep:  # then all positions are computed
                rows = slice(n * len(self.tokens), (n + 1) * len(self.tokens))
                of_edit_set = query[rows], key[rows], value[rows]
                z[rows] = self._by_pattern(batch, layer, batch.edit_sets[index], *of_edit_set, scaling, window)
        if queries is not None:  # the layer's output matrix expects all positions; the others are not read
            all_positions = z.new_zeros(len(query), query.shape[2], *z.shape[2:])
            all_positions[:, queries] = z
            z = all_positions
        return batch.edit_rows("z", layer, z)

    def _by_pattern(
        self,
        batch: _Batch,
        layer: int,
        edits: EditSet,
        query: Float[Tensor, "prompt head pos d_head"],
        key: Float[Tensor, "prompt key_head pos d_head"],
        value: Float[Tensor, "prompt key_head pos d_head"],
        scaling: float,
        window: int | None,
    ) -> Float[Tensor, "prompt pos head d_head"]:
        """The same for one edit set, by its pattern, which it edits."""
        if batch.start:
            past = (tensor[:, :, : batch.start] for tensor in self.past[layer])
            key, value = (torch.cat(tensors, 2) for tensors in zip(past, (key, value), strict=True))
        mask = self._visible(batch.start, window, None, key.device)[:, None]
        name = name_of("pattern", layer)
        pattern = applied(edits, name, pattern_of(query, key, mask, scaling))
        if name in batch.keep:
            batch.kept[name] = pattern
        return attended_by(pattern, value)

    def _with_past(
        self,
        batch: _Batch,
        layer: int,
        queries: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Float[Tensor, "row pos head d_head"]:
        """Attention to the past and to the recent columns, which the batch runs: each with its own softmax, merged."""
        # The past is the same for all edit sets: their queries are folded into one attention to it, in which keys and
        # values appear once. Recent columns differ, so each edit set attends to its own. Heads that share a key head
        # are folded into queries too.
        start, sets, key_heads = batch.start, len(batch.running), key.shape[1]
        sizes = {"set": sets, "key": key_heads, "query": query.shape[2]}
        seen = self._visible(start, window, queries, key.device).repeat(1, query.shape[1] // key_heads, 1)[:, None]
        past_keys, past_values = (tensor[:, :, :start] for tensor in self.past[layer])
        all_seen = window is None and self.real is None
        past, past_log = _softmax_attention(
            rearrange(query, "(set prompt) (key group) query d -> prompt key (set group query) d", **sizes),
            past_keys,
            past_values,
            scaling,
            None if all_seen else seen[..., :start].repeat(1, 1, sets, 1),
        )
        recent, recent_log = _softmax_attention(
            rearrange(query, "row (key group) query d -> row key (group query) d", key=key_heads),
            key,
            value,
            scaling,
            seen[..., start:].repeat(1 if len(seen) == 1 else sets, 1, 1, 1),
        )
        past = rearrange(past, "prompt key (set group query) d -> set prompt query key group d", **sizes)
        past_log = rearrange(past_log, "prompt key (set group query) -> set prompt query key group", **sizes)
        recent = rearrange(recent, "(set prompt) key (group query) d -> set prompt query key group d", **sizes)
        recent_log = rearrange(recent_log, "(set prompt) key (group query) -> set prompt query key group", **sizes)
        # With m and n the logarithms of the two denominators, one softmax over all columns gives the past the share
        # e^m / (e^m + e^n). That quotient may overflow; sigmoid(m - n), which it equals, cannot.
        share = torch.sigmoid(past_log - recent_log)[..., None].to(recent)
        z = torch.lerp(recent, past, share)
        return rearrange(z, "set prompt query key group d -> (set prompt) query (key group) d")

    def _visible(
        self, start: int, window: int | None, queries: Tensor | None, device: torch.device
    ) -> Bool[Tensor, "#prompt query pos"]:
        """The columns that each query sees: itself, and earlier ones in its window that hold a token."""
        # All layers share a mask, unless they differ in their window or stand on another device.
        if (start, window, device) not in self._masks:
            column = torch.arange(self.tokens.shape[1], device=device)
            distance = column[start:, None] - column
            seen = (distance >= 0)[None]
            if window is not None:
                seen = seen & (distance < window)
            if self.real is not None:
                seen = seen & self.real[:, None].to(device) | (distance == 0)  # padding sees itself, or it would be NaN
            self._masks[start, window, device] = seen
        seen = self._masks[start, window, device]
        return seen if queries is None else seen[:, queries]


def first_difference(one: Int[Tensor, "prompt pos"], other: Int[Tensor, "prompt pos"]) -> int:
    """Returns the first column in which any two prompts differ; the number of columns if none do."""
    columns = (one != other).any(0).nonzero()
    return int(columns[0]) if len(columns) else one.shape[1]


def _places(mask: Bool[Tensor, "prompt pos"]) -> tuple[Tensor | None, Int[Tensor, "#prompt pos"]]:
    """Where a token stands, None if everywhere, and the position of each in its prompt."""
    if bool(mask.all()):
        return None, torch.arange(mask.shape[1], device=mask.device)[None]
    return mask, token_positions(mask)


def _first(tensor: Float[Tensor, "row head pos d_head"], columns: int) -> Float[Tensor, "row head column d_head"]:
    """The first columns; a copy where they are few, since a view keeps all the others in memory."""
    first = tensor[:, :, :columns]
    return first.clone() if 2 * columns < tensor.shape[2] else first


def _softmax_attention(
    query: Float[Tensor, "row head query d_head"],
    key: Float[Tensor, "row head pos d_head"],
    value: Float[Tensor, "row head pos d_head"],
    scaling: float,
    seen: Bool[Tensor, "#row #head query pos"] | None,
) -> tuple[Float[Tensor, "row head query d_head"], Float[Tensor, "row head query"]]:
    """Attention, and the logarithm of its softmax's denominator."""
    mask = None
    if seen is not None:
        # The least finite number, not -inf: a query may see nothing of the past, and 0 / 0 is NaN. Its softmax is then
        # some mean, with a denominator whose logarithm is so low that the merge gives it the share 0.
        mask = query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)
    attend = attention_functions.fused_attention if query.device.type == "cpu" else plain_attention
    return attend(query, key, value, scaling, mask)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns what `attention_functions.fused_attention` returns, on any device."""
    scores = query @ key.mT * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) + (0 if mask is None else mask)
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().to(value) @ value, total
