"""The studies of the demos, on a small random model, beside patching by hand."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import direct, logit_diff, next_token, patched

import align_circuits as ac

DEMOS = Path(__file__).parents[2] / "demos"


@pytest.fixture(scope="module")
def small(random_hf_model, char_tokenizer):
    return ac.load(
        random_hf_model("llama", seed=1, max_position_embeddings=128, num_hidden_layers=4), tokenizer=char_tokenizer
    )


@pytest.fixture(scope="module")
def study(small):
    """Runs a demo with the small model in place of its own, and returns its names."""
    done: dict[str, Any] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in done:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ac, "load", lambda _: small)
                done[name] = runpy.run_path(str(DEMOS / f"{name}.py"))
        return done[name]

    return run


@pytest.mark.parametrize("name", ["indirect_object", "greater_than", "subject_verb_agreement"])
def test_a_study_is_at_most_forty_lines(name):
    lines = (DEMOS / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 40


def effects_of(table: ac.Table) -> dict[tuple[int, int], float]:
    return dict(zip(table.head_indices, table.frame["value"], strict=True))


def test_the_indirect_object_by_hand(study, small):
    names = study("indirect_object")
    answers = [(f" {io}", f" {s}") for io, s in names["rows"]]
    texts, swapped = names["texts"], names["swapped"]
    metrics = [logit_diff(small, text, *both) for text, both in zip(texts, answers, strict=True)]
    found = effects_of(names["effects"])
    assert len(found) == 12 and max(map(abs, found.values())) > 1e-2
    for head, value in list(found.items())[::4]:
        assert value == pytest.approx(patched(small, swapped, texts, metrics, head, only_end=True), abs=1e-5)
    written = effects_of(names["direct"].heads())
    for head in ((0, 1), (1, 2)):
        by_hand = [direct(small, text, *both, head) for text, both in zip(texts, answers, strict=True)]
        assert written[head] == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-5)
    with torch.no_grad():
        ends = [small(torch.tensor([small.tokenizer(text)["input_ids"]]))[0, -1] for text in texts]
    whole = sum(metric(end) for metric, end in zip(metrics, ends, strict=True)) / len(ends)
    assert names["direct"].frame["value"].sum() == pytest.approx(whole, abs=1e-4)


def test_greater_than_by_hand(study, small):
    names = study("greater_than")
    texts, corrupted = names["texts"], names["corrupted_texts"]

    def metric_of(text: str, of: int) -> Any:
        ids = [next_token(small, text, letter) for letter in "ABCDEFGHIJ"]
        return lambda logits: float(sum(logits.softmax(-1)[i] * (1 if n > of else -1) for n, i in enumerate(ids)))

    metrics = [metric_of(text, of) for text, of in zip(texts, names["tens"], strict=True)]
    found = effects_of(names["effects"])
    assert max(map(abs, found.values())) > 1e-3
    for head, value in list(found.items())[::4]:
        assert value == pytest.approx(patched(small, texts, corrupted, metrics, head, only_end=False), abs=1e-5)


def test_places_are_of_heads_alone(study):
    names = study("indirect_object")
    with pytest.raises(ValueError, match=r"some rows are of no single head: select those of heads with \.heads\(\)"):
        _ = names["direct"].head_indices
