"""Verbs on a GPU say what they say on the CPU; `test_on_a_gpu.py` runs these on one that is pretended."""

import copy
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pretend_gpu import pretend
from small_training import loss, network, norms, quiet, same_weights, sample

import align_circuits as ac
from align_circuits.circuits.faithful import completeness
from align_circuits.cli import main
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.task_vector_effects import representations, steer, task_vectors
from align_circuits.hooks.names import name_of
from align_circuits.hooks.replay import REPLAY_SITES
from align_circuits.models.parameters import device_of, parameters_of
from align_circuits.papers.abrupt.figs_3_4_5_transition import trained_networks
from align_circuits.papers.abrupt.grid import SMOKE, Grid, train_on_exemplars
from align_circuits.papers.abrupt.interventions import attend_to_label, attend_to_previous
from align_circuits.papers.abrupt.models import ExemplarNet, ExemplarNetConfig, InductionHead, InductionHeadConfig
from align_circuits.papers.abrupt.task import ExemplarTask, Worlds
from align_circuits.papers.recall.figures import attention_only_models
from align_circuits.papers.recall.figures.attention_only_models import SMALLEST
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import measure_heads
from align_circuits.papers.recall.figures.figs_13_14_19_24_held_out import (
    finetune_attention_only,
    pretrain_attention_only,
)
from align_circuits.papers.recall.figures.gpt2_models import SMOKE as GPT2_SMOKE
from align_circuits.papers.recall.figures.gpt2_models import model_of
from align_circuits.papers.recall.models.gpt2 import small_gpt2
from align_circuits.papers.recall.models.training import Stage, train_stage
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.report import save_localization
from align_circuits.run.forward_pass import capture
from align_circuits.training.loop import TrainConfig

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=2)
DEVICES = ("cpu", "cuda")
EXEMPLARS = ExemplarTask(n_classes=12, n_labels=6, n_pairs=3, d_content=8, n_positions=9)
WORLD = RecallWorld.small()
OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "muon", "rest_lr": 1e-3},
    {"optimizer": "muon-fp32", "rest_lr": 1e-3},
]
ATTRIBUTIONS: list[dict[str, Any]] = [
    {"grad_drop": True},
    {"method": "atp_star", "sites": ["q", "k", "z"]},
    {"method": "ig_inputs", "steps": 2},
]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # inside peft 0.21


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if torch.version.cuda is None:
        with pretend():
            yield
    else:
        yield


@pytest.fixture(scope="module")
def folder(random_hf_model, char_tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    random_hf_model("llama").save_pretrained(place)
    char_tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def llamas(folder):
    """The same model here and there."""
    return [ac.load(folder, device=device) for device in DEVICES]


SPLIT = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}


