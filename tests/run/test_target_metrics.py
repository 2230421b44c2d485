"""Every metric in every verb beside runs that hooks change by hand, on padded prompts too."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from effects_by_hand import edges_of, values_of
from frozen import Twin, of_lengths
from legs import product
from refusals import refused
from torch import Tensor

import align_circuits as ac
from align_circuits.circuits.direct_effects import direct_logit_attribution as dla
from align_circuits.prompts.prompts import WRONG
from align_circuits.run.target_metrics import (
    Metric,
    TargetMetrics,
    checked_names,
    means_by_prompt,
    name_of_metric,
    repeat,
)

LENGTHS = {"even": (6, 6, 6), "padded": (4, 7, 6)}
STEP = 1e-4


def gap_to_three(logits: Tensor, targets: pd.DataFrame) -> Tensor:
    """A metric of one's own, which reads the table of targets."""
    token = torch.tensor(targets["token"].tolist())
    return (logits.gather(1, token[:, None])[:, 0] - logits[:, 3]).tanh()


METRICS: list[Metric] = ["logit_diff", "prob", "log_prob", "logit", "kl", "accuracy", gap_to_three]
named = pytest.mark.parametrize(("metric", "halves"), product(METRICS, LENGTHS), indirect=["halves"])
QUICK = [("log_prob", "even"), ("prob", "padded"), ("accuracy", "padded")]
few_named = pytest.mark.parametrize(
    ("metric", "halves"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product(METRICS, LENGTHS)
    ],
    indirect=["halves"],
)
pytestmark = pytest.mark.usefixtures("exact_arithmetic")


@pytest.fixture(scope="module")
def model(random_hf_model):
    return ac.load(random_hf_model("llama", seed=2).double())


@pytest.fixture(params=LENGTHS)
def halves(request) -> tuple[ac.Prompts, ac.Prompts]:
    """Random prompts with a wrong answer, whose half of all tokens is right, so that accuracy changes."""
    correct = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    clean, corrupted = (
        replace(
            prompts,
            targets=prompts.targets.assign(**{WRONG: [11, 12, 13]}),
            answer_tokens=torch.arange(64),
            correct=correct,
            positions={"END": torch.full((3,), prompts.mask.shape[1] - 2)},
            group=torch.arange(3),
        )
        for prompts in (of_lengths(LENGTHS[request.param], seed) for seed in (0, 1))
    )
    return clean, replace(corrupted, own_correct=~correct)


def by_hand(metric: Metric, prompts: ac.Prompts, row: int, logits: Tensor, reference: Tensor) -> Tensor:
    """The metric of one target from its logits [d_vocab] and those of the clean run, from the definition."""
    targets: Any = prompts.targets
    token, wrong = (int(targets[name][row]) for name in ("token", WRONG))
    p, q = logits.exp() / logits.exp().sum(), reference.exp() / reference.exp().sum()
    assert prompts.correct is not None
    known: dict[Any, Any] = {
        "logit_diff": lambda: logits[token] - logits[wrong],
        "prob": lambda: p[token],
        "log_prob": lambda: p[token].log(),
        "logit": lambda: logits[token] - sum(logits) / len(logits),
        "kl": lambda: sum(q[i] * (q[i] / p[i]).log() for i in range(len(q))),
        "accuracy": lambda: prompts.correct[row, int(logits.argmax())].to(logits),  # pyright: ignore
        gap_to_three: lambda: torch.tanh(logits[token] - logits[3]),
    }
    return known[metric]()


class Measured(Twin):
    """Runs by hand, of which a metric is taken."""

    def __init__(self, model: Any, pair: ac.Pair):
        self.metric: Metric = pair.metric or "log_prob"
        self.clean = pair.clean
        super().__init__(model, pair.base, pair.source)

    def at_targets(self, prompts: ac.Prompts, hooks: Any = ()) -> Tensor:
        logits = self.model.run_with_hooks(prompts.tokens, fwd_hooks=list(hooks), **self.inputs)
        return logits[prompts.column("prompt"), prompts.column("query_pos")]

    def numbers(self, logits: Tensor) -> Tensor:
        with torch.no_grad():
            reference = self.at_targets(self.clean)
        return torch.stack(
            [by_hand(self.metric, self.run, row, logits[row], reference[row]) for row in range(len(logits))]
        )


