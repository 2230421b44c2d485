"""Related prompts: intervals are over groups of them, whatever verb measures."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import align_circuits as ac
from align_circuits.run.pairs import Pair
from align_circuits.tables import intervals as stats

GROUPS = ["a", "b", "a", "c", "b", "d", "a", "e"]


@pytest.fixture(scope="module")
def measured(random_hf_model, char_tokenizer):
    """Each verb's table of related pairs, and of the same pairs as if they were independent."""
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    texts = [f"{first}{second}k" for first, second in zip("abcdefgh", "hgfedcba", strict=True)]
    corrupted = [text[::-1][1:] + "k" for text in texts]

    def tables(groups: list[str] | None) -> dict[str, Any]:
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

    return tables(GROUPS), tables(None)


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
