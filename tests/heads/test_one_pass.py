"""Scores and accuracy from one pass, beside those of two."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.heads.one_pass import score_and_evaluate

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_the_tables_are_those_of_two_passes(random_hf_model: Any, char_tokenizer: Any, engine: Any):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    prompts, options = TASK.sample(12, char_tokenizer), ac.RunOptions(engine)
    runs = []
    with model.hooks(fwd_hooks=[]):
        hook = model.original_model.register_forward_hook(lambda *_: runs.append(1))
        scores, accuracy = score_and_evaluate(model, prompts, options=options)
        hook.remove()
    assert len(runs) == 1
    for found, expected in (
        (scores, ac.score_heads(model, prompts, options=options)),
        (accuracy, ac.evaluate(model, prompts, options=options)),
    ):
        pd.testing.assert_frame_equal(found.frame.loc[:, found.keys], expected.frame.loc[:, expected.keys])
        np.testing.assert_allclose(found.frame["value"], expected.frame["value"], atol=1e-6)
        np.testing.assert_allclose(found.frame[["low", "high"]], expected.frame[["low", "high"]], atol=1e-4)
        assert found.frame["n"].equals(expected.frame["n"]) and found.provenance == expected.provenance


def test_prompts_without_relations_are_refused(random_hf_model: Any, char_tokenizer: Any):
    model, prompts = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer), TASK.sample(2, char_tokenizer)
    with pytest.raises(ValueError, match="hold no relation"):
        score_and_evaluate(model, replace(prompts, relations={}))
