"""The bundled tokenizer: a token for each character; spaces are ignored."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "char_tokenizer"
"""The tokenizer in the Hugging Face format, for `AutoTokenizer.from_pretrained`."""


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the bundled character tokenizer of 64 tokens.

    Every letter is one token, with or without a space before it, so `"ACB:rij"` and `" A C B: r i j"` have the same
    ids. Each call returns a new object.

    >>> char_tokenizer()(" A C B: r i j", add_special_tokens=False)["input_ids"] == char_tokenizer()(
    ...     "ACB:rij", add_special_tokens=False)["input_ids"]
    True
    """
    return PreTrainedTokenizerFast.from_pretrained(FOLDER)
