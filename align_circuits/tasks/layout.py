"""The position of every token in a prompt of a sequence-to-sequence task, in each style."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from align_circuits.prompts.prompts import TokenKind
from align_circuits.prompts.relations import IGNORE

Style = Literal["standard", "pre-aligned", "marked"]

FIXED = (TokenKind.BOS, TokenKind.COLON, TokenKind.SEPARATOR, TokenKind.MARKER)
"""The tokens that are the same in every prompt."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The positions of a prompt: one row of tokens, the same for all prompts of a task."""

    token_kinds: Int[Tensor, " pos"]
    """The `TokenKind` of each token."""
    example: Int[Tensor, " pos"]
    """The example of each token, the test example last; `IGNORE` for BOS."""
    inputs: Int[Tensor, "example symbol"]
    """The positions of the input symbols."""
    outputs: Int[Tensor, "example phrase offset"]
    """The positions of the letters."""
    index: Int[Tensor, " pos"]
    """The index of each token among fixed tokens, inputs, letters and copies of the aligned symbols, concatenated."""

    def write(
        self,
        fixed: Int[Tensor, " fixed"],
        inputs: Int[Tensor, "prompt example symbol"],
        outputs: Int[Tensor, "prompt example phrase offset"],
        copies: Int[Tensor, "prompt example phrase"],
    ) -> Int[Tensor, "prompt pos"]:
        """Returns the prompts of these token ids, or of any other number for each token.

        Args:
            fixed: The tokens of `FIXED`.
            inputs: The input symbols.
            outputs: The letters.
            copies: The symbol that each phrase is aligned with; written only in the pre-aligned style.
        """
        token_groups = (fixed.expand(len(inputs), -1), inputs.flatten(1), outputs.flatten(1), copies.flatten(1))
        return torch.cat(token_groups, dim=1).index_select(1, self.index)


def length_of(style: Style, x_len: int, phrase_len: int, n_examples: int, bos: bool) -> int:
    """Returns how many tokens the prompts of a layout have, which need not be built for it."""
    symbols, letters = x_len, x_len * phrase_len
    if style == "marked":
        symbols, letters = 2 * symbols, 2 * letters
    if style == "pre-aligned":
        letters += x_len
    return bos + (n_examples + 1) * (symbols + 1 + letters) + n_examples


# Built token by token in Python, and asked for by every `sample`.
@lru_cache(maxsize=64)
def layout_of(style: Style, x_len: int, phrase_len: int, n_examples: int, bos: bool) -> Layout:
    """Returns the layout of a prompt of `n_examples` examples and the test example.

    standard: `x1 ... xm : y1 ... yn` and a separator after each example but the last. pre-aligned: each phrase comes
    after a copy of the symbol it is aligned with. marked: a marker before every symbol and every letter.
    """
    count = n_examples + 1
    columns = {kind: index for index, kind in enumerate(FIXED)}
    x_start = len(FIXED)
    y_start = x_start + count * x_len
    copy_start = y_start + count * x_len * phrase_len
    marked, copied = style == "marked", style == "pre-aligned"
    tokens: list[tuple[TokenKind, int, int]] = []  # kind, example, index

    def put(kind: TokenKind, example: int, index: int | None = None) -> int:
        tokens.append((kind, example, columns[kind] if index is None else index))
        return len(tokens) - 1

    inputs, outputs = [], []
    if bos:
        put(TokenKind.BOS, IGNORE)
    for example in range(count):
        for position in range(x_len):
            if marked:
                put(TokenKind.MARKER, example)
            inputs.append(put(TokenKind.INPUT, example, x_start + example * x_len + position))
        put(TokenKind.COLON, example)
        for phrase in range(x_len):
            phrase_index = example * x_len + phrase
            if copied:
                put(TokenKind.ALIGNED, example, copy_start + phrase_index)
            for offset in range(phrase_len):
                if marked:
                    put(TokenKind.MARKER, example)
                outputs.append(put(TokenKind.OUTPUT, example, y_start + phrase_index * phrase_len + offset))
        if example < n_examples:
            put(TokenKind.SEPARATOR, example)
    token_kinds, examples, index = torch.tensor(tokens).unbind(1)
    return Layout(
        token_kinds,
        examples,
        torch.tensor(inputs).view(count, x_len),
        torch.tensor(outputs).view(count, x_len, phrase_len),
        index.contiguous(),
    )
