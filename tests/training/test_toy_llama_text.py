"""The pretraining mixture teaches no alignment task; the recipe makes a folder that anyone can load."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.training.toy_llama import RECIPES, pretrain
from align_circuits.training.toy_llama_text import KINDS, Mixture


def texts(kind: str, n: int = 60, length: int = 120, **options: Any) -> list[str]:
    tokenizer = char_tokenizer()
    ids, *_ = Mixture({kind: 1.0}, swapped=0.0, **options).sample(n, length, seed=0)
    return ["".join(tokenizer.convert_ids_to_tokens(row[1:].tolist())) for row in ids]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "copies"])
def test_no_document_has_the_form_of_a_standard_prompt_of_several_symbols(kind):
    standard = re.compile(r"[A-Z]{2,}[:;!][a-z]{2,}\n")
    assert standard.search("ACB:rijjpr\n")
    assert not any(standard.search(text) for text in texts(kind))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("pre-aligned", r"([A-Z]{2,8}[:;!]([A-Z][a-z]{1,4}){2,8}\n)*"),
        ("single", r"([A-Z]:[a-z]{1,4}\n)*"),
        ("pairs", r"([A-Z][:;]?[a-z]{1,4}\n)*"),
        ("phrases", r"([A-Z][a-z]{1,4})*[A-Z]?"),
        ("strings", r"([a-z]{3,12}\n)*"),
        ("echoes", r"(![A-Z]{2,8}:(?=[^\n]*[A-Z])[A-Za-z]{2,32}\n)*"),
        ("halves", r"(!?[A-Z]{2,8}:(?=[^\n]*[A-Z])[A-Za-z]{2,32}\n)*"),
        ("outputs", r"(([A-Z]:)?[a-z]{2,32}\n)*"),
    ],
)
def test_documents_have_the_form_of_their_kind(kind, form):
    for text in texts(kind):
        whole = text[: text.rfind("\n") + 1] if "\n" in text else text
        assert re.fullmatch(form, whole), text


def test_echoes_are_of_the_phrases_symbol_which_is_the_early_label():
    tokenizer = char_tokenizer()
    ids, _, early = Mixture({"echoes": 1.0}, swapped=0.0).sample(60, 120, seed=0)
    lines = 0
    for row in zip(ids, early, strict=True):
        tokens, labels = (tokenizer.convert_ids_to_tokens(part[1:].tolist()) for part in row)
        for line in re.finditer(r"!([A-Z]+):(\w+)\n", "".join(tokens)):
            symbols, body = line.groups()
            own = np.repeat([*symbols], len(body) // len(symbols)).tolist()
            assert all(letter in (symbol, letter.lower()) for symbol, letter in zip(own, body, strict=True))
            assert labels[line.start(2) : line.end(2)] == own
            lines += 1
    assert lines > 100


def test_halves_complete_each_other():
    """With one edge a state, a symbol has one phrase, in lines of either sort."""
    both = 0
    for text in texts("halves", most_symbols=3, most_edges=1):
        phrase: dict[tuple[str, int], str] = {}
        sorts = set()
        for sign, symbols, body in re.findall(r"(!?)([A-Z]+):(\w+)\n", text):
            sorts.add(sign)
            group = len(body) // len(symbols)
            for place, symbol in enumerate(symbols):
                part = body[place * group : (place + 1) * group]
                assert sign or part[0] == symbol
                for offset, letter in enumerate(part if sign else part[1:]):
                    assert letter == symbol or phrase.setdefault((symbol, offset), letter) == letter
        both += len(sorts) == 2
    assert both > 30


def test_copies_repeat():
    def repeats(text: str) -> bool:
        return any(text[:n] == text[n : 2 * n] for n in range(3, 60)) or len(set(text)) < len(text) / 2

    assert np.mean([repeats(text) for text in texts("copies")]) > 0.8


def test_the_loss_weighs_letters_and_never_the_aligned_symbols():
    ids, weights, _ = Mixture({"pre-aligned": 1.0}, swapped=0.0).sample(20, 100, seed=1)
    tokenizer = char_tokenizer()
    strings = np.array(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))[ids.numpy()]
    upper = np.vectorize(str.isupper)(strings)
    lower = np.vectorize(lambda string: len(string) == 1 and string.islower())(strings)
    assert (weights.numpy()[upper] == 0).all()
    assert (weights.numpy()[lower] == 1).all()
    assert (weights[:, 0] == 0).all()


def test_a_seed_fixes_the_documents_and_the_global_state_stays():
    mixture = Mixture({"pre-aligned": 0.5, "copies": 0.5})
    before: Any = np.random.get_state()  # noqa: NPY002 - it must not move
    (one, *_), (same, *_), (other, *_) = (mixture.sample(8, 64, seed) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    after: Any = np.random.get_state()  # noqa: NPY002
    assert (after[1] == before[1]).all()


def test_unmarked_text_asks_for_no_alignment():
    marked = {"echoes", "halves"}
    assert all(not marked & {*stage.mixture.shares} for stage in RECIPES["unmarked"].stages)
    assert any(marked & {*stage.mixture.shares} for stage in RECIPES["toy-llama"].stages)


def test_automata_stay_within_their_edges():
    for text in texts("single", most_edges=1):
        phrases = {line[2:] for line in text.split("\n")[:-1]}
        assert len(phrases) == 1, "one edge a state leaves no choice"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": {"poems": 1.0}}, "poems"),
        ({"shares": {}, "most_symbols": 1}, "most_symbols=1"),
        ({"shares": {}, "most_edges": 5}, "most_edges=5"),
        ({"shares": {}, "echoed": (0.8, 0.2)}, r"echoed=\(0.8, 0.2\): give the least and the greatest share"),
        ({"shares": {}, "echoed": (-0.1, 0.2)}, r"echoed=\(-0.1, 0.2\)"),
        ({"shares": {}, "echoed": (0.2, 1.1)}, r"echoed=\(0.2, 1.1\)"),
        ({"shares": {}, "swapped": 2.0}, "swapped=2.0: give the share of documents, 0 to 1"),
        ({"shares": {}}, "shares={}: give shares of 0 or more, and one above 0"),
        ({"shares": {"pairs": -1.0, "copies": 2.0}}, "shares={'pairs': -1.0"),
    ],
)
def test_an_impossible_mixture_is_refused(options, message):
    refused(message, Mixture, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained")
    return out, pretrain(RECIPES["smoke"], out=out, progress=False)


@pytest.mark.slow
def test_the_loss_falls_and_the_log_tells_what_the_model_can_do(trained):
    _, run = trained
    assert run.log["loss"].iloc[-1] < np.log(64)
    assert run.log["step"].tolist() == [0, 15, 30]
    for column in ("pre_aligned_first", "standard_first", "standard_later", "align_query", "induction", "previous"):
        assert run.log[column].between(0, 1).all()


def test_the_folder_is_read_by_hugging_face_and_by_load(trained):
    out, run = trained
    plain: Any = AutoModelForCausalLM.from_pretrained(out / "model")
    assert len(AutoTokenizer.from_pretrained(out / "model")) == plain.config.vocab_size == 64
    assert plain.dtype == torch.bfloat16
    model = ac.load(out / "model")
    prompts = ac.Seq2SeqTask(x_len=2, n_examples=3).sample(2, model.tokenizer)
    assert ac.evaluate(model, prompts).provenance.engine == "fast"
    trained_weights = dict(run.model.named_parameters())
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(weight, trained_weights[name].bfloat16())


def test_a_finished_run_returns_at_once_and_another_recipe_is_refused(trained):
    out, run = trained
    assert pretrain(RECIPES["smoke"], out=out, progress=False).log.equals(run.log)
    refused("another run", pretrain, RECIPES["smoke"], out=out, seed=1, progress=False)