@pytest.fixture(scope="module")
def split(folder):
    """The same model here and on two devices."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    return [ac.load(folder, device="cpu"), ac.load(folder, device_map={**SPLIT, "lm_head": 1})]


@pytest.fixture
def models(request):
    """The same model here and there, on one device or on two."""
    return request.getfixturevalue(request.param)


ON_ONE_AND_ON_TWO = pytest.mark.parametrize("models", ["llamas", "split"], indirect=True)


@pytest.fixture(scope="module")
def prompts(char_tokenizer):
    return TASK.sample(4, char_tokenizer, seed=0)


@pytest.fixture(scope="module")
def pair(prompts):
    return ac.Pair(prompts, TASK.corrupt(prompts, "query", seed=1))


@pytest.fixture(scope="module")
def noise(pair):
    return replace(pair, direction="noise")


def alike(one: Any, other: Any, *, atol: float = 1e-5) -> None:
    """Two tables, frames or tensors."""
    if isinstance(one, ac.Table):
        assert one.provenance.engine == other.provenance.engine
        assert (one.provenance.model["device"], other.provenance.model["device"]) == ("cpu", "cuda:0")
        one, other = one.frame, other.frame
    if isinstance(one, pd.DataFrame):
        # Over four prompts the ends of intervals, corrected for skew, magnify rounding many times.
        ends = [column for column in ("low", "high") if column in one]
        one, other = one.drop(columns=ends), other.drop(columns=ends)
        pd.testing.assert_frame_equal(one, other, atol=atol, rtol=1e-5)
        assert len(set(one["value"])) > 1, "nothing to compare"
    else:
        torch.testing.assert_close(one.cpu(), other.cpu(), atol=atol, rtol=1e-5)


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def there_as_here(models: list[Any], verb: Any, **how: Any) -> None:
    here, there = (verb(model) for model in models)
    alike(here, there, **how)


def test_what_cannot_be_mixed_raises():
    here, there = torch.arange(3.0), torch.arange(3.0, device="cuda")
    for mixed in (
        lambda: here + there,
        lambda: here @ there,
        lambda: torch.cat([here, there]),
        lambda: here.add_(there[0]),
        lambda: here[there.long()],
        lambda: here.index_select(0, there.long()),
        lambda: there.index_put_((torch.tensor([0, 1]),), here[:2]),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
        lambda: torch.randn(2, generator=torch.Generator("cuda")),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mixed()
    with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
        np.asarray(there)


def test_what_crosses_devices():
    here, there = torch.arange(3.0), torch.arange(3.0, device="cuda")
    assert there.to("cuda") is there and there.device == torch.device("cuda:0") and there.is_cuda
    assert (there * torch.tensor(2.0))[torch.tensor([2, 0])].tolist() == [4, 0]
    view = there[1:]
    view += 5
    assert here.copy_(there).tolist() == there.cpu().tolist() == [0, 6, 7]
    with torch.random.fork_rng(devices=[torch.device("cuda:0")]):
        torch.cuda.manual_seed(3)
        drawn = [torch.randn(2, device="cuda").tolist() for _ in range(2)]
        torch.cuda.manual_seed(3)
        assert torch.randn(2, device="cuda").tolist() == drawn[0] != drawn[1]


def test_load(folder, llamas):
    assert {value.device.type for value in dict(parameters_of(llamas[1])).values()} == {"cuda"}
    assert next(llamas[1].parameters()).device == torch.device("cuda:0")
    assert next(ac.load(folder).parameters()).is_cuda, "where there is a GPU, it is the default"
    half = ac.load(folder, device="cuda", dtype=torch.bfloat16)
    assert {value.dtype for value in dict(parameters_of(half)).values()} == {torch.bfloat16}


@ON_ONE_AND_ON_TWO
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("verb", [ac.score_heads, ac.evaluate])
def test_scores_and_evaluation(models, prompts, verb, engine):
    there_as_here(models, lambda model: verb(model, prompts, options=ac.RunOptions(engine=engine)))


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_scores_of_padded_prompts(llamas, prompts, char_tokenizer, engine):
    longer = replace(TASK, n_examples=3).sample(2, char_tokenizer, seed=1)
    padded = ac.Prompts.from_tokens([row.tolist() for some in (prompts, longer) for row in some.tokens])
    options = ac.RunOptions(engine=engine, batch_size=4)
    there_as_here(llamas, lambda model: ac.score_heads(model, padded, options=options))


def test_scores_in_bfloat16(folder, prompts):
    halves = [ac.load(folder, device=device, dtype=torch.bfloat16) for device in DEVICES]
    there_as_here(halves, lambda model: ac.score_heads(model, prompts, metrics=["lookup", "entropy"]), atol=0.05)


def test_p_values(llamas):
    longer = replace(TASK, x_len=5).sample(4, llamas[0].tokenizer, seed=0)
    here, there = (p_values(model, longer, list(longer.relations)) for model in llamas)
    for name, values in here.items():
        np.testing.assert_allclose(values, there[name], atol=1e-5)
        assert values.std() > 0


@ON_ONE_AND_ON_TWO
@pytest.mark.parametrize("sites", [REPLAY_SITES, ["pattern"]], ids=["replay", "pattern"])
def test_patches(models, pair, sites):
    there_as_here(models, lambda model: ac.patch_heads(model, pair, sites=sites))


@pytest.mark.parametrize("sites", [["z"], ["q", "v"]], ids=["z", "q and v"])
def test_screened_patches(llamas, pair, sites):
    there_as_here(llamas, lambda model: ac.patch_heads(model, pair, sites=sites, screen=0.3))


def test_little_memory(llamas, pair, monkeypatch):
    """One edit set and one prompt at a time."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1, 1))
    there_as_here(llamas, lambda model: ac.patch_heads(model, pair, sites=["z"]))
    there_as_here(llamas, lambda model: ac.score_heads(model, pair.clean, metrics=["lookup"]))


