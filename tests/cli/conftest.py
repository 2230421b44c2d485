"""What the tests of several verbs need."""

from functools import partial

import pytest

from align_circuits.cli import main


def _said(capsys, status: int, arguments: list[str]) -> str:
    __tracebackhide__ = True
    assert main(arguments) == status
    said = capsys.readouterr()
    return said.err if status else said.out


@pytest.fixture
def ran(capsys):
    """Runs a command that succeeds, and returns what it prints."""
    return partial(_said, capsys, 0)


@pytest.fixture
def declined(capsys):
    """Runs a command that is refused, and returns what it says of it."""
    return partial(_said, capsys, 2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, random_hf_model, char_tokenizer):
    """A folder with a random Llama of two layers that reads the bundled vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    random_hf_model("llama", max_position_embeddings=256).save_pretrained(folder)
    char_tokenizer.save_pretrained(folder)
    return str(folder)
