"""The twin of every verb: a plain Hugging Face model, read and changed by PyTorch's hooks on its own modules."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[str, int]
"""A site and its layer: `resid_pre`, `q`, `k`, `v`, `z`, `attn_out`, `mlp_post`, `mlp_out` or `resid_post`."""

Change = tuple[Place, Callable[[Tensor], Tensor]]
"""What replaces an activation `[1 pos width]`."""

OUT = ("o_proj", "out_proj", "dense", "c_proj")
FUSED = ("query_key_value", "c_attn", "Wqkv", "qkv_proj")
DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out")
NORM = ("norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm", "layer_norm")


def first(owner: nn.Module, names: Sequence[str]) -> Any:
    """The first module of one of these names, if there is any."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


def rows_of(linear: Any) -> tuple[int, int]:
    """How many numbers a linear layer reads and writes."""
    shape = linear.weight.shape
    return shape if type(linear).__name__ == "Conv1D" else shape[::-1]


SITES = ("resid_pre", "q", "k", "v", "z", "attn_out", "mlp_out", "resid_post")


class Plain:
    """A model that runs one prompt at a time, so that nothing is padded."""

    def __init__(self, hf: Any):
        # Eager, since no other returns attention; from the start, since Falcon's would forget the causal mask.
        with torch.random.fork_rng(devices=[]):  # weights are drawn before those of the model replace them
            self.hf = type(hf)._from_config(deepcopy(hf.config), attn_implementation="eager").to(hf.dtype).eval()
        self.hf.load_state_dict(hf.state_dict())
        stack, self.layers = next(
            (owner, child)
            for owner in self.hf.modules()
            for child in owner.children()
            if isinstance(child, nn.ModuleList) and len(child) == self.hf.config.num_hidden_layers
        )
        self._kept: dict[tuple[int, ...], dict[Place, Tensor]] = {}
        self.norm, self.unembed = first(stack, NORM), self.hf.get_output_embeddings()
        self.attention = [
            next(x for x in layer.modules() if first(x, (*FUSED, "q_proj")) is not None) for layer in self.layers
        ]
        self.out = [first(each, OUT) for each in self.attention]
        self.heads = [(layer, head) for layer in range(len(self.layers)) for head in range(self.n_heads)]
        reads, _ = rows_of(self.out[0])
        self.width = reads // self.n_heads
        self.scale: float = getattr(self.hf.config, "residual_multiplier", 1.0)
        fused = first(self.attention[0], FUSED)
        self.n_keys = (
            rows_of(self.attention[0].k_proj)[1] // self.width
            if fused is None
            else (rows_of(fused)[1] // self.width - self.n_heads) // 2
        )

    @property
    def n_heads(self) -> int:
        return self.hf.config.num_attention_heads

    def columns(self, site: str, head: int) -> Tensor:
        """Where a head (of `k` and `v` a key head) is in what its module computes."""
        within, attention = torch.arange(self.width), self.attention[0]
        if site == "z" or first(attention, FUSED) is None:
            return head * self.width + within
        place = "qkv".index(site)
        if hasattr(attention, "query_key_value") and self.n_keys == self.n_heads:  # of GPT-NeoX and BLOOM
            return (3 * head + place) * self.width + within
        return (head + (0, self.n_heads, self.n_heads + self.n_keys)[place]) * self.width + within

    def module(self, site: str, layer: int) -> tuple[Any, bool]:
        """Whose input (True) or output an activation is."""
        if site in ("resid_pre", "resid_post"):
            return self.layers[layer], site == "resid_pre"
        if site in ("z", "attn_out"):
            return self.out[layer], site == "z"
        if site in ("mlp_post", "mlp_out"):
            mlp = first(self.layers[layer], ("mlp", "ffn")) or self.layers[layer]  # OPT has its parts in the layer
            return first(mlp, DOWN) or mlp, site == "mlp_post"
        return first(self.attention[layer], (f"{site}_proj", *FUSED)), False

    @torch.no_grad()
    def kept(self, text: Sequence[int]) -> dict[Place, Tensor]:
        """All activations of a run without changes, which is made once."""
        if (key := tuple(text)) not in self._kept:
            places = [(site, layer) for site in SITES for layer in range(len(self.layers))]
            self._kept[key] = self.run(text, (), places)[1]
        return self._kept[key]

    def run(
        self, text: Sequence[int], changes: Sequence[Change] = (), keep: Sequence[Place] = (), **options: Any
    ) -> tuple[Tensor, dict[Place, Tensor], Any]:
        """Logits `[pos d_vocab]`, activations by place, each `[1 pos width]`, and the attention of the layers."""
        logits, kept, attention = self._run(text, [changes], keep, **options)
        return logits[0], kept, attention

    def side_by_side(self, text: Sequence[int], sets: Sequence[Sequence[Change]]) -> Tensor:
        """Logits `[set pos d_vocab]` of as many runs of one text, each with changes of its own."""
        return self._run(text, sets, ())[0]

    def _run(
        self, text: Sequence[int], sets: Sequence[Sequence[Change]], keep: Sequence[Place], **options: Any
    ) -> tuple[Tensor, dict[Place, Tensor], Any]:
        kept: dict[Place, Tensor] = {}

        def changed(place: Place, activation: Tensor) -> Tensor:
            rows = list(activation.view(len(sets), len(text), -1).split(1))  # OPT's MLP has all tokens in one row
            for row, changes in enumerate(sets):
                for at, change in changes:
                    rows[row] = change(rows[row]) if at == place else rows[row]
            kept[place] = torch.cat(rows)  # a copy, since Falcon adds to what its MLP returns, in place
            return kept[place].clone().view(activation.shape)

        def before(place: Place, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (changed(place, args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": changed(place, kwargs["hidden_states"])}

        def after(place: Place, _: Any, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return changed(place, output[0]), *output[1:]
            return changed(place, output)

        handles = []
        for place in {*keep, *(place for changes in sets for place, _ in changes)}:
            module, reads = self.module(*place)
            handles.append(
                module.register_forward_pre_hook(partial(before, place), with_kwargs=True)
                if reads
                else module.register_forward_hook(partial(after, place))
            )
        try:
            output = self.hf(torch.tensor([list(text)] * len(sets)), **options)
        finally:
            for handle in handles:
                handle.remove()
        return output.logits, kept, getattr(output, "attentions", None)

    def put(self, site: str, head: int | None, value: Tensor) -> Callable[[Tensor], Tensor]:
        """What gives a head, or all of a site, its part of a value."""

        def change(activation: Tensor) -> Tensor:
            if head is None:
                return value.clone()  # which may be added to in place
            return activation.index_copy(-1, self.columns(site, head), value[..., self.columns(site, head)])

        return change

    def written(self, head: int | None, layer: int, change: Tensor) -> Tensor:
        """What a change of a head's z, or of an MLP's output, adds to the residual stream."""
        if head is not None:
            zero = torch.zeros_like(change)
            zero[..., self.columns("z", head)] = change[..., self.columns("z", head)]
            change = self.out[layer](zero) - self.out[layer](torch.zeros_like(zero))
        return change * self.scale