@ON_ONE_AND_ON_TWO
@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_ablations(models, prompts, how):
    there_as_here(models, lambda model: ac.ablate_heads(model, prompts, how=how))
    there_as_here(models, lambda model: ac.ablate_heads(model, prompts, how=how, screen=0.3))


@ON_ONE_AND_ON_TWO
@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("name", ["patch", "zero", "mean", "resample", "clamp", "steer", "rotated"])
def test_edits(models, pair, name, engine):
    heads, later = [(0, 0), (0, 1), (1, 2), (1, 3)], torch.zeros_like(pair.clean.mask)
    later[:, 5:] = True

    def edited(model: Any) -> ac.Table:
        if name == "patch":
            names = [name_of("v", layer) for layer in range(2)]
            cached = capture(model, pair.corrupted, names, options=ac.RunOptions(engine=engine))
            edit: Any = ac.Patch(heads, "v", positions=later, values=cached)
        elif name in ("mean", "resample"):
            edit = ac.Ablate(heads, how=name, baseline=ac.ablation_baseline(model, pair.corrupted, how=name, site="z"))
        elif name == "clamp":
            edit = ac.Clamp(heads, "lookup")
        elif name == "steer":
            edit = ac.Steer(site="resid_pre", layers=[1], positions=later, vector=torch.ones(32))
        else:
            edit = ac.Ablate(heads, "rot_k" if name == "rotated" else "k", how="zero")
        return ac.evaluate(model, pair.clean, edits=[edit], options=ac.RunOptions(engine=engine))

    there_as_here(models, edited)


def test_edits_whose_values_are_on_the_gpu(llamas, pair):
    """As a notebook makes them, from a cache."""

    def edited(model: Any) -> ac.Table:
        with torch.no_grad():
            _, cache = model.run_with_cache(pair.corrupted.tokens.to(device_of(model)))
        names = [name_of("z", layer) for layer in range(2)]
        patch = ac.Patch([(0, 1), (1, 2)], values={name: cache[name] for name in names})
        steer = ac.Steer(site="resid_post", layers=[0], vector=cache[name_of("resid_post", 0)][0, 3])
        return ac.evaluate(model, pair.clean, edits=[patch, steer], options=ac.RunOptions(batch_size=3))

    there_as_here(llamas, edited)


def test_plain_hooks(llamas, pair):
    prompts = pair.clean
    edits = [ac.Clamp([(0, 1)], "lookup"), ac.Ablate([(1, 1)], positions=torch.ones_like(prompts.mask), how="zero")]

    def logits(model: Any) -> torch.Tensor:
        hooks = [hook for edit in edits for hook in edit.fwd_hooks(model, prompts)]
        with torch.no_grad():
            return model.run_with_hooks(prompts.tokens.to(device_of(model)), fwd_hooks=hooks)

    there_as_here(llamas, logits, atol=1e-4)


def test_localization(tmp_path):
    task = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=3)
    models = [ac.planted_circuit(task, seed=3, n_layers=4).to(device) for device in DEVICES]
    here, there = (ac.localize(model, task, n=12, seed=1, n_controls=1) for model in models)
    assert here.heads_by_role == there.heads_by_role and here.named_heads
    # An effect of 0 is one of rounding elsewhere, whose p-value may be any.
    told = {*here.table.frame["metric"]} - {"causal_p"}
    alike(here.table.where(metric=told), there.table.where(metric=told))
    alike(here.evidence.set_ablations, there.evidence.set_ablations)
    assert save_localization(there, tmp_path).is_file()


