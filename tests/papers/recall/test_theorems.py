"""What the experiments on contextual recall's theory measure, on constructions and on noise whose answer is known."""

import numpy as np
import pandas as pd
import pytest
import torch

from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import (
    blocks,
    head_of,
    localized,
    measure,
    weight_slices,
)
from align_circuits.papers.recall.figures.propositions_1_to_4 import all_correct
from align_circuits.papers.recall.figures.theorems_1_and_2 import _jackknife
from align_circuits.papers.recall.task.next_token import PLACES, allowed_after
from align_circuits.papers.recall.task.sequences import FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import HEADS, pretrained
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

WORLD = RecallWorld.small(relation_tokens=True)
TASK = FactsTask(WORLD, 3, 4, p_grammar=0.0)
MODEL = pretrained(WORLD, TASK.length, 4, corrections=("values",)).model()


def test_what_the_data_allow_is_what_a_reader_would_say():
    tokens, following = TASK.batch(3, 20)
    allowed, kind = allowed_after(WORLD, tokens, 4)
    assert allowed.gather(2, following[..., None]).all()  # what came is allowed
    for row, (read, places) in enumerate(zip(tokens.tolist(), kind.tolist(), strict=True)):
        for at, place in enumerate(places):
            own = read[at - at % 7 : at + 1]
            relations = [token for token in own if token in WORLD.relation_ids]
            expected = {
                "subject": {own[0]},
                "separator": {WORLD.separator},
                "attribute": {int(WORLD.facts[relations[0] - WORLD.relation_ids.start, own[0]])}
                if relations
                else set(),
                "before relation": {*WORLD.grammar_ids, *WORLD.relation_ids},
                "last before relation": set(WORLD.relation_ids),
                "after relation": set(WORLD.grammar_ids),
            }[PLACES[place]]
            assert set(allowed[row, at].nonzero()[:, 0].tolist()) == expected
            assert (PLACES[place] == "subject") == (at % 7 == 6)


def test_a_tie_with_what_is_not_allowed_is_wrong():
    logits = torch.tensor([[2.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 2.0, 2.0]])
    allowed = torch.tensor([[True, False, True], [True, False, False], [False, True, True]])
    assert all_correct(logits, allowed).tolist() == [False, True, True]


def test_the_constructions_heads_measure_as_they_were_built():
    prompts = TASK.sample(32, seed=0)
    rows = measure(MODEL, WORLD, prompts, "pretraining")
    at = {(row["metric"], row.get("head"), row.get("what")): row["value"] for row in rows}
    relation, subject = HEADS.index("relation"), HEADS.index("subject")
    assert at["exact", None, None] == 1
    assert at["attention", subject, "subject"] == pytest.approx(1)
    assert at["attention", relation, "relation"] == pytest.approx(1)
    assert at["cosine", subject, "f_subj"] == pytest.approx(1)
    assert at["cosine", relation, "f_rel"] == pytest.approx(1)
    assert at["cosine", relation, "f_rel of another"] == pytest.approx(0)
    assert 0 < at["cosine", subject, "f_subj of another"] < 0.9
    weights = {(row["head"], row["what"]): row["value"] for row in blocks(MODEL, WORLD)}
    assert weights[subject, "subject to own"] == 0
    assert weights[subject, "subject to other values"] == -1
    assert weights[subject, "subject to other tokens"] == 0
    assert weights[relation, "relation to own"] == 1
    assert weights[relation, "relation to other values"] == 0
    named = [row for row in localized(MODEL, {"pretraining": TASK}, 32) if row["metric"] == "named"]
    assert {(row["what"], row["head"]) for row in named} == {("subject", subject), ("relation", relation)}
    entries = [row["value"] for row in weight_slices(MODEL, WORLD) if row["head"] == subject]
    assert len(entries) == 24**2  # 8 subjects, 4 + 4 values, 4 grammar tokens, [sep] and 3 relations
    assert set(entries) == {0.0, -1.0}


def test_the_cosine_of_an_expectation_has_no_noise_in_it():
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(400, generator=generator)
    groups = 3 * direction + 6 * torch.randn(8, 400, generator=generator)
    value, reach = _jackknife(groups, direction)
    assert torch.nn.functional.cosine_similarity(groups.mean(0), direction, dim=0).item() < 0.9
    assert abs(value - 1) < reach < 0.1
    assert _jackknife(direction[None], direction) == (pytest.approx(1), 0.0)
    other, reach = _jackknife(groups, torch.from_numpy(np.roll(direction.numpy(), 1)))
    assert abs(other) < 0.2
    assert reach > 0


def test_the_relation_head_is_another_than_the_subject_head():
    shares = {"subject": (0.9, 0.1, 0.2), "relation": (0.8, 0.3, 0.1)}  # head 0 attends most to both
    rows = [{"what": what, "head": head, "value": shares[what][head]} for what in shares for head in range(3)]
    keys = {
        "positions": "relative",
        "stage": "pretrained",
        "sequences": "pretraining",
        "metric": "attention",
        "seed": 0,
    }
    table = Table(pd.DataFrame(rows).assign(**keys, low=np.nan, high=np.nan, n=1), Provenance("test"))
    assert (head_of(table, "subject"), head_of(table, "relation")) == ([0], [1])
