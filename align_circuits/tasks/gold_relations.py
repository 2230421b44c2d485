"""From the latent variables of a task to token ids, targets and relations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from align_circuits.prompts.prompts import KINDS, Prompts, TokenKind, next_token_targets
from align_circuits.prompts.relations import IGNORE, Relation, duplicate_token, induction, previous_token
from align_circuits.tasks.layout import FIXED, Layout
from align_circuits.tasks.token_ids import TokenIds

LATENT = ("symbols", "order", "phrases", "letter", "next")
"""The keys of `Prompts.latent`: `symbols [prompt symbol]`, the indices of the prompt's symbols in the alphabet; `order
[prompt example pos]`, the symbol at each input position; `phrases [prompt example phrase offset]`, the letters;
`letter` and `next [prompt symbol state edge]`, the automata."""


def prompts_of(
    ids: TokenIds,
    layout: Layout,
    latent: Mapping[str, Tensor],
    aligned: Sequence[int],
    *,
    correct: Bool[Tensor, "prompt phrase offset letter"],
    references: Mapping[str, Tensor],
    task: Mapping[str, Any],
) -> Prompts:
    """Returns the prompts with these latent variables, whose targets are the letters of the test example.

    Args:
        ids: The token ids of symbols, letters and delimiters.
        layout: The layout of the prompts.
        latent: The latent variables, as described at `LATENT`.
        aligned: The input position of each phrase.
        correct: Which letters are right at each target.
        references: Reference accuracies by name, `[prompt phrase offset]`.
        task: The task's name, config and seed; `corrupt` needs the rest, which is added.
    """
    letters, symbols, fixed = map(torch.tensor, (ids.letters, ids.symbols, ids.fixed))
    inputs = write(layout, latent, latent["order"][:, :, list(aligned)], fixed, symbols, letters)
    targets, relations = targets_and_relations(layout, inputs, latent, aligned)
    return Prompts(
        inputs=inputs,
        mask=torch.ones_like(inputs, dtype=torch.bool),
        token_kinds=layout.token_kinds.expand_as(inputs).clone(),  # the layout is of all samples
        example=layout.example.expand_as(inputs).clone(),
        targets=targets.assign(**{name: values.flatten().numpy() for name, values in references.items()}),
        relations=relations,
        answer_tokens=letters,
        correct=correct.flatten(0, 2),
        token_strings=ids.token_strings,
        tokenizer_hash=ids.tokenizer_hash,
        task={
            **task,
            "bos": bool(layout.token_kinds[0] == TokenKind.BOS),
            "aligned": list(aligned),
            "symbols": list(ids.symbols),
            "fixed": list(ids.fixed),
        },
        latent=latent,
    )


def write(
    layout: Layout,
    latent: Mapping[str, Tensor],
    copied: Int[Tensor, "prompt example phrase"],
    fixed: Int[Tensor, " fixed"],
    symbols: Int[Tensor, " symbol"],
    letters: Int[Tensor, " letter"],
) -> Int[Tensor, "prompt pos"]:
    """Returns the token ids of prompts with these latent variables, `LATENT`.

    `copied` is the symbol that each phrase translates; `fixed`, `symbols` and `letters` are the token ids of
    delimiters, alphabet and letters.
    """
    symbol_ids = symbols[latent["symbols"]]
    inputs, copies = (symbol_ids.gather(1, index.flatten(1)).view_as(index) for index in (latent["order"], copied))
    return layout.write(fixed, inputs, letters.take(latent["phrases"]), copies)


def targets_and_relations(
    layout: Layout, inputs: Int[Tensor, "prompt pos"], latent: Mapping[str, Tensor], aligned: Sequence[int]
) -> tuple[pd.DataFrame, dict[str, Relation]]:
    """Returns the targets, which are the letters of the test example, and their relations.

    - `align_query` and `align_key`, for the first letter of each phrase: the input position that the phrase translates,
      among the positions of the test input. The query is the position that predicts the letter (`align_query`), or the
      letter itself (`align_key`).
    - `lookup`, for every target, from the position that predicts it: the letters of earlier examples that translate the
      same symbol, among all letters of earlier examples. Targets whose symbol no earlier phrase translates are left
      out.
    - `induction`, `previous`, `duplicate`, from the position that predicts the target.
    """
    n, (m, c) = len(inputs), layout.outputs.shape[1:]
    positions = layout.outputs[-1].flatten()
    prompt, target_pos = torch.arange(n).repeat_interleave(m * c), positions.repeat(n)
    phrase, offset = torch.arange(m).repeat_interleave(c).repeat(n), torch.arange(c).repeat(n * m)
    kind = np.array(KINDS, dtype=object)[(offset > 0).long().numpy()]
    tokens = inputs[:, positions].flatten()
    targets = next_token_targets(prompt, target_pos - 1, tokens, phrase=phrase, offset=offset, kind=kind)

    rows = {"target": torch.arange(n * m * c), "prompt": prompt, "query": target_pos - 1}
    # All prompts of a task have one length: there is no padding, and an expanded mask takes no memory.
    mask = torch.ones((), dtype=torch.bool).expand_as(inputs)
    relations = [
        _align("align_query", layout, rows, phrase, aligned),
        _align("align_key", layout, rows | {"query": target_pos}, phrase, aligned),
        _lookup(layout, rows, latent["order"][:, :, list(aligned)]),
        *(label(inputs, mask, **rows) for label in (induction, previous_token, duplicate_token)),
    ]
    return targets, {relation.name: relation for relation in relations}


def _align(
    name: str, layout: Layout, rows: Mapping[str, Tensor], phrase: Int[Tensor, " row"], aligned: Sequence[int]
) -> Relation:
    """From the first letter of a phrase to its input position, among the test input."""
    n, test = int(rows["prompt"][-1]) + 1, layout.inputs[-1]
    key = torch.full((len(layout.token_kinds),), IGNORE)
    key[test] = torch.arange(len(test))
    first = torch.arange(0, len(phrase), layout.outputs.shape[2])
    return Relation(
        name,
        target=rows["target"][first],
        prompt=rows["prompt"][first],
        query=rows["query"][first],
        key_value=torch.tensor(aligned)[phrase[first]],
        candidate_value=torch.zeros_like(first),
        key_label=key.expand(n, -1),
        # Keys are labelled 0, 1, ...: all of them become candidates of the label 0, and the rest stays `IGNORE`.
        candidate_label=key.clamp(max=0).expand(n, -1),
    )


def _lookup(layout: Layout, rows: Mapping[str, Tensor], symbol: Int[Tensor, "prompt example phrase"]) -> Relation:
    """From each target to the letters of earlier examples that translate the same symbol."""
    c = layout.outputs.shape[2]
    none = torch.full_like(symbol, IGNORE)
    # The test example's own phrases hold the answers, so they are no candidates.
    label = torch.cat([symbol[:, :-1], none[:, -1:]], dim=1)
    key = layout.write(torch.full((len(FIXED),), IGNORE), none, label[..., None].expand(-1, -1, -1, c), none)
    key_value = symbol[:, -1]
    relation = Relation(
        "lookup",
        target=rows["target"],
        prompt=rows["prompt"],
        query=rows["query"],
        key_value=key_value.repeat_interleave(c, dim=1).flatten(),
        candidate_value=torch.zeros_like(rows["query"]),
        key_label=key,
        candidate_label=key[:1].clamp(max=0).expand_as(key),
    )
    seen = (symbol[:, :-1, :, None] == key_value[:, None, None]).any(2).any(1)
    return relation if bool(seen.all()) else relation.select(seen.repeat_interleave(c, dim=1).flatten())
