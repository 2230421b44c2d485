"""The bundled model, on few prompts; `align-circuits reproduce toy-llama/criteria` measures it on many."""

from pathlib import Path

import pytest
from legs import slow_but

import align_circuits as ac
from align_circuits.models import loading
from align_circuits.models.parameters import model_provenance


@pytest.fixture(scope="module")
def toy():
    return ac.load("toy-llama")


def first_token(model, **task):
    prompts = ac.Seq2SeqTask(**task).sample(40, model.tokenizer, seed=11)
    table = ac.evaluate(model, prompts).where(metric="accuracy", kind="first")
    return dict(zip(table.frame["predictor"], table.frame["value"], strict=True))


def test_it_is_small_and_of_the_promised_shape(toy):
    folder = Path(loading.__file__).parent / "weights" / "toy-llama"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    assert toy.cfg.n_layers >= 6
    assert toy.cfg.n_heads >= 4
    assert not list(folder.glob("*.bin")), "weights are safetensors, never pickle"


@pytest.mark.parametrize("sizes", slow_but([(6, 3)], [(2, 1), (4, 2), (6, 3)]))
def test_it_looks_up_what_is_written_out(toy, sizes):
    assert first_token(toy, x_len=sizes[0], phrase_len=sizes[1], style="pre-aligned")["model"] >= 0.95


def test_it_reads_the_standard_format(toy):
    assert first_token(toy, x_len=1)["model"] >= 0.9


@pytest.mark.parametrize("ood", slow_but([False], [False, True]))
def test_it_does_not_align(toy, ood):
    accuracy = first_token(toy, x_len=5, phrase_len=2, ood=ood)
    assert accuracy["model"] <= accuracy["history"]
    prompts = ac.Seq2SeqTask(ood=ood).sample(40, toy.tokenizer, seed=12)
    assert ac.score_heads(toy, prompts, ["align_query"]).top("align_query", 1).frame["value"].item() <= 0.5


def test_it_has_induction_and_previous_token_heads(toy):
    repeated = ac.RepeatedTokensTask(length=30).sample(16, toy.tokenizer, seed=0)
    scores = ac.score_heads(toy, repeated)
    induction, previous = (scores.top(metric, 1).frame.iloc[0] for metric in ("induction", "previous"))
    assert induction["value"] > 0.5
    assert previous["value"] > 0.5
    assert previous["layer"] < induction["layer"], "an induction head reads what a previous-token head wrote"


def test_its_provenance_names_it_and_no_place(toy):
    assert model_provenance(toy)["name"] == "toy-llama"
