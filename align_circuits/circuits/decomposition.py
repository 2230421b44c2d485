"""Checks that a model is the sum of its parts: a residual stream that heads and MLPs read and add to."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from align_circuits.hooks.compat import architectures, lora_merging
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import modules_in
from align_circuits.hooks.names import name_of
from align_circuits.hooks.probes import evaluating
from align_circuits.hooks.residual_edges import (
    EMBEDDED,
    ResidualEdges,
    hook_points,
    lands_at,
    reads_from,
    sent_from,
    sites_of,
    written_by,
)
from align_circuits.models.parameters import device_of, model_provenance
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import capture

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far apart the two may lie, as a share of the largest entry; for narrower types `NARROW`. Hugging Face's RMS norms
compute in float32 whatever the weights are."""

NARROW = 5e-2

Function = TypeVar("Function", bound=Callable[..., Any])


def on_merged_weights(function: Function) -> Function:
    """Makes a function run its first argument, a model, with LoRA merged into the weights that it adapts.

    Provenance names the weights as they are before. It goes below `leaves_as_found`.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs["model"]
        model_provenance(model)  # which a call keeps
        with lora_merging.merged_adapters(modules_in(model)):
            return function(*args, **kwargs)

    return wrapper  # pyright: ignore[reportReturnType]


def residual_edges_of(model: HookedModel, prompts: Prompts) -> ResidualEdges:
    """Returns the residual edges of a model, after a check on one prompt that it reads and writes as its weights say.

    Raises:
        ValueError: It does not: an adapter that cannot be merged meanwhile, norms after a block, scaled residuals,
            experts.
    """
    module: Any = model
    layers = [(name, layer) for name, layer in module.named_modules() if "base_layer" in getattr(layer, "_modules", {})]
    if adapted := [name for name, layer in layers if not getattr(layer, "merged", False)]:
        raise ValueError(
            f"{adapted[0]} carries an adapter, which the weights of heads do not show, and which cannot be merged for "
            "the time of a run (only plain LoRA on weights of float32 or float64 can): merge it first "
            "(merge_and_unload), then load the merged model"
        )
    residual_edges = ResidualEdges(model)
    graph = residual_edges.graph
    for layer, block in enumerate(module.blocks):
        if architectures.norms_contributions(block):
            raise ValueError(
                f"layer {layer} norms what its attention or its MLP adds to the residual stream, so that the stream is "
                "not the sum of what heads and MLPs write: edges and direct effects need a plain residual stream"
            )
        check_reads_apart(model, layer, "q")
    # One prompt is enough: a model that computes with other weights shows it on any.
    cached = capture(model, prompts[:1], hook_points(graph))
    device = device_of(model)
    # Without padding, where `capture` returns 0 and not what the model computes.
    cached = {name: value[:, prompts.mask[0].int().argmax() :].to(device) for name, value in cached.items()}
    with torch.no_grad(), evaluating(model):
        stream = cached[EMBEDDED]
        for layer in range(graph.n_layers):
            check_same(f"the residual stream before layer {layer}", stream, cached[name_of("resid_pre", layer)])
            for name in [name for name in sent_from(graph)[1:] if int(name.split(".")[1]) == layer]:
                stream = stream + written_by(residual_edges, name, cached[name]).sum(2)
            stream = residual_edges.with_bias(layer, stream)
            for site, of_layer in sites_of(graph):
                if of_layer != layer:
                    continue
                read, output = cached[reads_from(graph, site, layer)], cached[lands_at(graph, site, layer)]
                output = output[:, :, None] if site == "mlp" else output
                read = read[:, :, None].expand(-1, -1, output.shape[2], -1)
                computed = residual_edges.read(site, layer, read)
                check_same(f"what layer {layer} reads through {site!r}", computed, output)
        check_same("the last residual stream", stream, cached[reads_from(graph, "logits", graph.n_layers)])
    return residual_edges


def check_reads_apart(model: HookedModel, layer: int, site: str) -> None:
    """Raises a ValueError where a layer norms the queries, or the keys, of all its heads together."""
    if architectures.norms_heads_together(model, layer, site):
        raise ValueError(
            f"layer {layer} norms the {'queries' if site == 'q' else 'keys'} of all its heads together, so that what "
            "one head reads changes the others: edges and paths into single heads are not defined there"
        )


def check_same(what: str, computed: Tensor, captured: Tensor, size: Tensor | None = None) -> None:
    """Raises a ValueError where two tensors lie apart by more than `TOLERANCE` of `size`, by default of the second."""
    apart = float((computed - captured).abs().max() / (captured if size is None else size).abs().max().clamp(min=1e-30))
    allowed = TOLERANCE.get(captured.dtype, NARROW)
    if not apart <= allowed:
        raise ValueError(
            f"{what} is not what the model's weights make of its parts (apart by {apart:.0e} of its size; "
            f"{allowed:.0e} is allowed): edges and direct effects need a plain residual stream, to which heads and "
            "MLPs add what they compute of it"
        )
