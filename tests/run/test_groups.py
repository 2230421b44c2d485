"""Related prompts: intervals are over groups of them, whatever verb measures."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import align_circuits as ac
from align_circuits.circuits.faithful import faithfulness
from align_circuits.heads.permutation_tests import p_values, smallest_p_values
from align_circuits.run.pairs import Pair
from align_circuits.tables import intervals as stats
from align_circuits.tasks.own_prompts import OwnPrompts
from align_circuits.tasks.partners import next_unrelated

GROUPS = ["a", "b", "a", "c", "b", "d", "a", "e"]


@pytest.fixture(scope="module")
def measured(random_hf_model, char_tokenizer):
    """Each verb's table of related pairs, and of the same pairs as if they were independent."""
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    texts = [f"{first}{second}k" for first, second in zip("abcdefgh", "hgfedcba", strict=True)]
    corrupted = [text[::-1][1:] + "k" for text in texts]

    def tables(groups: list[Any]) -> dict[str, Any]:
        pair = Pair(*ac.Prompts.from_pairs(texts, corrupted, char_tokenizer, answer=list("abababab"), groups=groups))
        found = ac.localize(
            model, pair.clean, corrupted=pair.corrupted, roles={"previous": "attends back"}, n_controls=0
        )
        return {
            "evaluate": ac.evaluate(model, pair.clean),
            "ablate": ac.ablate_heads(model, pair.clean, "zero"),
            "patch": ac.patch_heads(model, pair),
            "patch, baselines": ac.patch_heads(model, pair).baselines,
            "attribute": ac.attribute_heads(model, pair),
            "score": ac.score_heads(model, pair.clean, ["sink"]),
            "localize": found.evidence.patching_effects,
        }

    return tables(GROUPS), tables([*range(8)])


@pytest.mark.parametrize("name", ["evaluate", "ablate", "patch", "patch, baselines", "attribute", "score"])
def test_intervals_are_over_groups(measured, name):
    grouped, alone = (tables[name] for tables in measured)
    np.testing.assert_allclose(grouped.frame["value"], alone.frame["value"], rtol=1e-6, atol=1e-9)
    assert grouped.frame["n"].tolist() == alone.frame["n"].tolist()
    means = np.stack([alone.values[:, np.array(GROUPS) == group].mean(1) for group in "abcde"], 1)
    np.testing.assert_allclose(grouped.values, means, rtol=1e-6, atol=1e-9)
    weights = np.tile([3.0, 2, 1, 1, 1], (len(means), 1))
    unbounded = grouped.frame["metric"].isin(["log_prob", "logit"]).to_numpy()
    low, high = stats.mean_interval(means[unbounded], weights[unbounded])
    np.testing.assert_allclose(
        grouped.frame[["low", "high"]].to_numpy()[unbounded], np.stack([low, high], 1), atol=1e-8
    )


def test_normalized_effects_are_of_groups():
    """Clean and corrupted runs are over the same groups as the effects between them."""
    task = ac.Seq2SeqTask(x_len=3, n_examples=4)
    model, group = ac.planted_circuit(task, seed=0), torch.arange(8) // 2
    clean, corrupted = (replace(each, group=group) for each in task.pairs(task.sample(8, model.tokenizer), 0))
    normal = ac.patch_heads(model, Pair(clean, corrupted)).where(kind="all").normalized()
    low, value = (normal.frame[name].to_numpy(dtype=float) for name in ("low", "value"))
    assert value.max() > 0.3 and (low <= value).all()


def test_localize_is_over_groups(measured):
    """Which are not torn apart, so that its halves may differ in size."""
    assert measured[0]["localize"].values.shape[1] <= 3 < measured[1]["localize"].values.shape[1] == 4


def test_they_cover_where_prompts_of_a_group_share_half_of_the_variance():
    """Four groups of six: taken for independent, intervals cover .69."""
    generator = np.random.default_rng(0)
    group = np.repeat(np.arange(4), 6)
    values = generator.normal(size=(4000, 4))[:, group] + generator.normal(size=(4000, 24))
    ones = np.ones_like(values)
    low, high = stats.mean_interval(values, ones)
    assert np.mean((low <= 0) & (high >= 0)) < 0.75
    low, high = stats.mean_interval(*stats.by_group(values, ones, group))
    assert 0.92 < np.mean((low <= 0) & (high >= 0)) < 0.98


def test_differences_are_paired_by_groups(measured):
    grouped, alone = (tables["patch"] for tables in measured)
    nothing = (grouped - grouped).where(metric="log_prob").frame
    assert nothing["low"].abs().max() == nothing["high"].abs().max() == 0
    assert (grouped - alone).frame["low"].isna().all(), "groups and prompts are no pairs"


