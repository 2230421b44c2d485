"""Tunings with heads clamped onto gold in all examples: relations, named heads, steps, and claims that can fail."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from measured import table_of

import align_circuits as ac
from align_circuits.beyond.alignment_given import (
    ARMS,
    METRICS,
    ORDER,
    PLAIN,
    EveryExample,
    in_place_of,
    named_heads,
    reached,
)
from align_circuits.tables.tables import Table
from align_circuits.training.tuning import TuneConfig, TuneRun

TASK: dict[str, Any] = {"x_len": 3, "phrase_len": 2, "n_examples": 3, "alignment": "permutation"}


def test_relations_of_all_examples_equal_a_loop_over_the_text(char_tokenizer):
    task = EveryExample(**TASK, task_seed=2)
    prompts, plain = (each.sample(5, char_tokenizer, seed=4) for each in (task, ac.Seq2SeqTask(**TASK, task_seed=2)))
    assert prompts.tokens.equal(plain.tokens)
    expected: dict[str, dict[tuple[int, int], list[int]]] = {}

    def add(name: str, prompt: int, query: int, keys: list[int]) -> None:
        expected.setdefault(name, {})[prompt, query] = sorted(keys)

    for prompt, tokens in enumerate(prompts.tokens.tolist()):
        text = [char_tokenizer.decode(token) for token in tokens]
        colons = [at for at, token in enumerate(text) if token == ":"]
        written: dict[str, list[int]] = {}
        for example, colon in enumerate(colons):
            inputs, mine = [colon - 3, colon - 2, colon - 1], {}
            for phrase, place in enumerate(task.aligned):
                letter, symbol = colon + 1 + 2 * phrase, text[inputs[place]]
                add("gold align_query", prompt, letter - 1, [inputs[place]])
                add("gold align_key", prompt, letter, [inputs[place]])
                add("blind align_query", prompt, letter - 1, inputs)
                add("blind align_key", prompt, letter, inputs)
                if example:
                    add("gold lookup", prompt, letter - 1, written[symbol])
                    before = [at for all_of in (*written.values(), *mine.values()) for at in all_of]
                    add("blind lookup", prompt, letter - 1, before)
                mine[symbol] = [letter, letter + 1]
            written = {symbol: [*written.get(symbol, []), *own] for symbol, own in mine.items()}
    for name, wanted in expected.items():
        relation = prompts.relations[name]
        rows = zip(relation.prompt.tolist(), relation.query.tolist(), strict=True)
        assert {row: relation.keys_of(at) for at, row in enumerate(rows)} == wanted, name


def test_in_the_test_example_gold_is_that_of_the_task(char_tokenizer):
    prompts = EveryExample(**TASK).sample(3, char_tokenizer, seed=1)
    plain = ac.Seq2SeqTask(**TASK).sample(3, char_tokenizer, seed=1)
    for role in ("align_query", "align_key", "lookup"):
        standard, gold = plain.relations[role], prompts.relations[f"gold {role}"]
        keys = {(int(gold.prompt[at]), int(gold.query[at])): gold.keys_of(at) for at in range(len(gold))}
        kept = prompts.relations[role]
        first = plain.targets["kind"].to_numpy()[standard.target.numpy()] == "first"
        assert len(kept) == first.sum() == 9
        for at in first.nonzero()[0].tolist():
            assert keys[int(standard.prompt[at]), int(standard.query[at])] == standard.keys_of(at)


def test_steps_are_those_of_the_plain_runs_level_and_the_last_where_it_is_never_reached():
    steps = np.arange(0, 12, 2)
    courses = {
        PLAIN: [0.2, 0.2, 0.2, 0.8, 0.8, 0.8],  # the middle is .5
        "early": [0.6, 0.6, 0.6, 0.9, 0.9, 0.9],  # the middle of its own rise comes late, and would mislead
        "never": [0.2, 0.3, 0.4, 0.4, 0.9, 0.4],
    }
    rows = [
        {"arm": arm, "seed": seed, "metric": "lookup", "step": step, "value": value if seed == 1 else 0.2}
        for arm, values in courses.items()
        for seed in (0, 1)
        for step, value in zip(steps, values, strict=True)
    ]
    found = reached(pd.DataFrame(rows)).pivot(index=["part", "seed"], columns="arm", values="value")
    assert found.loc[("step", 1)].to_dict() == {PLAIN: 6, "early": 0, "never": 10}
    assert found.loc[("reached", 1)].to_dict() == {PLAIN: 1, "early": 1, "never": 0}
    assert found.loc[("step", 0)].isna().all() and found.loc[("reached", 0)].isna().all(), "nothing emerged in seed 0"


def run_of(scores: dict[str, dict[tuple[int, int], float]]) -> TuneRun:
    """A tuning whose heads score 1 in the first of four probes, and in the others what is given."""
    rows = [
        {"metric": metric, "step": step, "layer": layer, "head": head, "value": value if step else 1.0}
        for metric, of_heads in scores.items()
        for (layer, head), value in of_heads.items()
        for step in range(4)
    ]
    table = table_of(rows, ood=False, level="head", kind="all")
    return TuneRun(None, table, pd.DataFrame(), TuneConfig(), None)


def test_heads_are_named_by_their_last_scores_and_have_one_kind_of_role():
    scores = {
        "align_query": {(0, 0): 0.85, (0, 1): 0.7, (1, 0): 0.1},
        "align_key": {(0, 0): 0.3, (0, 1): 0.4, (1, 0): 0.1},
        "lookup": {(0, 0): 0.9, (0, 1): 0.95, (1, 0): 0.5},
    }
    named = named_heads(run_of(scores))
    assert named == {"align_query": [(0, 0)], "align_key": [(0, 1)], "lookup": [(1, 0)]}
    among = [(layer, head) for layer in range(2) for head in range(3)]
    instead = in_place_of({"align_query": [(0, 0)], "align_key": [(0, 1)]}, named, among, seed=0)
    assert set(instead) == {(0, 0), (0, 1)} and len({*instead.values()}) == 2
    assert not {*instead.values()} & {(0, 0), (0, 1), (1, 0)}


def steps_table(steps: dict[str, dict[str, float]], untrained: float) -> Table:
    """The step of each arm and metric, 20 by default, and the best lookup before training, on five unlike seeds."""
    emerged = [
        {"arm": arm, "seed": seed, "metric": metric, "value": steps.get(arm, {}).get(metric, 20.0) + away * seed / 9}
        for arm, away in ((PLAIN, 1), *((arm, -1) for arm in ARMS))
        for metric in METRICS
        for seed in range(5)
    ]
    lookup = [
        {"part": "course", "arm": arm, "seed": seed, "step": 0, "metric": "lookup", "value": value + seed / 99}
        for arm, value in (("aligners on gold", untrained), ("others on gold alignment", 0.2))
        for seed in range(5)
    ]
    return table_of([*({"part": "step", **row} for row in emerged), *lookup])


ASKED = {
    "aligners on gold": {"lookup": 0.0, "accuracy": 0.0},
    "lookup heads on gold": {"align_query": 60.0, "align_key": 60.0},
}


def test_claims_hold_where_lookup_waits_for_alignment_and_not_where_nothing_moves():
    assert {check.verdict for check in ORDER.check(steps_table(ASKED, 0.9))} == {"holds"}
    assert {check.verdict for check in ORDER.check(steps_table({}, 0.2))} == {"fails", "no evidence"}


@pytest.mark.parametrize(("arm", "metric"), [(arm, metric) for arm in ARMS for metric in ("lookup", "align_query")])
def test_an_arm_that_is_early_breaks_the_claim_that_it_is_not(arm, metric):
    changed = {**ASKED, arm: {**ASKED.get(arm, {}), metric: 0.0}}
    broken = {check.claim for check in ORDER.check(steps_table(changed, 0.9)) if check.verdict != "holds"}
    moves = {
        ("aligners blind", "lookup"),
        ("others on gold alignment", "lookup"),
        ("lookup heads on gold", "align_query"),
        ("lookup heads blind", "align_query"),
        ("others on gold lookup", "align_query"),
    }
    assert any(arm in claim for claim in broken) == ((arm, metric) in moves - {("lookup heads blind", "align_query")})
