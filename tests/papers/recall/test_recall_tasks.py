"""The world of contextual recall and what is told of it, against a reader that goes token by token."""

import inspect
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from refusals import refused

from align_circuits.papers.recall.task.posterior import type_ceiling, type_posterior
from align_circuits.papers.recall.task.sequences import IGNORED, DemonstrationsTask, FactsTask, followed_by_grammar
from align_circuits.papers.recall.task.world import RecallWorld, distances
from align_circuits.prompts.prompts import TokenKind
from align_circuits.tasks.rng import Rng

PLAIN = RecallWorld.small()
RELATIONS = RecallWorld.small(relation_tokens=True)


def read(world: RecallWorld, tokens: list[int]) -> list[dict]:
    """Subsequences as a person would read them: one ends where the next subject or the end is."""
    kinds = dict.fromkeys(world.subject_ids, "subject") | dict.fromkeys(world.relation_ids, "relation")
    kinds |= dict.fromkeys(world.grammar_ids, "grammar") | {world.separator: "separator"}
    kinds |= {i: "value" for ids in world.value_ids for i in ids}
    parts: list[dict] = [{"at": 0}]
    for pos, token in enumerate(tokens):
        kind = kinds[token]
        begins = kind == "subject" if world.relation_tokens else pos > 0 and tokens[pos - 1] == world.separator
        if begins and pos:
            parts.append({"at": pos})
        parts[-1].setdefault(kind, []).append(pos)
    return parts


@pytest.mark.parametrize("world", [PLAIN, RELATIONS])
def test_values_are_dealt_evenly_and_ids_fill_the_vocabulary(world):
    for type_, ids in enumerate(world.value_ids):
        _, counts = np.unique(world.facts[type_], return_counts=True)
        assert set(world.facts[type_].tolist()) == set(ids)
        assert counts.max() - counts.min() <= 1
        assert (world.type_of[list(ids)] == type_).all()
    named = [*world.subject_ids, *(i for ids in world.value_ids for i in ids), *world.grammar_ids, *world.relation_ids]
    assert [*named, world.separator] == list(range(world.d_vocab)) == list(world.token_strings)
    assert world.token_strings[world.separator] == "[sep] "


@pytest.mark.parametrize("div", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_diversity_that_is_asked_for_is_reached(div, seed):
    world = RecallWorld.paper(div=div, world_seed=seed)
    nearest = min(
        np.mean([0.5 * sum(abs(p - q) for p, q in zip(*rows, strict=True)) for rows in zip(one, other, strict=True)])
        for place, one in enumerate(world.chains)
        for other in world.chains[:place]
    )
    assert nearest == pytest.approx(world.attained_div, abs=1e-12)
    assert nearest == pytest.approx(div, abs=0.01)
    assert np.allclose(np.concatenate([world.chains, world.grammar_only[None]]).sum(-1), 1)


def test_more_diversity_needs_a_smaller_dirichlet_parameter():
    alphas = [RecallWorld.small(div=div).alpha for div in (0.2, 0.4, 0.6)]
    assert alphas == sorted(alphas, reverse=True)
    assert distances(PLAIN.chains).diagonal().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_values": (17, 4, 4)}, "give at most 16 values"),
        ({"n_values": (4,)}, "2 types or more"),
        ({"n_values": (4, 0)}, "from 1 up"),
        ({"n_subjects": 0}, "n_subjects is 0"),
        ({"n_grammar": 1}, "n_grammar is 1"),
        ({"world_seed": -1}, "world_seed is -1"),
        ({"div": 0.0}, "div is 0.0"),
        ({"div": None}, "give div=None there, and only there"),
        ({"div": 0.99, "n_grammar": 3, "n_values": (4,) * 8}, "the nearest found for 8 chains"),
    ],
)
def test_a_world_that_cannot_be_is_refused(changes, message):
    refused(message, RecallWorld.small, **changes)


def test_a_refused_diversity_names_one_that_is_reached():
    with pytest.raises(ValueError, match="the nearest found") as caught:
        RecallWorld.small(div=0.99, n_grammar=3, n_values=(4,) * 8)
    nearest = float(str(caught.value).split("is ")[-1].split(" ")[0])
    assert RecallWorld.small(div=nearest, n_grammar=3, n_values=(4,) * 8).attained_div == pytest.approx(
        nearest, abs=0.02
    )


