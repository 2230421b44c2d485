"""What the verbs cost: how many tokens go through how many layers, known before anything runs.

A verb's work is what dominates it: matrix products and attention. Intervals, permutation tests and tables come on top;
they do not grow with the model. `benchmarks/costs.py` compares the work with the clock.
"""

import math
from dataclasses import dataclass
from typing import Any

from align_circuits.checks import checked
from align_circuits.heads.heads_without_role import GRADIENT_COSTS, SCREENED
from align_circuits.run.pairs import Pair

Number = int | float
"""Of tokens, layers, runs; means may be fractions."""

_THROUGH_A_NORM = 600
"""In the time that a number takes back through a norm, so many are multiplied and summed: memory is slow. Fitted on one
CPU (`benchmarks/costs.py`), to the edges of models of 1 to 135 million parameters."""

_OF_A_ROW = 1000
"""In the time that one attention probability is computed anew, compared and summed for all metrics, so many numbers are
multiplied and summed. Fitted like the above, to the scores of models of 1 and 8 million parameters."""

_DROPPED = 150
"""The same for a number that dropout keeps or drops in an adapter's input. Fitted to a model of 1 million."""


@checked
@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with gated MLPs, such as Llama."""

    layers: int
    d_model: int
    heads: int
    key_heads: int
    """Heads of keys and values: fewer than `heads` with grouped queries."""
    d_head: int
    d_mlp: int
    d_vocab: int
    gated: bool = True
    """Whether the MLP has three matrices, as Llama's, or two, as GPT-2's."""

    @classmethod
    def of(cls, model: Any) -> "ModelShape":
        """Returns the sizes of a model with TransformerLens's hooks."""
        cfg = model.cfg
        return cls(
            cfg.n_layers,
            cfg.d_model,
            cfg.n_heads,
            getattr(cfg, "n_key_value_heads", None) or cfg.n_heads,
            cfg.d_head,
            getattr(cfg, "d_mlp", None) or 4 * cfg.d_model,
            cfg.d_vocab,
            bool(getattr(cfg, "gated_mlp", False)),
        )

    @property
    def attention_weights(self) -> int:
        """Weights of the four matrices of one attention layer."""
        return 2 * self.d_model * self.d_head * (self.heads + self.key_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of one MLP."""
        return (3 if self.gated else 2) * self.d_model * self.d_mlp

    @property
    def parameters(self) -> int:
        """Weights of all layers and of the embedding, counted once; norms and biases left out."""
        return self.layers * (self.attention_weights + self.mlp_weights) + self.d_vocab * self.d_model


@dataclass(frozen=True)
class Work:
    """What a model has to compute. Works add up, and a number times a work is that many of it."""

    attention: Number = 0
    """Tokens through the matrices of an attention layer, summed over layers."""
    mlp: Number = 0
    """Tokens through an MLP, summed over layers."""
    pairs: Number = 0
    """Pairs of a query and a key, summed over layers; every head has them all."""
    logits: Number = 0
    """Positions at which the vocabulary is predicted."""
    products: Number = 0
    """Numbers that are multiplied and summed beside the model's own, such as of adapters and of scores of edges."""

    def __add__(self, other: "Work") -> "Work":
        mine, others = (vars(work).values() for work in (self, other))
        return Work(*(one + two for one, two in zip(mine, others, strict=True)))

    def __rmul__(self, times: Number) -> "Work":
        return Work(*(times * value for value in vars(self).values()))

    def flops(self, shape: ModelShape) -> float:
        """Returns the floating-point operations: two for each weight and token, four for each number of a pair."""
        weights = self.attention * shape.attention_weights + self.mlp * shape.mlp_weights
        weights += self.logits * shape.d_model * shape.d_vocab
        return 2.0 * (weights + self.products) + 4.0 * self.pairs * shape.heads * shape.d_head

    def passes(self, shape: ModelShape, unit: "Work") -> float:
        """Returns the operations as a multiple of those of another work, mostly `forward_work`."""
        return self.flops(shape) / unit.flops(shape)


@checked
@dataclass(frozen=True)
class PromptSizes:
    """The sizes of the prompts that a verb runs on."""

    prompts: int
    tokens: int
    """In a prompt, up to the last prediction that is measured."""
    targets: int
    """Predictions that are measured in a prompt."""
    changed: int = 0
    """With pairs: the tokens from the first on that differs between the clean and the corrupted prompts."""

    @classmethod
    def of(cls, pair: Pair) -> "PromptSizes":
        """Returns the sizes of a pair's prompts."""
        last, targets = int(pair.clean.column("query_pos").max()) + 1, len(pair.clean.targets) // len(pair.clean)
        first = int((pair.clean.tokens != pair.corrupted.tokens).any(0).nonzero()[0])
        return cls(len(pair.clean), last, targets, last - first)


def forward_work(shape: ModelShape, sizes: PromptSizes) -> Work:
    """Returns the work of running the prompts once: the unit of all others."""
    run = sizes.prompts * sizes.tokens * shape.layers
    return Work(run, run, run * (sizes.tokens + 1) / 2, sizes.prompts * sizes.targets)


def evaluate_work(shape: ModelShape, sizes: PromptSizes) -> Work:
    """Returns the work of `evaluate`: one run, the last layer's MLP at the targets alone."""
    return forward_work(shape, sizes) + Work(mlp=-sizes.prompts * (sizes.tokens - sizes.targets))


def score_work(shape: ModelShape, sizes: PromptSizes) -> Work:
    """Returns the work of `score_heads`: that of `evaluate`, and every head's row of attention at every target."""
    rows = sizes.prompts * sizes.targets * sizes.tokens * shape.layers * shape.heads
    return evaluate_work(shape, sizes) + Work(products=_OF_A_ROW * rows)


def edited_work(sizes: PromptSizes, edited: Number, layers: Number, last: Number = 0) -> Work:
    """Returns the work of runs by replay with the z of heads edited in one layer, or in several of which this is first.

    Such a run starts in that layer's MLP, at the first token that is edited: that MLP and the layers above run, the
    last one's MLP at the targets alone.

    Args:
        sizes: Of the prompts.
        edited: Tokens from the first edited one on.
        layers: Layers above the edited one, summed over runs.
        last: The number of runs.
    """
    run, targets = sizes.prompts * edited, sizes.prompts * sizes.targets
    pairs = run * layers * (sizes.tokens - edited / 2)
    return Work(run * layers, run * layers + targets * last, pairs, targets * last)


def base_work(shape: ModelShape, sizes: PromptSizes) -> Work:
    """Returns the work of the unedited run that replay keeps: the last MLP computes the targets alone."""
    whole, targets = forward_work(shape, sizes), sizes.prompts * sizes.targets
    return whole + Work(mlp=targets - sizes.prompts * sizes.tokens)


def ablate_work(shape: ModelShape, sizes: PromptSizes, heads: int | None = None, above: Number | None = None) -> Work:
    """Returns the work of `ablate_heads` with means: the run for the means, the intact run, and one for each head.

    Args:
        shape: Of the model.
        sizes: Of the prompts.
        heads: How many heads; by default all.
        above: Layers above each head's own, summed over heads; by default as many as of heads in all layers.
    """
    runs = shape.layers * shape.heads if heads is None else heads
    above = runs * (shape.layers - 1) / 2 if above is None else above
    edited = edited_work(sizes, sizes.tokens, above, runs)
    return forward_work(shape, sizes) + base_work(shape, sizes) + edited


def patch_work(shape: ModelShape, sizes: PromptSizes, heads: int | None = None, above: Number | None = None) -> Work:
    """Returns the work of `patch_heads`: both prompts of the pairs, and a run from `changed` on for each head.

    Args:
        shape: Of the model.
        sizes: Of the prompts, with `changed`.
        heads: How many heads; by default all.
        above: Layers above each head's own, summed over heads; by default as many as of heads in all layers.
    """
    runs = shape.layers * shape.heads if heads is None else heads
    above = runs * (shape.layers - 1) / 2 if above is None else above
    other = edited_work(sizes, sizes.changed, shape.layers)
    targets = sizes.prompts * sizes.targets  # its predictions are baselines
    other += Work(mlp=targets - sizes.prompts * sizes.changed, logits=targets)
    return base_work(shape, sizes) + other + edited_work(sizes, sizes.changed, above, runs)


def backward_work(shape: ModelShape, sizes: PromptSizes) -> Work:
    """Returns the work of one pass back through all layers, with frozen weights, which need no gradients.

    Matrices cost what they cost forward; fused attention makes five products for each pair instead of two, since it
    computes the pattern anew (Dao et al., 2022, "FlashAttention", App. B).
    """
    forward = forward_work(shape, sizes)
    return forward + Work(pairs=1.5 * forward.pairs)


def attribute_work(shape: ModelShape, sizes: PromptSizes, steps: int = 1, *, edges: bool = False) -> Work:
    """Returns the work of `attribute_heads` and `attribute_edges`: both runs, and forward and back for each step.

    Args:
        shape: Of the model.
        sizes: Of the prompts.
        steps: 1 for one gradient (`"atp"`, `"eap"`), m for integrated gradients.
        edges: Whether edges are scored: then in each step what every receiver reads goes through it once more, forward
            and back, and each sender is multiplied with each later receiver; norms, where receivers mostly wait for
            memory, count as products too.
    """
    work = 2 * forward_work(shape, sizes) + steps * (forward_work(shape, sizes) + backward_work(shape, sizes))
    if edges:
        run = sizes.prompts * sizes.tokens
        receivers = shape.layers * (shape.heads + 2 * shape.key_heads + 1) + 1
        senders = shape.layers * (shape.heads + 1) + 1
        in_norms = shape.layers * (shape.heads + 2 * shape.key_heads) * _THROUGH_A_NORM
        products = steps * run * shape.d_model * (receivers * senders / 2 + in_norms)
        again = 2 * steps * run * shape.layers
        work += Work(attention=again, mlp=again, products=products)
    return work


def tune_work(
    shape: ModelShape, sizes: PromptSizes, steps: int, probes: int = 0, probe_prompts: int = 1, rank: int = 16
) -> Work:
    """Returns the work of `tune` on q, k and v of all layers: each step, and probes in and out of distribution.

    A step goes forward and back, the last MLP at the targets alone; the adapters do so too, with dropout, and get
    gradients of their weights besides. A probe runs once what its prompts in and out of distribution share.

    Args:
        shape: Of the model.
        sizes: Of the prompts of one step, with `changed` for prompts out of distribution; 0 if they share no beginning.
        steps: The number of updates.
        probes: How often the model is probed.
        probe_prompts: Prompts in a probe, this many in distribution and as many out of it.
        rank: Of the adapters.
    """
    width = 3 * shape.d_model + (shape.heads + 2 * shape.key_heads) * shape.d_head
    of_token = 3 * rank * width + 3 * _DROPPED * shape.d_model
    adapters = Work(products=sizes.prompts * sizes.tokens * shape.layers * of_token)
    step = base_work(shape, sizes) + backward_work(shape, sizes) + adapters
    step += Work(mlp=sizes.prompts * (sizes.targets - sizes.tokens))
    return steps * step + probes * probe_prompts * _probe_work(shape, sizes)


def _probe_work(shape: ModelShape, sizes: PromptSizes) -> Work:
    """Returns the work of scoring a prompt in distribution and one out of it."""
    one = PromptSizes(1, sizes.tokens, sizes.targets)
    if not sizes.changed:
        return 2 * score_work(shape, one)
    rows = score_work(shape, one).products
    shared = base_work(shape, PromptSizes(1, sizes.tokens - sizes.changed, 1))
    rest = edited_work(one, sizes.changed, shape.layers, 1) + Work(mlp=-sizes.changed, products=rows)
    return shared + 2 * rest


def localize_work(
    shape: ModelShape,
    sizes: PromptSizes,
    candidates: int,
    sets: Number,
    exchanged: int = 0,
    above: float = 0.75,
    renamed: int = 56,
) -> Work:
    """Returns the work of `localize`, all of whose parts run on one half of the prompts.

    That is: scores on either half and on the control task, and the permutation tests (4 runs); each candidate ablated
    and patched, on either half; all other heads patched, or estimated (`effects_of_others`); sets of heads ablated,
    with their means; interchanges; and the prompts whose tokens are renamed. Sweeps of the same prompts share one
    unedited run.

    Args:
        shape: Of the model.
        sizes: Of all `n` prompts, with `changed`.
        candidates: Heads that are ablated and patched one by one, known only afterwards: 1 to 10% of all heads.
        sets: Sets of heads that are ablated, each as the share of the prompts that it is measured on: with 20 draws up
            to 80, and up to 20 for each role, but mostly fewer than half of them.
        exchanged: Candidates and sets whose answers are interchanged.
        above: The share of the layers that run for a set, which starts in its lowest layer.
        renamed: Contexts whose tokens are renamed, to test duplicate and induction heads; 0 where neither is a role.
    """
    half = PromptSizes(sizes.prompts // 2, sizes.tokens, sizes.targets, sizes.changed)
    ablated = 2 * ablate_work(shape, half, candidates) + edited_work(
        half, half.tokens, sets * above * shape.layers, sets
    )
    others, estimated = shape.layers * shape.heads - candidates, Work()
    if others * sizes.changed / sizes.tokens / 2 > GRADIENT_COSTS:
        others, estimated = math.ceil(SCREENED * others), attribute_work(shape, half)
    patched = patch_work(shape, half, candidates) + patch_work(shape, half, candidates + exchanged + others) + estimated
    named = score_work(shape, PromptSizes(renamed, sizes.tokens, 1)) if renamed else Work()
    return 4 * score_work(shape, half) + named + ablated + patched
