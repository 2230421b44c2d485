"""What the tests of several verbs need."""

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, random_hf_model, char_tokenizer):
    """A folder with a random Llama of two layers that reads the bundled vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    random_hf_model("llama", max_position_embeddings=256).save_pretrained(folder)
    char_tokenizer.save_pretrained(folder)
    return str(folder)