def test_relation_tokens_have_no_chains():
    with pytest.raises(ValueError, match="no Markov chains"):
        _ = RELATIONS.chains


def test_a_split_divides_the_subjects():
    seen, held_out = PLAIN.split(5, seed=3)
    assert len(seen) == 5
    assert sorted(seen + held_out) == list(PLAIN.subject_ids)
    assert seen != PLAIN.split(5, seed=4)[0]
    assert PLAIN.split(16)[1] == ()


@pytest.mark.parametrize("n_values", [7, 9, 11])
def test_a_split_shows_as_many_values_as_asked(n_values):
    seen, _ = PLAIN.split(4, n_values=n_values)
    assert len({PLAIN.facts[type_, j] for type_ in range(3) for j in seen}) == n_values


def test_impossible_splits_are_refused():
    refused("give 1 to 16", PLAIN.split, 17)
    refused("the nearest found for 2 subjects is 6", PLAIN.split, 2, n_values=9)


TASKS = [
    FactsTask(PLAIN, n_facts=4, grammar_len=5, p_grammar=0.4),
    FactsTask(RELATIONS, n_facts=4, grammar_len=5, p_grammar=0.0),
    DemonstrationsTask(PLAIN, 3),
    DemonstrationsTask(RELATIONS, 3),
    DemonstrationsTask(PLAIN, 3, grammar_lens=(1, 4)),
    DemonstrationsTask(RELATIONS, 3, grammar_lens=(1, 4), subjects=(1, 2, 3), query_subjects=(9, 10)),
]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_tell_facts_of_the_world(task):
    world, prompts = task.world, task.sample(30, seed=2)
    for index in range(len(prompts)):
        tokens = prompts.tokens[index][prompts.mask[index]].tolist()
        target = prompts.targets.iloc[index]
        assert target["query_pos"] == prompts.inputs.shape[1] - 1
        parts = read(world, [*tokens, int(target["token"])])
        told = [part for part in parts if "value" in part]
        full = [*tokens, int(target["token"])]
        for part in told:
            subject, value = full[part["subject"][0]], full[part["value"][0]]
            type_ = world.type_of[value]
            assert value == world.facts[type_, subject]
            assert [full[pos] for pos in part.get("relation", [])] == (
                [world.relation_ids[type_]] if world.relation_tokens and part.get("relation") else []
            )
        assert "value" in parts[-1]
        subjects = {full[part["subject"][0]] for part in told}
        types = {int(world.type_of[full[part["value"][0]]]) for part in told}
        assert len(subjects if isinstance(task, FactsTask) else types) == 1
        if isinstance(task, DemonstrationsTask):
            assert len(told) == task.n_demos + 1
            shown = task.subjects or tuple(world.subject_ids)
            assert {full[part["subject"][0]] for part in told[:-1]} <= set(shown)
            assert full[told[-1]["subject"][0]] in (task.query_subjects or shown)


@pytest.mark.parametrize("task", TASKS)
def test_relations_are_what_a_reader_finds(task):
    world, prompts = task.world, task.sample(30, seed=5)
    found: dict[str, list] = {}
    for index in range(len(prompts)):
        start = int((~prompts.mask[index]).sum())
        tokens = prompts.tokens[index, start:].tolist()
        target = int(prompts.targets["token"][index])
        parts, wanted = read(world, tokens), world.type_of[target]
        asked = tokens[parts[-1]["subject"][0]]
        last = len(parts) - 1
        expected: dict[str, list[int]] = {}
        for place, part in enumerate(parts):
            mine = "subject" in part and (
                place == last or world.type_of[tokens[part["value"][0]]] == wanted
                if "value" in part or place == last
                else False
            )
            subjects, values = part.get("subject", []), part.get("value", [])
            signs = part.get("grammar", []) + part.get("relation", [])
            same = [pos for pos in values if world.type_of[tokens[pos]] == wanted]
            own = {
                "subject": [pos for pos in subjects if tokens[pos] == asked],
                "query_subject": subjects if place == last else [],
                "same_type": same,
                "type": same + (signs if mine else []),
                "grammar": part.get("grammar", []) if place == last else [],
                "relation": part.get("relation", []) if place == last else [],
            }
            for name, positions in own.items():
                expected.setdefault(name, []).extend(pos + start for pos in positions)
        for name, positions in expected.items():
            if positions:
                found.setdefault(name, []).append((index, sorted(positions)))
    assert set(found) == set(prompts.relations)
    for name, rows in found.items():
        relation = prompts.relations[name]
        assert relation.prompt.tolist() == [index for index, _ in rows]
        assert [relation.keys_of(row) for row in range(len(rows))] == [positions for _, positions in rows]
        _, candidates = relation.expand()
        assert torch.equal(candidates, prompts.mask[relation.prompt])