def check_baselines(table: ac.Table, model: Any, pair: ac.Pair) -> None:
    """Clean, corrupted and normalised numbers by hand, and where there can be none."""
    clean, corrupted = (
        Measured(model, replace(pair, direction=direction)).before.mean() for direction in ("noise", "denoise")
    )
    assert table.baselines is not None
    frame: Any = table.baselines.frame
    frame = frame[frame["kind"] == "all"] if "kind" in frame else frame
    runs = frame.set_index("run")
    expected = {"clean": clean, "corrupted": corrupted, "clean - corrupted": clean - corrupted}
    found = runs["value"].to_dict()
    assert {run: found[run] for run in expected} == pytest.approx(
        {run: float(x) for run, x in expected.items()}, abs=1e-5
    )
    guess: dict[Any, float] = {
        "logit": 0,
        "logit_diff": 0,
        "prob": 1 / model.cfg.d_vocab,
        "log_prob": -np.log(model.cfg.d_vocab),
    }
    if pair.metric in guess:
        assert found["chance"] == pytest.approx(guess[pair.metric])
    else:
        assert ("chance" in found) == (pair.metric == "accuracy")
    gap = runs.loc["clean - corrupted"]
    part = table.where(kind="all") if "kind" in table.keys else table
    base = clean if pair.direction == "noise" else corrupted
    by_hand = (float(base) + part.frame["value"].to_numpy() - float(corrupted)) / float(clean - corrupted)
    normalized: Any = part.normalized().frame
    if gap["low"] <= 0 <= gap["high"]:
        assert normalized[["value", "low", "high"]].isna().all(axis=None)
        assert any("may be 0" in warning for warning in table.warnings)
    else:
        assert normalized["value"].to_numpy() == pytest.approx(by_hand, rel=1e-3, abs=1e-4)
        assert (normalized["low"] <= normalized["value"]).all() and (normalized["value"] <= normalized["high"]).all()
    pd.testing.assert_frame_equal(
        part.normalized().frame.drop(columns=["value", "low", "high"]),
        part.frame.drop(columns=["value", "low", "high"]),
    )


@pytest.mark.parametrize(
    ("metric", "halves", "how"),
    product(METRICS, LENGTHS, [("noise", "auto"), ("denoise", "reference")]),
    indirect=["halves"],
)
def test_patched_heads(model, halves, metric, how):
    direction, engine = how
    pair = ac.Pair(*halves, metric=metric, direction=direction)
    table = ac.patch_heads(model, pair, options=ac.RunOptions(engine=engine, batch_size=2))
    assert set(table.frame["metric"]) == {name_of_metric(metric)} == set(table.provenance.settings["metric"])
    found, twin = values_of(table, "layer", "head", kind="all"), Measured(model, pair)
    expected = {(i, j): twin.patched(f"blocks.{i}.attn.hook_z", column=j) for i in range(2) for j in range(4)}
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, found.values())) > 1e-3
    check_baselines(table, model, pair)


@named
def test_ablated_heads(model, halves, metric):
    table = ac.ablate_heads(model, halves[0], "zero", metrics=[metric, "logit" if metric != "logit" else "prob"])
    twin = Measured(model, ac.Pair(halves[0], halves[0], metric=metric, direction="noise"))
    expected = {}
    for layer in range(2):
        for head in range(4):
            change = {f"blocks.{layer}.attn.hook_z": lambda x, j=head: x.index_fill(2, torch.tensor([j]), 0)}
            expected[layer, head] = float((twin.outcome(change) - twin.before).mean())
    found = values_of(table, "layer", "head", kind="all", metric=name_of_metric(metric))
    assert found == pytest.approx(expected, abs=1e-5)
    assert table.provenance.settings["metrics"][0] == name_of_metric(metric)
    assert table.baselines is not None
    intact = values_of(table.baselines, "run", kind="all", metric=name_of_metric(metric))["clean",]
    assert intact == pytest.approx(float(twin.before.mean()), abs=1e-5)
    refused("effects of 'ablate_heads' have no scale from corrupted to clean prompts", table.normalized)


