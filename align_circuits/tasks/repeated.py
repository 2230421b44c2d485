"""Random tokens, repeated: the usual test of induction heads."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from align_circuits.checks import Tokenizer, check_size, checked
from align_circuits.prompts.prompts import MOST_IDS, Prompts, TokenKind, next_token_targets, text_of, vocabulary_hash
from align_circuits.prompts.relations import IGNORE, duplicate_token, induction, previous_token
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.task import Task, check_least
from align_circuits.tasks.token_ids import check_tokenizer


@checked
@dataclass(frozen=True)
class RepeatedTokensTask(Task):
    """A sequence of random tokens, all different, written several times over.

    Targets are the tokens of every repeat but the first, less the first of the second, which nothing predicts. Only
    induction predicts them; a guess is right with probability one over the size of the vocabulary.

    Source: Olsson et al. (2022), "In-context Learning and Induction Heads".

    >>> prompts = RepeatedTokensTask(length=3, bos=False).sample(1, 100, seed=0)
    >>> row = prompts.tokens[0].tolist()
    >>> row[:3] == row[3:], prompts.relations["induction"].keys_of(0)
    (True, [1])
    """

    length: int = 25
    """Tokens in a sequence."""
    repeats: int = 2
    """How many times the sequence is written, from 2 up."""
    bos: bool = True
    """Whether prompts start with the tokenizer's BOS token, if there is a tokenizer that has one."""

    def __post_init__(self):
        check_least(self, length=2, repeats=2)

    @checked
    def sample(self, n: int, tokenizer: Tokenizer | int | None = None, seed: int = 0) -> Prompts:
        """Draws prompts with the relations `induction`, `previous` and `duplicate` from the positions that predict.

        Args:
            n: How many prompts. The first prompts of a seed are the same however many are drawn.
            tokenizer: A Hugging Face tokenizer, whose `all_special_ids` are left out (other added tokens, such as the
                reserved ones of Llama 3, are not), or the size of a vocabulary.
            seed: Which prompts.

        Raises:
            ValueError: There is no tokenizer, or its vocabulary has fewer tokens than a sequence.
        """
        if n < 1:
            raise ValueError(f"{n} prompts: ask for at least 1")
        count = n * max(self.length * self.repeats, 16)
        check_size(count, count, f"{n:,} prompts of {self.length} tokens, {self.repeats} times,")
        check_tokenizer(tokenizer)
        known: Any = tokenizer
        plain = isinstance(known, int)
        if plain and known > MOST_IDS:
            raise ValueError(f"tokenizer={known:,} is the size of no vocabulary: give at most {MOST_IDS:,}")
        # A size stands for all ids below it, which need no list: some sizes would not fit into memory.
        ids: Any = known if plain else np.setdiff1d(np.arange(len(known)), list(known.all_special_ids))
        if (size := known if plain else len(ids)) < self.length:
            raise ValueError(
                f"length is {self.length}, but there are only {size} tokens, and those of a sequence are all "
                "different: give a shorter length or a larger vocabulary"
            )
        generator = Rng(seed, "repeated").generator("tokens")
        # Prompt by prompt, so that the first ones are the same however many are drawn.
        rows = np.stack([generator.choice(ids, self.length, replace=False) for _ in range(n)])
        inputs = torch.from_numpy(np.tile(rows, self.repeats))
        bos = None if plain or not self.bos else known.bos_token_id
        start = int(bos is not None)
        if bos is not None:
            inputs = torch.cat([torch.full((n, 1), bos), inputs], dim=1)
        index = torch.arange(inputs.shape[1]) - start  # counted without BOS
        token_kinds = torch.where(index < 0, TokenKind.BOS.value, TokenKind.TEXT.value).expand_as(inputs).clone()
        example = torch.where(index < 0, IGNORE, index // self.length).expand_as(inputs).clone()

        target_pos = index[index > self.length] + start
        prompt, target_pos = torch.arange(n).repeat_interleave(len(target_pos)), target_pos.repeat(n)
        targets = next_token_targets(
            prompt,
            target_pos - 1,
            inputs[prompt, target_pos],
            phrase=example[0, target_pos],
            offset=index[target_pos] % self.length,
        )
        mask = torch.ones_like(inputs, dtype=torch.bool)
        columns = {"target": torch.arange(len(prompt)), "prompt": prompt, "query": target_pos - 1}
        relations = [label(inputs, mask, **columns) for label in (induction, previous_token, duplicate_token)]
        return Prompts(
            inputs=inputs,
            mask=mask,
            token_kinds=token_kinds,
            example=example,
            targets=targets,
            relations={relation.name: relation for relation in relations},
            token_strings={} if plain else text_of(tokenizer, inputs.unique()),
            tokenizer_hash=None if plain else vocabulary_hash(tokenizer),
            task={"name": "repeated", "config": asdict(self), "seed": seed, "bos": bos is not None},
        )