def test_localization_from_the_command_line(folder, tmp_path):
    small = ["--model", str(folder), "--n", "8", "--x-len", "5", "--n-examples", "2", "--n-controls", "1"]
    assert main(["localize", *small, "--device", "cuda", "--out", str(tmp_path)]) == 0
    assert ac.Table.load(tmp_path).provenance.model["device"] == "cuda:0"
    assert "cuda:0" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("how", OPTIMIZERS, ids=str)
def test_training(how):
    """Without dropout, whose random numbers are others there."""
    logs = []
    for device in DEVICES:
        model = without_dropout(network()).to(device)
        logs.append(quiet(model, sample, loss, TrainConfig(6, lr=1e-2, log_every=2, **how), metrics=norms).log)
    # The updates of AdamW and Muon hardly depend on the size of a gradient, so that rounding shows where it is near 0.
    atol, columns = (1e-5, [*logs[0]]) if how.get("optimizer") == "sgd" else (1e-3, ["step", "loss", "norm"])
    pd.testing.assert_frame_equal(*(log[columns] for log in logs), atol=atol, rtol=atol)


def test_a_killed_training_goes_on(tmp_path):
    torch.cuda.manual_seed(1)
    config, before = TrainConfig(6, lr=1e-2, log_every=2), torch.cuda.get_rng_state()

    def killed(step: int, seed: int) -> Any:
        if step == 5:
            raise KeyboardInterrupt
        return sample(step, seed)

    whole = quiet(network().cuda(), sample, loss, config, metrics=norms)
    with pytest.raises(KeyboardInterrupt):
        quiet(network().cuda(), killed, loss, config, metrics=norms, out=tmp_path)
    parts = quiet(network().cuda(), sample, loss, config, metrics=norms, out=tmp_path)
    pd.testing.assert_frame_equal(parts.log, whole.log)
    assert same_weights(parts.model, whole.model)
    assert torch.equal(torch.cuda.get_rng_state(), before), "the GPU's global random state moved"


def test_training_in_bfloat16():
    model = without_dropout(network())
    one = quiet(copy.deepcopy(model), sample, loss, TrainConfig(3, precision="bf16", log_every=1)).log
    other = quiet(model.cuda(), sample, loss, TrainConfig(3, precision="bf16", log_every=1)).log
    pd.testing.assert_frame_equal(one, other, atol=0.05, rtol=0.05)


def test_tuning(llamas, tmp_path):
    config = ac.TuneConfig(steps=2, lr=5e-2, batch=2, probe_every=2, probe_prompts=2, dropout=0.0)
    here, there = (
        ac.tune(model, TASK, config, progress=False, out=tmp_path / device)
        for model, device in zip(llamas, DEVICES, strict=True)
    )
    alike(here.table, there.table, atol=1e-4)
    assert {value.device.type for value in dict(parameters_of(there.model)).values()} == {"cuda"}
    again = ac.load(tmp_path / "cuda" / "adapter", device="cuda")
    prompts = TASK.sample(2, again.tokenizer, seed=1)
    alike(ac.evaluate(here.model, prompts), ac.evaluate(again, prompts), atol=1e-4)


@pytest.mark.parametrize("how", ATTRIBUTIONS, ids=str)
def test_attribution_of_heads(llamas, noise, how):
    there_as_here(llamas, lambda model: ac.attribute_heads(model, noise, **how))


@pytest.mark.parametrize("method", ["eap_ig_activations", "atp_star"])
def test_attribution_of_edges(llamas, noise, method):
    there_as_here(llamas, lambda model: ac.attribute_edges(model, noise, method=method, steps=2))


