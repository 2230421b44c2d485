"""The interface of a model: TransformerLens's hooks, and the positions of tokens in padded prompts."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Int
from torch import Tensor


@runtime_checkable
class HookedModel(Protocol):
    """A model with TransformerLens's hooks: a `TransformerBridge`, a `HookedTransformer`, a module of one's own.

    A module of one's own derives from `transformer_lens.HookedRootModule` and names its hook points as TransformerLens
    does, `blocks.{layer}.attn.hook_pattern` `[prompt head query key]` at the least.
    """

    cfg: Any
    """`n_layers`, `n_heads`, `d_model`, `d_head`, `d_vocab`, `n_ctx`."""
    hook_dict: Any
    """The hook points by name."""

    def __call__(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns logits `[prompt pos d_vocab]`; `attention_mask=` where prompts are padded on the left."""
        ...

    def hooks(self, fwd_hooks: Any = ..., *args: Any, **kwargs: Any) -> Any:
        """A context manager that adds hooks, pairs of a name and a function."""
        ...

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model with hooks and returns its logits."""
        ...


def token_positions(mask: Bool[Tensor, "prompt pos"]) -> Int[Tensor, "prompt pos"]:
    """Returns the position of each token in its prompt, from 0 at the first real token; 0 at padding.

    Left to itself, Hugging Face counts from the first column, padding included.
    """
    return (mask.cumsum(1) - 1).clamp(min=0)