def again(prompts: ac.Prompts, times: int) -> ac.Prompts:
    """Each prompt so many times, in a group of its own."""
    rows = torch.arange(len(prompts)).repeat_interleave(times)
    targets = [prompts.targets[prompts.targets["prompt"] == int(row)].assign(prompt=i) for i, row in enumerate(rows)]
    of_tokens = {name: getattr(prompts, name)[rows] for name in ("inputs", "mask", "token_kinds", "example")}
    none: dict[str, Any] = {"correct": None, "own_correct": None, "relations": {}, "latent": {}, "positions": {}}
    return replace(prompts, **of_tokens, **none, targets=pd.concat(targets, ignore_index=True), group=rows)


def test_repeating_prompts_leaves_intervals_of_faithfulness_as_they_are():
    task = ac.Seq2SeqTask(x_len=3, n_examples=4)
    model = ac.planted_circuit(task, seed=0)
    clean, corrupted = task.pairs(task.sample(6, model.tokenizer, seed=0), 0)
    once, thrice = (Pair(again(clean, n), again(corrupted, n), direction="noise") for n in (1, 3))
    scores = ac.attribute_edges(model, once)
    frames = (faithfulness(model, pair, scores, fractions=[0.02, 0.1]).frame for pair in (once, thrice))
    one, other = (frame[["value", "low", "high"]].to_numpy() for frame in frames)
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert (one[:, 2] > one[:, 1]).any()


def test_probes_of_a_tuning_are_over_groups(llama, char_tokenizer):
    texts = [f"{first}{second}:" for second in "ij" for first in "abcdefgh"]
    prompts = ac.Prompts.from_texts(
        texts, char_tokenizer, answer=[text[1] for text in texts], groups=list("abcdefgh" * 2)
    )
    config = ac.TuneConfig.preset("small", steps=1, probe_every=1, probe_prompts=6)
    frame = ac.tune(llama, prompts, config, progress=False).table.where(step=0, metric="log_prob", kind="all").frame
    held_out = OwnPrompts(prompts).split(0)[1].prompts
    expected = ac.evaluate(llama, held_out, metrics=["log_prob"]).where(kind="all").frame
    columns = ["value", "low", "high", "n"]
    np.testing.assert_allclose(frame[columns].iloc[0], expected[columns].iloc[0], atol=1e-5)


@pytest.mark.parametrize("step", [1, -1])
def test_a_partner_is_of_another_group_where_half_of_the_prompts_are(char_tokenizer, step):
    draw = np.random.default_rng(0)
    for _ in range(200):
        n = int(draw.integers(2, 12))
        group = draw.integers(0, 5, n)
        prompts = replace(ac.Prompts.from_tokens([[1, i, 3] for i in range(n)]), group=torch.from_numpy(group))
        partner = next_unrelated(prompts, step).numpy()
        assert sorted(partner) == [*range(n)] and (partner != np.arange(n)).all()
        if np.bincount(group).max() <= n / 2:
            assert (group[partner] != group).all()
    texts = ["ab", "ab", "cd", "ef"]
    equal = ac.Prompts.from_texts(texts, char_tokenizer, answer=list("xxyz"), groups=[0, 0, 1, 2])
    equal = replace(equal, group=None)
    assert all(texts[one] != texts[other] for one, other in enumerate(next_unrelated(equal, step).tolist()))
    grouped = replace(equal, group=torch.arange(4))
    assert all(texts[one] != texts[other] for one, other in enumerate(next_unrelated(grouped, step).tolist()))
    alone = ac.Prompts.from_tokens([[1, 2], [1, 3], [1, 4]])
    assert next_unrelated(alone, step).tolist() == [(i + step) % 3 for i in range(3)]


def test_the_first_of_each_group_tests_attention(llama, char_tokenizer):
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("abcdefgh"), 6, replace=False)) for _ in range(8)]
    keys = draw.integers(0, 3, 8)

    def made(times: int) -> ac.Prompts:
        rows = np.repeat(np.arange(8), times)
        answers = ["z"] * len(rows)
        prompts = ac.Prompts.from_texts(
            [texts[row] for row in rows], char_tokenizer, answer=answers, groups=rows.tolist()
        )
        end = prompts.column("query_pos")
        rows_of = [(i, int(end[i]), [int(end[i]) - 3 - int(keys[row])]) for i, row in enumerate(rows)]
        relation = ac.Relation.from_pairs(rows_of, prompts=prompts)
        return prompts.with_relations(own=relation)

    one, three = made(1), made(3)
    assert smallest_p_values(three, ["own"]) == smallest_p_values(one, ["own"])
    np.testing.assert_allclose(p_values(llama, three, ["own"])["own"], p_values(llama, one, ["own"])["own"])
