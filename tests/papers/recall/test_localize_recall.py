"""The heads of the recall constructions, named by the same verb."""

import numpy as np
import pytest

import align_circuits as ac
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.redrawn_keys import in_one_place
from align_circuits.papers.recall.task.next_token import SlotsTask
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import HEADS, finetuned, pretrained
from align_circuits.report import save_localization

WORLD = RecallWorld.small(relation_tokens=True, n_grammar=3)
FACTS = FactsTask(WORLD, 3, 4, p_grammar=0.0)
CONTEXT = DemonstrationsTask(WORLD, 20)  # a single key is established among some 30 tokens that are no separators
HEAD = {name: (0, place) for place, name in enumerate(HEADS)}
BEFORE = pretrained(WORLD, FACTS.length, 4).model()
AFTER = finetuned(WORLD, CONTEXT.length, 4).model()


@pytest.mark.parametrize(
    ("model", "task", "roles", "needed"),
    [
        (BEFORE, FACTS, {"subject": "subject", "relation": "relation"}, 0.5),
        (BEFORE, SlotsTask(WORLD, 3, 4), {"mark": "grammar"}, 0.02),  # most slots may hold most tokens
        (AFTER, CONTEXT, {"query_subject": "subject", "same_type": "relation"}, 0.5),
    ],
)
def test_the_heads_of_the_constructions_are_named(model, task, roles, needed, tmp_path):
    result = ac.localize(model, task, n=64, seed=0, n_controls=1)
    for role, head in roles.items():
        assert result.heads(role) == [HEAD[head]], role
    assert set(result.named_heads) == {HEAD[head] for head in roles.values()}
    assert "The answer is correct in 1.00" in result.summary
    right = result.evidence.set_ablations.where(kind="all").frame.set_index("ablated")["value"]
    assert right["nothing"] > right["named"] + needed
    assert "is correct in 1.00" in save_localization(result, tmp_path).read_text(encoding="utf-8")


def test_a_head_that_attends_and_writes_nothing_is_not_named():
    weights = finetuned(WORLD, CONTEXT.length, 4)
    weights.ov[HEAD["relation"][1]] = 0
    result = ac.localize(weights.model(), CONTEXT, n=32, n_controls=0)
    assert result.heads("same_type") == []
    assert result.table.where(role="same_type", metric="score").to_array("score")[HEAD["relation"]] == pytest.approx(1)


def test_the_summary_says_that_positions_would_do():
    result = ac.localize(AFTER, CONTEXT, n=16, n_controls=0)
    assert "The keys of query_subject and same_type are at the same positions" in result.summary


def test_keys_at_fixed_positions_are_redrawn_among_positions():
    prompts = CONTEXT.sample(12, seed=0)
    assert in_one_place(prompts.relations["same_type"], prompts)
    assert not in_one_place(prompts.relations["subject"], prompts) or len(prompts.relations["subject"].keys_of(0)) == 1
    p = p_values(AFTER, prompts, ["same_type", "query_subject"], seed=0)
    # Separators stand at the same places in all prompts, several times: nothing is drawn there.
    length, keys = int((prompts.tokens[0] != WORLD.separator).sum()), 20
    assert length == 41
    chance = 1 / np.prod([(length - i) / (keys - i) for i in range(keys)])  # of drawing all attributes
    assert p["same_type"][HEAD["relation"]] == pytest.approx(chance, abs=0.001)
    assert p["same_type"][HEAD["subject"]] > 0.5
    assert p["query_subject"][HEAD["subject"]] == pytest.approx(1 / length, abs=0.005)
    facts = FACTS.sample(12, seed=0)
    assert not in_one_place(facts.relations["relation"], facts)


def test_slots_know_what_may_come():
    prompts = SlotsTask(WORLD, 2, 4).sample(40, seed=3)
    assert prompts.correct is not None
    for row, (tokens, mask) in enumerate(zip(prompts.tokens.tolist(), prompts.mask.tolist(), strict=True)):
        real = [token for token, is_real in zip(tokens, mask, strict=True) if is_real]
        own = real[7:]
        has_relation = any(token in WORLD.relation_ids for token in own)
        accepted = set(prompts.correct[row].nonzero()[:, 0].tolist())
        grammar, relations = set(WORLD.grammar_ids), set(WORLD.relation_ids)
        last = len(own) == 4
        assert accepted == (grammar if has_relation else relations if last else grammar | relations)
        assert prompts.targets["token"][row] in accepted
        key = prompts.relations["mark"].keys_of(row)[0]
        assert tokens[key] in relations if has_relation else key == len(tokens) - len(own)
    assert ac.evaluate(BEFORE, prompts).where(metric="accuracy", kind="all", offset=None).frame["value"].item() == 1
    with pytest.raises(ValueError, match="no slots"):
        SlotsTask(RecallWorld.small())