@few_named
def test_patched_edges_and_paths(model, halves, metric):
    pair, some = ac.Pair(*halves, metric=metric, direction="noise"), edges_of(model)[::9]
    twin = Measured(model, pair)
    table = ac.patch_edges(model, pair, edges=some)
    check_baselines(table, model, pair)
    found = values_of(table, "sender", "receiver")
    assert found == pytest.approx({edge: twin.effect(*edge, freeze_mlps=True) for edge in some}, abs=1e-5)
    table = ac.patch_paths(model, pair, senders=["L0H1", "L1H2"])
    check_baselines(table, model, pair)
    paths = values_of(table, "sender", "receiver")
    assert paths == pytest.approx({edge: twin.effect(*edge, freeze_mlps=False) for edge in paths}, abs=1e-5)
    assert metric == "accuracy" or max(map(abs, {**found, **paths}.values())) > 1e-3


@named
def test_attributed_heads(model, halves, metric):
    """Denoising, since the divergence from the clean run has no gradient there."""
    if metric == "accuracy":
        refused("metric='accuracy' has no gradient: choose", ac.attribute_heads, model, ac.Pair(*halves, metric=metric))
        return
    pair = ac.Pair(*halves, metric=metric)
    table = ac.attribute_heads(model, pair, options=ac.RunOptions(batch_size=2))
    check_baselines(table, model, pair)
    found = values_of(table, "layer", "head")
    twin, kept = Measured(model, pair), {}

    def keeper(name: str) -> Any:
        def keep(x: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
            kept[name] = x if x.requires_grad else x.detach().requires_grad_()
            return kept[name]

        return keep

    names = [f"blocks.{layer}.attn.hook_z" for layer in range(2)]
    value = twin.numbers(twin.at_targets(pair.base, [(name, keeper(name)) for name in names])).mean()
    gradients = torch.autograd.grad(value, [kept[name] for name in names])
    expected = {}
    for layer, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
        change = (twin.other[name] - twin.base[name]) * gradient * pair.base.mask[:, :, None, None]
        expected |= {(layer, head): float(change[:, :, head].sum()) for head in range(4)}
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, found.values())) > 1e-3


@few_named
def test_attributed_edges(model, halves, metric):
    if metric == "accuracy":
        refused("metric='accuracy' has no gradient: choose", ac.attribute_edges, model, ac.Pair(*halves, metric=metric))
        return
    pair, some = ac.Pair(*halves, metric=metric), edges_of(model)[::9]
    table = ac.attribute_edges(model, pair, method="eap")
    check_baselines(table, model, pair)
    found, twin = values_of(table, "sender", "receiver"), Measured(model, pair)
    for edge in some:
        near, far = (
            twin.effect(*edge, freeze_mlps=True, share=step) - twin.effect(*edge, freeze_mlps=True, share=-step)
            for step in (STEP, 2 * STEP)
        )
        assert found[edge] == pytest.approx((8 * near - far) / (12 * STEP), abs=1e-5), edge
    assert max(abs(found[edge]) for edge in some) > 1e-3


@few_named
def test_faithfulness(model, halves, metric):
    """With all edges, with none, and with all but one."""
    pair, edges = ac.Pair(*halves, metric=metric, direction="noise"), edges_of(model)
    last = ("input", "L0H0.q")
    scores = ac.attribute_edges(model, replace(pair, metric="log_prob"), method="eap")
    frame: Any = scores.frame
    is_last = (frame["sender"] == last[0]) & (frame["receiver"] == last[1])
    scores = replace(scores, frame=frame.assign(value=np.where(is_last, 1.0, -1.0)))
    twin, corrupted = Measured(model, pair), Measured(model, ac.Pair(*halves, metric=metric))
    if metric == "accuracy" and float(twin.before.mean()) == float(corrupted.before.mean()):
        pytest.skip("the corruption does not change the accuracy")
    curve = ac.faithfulness(model, pair, scores, fractions=[1 - 1 / len(edges)])
    found = values_of(curve, "edges", circuit="edges", metric=name_of_metric(metric))
    expected = {
        0: corrupted.before,
        len(edges): twin.before,
        len(edges) - 1: twin.before + twin.effect(*last, freeze_mlps=True),
    }
    assert found == pytest.approx({(key,): float(value.mean()) for key, value in expected.items()}, abs=1e-5)


