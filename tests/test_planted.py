import itertools

import pandas as pd
import pytest
import torch
from transformer_lens import head_detector

from align_circuits.models.planted import DECOYS, ROLES, planted
from align_circuits.prompts import Prompts
from align_circuits.relations import Relation
from align_circuits.tasks.seq2seq import Seq2SeqTask


def logits_at_targets(model, prompts: Prompts) -> torch.Tensor:
    with torch.no_grad():
        logits = model(prompts.tokens, attention_mask=prompts.mask)
    return logits[prompts.column("prompt"), prompts.column("query_pos")]


def accuracy(model, prompts: Prompts) -> torch.Tensor:
    """Whether each prediction is accepted."""
    predicted = logits_at_targets(model, prompts).argmax(-1)
    assert prompts.accepted is not None
    return (prompts.accepted & (prompts.letters == predicted[:, None])).any(1).double()


def head_of(model, kind: str) -> tuple[int, int]:
    return next(place for place, found in model.kinds.items() if found == kind)


def test_accuracy_is_the_oracles():
    for c, m in itertools.product((1, 2, 3), range(1, 7)):
        task = Seq2SeqTask(x_len=m, phrase_len=c, n_examples=10)
        model = planted(task, seed=7 * m + c)
        prompts = task.sample(40, model.tokenizer, seed=m)
        mean = accuracy(model, prompts).mean()
        if c == 1:
            assert mean == 1
        assert mean == pytest.approx(prompts.targets["oracle"].mean(), abs=0.015)
