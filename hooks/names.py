"""The names of hook points, as TransformerLens spells them."""


def pattern(layer: int) -> str:
    """The attention pattern after the softmax, `[prompt head query key]`."""
    return f"blocks.{layer}.attn.hook_pattern"


def scores(layer: int) -> str:
    """The attention scores before the softmax, `[prompt head query key]`."""
    return f"blocks.{layer}.attn.hook_attn_scores"


def q(layer: int) -> str:
    """The queries before rotation, `[prompt pos head d_head]`."""
    return f"blocks.{layer}.attn.hook_q"


def k(layer: int) -> str:
    """The keys before rotation; under grouped-query attention with fewer heads than `q`."""
    return f"blocks.{layer}.attn.hook_k"


def v(layer: int) -> str:
    """The values; under grouped-query attention with fewer heads than `q`."""
    return f"blocks.{layer}.attn.hook_v"


def z(layer: int) -> str:
    """What each head read, before the output matrix, `[prompt pos head d_head]`."""
    return f"blocks.{layer}.attn.hook_z"


def resid_pre(layer: int) -> str:
    """The residual stream before a layer, `[prompt pos d_model]`."""
    return f"blocks.{layer}.hook_resid_pre"


def resid_post(layer: int) -> str:
    """The residual stream after a layer, `[prompt pos d_model]`."""
    return f"blocks.{layer}.hook_resid_post"