@pytest.mark.parametrize("task", TASKS)
def test_roles_are_what_tokens_are(task):
    prompts, world = task.sample(30, seed=1), task.world
    values = [i for ids in world.value_ids for i in ids]
    for role, ids in (
        (TokenKind.INPUT, world.subject_ids),
        (TokenKind.OUTPUT, values),
        (TokenKind.TEXT, world.grammar_ids),
        (TokenKind.RELATION, world.relation_ids),
        (TokenKind.SEPARATOR, [world.separator]),
    ):
        expected = torch.isin(prompts.tokens, torch.tensor(list(ids), dtype=torch.long)) & prompts.mask
        assert torch.equal(prompts.token_kinds == role, expected), role
    assert torch.equal(prompts.token_kinds == TokenKind.PAD, ~prompts.mask)


def test_grammar_follows_the_chain_of_its_type():
    task = FactsTask(PLAIN, n_facts=4, grammar_len=20, p_grammar=0.3)
    prompts = task.sample(1500, seed=0)
    start = PLAIN.grammar_ids.start
    counts = np.zeros((4, 6, 6))
    tokens, example = prompts.tokens.numpy(), prompts.example.numpy()
    grammar = prompts.token_kinds.numpy() == TokenKind.TEXT
    follows = grammar[:, 1:] & grammar[:, :-1] & (example[:, 1:] == example[:, :-1])
    chain = torch.where(prompts.latent["has_fact"], prompts.latent["type"], 3).numpy()
    which = np.take_along_axis(chain, example[:, 1:], 1)[follows]
    np.add.at(counts, (which, tokens[:, :-1][follows] - start, tokens[:, 1:][follows] - start), 1)
    total = counts.sum(-1, keepdims=True)
    expected = np.concatenate([PLAIN.chains, PLAIN.grammar_only[None]])
    error = np.sqrt(expected * (1 - expected) / total) + 1e-3
    assert (np.abs(counts / total - expected) < 5 * error).all()
    silent = 1 - prompts.latent["has_fact"].double().mean(0)
    assert silent[-1] == 0
    assert silent[:-1].numpy() == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("task", TASKS)
def test_batches_read_tokens_and_ask_for_the_next(task):
    tokens, labels = task.batch(7, 20)
    assert tokens.shape == labels.shape == (20, task.length - 1)
    again, _ = task.batch(7, 20)
    other, _ = task.batch(8, 20)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    inside = labels[:, :-1] != IGNORED
    assert torch.equal(labels[:, :-1][inside], tokens[:, 1:][inside])
    ends = (labels != IGNORED).sum(1).tolist()
    parts = task.n_facts if isinstance(task, FactsTask) else task.n_demos + 1
    bare = parts * 3 - 1 - (not task.world.relation_tokens)
    lens = range(task.grammar_lens[0], task.grammar_lens[1] + 1) if isinstance(task, DemonstrationsTask) else [5]
    assert set(ends) == {bare + parts * inner for inner in lens}


