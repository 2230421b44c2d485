"""Prompts with their labels: tokens, the role of each, the targets to predict, and relations between positions."""

import hashlib
import html
import json
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from align_circuits.checks import Tokenizer, checked
from align_circuits.jobs.files import is_path, replacing
from align_circuits.jobs.similar_names import did_you_mean
from align_circuits.prompts import relations as rel
from align_circuits.prompts.jsonl import places, read_jsonl
from align_circuits.prompts.relations import IGNORE, Relation
from align_circuits.prompts.texts import (
    Place,
    TokenizedText,
    check_aligned,
    groups_of_equal,
    ids_of,
    in_characters,
    joined,
    text_of_token,
    tokenize,
    warn_of_equal,
    warn_of_far_pairs,
)
from align_circuits.prompts.token_html import Mark, draw_tokens, several

TARGET_COLUMNS = ("prompt", "query_pos", "target_pos", "token", "phrase", "offset", "kind")
"""The columns that every table of targets has, in order."""

_ALIGNMENT = ("lookup", "align_query")
"""The relations of which the gold alignment is drawn."""

SAME_INPUTS = 8
"""Letters at the start of `Prompts.digest` that are of inputs and mask alone."""

WRONG = "wrong"
"""The column of targets with the token that the metric `"logit_diff"` compares with, where there is one."""

KINDS = ("first", "later")
"""`"first"`: the first token of a phrase, which needs alignment; `"later"`: the others, which may do without."""

MOST_IDS = 2**31
"""More than any vocabulary has; tokenizers count in 32 bits."""

REFERENCES = ("chance", "memoryless", "history", "oracle")
"""The reference predictors whose accuracies targets may carry, one column each: a uniform guess, two ceilings without
alignment (`"memoryless"` knows the automata, not which symbol is next; `"history"` also rules symbols out by the output
so far), and exact lookup in the examples."""