@ON_ONE_AND_ON_TWO
def test_edges_and_paths(models, noise):
    edges = [("input", "L0KV1.v"), ("M0", "L1H3.q"), ("L0H2", "L1KV0.k"), ("L1H1", "M1"), ("L0H0", "logits")]
    there_as_here(models, lambda model: ac.patch_edges(model, noise, edges=edges))
    ends: Any = {"senders": ["input", "L0H1"], "receivers": ["L1H0.q", "L1KV1.k", "L1KV0.v", "M1", "logits"]}
    there_as_here(models, lambda model: ac.patch_paths(model, noise, **ends))


def test_circuits(folder, noise):
    # A quotient: where a resample's denominator is small, float32's rounding is not.
    llamas = [ac.load(folder, device=device, dtype=torch.float64) for device in DEVICES]
    heads, scores = [(0, 1), (1, 2)], ac.attribute_edges(llamas[0], noise, method="eap")
    shares: Any = {"fractions": (0.5,), "heads": {"two": heads}}
    there_as_here(llamas, lambda model: ac.faithfulness(model, noise, scores, **shares))
    there_as_here(llamas, lambda model: completeness(model, heads[:1], noise, draws=1))


@ON_ONE_AND_ON_TWO
def test_contributions(models, prompts):
    there_as_here(models, lambda model: ac.direct_logit_attribution(model, prompts))
    pairs = [ac.Pair(prompts, TASK.corrupt(prompts, "labels", seed=1))]
    there_as_here(models, lambda model: ac.function_vectors(model, pairs, heads=[(0, 1), (1, 2)]))


def test_recall():
    facts = FactsTask(WORLD, n_facts=2, grammar_len=3)
    stage = Stage(facts, TrainConfig(4, lr=3e-3, log_every=2), batch_size=4)
    groups = [DemonstrationsTask(WORLD, 2, (1, 3)).sample(4, seed) for seed in range(2)]
    logs, vectors, activations, steered = [], [], [], []
    for device in DEVICES:
        net = without_dropout(small_gpt2(WORLD.d_vocab, 40, d_model=16))
        logs.append(train_stage(net, stage, probes={"facts": facts.sample(3, 1)}, device=device, progress=False).log)
        assert net.device.type == torch.device(device).type
        model = ac.load(net.eval())
        vectors.append(task_vectors(model, groups, 1))
        activations.append(representations(model, groups[0], ["blocks.1.hook_attn_out"])["blocks.1.hook_attn_out"])
        source = representations(model, groups[0], [name_of("z", 1)])[name_of("z", 1)].unflatten(1, (1, -1))
        answers = {"first": groups[0].column("token")[:4]}
        steered.append(steer(model, groups[0], 1, source, vectors[-1][1].expand_as(source), answers))
    pd.testing.assert_frame_equal(*logs, atol=1e-4, rtol=1e-4)
    for one, other in (vectors, activations, steered):
        alike(one, other, atol=1e-4)


def test_studies_train_where_there_is_a_gpu(tmp_path):
    """Reddy's (2024) with all that is measured in the networks, and recall's pretrainings and finetunings."""
    [ensemble] = Grid(SMOKE, [{"burst": 1}]).ensembles()
    assert len(trained_networks(ensemble=ensemble, trained=str(tmp_path)))
    model = model_of(asdict(GPT2_SMOKE), "icl", 0, tmp_path)
    assert model.original_model.device.type == torch.device(DEVICES[1]).type
    setup, trained = asdict(SMALLEST), str(tmp_path)
    heads = [measure_heads(setup=setup, seed=0), pretrain_attention_only(setup=setup, trained=trained, seed=0)]
    assert all(map(len, heads)) and len(finetune_attention_only(setup=setup, trained=trained, seed=0))
    finetuned: Any = attention_only_models.finetuned(SMALLEST, 0, trained).model
    assert finetuned.W_Q.device.type == torch.device(DEVICES[1]).type


