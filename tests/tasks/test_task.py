"""Tasks of one's own: what the base class provides, and that localize needs nothing else."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from refusals import raised, refused

import align_circuits as ac
from align_circuits.checks import WrongArgument
from align_circuits.heads.thresholds import Thresholds
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


@pytest.mark.slow
def test_a_task_of_ones_own_is_localized_by_its_roles():
    result = ac.localize(ac.load("toy-llama"), Shifted(), n=16, n_controls=1)
    assert set(result.heads_by_role) == {"induction"} and result.heads("induction")
    assert "A repeated token is correct in" in result.summary and "Nothing else is known." in result.summary
    assert result.task.roles == Shifted.roles
    assert set(result.table.frame["metric"]) >= {"score", "control", "q"}
    plain = ac.localize(ac.load("toy-llama"), Doubled(), n=16, n_controls=1)
    assert set(plain.heads_by_role) == {"induction", "previous", "duplicate"}
    assert "control" not in set(plain.table.frame["metric"])


def test_the_recipe_of_the_documentation_is_a_task(tmp_path, char_tokenizer):
    """Its gold by another reading of the texts, and what a model that follows it would be named for."""
    page = (Path(__file__).parents[2] / "docs" / "write-your-own-task.md").read_text(encoding="utf-8")
    recipe = page.split("```{code-cell} ipython3\n")[1].split("```")[0]
    assert len([line for line in recipe.splitlines() if line.strip()]) <= 25
    (tmp_path / "recipe.py").write_text(recipe)
    spec = importlib.util.spec_from_file_location("recipe", tmp_path / "recipe.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    task = module.Follow()
    clean, corrupted = task.pairs(task.sample(16, char_tokenizer, seed=3))
    firsts = set()
    for row, text in enumerate(clean.text):
        *pairs, last, answer = text[-6:-4], text[-4:-2], text[-2], text[-1]
        assert [second for first, second in pairs if first == last] == [answer]
        (key,) = clean.relations["follower"].keys_of(row)
        assert clean.token_text[row][key] == answer and key < len(clean.token_text[row]) - 1
        others = corrupted.text[row][-6:-4], corrupted.text[row][-4:-2]
        assert [second for first, second in others if first == last] != [answer], "another letter is right there"
        firsts.add(pairs[0][0] == last)
    assert firsts == {True, False}
    assert set(ac.localize(ac.load("toy-llama"), task, n=8, n_controls=0).heads_by_role) == {"follower"}


@pytest.mark.parametrize(
    ("method", "returned", "error", "message"),
    [
        ("sample", lambda *_, **__: [[1, 2]] * 16, TypeError, r"Wrong.sample returned a list: return Prompts, such as"),
        (
            "corrupt",
            lambda _, prompts, **__: prompts.inputs,
            TypeError,
            r"Wrong.corrupt returned a Tensor: return Prompts",
        ),
        ("corrupt", lambda _, prompts, **__: prompts, ValueError, "Wrong.corrupt returned the prompts as they were"),
        ("sample", lambda *_, **__: Doubled().sample(15), ValueError, "returned 15 prompts and was asked for n=16"),
        ("roles", {"mover": "moves"}, ValueError, r"no row of mover; add a relation of that name to them"),
    ],
)
def test_a_task_that_returns_something_else_is_told_so(random_hf_model, method, returned, error, message):
    wrong = type("Wrong", (Shifted,), {method: returned})
    with pytest.raises(error, match=message):
        ac.localize(ac.load(random_hf_model("llama")), wrong(), n=16)


@pytest.mark.parametrize("sample", [lambda _, n: n, lambda _, n, tokenizer=None: (n, tokenizer)])
def test_a_task_whose_sample_lacks_a_parameter_is_told_how_to_write_it(random_hf_model, sample):
    model, wrong = ac.load(random_hf_model("llama")), type("Wrong", (Shifted,), {"sample": sample})()
    for verb in (ac.localize, ac.tune):
        lacks = r"Wrong.sample takes n(, tokenizer)?: write sample\(self, n, tokenizer=None, seed=0\)"
        raised(WrongArgument, lacks, verb, model, wrong)


def test_a_role_whose_relation_is_missing_is_named(random_hf_model):
    task = type("Wrong", (Shifted,), {"roles": {**Shifted.roles, "mover": "moves"}})()
    found = ac.localize(ac.load(random_hf_model("llama")), task, n=16, n_controls=0)
    assert "No head can be named for mover: the prompts have no relation of that name." in found.summary


def test_a_role_without_small_p_values_is_told_in_one_line_and_its_heads_are_not_listed(random_hf_model):
    """The first of two candidates is the key of every prompt: every second head prefers it by chance."""
    prompts = ac.Prompts.from_tokens([[1, *row, 2, 3] for row in ([4, 5], [5, 4], [6, 7], [7, 6], [8, 9]) * 2])
    pairs = [(row, 4, [1]) for row in range(len(prompts))]
    own = ac.Relation.from_pairs(pairs, prompts=prompts, candidates=[1, 2])
    prompts, model = prompts.with_relations(own=own), ac.load(random_hf_model("llama", initializer_range=1.0))
    for fdr, hopeless in [(0.05, True), (0.5, False)]:
        limits: Any = Thresholds(score=0.0, above_chance=0.0, attention=0.0, share=0.0, fdr=fdr, effect=1e3)
        found = ac.localize(model, prompts, roles=["own"], thresholds=limits, n_controls=0)
        told = "No head can be named for any role: the smallest p-value that these prompts allow is 0.5 (own), and a "
        assert found.summary.count("can be named for") == found.summary.startswith(told) == hopeless
        assert ("Scores and effects of heads are measured all the same." in found.answer) == hopeless
        assert ("always the same of their candidates" in found.summary) == (not hopeless)
        assert ("Vary the order of the candidates of own." in found.summary) == hopeless
        assert any(each.high for each in found.unnamed) == (not hopeless)
        assert ("Nearest" in found.answer) == (not hopeless)


def test_pairs_come_from_the_corruption_or_from_other_prompts():
    task = Shifted()
    prompts = task.sample(3)
    clean, corrupted = task.pairs(prompts)
    assert clean is prompts and torch.equal(corrupted.tokens, prompts.tokens.roll(1, 1))
    clean, corrupted = Doubled().pairs(prompts)
    assert torch.equal(corrupted.tokens, clean.tokens[[2, 0, 1]])
    assert corrupted.targets is clean.targets and corrupted.relations is clean.relations
    raised(NotImplementedError, "Doubled does not define corrupt", Doubled().corrupt, prompts)


def test_a_prompt_alone_in_its_length_has_no_partner():
    clean, corrupted = exchanged(ac.Prompts.from_tokens([[1, 2, 3], [4, 5], [6, 7, 8], [9, 9, 9, 9]]))
    assert [row.tolist() for row in clean.tokens[:, 1:]] == [[1, 2, 3], [6, 7, 8]]
    assert [row.tolist() for row in corrupted.tokens[:, 1:]] == [[6, 7, 8], [1, 2, 3]]


@pytest.mark.parametrize("task", [ac.Seq2SeqTask(x_len=3), ac.RepeatedTokensTask()])
def test_a_task_of_text_needs_a_tokenizer(task):
    refused("written in the tokens of a tokenizer", task.sample, 2)


def test_the_base_class_cannot_be_sampled():
    raised(TypeError, "abstract", Task)  # pyright: ignore[reportAbstractUsage]


def test_the_control_changes_the_alignment_and_nothing_else():
    task = ac.Seq2SeqTask(alignment="prior", decay=1.0, prior_form="code", n_examples=3)
    permuted = ac.Seq2SeqTask(alignment="permutation", n_examples=3)
    assert task.control() == permuted
    assert permuted.control() == ac.Seq2SeqTask(n_examples=3) and ac.Seq2SeqTask(n_examples=3).control() == permuted
    priors = [ac.Seq2SeqTask(x_len=2, alignment="prior", decay=0.0, task_seed=seed) for seed in range(30)]
    assert all(getattr(task.control(), "aligned", None) not in (None, task.aligned) for task in priors)
    assert ac.Seq2SeqTask(x_len=1).control() is None


def test_one_symbol_has_no_corrupted_partner(char_tokenizer):
    task = ac.Seq2SeqTask(x_len=1, n_examples=2)
    clean, corrupted = task.pairs(task.sample(2, char_tokenizer))
    assert clean is corrupted
