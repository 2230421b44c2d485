"""Path patching: exactly what one edge, or one path, carries from a clean run to a corrupted one, or back."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from align_circuits.circuits.decomposition import residual_edges_of
from align_circuits.hooks.edits import Edit, Patch
from align_circuits.hooks.graph import Graph, Sender
from align_circuits.hooks.names import name_of
from align_circuits.hooks.residual_edges import EMBEDDED, PatchEdges, Receive, lands_at, sent_from, sites_of, touched
from align_circuits.models.protocol import check_fits
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import capture, choose
from align_circuits.run.pairs import CachedPair, Direction, Pair
from align_circuits.run.target_metrics import Metric
from align_circuits.tables.tables import Table


def patch_edges(
    model: Any,
    *,
    clean: Prompts,
    corrupted: Prompts,
    edges: Iterable[tuple[str, str]] | None = None,
    metric: Metric = "log_prob",
    kind: str = "all",
    direction: Direction = "noise",
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what patching each edge alone does: the change of what the model says of the gold tokens.

    The receiver reads the residual stream of the run that is measured, but for what the sender wrote, which it reads as
    in the other run. Nothing else changes before it; everything after it is computed anew. Exact, with one run for
    each edge; many edges share a batch.

    Source: Wang et al. (2022), "Interpretability in the Wild", §3.1; Conmy et al. (2023). Misleads where two edges do
    the same work (both are then dispensable alone). The control is `faithfulness`, which leaves only a circuit.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        clean: Prompts with targets.
        corrupted: Their other halves, as many and as long: what `task.corrupt(clean, ...)` returns.
        edges: Pairs of the names of sender and receiver, as in `Graph`; all by default.
        metric: `"log_prob"` of the gold token, in nats, or its `"logit"` above the mean.
        kind: Which targets count: `"all"`, `"first"` or `"later"`.
        direction: `"noise"` puts corrupted edges into clean runs (below zero, the edge is needed), `"denoise"` clean
            ones into corrupted runs (above zero, it brings some of the answer back).
        options: Engine and batch size.

    Returns:
        A table keyed by `sender`, `receiver` and `metric`, with intervals over prompts.

    Raises:
        KeyError: An edge between names that the model does not have.
        ValueError: Prompts that do not match, an edge that leads backwards, or a model that is not the sum of its
            parts.
    """
    pair = Pair.of(clean, corrupted, direction, metric, kind)
    check_fits(model, clean)
    wires = residual_edges_of(model, pair.base)
    graph = wires.graph
    chosen = graph.edges if edges is None else graph.select(edges)
    options: dict[str, Any] = {"engine": choose(model, engine, touched(graph)), "batch_size": batch_size}
    source = capture(model, pair.source, sent_from(graph), **options)
    before, ran = pair.outcome.measured(model, **options)
    found = []
    for receiver in chosen.any(1).nonzero()[:, 0].tolist():
        senders = chosen[receiver].nonzero()[:, 0]
        cells = torch.zeros(len(senders), *chosen.shape, dtype=torch.bool)
        cells[torch.arange(len(senders)), receiver, senders] = True
        after, _ = pair.outcome.measured(model, [PatchEdges(wires, source, cells)], len(senders), **options)
        found.append(pair.outcome.by_prompt(after - before)[0])
    provenance = pair.provenance("patch_edges", model, {"kind": kind}, ran)
    return pair.edges(graph, chosen, np.concatenate(found), provenance)


