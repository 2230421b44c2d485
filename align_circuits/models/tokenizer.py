"""The bundled tokenizer: one token a character, spaces without meaning."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "char_tokenizer"
"""The tokenizer in the Hugging Face format, as `AutoTokenizer.from_pretrained` reads it."""


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the bundled character tokenizer of 64 tokens.

    Every letter is one token, with or without a space before it, so `"ACB:rij"` and `" A C B: r i j"` have the same
    ids. A new object each time: changing one changes no other.

    >>> char_tokenizer()(" A C B: r i j", add_special_tokens=False)["input_ids"] == char_tokenizer()(
    ...     "ACB:rij", add_special_tokens=False)["input_ids"]
    True
    """
    return PreTrainedTokenizerFast.from_pretrained(FOLDER)
