"""Relations: the key positions that a query position should attend to, and the candidates that they compete with."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from align_circuits.checks import WrongArgument, checked, described

IGNORE = -1
"""The label of a position that is never a key or never a candidate, and the example of a token outside all examples."""


@dataclass(frozen=True, eq=False)
class Relation:
    """For each query position, its keys among its candidates.

    Nothing is stored per pair of positions. Every position has one key label and one candidate label; every row has
    the two values that its keys and candidates are labelled with, and `expand` compares them for the chosen rows. A
    relation over 1,300 tokens costs two integers per token, not 1,300.

    A row may have several keys (a symbol seen in many examples) but never none: tasks leave such rows out.
    """

    name: str
    """Such as `"align_query"`."""
    target: Int[Tensor, " row"]
    """The row of `Prompts.targets` that each row belongs to."""
    prompt: Int[Tensor, " row"]
    """The prompt of each row, counted from 0."""
    query: Int[Tensor, " row"]
    """The query position."""
    key_value: Int[Tensor, " row"]
    """The label of the row's keys."""
    candidate_value: Int[Tensor, " row"]
    """The label of the row's candidates."""
    key_label: Int[Tensor, "prompt pos"]
    """The key label of each position; `IGNORE` where it is never a key."""
    candidate_label: Int[Tensor, "prompt pos"]
    """The candidate label of each position; `IGNORE` where it is never a candidate."""
    keys_before_query: bool = False
    """Whether keys lie strictly before the query. Candidates always lie at or before it."""
    exchangeable: bool = False
    """Whether any other candidate could as well have been a key, as among the names of a sentence: the permutation
    test then draws other candidates as keys, at random."""

    def __post_init__(self):
        rows = {len(column) for column in (self.target, self.prompt, self.query, self.key_value, self.candidate_value)}
        if len(rows) != 1:
            raise ValueError(
                f"relation {self.name!r}: its columns have different lengths {sorted(rows)}; give one entry per row"
            )
        if self.key_label.shape != self.candidate_label.shape:
            raise ValueError(
                f"relation {self.name!r}: key labels {tuple(self.key_label.shape)} and candidate labels "
                f"{tuple(self.candidate_label.shape)} differ in shape; both are [prompt, pos]"
            )

    @classmethod
    @checked
    def from_pairs(
        cls,
        pairs: Sequence[tuple[int, int | str, Sequence[int | str]]],
        *,
        prompts: Any,
        name: str = "own",
        candidates: Sequence[int | str] | Sequence[Sequence[int | str] | None] | None = None,
    ) -> "Relation":
        """Makes a relation of queries and their keys.

        Args:
            pairs: For each row its prompt, its query and its keys. Positions are columns of `prompts.tokens`, or the
                names of `prompts.positions`.
            prompts: The `Prompts` that it is for.
            name: Its name, as `Prompts.with_relations` will use it.
            candidates: What the keys compete with, the keys included: one list for all rows, or one for each row; by
                default every token up to the query. Those behind a query do not count for it.

        Returns:
            The relation. A row belongs to the target that is predicted at its query, or to the prompt's first target.

        Raises:
            KeyError: The name of a position that the prompts do not have.
            ValueError: A prompt or a column that is not there, candidates for some rows only, a row without keys, keys
                behind their query or not among its candidates, a prompt without targets, or rows of one prompt whose
                keys overlap without being alike, which labels cannot express: make two relations of them.

        >>> from align_circuits.prompts.prompts import Prompts
        >>> prompts = Prompts.from_tokens([[5, 7, 9, 5, 7]])
        >>> Relation.from_pairs([(0, 3, [0])], prompts=prompts, candidates=[0, 1]).keys_of(0)
        [0]
        """
        _check_prompts(prompts)
        names = [f"prompt {index}" for index in range(len(prompts))]
        return cls.of_named(pairs, prompts, name, candidates, names)

    @classmethod
    def of_named(
        cls,
        pairs: Sequence[tuple[int, int | str, Sequence[int | str]]],
        prompts: Any,
        name: str,
        candidates: Sequence[Any] | None,
        names: Sequence[str],
    ) -> "Relation":
        """Does what `from_pairs` does; `names` is how messages call each prompt, such as `"line 3"` of a file."""
        if not pairs:
            raise ValueError(f"relation {name!r}: no pairs; give (prompt, query, keys) for each row")
        if candidates is None or (len(candidates) and isinstance(candidates[0], int | str | np.integer)):
            of_rows: Sequence[Any] = [candidates] * len(pairs)
        else:
            of_rows = candidates
        if len(of_rows) != len(pairs):
            raise ValueError(f"relation {name!r}: {len(of_rows)} sets of candidates for {len(pairs)} rows")
        if len({among is None for among in of_rows}) > 1:
            raise ValueError(f"relation {name!r}: candidates for some rows only; give them for all rows or for none")
        rows = [_Row(name, prompts, pair, among, names) for pair, among in zip(pairs, of_rows, strict=True)]
        rows.sort(key=lambda row: (row.prompt, row.query))
        key_label, key_value = _labels(rows, [row.keys for row in rows], prompts.mask)
        candidate_label, candidate_value = _labels(rows, [row.candidates for row in rows], prompts.mask)
        columns = ("target", "prompt", "query")
        target, prompt, query = (torch.tensor([getattr(row, column) for row in rows]) for column in columns)
        relation = cls(name, target, prompt, query, key_value, candidate_value, key_label, candidate_label)
        # Candidates that are named compete for one role in the text; all tokens up to the query do not.
        return replace(relation, exchangeable=of_rows[0] is not None)

    @classmethod
    @checked
    def from_positions(
        cls, query: str, *keys: str, prompts: Any, name: str = "own", candidates: Sequence[str] | None = None
    ) -> "Relation":
        """Makes a relation between named positions of all prompts, such as from `"END"` to `"IO"`.

        Args:
            query: The name of the query's position.
            *keys: The names of its keys' positions.
            prompts: The `Prompts` that it is for.
            name: Its name.
            candidates: The names of the positions that the keys compete with, the keys included; by default every
                token up to the query.

        Raises:
            KeyError: A position that the prompts do not have.
            ValueError: As `from_pairs` does.
        """
        _check_prompts(prompts)
        pairs = [(prompt, query, keys) for prompt in range(len(prompts))]
        return cls.from_pairs(pairs, prompts=prompts, name=name, candidates=candidates)

    def __len__(self) -> int:
        return len(self.query)

    def __repr__(self) -> str:
        return f"Relation({self.name!r}, rows={len(self)}, prompts={self.key_label.shape[0]})"

    def expand(
        self, rows: Int[Tensor, " chosen"] | None = None
    ) -> tuple[Bool[Tensor, "chosen pos"], Bool[Tensor, "chosen pos"]]:
        """Returns the keys and the candidates of `rows` (all of them by default) as masks; keys are candidates."""
        rows = torch.arange(len(self), device=self.query.device) if rows is None else rows
        prompt = self.prompt[rows]
        pos = torch.arange(self.key_label.shape[1], device=self.query.device)
        query = self.query[rows, None]
        candidates = (pos <= query) & (self.candidate_label[prompt] == self.candidate_value[rows, None])
        keys = candidates & (self.key_label[prompt] == self.key_value[rows, None])
        return (keys & (pos < query) if self.keys_before_query else keys), candidates

    def keys_of(self, row: int) -> list[int]:
        """Returns the key positions of one row."""
        keys, _ = self.expand(torch.tensor([row], device=self.query.device))
        return keys[0].nonzero()[:, 0].tolist()

    def select(self, keep: Bool[Tensor, " row"] | Int[Tensor, " new"]) -> "Relation":
        """Returns the relation with only the rows where `keep` is true, or with the given rows in that order."""
        columns = ("target", "prompt", "query", "key_value", "candidate_value")
        return replace(self, **{column: getattr(self, column)[keep] for column in columns})

    def to(self, device: torch.device | str) -> "Relation":
        """Returns the relation with its tensors on `device`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


class _Row:
    """One row of a relation of pairs, with its positions as columns."""

    def __init__(
        self,
        name: str,
        prompts: Any,
        pair: tuple[int, int | str, Sequence[int | str]],
        candidates: Any,
        names: Sequence[str],
    ) -> None:
        prompt, query, keys = pair
        self.prompt = _number(prompt, f"relation {name!r}, prompt")
        if not 0 <= self.prompt < len(prompts):
            raise ValueError(
                f"relation {name!r}, prompt {self.prompt}: there are {len(prompts)} prompts, counted from 0"
            )
        origin = self.origin = f"relation {name!r}, {names[self.prompt]}"
        if isinstance(keys, int | str) or not len(keys):
            raise ValueError(f"{origin}: keys={keys!r}; give a list of positions, at least one")
        self.query = self._column(origin, prompts, query)
        self.keys = sorted({self._column(origin, prompts, key) for key in keys})
        if self.keys[-1] > self.query:
            late = next(key for key in keys if self._column(origin, prompts, key) > self.query)
            raise ValueError(f"{origin}: key {late!r} lies behind its query {query!r}, which cannot see it")
        if candidates is None:
            self.candidates = [int(column) for column in prompts.mask[self.prompt].nonzero()[:, 0]]
        else:
            self.candidates = sorted({self._column(origin, prompts, candidate) for candidate in candidates})
        self.candidates = [column for column in self.candidates if column <= self.query]
        if missing := sorted(set(self.keys) - set(self.candidates)):
            raise ValueError(f"{origin}: key {missing[0]} is not among the candidates; add it to them")
        targets = prompts.targets[prompts.targets["prompt"] == self.prompt]
        if targets.empty:
            raise ValueError(f"{origin}: the prompt has no target; leave it out with prompts[...]")
        at_query = targets.index[targets["query_pos"] == self.query]
        self.target = int((at_query if len(at_query) else targets.index)[0])

    def _column(self, where: str, prompts: Any, place: int | str) -> int:
        try:
            named = isinstance(place, str)
            column = int(prompts.columns_of(place)[self.prompt]) if named else _number(place, f"{where}: column")
        except KeyError as error:
            raise KeyError(f"{where}: {error.args[0]}") from None
        if not (0 <= column < prompts.mask.shape[1] and bool(prompts.mask[self.prompt, column])):
            raise ValueError(f"{where}: no token at column {column} of prompts.tokens")
        return column


def _number(given: Any, what: str) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise WrongArgument(f"{what} is {given!r}: give a whole number") from None


def _labels(
    rows: Sequence[_Row], sets: Sequence[Sequence[int]], mask: Bool[Tensor, "prompt pos"]
) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, " row"]]:
    """Labels positions so that the set of each row is what carries the row's label up to its query.

    Rows are ordered by query. A row may continue the set of an earlier one: a later query sees more of the same label.
    """
    label = torch.full(mask.shape, IGNORE)
    values: list[int] = []
    for row, columns in zip(rows, sets, strict=True):
        labels = {int(label[row.prompt, column]) for column in columns} - {IGNORE}
        value = labels.pop() if labels else int(label[row.prompt].max()) + 1
        label[row.prompt, columns] = value
        values.append(value)
    for row, columns, value in zip(rows, sets, values, strict=True):
        # Only now, since a later row may have put its label at further positions.
        seen = (label[row.prompt, : row.query + 1] == value).nonzero()[:, 0].tolist()
        if seen != list(columns):
            raise ValueError(
                f"{row.origin}: the keys or candidates of query {row.query} overlap with "
                "those of another query without being alike: make two relations of them"
            )
    return label, torch.tensor(values)


def previous_token(ids: Int[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"], **rows: Tensor) -> Relation:
    """The position directly before the query, among all positions up to it.

    The relation of a previous-token head (Olsson et al., 2022, "In-context Learning and Induction Heads"). The first
    token of a prompt has no key and is left out.

    Args:
        ids: Token ids; only their shape matters for this relation.
        mask: True at real tokens.
        **rows: `target`, `prompt` and `query`, one entry per row.
    """
    pos = torch.arange(ids.shape[1], device=ids.device).expand_as(mask)
    before = rows["query"] - 1
    relation = _among_all("previous", mask, torch.where(mask, pos, IGNORE), before, rows)
    # Clamped, since -1 would look at the last column.
    return relation.select((before >= 0) & mask[rows["prompt"], before.clamp(min=0)])


def duplicate_token(ids: Int[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"], **rows: Tensor) -> Relation:
    """Earlier positions that hold the query's own token, among all positions up to and with the query.

    The relation of a duplicate-token head (Wang et al., 2022, "Interpretability in the Wild"). Queries whose token
    occurs for the first time have no key and are left out. Arguments as for `previous_token`.
    """
    key_value = ids[rows["prompt"], rows["query"]]
    # Keys strictly before the query, which has its own token too.
    relation = _among_all("duplicate", mask, torch.where(mask, ids, IGNORE), key_value, rows, keys_before_query=True)
    return relation.select(_seen_before(ids, mask)[rows["prompt"], rows["query"]])


def induction(ids: Int[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"], **rows: Tensor) -> Relation:
    """Positions directly after an earlier occurrence of the query's token, among all positions up to the query.

    The relation of an induction head (Olsson et al., 2022). Queries whose token occurs for the first time have no key
    and are left out. Arguments as for `previous_token`.
    """
    key_value = ids[rows["prompt"], rows["query"]]
    key_label = torch.full_like(ids, IGNORE)
    # A position is labelled with the token before it: where that equals the query's token, it followed an earlier copy.
    key_label[:, 1:] = torch.where(mask[:, 1:] & mask[:, :-1], ids[:, :-1], IGNORE)
    relation = _among_all("induction", mask, key_label, key_value, rows)
    return relation.select(_seen_before(ids, mask)[rows["prompt"], rows["query"]])


OF_TOKENS = {"induction": induction, "previous": previous_token, "duplicate": duplicate_token}
"""The relations that need nothing but token ids. Their p-values and what reports say of them go by these names."""


def unlike_its_name(
    name: str, relation: Relation, ids: Shaped[Tensor, "prompt pos *vector"], mask: Bool[Tensor, "prompt pos"]
) -> int:
    """Returns how many rows of a relation have a key that is none in the relation of `OF_TOKENS` with that name."""
    if name not in OF_TOKENS or (ids.is_floating_point() and name != "previous"):  # vectors are no tokens
        return 0
    keys, rows = relation.expand()[0], torch.arange(len(relation), device=ids.device)
    of_name = OF_TOKENS[name](ids, mask, target=rows, prompt=relation.prompt, query=relation.query)
    among = torch.zeros_like(keys)
    among[of_name.target] = of_name.expand()[0]
    return int((keys & ~among).any(1).sum())


def first_token(ids: Int[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"], **rows: Tensor) -> Relation:
    """The first token of the prompt, among all positions up to the query.

    The relation of an attention sink (Xiao et al., 2023, "Efficient Streaming Language Models with Attention Sinks").
    The first token itself can attend to nothing else and is left out. Arguments as for `previous_token`.
    """
    start = mask.int().argmax(1)
    pos = torch.arange(ids.shape[1], device=ids.device)
    key_label = torch.where(pos == start[:, None], 0, IGNORE)
    relation = _among_all("first_token", mask, key_label, torch.zeros_like(rows["query"]), rows)
    return relation.select(rows["query"] > start[rows["prompt"]])


def with_candidates(relation: Relation, also: Bool[Tensor, "prompt pos"]) -> Relation:
    """Returns the relation with more candidates: its own and, up to the query, the positions where `also` is true.

    The notebook released with Agarwal & Sarawagi (2025) lets earlier output tokens of the test example compete for the
    alignment's argmax:
    `also = (prompts.token_kinds == TokenKind.OUTPUT) & (prompts.example == prompts.example.amax(1, keepdim=True))`.

    Raises:
        ValueError: The rows have different candidates, so that it is unclear which of them to widen.
    """
    values = relation.candidate_value.unique()
    if len(values) > 1:
        raise ValueError(
            f"the rows of relation {relation.name!r} have {len(values)} sets of candidates: select the rows of one set"
        )
    label = relation.candidate_label
    return replace(relation, candidate_label=torch.where(also, values.to(label), label)) if len(values) else relation


def _among_all(
    name: str,
    mask: Bool[Tensor, "prompt pos"],
    key_label: Int[Tensor, "prompt pos"],
    key_value: Int[Tensor, " row"],
    rows: dict[str, Tensor],
    *,
    keys_before_query: bool = False,
) -> Relation:
    """A relation whose candidates are all real tokens."""
    return Relation(
        name,
        target=rows["target"],
        prompt=rows["prompt"],
        query=rows["query"],
        key_value=key_value,
        candidate_value=torch.zeros_like(key_value),
        key_label=key_label,
        candidate_label=torch.where(mask, 0, IGNORE),
        keys_before_query=keys_before_query,
    )


def _seen_before(ids: Int[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"]) -> Bool[Tensor, "prompt pos"]:
    """Whether the token at each position occurs at an earlier real position of its prompt."""
    # One integer per token, its id above its position: sorted, equal ids stand side by side in order of position, so a
    # token equals the one before it in this order exactly if its id occurred earlier. Padding gets ids of its own.
    length = ids.shape[1]
    most, bits = int(ids.max()), length.bit_length()
    narrow = (most + 1 + length) << bits < 2**31  # numpy sorts 32 bits twenty times as fast as torch sorts anything
    pos = torch.arange(length, device=ids.device, dtype=torch.int32 if narrow else torch.int64)
    keys = torch.where(mask, ids.to(pos.dtype), most + 1 + pos)
    keys = np.sort((keys << bits | pos).cpu().numpy(), axis=1)
    repeats = torch.zeros_like(mask)
    repeats[:, 1:] = torch.from_numpy(keys[:, 1:] >> bits == keys[:, :-1] >> bits)
    return torch.zeros_like(mask).scatter(1, torch.from_numpy(keys & (2**bits - 1)).to(ids.device).long(), repeats)


def _check_prompts(prompts: Any) -> None:
    """Raises unless these are prompts; the class itself cannot be imported here, since it holds relations."""
    if not all(hasattr(prompts, name) for name in ("mask", "targets", "positions")):
        raise WrongArgument(f"prompts is {described(prompts)}: give the Prompts that the relation is for")
