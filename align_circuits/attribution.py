"""Attribution patching: what patching each node or edge would do, from gradients, at the price of a few passes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from align_circuits.decomposition import wired
from align_circuits.engine import choose
from align_circuits.hooks.gradients import gradients
from align_circuits.hooks.probes import Change
from align_circuits.hooks.wires import EMBEDDED, columns_of, lands_at, reads_from, sent_from, sites_of, written_by
from align_circuits.models.protocol import check_fits, device_of
from align_circuits.outcomes import Metric
from align_circuits.pairs import Direction, Held, Pair
from align_circuits.prompts import Prompts
from align_circuits.tables import Table

EdgeMethod = Literal["eap", "eap_ig_inputs", "eap_ig_activations"]
"""How the score of an edge is made."""


def attribute_edges(
    model: Any,
    *,
    clean: Prompts,
    corrupted: Prompts,
    method: EdgeMethod = "eap_ig_inputs",
    steps: int = 5,
    metric: Metric = "log_prob",
    kind: str = "all",
    direction: Direction = "noise",
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> Table:
    """Returns for every edge an estimate of what `patch_edges` would measure, without patching any.

    With z_u what sender u writes, x_v what receiver v reads, and M the metric, the score of an edge in a clean run is
    Σ_positions <z_u(corrupted) - z_u(clean), ∂M/∂x_v>: below zero, the model needs the edge. The gradient is taken

    - `"eap"`: in the clean run. Source: Nanda (2023), "Attribution Patching"; Syed et al. (2023), "Attribution
      Patching Outperforms Automated Circuit Discovery", Eq. 2.
    - `"eap_ig_inputs"`: in the mean over runs whose embeddings lie between the two, k/m of the way to the clean ones,
      k = 1, ..., m. Source: Hanna et al. (2024), "Have Faith in Faithfulness", Eq. 3.
    - `"eap_ig_activations"`: in the mean over clean runs in which what the sender's layer says (its heads, or its MLP,
      or the embedding) lies between the two. Source: Hanna et al. (2024); Mueller et al. (2025), "MIB", §3.

    Misleads where the metric is flat at one end (saturated attention, a model that is sure): `"eap"` then sees no
    gradient. The control is `patch_edges` on the edges that matter, and `faithfulness` of the circuit.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        clean: Prompts with targets.
        corrupted: Their other halves, as many and as long: what `task.corrupt(clean, ...)` returns.
        method: How the gradient is taken.
        steps: m, for integrated gradients; a method without ignores it.
        metric: `"log_prob"` of the gold token, in nats, or its `"logit"` above the mean.
        kind: Which targets count: `"all"`, `"first"` or `"later"`.
        direction: `"noise"` scores corrupted edges in clean runs, `"denoise"` clean edges in corrupted runs.
        engine: As for `evaluate`.
        batch_size: Prompts at a time; it changes no result.

    Returns:
        A table keyed by `sender` and `receiver` (names as in `Graph`), `metric`, with intervals over prompts.

    Raises:
        ValueError: Prompts that do not match, an unknown method, no steps, or a model that is not the sum of its parts.
    """
    if method not in get_args(EdgeMethod):
        raise ValueError(f"method={method!r}: choose one of {', '.join(map(repr, get_args(EdgeMethod)))}")
    if steps < 1:
        raise ValueError(f"steps={steps}: integrated gradients take at least 1")
    pair = Pair.of(clean, corrupted, direction, metric, kind)
    check_fits(model, clean)
    wires = wired(model, pair.base)
    graph, device = wires.graph, device_of(model)
    speaking, sites, columns = sent_from(graph), sites_of(graph), columns_of(graph)
    ends = sorted({place for site in sites for place in (reads_from(graph, *site), lands_at(graph, *site))})
    ran = choose(model, engine, [*ends, *speaking])
    scores = torch.zeros(len(graph.receivers), len(graph.senders), len(clean), dtype=torch.float64)
    for part, rows in pair.batches(batch_size):
        held = part.held(model, speaking, ran, device)
        tokens, mask = part.base.tokens.to(device), part.base.mask.to(device)
        said = {name: written_by(wires, name, held.change(name)) for name in speaking}
        for names, changes, weight in _runs(method, held, speaking, steps):
            found = gradients(model, tokens, mask, ends, part.mean_outcome, changes, fast=ran == "fast")
            for site, places in sites.items():
                stream, gradient = found[reads_from(graph, *site)][0], found[lands_at(graph, *site)][1]
                gradient = gradient if site[0] in ("q", "k", "v") else gradient[:, :, None]
                pulled = wires.pulled(*site, stream, gradient)
                for name in names:
                    score = torch.einsum("npsd,nprd->rsn", said[name], pulled)
                    scores[places, columns[name], rows] += weight * score.cpu()
    provenance = pair.provenance("attribute_edges", model, {"method": method, "steps": steps, "kind": kind}, ran)
    return pair.edges(graph, graph.edges, scores[graph.edges].numpy(), provenance)


def _runs(
    method: str, held: Held, speaking: Sequence[str], steps: int
) -> Iterator[tuple[Sequence[str], Mapping[str, Change], float]]:
    """Whose edges are scored in a run, what is changed in it, and what its gradients weigh."""
    if method == "eap":
        yield speaking, {}, 1.0
        return
    groups = [(EMBEDDED, speaking)] if method == "eap_ig_inputs" else [(name, [name]) for name in speaking]
    for name, scored in groups:
        for step in range(1, steps + 1):
            there = held.between(name, step / steps)
            yield scored, {name: lambda _, there=there: there}, 1 / steps
