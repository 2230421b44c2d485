"""Prompts with their labels: tokens, the role of each, the targets to predict, and relations between positions."""

import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
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

from align_circuits.files import replacing
from align_circuits.prompts import relations as rel
from align_circuits.prompts.relations import IGNORE, Relation
from align_circuits.prompts.token_html import Mark, draw_tokens

TARGET_COLUMNS = ("prompt", "query_pos", "target_pos", "token", "phrase", "offset", "kind")
"""The columns that every table of targets has, in order."""

KINDS = ("first", "later")
"""`"first"`: the first token of a phrase, which needs alignment; `"later"`: the others, which may do without."""

REFERENCES = ("chance", "memoryless", "history", "oracle")
"""The reference predictors whose accuracies targets may carry, one column each: a uniform guess, two ceilings without
alignment (`"memoryless"` knows the automata, not which symbol is next; `"history"` also rules symbols out by the output
so far), and exact lookup in the examples."""


class Role(IntEnum):
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
    roles: Int[Tensor, "prompt pos"]
    """The `Role` of each token."""
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
    token_strings: Mapping[int, str] = field(default_factory=dict)
    """The text of every token id that occurs."""
    tokenizer_hash: str | None = None
    """A hash of the vocabulary that the ids belong to; None if it is unknown."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The configuration and the seed that made the prompts, as JSON."""
    latent: Mapping[str, Tensor] = field(default_factory=dict)
    """The latent variables that the task drew, prompt by prompt (first dimension); `corrupt` reads them."""

    def __post_init__(self):
        shape = tuple(self.inputs.shape[:2])
        for name in ("mask", "roles", "example"):
            if (size := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(f"{name} has shape {size}, but the inputs are {shape}: give one entry for each token")
        if missing := [column for column in TARGET_COLUMNS if column not in self.targets.columns]:
            raise ValueError(f"the targets lack {', '.join(missing)}; they need {', '.join(TARGET_COLUMNS)}")
        if self.correct is not None and self.correct.shape != (len(self.targets), len(self.answer_tokens)):
            raise ValueError(
                f"correct has shape {tuple(self.correct.shape)}; it needs a row for each of the "
                f"{len(self.targets)} targets and a column for each of the {len(self.answer_tokens)} answer_tokens"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        name = self.task.get("name", "tokens")
        shape = f"{len(self)} x {self.inputs.shape[1]} {name}"
        return f"Prompts({shape}, targets={len(self.targets)}, relations={sorted(self.relations)})"

    def _repr_html_(self) -> str:
        if self.inputs.is_floating_point():  # vectors have no text
            return repr(self)
        drawings = [self.drawing(index) for index in range(min(len(self), 3))]
        return "<hr>".join(drawings) + ("" if len(self) <= 3 else f"<div>… and {len(self) - 3} more prompts</div>")

    def drawing(self, index: int = 0, examples: int | None = None) -> str:
        """Returns one prompt as HTML, one line for each example, with its gold alignment.

        Each phrase to predict (framed), the input symbol that it is aligned with (framed), and the tokens of earlier
        examples that show its translation share a number and a colour.

        Args:
            index: Which prompt.
            examples: How many of the last examples to draw; all of them by default.
        """
        prompt = self[index]
        group: dict[int, Any] = {}
        framed: set[int] = set()
        phrase = dict(enumerate(prompt.targets["phrase"]))
        aligned = {name: relation for name, relation in prompt.relations.items() if name in ("lookup", "align_query")}
        for name, relation in sorted(aligned.items(), reverse=True):
            for row, target in enumerate(relation.target.tolist()):
                keys = relation.keys_of(row)
                group |= dict.fromkeys(keys, phrase[target])
                framed |= set(keys) if name == "align_query" else set()
        if aligned:
            group |= dict(zip(prompt.targets["target_pos"], prompt.targets["phrase"], strict=True))
            framed |= set(prompt.targets["target_pos"])
        lines: dict[int, list[Mark]] = {}
        first = 0 if examples is None else int(prompt.example.max()) - examples + 1
        for pos, token in enumerate(prompt.tokens[0].tolist()):
            if prompt.mask[0, pos] and (line := max(0, int(prompt.example[0, pos]))) >= first:
                lines.setdefault(line, []).append(Mark(self.string_of(token), group.get(pos), pos in framed))
        return draw_tokens(list(lines.values()))

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
        return ["".join(row) for row in self.token_text]

    @property
    def token_text(self) -> list[list[str]]:
        """The text of each real token of each prompt."""
        return [list(map(self.string_of, row[mask].tolist())) for row, mask in zip(self.tokens, self.mask, strict=True)]

    @cached_property
    def digest(self) -> str:
        """A hash of inputs, mask and targets, equal for equal prompts: it shows that two tables may be paired."""
        sha = hashlib.sha256()
        for part in (self.inputs, self.mask):
            sha.update(np.ascontiguousarray(part.numpy()).tobytes())
        sha.update(self.targets[["prompt", "query_pos", "token"]].to_numpy(dtype=np.int64).tobytes())
        return sha.hexdigest()[:16]

    @property
    def provenance(self) -> dict[str, Any]:
        """The task and the digest: the `data` of the provenance of a table measured on these prompts."""
        return {"task": dict(self.task), "digest": self.digest}

    def column(self, name: str) -> Tensor:
        """Returns a numeric column of `targets` as a tensor."""
        return torch.from_numpy(self.targets[name].to_numpy(copy=True))

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "Prompts":
        if isinstance(index, slice):
            chosen = torch.tensor(range(len(self))[index], dtype=torch.long)
        else:
            chosen = torch.as_tensor(index)
            if chosen.dtype == torch.bool and len(chosen) != len(self):
                raise IndexError(f"a mask of {len(chosen)} entries for {len(self)} prompts: give one entry per prompt")
            chosen = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen.long().reshape(-1)
            if len(wrong := chosen[(chosen < -len(self)) | (chosen >= len(self))]):
                raise IndexError(f"no prompt {int(wrong[0])}: there are {len(self)}, counted from 0")
            chosen = chosen.where(chosen >= 0, chosen + len(self))
        if len(chosen.unique()) != len(chosen):
            raise ValueError("the same prompt twice: give each index once, so that intervals count each prompt once")
        return self._take(chosen)

    def batches(self, size: int) -> Iterator["Prompts"]:
        """Yields the prompts in order, `size` at a time."""
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
        new_row = torch.full((len(self.targets),), IGNORE)
        new_row[old_rows] = torch.arange(len(old_rows))
        targets = self.targets.iloc[old_rows.numpy()].reset_index(drop=True)
        targets["prompt"] = new_prompt[old_rows].numpy()

        def moved(relation: Relation) -> Relation:
            kept = relation.select(new_index[relation.prompt] != IGNORE)
            return replace(
                kept,
                prompt=new_index[kept.prompt],
                target=new_row[kept.target],
                key_label=kept.key_label[chosen],
                candidate_label=kept.candidate_label[chosen],
            )

        return replace(
            self,
            **{name: getattr(self, name)[chosen] for name in ("inputs", "mask", "roles", "example")},
            targets=targets,
            correct=None if self.correct is None else self.correct[old_rows],
            relations={name: moved(relation) for name, relation in self.relations.items()},
            latent={name: value[chosen] for name, value in self.latent.items()},
        )

    @classmethod
    def from_tokens(
        cls,
        ids: Int[Tensor, "prompt pos"] | Sequence[Sequence[int]],
        *,
        relations: Mapping[str, Callable[..., Relation]] | None = None,
        tokenizer: Any = None,
    ) -> "Prompts":
        """Makes prompts of your own token ids; every token but the first of a prompt is a target.

        The relations `induction`, `previous` and `duplicate` need nothing but the ids. Prompts of different lengths
        are padded on the left.

        Args:
            ids: Token ids, a list of ints for each prompt, or a tensor without padding.
            relations: More relations by name: functions like those of `align_circuits.prompts.relations`, called with
                `ids`, `mask`, `target`, `prompt` and `query`.
            tokenizer: A Hugging Face tokenizer, for the text and for the check that a model has the same one.

        Raises:
            ValueError: No prompts, an empty prompt, entries that are no ids, or a relation with a row without keys.

        >>> prompts = Prompts.from_tokens([[5, 7, 9, 5, 7]])
        >>> prompts.relations["induction"].keys_of(0)
        [1]
        """
        try:
            rows = [[operator.index(token) for token in row] for row in ids]
        except TypeError as error:
            raise ValueError("give a list of token ids for each prompt, [[5, 7, 9]] for a single one") from error
        if not rows or any(len(row) < 2 for row in rows):
            raise ValueError(
                "every prompt needs at least two tokens, one to read and one to predict; give lists of token ids"
            )
        if any(token < 0 for row in rows for token in row):
            raise ValueError("a token id is negative: give ids without padding, and lists of different lengths instead")
        length = max(map(len, rows))
        inputs = torch.tensor([[0] * (length - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
        predicts = mask[:, 1:] & mask[:, :-1]
        prompt, query = predicts.nonzero(as_tuple=True)
        start = mask.int().argmax(1)
        targets = next_token_targets(prompt, query, inputs[prompt, query + 1], offset=query - start[prompt])
        makers = {"induction": rel.induction, "previous": rel.previous_token, "duplicate": rel.duplicate_token}
        row_columns = {"target": torch.arange(len(query)), "prompt": prompt, "query": query}
        made = {name: make(inputs, mask, **row_columns) for name, make in (makers | dict(relations or {})).items()}
        for name in relations or {}:
            if (empty := int((~made[name].expand()[0].any(1)).sum())) > 0:
                raise ValueError(
                    f"relation {name!r}: {empty} of {len(made[name])} rows have no key, which would count as misses: "
                    "leave them out with relation.select(...)"
                )
        return cls(
            inputs,
            mask,
            roles=torch.where(mask, Role.TEXT.value, Role.PAD.value),
            example=torch.where(mask, 0, IGNORE),
            targets=targets,
            relations=made,
            token_strings=text_of(tokenizer, inputs[mask].unique()) if tokenizer is not None else {},
            tokenizer_hash=vocabulary_hash(tokenizer) if tokenizer is not None else None,
            task={"name": "tokens"},
        )

    def save(self, path: str | Path) -> None:
        """Writes the prompts into one safetensors file."""
        tensors = {name: getattr(self, name) for name in _TENSORS} | {f"latent.{k}": v for k, v in self.latent.items()}
        if self.correct is not None:
            tensors["correct"] = self.correct
        for column in self.targets.columns:
            if column != "kind":
                tensors[f"targets.{column}"] = self.column(column)
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
            "relations": {name: [r.name, r.keys_before_query] for name, r in self.relations.items()},
        }
        with replacing(path) as temporary:
            save_file(
                {k: v.clone().contiguous() for k, v in tensors.items()}, temporary, {"prompts": json.dumps(header)}
            )

    @classmethod
    def load(cls, path: str | Path) -> "Prompts":
        """Reads what `save` wrote.

        Raises:
            ValueError: The file does not exist or holds no prompts.
        """
        if not Path(path).is_file():
            raise ValueError(f"no file {str(path)!r}: give one that Prompts.save wrote")
        try:
            with safe_open(path, "pt") as file:
                header = json.loads((file.metadata() or {})["prompts"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{str(path)!r} holds no prompts: give a file that Prompts.save wrote") from error
        columns: dict[str, Any] = {name: tensors[f"targets.{name}"].numpy() for name in header["columns"]}
        columns["kind"] = np.array(header["kinds"], dtype=object)[columns["kind"]]
        parts = [name for f in fields(Relation) if (name := f.name) not in ("name", "keys_before_query")]
        relations = {
            key: Relation(
                name=name, keys_before_query=strict, **{part: tensors[f"relations.{key}.{part}"] for part in parts}
            )
            for key, (name, strict) in header["relations"].items()
        }
        return cls(
            **{name: tensors[name] for name in _TENSORS},
            targets=pd.DataFrame(columns),
            relations=relations,
            correct=tensors.get("correct"),
            token_strings={int(token): text for token, text in header["token_strings"].items()},
            tokenizer_hash=header["tokenizer_hash"],
            task=header["task"],
            latent={k.removeprefix("latent."): v for k, v in tensors.items() if k.startswith("latent.")},
        )


_TENSORS = ("inputs", "mask", "roles", "example", "answer_tokens")


def next_token_targets(
    prompt: Int[Tensor, " target"],
    query_pos: Int[Tensor, " target"] | int,
    token: Int[Tensor | ndarray, " target"],
    *,
    phrase: Int[Tensor, " target"] | int = 0,
    offset: Int[Tensor, " target"] | int = 0,
    kind: Any = "later",
) -> pd.DataFrame:
    """Returns a table of targets, `TARGET_COLUMNS`: each token is predicted at the position before it."""
    columns = (prompt, query_pos, query_pos + 1, token, phrase, offset, kind)
    return pd.DataFrame(dict(zip(TARGET_COLUMNS, columns, strict=True)))


def vocabulary_hash(tokenizer: Any) -> str:
    """Returns a hash of a tokenizer's vocabulary: equal if and only if every id means the same token."""
    sha = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        sha.update(f"{index}\t{token}\n".encode(errors="surrogatepass"))
    return sha.hexdigest()[:16]


def text_of(tokenizer: Any, ids: Int[Tensor, " token"]) -> dict[int, str]:
    """Returns the text of each id."""
    return {token: tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids.tolist()}
