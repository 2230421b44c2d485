"""The parts of a TransformerLens bridge and of the Hugging Face model inside it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def wrapped(model: Any) -> Any:
    """Returns the Hugging Face model inside a bridge, and any other model itself.

    A bridge keeps it in `original_model`, which is none of its submodules: `modules()` of a bridge does not reach it.
    """
    return getattr(model, "original_model", model)


def is_bridge(model: Any) -> bool:
    """Whether a model is a bridge over a Hugging Face model: those take its keywords, such as `logits_to_keep`."""
    return isinstance(getattr(model, "original_model", None), PreTrainedModel)


def has_changed_weights(bridge: Any) -> bool:
    """Whether a bridge computes with folded weights of its own (compatibility mode) and not with Hugging Face's."""
    return bool(bridge.compatibility_mode)


def component(module: Any) -> Any:
    """Returns the Hugging Face module inside a module of a bridge, and any other module itself.

    Called directly it runs without the hooks around it: replay and residual edges compute parts of a model on
    activations that no hook should receive.
    """
    return getattr(module, "original_component", module)


def without_bridge(module: nn.Module) -> nn.Module:
    """Returns the module that remains when all modules of a bridge around it are removed: one may wrap another."""
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    while isinstance(module, GeneralizedComponent):
        module = module.original_component  # pyright: ignore[reportAssignmentType]
    return module


def strip_bridge(model: nn.Module) -> None:
    """Takes all modules of a bridge out of a Hugging Face model, in place: what remains runs as transformers made it.

    A bridge wraps the modules inside the model, adds biases of zeros, and gives Falcon's modules functions in place of
    methods, which run these modules even where they are called on copies.
    """
    for name, child in list(model.named_children()):
        inner = without_bridge(child)
        if isinstance(inner, nn.Linear) and "bias" in dict(inner.named_buffers(recurse=False)):
            del inner.bias
            inner.register_parameter("bias", None)
        if getattr(vars(inner).get("forward"), "__module__", "").startswith("transformer_lens"):
            del inner.forward
        setattr(model, name, inner)
        strip_bridge(inner)


def parameter_name(name: str) -> str:
    """Returns a parameter's name as Hugging Face spells it: a bridge inserts the module that holds a component."""
    return name.replace("._original_component", "")


def modules_of(*roots: Any) -> Iterator[nn.Module]:
    """Yields all modules below some, each once; `modules()` of a bridge takes many times as long."""
    waiting, seen = [root for root in roots if isinstance(root, nn.Module)], set()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            # Not by attribute, which modules of a bridge pass on to what they wrap.
            waiting += [child for child in vars(module)["_modules"].values() if child is not None]
            yield module


@contextmanager
def evaluation_of(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switches dropout off, and afterwards restores the mode of every module."""
    training = [module for module in modules if module.training]
    try:
        # Module by module: `train()` afterwards would also reach those that the user keeps in evaluation mode.
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def parts_of(model: Any) -> Iterator[object]:
    """Yields the modules of a model and of what it wraps, their parameters and configurations: what two may share."""
    for module in modules_of(model, wrapped(model)):
        yield module
        yield from (parameter for parameter in vars(module)["_parameters"].values() if parameter is not None)
        if hasattr(config := vars(module).get("config"), "__dict__"):
            yield config


def layer_of(attention: nn.Module) -> int:
    """Returns the layer of a Hugging Face attention module, which transformers sets for its key-value cache."""
    return int(attention.layer_idx)  # pyright: ignore[reportArgumentType]


def is_copy_for_mlp(model: Any, name: str) -> bool:
    """Whether the hook point of the stream between attention and MLP holds what the MLP reads, and no more.

    A bridge lets `hook_resid_mid` stand for the input of the MLP's norm: what is changed there reaches the MLP, but not
    the stream that passes it by. A `HookedTransformer` changes both, and so does a BLOOM whose stream goes on from that
    norm.
    """
    if getattr(getattr(wrapped(model), "config", None), "apply_residual_connection_post_layernorm", False):
        return False
    point = model.hook_dict.get(name)
    return point is not None and name.endswith(".hook_resid_mid") and point.name != name


def matrices_of(bridge: Any) -> list[dict[str, str]]:
    """Returns for each layer the names, in the Hugging Face model, of its matrices q, k, v, o, gate, up and down.

    A fused matrix stands for each part. Layers have those that TransformerLens maps: none of the MLP where it consists
    of experts, and no gate where the MLP has none.
    """
    by_layer: list[dict[str, str]] = []
    for block in bridge.blocks:
        attention, mlp = block.attn, block.mlp
        local_names = {matrix: getattr(attention, matrix).name for matrix in ("q", "k", "v", "o")}
        if hasattr(attention, "split_qkv_matrix"):
            local_names |= dict.fromkeys(("q", "k", "v"), attention.qkv.name)
        names = {matrix: f"{block.name}.{attention.name}.{local}" for matrix, local in local_names.items()}
        if hasattr(mlp, "in") and hasattr(mlp, "out"):  # experts have in their place a router, called `gate`
            attributes = {"gate": "gate", "up": "in", "down": "out"}
            local_names = {matrix: getattr(mlp, key).name for matrix, key in attributes.items() if hasattr(mlp, key)}
            if hasattr(mlp, "split_gate_up_matrix"):
                local_names |= dict.fromkeys(("gate", "up"), mlp.fused_attr)
            stem = f"{block.name}.{mlp.name}" if mlp.name else block.name  # OPT's MLP is no module of its own
            names |= {matrix: f"{stem}.{local}" for matrix, local in local_names.items()}
        by_layer.append(names)
    return by_layer


def wire_hooks(modules: Iterable[nn.Module]) -> None:
    """Attaches the hooks with which a bridge's blocks serve some of their hook points, before anything is written down.

    A bridge attaches them in its first run and then believes that they are there: taken away with what a verb added,
    `hook_mlp_in`, `hook_q_input` and, where a model scales what its layers add, `hook_attn_out` would be dead.
    """
    for module in modules:
        kind: Any = type(module)
        if _wires_hooks(kind):
            kind._maybe_wire_capture_hooks(module)


@cache
def _wires_hooks(kind: Any) -> bool:
    """Whether the forward pass of a block attaches them: BLOOM's does not."""
    name = "_maybe_wire_capture_hooks"
    for owner in kind.__mro__ if hasattr(kind, name) else ():
        if "forward" in vars(owner):
            names = owner.forward.__code__.co_names
            # A forward pass that calls its parent's leaves it to that.
            if name in names or "super" not in names:
                return name in names
    return False
