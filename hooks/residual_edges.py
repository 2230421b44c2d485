"""Edges along the residual stream: what each part of a model writes to it and reads from it, and edits of edges."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from align_circuits.hooks.compat import architectures, bridges, stored_weights, unhooked
from align_circuits.hooks.edits import BatchContext, Edit
from align_circuits.hooks.graph import Graph, Reading
from align_circuits.hooks.names import name_of
from align_circuits.hooks.probes import Change

EMBEDDED = name_of("resid_pre", 0)
"""Where the residual stream holds the embedding alone."""


class ResidualEdges:
    """The weights by which the heads and MLPs of a model write to its residual stream and read from it.

    Layer norms, projections and MLPs are the model's own, without its hooks; gradients pass through them. Where layers
    are on several devices, what is computed comes back to the device of what was given.
    """

    def __init__(self, model: Any):
        """Takes the parts of a model.

        Raises:
            ValueError: The model does not name its parts as TransformerLens does.
        """
        if not hasattr(model, "blocks"):
            raise ValueError(
                f"a {type(model).__name__} has no blocks with ln1, attn and mlp: load it with align_circuits.load"
            )
        self.graph = Graph.of(model.cfg)
        self._blocks = model.blocks
        self._scales = [architectures.contribution_scale(block) for block in model.blocks]
        names, d_head = [f"{kind}_{site}" for site in "QKVO" for kind in "Wb"], int(model.cfg.d_head)
        self._weights: list[dict[str, Any]] = [
            {name: stored_weights.head_weight(block.attn, name, d_head) for name in names} for block in model.blocks
        ]

    def written(self, layer: int, z: Float[Tensor, "prompt pos head d_head"]) -> Float[Tensor, "prompt pos head d"]:
        """Returns what each head adds to the residual stream; the layer's bias belongs to none of them."""
        weight = self._weights[layer]["W_O"]
        return torch.einsum("nphe,hed->nphd", z.to(weight.device), weight).to(z.device) * self._scales[layer]

    def with_bias(self, layer: int, residual: Float[Tensor, "prompt pos d"]) -> Float[Tensor, "prompt pos d"]:
        """Returns a residual stream with what the attention of a layer adds beside its heads."""
        bias = self._weights[layer]["b_O"]
        return residual if bias is None else residual + bias.to(residual.device) * self._scales[layer]

    def read(
        self, site: Reading, layer: int, residual: Float[Tensor, "prompt pos column d_model"]
    ) -> Float[Tensor, "prompt pos column out"]:
        """Returns the outputs of receivers for the residual streams that they read, a column for each of them.

        Query, key and value come before rotation, with a column for each head or key head; of an MLP (one column) its
        output; of the logits (one column) the stream itself.
        """
        if site == "logits":
            return residual
        block, given = self._blocks[layer], residual.device
        weights, bias = (self._weights[layer].get(f"{kind}_{site.upper()}") for kind in "Wb")
        residual = residual.to(stored_weights.device_of(block))
        if site == "mlp":
            # A parallel block may have one norm for both of its parts (GPT-J, Phi).
            norm = "ln1" if self.graph.parallel and getattr(block, "ln2", None) is None else "ln2"
            output = unhooked.mlp_contribution(block, _normed(block, norm, residual[:, :, 0]))
            return (output * self._scales[layer])[:, :, None].to(given)
        projected = torch.einsum("nphd,hde->nphe", _normed(block, "ln1", residual), weights)
        return (projected if bias is None else projected + bias).to(given)

    def pulled(
        self,
        site: Reading,
        layer: int,
        residual: Float[Tensor, "prompt pos d_model"],
        gradient: Float[Tensor, "prompt pos column out"],
    ) -> Float[Tensor, "prompt pos column d_model"]:
        """Returns the gradient with respect to what each receiver reads, from that with respect to what it makes of it.

        Args:
            site: Which receivers.
            layer: Of which layer.
            residual: What they all read.
            gradient: Of a scalar.
        """
        if site == "logits":
            return gradient
        with torch.enable_grad():
            stream = residual.detach().requires_grad_()
            if site == "mlp":
                return torch.autograd.grad(self.read(site, layer, stream[:, :, None]), stream, gradient)[0][:, :, None]
            # All receivers share the norm's forward pass, and each pulls its own gradient through it.
            weights, block = self._weights[layer][f"W_{site.upper()}"], self._blocks[layer]
            by_receiver = torch.einsum("nphe,hde->hnpd", gradient.to(weights.device), weights)
            normed = _normed(block, "ln1", stream.to(stored_weights.device_of(block)))
            (pulled,) = torch.autograd.grad(normed, stream, by_receiver.to(normed), is_grads_batched=True)
            return rearrange(pulled, "column prompt pos d_model -> prompt pos column d_model")


