"""A permutation test of token equality.

In prompts of one layout the keys of `induction` and `duplicate` never move, so they cannot be redrawn among prompts. In
others the keys of `induction` are of one kind, such as answers, which a head may prefer; and from some tokens a head
may attend to others by chance, themselves among them, as `duplicate` asks. Here tokens are redrawn: one of the context
is renamed throughout, and another is put at the query. All else stays, so the null keeps a head's positional bias, and
its preference for some tokens and pairs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from math import factorial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.prompts.relations import Relation
from align_circuits.run.alike_prompts import Rows, forward_alike
from align_circuits.run.forward_pass import OnPattern
from align_circuits.run.options import RunOptions

EQUALITIES = ("induction", "duplicate")
"""The relations whose keys depend on which tokens equal the query's."""

_MOSTLY_FIXED = 0.5
"""The share of keys that two prompts have in common from which on tokens are redrawn, not keys."""

_NAMES = 7
"""Tokens that stand for each other: 7! orders."""

_QUERIES = 8
"""Queries that are tested; each takes seven runs of one prompt, and seven of its last token alone in each."""

_STRUCTURE = (TokenKind.PAD, TokenKind.BOS, TokenKind.COLON, TokenKind.SEPARATOR)
"""Tokens that are never renamed."""


def redraws_tokens(prompts: Prompts, name: str, *, edited: bool = False) -> bool:
    """Returns whether a relation is tested by renaming: one of `EQUALITIES`, if seven tokens can be, or keys stay.

    Edits do not fit renamed prompts. Where some are made, `induction` is tested by its keys if these move and if
    queries are seven tokens or more; fewer, such as line breaks, may be what a head knows.
    """
    relation = prompts.relations[name]
    if name not in EQUALITIES or relation.exchangeable or prompts.inputs.is_floating_point():
        return False
    queries = prompts.tokens[relation.prompt, relation.query].unique()
    if len(_names(prompts)) >= _NAMES and (not edited or len(queries) < _NAMES or name == "duplicate"):
        return True
    keys, _ = relation.expand()
    both = total = 0.0
    for query in relation.query.unique():
        share = keys[relation.query == query].double().mean(0)  # of the prompts that have a key there
        both, total = both + float((share**2).sum()), total + float(share.sum())
    return both > _MOSTLY_FIXED * total


def smallest_by_renaming(prompts: Prompts) -> float:
    """Returns the smallest p-value of `renamed_p_values`."""
    return 1 / factorial(min(_NAMES, len(_names(prompts))))