class TokenKind(IntEnum):
    """What a token is in its prompt."""

    PAD = 0
    BOS = 1
    INPUT = 2
    """A symbol of an input sequence x; an item, a subject."""
    OUTPUT = 3
    """A letter of an output sequence y; a label, an attribute."""
    COLON = 4
    """Between input and output."""
    SEPARATOR = 5
    """Between examples."""
    MARKER = 6
    """Before a symbol or letter in the marked style."""
    ALIGNED = 7
    """An input symbol written before its phrase in the pre-aligned style."""
    TEXT = 8
    """Any other token."""
    RELATION = 9
    """A token that announces the type of the attribute to come."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of prompts with targets and relations, on the CPU.

    `prompts[3]`, `prompts[:8]` and `prompts[[1, 4]]` are again `Prompts`; `len` counts prompts.
    """

    inputs: Int[Tensor, "prompt pos"] | Float[Tensor, "prompt pos d_in"]
    """Token ids, padded on the left; or vectors, for models without a vocabulary."""
    mask: Bool[Tensor, "prompt pos"]
    """True at real tokens."""
    token_kinds: Int[Tensor, "prompt pos"]
    """The `TokenKind` of each token."""
    example: Int[Tensor, "prompt pos"]
    """The in-context example of each token, from 0; the test example is the highest; `relations.IGNORE` outside all."""
    targets: pd.DataFrame
    """One row for each predicted token: `prompt`, `query_pos` (the position that predicts it), `target_pos` (its own
    position), `token`, `phrase` and `offset` (its index in the phrase), `kind`; then reference accuracies in [0, 1],
    if the task has them. Rows are ordered by prompt, then by position."""
    relations: Mapping[str, Relation]
    """By name, which positions a query position should attend to."""
    answer_tokens: Int[Tensor, " letter"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """The token ids that the columns of `correct` stand for."""
    correct: Bool[Tensor, "target letter"] | None = None
    """Which of `answer_tokens` are correct for each target; None if only the target's own token is."""
    own_correct: Bool[Tensor, "target letter"] | None = None
    """Of corrupted prompts, whose targets are those of the clean ones: which of `answer_tokens` are correct in the
    corrupted prompt itself. A row without any is a target whose answer is not known there."""
    token_strings: Mapping[int, str] = field(default_factory=dict)
    """The text of every token id that occurs."""
    tokenizer_hash: str | None = None
    """A hash of the vocabulary that the ids belong to; None if it is unknown."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The configuration and the seed that made the prompts, as JSON."""
    latent: Mapping[str, Tensor] = field(default_factory=dict)
    """The latent variables that the task drew, prompt by prompt (first dimension); `corrupt` reads them."""
    positions: Mapping[str, Int[Tensor, " prompt"]] = field(default_factory=dict)
    """Named positions: one column of each prompt, such as `"END"`, which predicts the answer."""
    group: Int[Tensor, " prompt"] | None = None
    """Which prompts are related (one template, one source): related prompts stay in the same half of a split, and
    intervals over prompts are over groups. None if all are independent."""

    def __post_init__(self):
        parts = {name: getattr(self, name) for name in (*_TENSORS, *_OPTIONAL)}
        for prefix in ("latent", "positions"):
            parts |= {f"{prefix}[{name!r}]": part for name, part in getattr(self, prefix).items()}
        for name, part in parts.items():
            if not (isinstance(part, Tensor) or (part is None and name in _OPTIONAL)):
                raise TypeError(f"{name} is a {type(part).__name__}: give a tensor, as torch.as_tensor makes of a list")
        shape = tuple(self.inputs.shape[:2])
        for name in ("mask", "token_kinds", "example"):
            if (size := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(f"{name} has shape {size}, but the inputs are {shape}: give one entry for each token")
        sizes = {f"positions[{name!r}]": columns for name, columns in self.positions.items()}
        for name, columns in (sizes | ({} if self.group is None else {"group": self.group})).items():
            if len(columns) != len(self):
                raise ValueError(f"{name} has {len(columns)} entries for {len(self)} prompts: give one for each")
        for name, columns in self.positions.items():
            marked = (torch.arange(shape[1]) == torch.as_tensor(columns)[:, None]) & self.mask
            if len(nowhere := (~marked.any(1)).nonzero()):
                raise ValueError(
                    f"positions[{name!r}] of prompt {int(nowhere[0])} is {int(columns[int(nowhere[0])])}, which holds "
                    "no token: give columns of prompts.tokens, where shorter prompts begin with padding"
                )
        if missing := [column for column in TARGET_COLUMNS if column not in getattr(self.targets, "columns", ())]:
            raise ValueError(f"the targets lack {', '.join(missing)}: give a DataFrame of {', '.join(TARGET_COLUMNS)}")
        for name, relation in self.relations.items():
            if len(relation) and int(relation.target.max()) >= len(self.targets):
                raise ValueError(
                    f"relation {name!r} has rows of targets up to {int(relation.target.max())}, but there are "
                    f"{len(self.targets)}: take targets and relations of the same prompts"
                )
        for name in ("correct", "own_correct"):
            mask = getattr(self, name)
            if mask is not None and mask.shape != (len(self.targets), len(self.answer_tokens)):
                raise ValueError(
                    f"{name} has shape {tuple(mask.shape)}; it needs a row for each of the {len(self.targets)} targets "
                    f"and a column for each of the {len(self.answer_tokens)} answer_tokens"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        name = self.task.get("name", "tokens")
        shape = f"{len(self)} x {self.inputs.shape[1]} {name}"
        return f"Prompts({shape}, targets={len(self.targets)}, relations={sorted(self.relations)})"

    def __str__(self) -> str:
        if self.inputs.is_floating_point() or not len(self):
            return repr(self)
        return f"{self!r}{', the first of which is' * (len(self) > 1)}:\n{self.text[0]}"

    def _repr_html_(self) -> str:
        if self.inputs.is_floating_point():  # vectors have no text
            return html.escape(repr(self))
        drawings = [self.to_html(index) for index in range(min(len(self), 3))]
        return "<hr>".join(drawings) + (
            "" if len(self) <= 3 else f"<div>… and {several(len(self) - 3, 'more prompt')}</div>"
        )

    @property
    def of_one_length(self) -> bool:
        """Whether all prompts have equally many tokens, padded or not: a part of longer prompts keeps their columns."""
        return len(self.mask.sum(1).unique()) <= 1

    @property
    def is_aligned(self) -> bool:
        """Whether the gold alignment of the prompts is known, which `to_html` then draws."""
        return bool({*_ALIGNMENT} & self.relations.keys())

    @property
    def drawn_relation(self) -> str | None:
        """The relation that `to_html` draws unless told: the one of your own added last; None beside an alignment."""
        added = [name for name in self.relations if name not in rel.OF_TOKENS]
        return added[-1] if added and not self.is_aligned else None

    @checked
    def to_html(
        self,
        index: int = 0,
        examples: int | None = None,
        relation: str | None = None,
        *,
        beside: "Prompts | None" = None,
    ) -> str:
        """Returns one prompt as HTML, one line for each example, with its gold alignment or with any relation.

        The gold alignment: each phrase to predict (framed), the input symbol that it is aligned with (framed), and the
        tokens of earlier examples that show its translation share a number and a colour. A relation: each query
        (framed) and its keys do; a position of several rows shows the last.

        Args:
            index: Which prompt.
            examples: How many of the last examples to draw; all of them by default.
            relation: Which relation to draw; by default the alignment, if the prompts have one, or else the relation
                that was added last.
            beside: Other prompts of the same shape, such as the corrupted partners: tokens that differ from theirs are
                underlined.

        Raises:
            KeyError: A relation that the prompts do not have.
            ValueError: Prompts beside these of another shape.
        """
        prompt, relation = self[index], relation or self.drawn_relation
        if beside is not None and beside.inputs.shape != self.inputs.shape:
            given, own = (" x ".join(map(str, prompts.inputs.shape)) for prompts in (beside, self))
            raise ValueError(f"prompts of shape {given} beside {own}: give partners of equally many tokens")
        other = prompt if beside is None else beside[index]
        differs = (prompt.tokens != other.tokens)[0].tolist()
        aligned = {name: relation_shown for name, relation_shown in prompt.relations.items() if name in _ALIGNMENT}
        if relation is not None and relation not in prompt.relations:
            raise KeyError(f"no relation {relation!r} in these prompts; they have {', '.join(prompt.relations)}")
        group, framed = prompt._rows_of(prompt.relations[relation]) if relation else prompt._alignment(aligned)
        lines: dict[int, list[Mark]] = {}
        first = 0 if examples is None else int(prompt.example.max()) - examples + 1
        for pos, text in enumerate(prompt.texts_at(0)):
            # Tokens outside all examples, such as BOS, have the example -1: they stand in the first line.
            if prompt.mask[0, pos] and (line := max(0, int(prompt.example[0, pos]))) >= first:
                lines.setdefault(line, []).append(Mark(text, group.get(pos), pos in framed, differs=differs[pos]))
        return draw_tokens(list(lines.values()))

    def _alignment(self, aligned: Mapping[str, Relation]) -> tuple[dict[int, int], set[int]]:
        """Of a single prompt, the phrase of each position that belongs to one, and the framed positions."""
        group: dict[int, Any] = {}
        framed: set[int] = set()
        phrase = dict(enumerate(self.targets["phrase"]))
        for name, relation in aligned.items():
            for row, target in enumerate(relation.target.tolist()):
                keys = relation.keys_of(row)
                group |= dict.fromkeys(keys, phrase[target])
                framed |= set(keys) if name == "align_query" else set()
        if aligned:
            group |= dict(zip(self.targets["target_pos"], self.targets["phrase"], strict=True))
            framed |= set(self.targets["target_pos"])
        return group, framed

    @staticmethod
    def _rows_of(relation: Relation) -> tuple[dict[int, int], set[int]]:
        """Of a single prompt, the row of each position that is a key or a query of one, and the queries."""
        group: dict[int, int] = {}
        for row, query in enumerate(relation.query.tolist()):
            group |= dict.fromkeys([*relation.keys_of(row), query], row)
        return group, set(relation.query.tolist())

    def string_of(self, token: int) -> str:
        """Returns the text of a token id, or the id itself as `<5>` if the text is unknown."""
        return self.token_strings.get(token, f"<{token}>")

    @property
    def tokens(self) -> Int[Tensor, "prompt pos"]:
        """The token ids.

        Raises:
            ValueError: The inputs are vectors.
        """
        if self.inputs.is_floating_point():
            raise ValueError("these prompts are vectors, not tokens: run them on a model that takes vectors")
        return self.inputs

    @property
    def text(self) -> list[str]:
        """Each prompt as text, without padding."""
        rows = zip(self.tokens, self.mask, strict=True)
        return [joined([self.string_of(token) for token in row[mask].tolist()]) for row, mask in rows]

    @property
    def token_text(self) -> list[list[str]]:
        """The text of each real token of each prompt; of one that is part of a character, that character: `é⟨1/2⟩`."""
        return [
            [text for text, real in zip(self.texts_at(i), row, strict=True) if real] for i, row in enumerate(self.mask)
        ]

    def texts_at(self, row: int) -> list[str]:
        """Returns the text at each position of a prompt, padding included."""
        return in_characters(list(map(self.string_of, self.tokens[row].tolist())))

    @cached_property
    def digest(self) -> str:
        """A hash of inputs, mask, targets and groups, the same for equal prompts, whose tables may be paired.

        Its first half is of inputs and mask alone.
        """
        sha = hashlib.sha256()
        # Without relations and kinds of tokens: tables of the same tokens and targets may be paired, however labelled.
        for tensor in (self.inputs, self.mask):
            sha.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        of_inputs = sha.hexdigest()[:SAME_INPUTS]
        sha.update(self.targets[["prompt", "query_pos", "token"]].to_numpy(dtype=np.int64).tobytes())
        if self.group is not None:
            sha.update(self.group.numpy().tobytes())
        return of_inputs + sha.hexdigest()[: 16 - SAME_INPUTS]

    @property
    def provenance(self) -> dict[str, Any]:
        """The `data` of the provenance of a table measured on these prompts: task, digest, and how many groups."""
        groups = {} if self.group is None else {"groups": self.n_groups}
        return {"task": dict(self.task), "digest": self.digest, **groups}

    @property
    def n_groups(self) -> int:
        """How many groups of related prompts there are, over which intervals are; without `group` how many prompts."""
        return len(self) if self.group is None else len(self.group.unique())

    def column(self, name: str) -> Tensor:
        """Returns a numeric column of `targets` as a tensor."""
        # A copy, since torch warns of memory that pandas lets nobody write to.
        return torch.from_numpy(self.targets[name].to_numpy(copy=True))

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "Prompts":
        if isinstance(index, slice):
            chosen = torch.tensor(range(len(self))[index], dtype=torch.long)
        else:
            wanted = f"prompts[{index!r}]: give a number, a slice, a mask, or several numbers"
            try:
                chosen = torch.as_tensor(index)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(wanted) from error
            if chosen.is_floating_point() and len(chosen.reshape(-1)):  # an empty list would be of floats
                raise TypeError(wanted)
            if chosen.dtype == torch.bool and chosen.shape != (len(self),):
                shape = " x ".join(map(str, chosen.shape)) or "no"
                raise IndexError(f"a mask of {shape} entries for {len(self)} prompts: give one entry per prompt")
            chosen = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen.long().reshape(-1)
            if len(wrong := chosen[(chosen < -len(self)) | (chosen >= len(self))]):
                raise IndexError(f"no prompt {int(wrong[0])}: there are {len(self)}, counted from 0")
            chosen = chosen.where(chosen >= 0, chosen + len(self))
        if len(chosen.unique()) != len(chosen):
            raise ValueError("the same prompt twice: give each index once, so that intervals count each prompt once")
        return self._take(chosen)

    def batches(self, size: int) -> Iterator["Prompts"]:
        """Yields the prompts in order, `size` at a time.

        Raises:
            ValueError: A size below 1.
        """
        if size < 1:
            raise ValueError(f"batches of {size} prompts: give at least 1")
        for start in range(0, len(self), size):
            yield self._take(torch.arange(start, min(start + size, len(self))))

    def _take(self, chosen: Int[Tensor, " new"]) -> "Prompts":
        new_index = torch.full((len(self),), IGNORE)  # of each old prompt; IGNORE if it is not chosen
        new_index[chosen] = torch.arange(len(chosen))
        new_prompt = new_index[self.column("prompt")]
        # Targets must ascend by prompt, in the new order; stable, so that those of one prompt stay in order of
        # position.
        old_rows = torch.argsort(torch.where(new_prompt == IGNORE, len(self), new_prompt), stable=True)
        old_rows = old_rows[: int((new_prompt != IGNORE).sum())]
        kept = self._with_targets(old_rows)

        def moved(relation: Relation) -> Relation:
            labels = {name: getattr(relation, name)[chosen] for name in ("key_label", "candidate_label")}
            prompt = new_index[relation.prompt]
            order = prompt.argsort(stable=True)  # rows ascend by prompt, as targets do
            return replace(relation.select(order), prompt=prompt[order], **labels)

        return replace(
            kept,
            **{name: getattr(self, name)[chosen] for name in ("inputs", "mask", "token_kinds", "example")},
            targets=kept.targets.assign(prompt=new_prompt[old_rows].numpy()),
            relations={name: moved(relation) for name, relation in kept.relations.items()},
            latent={name: value[chosen] for name, value in self.latent.items()},
            positions={name: value[chosen] for name, value in self.positions.items()},
            group=None if self.group is None else self.group[chosen],
        )

    def _with_targets(self, old_rows: Int[Tensor, " new"]) -> "Prompts":
        """The prompts with these rows of the targets, in this order, and the rows of relations that belong to them."""
        new_row = torch.full((len(self.targets),), IGNORE)
        new_row[old_rows] = torch.arange(len(old_rows))
        relations = {name: old.select(new_row[old.target] != IGNORE) for name, old in self.relations.items()}
        return replace(
            self,
            targets=self.targets.iloc[old_rows.numpy()].reset_index(drop=True),
            correct=None if self.correct is None else self.correct[old_rows],
            own_correct=None if self.own_correct is None else self.own_correct[old_rows],
            relations={name: replace(old, target=new_row[old.target]) for name, old in relations.items()},
        )

    def mask_of(self, positions: str | Sequence[str]) -> Bool[Tensor, "prompt pos"]:
        """Returns where named positions lie, as a mask.

        Raises:
            KeyError: A name that the prompts do not have.
        """
        mask = torch.zeros_like(self.mask)
        for name in [positions] if isinstance(positions, str) else positions:
            mask[torch.arange(len(self)), self.columns_of(name)] = True
        return mask

    def columns_of(self, position: str) -> Int[Tensor, " prompt"]:
        """Returns the column of a named position in each prompt.

        Raises:
            KeyError: A name that the prompts do not have.
        """
        if position not in self.positions:
            known = ", ".join(map(repr, self.positions)) or "none"
            meant = did_you_mean(position, self.positions)
            raise KeyError(f"no position {position!r} in these prompts: {meant}they have {known}")
        return self.positions[position]

    @checked
    def select_targets(
        self, keep: str | Sequence[bool] | Bool[Tensor, " target"] | Callable[[pd.DataFrame], Any]
    ) -> "Prompts":
        """Returns the prompts with some of their targets, and with the rows of relations that belong to them.

        Args:
            keep: A mask over the targets; a function of their table that returns one; the name of a position, for the
                targets that are predicted there; or a kind of target (`"first"`, `"later"`), unless a position is
                called so.

        Raises:
            KeyError: A name that is neither a kind nor a position.
            ValueError: No target is left, or the mask has another length.

        >>> prompts = Prompts.from_tokens([[5, 7, 9, 5, 7]])
        >>> len(prompts.select_targets(lambda targets: targets["token"] == 7).targets)
        2
        """
        if isinstance(keep, str) and keep in KINDS and keep not in self.positions:
            chosen = (self.targets["kind"] == keep).to_numpy()
        elif isinstance(keep, str):
            columns = self.columns_of(keep)[self.column("prompt")]
            chosen = (self.column("query_pos") == columns).numpy()
        else:
            # A copy, since the caller's function may write into it.
            chosen = np.asarray(keep(self.targets.copy()) if callable(keep) else keep)
        if chosen.shape != (len(self.targets),) or chosen.dtype != bool:
            raise ValueError(
                f"keep has shape {chosen.shape} and type {chosen.dtype}: give a boolean for each of the "
                f"{len(self.targets)} targets"
            )
        if not chosen.any():
            raise ValueError("no target is left: choose at least one")
        return self._with_targets(torch.from_numpy(np.flatnonzero(chosen)))

    @checked
    def with_relations(self, /, **relations: Relation) -> "Prompts":
        """Returns the prompts with more relations, by name; one of the same name is replaced.

        A row without keys is refused, since it would count as a miss. So are other keys than theirs under the names
        `induction`, `previous` and `duplicate`, which have tests of their own.

        Raises:
            ValueError: A relation that was made for other prompts, one that has a row without keys, or one with the
                name of another.
        """
        for name, relation in relations.items():
            if relation.key_label.shape != self.mask.shape or bool((relation.target >= len(self.targets)).any()):
                raise ValueError(
                    f"relation {name!r} is for {tuple(relation.key_label.shape)} tokens and these prompts have "
                    f"{tuple(self.mask.shape)}: make it with Relation.from_pairs(..., prompts=prompts)"
                )
            prompt, keys = relation.prompt, relation.expand()[0]
            unlike = self.column("prompt")[relation.target] != prompt
            unlike |= ~self.mask[prompt, relation.query] | (keys & ~self.mask[prompt]).any(1)
            if unlike.any():
                raise ValueError(
                    f"relation {name!r} was made for other prompts: {int(unlike.sum())} of its {len(unlike)} rows have "
                    "a query or keys in the padding of these, or a target of another prompt; make it for these prompts"
                )
        _check_keys(relations, self.inputs, self.mask)
        named = {name: replace(relation, name=name) for name, relation in relations.items()}
        return replace(self, relations={**self.relations, **named})

    @checked
    def with_token_kinds(self, /, **kinds: TokenKind) -> "Prompts":
        """Returns the prompts with the tokens at named positions of these kinds: means for ablation go by them.

        Args:
            kinds: By the name of a position, its kind.

        Raises:
            KeyError: A named position that the prompts do not have.
        """
        changed = self.token_kinds.clone()
        for name, kind in kinds.items():
            changed[self.mask_of(name)] = kind
        return replace(self, token_kinds=changed)

    @classmethod
    @checked
    def from_tokens(
        cls,
        ids: Int[Tensor, "prompt pos"] | Sequence[Sequence[int]],
        *,
        relations: Mapping[str, Callable[..., Relation]] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> "Prompts":
        """Makes prompts of your own token ids; every token but the first of a prompt is a target.

        The relations `induction`, `previous` and `duplicate` need nothing but the ids. Prompts of different lengths
        are padded on the left. Equal prompts count as independent draws, as of a task: give related ones a `group`.

        Args:
            ids: Token ids, a list of ints for each prompt, or a tensor without padding.
            relations: More relations by name: functions like those of `align_circuits.prompts.relations`, called with
                `ids`, `mask`, `target`, `prompt` and `query`.
            tokenizer: A Hugging Face tokenizer, for the text and for the check that a model has the same one.

        Raises:
            ValueError: No prompts, an empty prompt, numbers that are no ids, or a relation with a row without keys.

        >>> prompts = Prompts.from_tokens([[5, 7, 9, 5, 7]])
        >>> prompts.relations["induction"].keys_of(0)
        [1]
        """
        try:
            # Takes the integers of numpy and torch too, and refuses floats.
            rows = [[operator.index(token) for token in row] for row in ids]
        except TypeError as error:
            raise ValueError("give a list of token ids for each prompt, [[5, 7, 9]] for a single one") from error
        if not rows or any(len(row) < 2 for row in rows):
            raise ValueError(
                "every prompt needs at least two tokens, one to read and one to predict; give lists of token ids"
            )
        if any(token < 0 for row in rows for token in row):
            raise ValueError("a token id is negative: give ids without padding, and lists of different lengths instead")
        largest = max(map(max, rows))
        if largest >= MOST_IDS:
            raise ValueError(f"a token id is {largest:,}, which is in no vocabulary: give ids below {MOST_IDS:,}")
        length = max(map(len, rows))
        # Padding is id 0, which every vocabulary has: the mask hides it.
        inputs = torch.tensor([[0] * (length - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
        predicts = mask[:, 1:] & mask[:, :-1]
        prompt, query = predicts.nonzero(as_tuple=True)
        start = mask.int().argmax(1)
        targets = next_token_targets(prompt, query, inputs[prompt, query + 1], offset=query - start[prompt])
        row_columns = {"target": torch.arange(len(query)), "prompt": prompt, "query": query}
        labelled: dict[str, Relation] = {}
        makers = rel.OF_TOKENS | dict(relations or {})
        for name, label in makers.items():  # one of your own may write into what it is given
            labelled[name] = label(*deepcopy((inputs, mask)), **deepcopy(row_columns))
        _check_keys({name: labelled[name] for name in relations or {}}, inputs, mask)
        return cls(
            inputs,
            mask,
            token_kinds=torch.where(mask, TokenKind.TEXT.value, TokenKind.PAD.value),
            example=torch.where(mask, 0, IGNORE),
            targets=targets,
            relations=labelled,
            token_strings=text_of(tokenizer, inputs[mask].unique()) if tokenizer is not None else {},
            tokenizer_hash=vocabulary_hash(tokenizer) if tokenizer is not None else None,
            task={"name": "tokens"},
        )

    @classmethod
    @checked
    def from_texts(
        cls,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        *,
        answer: Sequence[str] | None = None,
        wrong: Sequence[str] | None = None,
        positions: Mapping[str, Place | Sequence[Place]] | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> "Prompts":
        """Makes prompts of your own texts, with the special tokens that the tokenizer adds by itself.

        Args:
            texts: One text a prompt.
            tokenizer: A Hugging Face tokenizer, such as `model.tokenizer`.
            answer: What is to be predicted behind each text: its tokens are the targets, the first of kind `"first"`.
                It must begin a token of its own, so with most tokenizers with a space. Without answers every token of
                the texts but the first is a target.
            wrong: An answer that each is compared with by the metric `"logit_diff"`, token by token, or at the first
                token alone if they have different numbers of tokens (`kind="first"`).
            positions: Places by name, each for all texts or a list: a part of the text (its last token counts), `(part,
                occurrence)` counted from 0 where it occurs several times, or the index of a token, where 0 is the BOS
                token if there is one. `"END"` is the last token of the text if there are answers.
            groups: Which prompts are related, in any values; `localize` keeps related prompts in one half, and
                intervals are over groups. By default equal texts are one group, and a warning says so, as it does
                where equal texts are given several.

        Raises:
            TypeError: Texts that are no list of strings, or no tokenizer.
            ValueError: Lists of different lengths, answers that are no tokens of their own, wrong ones that cannot be
                compared, or a position that is not there.

        >>> from align_circuits.models.tokenizer import char_tokenizer
        >>> prompts = Prompts.from_texts(
        ...     ["ab:", "cd:"], char_tokenizer(), answer=["a", "c"], wrong=["b", "d"], positions={"first": 1}
        ... )
        >>> prompts.targets["token"].tolist() == prompts.tokens[:, 1].tolist()
        True
        """
        names = [f"text {index}" for index in range(len(texts))]
        return cls._of_texts(tokenize(texts, tokenizer, answer, wrong, positions, names), tokenizer, groups, names)

    @classmethod
    def _of_texts(
        cls, tokenized: Sequence[TokenizedText], tokenizer: Any, groups: Any, names: Sequence[str], partners: Any = ()
    ) -> "Prompts":
        read = [text.ids[: text.n_text] for text in tokenized]
        groups = groups_of_equal(read, names, partners) if groups is None else groups
        prompts = cls.from_tokens([text.ids for text in tokenized], tokenizer=tokenizer)
        start = prompts.mask.int().argmax(1)  # prompts are padded on the left
        first = torch.arange(prompts.tokens.shape[1]) - start[:, None]
        # A text may hold the same token again, as a separator.
        begins = (prompts.tokens == (-1 if tokenizer.bos_token_id is None else tokenizer.bos_token_id)) & (first == 0)
        begins |= (first >= 0) & (first < torch.tensor([text.n_beginning for text in tokenized])[:, None])
        prompts = replace(prompts, token_kinds=prompts.token_kinds.masked_fill(begins, TokenKind.BOS.value))
        answer = start + torch.tensor([text.n_text for text in tokenized])
        if any(len(text.ids) > text.n_text for text in tokenized):
            prompt, target = prompts.column("prompt"), prompts.column("target_pos")
            prompts = prompts.select_targets(target >= answer[prompt])
            offset = (prompts.column("target_pos") - answer[prompts.column("prompt")]).numpy()
            targets = prompts.targets.assign(offset=offset, kind=np.where(offset == 0, *KINDS))
            if tokenized[0].wrong:
                # Where a later token is the same in both answers, there is nothing to compare.
                targets[WRONG] = [
                    np.nan if wrong == right else wrong
                    for text in tokenized
                    for right, wrong in zip_longest(text.ids[text.n_text :], text.wrong, fillvalue=np.nan)
                ]
            prompts = replace(prompts, targets=targets)
        if groups is not None and len(groups) != len(prompts):
            raise ValueError(f"groups: {len(groups)} for {len(prompts)} texts; give a list with one for each")
        if groups is not None and pd.isna(pd.Series(list(groups))).any():
            raise ValueError("groups: a text has none (None or NaN); give one for each, a name of its own if unrelated")
        if groups is not None:
            warn_of_equal(read, groups, names)
        named = {name: start + torch.tensor([text.places[name] for text in tokenized]) for name in tokenized[0].places}
        # Objects keep 1 and "1" apart, and integers that are one number as floats.
        group = None if groups is None else torch.from_numpy(pd.factorize(pd.Series(list(groups), dtype=object))[0])
        return replace(prompts, positions=named, group=group)

    @classmethod
    @checked
    def from_pairs(
        cls,
        clean: Sequence[str],
        corrupted: Sequence[str],
        tokenizer: Tokenizer,
        *,
        answer: Sequence[str],
        wrong: Sequence[str] | None = None,
        corrupted_answer: Sequence[str] | None = None,
        positions: Mapping[str, Place | Sequence[Place]] | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> "tuple[Prompts, Prompts]":
        """Makes minimal pairs of your own texts: `Pair(*Prompts.from_pairs(...))` is what patching takes.

        Both halves have the targets, the answers and the named positions of the clean texts, as patching needs them.

        Args:
            clean: One text a prompt.
            corrupted: For each a text of equally many tokens, in which another answer, or none, is right.
            tokenizer: A Hugging Face tokenizer.
            answer: The right answers to the clean texts, as for `from_texts`.
            wrong: The answers that they are compared with by the metric `"logit_diff"`.
            corrupted_answer: The right answers to the corrupted texts, where they have one: `interchange_accuracy`
                needs them. The corrupted prompt goes on with the clean answer, so what is right behind its first token
                is known only as long as both answers are alike.
            positions: Places by name in the clean texts, as for `from_texts`.
            groups: Which pairs are related; by default those with equal clean texts, and each pair and its reverse,
                with clean and corrupted text exchanged.

        Raises:
            TypeError: As `from_texts` does.
            ValueError: As `from_texts` does; a corrupted text that is the clean one; or texts of different numbers of
                tokens, where the message shows the first place that differs in length.
        """
        if len(corrupted) != len(clean):
            raise ValueError(f"corrupted: {len(corrupted)} for {len(clean)} clean texts; give a list with one for each")
        names = [f"pair {index}" for index in range(len(clean))]
        tokenized = tokenize(clean, tokenizer, answer, wrong, positions, names)
        partners = tokenize(corrupted, tokenizer, corrupted_answer, None, None, _corrupted(names))
        return cls._of_pairs(tokenized, partners, tokenizer, groups, names)

    @classmethod
    def _of_pairs(
        cls,
        tokenized: Sequence[TokenizedText],
        partners: Sequence[TokenizedText],
        tokenizer: Any,
        groups: Sequence[Hashable] | None,
        names: Sequence[str],
    ) -> "tuple[Prompts, Prompts]":
        """Clean and corrupted prompts; `partners` go on with the right answers to the corrupted texts, if any."""
        pairs = [(text, other, other.ids[: other.n_text]) for text, other in zip(tokenized, partners, strict=True)]
        if same := [name for name, (text, _, ids) in zip(names, pairs, strict=True) if text.ids[: text.n_text] == ids]:
            raise ValueError(
                f"{len(same)} of {len(pairs)} pairs, such as {same[0]}, have a corrupted text equal to the clean "
                "one, token for token, where no patch changes anything: change what the answer depends on, or leave "
                "them out"
            )
        # Before any id is written: the corrupted ones take the columns of the clean ones.
        lengths = {name: (text.n_text, len(ids)) for name, (text, _, ids) in zip(names, pairs, strict=True)}
        uneven = [name for name, (one, other) in lengths.items() if one != other]
        for name, (text, _, ids) in zip(names, pairs, strict=True):
            check_aligned(name, text, ids, tokenizer, uneven[1:])
        warn_of_far_pairs(names, [(text.ids[: text.n_text], ids) for text, _, ids in pairs])
        prompts = cls._of_texts(tokenized, tokenizer, groups, names, [ids for *_, ids in pairs])
        inputs, own_correct = prompts.inputs.clone(), None
        for row, (text, _, ids) in enumerate(pairs):
            first = prompts.inputs.shape[1] - len(text.ids)
            inputs[row, first : first + text.n_text] = torch.tensor(ids)
        strings = {**prompts.token_strings, **text_of(tokenizer, inputs[prompts.mask].unique())}
        if len(partners[0].ids) > partners[0].n_text:
            tokens = [
                token
                for text, other, _ in pairs
                for token in _known(text.ids[text.n_text :], other.ids[other.n_text :])
            ]
            own_token, token = torch.tensor(tokens), prompts.column("token")
            answer_tokens = torch.cat([token, own_token[own_token != IGNORE]]).unique()
            strings |= text_of(tokenizer, answer_tokens)
            # Of the clean prompts too: both halves share the answers that the columns of `correct` stand for.
            prompts = replace(prompts, answer_tokens=answer_tokens, correct=token[:, None] == answer_tokens)
            own_correct = own_token[:, None] == answer_tokens
        task = {**prompts.task, "corrupted": {"kind": "own"}}
        return (
            replace(prompts, token_strings=strings),
            replace(prompts, inputs=inputs, own_correct=own_correct, token_strings=strings, task=task),
        )

    @classmethod
    @checked
    def from_jsonl(
        cls, path: str | Path, tokenizer: Tokenizer, *, with_corrupted: bool = True
    ) -> "tuple[Prompts, Prompts | None]":
        """Reads clean prompts and their corrupted partners from a file of JSON lines; None if it has no partners.

        A line is an object with the keys of `align_circuits.prompts.jsonl.SCHEMA`, of which only `"text"` is required:

            {"text": "When Mary and John went to the store, John gave a drink to", "answer": " Mary",
             "wrong": " John", "positions": {"IO": "Mary", "S2": ["John", 1]},
             "relations": {"name_mover": {"query": "END", "keys": ["IO"], "candidates": ["IO", "S2"]}}}

        Args:
            path: The file.
            tokenizer: A Hugging Face tokenizer.
            with_corrupted: False leaves the corrupted texts out, which may then have any length, but for their groups.

        Raises:
            KeyError: A relation with the name of a position that is not there.
            ValueError: No such file, or a line that does not fit; the message names the line, counted from 1.
        """
        columns, lines = read_jsonl(path)
        named = places(columns["positions"]) if "positions" in columns else None
        group, answer, wrong, partner_texts = (columns.get(key) for key in ("group", "answer", "wrong", "corrupted"))
        names = [f"line {line}" for line in lines]
        try:
            tokenized = tokenize(columns["text"], tokenizer, answer, wrong, named, names)
            if partner_texts is None or not with_corrupted:
                partner_ids = [ids_of(tokenizer, text) for text in partner_texts or ()]
                clean, corrupted = cls._of_texts(tokenized, tokenizer, group, names, partner_ids), None
            else:
                own_answer = columns.get("corrupted_answer")
                partners = tokenize(partner_texts, tokenizer, own_answer, None, None, _corrupted(names))
                clean, corrupted = cls._of_pairs(tokenized, partners, tokenizer, group, names)
            relations: dict[str, Relation] = {}
            # The first line names them all: `read_jsonl` refuses lines with other relations.
            for name in columns.get("relations", [{}])[0]:
                of_lines = [line[name] for line in columns["relations"]]
                pairs = [(prompt, line["query"], line["keys"]) for prompt, line in enumerate(of_lines)]
                candidates = [line.get("candidates") for line in of_lines]
                relations[name] = Relation.of_named(pairs, clean, name, candidates, names)
            clean = clean.with_relations(**relations)
        except (KeyError, ValueError) as error:
            raise type(error)(f"{str(path)!r}, {error.args[0]}") from error
        return clean, None if corrupted is None else replace(corrupted, relations=clean.relations)

    def save(self, path: str | Path) -> None:
        """Writes the prompts into one safetensors file.

        Raises:
            ValueError: A column of the targets, other than `kind`, holds no numbers, or a kind is missing.
        """
        numbers = self.targets.drop(columns="kind")
        if texts := [*numbers.columns[[kind.kind not in "biuf" for kind in numbers.dtypes]]]:
            raise ValueError(f"targets[{texts[0]!r}] holds no numbers, as a file needs beside kind: save without it")
        if self.targets["kind"].isna().to_numpy().any():
            raise ValueError("targets['kind'] is missing in some rows, which a file cannot hold: give each a name")
        tensors = {name: getattr(self, name) for name in _TENSORS}
        for prefix in ("latent", "positions"):
            tensors |= {f"{prefix}.{name}": value for name, value in getattr(self, prefix).items()}
        tensors |= {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}
        for column in self.targets.columns:
            if column != "kind":
                tensors[f"targets.{column}"] = self.column(column)
        # A safetensors file holds no texts, so these go into its header.
        kinds = self.targets["kind"].astype("category")
        tensors["targets.kind"] = torch.from_numpy(kinds.cat.codes.to_numpy(dtype=np.int64))
        for name, relation in self.relations.items():
            tensors |= {f"relations.{name}.{k}": v for k, v in vars(relation).items() if isinstance(v, Tensor)}
        header = {
            "kinds": list(kinds.cat.categories),
            "columns": list(self.targets.columns),
            "task": dict(self.task),
            "token_strings": {str(token): text for token, text in self.token_strings.items()},
            "tokenizer_hash": self.tokenizer_hash,
            "relations": {name: [r.name, r.keys_before_query, r.exchangeable] for name, r in self.relations.items()},
        }
        with replacing(path) as temporary:
            save_file(
                # Cloned: safetensors refuses tensors that share memory, as rows of one layout do.
                {k: v.clone().contiguous() for k, v in tensors.items()},
                temporary,
                {"prompts": json.dumps(header)},
            )

    @classmethod
    def load(cls, path: str | Path) -> "Prompts":
        """Reads what `save` wrote.

        Raises:
            ValueError: The file does not exist or holds no prompts.
        """
        if not is_path(path) or not Path(path).is_file():
            raise ValueError(f"no file {str(path)!r}: give one that Prompts.save wrote")
        try:
            with safe_open(path, "pt") as file:
                header = json.loads((file.metadata() or {})["prompts"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            columns: dict[str, Any] = {name: tensors[f"targets.{name}"].numpy() for name in header["columns"]}
            if not np.isin(columns["kind"], range(len(header["kinds"]))).all():
                raise ValueError("targets of no kind")
            columns["kind"] = np.array(header["kinds"], dtype=object)[columns["kind"]]
            tensor_fields = [name for f in fields(Relation) if (name := f.name) not in _FLAGS]
            relations = {
                key: Relation(
                    **dict(zip(_FLAGS, flags, strict=False)),  # files of earlier versions have fewer
                    **{entry: tensors[f"relations.{key}.{entry}"] for entry in tensor_fields},
                )
                for key, flags in header["relations"].items()
            }
            return cls(
                **{name: tensors[name] for name in _TENSORS},
                targets=pd.DataFrame(columns),
                relations=relations,
                correct=tensors.get("correct"),
                own_correct=tensors.get("own_correct"),
                group=tensors.get("group"),
                token_strings={int(token): text for token, text in header["token_strings"].items()},
                tokenizer_hash=header["tokenizer_hash"],
                task=header["task"],
                latent=_named(tensors, "latent."),
                positions=_named(tensors, "positions."),
            )
        except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no prompts ({error}): give what Prompts.save wrote") from error


def _corrupted(names: Sequence[str]) -> list[str]:
    """How messages call the corrupted texts of pairs."""
    return [f"{name}, corrupted" for name in names]


def _known(answer: Sequence[int], own: Sequence[int]) -> list[int]:
    """The token that is right in the corrupted prompt at each token of the clean answer; `IGNORE` where none is known.

    The corrupted prompt goes on with the clean answer, which the own answer does not follow once they differ.
    """
    alike = next((i for i, pair in enumerate(zip(answer, own, strict=False)) if pair[0] != pair[1]), len(own))
    return [own[i] if i <= alike and i < len(own) else IGNORE for i in range(len(answer))]


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name begins with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_keys(relations: Mapping[str, Relation], inputs: Tensor, mask: Bool[Tensor, "prompt pos"]) -> None:
    """Raises if a relation has a row without keys, which would count as a miss, or the name of one with other keys."""
    for name, relation in relations.items():
        if (empty := int((~relation.expand()[0].any(1)).sum())) > 0:
            raise ValueError(
                f"relation {name!r}: {empty} of {len(relation)} rows have no key, which would count as misses: "
                "leave them out with relation.select(...)"
            )
        if other := rel.unlike_its_name(name, relation, inputs, mask):
            raise ValueError(
                f"relation {name!r}: {other} of {len(relation)} rows have keys that are not those of {name!r} in all "
                "other prompts, which p-values and reports go by: give it another name"
            )


_FLAGS = ("name", "keys_before_query", "exchangeable")
"""The fields of a relation that are no tensors."""

_TENSORS = ("inputs", "mask", "token_kinds", "example", "answer_tokens")
_OPTIONAL = ("correct", "own_correct", "group")


def next_token_targets(
    prompt: Int[Tensor, " target"],
    query_pos: Int[Tensor, " target"] | int,
    token: Int[Tensor | ndarray, " target"],
    *,
    phrase: Int[Tensor, " target"] | int = 0,
    offset: Int[Tensor, " target"] | int = 0,
    kind: str | ndarray = "later",
) -> pd.DataFrame:
    """Returns a table of targets, `TARGET_COLUMNS`: each token is predicted at the position before it."""
    columns = (prompt, query_pos, query_pos + 1, token, phrase, offset, kind)
    return pd.DataFrame(dict(zip(TARGET_COLUMNS, columns, strict=True)))


def vocabulary_hash(tokenizer: Any) -> str:
    """Returns a hash of a tokenizer's vocabulary: equal if and only if every id means the same token."""
    sha = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        # Some vocabularies hold half characters, which plain UTF-8 refuses.
        sha.update(f"{index}\t{token}\n".encode(errors="surrogatepass"))
    return sha.hexdigest()[:16]


def text_of(tokenizer: Any, ids: Int[Tensor, " token"]) -> dict[int, str]:
    """Returns the text of each id."""
    return {token: text_of_token(tokenizer, token) for token in ids.tolist()}
