"""What tests of several papers share."""

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory, char_tokenizer, random_hf_model):
    """A random Llama that reads the bundled vocabulary, as a folder."""
    folder = tmp_path_factory.mktemp("random-llama")
    random_hf_model("llama", max_position_embeddings=1500).save_pretrained(folder)
    char_tokenizer.save_pretrained(folder)
    return str(folder)