@pytest.mark.parametrize("task", TASKS)
def test_the_last_label_is_the_attribute_due(task):
    tokens, labels = task.batch(7, 20, predict="last")
    asked = labels != IGNORED
    assert asked.sum(1).tolist() == [1] * 20
    assert (task.world.type_of[labels[asked].numpy()] >= 0).all()
    everything = task.batch(7, 20)[1]
    if isinstance(task, DemonstrationsTask):
        assert torch.equal(everything[asked], labels[asked])
    assert bool((tokens[asked] == task.world.separator).all()) == task.world.relation_tokens


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("predict", ["attributes", "no first grammar"])
def test_labels_are_of_attributes_alone_or_leave_out_what_follows_a_subject(task, predict):
    tokens, labels = task.batch(7, 20, predict)
    everything = task.batch(7, 20)[1]
    facts = torch.from_numpy(task._draw(20, Rng(7, "training"), ends=False).has_fact)
    for row, every, states in zip(tokens.tolist(), everything.tolist(), facts.tolist(), strict=True):
        written = [row[0], *(label for label in every if label != IGNORED)]
        kept = [label != IGNORED for label in labels[tokens.tolist().index(row)].tolist()]
        parts = read_in_order(task, written, states)
        expected = {at for at, what in enumerate(parts) if what == "attribute"}
        if predict == "no first grammar":
            expected = {at for at, what in enumerate(parts) if at and what != "first grammar"}
        assert {at + 1 for at, label in enumerate(kept) if label} == expected


def read_in_order(task, written: list[int], states: list[bool]) -> list[str]:
    """What each token of a sequence is: an attribute, the grammar token right after a subject, or something else."""
    world, kinds = task.world, []
    inner = next((at for at, token in enumerate(written) if token in (world.separator, *attributes(world))), 0) - 1
    inner = task.grammar_len if isinstance(task, FactsTask) else inner
    for at in range(len(written)):
        part, place = divmod(at, inner + 3)
        value = inner + 1 + world.relation_tokens
        what = "first grammar" if place == 1 and inner else "other"
        kinds.append(("attribute" if place == value else what) if states[part] else "other")
    return kinds


def attributes(world: RecallWorld) -> list[int]:
    return [token for ids in world.value_ids for token in ids]


def test_a_query_alone_is_followed_by_grammar_of_its_type():
    icl = DemonstrationsTask(PLAIN, 5).sample(300, seed=0)
    longer = followed_by_grammar(icl, PLAIN, 2, seed=1)
    assert torch.equal(longer.tokens[:, :-2], icl.tokens)
    assert longer.mask.all()
    assert torch.equal(longer.token_kinds[:, -2:].unique(), torch.tensor([int(TokenKind.TEXT)]))
    first, second = (longer.tokens[:, -2:] - PLAIN.grammar_ids.start).T.numpy()
    type_ = longer.latent["type"][:, -1].numpy()
    assert (PLAIN.chains[type_, first, second] > 0).all()
    wrong = PLAIN.chains[(type_ + 1) % PLAIN.n_types, first, second]
    assert np.log(PLAIN.chains[type_, first, second]).mean() > np.log(wrong + 1e-9).mean()
    assert longer.relations["query_subject"].keys_of(0) == [icl.tokens.shape[1] - 1]
    assert set(longer.targets["query_pos"]) == {longer.tokens.shape[1] - 1}
    assert longer.targets["token"].equals(icl.targets["token"])
    assert torch.equal(followed_by_grammar(icl, PLAIN, 0).tokens, icl.tokens)


@pytest.mark.parametrize("task", TASKS)
def test_the_first_prompts_of_a_seed_are_the_same(task):
    few, many = task.sample(3, seed=4), task.sample(9, seed=4)
    for one, other in zip(few.text, many.text, strict=False):
        assert one == other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FactsTask(PLAIN, n_facts=0), "n_facts is 0"),
        (lambda: FactsTask(PLAIN, grammar_len=0), "grammar_len is 0"),
        (lambda: FactsTask(PLAIN, p_grammar=1.5), "p_grammar is 1.5"),
        (lambda: FactsTask(RELATIONS), "a world with relation tokens has none"),
        (lambda: DemonstrationsTask(PLAIN, -1), "n_demos is -1"),
        (lambda: DemonstrationsTask(PLAIN, grammar_lens=(3, 1)), "grammar_lens is"),
        (lambda: DemonstrationsTask(PLAIN, icl_share=1.5), "icl_share is 1.5"),
        (lambda: DemonstrationsTask(PLAIN, subjects=()), "subjects is"),
        (lambda: DemonstrationsTask(PLAIN, query_subjects=(16,)), "give subjects from 0 to 15"),
        (lambda: DemonstrationsTask(PLAIN).sample(0), "n is 0: give at least 1 prompt"),
    ],
)
def test_impossible_tasks_are_refused(make, message):
    refused(message, make)