@pytest.mark.parametrize("override", [attend_to_previous, attend_to_label, None], ids=["previous", "label", "free"])
def test_ensembles(override):
    """Trained and measured with overridden attention; without an override, reduced induction heads."""
    places = 0 if override is None else 9
    tasks = [replace(EXEMPLARS, n_positions=places), replace(EXEMPLARS, n_positions=places, burst=3, zipf=1.0)]
    config = TrainConfig(4, lr=0.1, optimizer="sgd", clip=None, log_every=2)
    found = []
    for device in DEVICES:
        net: Any = InductionHead(InductionHeadConfig(6, tasks[0].d_in, d_hidden=7), [0, 1])
        if override is not None:
            net = ExemplarNet(ExemplarNetConfig(6, tasks[0].d_in, d_head=5, d_hidden=7, init=0.5), [0, 1])
        intervention = override and override(net, "all" if override is attend_to_previous else True)
        how: Any = {"batch_size": 8, "probe": 16, "intervention": intervention, "device": device, "progress": False}
        found.append(train_on_exemplars(net, Worlds(tasks, [0, 1]), config, **how).frame)
    alike(*found)


@pytest.mark.skipif(torch.version.cuda is None, reason="a pretended GPU captures nothing")
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2], ids=["adamw", "sgd"])
def test_a_graph_trains_as_launches_do(optimizer):
    config = TrainConfig(6, lr=0.01, log_every=2, clip=None, **optimizer)
    logs = []
    for how in ({}, {"graph": True, "ahead": 2}):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).to("cuda")
        logs.append(quiet(model, sample, loss, config, **how).log)
    pd.testing.assert_frame_equal(*logs, rtol=1e-4)
    data, untouched = (torch.arange(56.0, device="cuda").view(7, 1, 8) for _ in range(2))
    quiet(model, lambda step, _: data[step], lambda model, batch: model(batch).square().mean(), config, graph=True)
    assert torch.equal(data, untouched), "the first batch was a part of the data, and later ones were written over it"
    growing = iter(range(1, 8))
    with pytest.raises(ValueError, match="after"):
        quiet(
            model, lambda *_: torch.ones(next(growing), 8), lambda model, batch: model(batch).sum(), config, graph=True
        )


# On two devices


def test_a_model_on_two_devices(split, prompts):
    assert [str(device_of(model)) for model in split] == ["cpu", "cuda:0"]
    assert {str(value.device) for _, value in parameters_of(split[1])} == {"cuda:0", "cuda:1"}
    there_as_here(split, lambda model: model(prompts.tokens.to(device_of(model))))


def test_attribution_on_two_devices(split, noise):
    there_as_here(split, lambda model: ac.attribute_heads(model, noise))
    there_as_here(split, lambda model: ac.attribute_edges(model, noise, method="eap_ig_activations", steps=2))


def test_localization_on_two_devices(split):
    task = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=3)
    there_as_here(split, lambda model: ac.localize(model, task, n=12, seed=1, n_controls=1).table)


# On one device that does not hold all layers


@pytest.fixture(scope="module", params=["cpu", "disk"])
def offloaded(request, folder):
    """The same model here, and with its last layer, norm and unembedding in memory or on disk until they run."""
    rest: dict[str, Any] = dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), request.param)
    return [ac.load(folder, device="cpu"), ac.load(folder, device_map={**SPLIT, **rest})]


def test_measures_with_offloaded_layers(offloaded, prompts):
    assert {str(value.device) for value in offloaded[1].original_model.parameters()} == {"cuda:0", "meta"}
    there_as_here(offloaded, lambda model: ac.score_heads(model, prompts))
    there_as_here(offloaded, lambda model: ac.evaluate(model, prompts, options=ac.RunOptions(engine="reference")))


def test_causes_with_offloaded_layers(offloaded, pair, noise):
    there_as_here(offloaded, lambda model: ac.patch_heads(model, pair, sites=REPLAY_SITES))
    there_as_here(offloaded, lambda model: ac.ablate_heads(model, pair.clean))
    there_as_here(offloaded, lambda model: ac.attribute_edges(model, noise, method="eap"))
    there_as_here(offloaded, lambda model: ac.patch_edges(model, noise, edges=[("M0", "L1H3.q"), ("L0H0", "logits")]))
    there_as_here(offloaded, lambda model: ac.direct_logit_attribution(model, pair.clean))