def renamed_p_values(
    model: HookedModel, prompts: Prompts, names: Sequence[str], *, seed: int, options: RunOptions
) -> dict[str, Float[ndarray, "layer head"]]:
    """Returns the p-value of every head for `induction`, `duplicate` or both, by redrawing tokens.

    Seven tokens of the prompts stand for each other at each of 8 queries: in context i the query's token and token i
    are exchanged throughout, then token j is put at the query. With A[i, j] the mean attention to the keys, the score
    is the mean of A[i, i]. If equality does not matter, any order of the columns is as likely: the p-value is the share
    of all orders that score at least as high. The smallest value is 1/5,040; with fewer than seven tokens to rename,
    one over the factorial of their number.

    The tokens are the same at all queries. Were they drawn for each, a token would meet its copy at several queries and
    another token at one, and what a head makes of a pair by chance would average out everywhere but in A[i, i].

    For `induction`, the attention to tokens that are not exchanged counts, and its share on the keys. Else a head that
    avoids copies of its own token would pass, since what it takes from them goes to the keys as well. So a head that
    sees nothing but the tokens themselves, as in the first layer, has p = 1.

    Misleads where heads know one token alone, such as a marker: they do not pass.
    """
    # Queries of both, whichever is asked for, so that company changes no p-value; relations of your own may have none.
    both = [name for name in EQUALITIES if name in prompts.relations and redraws_tokens(prompts, name)]
    if not _common_queries([prompts.relations[name] for name in both]):
        alone = partial(renamed_p_values, model, seed=seed, options=options)
        each = {name: replace(prompts, relations={name: prompts.relations[name]}) for name in names}
        return {name: alone(each[name], [name])[name] for name in names}
    chosen = _Queries(prompts, [prompts.relations[name] for name in both], np.random.default_rng(seed))
    shape = model.cfg.n_layers, model.cfg.n_heads, len(chosen.prompts) * chosen.names
    attention = {name: torch.zeros(shape, dtype=torch.float64) for name in both}

    def add(token: int, rows: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        pattern, query = pattern.cpu().double(), rows // chosen.names
        kept, rows = chosen.kept[query].double(), rows * chosen.names + token
        for name, keys in zip(both, chosen.keys, strict=True):
            if name == "induction":
                on_keys, all_kept = (
                    torch.einsum("rhk,rk->hr", pattern, columns) for columns in (keys[query] * kept, kept)
                )
                attention[name][layer][:, rows] = torch.where(all_kept > 0, on_keys / all_kept, 0.0)
            else:
                attention[name][layer][:, rows] = torch.einsum("rhk,rk->hr", pattern, keys[query].double())

    forward_alike(model, [chosen.rows(token, partial(add, token)) for token in range(chosen.names)], options=options)
    orders = np.array(list(permutations(range(chosen.names))))  # the first is the identity
    p = {}
    for name in names:
        by_token = attention[name].unflatten(-1, (-1, chosen.names, chosen.names)).mean(2).numpy()
        p[name] = share_at_least_first(by_token[..., np.arange(chosen.names), orders].mean(-1))
    return p


class _Queries:
    """Prompts that end in a query, in every renamed context, and the tokens that are put at the query in each."""

    prompts: Prompts
    """By query and context."""
    tokens: Int[Tensor, " token"]
    """The tokens that stand for each other."""
    keys: list[Bool[Tensor, "query pos"]]
    """Of each relation, at each query."""
    kept: Bool[Tensor, "query pos"]
    """Where neither padding nor a token that is exchanged is."""
    names: int
    """How many tokens stand for each other."""

    def __init__(self, prompts: Prompts, relations: Sequence[Relation], generator: np.random.Generator):
        common = _common_queries(relations)
        drawn = [common[index] for index in sorted(generator.permutation(len(common))[:_QUERIES])]
        length = max(int(prompts.mask[prompt, : query + 1].sum()) for prompt, query in drawn)
        known = generator.permutation(_names(prompts).numpy())
        self.names = min(_NAMES, len(known))
        self.keys = [torch.zeros(len(drawn), length, dtype=torch.bool) for _ in relations]
        self.kept = torch.zeros(len(drawn), length, dtype=torch.bool)
        contexts, at_keys = [], []
        for row, (prompt, query) in enumerate(drawn):
            columns = slice(query + 1 - int(prompts.mask[prompt, : query + 1].sum()), query + 1)
            contexts.append(prompts.inputs[prompt, columns])
            for of_relation, rel in zip(self.keys, relations, strict=True):
                row_of_query = ((rel.prompt == prompt) & (rel.query == query)).nonzero()[:1, 0]
                keys = rel.expand(row_of_query)[0][0, columns]
                of_relation[row, -len(keys) :] = keys
                at_keys.append(contexts[-1][keys].numpy())
        # Those that are seldom keys first, so that keys are left to attend to.
        uses = (known[:, None] == np.concatenate(at_keys)).sum(1)
        self.tokens = torch.from_numpy(known[uses.argsort(stable=True)][: self.names])
        texts = []
        for row, tokens in enumerate(contexts):
            self.kept[row, -len(tokens) :] = ~torch.isin(tokens, self.tokens) & (tokens != tokens[-1])
            texts += [_exchanged(tokens, new).tolist() for new in self.tokens]
        self.prompts = Prompts.from_tokens(texts)

    def rows(self, token: int, on_pattern: OnPattern) -> Rows:
        """Returns what `forward_alike` takes: the attention from the last token, with a token in its place."""
        inputs = self.prompts.inputs.clone()
        inputs[:, -1] = self.tokens[token]
        prompt = torch.arange(len(inputs))
        return Rows(
            replace(self.prompts, inputs=inputs), prompt, torch.full_like(prompt, inputs.shape[1] - 1), on_pattern
        )


def _common_queries(relations: Sequence[Relation]) -> list[tuple[int, int]]:
    """The prompts and positions that are queries of all these relations."""
    queries_of = [set(zip(rel.prompt.tolist(), rel.query.tolist(), strict=True)) for rel in relations]
    return sorted(set.intersection(*queries_of))


def _names(prompts: Prompts) -> Int[Tensor, " token"]:
    """The tokens that can stand for each other."""
    return prompts.inputs[prompts.mask & ~torch.isin(prompts.token_kinds, torch.tensor(_STRUCTURE))].unique()


def _exchanged(tokens: Int[Tensor, " pos"], new: Int[Tensor, ""]) -> Int[Tensor, " pos"]:
    """Exchanges the last token with another one throughout."""
    last = tokens[-1]
    return torch.where(tokens == last, new, torch.where(tokens == new, last, tokens))


def share_at_least_first(scores: Float[ndarray, "layer head redraw"], near: float = 0) -> Float[ndarray, "layer head"]:
    """The share of redraws that score at least as high as the first, the true keys, up to rounding and up to `near`."""
    true = scores[..., :1]
    # Sums in another order differ in their last bits; a tie that counts as lower would make p too small.
    return (scores >= true - 1e-6 * np.abs(true) - near).mean(-1)
