"""Metrics of attention and of weights: functions of tensors, without a model.

`pattern` holds attention probabilities, one row for each query position: `[row, head, pos]`, each row summing to 1
over the real tokens. Metrics are returned row by row, so that a mean and its interval can be taken over prompts.
A pattern with NaN gives NaN. Ratios of attention (`mass`, `mean`) are taken where attention is summed: `heads.score`.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TIE = 1e-5
"""Attention that is lower than the highest by less than this share of it ties with it: about the error of float32."""


def hit_rate(
    pattern: Float[Tensor, "row head pos"], keys: Bool[Tensor, "row pos"], candidates: Bool[Tensor, "row pos"]
) -> Float[Tensor, "row head"]:
    """Returns whether the most attended candidate is a key: 1[argmax_{j in candidates} α(q, j) in keys].

    Of n candidates that tie for the most (to within `TIE`), k of them keys, the row counts k / n: so uniform attention
    scores chance, and rounding decides nothing. A row that pays its candidates no attention at all is a miss.

    Range 0 to 1; chance is keys / candidates. Source: the alignment accuracy of Agarwal & Sarawagi (2025), §4.1, with
    the gold alignment in place of a fixed one; its candidates are the input tokens of the test example (the released
    notebook also lets earlier output tokens compete: `relations.with_candidates`).

    Misleads when the head pays the candidates next to nothing, since the argmax does not see how much: read the
    attention to keys beside it. Refuted by a control with the same positions and another alignment, on which a head
    that attends a fixed offset back fails.
    """
    best = pattern.masked_fill(~candidates[:, None], -math.inf).amax(-1, keepdim=True)
    tied = (pattern >= best * (1 - TIE)) & candidates[:, None]
    hits = (tied & keys[:, None]).sum(-1).to(pattern.dtype) / tied.sum(-1)
    return hits.where((best[..., 0] > 0) | best[..., 0].isnan(), 0)


def entropy(pattern: Float[Tensor, "row head pos"], candidates: Bool[Tensor, "row pos"]) -> Float[Tensor, "row head"]:
    """Returns the entropy of a row's attention among its candidates, in nats: -Σ p log p, p = α / Σ_candidates α.

    Range 0 (one position gets all) to log of the number of candidates; NaN where the candidates get no attention.
    Source: Shannon (1948); as a measure of attention heads, Clark et al. (2019), "What Does BERT Look At?", §3.3.

    Misleads as a sign of importance: a head that rests on the sink is as sharp as one that copies. Refuted by the
    attention to the first token, which is near 1 for such a head.
    """
    share = pattern * candidates[:, None].to(pattern.dtype)
    share = share.div_(share.sum(-1, keepdim=True))
    # torch.special.entr does the same in three times the time; 0 log 0 is 0
    return share.clamp_min(torch.finfo(share.dtype).tiny).log_().mul_(share).sum(-1).neg_()


def ov_copying(
    W_V: Float[Tensor, "kv_head d_model d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    W_E: Float[Tensor, "d_vocab d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
) -> Float[Tensor, " head"]:
    """Returns each head's OV copying score, Σ λ / Σ abs(λ) over the eigenvalues λ of its W_E W_V W_O W_U.

    Range -1 (attending to a token lowers its own logit) to 1 (raises it); random weights lie near 0; NaN for a head
    whose output is zero. Source: Elhage et al. (2021), "A Mathematical Framework for Transformer Circuits", "Copying:
    summarizing OV matrices"; for induction heads Olsson et al. (2022). The d_vocab x d_vocab matrix is never made: its
    non-zero eigenvalues are those of the d_head x d_head matrix W_O W_U W_E W_V.

    Weights only: layer norms, MLPs and biases are left out, so the score misleads for heads that copy through what
    other layers wrote (later layers most of all) and where embeddings are tied and share a large common direction.
    Refuted by ablating the head and reading the logit of the attended token.

    Args:
        W_V: One layer's value weights; with grouped-query attention fewer heads than `W_O` has, each serving the same
            number of consecutive query heads.
        W_O: The layer's output weights.
        W_E: The embedding.
        W_U: The unembedding.

    Raises:
        ValueError: The number of heads is no multiple of the number of key-value heads.
    """
    heads, kv_heads = len(W_O), len(W_V)
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} value heads evenly: give W_V and W_O of one layer")
    small = W_O @ (W_U @ W_E) @ W_V.repeat_interleave(heads // kv_heads, 0)
    eigenvalues = torch.linalg.eigvals(small.double())
    return (eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)).to(W_O.dtype)