@named
def test_function_vectors_take_any_metric(model, halves, metric):
    table = ac.function_vectors(model, [ac.Pair(*halves, metric=metric)], heads=[(1, 2)])
    pair = ac.Pair(*halves, metric=metric)
    twin, name = Measured(model, pair), "blocks.1.attn.hook_z"
    at = (pair.clean.column("prompt"), pair.clean.column("query_pos"))
    mean = twin.other[name][at].mean(0)[2]

    def put(x: Tensor) -> Tensor:
        x = x.clone()
        x[at[0], at[1], 2] = mean
        return x

    assert float(table.frame["value"].iloc[0]) == pytest.approx(
        float((twin.outcome({name: put}) - twin.before).mean()), abs=1e-5
    )


@pytest.mark.parametrize("answers", [None, 1, 3])
def test_a_choice_is_right_if_a_right_answer_is_above_the_wrong_one(model, halves, answers):
    """The target's own token, or any of the answers that the prompts list."""
    _, prompts = halves
    logits = Measured(model, ac.Pair(*halves)).at_targets(prompts)
    ranked = logits.argsort(1, descending=True)
    listed = torch.zeros(3, 64, dtype=torch.bool)
    for row in range(3):
        listed[row, ranked[row, 30 : 30 + (answers or 1)]] = True
    token = ranked[:, 30] if answers is None else ranked[:, 50]
    wrong = ranked[torch.arange(3), torch.tensor([29, 31, 40])]
    columns = {"token": token.numpy(), WRONG: wrong.numpy()}
    prompts = replace(prompts, targets=prompts.targets.assign(**columns), correct=None if answers is None else listed)
    table = ac.evaluate(model, prompts, metrics=["choice_accuracy"]).where(kind="all", offset=None)
    assert table.values is not None and table.values[0].tolist() == [0, 1, 1]
    pair = ac.Pair(prompts, prompts, metric="choice_accuracy")
    refused("metric='choice_accuracy' has no gradient: choose", ac.attribute_heads, model, pair)
    ablated = ac.ablate_heads(model, prompts, "zero", heads=[(0, 0)], metrics=["choice_accuracy"])
    assert ablated.baselines is not None
    assert ablated.baselines.where(run="chance", kind="all").frame["value"].item() == 0.5
    without = replace(prompts, targets=prompts.targets.drop(columns=WRONG))
    refused(
        "metric='choice_accuracy' compares with a wrong answer, and these prompts have none",
        partial(ac.evaluate, metrics=["choice_accuracy"]),
        model,
        without,
    )


def test_the_clean_run_does_not_diverge_from_itself(model, halves):
    clean, corrupted = halves
    targets = TargetMetrics.of(clean, ("kl",)).with_reference(model, clean)
    assert np.abs(targets.measure(model)[0]).max() < 1e-12
    assert targets.with_reference(model, corrupted) is targets, "once measured, it stays"
    assert TargetMetrics.of(clean).with_reference(model, clean).reference is None
    assert TargetMetrics.of(corrupted, ("kl",)).with_reference(model, clean).measure(model)[0].min() > 1e-3
    with pytest.raises(ValueError, match="metric='kl' needs what it is measured from: call with_reference first"):
        TargetMetrics.of(clean, ("kl",)).measure(model)


def test_metrics_follow_a_selection_of_prompts(model, halves):
    clean, _ = halves
    targets = TargetMetrics.of(clean, METRICS).with_reference(model, halves[1])
    whole, part = (metrics.measure(model)[0][:, 0] for metrics in (targets, targets.select(slice(1, 3))))
    np.testing.assert_allclose(part, whole[:, 1:], atol=1e-6)
    copies, _ = targets.measure(model, copies=3)
    np.testing.assert_allclose(copies, np.repeat(whole[:, None], 3, 1), atol=1e-6)
    again = repeat(clean, 2)
    assert len(again) == 6 and again.positions == {} and again.group is None and again.own_correct is None


