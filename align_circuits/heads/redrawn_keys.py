"""What is redrawn in permutation tests of scores: alignments, distances, prompts, labels, ranks or positions of keys.

Each test is given the attention at the rows of its relation, and keeps of it what its redraws need.
"""

from collections.abc import Sequence
from itertools import permutations
from math import comb, factorial, perm, prod

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.attention_metrics import hit_rate
from align_circuits.heads.renamed_tokens import share_at_least_first
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import IGNORE, Relation

REDRAWS = 9999
"""How often the keys are redrawn where not all redraws can be listed."""

ALIGNMENTS = ("align_query", "align_key")
"""The relations whose keys are an alignment, the same in all prompts."""

_LISTED_ORDERS = 5040
"""Up to 7! orders of input places are all listed."""

_FEWEST_DISTANCES = 20
"""With fewer no p-value is at most .05."""

_LEAST_SHARE = 1e-12
"""Of a row's attention: less counts as this much, since nothing has no logarithm."""

_FEWEST_APART = 5
"""Of fewer prompts a redraw says too little: 1/24 is the smallest p-value of four."""

_TURNS = 20
"""How often means of rows, tokens and places are taken out of log attention."""


class RedrawnKeys:
    """A permutation test of one relation: the score of every head with the true keys and with redrawn ones."""

    def __init__(self, relation: Relation, layers: int, heads: int):
        self.relation, self.shape = relation, (layers, heads)
        self.prompt, self.query = relation.prompt, relation.query

    def add(self, rows: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        """Adds the attention at some rows of the relation; a row that comes again counts once."""
        raise NotImplementedError

    def p_values(self, generator: np.random.Generator) -> Float[ndarray, "layer head"]:
        """Returns the p-value of each head."""
        raise NotImplementedError

    @property
    def smallest(self) -> float:
        """The smallest p-value, if all redraws were listed."""
        raise NotImplementedError


class _Alignments(RedrawnKeys):
    """Redraws which input place each phrase translates."""

    def __init__(self, relation: Relation, prompts: Prompts, layers: int, heads: int):
        super().__init__(relation, layers, heads)
        self.places = int(relation.key_label.max()) + 1
        self.phrase = prompts.column("phrase")[relation.target]
        key_value = torch.full((int(self.phrase.max()) + 1,), -1)
        key_value[self.phrase] = relation.key_value
        if not bool((relation.key_value == key_value[self.phrase]).all()):
            raise ValueError(
                f"relation {relation.name!r}: the alignment differs between prompts; test prompts of one task at a time"
            )
        self.aligned = key_value.numpy()
        # which place each row attends to most, ties shared
        self.hits = torch.zeros(layers, len(relation), heads, self.places)

    @property
    def smallest(self) -> float:
        return 1 / factorial(self.places)

    def add(self, rows: Tensor, layer: int, pattern: Tensor) -> None:
        _, candidates = self.relation.expand(rows)
        labels = self.relation.key_label[self.relation.prompt[rows]]
        hits = [hit_rate(pattern, candidates & (labels == place), candidates) for place in range(self.places)]
        self.hits[layer, rows] = torch.stack(hits, -1).float()  # models may be float64

    def p_values(self, generator: np.random.Generator) -> Float[ndarray, "layer head"]:
        # How often a head attends to a place at a phrase decides its score under every alignment: the mean over
        # phrases of one entry of this matrix each.
        phrases = self.phrase.unique().tolist()  # a relation may have no row of some phrase
        confusion = np.stack([self.hits[:, self.phrase == phrase].mean(1).numpy() for phrase in phrases], -2)
        if factorial(self.places) <= _LISTED_ORDERS:
            orders = np.array(list(permutations(range(self.places))))  # the first is the identity
        else:
            drawn = generator.permuted(np.tile(np.arange(self.places), (REDRAWS, 1)), axis=1)
            orders = np.concatenate([np.arange(self.places)[None], drawn])
        redrawn = orders[:, self.aligned[phrases]]
        scores = confusion[..., np.arange(len(phrases)), redrawn].mean(-1)  # [layer head order]
        return share_at_least_first(scores)


class Distances(RedrawnKeys):
    """Redraws how far back the keys lie.

    The score of a distance is how far its attention exceeds the larger one of both neighbouring distances, the query's
    own position among them, as a share of both. A head that merely prefers late tokens attends most of all to the query
    itself, and would pass if attention alone were compared. Where every query is a token that the layout repeats, such
    as a marker, it cannot be compared: there a distance must exceed the next one back, and what it would get if
    attention fell off by the same factor as between the next two.

    A head that prefers letters to the marker of the marked style attends most to those distances where letters stand,
    of which one token back is one. So tokens that the layout repeats do not count, and no distance is drawn where few
    others stand. Since rows then differ between distances, a row counts as what it exceeds its own mean by.

    Rows may count by a weight for each head; then they may lie anywhere, and of a head those distances are drawn that
    a quarter of its weight reaches. The first tokens of a prompt have few others to attend to, of which each gets much,
    and only small distances reach there. So that these do not vary more than others, attention is then a multiple of
    what each token would get if all got the same.
    """

    def __init__(
        self,
        relation: Relation,
        prompts: Prompts,
        layers: int,
        heads: int,
        weights: Float[Tensor, "layer row head"] | None = None,
    ):
        super().__init__(relation, layers, heads)
        self.weights = weights
        start = prompts.mask.int().argmax(1)[relation.prompt]
        reach = relation.query - start
        varied = torch.from_numpy(~_repeated_by_layout(prompts))
        if not bool(varied[(relation.query - 1).clamp(min=0)][reach > 0].any()):  # one token back there is nothing else
            varied = torch.ones_like(varied)
        self.varied, self.reach = varied, reach
        self.own = bool(varied[relation.query].any())
        # the query itself comes first, then one token back, the true distance
        if weights is not None:
            self.distances = torch.arange(int(reach.max()) + 1)
        else:
            # As far back as all rows reach; as half of them do where that would establish nothing, since the first of
            # many targets have hardly anything before them.
            most = int(reach.float().quantile(0.5, interpolation="lower"))
            self.distances = torch.arange(1 + (int(reach.min()) if reach.min() >= _FEWEST_DISTANCES else most))
            counts = self._counted(torch.arange(len(relation))).sum(0)
            drawn = 1 + (2 * counts[1:] >= counts[1:2]).nonzero()[:, 0]
            self.distances = torch.cat([torch.zeros(1, dtype=torch.long), drawn])
        # summed over rows
        self.excess, self.counts = torch.zeros(2, layers, heads, len(self.distances))
        self.mean, self.rows = torch.zeros(2, layers, heads, 1)
        self.seen = torch.zeros(layers, len(relation), dtype=torch.bool)

    def _counted(self, rows: Int[Tensor, " row"]) -> Bool[Tensor, "row distance"]:
        """Whether a token that counts lies as far back from the query of each row."""
        at = self.relation.query[rows, None] - self.distances
        return self.varied[at.clamp(min=0)] & (self.distances <= self.reach[rows, None])

    @property
    def smallest(self) -> float:
        """One over the number of distances."""
        return 1 / max(1, len(self.distances) - (1 if self.own else 3))

    def add(self, rows: Tensor, layer: int, pattern: Tensor) -> None:
        """Adds the attention at some rows; a row that comes again counts once."""
        new = ~self.seen[layer, rows]
        rows, pattern = rows[new], pattern[new]
        back = (self.relation.query[rows, None] - self.distances).clamp(min=0)
        attention = pattern.gather(2, back[:, None].expand(-1, pattern.shape[1], -1)).float()
        counted = self._counted(rows)[:, None]
        weights = torch.ones(()) if self.weights is None else self.weights[layer, rows, :, None]
        others = attention[..., 1:] * counted[..., 1:]
        among = counted[..., 1:].sum(-1, keepdim=True).clamp(min=1)
        mean = others.sum(-1, keepdim=True) / among
        if self.weights is not None:
            attention, mean = attention * among, mean * among
        self.excess[layer] += (weights * (attention - mean) * counted).sum(0)
        self.counts[layer] += (weights * counted).sum(0)
        self.mean[layer] += (weights * mean).sum(0)
        self.rows[layer] += (weights * torch.ones(len(rows), 1, 1)).sum(0)
        self.seen[layer, rows] = True

    def smallest_of_heads(self) -> Float[ndarray, "layer head"]:
        """Returns one over the number of distances that are drawn of each head."""
        drawn = self._drawn()
        return 1 / drawn.sum(-1).clamp(min=1).numpy()

    def _drawn(self) -> Bool[Tensor, "layer head distance"]:
        """Which distances a quarter of a head's weight reaches; without weights all of them."""
        back = self.counts[..., 1:] if self.own else self.counts[..., 1:-2]
        return 4 * back >= back[..., :1]

    def p_values(self, generator: np.random.Generator) -> Float[ndarray, "layer head"]:  # noqa: ARG002 - all are listed
        """Returns the p-value of every head; no redraw is random."""
        # Rows differ between distances, so the mean of all rows is added to each.
        level = self.mean / torch.where(self.rows > 0, self.rows, 1)
        attention = self.excess / torch.where(self.counts > 0, self.counts, 1) + level
        if self.own:
            tested, beyond = attention[..., 1:], torch.cat([attention[..., 2:], torch.zeros(*self.shape, 1)], -1)
            beside = torch.maximum(attention[..., :-1], beyond)
        else:
            tested, next_back, after = attention[..., 1:-2], attention[..., 2:-1], attention[..., 3:]
            fallen = next_back**2 / after.clamp(min=torch.finfo(after.dtype).tiny)
            beside = torch.maximum(next_back, fallen.clamp(max=1))
        # The mean over distances in the denominator keeps tiny attention far back from large shares.
        scores = (tested - beside) / (tested + beside + level).clamp(min=torch.finfo(tested.dtype).tiny)
        if not tested.shape[-1]:
            return np.ones(self.shape)
        drawn = self._drawn()
        # What is not drawn counts as often as it is left out: never.
        # Attention differs by 1e-7 between batch sizes, and its ratio to a tiny sum by more: many heads' scores are 0.
        among = share_at_least_first(scores.where(drawn, -torch.inf).numpy(), near=1e-5) * drawn.shape[-1]
        return among / drawn.sum(-1).numpy()


class _OtherPrompts(RedrawnKeys):
    """Redraws the keys of a prompt among those of all prompts."""

    def __init__(self, relation: Relation, prompts: Prompts, layers: int, heads: int):
        super().__init__(relation, layers, heads)
        self.n = len(prompts)
        # Rows of the relation alone would not do: a redraw reads a prompt's attention at the targets of another. So
        # there is a row for each prompt and each target of the layout, which all prompts share.
        at_targets = torch.equal(prompts.column("query_pos")[relation.target], relation.query)
        if at_targets and len(relation.target.unique()) == len(relation):
            per_prompt, query, place = len(prompts.targets) / self.n, prompts.column("query_pos"), relation.target
        else:  # its queries lie elsewhere: then its own rows are the layout
            per_prompt, query, place = len(relation) / self.n, relation.query, torch.arange(len(relation))
            if not torch.equal(relation.prompt, place // max(int(per_prompt), 1)):
                raise ValueError(f"relation {relation.name!r}: give each prompt equally many rows, in order")
        query = query.view(self.n, -1) if per_prompt.is_integer() else None
        if query is None or not bool((query == query[:1]).all()):
            raise ValueError(
                f"relation {relation.name!r}: the prompts have their targets at different positions: test prompts of "
                "one layout, or name the relation's candidates"
            )
        self.prompt = torch.arange(self.n).repeat_interleave(int(per_prompt))
        self.query = query.flatten()
        keys, candidates = relation.expand()
        self.keys = torch.zeros(int(per_prompt), self.n, keys.shape[1])
        self.keys[place % int(per_prompt), relation.prompt] = keys.float()
        # Attention is a share of that to the candidates: what a head gives to other tokens, such as letters of the test
        # example that it happens to prefer, would scale a prompt's attention to its own and to others' keys alike.
        self.candidates = torch.zeros(int(per_prompt), keys.shape[1], dtype=torch.bool)
        self.candidates.index_put_((place % int(per_prompt),), candidates, accumulate=True)
        # Where another prompt has its keys, a shorter one has padding, to which nothing can attend.
        self.length = prompts.mask.sum(1).numpy()
        # of each prompt to the keys of each, summed over targets
        self.attention = torch.zeros(layers, heads, self.n, self.n)
        self.seen = torch.zeros(layers, len(self.prompt), dtype=torch.bool)
        self.labels = _Labels.of(relation, self.candidates[place % int(per_prompt)], place, (layers, heads))
        self.preferences, self.apart = None, np.arange(self.n)
        first = torch.from_numpy(np.unique(relation.prompt.numpy(), return_index=True)[1])
        if len(first) == self.n and torch.equal(keys, keys[first][relation.prompt]):
            # Prompts whose keys hold the same token are no independent evidence against a head that prefers some.
            held = [prompts.tokens[prompt][of_prompt] for prompt, of_prompt in enumerate(keys[first])]
            apart = _without_common_tokens(held)
            if 4 * len(torch.cat(held).unique()) <= len(torch.cat(held)) or len(apart) < _FEWEST_APART:
                self.preferences = _Preferences(relation.select(first), prompts, (layers, heads))
            else:
                self.apart = apart

    @property
    def smallest(self) -> float:
        keys = self.keys.numpy().swapaxes(0, 1)
        keys, lengths = keys[self.apart], self.length[self.apart]
        by_prompts = 1 / prod(_distinct_orders(keys[lengths == length]) for length in np.unique(lengths))
        return max(by_prompts, self.labels.smallest) if self.labels else by_prompts

    def add(self, rows: Tensor, layer: int, pattern: Tensor) -> None:
        new = ~self.seen[layer, rows]
        rows, pattern = rows[new], pattern[new].float()
        target = rows % self.keys.shape[0]
        for place in target.unique():
            at_place = target == place
            among = pattern[at_place] * self.candidates[place]
            shares = among / among.sum(-1, keepdim=True).clamp(min=torch.finfo(among.dtype).tiny)
            attention = torch.einsum("phk,gk->hpg", shares, self.keys[place])
            self.attention[layer].index_add_(1, self.prompt[rows[at_place]], attention)
            if self.labels:
                self.labels.add(rows[at_place], layer, shares)
            if self.preferences:
                self.preferences.add(layer, self.prompt[rows[at_place]], self.query[rows[at_place]], shares)
        self.seen[layer, rows] = True

    def p_values(self, generator: np.random.Generator) -> Float[ndarray, "layer head"]:
        p = self._among_prompts(self.attention, generator)
        if self.labels:
            p = np.maximum(p, self.labels.p_values(generator))
        if self.preferences:
            p = np.maximum(p, self._among_prompts(self.preferences.beyond() @ self.keys.sum(0).T, generator))
        if len(self.apart) < self.n:
            p = np.maximum(p, self._among_prompts(self.attention, generator, self.apart))
        return p

    def _among_prompts(
        self,
        attention: Float[Tensor, "layer head prompt keys"],
        generator: np.random.Generator,
        among: Int[ndarray, " some"] | slice = slice(None),
    ) -> Float[ndarray, "layer head"]:
        attention, lengths = attention[:, :, among][..., among], self.length[among]
        orders = np.tile(np.arange(len(lengths)), (REDRAWS + 1, 1))
        for length in np.unique(lengths):
            alike = np.flatnonzero(lengths == length)
            orders[1:, alike] = generator.permuted(np.tile(alike, (REDRAWS, 1)), axis=1)
        index = np.arange(len(lengths)) * len(lengths) + orders  # [order prompt], in the flattened matrix
        scores = np.stack([matrix.ravel()[index].mean(1) for matrix in attention.flatten(0, 1).double().numpy()])
        return share_at_least_first(scores.reshape(*self.shape, -1))


def _without_common_tokens(held: Sequence[Tensor]) -> Int[ndarray, " some"]:
    """Returns which prompts to take, from the first on, so that no token is held by the keys of two."""
    seen: set[int] = set()
    apart = []
    for prompt, tokens in enumerate(held):
        if seen.isdisjoint(tokens.tolist()):
            apart.append(prompt)
            seen.update(tokens.tolist())
    return np.array(apart)


class _Labels:
    """Redraws which of the labels that a prompt's candidates bear are those of its keys, such as symbols.

    The keys of one label hold the same tokens, so that a head which happens to prefer them attends to all of them or to
    none. Another prompt's keys, at other tokens here, vary less than that: among these alone p-values are too small.
    """

    def __init__(self, relation: Relation, row: Int[Tensor, " place"], shape: tuple[int, int]):
        self.row = row  # of each place of the layout, `IGNORE` where its keys are missing
        labels = torch.where(relation.candidate_label == IGNORE, IGNORE, relation.key_label)
        self.borne = [of_prompt[of_prompt != IGNORE].unique().tolist() for of_prompt in labels]
        width = max(map(len, self.borne))
        self.bears = torch.zeros(len(labels), width, labels.shape[1])
        for prompt, borne in enumerate(self.borne):
            for number, label in enumerate(borne):
                self.bears[prompt, number] = labels[prompt] == label
        self.prompt = relation.prompt
        pairs, self.own = torch.stack([relation.prompt, relation.key_value], 1).unique(dim=0, return_inverse=True)
        # Each prompt's labels of keys, numbered: a prompt has few of them among the labels that its candidates bear.
        self.own -= torch.searchsorted(pairs[:, 0].contiguous(), relation.prompt)
        self.gold = np.zeros((len(labels), int(self.own.max()) + 1), dtype=int)
        for prompt, own, value in zip(
            relation.prompt.tolist(), self.own.tolist(), relation.key_value.tolist(), strict=True
        ):
            self.gold[prompt, own] = self.borne[prompt].index(value)
        # from the targets whose keys bear a prompt's label of keys, to the candidates that bear a label
        self.attention = torch.zeros(*shape, *self.gold.shape, width)

    @classmethod
    def of(
        cls, relation: Relation, candidates: Bool[Tensor, "row pos"], place: Int[Tensor, " row"], shape: tuple[int, int]
    ) -> "_Labels | None":
        """Returns the test if a prompt's rows share their candidates, and each of these could be a key by its label."""
        among, is_key = relation.candidate_label != IGNORE, relation.key_label != IGNORE
        shared = bool((candidates == among[relation.prompt]).all())
        if not shared or not bool((is_key | ~among).all()):
            return None
        row = torch.full((int(place.max()) + 1,), IGNORE)
        row[place] = torch.arange(len(place))
        return cls(relation, row, shape)

    @property
    def smallest(self) -> float:
        own_counts = [len(self.own[self.prompt == prompt].unique()) for prompt in range(len(self.borne))]
        return 1 / prod(perm(len(borne), used) for borne, used in zip(self.borne, own_counts, strict=True))

    def add(self, place: Int[Tensor, " row"], layer: int, shares: Float[Tensor, "row head pos"]) -> None:
        row = self.row[place.clamp(max=len(self.row) - 1)]
        row[place >= len(self.row)] = IGNORE
        row, shares = row[row != IGNORE], shares[row != IGNORE]
        prompt = self.prompt[row]
        to_labels = torch.einsum("rhk,rlk->rhl", shares, self.bears[prompt])
        self.attention[layer].permute(1, 2, 0, 3).index_put_((prompt, self.own[row]), to_labels, accumulate=True)

    def p_values(self, generator: np.random.Generator) -> Float[ndarray, "layer head"]:
        width = self.attention.shape[-1]
        orders = np.tile(np.arange(width), (REDRAWS + 1, len(self.borne), 1))
        for prompt, borne in enumerate(self.borne):
            drawn = np.tile(np.arange(len(borne)), (REDRAWS, 1))
            orders[1:, prompt, : len(borne)] = generator.permuted(drawn, axis=1)
        attention = self.attention.flatten(0, 1).flatten(1).double().numpy()
        scores = []
        for start in range(0, len(orders), 1000):
            redrawn = np.take_along_axis(orders[start : start + 1000], self.gold[None], axis=2)
            scores.append(attention @ np.eye(width)[redrawn].reshape(-1, attention.shape[1]).T)
        shape = self.attention.shape[:2]
        return share_at_least_first(np.concatenate(scores, -1).reshape(*shape, -1))


class _Preferences:
    """What attention exceeds a sum of preferences by: for tokens, and for places.

    Where keys hold few different tokens, a head that prefers these, and some places, attends to keys more than to
    another prompt's keys, at which other tokens stand here.
    """

    def __init__(self, relation: Relation, prompts: Prompts, shape: tuple[int, int]):
        _, self.candidates = relation.expand()
        self.query = relation.query
        self.token = prompts.tokens.unique(return_inverse=True)[1]
        self.shares = torch.zeros(*shape, *self.token.shape)

    def add(
        self, layer: int, prompt: Int[Tensor, " row"], query: Int[Tensor, " row"], shares: Float[Tensor, "row head pos"]
    ) -> None:
        """Keeps the attention of rows that ask where the relation does; prompts may have other targets, too."""
        own = self.query[prompt] == query
        self.shares[layer, :, prompt[own]] = shares[own].transpose(0, 1)

    def beyond(self) -> Float[Tensor, "layer head prompt pos"]:
        """Returns what is left of log attention without the means of rows, tokens and places, fitted in turn."""
        count = self.candidates.double()
        left = self.shares.double().clamp(min=_LEAST_SHARE).log() * count
        tokens = torch.zeros(int(self.token.max()) + 1, count.numel(), dtype=count.dtype)
        tokens[self.token.flatten(), torch.arange(count.numel())] = count.flatten()
        for _ in range(_TURNS):
            left = (left - left.sum(-1, keepdim=True) / count.sum(-1, keepdim=True)) * count
            mean = left.flatten(2) @ tokens.T / tokens.sum(1).clamp(min=1)
            left = (left - mean[..., self.token]) * count
            left = (left - left.sum(-2, keepdim=True) / count.sum(0).clamp(min=1)) * count
        return left.float()


class _Ranks(RedrawnKeys):
    """Redraws which of a row's candidates are keys, counted from the first, by the share of their attention."""

    def __init__(self, relation: Relation, prompts: Prompts, layers: int, heads: int):  # noqa: ARG002 - one interface
        super().__init__(relation, layers, heads)
        self.keys = _by_rank(relation)
        each, counts = relation.prompt.unique_consecutive(return_counts=True)
        if len(counts.unique()) != 1 or len(each.unique()) != len(each):
            raise ValueError(
                f"relation {relation.name!r}: give each prompt equally many rows, side by side, so that prompts compare"
            )
        self.attention = torch.zeros(layers, len(relation), heads, self.keys.shape[1])

    @property
    def smallest(self) -> float:
        if fixed_rank(self.relation):
            return 1 / comb(self.keys.shape[1], int(self.keys[0].sum()))
        return 1 / _distinct_orders(self.keys.float().numpy().reshape(len(self.prompt.unique()), -1))

    def add(self, rows: Tensor, layer: int, pattern: Tensor) -> None:
        _, candidates = self.relation.expand(rows)
        columns = candidates.nonzero()[:, 1].view(len(rows), 1, -1).expand(-1, pattern.shape[1], -1)
        self.attention[layer, rows] = torch.nn.functional.normalize(pattern.gather(2, columns).float(), p=1, dim=-1)

    def p_values(self, generator: np.random.Generator) -> Float[ndarray, "layer head"]:
        ranks = self.keys.shape[1]
        attention = self.attention.double().numpy()
        if fixed_rank(self.relation):
            # Whatever is done to the rows, their keys stay where they are: only other ranks, the same for all rows, are
            # a null that keeps a head's bias for the first or the last candidate.
            mean = attention.mean(1)
            orders = [np.arange(ranks), *(generator.permutation(ranks) for _ in range(REDRAWS))]
            keys = self.keys[0].numpy()[np.stack(orders)]
            return share_at_least_first(mean @ keys.T.astype(float))
        scores = np.zeros((*self.shape, REDRAWS + 1))
        # Rows of one prompt stay together, since they are no independent observations.
        prompts = len(self.prompt.unique())
        permuted = generator.permuted(np.tile(np.arange(prompts), (REDRAWS, 1)), axis=1)
        orders = np.concatenate([np.arange(prompts)[None], permuted])
        by_rank = self.keys.numpy().astype(float).reshape(prompts, -1)
        attention = rearrange(attention, "layer (prompt row) head rank -> layer head (prompt row rank)", prompt=prompts)
        for start in range(0, len(orders), 1000):
            redrawn = by_rank[orders[start : start + 1000]].reshape(-1, by_rank.size)
            scores[..., start : start + 1000] = attention @ redrawn.T / len(self.keys)
        return share_at_least_first(scores)


class _Positions(RedrawnKeys):
    """Redraws which positions are keys, at each target of a prompt, the same for all prompts.

    Positions are exchangeable where what stands there differs. A token that the layout repeats, such as a separator, is
    attended to alike wherever it stands: a head that leaves all separators out would seem to look for all other tokens.
    So no key is drawn there.
    """

    def __init__(self, relation: Relation, prompts: Prompts, layers: int, heads: int):
        super().__init__(relation, layers, heads)
        keys, candidates = relation.expand()
        self.targets = len(relation) // len(prompts)
        self.keys = keys[: self.targets].numpy()
        self.candidates = candidates[: self.targets].numpy() & (~_repeated_by_layout(prompts) | self.keys)
        self.attention = torch.zeros(layers, self.targets, heads, keys.shape[1])  # summed over prompts
        self.seen = torch.zeros(layers, len(relation), dtype=torch.bool)

    @property
    def smallest(self) -> float:
        sets = zip(self.keys, self.candidates, strict=True)
        return 1 / prod(comb(int(candidates.sum()), int(keys[candidates].sum())) for keys, candidates in sets)

    def add(self, rows: Tensor, layer: int, pattern: Tensor) -> None:
        new = ~self.seen[layer, rows]
        self.attention[layer].index_add_(0, rows[new] % self.targets, pattern[new].float())
        self.seen[layer, rows] = True

    def p_values(self, generator: np.random.Generator) -> Float[ndarray, "layer head"]:
        by_target = self.attention.double().numpy()
        scores = np.zeros((*self.shape, REDRAWS + 1))
        for target, (keys, candidates) in enumerate(zip(self.keys, self.candidates, strict=True)):
            true = keys[candidates]
            # One redraw holds for all prompts, since all share their keys: drawn apart, positions would average out.
            drawn = generator.permuted(np.tile(true, (REDRAWS, 1)), axis=1)
            scores += by_target[:, target][..., candidates] @ np.concatenate([true[None], drawn]).T.astype(float)
        return share_at_least_first(scores)


def redraws_of(name: str, prompts: Prompts, layers: int, heads: int) -> RedrawnKeys:
    """Returns the test of a relation of some prompts, for a model of so many layers and heads."""
    relation = prompts.relations[name]
    if name in ALIGNMENTS:
        return _Alignments(relation, prompts, layers, heads)
    if name == "previous":
        return Distances(relation, prompts, layers, heads)
    if relation.exchangeable:
        return _Ranks(relation, prompts, layers, heads)
    return (_Positions if in_one_place(relation, prompts) else _OtherPrompts)(relation, prompts, layers, heads)


def _distinct_orders(keys: Float[ndarray, "prompt ..."]) -> int:
    """In how many ways prompts can exchange their keys, where those with the same keys exchange nothing."""
    _, alike = np.unique(keys.reshape(len(keys), -1), axis=0, return_counts=True)
    return factorial(len(keys)) // prod(map(factorial, alike.tolist()))


def _repeated_by_layout(prompts: Prompts) -> Bool[ndarray, " pos"]:
    """Where every prompt has the same token, which it has at another such position too."""
    fixed = (prompts.tokens == prompts.tokens[:1]).all(0)
    tokens, counts = prompts.tokens[0, fixed].unique(return_counts=True)
    return (fixed & torch.isin(prompts.tokens[0], tokens[counts > 1])).numpy()


def in_one_place(relation: Relation, prompts: Prompts) -> bool:
    """Returns whether queries, keys and candidates lie at the same positions in all prompts."""
    targets = len(relation) // max(len(prompts), 1)
    if not targets or not torch.equal(relation.prompt, torch.arange(len(prompts)).repeat_interleave(targets)):
        return False
    by_prompt = (of_rows.unflatten(0, (-1, targets)) for of_rows in (relation.query, *relation.expand()))
    return all(bool((positions == positions[:1]).all()) for positions in by_prompt)


def fixed_rank(relation: Relation) -> bool:
    """Returns whether the keys of a relation with named candidates are always the same ones, counted from the first.

    Where rows have different numbers of candidates they are not.
    """
    if len(relation.expand()[1].sum(1).unique()) != 1:
        return False
    keys = _by_rank(relation)
    return bool((keys == keys[:1]).all())


def _by_rank(relation: Relation) -> Bool[Tensor, "row candidate"]:
    """Which candidates of each row are keys; rows with different numbers of candidates are refused."""
    keys, candidates = relation.expand()
    counts = candidates.sum(1).unique()
    if len(counts) != 1:
        raise ValueError(
            f"relation {relation.name!r}: the rows have {int(counts.min())} to {int(counts.max())} candidates; give "
            "each row equally many, so that they can be compared"
        )
    return keys[candidates].view(len(relation), -1)


def fixed_offset(relation: Relation) -> float:
    """Returns the share of a relation's rows that have a key at the best single distance back.

    1 where all keys lie equally far back, as under a monotonic alignment with phrases of one letter: there attention
    cannot tell an aligner from a head that attends a fixed distance back.
    """
    keys, _ = relation.expand()
    row, position = keys.nonzero().unbind(1)
    back = relation.query[row] - position
    pairs = torch.stack([back, row]).unique(dim=1)
    return float(pairs[0].bincount().max()) / len(relation) if len(relation) else 0.0