def test_a_share_of_demonstrations_has_no_grammar():
    task = DemonstrationsTask(PLAIN, 3, grammar_lens=(1, 4))
    lens = replace(task, icl_share=0.25).sample(2000).latent["grammar_len"]
    assert 0.2 < (lens == 0).double().mean() < 0.3
    assert lens[lens > 0].equal(task.sample(2000).latent["grammar_len"][lens > 0])
    assert (replace(task, icl_share=1.0).sample(10).latent["grammar_len"] == 0).all()


def test_the_posterior_of_the_type_is_bayes_rule():
    prompts = FactsTask(PLAIN, 1, 4, p_grammar=0.0).sample(12)
    grammar = prompts.tokens[:, 1:].numpy()
    found = type_posterior(PLAIN, grammar)
    for row, tokens in enumerate(grammar - PLAIN.grammar_ids.start):
        likelihood = [1.0] * 3
        for type_ in range(3):
            for one, other in pairwise(tokens):
                likelihood[type_] *= PLAIN.chains[type_, one, other]
        assert found[row] == pytest.approx([value / sum(likelihood) for value in likelihood], abs=1e-9)
    refused("not all tokens are grammar", type_posterior, PLAIN, prompts.tokens.numpy())


def test_the_ceiling_is_what_the_best_guess_reaches():
    task = FactsTask(PLAIN, 1, 8, p_grammar=0.0)
    prompts = task.sample(3000, seed=1)
    guessed = type_posterior(PLAIN, prompts.tokens[:, 1:].numpy()).argmax(1)
    right = (guessed == prompts.latent["type"][:, 0].numpy()).mean()
    assert type_ceiling(PLAIN, 8, 3000, seed=1).mean() == pytest.approx(right, abs=0.03)
    assert type_ceiling(PLAIN, 1, 10) == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", ["subject", "type"])
@pytest.mark.parametrize("task", TASKS)
def test_corrupted_prompts_ask_for_something_else_and_tell_facts_too(task, kind):
    world, prompts = task.world, task.sample(30, seed=2)
    corrupted = task.corrupt(prompts, kind, seed=1)
    start = (~prompts.mask).sum(1).tolist()
    one_subject = isinstance(task, FactsTask)
    for index in range(30):
        old, new = (p.tokens[index, start[index] :].tolist() for p in (prompts, corrupted))
        before, after = read(world, old), read(world, new)
        assert [part["at"] for part in before] == [part["at"] for part in after]
        target = int(prompts.targets["token"][index])
        answer = [int(corrupted.latent[name][index, -1]) for name in ("type", "subject")]
        assert int(world.facts[answer[0], answer[1]]) != target
        assert (world.type_of[target] == answer[0]) == (kind == "subject")
        for part in after:
            if "value" in part:
                assert (
                    new[part["value"][0]] == world.facts[world.type_of[new[part["value"][0]]], new[part["subject"][0]]]
                )
        changed = {pos for pos, (one, other) in enumerate(zip(old, new, strict=True)) if one != other}
        subjects = {pos for part in before for pos in part.get("subject", [])}
        asked = set(before[-1]["subject"])
        if kind == "subject":
            assert changed & subjects == (subjects if one_subject else asked)
            assert not changed & {pos for part in before for pos in part.get("grammar", []) + part.get("relation", [])}
        else:
            assert not changed & subjects
            last = set(range(before[-1]["at"], len(old)))
            assert changed <= last if one_subject else {p["value"][0] for p in before[:-1]} <= changed
        signs = [pos for part in after[-1:] for pos in part.get("relation", [])]
        assert all(new[pos] == world.relation_ids[answer[0]] for pos in signs)


def test_an_unknown_corruption_is_refused():
    unchecked = inspect.unwrap(DemonstrationsTask.corrupt)  # past the type check of the import hook, as for users
    refused("choose one of 'subject', 'type'", unchecked, TASKS[2], TASKS[2].sample(2), "grammar")