def test_a_selection_holds_the_targets_of_its_prompts_alone():
    prompts = ac.Prompts.from_tokens([[7, 1, 7, 2], [7, 3, 7], [7, 4, 5, 6, 7], [7, 8, 9]])
    targets = TargetMetrics.of(prompts)
    assert targets.weights.tolist() == [3, 2, 4, 2]
    for rows, kept in [(slice(0, 2), range(5)), (slice(1, 3), range(3, 9)), (slice(2, 4), range(5, 11))]:
        part, kept = targets.select(rows), [*kept]
        assert part.weights.tolist() == targets.weights[rows].tolist()
        assert part.prompt.tolist() == (targets.prompt[kept] - rows.start).tolist()
        assert part.token.tolist() == targets.token[kept].tolist() == part.targets["token"].tolist()
        assert part.query.tolist() == targets.query[kept].tolist()


@pytest.mark.parametrize("kind", ["all", "first", "later"])
@pytest.mark.parametrize("verb", [ac.patch_heads, ac.attribute_heads])
def test_a_metric_of_ones_own_finds_its_rows_of_the_targets_by_their_index(model, halves, verb, kind):
    kinds = np.array(["later", "first", "later"])
    pair = [replace(half, targets=half.targets.assign(kind=kinds)) for half in halves]
    numbers = torch.tensor([1.0, 10.0, 100.0])

    def by_row(logits: Tensor, targets: pd.DataFrame) -> Tensor:
        # Of a batch without targets it would have none to stack.
        return torch.stack([numbers[row] + 0 * of_row.sum() for row, of_row in zip(targets.index, logits, strict=True)])

    for batch_size in (1, 2):  # an index within the batch or within the kind would be another row's
        options = ac.RunOptions(batch_size=batch_size, progress=False)
        table = verb(model, ac.Pair(*pair, metric=by_row, kind=kind), options=options)
        clean = table.baselines.where(run="clean").frame["value"].iloc[0]
        assert clean == pytest.approx(float(numbers[(kinds == kind) | (kind == "all")].mean()))


def test_a_metric_beside_accuracy_is_what_it_is_alone(model, halves):
    for metric in ("log_prob", "prob", "logit", "logit_diff"):
        alone = TargetMetrics.of(halves[0], (metric,)).measure(model)[0]
        beside = TargetMetrics.of(halves[0], ("accuracy", metric)).measure(model)[0]
        np.testing.assert_allclose(beside[1], alone[0], rtol=1e-6)


def test_a_metric_of_ones_own_may_change_the_logits_that_it_is_given(model, halves):
    def margin(logits: Tensor, targets: pd.DataFrame) -> Tensor:
        rows, token = range(len(targets)), targets["token"].tolist()
        own = logits[rows, token].clone()
        logits[rows, token] = -torch.inf
        return own - logits.amax(1)

    alone, beside = (TargetMetrics.of(halves[0], (*first, "prob", "kl")) for first in ([], [margin]))
    alone, beside = (each.with_reference(model, halves[1]).measure(model)[0] for each in (alone, beside))
    np.testing.assert_array_equal(beside[1:], alone)


