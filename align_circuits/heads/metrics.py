"""Metrics of attention, of weights and of representations: functions of tensors, without a model.

`pattern` holds attention probabilities, one row for each query position: `[row, head, pos]`, each row summing to 1
over the real tokens. Metrics are returned row by row, so that a mean and its interval can be taken over prompts.
A pattern with NaN gives NaN. Ratios of attention (`mass`, `mean`) are taken where attention is summed: `heads.score`.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from sklearn.metrics import silhouette_samples
from torch import Tensor, nn

TIE = 1e-5
"""Attention that is lower than the highest by less than this share of it ties with it: about the error of float32."""


def hit_rate(
    pattern: Float[Tensor, "row head pos"], keys: Bool[Tensor, "row pos"], candidates: Bool[Tensor, "row pos"]
) -> Float[Tensor, "row head"]:
    """Returns whether the most attended candidate is a key: 1[argmax_{j in candidates} α(q, j) in keys].

    Of n candidates that tie for the most (to within `TIE`), k of them keys, the row counts k / n: so uniform attention
    scores chance, and rounding decides nothing. A row that pays its candidates no attention at all is a miss.

    Range 0 to 1; chance is keys / candidates. Source: the alignment accuracy of paper 1, §4.1, with the gold alignment
    in place of a fixed one; its candidates are the input tokens of the test example (the released notebook also lets
    earlier output tokens compete: `relations.with_candidates`).

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
    attention = pattern * candidates[:, None]
    share = attention / attention.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1)


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


MATCHES = ("exact", "type", "subject", "attribute")
"""What can be right about a predicted attribute."""


def recall_matches(
    predicted: Int[Tensor, " prompt"],
    subject: Int[Tensor, " prompt"],
    type_: Int[Tensor, " prompt"],
    facts: Int[Tensor, "type subject"],
) -> dict[str, Float[Tensor, " prompt"]]:
    """Returns, as 0 or 1, what is right about a predicted token, by the names of `MATCHES`.

    `exact`: it is the subject's value of the type; `type`: some subject's value of that type; `subject`: the subject's
    value of some type; `attribute`: a value at all. Source: Vasudeva et al. (2026), §3.1.

    Misleads where types have few values: a model that knows the type alone has an exact match of 1 / values of it, one
    that knows the subject alone of 1 / types. Refuted by shuffled facts.

    Args:
        predicted: Token ids.
        subject: The subject of each prompt.
        type_: The type of attribute that is to be recalled.
        facts: The token id of each subject's value of each type; no two types share a value.
    """
    equal = predicted[:, None, None] == facts
    rows = torch.arange(len(predicted))
    matches = {
        "exact": equal[rows, type_, subject],
        "type": equal[rows, type_].any(1),
        "subject": equal[rows, :, subject].any(1),
        "attribute": equal.flatten(1).any(1),
    }
    return {name: right.double() for name, right in matches.items()}


def group_cosines(
    representations: Float[Tensor, "group context d"], *, with_itself: bool = True
) -> Float[Tensor, "group group"]:
    """Returns the mean cosine of the contexts of every two groups, C(l, l') = 1/K² Σ_kk' cos(f_lk, f_l'k'), in [-1, 1].

    Source: Vasudeva et al. (2026), §3.4, whose mean within a group includes k = k', each of which is 1.

    Args:
        representations: K vectors of each group; a vector of zeros has the cosine 0 with all others and itself.
        with_itself: Whether the mean within a group includes a context with itself (printed) or not (needs K >= 2).
    """
    unit = nn.functional.normalize(representations, dim=-1)
    k = unit.shape[1]
    sums = unit.sum(1) @ unit.sum(1).T
    if with_itself:
        return sums / k**2
    if k < 2:
        raise ValueError("one context a group: without pairs of a context with itself, give at least 2")
    own = unit.square().sum((1, 2))
    return sums.sub(own.diag()) / torch.eye(len(unit), dtype=unit.dtype).mul(-k).add(k**2)


def silhouette(representations: Float[Tensor, "group context d"]) -> Float[Tensor, "group context"]:
    """Returns the silhouette of each context with the cosine distance, in [-1, 1], by scikit-learn.

    Its mean is the clustering strength of Vasudeva et al. (2026), App. B.3; near 0 where groups overlap, whatever they
    are. Refuted by shuffled groups.

    Raises:
        ValueError: Fewer than two groups or two contexts in each.
    """
    groups, k, _ = representations.shape
    if groups < 2 or k < 2:
        raise ValueError(f"{groups} groups of {k} contexts: give at least 2 of each")
    labels = torch.arange(groups).repeat_interleave(k)
    each = silhouette_samples(representations.double().flatten(0, 1).numpy(), labels.numpy(), metric="cosine")
    return torch.from_numpy(each).view(groups, k)
