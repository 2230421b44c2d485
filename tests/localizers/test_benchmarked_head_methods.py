"""Every method finds the heads of a plain circuit; methods of other packages join by their entry points."""

import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from legs import slow_but
from refusals import refused

from align_circuits.heads.score import score_heads
from align_circuits.localizers import registry
from align_circuits.localizers.benchmarked_head_methods import METHODS, named_in
from align_circuits.localizers.comparison import agreement
from align_circuits.localizers.registry import localizer, method_names, scores_by_role, scores_of
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, ROLE_OF_KIND, planted_circuit
from align_circuits.models.planted.zoo import zoo_circuit
from align_circuits.papers.lab import Inputs
from align_circuits.papers.localizer_zoo import PUBLIC_ZOO, Zoo
from align_circuits.run.pairs import Pair
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.task import exchanged

TASK = Seq2SeqTask(x_len=4, phrase_len=2, n_examples=3, alignment="permutation")


@pytest.fixture(scope="module")
def circuit():
    model = planted_circuit(TASK, seed=0, n_layers=4, n_ctx=96)
    return model, Pair(*exchanged(TASK.sample(16, model.tokenizer, seed=0)))


SLOW = {"head detector", "ablation, resample", "patching, noise", "EAP-IG", "learned masks", "localize"}
"""Each has a near relative in the fast leg."""


@pytest.mark.parametrize("name", slow_but({*METHODS} - SLOW, METHODS))
def test_a_method_finds_what_it_can(circuit, name):
    model, pair = circuit
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grids = scores_of(name, model, pair, CIRCUIT_ROLES)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    idle = [head for head, kind in model.kinds.items() if kind in ("inert", "random")]
    for role in CIRCUIT_ROLES:
        true = [head for head, kind in model.kinds.items() if ROLE_OF_KIND[kind] == role]
        if name != "direct effect" or role == "lookup":  # which alone writes what is predicted
            assert agreement(grids[role], true, idle)["auroc"] == 1, role
        if name == "localize, redundant":  # names are read back from scores
            assert named_in(grids[role]) == {head for head, own in model.roles.items() if own == role}


@pytest.mark.parametrize("name", ["ablation, mean", "patching, denoise", "patching, noise"])
def test_a_divergence_scores_the_head_that_matters_as_high_as_other_metrics_do(circuit, name):
    model, pair = circuit
    assert name in METHODS
    by_log_prob, by_kl = (
        scores_of(name, model, replace(pair, metric=metric), CIRCUIT_ROLES)["lookup"] for metric in ("log_prob", "kl")
    )
    assert np.argmax(by_kl) == np.argmax(by_log_prob)
    assert np.corrcoef(np.ravel(by_kl), np.ravel(by_log_prob))[0, 1] > 0.5


@pytest.mark.slow
def test_gates_close_alike_for_a_loss_and_for_the_log_probability(circuit):
    def loss(logits, targets):
        return -logits.log_softmax(-1)[range(len(targets)), targets["token"].tolist()]

    model, pair = circuit
    by_log_prob, by_loss = (
        scores_of("learned masks", model, replace(pair, metric=metric), CIRCUIT_ROLES)["lookup"]
        for metric in ("log_prob", loss)
    )
    np.testing.assert_allclose(by_loss, by_log_prob, atol=1e-4)


def test_other_packages_add_methods(circuit, monkeypatch):
    model, pair = circuit
    entry = EntryPoint("first layer", "tests.localizers.test_benchmarked_head_methods:first_layer", registry.GROUP)
    entries = [entry, EntryPoint("gone", "no_such_package:method", registry.GROUP)]

    def found(group, name=None):
        return [each for each in entries if each.group == group and name in (None, each.name)]

    monkeypatch.setattr(registry, "entry_points", found)
    assert method_names() == [*METHODS, "first layer", "gone"]
    assert scores_of("first layer", model, pair, ["lookup"])["lookup"][0].min() == 1
    refused(r"'gone' \(no_such_package:method\) cannot be loaded", localizer, "gone")
    refused("no method 'last': choose among 'attention'", localizer, "last")


def first_layer(model, _):
    return np.outer(np.eye(model.cfg.n_layers)[0], np.ones(model.cfg.n_heads))


def second_layer(model, _):
    return np.outer(np.eye(model.cfg.n_layers)[1], np.ones(model.cfg.n_heads))


def test_finished_jobs_of_a_method_of_another_package_count_for_its_present_code_only(monkeypatch):
    def jobs_of(name, *methods):
        entry = EntryPoint("mine", f"tests.localizers.test_benchmarked_head_methods:{name}", registry.GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group, name: [entry])  # noqa: ARG005
        study = PUBLIC_ZOO.study
        return [each.job for each in study.jobs(Zoo(0, 2, methods), Inputs({}, ""))]

    assert jobs_of("first_layer", "mine") == jobs_of("first_layer", "mine") != jobs_of("second_layer", "mine")
    assert jobs_of("first_layer", "attention") == jobs_of("second_layer", "attention")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.zeros((2, 2)), r"an array of shape \(2, 2\): give a number for each of 4 layers of 4 heads"),
        (np.where(np.eye(4), 1, np.nan), r"'broken' returned NaN at L0H1, .* by np.nan_to_num\(scores\)"),
        ({"lookup": np.full((4, 4), np.nan)}, "returned NaN for 'lookup' at L0H0"),
        (agreement, r"returned a function: .* 4 layers of 4 heads, such as table.to_array\(metric\)"),
        ({"previous": np.zeros((4, 4))}, "no scores for 'lookup', but for previous"),
    ],
)
def test_scores_that_are_none_are_refused(circuit, monkeypatch, returned, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setitem(registry.METHODS, "broken", lambda *_: returned)  # pyright: ignore[reportArgumentType]
    model, pair = circuit
    refused(message, scores_of, "broken", model, pair, ["lookup"])


def test_the_page_turns_a_score_of_attention_into_a_method(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "benchmark-a-method.md"
    (code,) = re.findall(r"^(def look\(.*?\n)\n", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    file = tmp_path / "own.py"
    file.write_text(f"import align_circuits as ac\nimport numpy as np\n{code}", encoding="utf-8")
    model = zoo_circuit(0).build()
    pair = Pair(*exchanged(model.task.sample(4, model.tokenizer, seed=0)))
    assert scores_of(f"{file}:look", model, pair, CIRCUIT_ROLES)["lookup"].min() == 0
    without_scores = score_heads(model, pair.clean, ["lookup"]).to_array("lookup")
    refused("NaN at L0H", scores_by_role, "look", without_scores, model, CIRCUIT_ROLES)


@pytest.mark.parametrize("name", ["ablation, zero", "patching, denoise", "AtP", "direct effect"])
def test_a_method_scores_by_the_metric_and_the_targets_of_its_pair(circuit, name):
    model, pair = circuit
    few = Pair(pair.clean[:2], pair.corrupted[:2])
    other: Any = {"kind": "first"} if name == "direct effect" else {"metric": "logit"}  # direct effects are of logits
    as_asked, plain = (np.asarray(METHODS[name](model, each)) for each in (replace(few, **other), few))
    assert np.isfinite(as_asked).all() and not np.allclose(as_asked, plain)