def test_means_of_prompts_without_targets_of_a_group_are_missing():
    prompts = ac.Prompts.from_tokens([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    prompt, values = np.array([0, 0, 0, 2]), [np.array([1.0, 2.0, 6.0, 5.0]), np.array([3.0, 5.0, 1.0, 4.0])]
    groups = [np.full(4, True), np.array([False, True, True, False])]
    means, counts = means_by_prompt(prompts, prompt, values, groups)
    nan = np.nan
    np.testing.assert_array_equal(means, [[3, nan, 5], [4, nan, nan], [3, nan, 4], [3, nan, nan]])
    np.testing.assert_array_equal(counts, [[3, 0, 1], [2, 0, 0], [3, 0, 1], [2, 0, 0]])


def test_prompts_several_times_over():
    prompts = ac.Prompts.from_tokens([[1, 2, 3], [4, 5]])
    assert repeat(prompts, 1) is prompts
    again = repeat(prompts, 2)
    assert again.tokens.tolist() == prompts.tokens.tolist() * 2 and again.mask.tolist() == prompts.mask.tolist() * 2
    assert again.targets.empty and not prompts.targets.empty


def of_one(logits: Tensor) -> Tensor:
    return logits[:, 0]


def of_wrong_shape(logits: Tensor, targets: pd.DataFrame) -> Tensor:  # noqa: ARG001
    return logits


def no_tensor(logits: Tensor, targets: pd.DataFrame) -> Any:  # noqa: ARG001
    return 1.0


def without_gradient(logits: Tensor, targets: pd.DataFrame) -> Tensor:  # noqa: ARG001
    return logits.argmax(1).double()


def verbs(model: Any, pair: ac.Pair, metric: Any) -> dict[str, Any]:
    pair = replace(pair, metric=metric)
    return {
        "patch_heads": lambda: ac.patch_heads(model, pair),
        "ablate_heads": lambda: ac.ablate_heads(model, pair.clean, "zero", metrics=[metric]),
        "patch_edges": lambda: ac.patch_edges(model, pair),
        "patch_paths": lambda: ac.patch_paths(model, pair),
        "function_vectors": lambda: ac.function_vectors(model, [pair]),
        "attribute_heads": lambda: ac.attribute_heads(model, pair),
        "attribute_edges": lambda: ac.attribute_edges(model, pair),
    }


@pytest.mark.parametrize("metric", [of_wrong_shape, no_tensor, without_gradient])
def test_a_function_that_is_no_metric_is_refused_by_its_name(model, halves, metric):
    for name, run in verbs(model, ac.Pair(*halves), metric).items():
        if metric is without_gradient and not name.startswith("attribute"):
            continue
        message = "has no gradient" if metric is without_gradient else "returned .*must return a tensor with a number"
        refused(f"metric '{metric.__name__}' {message}", run)
    assert len(ac.patch_heads(model, ac.Pair(*halves, metric=without_gradient), heads=[(0, 0)]))
    with pytest.raises(ValueError, match=r"metric 'of_one': too many .*; a metric takes \(logits, targets\)"):
        ac.patch_heads(model, ac.Pair(*halves, metric=cast(Any, of_one)), heads=[(0, 0)])


def prob(logits, _):
    return logits.amax(1)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([prob], "a function called 'prob', which is a metric of the package: rename the function"),
        (["logits"], "metric='logits': choose one of 'accuracy', .*'kl', or a function of logits and targets"),
        ([5], r"metrics?(\[0\])? is 5, not .*'kl' or a function"),
        ([], r"metrics=\[\]: give a list of at least one"),
        (["kl", "kl"], "two metrics are called 'kl'"),
        (["prob", "kl", "accuracy", "kl", "accuracy"], "two metrics are called 'kl'"),
        ([lambda logits, _: logits, lambda _, targets: targets], "two metrics are called '<lambda>'"),
    ],
)
def test_metrics_that_are_refused(model, halves, metrics, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ac.ablate_heads(model, halves[0], "zero", metrics=metrics)
    if isinstance(metrics, list) and len(metrics) == 1:
        with pytest.raises((TypeError, ValueError), match=message):
            ac.Pair(*halves, metric=metrics[0])


@pytest.mark.parametrize("wrong", [np.nan, None, -1, 64, 11.5, "b"])
def test_a_logit_difference_needs_a_wrong_token_of_each_target(model, halves, wrong):
    targets = halves[0].targets.assign(**{WRONG: pd.Series([11, 12, wrong], dtype=object)})
    prompts = replace(halves[0], targets=targets)
    for measure in (partial(ac.evaluate, metrics=["logit_diff"]), partial(dla, metric="logit_diff")):
        message = rf"'wrong' of the targets holds {wrong} in prompt \d \(counted from 0\): give a token id from 0 to 63"
        refused(message, measure, model, prompts)
    ac.evaluate(model, prompts, metrics=["log_prob"])


def test_a_logit_difference_needs_a_wrong_answer(halves):
    plain = [replace(prompts, targets=prompts.targets.drop(columns=WRONG)) for prompts in halves]
    refused(
        r"metric='logit_diff' compares with a wrong answer, .*answer=, wrong=\)", ac.Pair, *plain, metric="logit_diff"
    )


@pytest.mark.parametrize("name", ["p", "q", "causal_p"])
def test_no_metric_of_a_user_is_called_as_a_p_value(name):
    def metric(logits, _):
        return logits[:, 0]

    metric.__name__ = name
    with pytest.raises(ValueError, match=f"a function called '{name}', which is a metric of the package"):
        checked_names([metric])
