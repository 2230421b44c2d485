"""localize on prompts of one's own, and p-values of own relations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import raised, refused
from torch import Tensor

import align_circuits as ac
from align_circuits.heads.candidates import hopeless_notes, remedies
from align_circuits.heads.head_sets import judged
from align_circuits.heads.permutation_tests import p_values, smallest_p_values
from align_circuits.heads.redrawn_keys import fixed_rank
from align_circuits.report import save_localization

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4)


def test_the_heads_of_a_circuit_are_named_from_its_prompts(char_tokenizer, tmp_path):
    model, prompts = ac.planted_circuit(TASK, seed=3), TASK.sample(24, char_tokenizer, seed=1)
    corrupted = TASK.corrupt(prompts, "query", seed=2)
    pairs = replace(prompts, group=torch.arange(24) // 2)
    result = ac.localize(model, pairs, corrupted=corrupted, roles=["align_query", "lookup"], n_controls=2)
    for role in ("align_query", "lookup"):
        assert set(result.heads(role)) == {head for head, true in model.roles.items() if true == role}, role
    assert result.evidence.interchanges is not None
    found: Any = result.evidence.interchanges.where(metric="interchange").frame.set_index("patched")["value"]
    assert found["named"] == 1 and found["nothing"] == found["random 0"] == 0
    save_localization(result, tmp_path)
    assert "Interchange interventions" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(ac.Table.load(tmp_path / "interchanges")) == len(result.evidence.interchanges)
    tested = result.prompts.group
    assert tested is not None and len(tested) == 12 and len(tested.unique()) == 6, "pairs stay together"
    by_name = ac.localize(model, prompts, n=16, roles={"lookup": "looks"}, n_controls=0)
    assert by_name.task.roles == {"lookup": "looks"} and by_name.heads("lookup")


@pytest.fixture(scope="module")
def without_wrong_answers():
    prompts = TASK.sample(24, (model := ac.planted_circuit(TASK, seed=3)).tokenizer, seed=1)
    roles = ["align_query", "align_key", "lookup", "previous"]
    return model, prompts, ac.localize(model, prompts, roles=roles, n_controls=0)


@pytest.mark.parametrize("wrong", ["impossible", "letter", "sometimes"])
def test_verdicts_are_on_the_right_answer_above_the_wrong_one_where_each_prompt_has_one(without_wrong_answers, wrong):
    """A wrong answer that is never likely is beaten without the circuit too; names do not depend on it."""
    model, prompts, plain = without_wrong_answers
    first = (prompts.targets["kind"] == "first").to_numpy()
    token: Any = prompts.targets["token"]
    column = {"impossible": token * 0 + model.tokenizer.bos_token_id, "letter": token.groupby(first).shift(-1)}
    given = column.get(wrong, token).astype("Int64").where(first).fillna(int(token[first].iloc[0]))
    given = given.where(first & ~((wrong == "sometimes") & (np.arange(len(given)) < 9)))
    compared = replace(prompts, targets=prompts.targets.assign(wrong=given))
    found = ac.localize(model, compared, roles=plain.task.roles, n_controls=0)
    assert found.heads_by_role == plain.heads_by_role and found.named_heads
    assert found.table.frame.equals(plain.table.frame)
    necessary, before = (
        each for result in (found, plain) for each in result.verdicts if each.claim == "necessary" and not each.role
    )
    assert before.large
    if wrong == "sometimes":
        assert not found.chooses and found.verdicts == plain.verdicts
        return
    assert found.chooses and set(found.evidence.set_ablations.frame["metric"]) == {"choice_accuracy"}
    assert necessary.large == (wrong == "letter") and necessary.intact > 0.9
    assert "The right answer is more likely than the wrong one in " in found.summary
    deciding, _ = judged(found.prompts)
    edit = ac.Ablate(found.named_heads, how="mean", baseline=ac.ablation_baseline(model, deciding))
    expected = ac.evaluate(model, deciding, metrics=["choice_accuracy"], edits=[edit]).where(kind="first", offset=None)
    assert necessary.value == pytest.approx(expected.frame["value"].item())
    ablations = found.evidence.set_ablations
    for value, low, said in (
        (1.0, 0.4, "between the two answers accuracy is 1.00, but 12 test prompts are too few to show"),
        (0.5, 0.4, "between the two answers accuracy is 0.50, not above a guess (0.5); with only 12 test prompts it"),
        (1.0, 0.6, ""),
    ):
        frame = ablations.frame.assign(value=value, low=low)
        guessing = replace(found, evidence=replace(found.evidence, set_ablations=replace(ablations, frame=frame)))
        told = [warning for warning in guessing.warnings if warning.startswith("between the two answers")]
        assert len(told) == bool(said) and all(warning.startswith(said) for warning in told)


def test_what_would_allow_smaller_p_values_depends_on_what_is_redrawn():
    """Distances back for `previous`, candidates where all prompts share their keys, prompts for a relation by name."""
    draw = np.random.default_rng(0)
    prompts = ac.Prompts.from_tokens(draw.permuted(np.tile(np.arange(5, 11), (40, 1)), axis=1).tolist())
    (note,) = hopeless_notes(prompts, smallest_p_values(prompts, ["previous"]), 0.05)
    assert "allow is 0.5 (previous), and a name needs 0.05. For previous take longer texts, or a relation" in note
    assert "more prompts" not in note.lower()
    longer = ac.Prompts.from_tokens(draw.permuted(np.tile(np.arange(5, 65), (4, 1)), axis=1).tolist())
    assert not hopeless_notes(longer, smallest_p_values(longer, ["previous"]), 0.05)
    pairs = [(row, 5, [1 + row % 2]) for row in range(3)]
    own = ac.Relation.from_pairs(pairs, prompts=prompts[:3], candidates=[1, 2])
    fixed = ac.Relation.from_pairs([(row, 5, [1]) for row in range(3)], prompts=prompts[:3])
    both = prompts[:3].with_relations(own=own, fixed=fixed)
    assert remedies(both, ["own"]) == "Take more prompts for own, or more candidate positions."
    two_words = prompts[:3].with_relations(**{"my own": own})
    assert remedies(two_words, ["my own"]) == 'Take more prompts for "my own", or more candidate positions.'
    assert remedies(both, ["fixed"]).startswith("Take more candidates for fixed: its p-value is among them, not")


def test_what_cannot_be_localized(random_hf_model, char_tokenizer):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    prompts, other = (
        ac.Prompts.from_texts([f"{letter}b{letter}{last}" for letter in "acdefghijklm"], char_tokenizer)
        for last in "bn"
    )
    for source in ("text", ["a", "list"], torch.zeros(2, 3)):
        raised(TypeError, r"task is .*, not Task or Prompts; give a task such as", ac.localize, model, source)  # pyright: ignore[reportArgumentType]
    for arguments, message in [
        ({"n": 0}, "0 prompts: give at least 8"),
        ({"n": 13}, "n=13: there are 12 prompts"),
        ({"roles": ["lookup"]}, "no relation 'lookup' in these prompts"),
        ({"corrupted": prompts[:3]}, "3 corrupted prompts for 12"),
        ({"corrupted": other}, "have different targets"),
    ]:
        refused(message, ac.localize, model, prompts, **arguments)
    relation = TASK.sample(12, char_tokenizer).relations["lookup"]
    for name in ("random", "nothing", "rest of matched", "random 3", "named"):
        taken = replace(TASK.sample(12, char_tokenizer), relations={name: replace(relation, name=name)})
        refused(f"a role called '{name}': the results have rows", ac.localize, model, taken, roles=[name])
    with pytest.raises(ValueError, match="no cut leaves all groups whole"):
        ac.localize(model, replace(prompts, group=torch.zeros(12, dtype=torch.long)))


def two_names(seed: int, n: int, tokenizer: Any) -> ac.Prompts:
    """Texts with two names in varied order, of which one, at random, is the key; lengths vary too."""
    generator = np.random.default_rng(seed)
    texts, keys, others = [], [], []
    for _ in range(n):
        names = generator.permutation(list("ABCDEFGHIJ"))[:2]
        filler = "".join(generator.choice(list("klmnop"), 6 + generator.integers(3)))
        texts.append(f"{filler[:2]}{names[0]}{filler[2:4]}{names[1]}{filler[4:]}")
        key = int(generator.integers(2))
        keys.append(str(names[key]))
        others.append(str(names[1 - key]))
    prompts = ac.Prompts.from_texts(texts, tokenizer, answer=keys, positions={"IO": [*keys], "S": [*others]})
    own = ac.Relation.from_positions("END", "IO", prompts=prompts, candidates=["IO", "S"])
    return prompts.with_relations(mover=own)


def test_the_attention_that_is_kept_leaves_out_padding(random_hf_model, char_tokenizer):
    prompts = two_names(0, 16, char_tokenizer)
    start = prompts.mask.int().argmax(1)
    first = int(start[8:].argmax()) + 8
    order = [*range(8), first, *(row for row in range(8, 16) if row != first)]
    assert start[first] > 0
    result = ac.localize(ac.load(random_hf_model("llama"), tokenizer=char_tokenizer), prompts[order], n_controls=0)
    assert result.evidence.example.positions == [*range(int(start[first]), prompts.mask.shape[1])]


def test_p_values_of_named_candidates_are_uniform_on_random_weights(random_hf_model, char_tokenizer):
    """No head of a random model knows which name is right; some have a bias for the first or the second."""
    found = []
    for seed in range(12):
        model = ac.load(random_hf_model("llama", seed=seed), tokenizer=char_tokenizer)
        prompts = two_names(seed, 24, char_tokenizer)
        found.append(p_values(model, prompts, ["mover"])["mover"].ravel())
    p = np.concatenate(found)
    assert len(p) == 96 and 0.4 < p.mean() < 0.62, p.mean()
    for level in (0.05, 0.2, 0.5):
        assert (p <= level).mean() < level + 0.13, level
    assert (p <= 0.5).mean() > 0.3, "and not idle"


def test_ranks_equal_a_loop(random_hf_model, char_tokenizer):
    model, prompts = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer), two_names(0, 12, char_tokenizer)
    inputs = {"attention_mask": prompts.mask.long(), "position_ids": (prompts.mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        _, cache = model.run_with_cache(prompts.tokens, **inputs)
    places = torch.stack([prompts.positions["IO"], prompts.positions["S"]], 1)
    rank, ordered = (places[:, 0] > places[:, 1]).long(), places.sort(1).values
    found, generator = p_values(model, prompts, ["mover"], seed=1)["mover"], np.random.default_rng(5)
    orders = [np.arange(12), *(generator.permutation(12) for _ in range(4000))]
    for layer in range(2):
        for head in range(4):
            pattern = cache["pattern", layer][torch.arange(12), head, prompts.positions["END"]]
            seen = (pattern.gather(1, ordered) / pattern.gather(1, ordered).sum(1, keepdim=True)).numpy()
            scores = [seen[np.arange(12), rank.numpy()[order]].mean() for order in orders]
            share = np.mean([score >= scores[0] - 1e-7 for score in scores])
            assert found[layer, head] == pytest.approx(share, abs=0.04)
    pairs = [(row, "END", [int(ordered[row, 0])]) for row in range(12)]
    first = ac.Relation.from_pairs(pairs, prompts=prompts, candidates=ordered.tolist())
    assert fixed_rank(first) and not fixed_rank(prompts.relations["mover"])
    p = p_values(model, prompts.with_relations(first=first), ["first"])["first"]
    assert p.min() > 0.45, "where the first is always right nothing can be established"


def test_queries_that_are_no_targets_are_read_where_they_are(random_hf_model, char_tokenizer):
    """From a name to another, with the answer elsewhere; keys are redrawn among prompts of one length."""
    model, prompts = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer), two_names(1, 10, char_tokenizer)
    end = prompts.mask.shape[1]
    start = prompts.mask.int().argmax(1)
    pairs = [(row, end - 3, [int(start[row]) + 1 + row % 3]) for row in range(10)]
    own = ac.Relation.from_pairs(pairs, prompts=prompts)
    prompts = prompts.with_relations(back=own)
    assert set(own.query.tolist()) == {end - 3} != set(prompts.targets["query_pos"])
    inputs = {"attention_mask": prompts.mask.long(), "position_ids": (prompts.mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        _, cache = model.run_with_cache(prompts.tokens, **inputs)
    keys, generator = np.array([pair[2][0] for pair in pairs]), np.random.default_rng(7)
    orders = np.tile(np.arange(10), (4001, 1))
    for length in start.unique():
        alike = np.flatnonzero(start == length)
        orders[1:, alike] = generator.permuted(np.tile(alike, (4000, 1)), axis=1)
    assert len(start.unique()) > 1
    found, of_all = p_values(model, prompts, ["back"])["back"], []
    for layer in range(2):
        for head in range(4):
            attention: Tensor = cache["pattern", layer][:, head, end - 3]
            scores = attention.numpy()[np.arange(10), keys[orders]].mean(1)
            of_all.append(float((scores >= scores[0] - 1e-7).mean()))
    # Keys of several prompts hold the same token, so that a preference for tokens may explain more.
    exceeds = found.flatten() - np.array(of_all)
    assert exceeds.min() > -0.04 and np.abs(exceeds).min() < 0.04


def test_relations_that_cannot_be_compared(random_hf_model, char_tokenizer):
    model, prompts = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer), two_names(2, 8, char_tokenizer)
    at, end = prompts.positions, prompts.mask.shape[1] - 2

    def incomparable(message: str, pairs: Any, candidates: Any = None) -> None:
        own = ac.Relation.from_pairs(pairs, prompts=prompts, candidates=candidates)
        refused(f"relation 'own': {message}", p_values, model, prompts.with_relations(own=own), ["own"])

    names = [[int(at["IO"][row]), int(at["S"][row])] for row in range(8)]
    uneven = [[*names[0], end - 1], *names[1:]]
    incomparable(
        "the rows have 2 to 3 candidates; give each row equally many", [(i, "END", ["IO"]) for i in range(8)], uneven
    )
    twice = [(0, end - 1, ["IO"]), *((i, end, ["IO"]) for i in range(8))]
    incomparable("give each prompt equally many rows, side by side", twice, [names[0], *names])
    incomparable("give each prompt equally many rows, in order", twice)
    incomparable("the prompts have their targets at different", [(i, end - 1 - i % 2, [names[i][0]]) for i in range(8)])