def reads_from(graph: Graph, site: Reading, layer: int) -> str:
    """Returns the hook point of the residual stream that receivers read."""
    if site == "logits":
        return name_of("resid_post", graph.n_layers - 1)
    return f"blocks.{layer}.hook_resid_mid" if site == "mlp" and not graph.parallel else name_of("resid_pre", layer)


def lands_at(graph: Graph, site: Reading, layer: int) -> str:
    """Returns the hook point of what receivers make of what they read (`ResidualEdges.read`)."""
    if site == "logits":
        return name_of("resid_post", graph.n_layers - 1)
    return name_of("mlp_out" if site == "mlp" else site, layer)


def sent_from(graph: Graph) -> list[str]:
    """Returns the hook points of the senders' outputs, in order: the embedding, then z and MLP of each layer."""
    return [EMBEDDED] + [
        name_of(site, layer) for layer in range(graph.n_layers) for site in (("z", "mlp_out") if graph.mlps else ("z",))
    ]


def sites_of(graph: Graph) -> dict[tuple[Reading, int], slice]:
    """Returns the places of the receivers of each site and layer among `graph.receivers`."""
    by_site: dict[tuple[Reading, int], list[int]] = {}
    for index, receiver in enumerate(graph.receivers):
        by_site.setdefault((receiver.site, receiver.layer), []).append(index)
    # All receivers of one site and layer are neighbours in `graph.receivers`.
    return {site: slice(indices[0], indices[-1] + 1) for site, indices in by_site.items()}


def hook_points(graph: Graph) -> list[str]:
    """Returns the hook points of all senders and receivers."""
    ends = {hook_point for site in sites_of(graph) for hook_point in (reads_from(graph, *site), lands_at(graph, *site))}
    return sorted({*ends, *sent_from(graph)})


def columns_of(graph: Graph) -> dict[str, slice]:
    """Returns the places of the senders at each hook point among `graph.senders`."""
    columns, start = {}, 0
    for name in sent_from(graph):
        width = graph.n_heads if name.endswith("hook_z") else 1
        columns[name] = slice(start, start := start + width)
    return columns


def written_by(residual_edges: ResidualEdges, name: str, value: Tensor) -> Float[Tensor, "prompt pos sender d_model"]:
    """Returns what the senders at a hook point (`sent_from`) add to the residual stream, from the activation there."""
    return residual_edges.written(int(name.split(".")[1]), value) if name.endswith("hook_z") else value[:, :, None]


@dataclass(frozen=True, eq=False, repr=False)
class _ByCopy(Edit):
    """An edit that differs between copies of its prompts, which run side by side: all prompts, then all again."""

    def _copies(self, context: BatchContext | None, prompts: int) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"]]:
        """The copy that each row of a batch belongs to, and its place among the prompts."""
        if context is None:
            raise ValueError("an edit of edges depends on the prompts: give them, as in fwd_hooks(model, prompts)")
        if len(context.prompts) % prompts:
            raise ValueError(
                f"the edit was made for {prompts} prompts, but {len(context.prompts)} run: run the same, once for each "
                "copy"
            )
        return context.rows // prompts, context.rows % prompts


