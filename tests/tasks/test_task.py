"""Tasks of one's own: what the base class provides, and that localize needs nothing else."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.tasks.task import Task, exchanged


class Doubled(Task):
    """Random tokens, written twice."""

    def sample(self, n, tokenizer=None, seed=0):  # noqa: ARG002 - the interface of a task
        generator = torch.Generator().manual_seed(seed)
        rows = torch.stack([torch.randperm(55, generator=generator)[:10] for _ in range(n)]) + 5
        prompts = ac.Prompts.from_tokens(rows.repeat(1, 2))
        targets = prompts.targets[prompts.targets["offset"] >= 10].reset_index()
        new_row = torch.full((len(prompts.targets),), -1)
        new_row[torch.tensor(targets["index"].to_numpy())] = torch.arange(len(targets))
        kept = {name: relation.select(new_row[relation.target] >= 0) for name, relation in prompts.relations.items()}
        relations = {name: replace(relation, target=new_row[relation.target]) for name, relation in kept.items()}
        return replace(prompts, targets=targets.drop(columns="index"), relations=relations)


class Shifted(Doubled):
    """The same with a corruption of its own."""

    roles: ClassVar = {"induction": "attends to the next token of the first copy"}
    target_name = "A repeated token"

    def corrupt(self, prompts, **_):
        return replace(prompts, inputs=prompts.tokens.roll(1, 1))

    def control(self):
        return Doubled()

    @property
    def caveats(self):
        return ("Nothing else is known.",)


def test_a_task_of_ones_own_is_localized_by_its_roles():
    result = ac.localize(ac.load("toy-llama"), Shifted(), n=16, n_controls=1)
    assert set(result.heads_by_role) == {"induction"} and result.heads("induction")
    assert "A repeated token is correct in" in result.summary and "Nothing else is known." in result.summary
    assert result.task.roles == Shifted.roles
    assert set(result.table.frame["metric"]) >= {"score", "control", "q"}
    plain = ac.localize(ac.load("toy-llama"), Doubled(), n=16, n_controls=1)
    assert set(plain.heads_by_role) == {"induction", "previous", "duplicate"}
    assert "control" not in set(plain.table.frame["metric"])


def test_pairs_come_from_the_corruption_or_from_other_prompts():
    task = Shifted()
    prompts = task.sample(3)
    clean, corrupted = task.pairs(prompts)
    assert clean is prompts and torch.equal(corrupted.tokens, prompts.tokens.roll(1, 1))
    clean, corrupted = Doubled().pairs(prompts)
    assert torch.equal(corrupted.tokens, clean.tokens[[2, 0, 1]])
    assert corrupted.targets is clean.targets and corrupted.relations is clean.relations
    with pytest.raises(NotImplementedError, match="Doubled does not define corrupt"):
        Doubled().corrupt(prompts)


def test_a_prompt_alone_in_its_length_has_no_partner():
    clean, corrupted = exchanged(ac.Prompts.from_tokens([[1, 2, 3], [4, 5], [6, 7, 8], [9, 9, 9, 9]]))
    assert [row.tolist() for row in clean.tokens[:, 1:]] == [[1, 2, 3], [6, 7, 8]]
    assert [row.tolist() for row in corrupted.tokens[:, 1:]] == [[6, 7, 8], [1, 2, 3]]


@pytest.mark.parametrize("task", [ac.Seq2SeqTask(x_len=3), ac.RepeatedTokensTask()])
def test_a_task_of_text_needs_a_tokenizer(task):
    refused("written in the tokens of a tokenizer", task.sample, 2)


def test_the_base_class_cannot_be_sampled():
    with pytest.raises(TypeError, match="abstract"):
        Task()  # pyright: ignore[reportAbstractUsage]


def test_the_control_changes_the_alignment_and_nothing_else():
    task = ac.Seq2SeqTask(alignment="prior", decay=1.0, prior_form="code", n_examples=3)
    permuted = ac.Seq2SeqTask(alignment="permutation", n_examples=3)
    assert task.control() == permuted
    assert permuted.control() == ac.Seq2SeqTask(n_examples=3) and permuted.control().control() == permuted


def test_one_symbol_has_no_corrupted_partner(char_tokenizer):
    task = ac.Seq2SeqTask(x_len=1, n_examples=2)
    clean, corrupted = task.pairs(task.sample(2, char_tokenizer))
    assert clean is corrupted
