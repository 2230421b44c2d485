"""transformers' reader of GGUF files."""

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast


def gguf_header(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the metadata of a GGUF file and the names of its tensors, without the arrays: each is its length.

    The public reader takes seconds for the vocabulary of one file.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    return read_gguf_metadata(str(path))


def gguf_pre_tokenizers() -> frozenset[str]:
    """Returns the ways to split text, as GGUF calls them, that transformers does not take for GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def gguf_tokenizer(path: Path, *, digits_apart: bool, as_llama3: bool) -> PreTrainedTokenizerFast:
    """Returns the tokenizer in a GGUF file, as `AutoTokenizer` does from a folder that holds nothing but the file.

    Args:
        path: The file.
        digits_apart: Whether every digit is split off before the text is split further.
        as_llama3: Whether words of the vocabulary are taken whole, and texts begin with BOS unless the file says no.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, settings = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    if digits_apart:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    if as_llama3:
        backend.model.ignore_merges = True
        settings.setdefault("add_bos_token", True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def tokens_of_other_ids(path: Path, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Returns the tokens that are no parts of words of which a tokenizer does not make the ids in the GGUF file."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    names = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    metadata, _ = read_gguf_metadata(str(path), names)
    tokens = zip(metadata[names[0]], metadata.get(names[1], []), strict=False)
    # Control tokens and user-defined ones, by their kind in the format.
    apart = [(index, text) for index, (text, kind) in enumerate(tokens) if kind in (3, 4)]
    return [text for index, text in apart if tokenizer(text, add_special_tokens=False)["input_ids"] != [index]]