@dataclass(frozen=True, eq=False, repr=False)
class PatchEdges(_ByCopy):
    """Patches edges: chosen receivers read what senders wrote in another run, all others what they write now.

    A receiver reads the residual stream of this run, in which the outputs of the patched senders are replaced by those
    of the other run. All that follows is computed anew, so the edges that are left alone carry what really arrives.

    Source: Wang et al. (2022), "Interpretability in the Wild", §3.1 (path patching); Conmy et al. (2023), "Towards
    Automated Circuit Discovery", for circuits as sets of edges.
    """

    residual_edges: ResidualEdges
    source: Mapping[str, Float[Tensor, "prompt pos ..."]]
    """The outputs of senders in the other run, by hook point (`sent_from`): `run.forward_pass.capture`."""
    edges: Bool[Tensor, "copy receiver sender"]
    """Which edges carry that, in each copy."""

    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:  # noqa: ARG002 - the graph knows it
        """A change where a patched edge ends, and a reader at the output of each sender.

        A receiver's input is this run's residual stream plus the difference that the patched senders make, which is
        known by then since senders come first. Its output is computed anew from that input by the model's own weights,
        with a column for each receiver of the site, and replaces the one of this run.
        """
        graph, residual_edges = self.residual_edges.graph, self.residual_edges
        copy, prompt = self._copies(context, len(self.source[EMBEDDED]))
        names, sites = sent_from(graph), sites_of(graph)
        used = [site for site, receivers in sites.items() if self.edges[:, receivers].any()]
        columns = columns_of(graph)
        read_at = {reads_from(graph, *site) for site in used}
        senders = [name for name in names if self.edges[:, :, columns[name]].any()]
        # One forward pass fills these, in the order in which it fires hooks: when a receiver is reached, `differences`
        # holds exactly the senders that wrote before it. Every batch calls `changes` anew, so nothing is left of the
        # last pass.
        stream: dict[str, Tensor] = {}
        differences: dict[str, Tensor] = {}
        computing: list[str] = []  # the MLP of BLOOM fires its hooks also where it is computed anew

        def patched(site: tuple[Reading, int], activation: Tensor) -> Tensor:
            patched_edges = self.edges[copy, sites[site]].to(activation)
            residual = activation if site[0] == "logits" else stream[reads_from(graph, *site)]
            change = torch.zeros_like(residual)[:, :, None].repeat(1, 1, patched_edges.shape[1], 1)
            for sender in [sender for sender in senders if sender in differences]:
                written = differences[sender].to(change.device)
                carried = patched_edges[:, :, columns[sender]].to(change.device)
                change = change + torch.einsum("npsd,nrs->nprd", written, carried)
            computing.append(site[0])
            new = residual_edges.read(*site, residual[:, :, None] + change).to(activation.device)
            computing.clear()
            return new if site[0] in ("q", "k", "v") else new[:, :, 0]

        def change_at(name: str) -> Change:
            ending = [site for site in used if lands_at(graph, *site) == name]

            def change(activation: Tensor) -> Tensor | None:
                if computing:
                    return None
                new = patched(ending[0], activation) if ending else None
                output = activation if new is None else new
                if name in read_at:
                    stream[name] = output
                if name in senders:
                    # Less what the sender writes now, patches before it included: that is what the residual stream
                    # holds.
                    before = self.source[name][prompt][:, -output.shape[1] :].to(output)
                    differences[name] = written_by(residual_edges, name, before - output)
                return new

            return change

        ends = {lands_at(graph, *site) for site in used}
        return {name: change_at(name) for name in sorted({*ends, *read_at, *senders})}


@dataclass(frozen=True, eq=False, repr=False)
class PatchReceivers(_ByCopy):
    """Patches receivers: each is given the query, key, value or output that it had in another run."""

    graph: Graph
    received: Mapping[str, Float[Tensor, "prompt pos ..."]]
    """What they had there, by hook point (`lands_at`)."""
    receivers: Bool[Tensor, "copy receiver"]
    """Which receivers are given it, in each copy."""

    def changes(self, cfg: Any, context: BatchContext | None) -> Mapping[str, Change]:  # noqa: ARG002 - the graph knows it
        """A change at each receiver."""
        copy, prompt = self._copies(context, len(next(iter(self.received.values()))))

        def change_at(name: str, receivers: slice) -> Change:
            def change(activation: Tensor) -> Tensor:
                given = self.receivers[copy, receivers].to(activation.device)[:, None]
                given = given[..., None] if activation.ndim == 4 else given
                new = self.received[name][prompt][:, -activation.shape[1] :].to(activation)
                return torch.where(given, new, activation)

            return change

        return {
            name: change_at(name, receivers)
            for site, receivers in sites_of(self.graph).items()
            if (name := lands_at(self.graph, *site)) in self.received and self.receivers[:, receivers].any()
        }


def _normed(block: Any, name: str, residual: Tensor) -> Tensor:
    """The residual stream after a norm of a block, where it has that norm."""
    norm: nn.Module | None = getattr(block, name, None)
    return residual if norm is None else bridges.component(norm)(residual)