def patch_paths(
    model: Any,
    *,
    clean: Prompts,
    corrupted: Prompts,
    senders: Sequence[str] | None = None,
    receivers: Sequence[str] = ("logits",),
    metric: Metric = "log_prob",
    kind: str = "all",
    direction: Direction = "noise",
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what each sender alone does through each receiver alone, by all paths between them that meet no head.

    Three runs make a number. The first finds what every head says. In the second, heads say what they said, but for the
    sender, which says what it says in the other run; MLPs are computed anew. In the third, the receiver has from its
    residual stream what it had in the second, and everything after it is computed anew. So, unlike `patch_edges`, the
    sender's word also arrives through MLPs that lie between.

    Source: Wang et al. (2022), "Interpretability in the Wild", §3.1 and App. B; Goldowsky-Dill et al. (2023),
    "Localizing Model Behavior with Path Patching". Misleads as `patch_edges` does.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        clean: Prompts with targets.
        corrupted: Their other halves, as many and as long: what `task.corrupt(clean, ...)` returns.
        senders: Names as in `Graph`: `"L1H2"`, `"M1"`, `"input"`; all heads by default.
        receivers: Names as in `Graph`: `"L3H0.q"`, `"L3H0.k"` (`"L3KV0.k"` where heads share keys), `"M3"`, `"logits"`.
        metric: As for `patch_edges`.
        kind: As for `patch_edges`.
        direction: As for `patch_edges`.
        options: Engine and batch size.

    Returns:
        A table keyed by `sender`, `receiver` and `metric`, with intervals over prompts; pairs in which the receiver
        comes first are left out.

    Raises:
        KeyError: A name that the model does not have.
        ValueError: Prompts that do not match, or no receiver that comes after a sender.
    """
    pair = Pair.of(clean, corrupted, direction, metric, kind)
    check_fits(model, clean)
    graph = Graph.of(model.cfg)
    heads = [sender.name for sender in graph.senders if sender.head >= 0]
    reads, writes = (
        torch.tensor([place(name) for name in names])
        for place, names in ((graph.receiver, receivers), (graph.sender, heads if senders is None else senders))
    )
    chosen = torch.zeros_like(graph.edges)
    chosen[reads[:, None], writes] = graph.edges[reads[:, None], writes]
    if not chosen.any():
        raise ValueError("none of the receivers comes after one of the senders: name later receivers, such as 'logits'")
    options: dict[str, Any] = {"engine": choose(model, engine, touched(graph)), "batch_size": batch_size}
    held = CachedPair(*(capture(model, some, sent_from(graph), **options) for some in (pair.base, pair.source)))
    before, ran = pair.outcome.measured(model, **options)
    found = np.full((*chosen.shape, len(clean)), np.nan)
    for place in chosen.any(0).nonzero()[:, 0].tolist():
        mine = chosen[:, place].nonzero()[:, 0]
        cells = torch.zeros(len(mine), len(chosen), dtype=torch.bool)
        cells[torch.arange(len(mine)), mine] = True
        ends = {lands_at(graph, *site) for site, places in sites_of(graph).items() if cells[:, places].any()}
        made = capture(model, pair.base, sorted(ends), edits=_alone(graph, graph.senders[place], held), **options)
        after, _ = pair.outcome.measured(model, [Receive(graph, made, cells)], len(mine), **options)
        found[mine, place] = pair.outcome.by_prompt(after - before)[0]
    provenance = pair.provenance("patch_paths", model, {"kind": kind}, ran)
    return pair.edges(graph, chosen, found[chosen.numpy()], provenance)


def _alone(graph: Graph, sender: Sender, held: CachedPair) -> list[Edit]:
    """Heads say what they said; the sender says what it says in the other run."""
    said = {name: value for name, value in held.base.items() if name.endswith("hook_z")}
    edits: list[Edit] = []
    if sender.head >= 0:
        name = name_of("z", sender.layer)
        said[name] = said[name].clone()
        said[name][:, :, sender.head] = held.source[name][:, :, sender.head]
    elif sender.layer >= 0:
        edits = [Patch(site="mlp_out", layers=[sender.layer], values=held.source)]
    else:
        edits = [Patch(site="resid_pre", layers=[0], values={EMBEDDED: held.source[EMBEDDED]})]
    heads = [(layer, head) for layer in range(graph.n_layers) for head in range(graph.n_heads)]
    return [*edits, Patch(heads=heads, site="z", values=said)]
