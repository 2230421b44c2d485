"""Screened sweeps beside full ones, beside attribution, and beside gradients taken by plain hooks."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from effects_by_hand import z_of
from refusals import refused
from torch import Tensor

import align_circuits as ac
from align_circuits.heads.ablate import ablate_heads
from align_circuits.heads.patch import patch_heads
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.names import Site
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.report import plots
from align_circuits.run import first_order
from align_circuits.run.target_metrics import TargetMetrics

TASK = ac.Seq2SeqTask(x_len=2, phrase_len=2, n_examples=3)
KEYS = ["site", "layer", "head", "positions", "kind", "metric"]


@pytest.fixture(scope="module")
def clean(accepting) -> Prompts:
    return accepting(TASK, 3)


@pytest.fixture(scope="module")
def corrupted(clean) -> Prompts:
    return TASK.corrupt(clean, "labels", seed=1)


def by(frame: Any, keys: list[str], column: str = "value") -> dict[tuple, float]:
    return frame.set_index(keys)[column].to_dict()


@pytest.mark.parametrize(
    ("name", "direction"), [("llama", "denoise"), pytest.param("gpt2", "noise", marks=pytest.mark.slow)]
)
def test_some_rows_are_those_of_the_full_sweep_and_the_others_those_of_attribution(
    models, clean, corrupted, name, direction
):
    sites: Any = ["z", "q", "k", "v"]
    pair = ac.Pair(clean, corrupted, direction=direction)
    screened = patch_heads(models[name], pair, sites=sites, screen=0.3)
    full = patch_heads(models[name], pair, sites=sites)
    assert screened.frame[KEYS].equals(full.frame[KEYS])
    assert screened.provenance.settings == {**full.provenance.settings, "screen": 0.3}
    frame: Any = screened.frame
    for column in ("value", "low", "high", "n"):
        measured = by(frame[~frame["estimated"]], KEYS, column)
        expected = by(full.frame, KEYS, column)
        assert measured == pytest.approx({key: expected[key] for key in measured}, abs=1e-5, nan_ok=True)

    places = ["site", "layer", "head"]
    for kind in ("all", "first", "later"):
        attributed: Any = ac.attribute_heads(
            models[name], replace(pair, kind=kind), method="atp_star", sites=sites
        ).frame
        here = frame[frame["estimated"] & (frame["kind"] == kind) & (frame["metric"] == "log_prob")]
        for column in ("value", "low", "high", "n"):
            found, expected = by(here, places, column), by(attributed, places, column)
            assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-4, abs=1e-4)
        if kind == "all":
            size = attributed["value"].abs()
            for site in sites:
                of_site, made = attributed[attributed["site"] == site], set(here[here["site"] == site].index)
                estimated = set(zip(*here.loc[sorted(made), ["layer", "head"]].to_numpy().T, strict=True))
                ranked = of_site.assign(size=size).sort_values("size", ascending=False, kind="stable")
                exact = [place for place in zip(ranked["layer"], ranked["head"], strict=True) if place not in estimated]
                # 8 heads, of which .3 are 3; of 4 key heads of two heads each 2.
                assert len(exact) == (4 if name == "llama" and site in ("k", "v") else 3)
                assert exact == [*zip(ranked["layer"], ranked["head"], strict=True)][: len(exact)]

    accuracy = frame[frame["metric"] == "accuracy"]
    assert accuracy.loc[accuracy["estimated"], ["value", "low", "high"]].isna().all(axis=None)
    assert (accuracy.loc[accuracy["estimated"], "n"] == 0).all()
    assert accuracy.loc[~accuracy["estimated"], "value"].notna().all()


@pytest.mark.parametrize("options", [ac.RunOptions(batch_size=2), ac.RunOptions(engine="reference")])
def test_a_screen_that_lets_all_pass_is_the_full_sweep(models, clean, corrupted, options):
    pair = ac.Pair(clean, corrupted)
    both = patch_heads(models["llama"], pair, screen=1.0, options=options), patch_heads(models["llama"], pair)
    both += ablate_heads(models["llama"], clean, screen=1.0, options=options), ablate_heads(models["llama"], clean)
    for screened, full in (both[:2], both[2:]):
        frame: Any = screened.frame
        assert not frame["estimated"].any()
        same = frame.drop(columns="estimated")
        assert same[full.keys].equals(full.frame[full.keys])
        assert same["value"].to_numpy() == pytest.approx(full.frame["value"].to_numpy(), abs=1e-5)


def gradient_by_hand(
    model: Any, prompts: Prompts, layer: int, tokens: Tensor, query: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """z [prompt pos head d_head] of a layer and the gradient at it of the log-probability of each target."""
    kept: list[Tensor] = []

    def keep(z: Tensor, **_: Any) -> Tensor:
        kept.append(z.detach().requires_grad_())
        return kept[0]

    with torch.enable_grad():
        logits = model.run_with_hooks(prompts.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", keep)])
        prompt = prompts.column("prompt")
        log_prob = logits[prompt, query].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        gradients = [torch.autograd.grad(one, kept, retain_graph=True)[0] for one in log_prob]
    return kept[0].detach(), gradients


def estimates_by_hand(model: Any, prompts: Prompts, replaced: list[Tensor], mask: Tensor) -> dict[tuple, float]:
    """The first-order effect of replacing z of each head, by layer, head and kind."""
    found: dict[tuple, float] = {}
    kinds = prompts.targets["kind"].to_numpy()
    for layer in range(2):
        z, gradients = gradient_by_hand(model, prompts, layer, prompts.column("token"), prompts.column("query_pos"))
        for head in range(4):
            change = (replaced[layer][:, :, head] - z[:, :, head]) * mask[:, :, None]
            effect = np.array([float((change * gradient[:, :, head]).sum()) for gradient in gradients])
            for kind in ("all", "first", "later"):
                found[layer, head, kind] = effect[(kinds == kind) | (kind == "all")].mean()
    return found


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_estimates_of_ablations_equal_gradients_by_hand(models, clean, how, name):
    model, z = models[name], z_of(models[name], clean)
    last = clean.example == clean.example.max()
    by_layer = []
    for values in z:
        new = torch.zeros_like(values) if how == "zero" else values.roll(-1, 0)
        if how == "mean":
            for role in TokenKind:
                for tested in (True, False):
                    here = (clean.token_kinds == role) & (last == tested)
                    if here.any():
                        new[here] = values[here].mean(0)
        by_layer.append(new)
    expected = estimates_by_hand(model, clean, by_layer, torch.ones_like(clean.mask))
    # The smallest share: one head is ablated, and all others are estimates.
    table = ablate_heads(model, clean, how, screen=0.01, options=ac.RunOptions(batch_size=2))
    frame: Any = table.where(metric="log_prob").frame
    estimated = by(frame[frame["estimated"]], ["layer", "head", "kind"])
    assert len(estimated) == 7 * 3
    assert estimated == pytest.approx({key: expected[key] for key in estimated}, abs=1e-5)
    ((layer, head),) = {*zip(*frame.loc[~frame["estimated"], ["layer", "head"]].to_numpy().T, strict=True)}
    assert (layer, head) == max(((key[0], key[1]) for key in expected), key=lambda it: abs(expected[*it, "all"]))
    assert table.provenance.settings["screen"] == 0.01


def test_each_group_of_positions_is_screened_on_its_own(models, clean, corrupted):
    model, z = models["llama"], z_of(models["llama"], clean)
    early = torch.arange(clean.mask.shape[1]) < 12
    masks = {"early": early.expand_as(clean.mask), "late": (~early).expand_as(clean.mask)}
    table = patch_heads(model, ac.Pair(clean, corrupted), positions=masks, screen=0.25)
    for name, mask in masks.items():
        frame: Any = table.where(positions=name, metric="log_prob").frame
        assert (~frame["estimated"]).sum() == 2 * 3
        expected = estimates_by_hand(model, corrupted, z, mask)
        estimated = by(frame[frame["estimated"]], ["layer", "head", "kind"])
        assert estimated == pytest.approx({key: expected[key] for key in estimated}, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_terms_by_position_add_up_to_the_effect(models, name):
    """Of padded prompts, in batches; at padding there is none."""
    generator = torch.Generator().manual_seed(3)
    prompts = Prompts.from_tokens([torch.randint(64, (n,), generator=generator).tolist() for n in (9, 5, 7)])
    model, targets = models[name], TargetMetrics.of(prompts, ("log_prob",))
    kinds = {"all": np.full(len(targets.token), True)}
    heads = range(model.cfg.n_heads)
    edits: dict[tuple[Site, int, str], Ablate] = {
        ("z", layer, ""): Ablate([(layer, head) for head in heads], how="zero") for layer in (0, 1)
    }
    call = partial(first_order.first_order_effects, model, targets, kinds, edits, options=ac.RunOptions(batch_size=2))
    terms, whole = call(by_position=True), call()
    assert terms.shape == (*whole.shape, prompts.mask.shape[1])
    np.testing.assert_allclose(terms.sum(-1), whole, atol=1e-6)
    assert (terms[..., ~prompts.mask.numpy()] == 0).all() and np.abs(terms[..., prompts.mask.numpy()]).max() > 1e-3


def test_padding_and_prompts_without_targets_of_a_kind(models):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(64, (n,), generator=generator).tolist() for n in (9, 5, 7)]
    padded = Prompts.from_tokens(ids)
    found: Any = ablate_heads(models["llama"], padded, "zero", screen=0.01).where(metric="log_prob", kind="all").frame
    single = [ablate_heads(models["llama"], Prompts.from_tokens([row]), "zero", screen=0.01) for row in ids]
    values = []
    for table in single:
        frame = table.where(metric="log_prob", kind="all").frame
        values.append(frame["value"].where(frame["estimated"], np.nan).to_numpy())
    expected = np.average(values, axis=0, weights=[len(row) - 1 for row in ids])
    compared = found["estimated"].to_numpy() & ~np.isnan(expected)
    assert compared.sum() >= 4
    assert found["value"].to_numpy()[compared] == pytest.approx(expected[compared], abs=1e-5)


def test_other_metrics_and_kinds(models, clean, corrupted):
    """The first metric with a gradient ranks the heads, and each has estimates of its own."""

    def margin(logits: Tensor, _: Any) -> Tensor:
        return logits[:, 3] - logits[:, 5]

    kl: Any = patch_heads(models["llama"], ac.Pair(clean, corrupted, metric="kl", kind="first"), screen=0.3)
    attributed = ac.attribute_heads(models["llama"], ac.Pair(clean, corrupted, metric="kl", kind="first"))
    estimated = by(kl.where(estimated=True).frame, ["layer", "head"])
    expected = by(attributed.frame, ["layer", "head"])
    assert estimated == pytest.approx({key: expected[key] for key in estimated}, abs=1e-5)
    assert set(kl.frame["kind"]) == {"first"}

    table = ablate_heads(models["llama"], clean, "zero", metrics=["kl", margin, "logit"], screen=0.3)
    # At the intact run the divergence has its minimum, and no gradient.
    flat: Any = table.where(metric="kl", estimated=True).frame
    assert len(flat) and flat["value"].isna().all()
    own = ablate_heads(models["llama"], clean, "zero", metrics=[margin], screen=0.3)
    logit = ablate_heads(models["llama"], clean, "zero", metrics=["logit"], screen=0.01)
    keys = ["layer", "head", "kind", "estimated"]
    assert by(table.where(metric="margin").frame, keys) == pytest.approx(by(own.frame, keys), abs=1e-6)
    both = by(table.where(metric="logit", estimated=True).frame, keys)
    expected = by(logit.frame, keys)
    shared = both.keys() & expected.keys()
    assert len(shared) >= 4 * 3
    assert {key: both[key] for key in shared} == pytest.approx({key: expected[key] for key in shared}, abs=1e-5)


def test_estimates_and_measured_effects_are_not_mixed(models, clean, corrupted):
    table = patch_heads(models["llama"], ac.Pair(clean, corrupted, kind="all"), screen=0.3)
    message = "measured effects and estimates, which are not to be mixed: choose with .where"
    for mixing in (
        lambda: table.top("log_prob"),
        lambda: table.to_array("log_prob"),
        lambda: plots.head_maps(table, ["log_prob"]),
        lambda: plots.top_heads(table, ["log_prob"]),
    ):
        refused(message, mixing)
    best = table.where(estimated=False).top("log_prob", 2).head_indices
    full = patch_heads(models["llama"], ac.Pair(clean, corrupted, kind="all")).where(metric="log_prob")
    value = by(full.frame, ["layer", "head"])
    assert [value[head] for head in best] == sorted((value[head] for head in best), reverse=True)
    assert len(table.where(estimated=True).top("log_prob", 8)) == 5
    with pytest.raises(ValueError, match=r"rows by estimated, .* choose a value with \.where\(estimated="):
        _ = table.where(metric="log_prob") - full


def test_the_beginning_that_both_prompts_share_needs_no_gradient(models, clean, monkeypatch):
    taken, firsts = first_order.gradients_at, []

    def gradients_at(*given: Any, first: int, **more: Any) -> Any:
        firsts.append(first)
        return taken(*given, first=first, **more)

    monkeypatch.setattr(first_order, "gradients_at", gradients_at)
    late = clean.select_targets(clean.column("query_pos") >= 20)
    inputs = late.inputs.clone()
    inputs[:, 20] = inputs[:, 20].roll(1)
    pair = ac.Pair(late, replace(late, inputs=inputs))
    behind = patch_heads(models["llama"], pair, screen=0.1)
    monkeypatch.setattr(first_order, "first_difference", lambda *_: 0)
    whole = patch_heads(models["llama"], pair, screen=0.1)
    assert firsts == [20, 0]
    numbers, expected = (table.where(metric="log_prob").frame["value"].to_numpy(float) for table in (behind, whole))
    assert np.abs(expected).max() > 0.001
    np.testing.assert_allclose(numbers, expected, atol=1e-5)


def test_a_screened_sweep_that_is_kept_goes_on(models, clean, corrupted, tmp_path):
    pair, options = ac.Pair(clean, corrupted), ac.RunOptions(cache_dir=tmp_path)
    first = patch_heads(models["llama"], pair, screen=0.3, options=options)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = patch_heads(models["llama"], pair, screen=0.3, options=options)
    assert kept and {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == kept
    assert first.frame.equals(again.frame)


def test_no_heads_is_an_empty_table(models, clean, corrupted):
    assert patch_heads(models["llama"], ac.Pair(clean, corrupted), heads=[], screen=0.5).frame.empty
    assert ablate_heads(models["llama"], clean, heads=[], screen=0.5).frame.empty


def test_refusals(models, clean, corrupted):
    model, pair = models["llama"], ac.Pair(clean, corrupted)

    def chosen(logits: Tensor, _: Any) -> Tensor:
        return logits.argmax(1).float()

    def broken(logits: Tensor, _: Any) -> Tensor:
        return (-logits[:, 0].abs()).sqrt()

    for run, message in [
        (lambda: patch_heads(model, pair, screen=0.0), "screen=0.0: give the share of heads .* above 0 and at most 1"),
        (lambda: ablate_heads(model, clean, screen=1.5), "screen=1.5: give the share"),
        (lambda: patch_heads(model, pair, screen=float("nan")), "screen=nan: give the share"),
        (lambda: patch_heads(model, pair, sites=["z", "pattern"], screen=0.5), "site='pattern' cannot be screened"),
        (lambda: patch_heads(model, pair, sites=["mlp_out"], screen=0.5), "site='mlp_out' cannot be screened"),
        (
            lambda: patch_heads(model, replace(pair, metric="accuracy"), screen=0.5),
            "ranks heads by the gradient of a metric, and 'accuracy' has none in this run",
        ),
        (lambda: ablate_heads(model, clean, metrics=["kl", "accuracy"], screen=0.5), "'kl' and 'accuracy' have none"),
        (lambda: patch_heads(model, ac.Pair(clean, corrupted, "kl", direction="noise"), screen=0.5), "'kl' has none"),
        (lambda: patch_heads(model, replace(pair, metric=chosen), screen=0.5), "metric 'chosen' has no gradient"),
        (lambda: patch_heads(model, replace(pair, metric=broken), screen=0.5), "the gradient of 'broken' is NaN"),
    ]:
        refused(message, run)
