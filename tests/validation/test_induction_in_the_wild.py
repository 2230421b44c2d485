"""The in-context gain on prose, against log-probabilities that are read from plain logits."""

from typing import Any

import pytest
import torch

import align_circuits as ac
from align_circuits.validation import induction_in_the_wild
from align_circuits.validation.induction_in_the_wild import in_context_gain, prose

EARLY, LATE, BAND, WINDOWS = 8, 40, 6, 3


@torch.no_grad()
def mean_log_prob(model, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Of each window's `BAND` tokens from place `first` on, the BOS token not counted."""
    log_probs = model(tokens).log_softmax(-1)
    places = torch.arange(first, first + BAND) + 1
    return log_probs[:, places - 1].gather(2, tokens[:, places, None])[..., 0].mean(1)


def test_late_tokens_are_held_against_early_ones_and_against_a_foreign_beginning(monkeypatch):
    model = ac.load("toy-llama", dtype=torch.float32)
    monkeypatch.setattr(induction_in_the_wild, "stored", lambda _: model)
    frame: Any = in_context_gain(
        model="toy-llama", named_on=(8, 8), windows=WINDOWS, early=EARLY, late=LATE, band=BAND, draws=1, seed=0
    )
    measured = frame[frame["draw"].isna() & (frame["metric"] == "gain")].set_index("of")["value"]
    prompts = prose(model.tokenizer, WINDOWS, LATE + BAND, 0)
    early, late = (mean_log_prob(model, prompts.tokens, first) for first in (EARLY, LATE))
    assert measured["nothing"] == pytest.approx(float((late - early).mean()), abs=1e-3)
    # Another window's beginning leaves the late tokens as much of their own text as the early ones have.
    foreign = prompts.tokens.clone()
    foreign[:, 1 : LATE + BAND + 1 - (EARLY + BAND)] = prompts.tokens.roll(-1, 0)[
        :, 1 : LATE + BAND + 1 - (EARLY + BAND)
    ]
    without = mean_log_prob(model, foreign, LATE)
    assert measured["the beginning"] == pytest.approx(float((without - early).mean()), abs=1e-3)
