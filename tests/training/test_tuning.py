"""Tuning: which weights are trained, adapters loaded elsewhere, probes, killed runs, and bad input."""

import importlib.util
import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from legs import slow_but
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import align_circuits as ac
from align_circuits.hooks.compat import architectures, bridges, lora_merging
from align_circuits.jobs import identity
from align_circuits.models import quantization
from align_circuits.models.lora import recompute, unwrapped, with_adapter
from align_circuits.models.parameters import parameters_of
from align_circuits.models.quantization import dequantised
from align_circuits.prompts.prompts import TokenKind
from align_circuits.prompts.relations import Relation
from align_circuits.run.evaluation import ALL_OFFSETS
from align_circuits.tasks.own_prompts import OwnPrompts
from align_circuits.training import probe, tuning
from align_circuits.training.probe import PROBED
from align_circuits.training.tuning import PROBE_SEED, TuneConfig, _TuningData, tune

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # inside peft 0.21

TASK = ac.Seq2SeqTask(x_len=2, phrase_len=2, n_examples=3)
FIXED = replace(TASK, automata="task")
QUICK = TuneConfig(steps=4, lr=5e-2, batch=2, probe_every=2, probe_prompts=3)


@pytest.fixture(scope="module")
def folder(random_hf_model, char_tokenizer, tmp_path_factory):
    """A small Llama with grouped-query attention."""
    place = tmp_path_factory.mktemp("llama")
    random_hf_model("llama", num_hidden_layers=3).save_pretrained(place)
    char_tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def llama(folder):
    return ac.load(folder)


@pytest.fixture
def at_each_loss(monkeypatch):
    """Makes `tune` call a function with the arguments of each loss before it is taken."""
    module = sys.modules[tune.__module__]
    real = module._loss

    def begin(look):
        def looking(model, batch, **options):
            look(model, batch)
            return real(model, batch, **options)

        monkeypatch.setattr(module, "_loss", looking)

    return begin


def run(model, task: Any = TASK, config=QUICK, **more):
    return tune(model, task, config, progress=False, **more)


@pytest.mark.parametrize("name", slow_but(["llama", "qwen3"], ["llama", "qwen2", "qwen3", "mistral"]))
def test_the_given_model_stays_as_it_was(name, random_hf_model, char_tokenizer):
    model = ac.load(random_hf_model(name), tokenizer=char_tokenizer)
    tokens = TASK.sample(2, char_tokenizer, seed=0).tokens
    before, modules = model(tokens), [type(module) for module in model.modules()]
    weights = {key: value.clone() for key, value in parameters_of(model)}
    requires_grad = [weight.requires_grad for weight in model.parameters()]
    tuned = run(model).model
    assert torch.equal(model(tokens), before)
    assert [type(module) for module in model.modules()] == modules
    assert [weight.requires_grad for weight in model.parameters()] == requires_grad
    assert all(torch.equal(value, weights[key]) for key, value in parameters_of(model))
    assert (tuned(tokens) - before).abs().max() > 1e-3, "nothing was learned"
    pointers = {value.data_ptr() for value in dict(parameters_of(model)).values()}
    kept = {key: value for key, value in parameters_of(tuned) if "lora" not in key}
    assert {value.data_ptr() for value in kept.values()} == pointers, "the weights were copied"


def test_the_adapter_loads_elsewhere_with_identical_logits(llama, folder, tmp_path):
    tuned = run(llama, out=tmp_path / "run").model
    tokens = TASK.sample(3, llama.tokenizer, seed=5).tokens
    adapter = tmp_path / "run" / "adapter"
    names = load_file(adapter / "adapter_model.safetensors")
    assert names and not any("_original_component" in name for name in names)
    plain = type(llama.original_model).from_pretrained(folder)
    base = plain(tokens).logits
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        elsewhere = PeftModel.from_pretrained(plain, str(adapter)).eval()(tokens).logits
        torch.testing.assert_close(tuned(tokens), elsewhere, atol=1e-5, rtol=0)
        torch.testing.assert_close(ac.load(adapter)(tokens), elsewhere, atol=1e-5, rtol=0)
    assert (elsewhere - base).abs().max() > 1e-3
    table = ac.Table.load(tmp_path / "run")
    assert table.provenance.verb == "tune" and table.provenance.settings["config"]["steps"] == 4


def test_an_adapter_finds_a_bundled_base_by_name(tmp_path):
    toy = ac.load("toy-llama", dtype=torch.float32)
    tuned = run(toy, config=replace(QUICK, steps=1), out=tmp_path).model
    tokens = TASK.sample(2, toy.tokenizer, seed=5).tokens
    loaded = ac.load(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(loaded(tokens), tuned(tokens)) and loaded.tokenizer is not None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {(layer, name) for layer in range(3) for name in "qkv"}),
        ({"layers": 1}, {(1, "q"), (1, "k")}),
        ({"layers": (0, 2), "projections": ("v", "gate")}, {(0, "v"), (0, "gate"), (2, "v"), (2, "gate")}),
    ],
)
def test_only_the_given_matrices_are_tuned(llama, tmp_path, config, expected):
    run(llama, config=replace(QUICK, r=4, **config), out=tmp_path)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    tuned = {(int(name.split(".layers.")[1][0]), name.split("_proj")[0].rpartition(".")[2]) for name in adapter}
    assert tuned == expected
    assert all(4 in value.shape for value in adapter.values())
    assert any(bool(value.any()) for name, value in adapter.items() if "lora_B" in name)
    checkpoint = load_file(tmp_path / "training" / "checkpoint.safetensors")
    assert all("lora" in name for name in checkpoint if name.startswith(("model.", "optimizer.")))


def test_no_gradient_flows_below_the_lowest_tuned_layer(llama, at_each_loss):
    needs = {}

    def look(model, _):
        for at, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda _m, _i, out, at=at: needs.update({at: out.requires_grad}))

    at_each_loss(look)
    for checkpointing in (False, True):
        run(llama, config=replace(QUICK, layers=2, checkpointing=checkpointing))
        assert needs == {0: False, 1: False, 2: True}


def test_the_loss_is_that_of_the_papers_equations(llama):
    """Beside a loop over prompts and positions, with all logits."""
    for config in (QUICK, replace(QUICK, loss_on="all")):
        data = _TuningData.of(llama, TASK, config, seed=3)
        batch = data.batch(1, 7)
        prompts = TASK.sample(2, llama.tokenizer, 7)
        expected = []
        for row in range(2):
            with torch.no_grad():
                log_prob = llama(prompts.tokens[row : row + 1])[0].log_softmax(-1)
            for pos in range(prompts.tokens.shape[1]):
                last = int(prompts.example[row, pos]) == TASK.n_examples
                if prompts.token_kinds[row, pos] == TokenKind.OUTPUT and (last or config.loss_on == "all"):
                    expected.append(-float(log_prob[pos - 1, prompts.tokens[row, pos]]))
        assert len(expected) == 2 * 4 * (4 if config.loss_on == "all" else 1)
        loss = sys.modules["align_circuits.training.tuning"]._loss(llama.original_model, batch)
        assert loss.item() == pytest.approx(np.mean(expected), abs=1e-5)
    single = _TuningData.of(llama, FIXED, TuneConfig(method="standard"), seed=0).batch(1, 7)
    assert single[0].shape == (16, 1 + 2 + 1 + 4 - 1), "x:y alone, without context, sixteen at a time"
    assert _TuningData.of(llama, TASK, TuneConfig(), seed=0).batch(1, 7)[0].shape[0] == 1


@pytest.mark.parametrize("method", ["ica", "standard"])
def test_a_finite_set_of_examples(llama, method):
    config = replace(QUICK, method=method, dataset_size=6)
    data = _TuningData.of(llama, FIXED, config, seed=0)
    assert data.dataset is not None
    known = {tuple(row[1:]) for row in data.dataset.tokens.tolist()}
    width = len(next(iter(known)))
    for seed in range(20):
        ids, positions, labels = data.batch(1, seed)
        prompts = torch.cat([ids, labels[:, -1:]], 1)
        assert int(positions[-1]) == ids.shape[1] - 1
        for row in prompts[:, 1:].tolist():
            examples = [tuple(row[start : start + width]) for start in range(0, len(row), width + 1)]
            assert len(examples) == (4 if method == "ica" else 1) and set(examples) <= known
    for ood, prompts in data.probes.items():
        assert prompts.task["config"]["ood"] == ood
        if method == "ica":
            for row in prompts.tokens[:, 1:].tolist():
                assert {tuple(row[start : start + width]) for start in range(0, 3 * (width + 1), width + 1)} <= known
        else:
            assert int(prompts.example.max()) == 0
    assert np.isfinite(run(llama, FIXED, config).table.frame["value"]).any()


def test_probes_measure_what_evaluate_and_score_heads_do(llama):
    tuned: Any = run(llama)
    assert tuned.table.frame["step"].unique().tolist() == [0, 2, 4] == tuned.log["step"].tolist()
    columns, keys = ["value", "low", "high", "n"], ["level", "layer", "head", "metric"]
    for ood in (False, True):
        prompts = replace(TASK, ood=ood).sample(3, llama.tokenizer, PROBE_SEED)
        for step, model in ((0, llama), (4, tuned.model)):
            measured = tuned.table.where(step=step, ood=ood)
            heads: Any = ac.score_heads(model, prompts, list(PROBED)).frame
            probed: Any = measured.where(metric=list(PROBED)).frame
            pd.testing.assert_frame_equal(probed[keys], heads[keys])
            np.testing.assert_allclose(probed["value"], heads["value"], atol=1e-5)
            np.testing.assert_allclose(probed[columns], heads[columns], atol=1e-5, rtol=1e-3)
            evaluated = ac.evaluate(model, prompts)
            for metric, predictor in (("accuracy", "model"), ("log_prob", "model"), ("oracle", "oracle")):
                expected: Any = evaluated.where(
                    predictor=predictor, metric="log_prob" if metric == "log_prob" else "accuracy"
                )
                model_rows: Any = measured.where(metric=metric).frame
                assert (model_rows["level"] == "model").all() and model_rows[["layer", "head"]].isna().all(axis=None)
                np.testing.assert_allclose(model_rows["value"], expected.frame["value"], atol=1e-5)
                # Correcting three prompts for their skew makes hundreds of times as much of rounding.
                np.testing.assert_allclose(model_rows[columns], expected.frame[columns], atol=1e-5, rtol=1e-3)
        first = tuned.table.where(metric="accuracy", kind="first", ood=ood, offset=ALL_OFFSETS).frame["value"]
        assert tuned.log["ood_first" if ood else "first"].tolist() == pytest.approx(first.tolist())
        best = tuned.table.where(metric="align_query", ood=ood).heads().frame.groupby("step")["value"].max()
        assert tuned.log["ood_align_query" if ood else "align_query"].tolist() == pytest.approx(best.tolist())
    assert set(tuned.figures) == {"accuracy", "best heads"}
    drawn = {trace.name for trace in tuned.figures["accuracy"].data}
    assert drawn == {"first", "later", "history ceiling, first", "history ceiling, later"}


def test_a_seed_decides_everything(llama):
    one, same, other = run(llama), run(llama), run(llama, seed=1)
    pd.testing.assert_frame_equal(one.log, same.log)
    assert one.log["loss"].iloc[-1] != other.log["loss"].iloc[-1]
    tokens = TASK.sample(1, llama.tokenizer).tokens
    assert torch.equal(one.model(tokens), same.model(tokens))


def test_a_killed_run_goes_on_to_the_bit(llama, tmp_path, at_each_loss, monkeypatch):
    config, steps = replace(QUICK, steps=6), []
    whole = run(llama, config=config, out=tmp_path / "whole")

    def die(*_):
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()  # one thread, so there is no lock that the child would wait for
    if child == 0:
        try:
            at_each_loss(die)
            run(llama, config=config, out=tmp_path / "killed")
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    at_each_loss(lambda *_: steps.append(1))
    rest = run(llama, config=config, out=tmp_path / "killed")
    assert len(steps) == 4, "it did not go on from the probe at step 2"
    pd.testing.assert_frame_equal(whole.log, rest.log)
    pd.testing.assert_frame_equal(whole.table.frame, rest.table.frame)
    one, other = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    real = identity._version
    changed = {"align_circuits.prompts.prompts": "with other code, none of which is run here"}
    monkeypatch.setattr(identity, "_version", lambda module: changed.get(module) or real(module))
    again = run(llama, config=config, out=tmp_path / "killed")
    assert len(steps) == 4 and again.table.frame.equals(whole.table.frame)
    refused("holds another run", run, llama, config=replace(config, lr=1e-3), out=tmp_path / "killed")


def test_a_finished_run_of_a_fused_model_has_its_adapter(random_hf_model, char_tokenizer, tmp_path):
    gpt2 = ac.load(random_hf_model("gpt2"), tokenizer=char_tokenizer)
    config = replace(QUICK, projections=("q", "k", "v"))
    first, again = (run(gpt2, config=config, out=tmp_path / "run").model for _ in range(2))
    tokens = TASK.sample(1, char_tokenizer).tokens
    assert torch.equal(first(tokens), again(tokens)) and not torch.equal(first(tokens), gpt2(tokens))


def test_training_attends_by_the_fused_kernel_where_it_computes_the_same(random_hf_model, llama):
    assert unwrapped(llama).config._attn_implementation == "sdpa"
    assert unwrapped(ac.load(random_hf_model("gemma2"))).config._attn_implementation == "eager", "it caps its scores"


def test_bf16_and_checkpointing_compute_the_same(llama):
    plain = run(llama, config=replace(QUICK, dropout=0.0))
    saving = run(llama, config=replace(QUICK, dropout=0.0, checkpointing=True))
    np.testing.assert_allclose(saving.log["loss"], plain.log["loss"], rtol=1e-6)
    narrow = run(llama, config=replace(QUICK, dropout=0.0, precision="bf16"))
    np.testing.assert_allclose(narrow.log["loss"][1:], plain.log["loss"][1:], rtol=0.05)
    assert narrow.log["loss"].iloc[-1] != plain.log["loss"].iloc[-1]


def test_a_narrow_model_has_a_wide_adapter(folder):
    tuned = run(ac.load(folder, dtype=torch.bfloat16)).model
    dtypes = {key: value.dtype for key, value in parameters_of(tuned)}
    assert {dtype for key, dtype in dtypes.items() if "lora" in key} == {torch.float32}
    assert {dtype for key, dtype in dtypes.items() if "lora" not in key} == {torch.bfloat16}


def test_four_bit_without_its_package(llama, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"align-circuits\[four-bit\]"):
        run(llama, config=replace(QUICK, four_bit=True))


def test_four_bit_trains_on_nf4_and_evaluates_on_the_weights_as_they_are(
    random_hf_model, char_tokenizer, tmp_path, at_each_loss
):
    bnb = pytest.importorskip("bitsandbytes")
    # Rows that fill whole blocks of 64: on a CPU with AVX-512, bitsandbytes 0.50 dequantises others wrongly.
    llama = ac.load(random_hf_model("llama", hidden_size=64, intermediate_size=128), tokenizer=char_tokenizer)
    seen = []

    def look(model, _):
        seen.append({type(child) for child in model.modules()})
        if len(seen) == 4:
            raise KeyboardInterrupt

    config = replace(QUICK, dropout=0.0, four_bit=True)
    narrow = run(llama, config=config, out=tmp_path / "whole")
    at_each_loss(look)
    with pytest.raises(KeyboardInterrupt):
        run(llama, config=config, out=tmp_path / "stopped")
    assert all(bnb.nn.Linear4bit in types for types in seen)
    rest = run(llama, config=config, out=tmp_path / "stopped")
    pd.testing.assert_frame_equal(rest.log, narrow.log)
    wide = run(llama, config=replace(config, four_bit=False))
    lost, first = (np.array([run.log[name] for run in (narrow, wide)]) for name in ("loss", "first"))
    np.testing.assert_allclose(*lost[:, 1:], rtol=0.1)
    assert (lost[0, 1:] != lost[1, 1:]).all()
    assert first[0, 0] == first[1, 0], "the probe at step 0 read the quantised weights"
    plain, tuned = dict(parameters_of(llama)), dict(parameters_of(narrow.model))
    same = [key for key in tuned if key in plain]
    assert same and all(torch.equal(tuned[key], plain[key]) for key in same)


def test_four_bit_on_a_cpu_that_dequantises_wrongly_is_refused(random_hf_model, char_tokenizer, monkeypatch):
    pytest.importorskip("bitsandbytes")
    llama = ac.load(random_hf_model("llama", hidden_size=64, intermediate_size=128), tokenizer=char_tokenizer)
    monkeypatch.setattr(quantization, "dequantised", lambda module: dequantised(module).roll(1))
    with pytest.raises(ValueError, match=r"dequantises .* wrongly on this CPU: take a GPU, or compute with whole"):
        run(llama, config=replace(QUICK, four_bit=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "standard", "loss_on": "all"}, "leave it out"),
        ({"steps": 0}, "at least 1"),
        ({"batch": 0}, "batch=0"),
        ({"dataset_size": 0}, "dataset_size=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan must be above 0 and finite"),
        ({"clip": float("inf")}, "clip=inf must be finite"),
        ({"projections": ()}, r"projections=\(\): choose from q, k"),
        ({"projections": ("qkv",)}, "no projection 'qkv'"),
        ({"lr": -1.0}, "lr=-1.0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config, message):
    refused(message, TuneConfig, **config)


@pytest.mark.parametrize(("smallest_large_model", "preset"), [(10**9, "small"), (10, "paper")])
def test_settings_that_are_left_out_go_by_the_size_of_the_model(
    llama, monkeypatch, capsys, smallest_large_model, preset
):
    monkeypatch.setattr(tuning, "SMALL", smallest_large_model)
    monkeypatch.setattr(tuning, "PRESETS", {"small": {"steps": 1}, "paper": {"steps": 2}})
    run = tune(llama, TASK)
    assert run.config == TuneConfig(steps={"small": 1, "paper": 2}[preset])
    assert run.table.provenance.settings["preset"] == preset
    assert f'TuneConfig.preset("{preset}"): steps' in capsys.readouterr().out
    assert "preset" not in tune(llama, TASK, run.config, progress=False).table.provenance.settings


def test_presets():
    assert TuneConfig.preset("paper", steps=3) == TuneConfig(steps=3)
    assert TuneConfig.preset("small").loss_on == "all" and TuneConfig.preset("small", lr=1.0).lr == 1.0
    assert TuneConfig.preset("small", method="standard").loss_on == "last"
    refused("no preset 'large': choose 'small' or 'paper'", TuneConfig.preset, "large")


def test_a_probe_is_no_larger_than_an_update_unless_asked_to_be():
    assert {batch: TuneConfig(batch=batch).prompts_per_probe for batch in (None, 4, 16)} == {None: 1, 4: 4, 16: 10}
    assert TuneConfig(method="standard").prompts_per_probe == 10 and TuneConfig(probe_prompts=7).prompts_per_probe == 7


@pytest.mark.parametrize(("name", "known"), [("method", "'ica' or 'standard'"), ("loss_on", "'last' or 'all'")])
def test_an_unknown_choice_is_refused_with_the_known_ones(name, known):
    config = TuneConfig()
    object.__setattr__(config, name, "other")  # past the type check of the import hook, as for users without it
    refused(f"{name}='other': choose {known}", config.__post_init__)


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        (TASK, {"method": "standard"}, "automata='task', or tune with method='ica'"),
        (replace(TASK, n_examples=0), {}, "n_examples is 0"),
        (TASK, {"dataset_size": 8}, "automata='task'"),
        (FIXED, {"dataset_size": 3}, "a finite dataset of 3 examples, but 4"),
        (FIXED, {"method": "standard", "dataset_size": 8, "batch": 16}, "a finite dataset of 8 examples, but 16"),
        (TASK, {"layers": 3}, "layers 0 to 2"),
        (TASK, {"r": 10**12}, r"r=1,000,000,000,000: the matrices to adapt have at most \d+ rows or columns"),
        (TASK, {"batch": 10**9}, "tokens, some .* GB: give fewer"),
        (TASK, {"probe_prompts": 10**9}, "tokens, some .* GB: give fewer"),
        (replace(TASK, n_examples=30), {}, "context is 64"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_written(llama, tmp_path, task, config, message):
    refused(message, run, llama, task, replace(QUICK, **config), out=tmp_path / "run")
    assert not (tmp_path / "run" / "training").exists()


def test_models_that_cannot_be_tuned(llama, random_hf_model, char_tokenizer, tmp_path):
    refused("no TransformerBridge", run, ac.planted_circuit(TASK))
    gpt2 = ac.load(random_hf_model("gpt2"), tokenizer=char_tokenizer)
    with pytest.raises(ValueError, match=r"q, k, v by one matrix \(transformer.h.0.attn.c_attn\): give all of them"):
        run(gpt2, config=replace(QUICK, projections=("q",)))
    with pytest.raises(ValueError, match=r"no matrix 'gate' to adapt .*: give projections among q, k, v, o, up, down"):
        run(gpt2, config=replace(QUICK, projections=("gate",)))
    with pytest.raises(ValueError, match="four_bit: a GPT2LMHeadModel has no linear layers"):
        run(gpt2, config=replace(QUICK, projections=("q", "k", "v"), four_bit=True))
    refused("no tokenizer", run, ac.load(random_hf_model("llama")))
    for tuned, message in (
        (llama, "has an adapter already"),
        (gpt2, "tuned in this process.* load the folder `adapter`"),
    ):
        refused(message, run, run(tuned, config=replace(QUICK, projections=("q", "k", "v"))).model)
    hook = ("blocks.0.hook_resid_post", lambda value, **_: value)
    with llama.hooks(fwd_hooks=[hook]), pytest.raises(ValueError, match="hooks are attached"):
        run(llama)
    layer = bridges.component(llama.blocks[0])
    layer.forward = partial(lambda forward, *given, **options: forward(*given, **options), layer.forward)
    refused("a forward pass of your own on a LlamaDecoderLayer", run, llama)
    del layer.forward
    (tmp_path / "file").write_text("")
    refused("cannot write results", run, llama, out=tmp_path / "file")


def own_prompts(tokenizer, lengths: tuple[int, ...], groups: list[int] | None = None) -> ac.Prompts:
    """Random letters with answers of one or two letters, of different lengths, and a relation."""
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(list("abcdefgh"), length)) for length in lengths]
    answers = ["".join(generator.choice(list("ABCD"), 1 + row % 2)) for row in range(len(texts))]
    prompts = ac.Prompts.from_texts(texts, tokenizer, answer=answers, positions={"start": 1}, groups=groups)
    return prompts.with_relations(own=Relation.from_positions("END", "start", prompts=prompts))


PADDED, EVEN = (3, 5, 4, 6, 3, 5, 4, 6, 5, 5), (5,) * 10


@pytest.mark.parametrize("lengths", [PADDED, EVEN])
def test_the_loss_of_own_prompts_equals_a_loop(llama, folder, char_tokenizer, lengths):
    """Beside plain transformers, one prompt at a time without padding."""
    plain: Any = type(llama.original_model).from_pretrained(folder).eval()
    data = _TuningData.of(llama, OwnPrompts(own_prompts(char_tokenizer, lengths)), replace(QUICK, batch=5), seed=3)
    batch = data.batch(1, 7)
    prompts, expected = data.task.sample(5, None, 7), []
    for row in range(5):
        tokens = prompts.tokens[row][prompts.mask[row]]
        start = int(prompts.mask[row].int().argmax())
        with torch.no_grad():
            log_prob = plain(tokens[None]).logits[0].log_softmax(-1)
        rows: Any = prompts.targets[prompts.targets["prompt"] == row]
        expected += [-float(log_prob[target.query_pos - start, target.token]) for target in rows.itertuples()]
    assert len(batch) == (3 if bool(prompts.mask.all()) else 4)
    loss = sys.modules["align_circuits.training.tuning"]._loss(plain, batch)
    assert loss.item() == pytest.approx(np.mean(expected), abs=1e-5)
    loss.backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in plain.parameters() if weight.grad is not None)


def test_held_out_prompts_are_never_learned_from(llama, char_tokenizer, at_each_loss):
    prompts, learned = own_prompts(char_tokenizer, PADDED, groups=[row // 2 for row in range(10)]), []
    at_each_loss(lambda _, batch: learned.extend(map(tuple, batch[0][:, :6].tolist())))
    config = replace(QUICK, steps=30, probe_every=15, probe_prompts=None)
    tuned: Any = run(llama, prompts, config)
    split, held_out = OwnPrompts(prompts).split(0)
    known, unknown = ({tuple(row[:6]) for row in part.prompts.tokens.tolist()} for part in (split, held_out))
    assert set(learned) == known and not known & unknown
    table = tuned.table.frame
    assert set(table["step"]) == {0, 15, 30} and not table["ood"].any()
    measured = tuned.table.where(metric="log_prob", kind="all", offset=ALL_OFFSETS, step=30).frame
    expected = ac.evaluate(tuned.model, held_out.prompts).where(metric="log_prob", kind="all", offset=ALL_OFFSETS).frame
    np.testing.assert_allclose(measured["value"], expected["value"], atol=1e-5)
    scores = ac.score_heads(tuned.model, held_out.prompts, ["own"])
    probed = tuned.table.where(metric="own", step=30, level="head").frame["value"]
    np.testing.assert_allclose(probed, scores.heads().frame["value"], atol=1e-5)
    assert {"accuracy", "best heads"} == set(tuned.figures) and len(held_out.prompts) == 2
    few = _TuningData.of(llama, OwnPrompts(prompts), replace(QUICK, probe_prompts=1), seed=0)
    refused("the seed is -1: give an integer from 0", run, llama, prompts, QUICK, seed=-1)
    assert len(few.probes[False]) == 1


@pytest.mark.slow
def test_a_run_on_own_prompts_goes_on_only_with_them(llama, char_tokenizer, tmp_path, at_each_loss, monkeypatch):
    prompts, steps = own_prompts(char_tokenizer, PADDED), []
    whole = run(llama, prompts, out=tmp_path / "whole")

    def stop(*_):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt

    at_each_loss(stop)
    with pytest.raises(KeyboardInterrupt):
        run(llama, prompts, out=tmp_path / "stopped")
    rest = run(llama, prompts, out=tmp_path / "stopped")
    assert len(steps) == 4 + 2, "it did not go on from the probe at step 2"
    pd.testing.assert_frame_equal(whole.log, rest.log)
    pd.testing.assert_frame_equal(whole.table.frame, rest.table.frame)
    learned, held_out = OwnPrompts(prompts).split(0)
    row = prompts.text.index(learned.prompts.text[0])
    inputs = prompts.inputs.clone()
    inputs[row, -4] += 1
    other = replace(prompts, inputs=inputs)
    assert OwnPrompts(other).split(0)[1].prompts.digest == held_out.prompts.digest, "only what is learned differs"
    for changed, roles in ((other, None), (prompts, ["previous"])):
        refused("holds another run", run, llama, changed, roles=roles, out=tmp_path / "stopped")
    monkeypatch.setattr("align_circuits.jobs.code_versions.versions", lambda: {"torch": "another"})
    refused(r"another run \(code .* a library, has changed\)", run, llama, prompts, out=tmp_path / "stopped")


def test_a_run_goes_on_only_with_all_that_its_prompts_are_drawn_from(llama, folder, char_tokenizer, tmp_path):
    """A tokenizer with other ids; a pool of texts that differs where neither a probe nor the first batch shows it."""

    class Pool(ac.Task):
        def __init__(self, answers: str):
            self.answers = answers

        def sample(self, n: int, tokenizer: Any = None, seed: int = 0) -> ac.Prompts:
            answers = [self.answers[(seed + index) % 7 == 3] for index in range(n)]
            return ac.Prompts.from_texts(["ab:", "cd:", "ef:"][:n], tokenizer, answer=answers)

    shown = Pool("ab").sample(2, char_tokenizer), Pool("ab").sample(3, char_tokenizer, PROBE_SEED)
    hidden = Pool("ac").sample(2, char_tokenizer), Pool("ac").sample(3, char_tokenizer, PROBE_SEED)
    assert [prompts.digest for prompts in shown] == [prompts.digest for prompts in hidden]
    vocabulary = json.loads(char_tokenizer.backend_tokenizer.to_str())
    ids = vocabulary["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(vocabulary)), bos_token=char_tokenizer.bos_token
    )
    run(llama, out=tmp_path / "task")
    run(llama, Pool("ab"), out=tmp_path / "pool")
    for model, task, place in ((ac.load(folder, tokenizer=other), TASK, "task"), (llama, Pool("ac"), "pool")):
        refused("holds another run", run, model, task, out=tmp_path / place)
    untold: Any = Pool("ab")
    untold.lines = (line for line in ())
    run(llama, untold, out=tmp_path / "untold")
    refused("checkpoints in .* since builtins.generator cannot", run, llama, untold, out=tmp_path / "untold")
    (tmp_path / "task/probes/step-000000.safetensors").write_bytes(b"")
    refused("step-000000.safetensors' is broken or missing .* remove it", run, llama, out=tmp_path / "task")


def test_any_task_is_tuned_beside_own_prompts(llama, char_tokenizer):
    task = ac.RepeatedTokensTask(length=5)
    tuned: Any = run(llama, task)
    assert {"induction", "previous", "duplicate", "accuracy"} <= set(tuned.table.frame["metric"])
    probed = task.sample(3, char_tokenizer, PROBE_SEED)
    value = tuned.table.where(metric="induction", step=0, level="head").frame["value"]
    np.testing.assert_allclose(value, ac.score_heads(llama, probed, ["induction"]).heads().frame["value"], atol=1e-5)
    none: Any = run(llama, own_prompts(char_tokenizer, EVEN), roles=[])
    assert len(none.figures) == 2, "without roles the attention to the first token is drawn"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "standard"}, "method='standard', dataset_size=None: both choices are for Seq2SeqTask"),
        ({"dataset_size": 8}, "both choices are for Seq2SeqTask"),
        ({"batch": 9}, r"batch=9: there are 8 prompts to learn from; give more, or a smaller batch, such as batch=8"),
    ],
)
def test_own_prompts_that_cannot_be_tuned_on(llama, char_tokenizer, tmp_path, changes, message):
    refused(message, run, llama, own_prompts(char_tokenizer, EVEN), replace(QUICK, **changes), out=tmp_path / "run")
    assert not (tmp_path / "run" / "training").exists()


def test_what_teaches_nothing_or_two_tokens_at_once_is_refused(llama, char_tokenizer, tmp_path):
    prompts = own_prompts(char_tokenizer, EVEN)
    some = prompts.select_targets([True] * (len(prompts.targets) - 2) + [False] * 2)
    refused("1 of 10 prompts have no target, .* the first is prompt 9: leave", run, llama, some, out=tmp_path / "run")
    twice = replace(prompts, targets=pd.concat([prompts.targets, prompts.targets[2:3].assign(token=9)]))
    refused("prompt 1 has several targets at position 6, where one", run, llama, twice, out=tmp_path / "run")
    assert not (tmp_path / "run" / "training").exists()


def test_a_head_whose_score_few_prompts_define_has_none(monkeypatch):
    """Else a head that attends to a candidate in one prompt of many would be the best by this one."""
    heads = pd.DataFrame({"metric": ["lookup", "lookup", "rare"], "level": "head", "layer": 0, "head": [0, 1, 0]})
    value = np.array([[0.2, 0.3, 0.1, 0.2], [1.0, 0, 0, 0], [0.4, 0, 0, 0]])
    weight = np.array([[1.0, 1, 0, 1], [1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    scores, ones = SimpleNamespace(measured=lambda: (heads, value, weight)), np.ones((1, 4))
    both: Any = SimpleNamespace(scores=scores, values=None, targets=SimpleNamespace(names=()))
    of_model = pd.DataFrame({"metric": ["accuracy"], "kind": "first", "predictor": "model"})
    monkeypatch.setattr(probe, "summarize_targets", lambda *_: (of_model, ones, ones))
    keys, numbers = probe._measured(ac.Prompts, both)  # pyright: ignore[reportArgumentType]
    assert (numbers["weight"] > 0).sum(1).tolist() == [3, 0, 1, 4]
    summary = probe._summary(keys.assign(ood=False), numbers["value"], numbers["weight"], ["lookup", "rare"])
    assert summary == {"first": 1.0, "lookup": pytest.approx(0.7 / 3), "rare": 0.4}
    assert np.isnan(probe._summary(keys.assign(ood=False), numbers["value"], np.zeros((4, 4)), ["lookup"])["lookup"])


def test_figures_without_the_values_of_a_head(llama, char_tokenizer):
    tuned: Any = run(llama, own_prompts(char_tokenizer, EVEN), roles=["own"])
    none = tuned.table.frame["level"] == "head"
    unmeasured = replace(
        tuned,
        table=replace(
            tuned.table,
            frame=tuned.table.frame.assign(
                value=tuned.table.frame["value"].where(~none | (tuned.table.frame["head"] == 1))
            ),
        ),
    )
    assert len(unmeasured.figures) == 2
    nothing = replace(
        tuned, table=replace(tuned.table, frame=tuned.table.frame.assign(value=tuned.table.frame["value"].where(~none)))
    )
    assert [*nothing.figures] == ["accuracy"]


def test_a_run_shows_itself(llama, tmp_path):
    tuned = run(llama, out=tmp_path / "<run>")
    last = tuned.log["loss"].dropna().iloc[-1]
    probes = len(tuned.log)
    assert repr(tuned) == f"TuneRun(ica, 4 steps, loss {last:.3g}, {probes} probes, folder='{tmp_path / '<run>'}')"
    page = tuned._repr_html_()
    assert "<table" in page and "&lt;run&gt;" in page and "<run>" not in page and f"{last:.3g}" in page


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_last_mlp_skips_what_no_loss_reads(name, checkpointing, random_hf_model, char_tokenizer):
    """Loss and gradients are those of the whole layer."""
    model = ac.load(random_hf_model(name), tokenizer=char_tokenizer)
    batch, module = _TuningData.of(model, TASK, QUICK, seed=0).batch(1, 7), sys.modules[tune.__module__]
    found = []
    for skipping in (False, True):
        plain, seen = unwrapped(model).train(), []
        for weight in plain.parameters():
            weight.requires_grad_()
        if skipping:
            assert architectures.skip_unread(plain)
        if checkpointing:
            recompute(plain)
        hook = plain.model.layers[-1].mlp.register_forward_hook(lambda _m, given, _o, seen=seen: seen.append(given[0]))
        loss = module._loss(plain, batch, skips=skipping)
        hook.remove()
        loss.backward()
        assert seen[0].shape[1] == (len(batch[1]) if skipping else batch[0].shape[1])
        found.append([loss.detach(), *(weight.grad for weight in plain.parameters())])
        assert torch.equal(plain(batch[0]).logits, unwrapped(model)(batch[0]).logits), "read is not always given"
    for whole, fewer in zip(*found, strict=True):
        torch.testing.assert_close(fewer, whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("dropout", "reads"), [(0.0, 4), (0.5, 17)])
def test_dropout_in_mlps_is_drawn_for_all_positions(llama, at_each_loss, dropout, reads):
    seen = set()

    def look(model, _):
        model.model.layers[-1].mlp.register_forward_hook(lambda _m, given, _o: seen.add(given[0].shape[1]))

    at_each_loss(look)
    run(llama, config=replace(QUICK, projections=("q", "up"), dropout=dropout))
    assert len(seen) == 1 and (seen == {reads}) == (dropout == 0), seen


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_adapters_train_as_peft_does(name, checkpointing, random_hf_model, char_tokenizer):
    """Qwen2 has biases; a few tokens are left to PEFT, for which a sum of weights would cost more."""
    model = ac.load(random_hf_model(name), tokenizer=char_tokenizer)
    batch, module = (
        _TuningData.of(model, TASK, replace(QUICK, batch=8), seed=0).batch(1, 7),
        sys.modules[tune.__module__],
    )
    found, outputs = [], []
    for fused in (False, True):
        plain = unwrapped(model)
        matrices = bridges.matrices_of(model)
        with_adapter(
            plain, matrices, names=("q", "k", "v", "o", "up"), layers=None, r=3, alpha=5.0, dropout=0.0, seed=0
        )
        generator = torch.Generator().manual_seed(1)
        for parameter_name, weight in plain.named_parameters():
            if "lora_B" in parameter_name:
                weight.data.normal_(0, 0.1, generator=generator)
        weights = {key: weight.clone() for key, weight in plain.named_parameters()}
        if fused:
            lora_merging.fuse_adapters(plain)
        if checkpointing:
            recompute(plain)
        inner, seen = plain.model.layers[0].self_attn.q_proj.lora_A["default"], []
        hook = inner.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        loss = module._loss(plain.train(), batch)
        assert bool(seen) != fused
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in plain.parameters() if weight.requires_grad)])
        outputs.append(plain(batch[0][:1, :2]).logits.detach())
        assert seen, "two tokens went through the sum of weights"
        hook.remove()
        assert all(torch.equal(weight, weights[key]) for key, weight in plain.named_parameters())
        assert all(weight.grad is None for weight in plain.parameters() if not weight.requires_grad)
    for apart, together in zip(*found, strict=True):
        torch.testing.assert_close(together, apart, atol=1e-6, rtol=1e-4)
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "settings", [{"dropout": 0.1}, {"precision": "bf16"}, {"dropout": 0.0}], ids=["dropout", "bf16", "neither"]
)
def test_adapters_are_fused_where_nothing_else_is_computed(llama, monkeypatch, settings):
    fused = []
    real = lora_merging._AdaptedLinear.apply
    monkeypatch.setattr(lora_merging._AdaptedLinear, "apply", lambda *given: (fused.append(1), real(*given))[1])
    run(llama, config=replace(QUICK, batch=8, **settings))
    assert bool(fused) == (settings == {"dropout": 0.0})


def test_narrow_weights_are_not_fused(folder, monkeypatch):
    monkeypatch.setattr(lora_merging._AdaptedLinear, "apply", None)
    run(ac.load(folder, dtype=torch.bfloat16), config=replace(QUICK, batch=8, dropout=0.0))


def test_adapters_by_prompt_go_by_peft(random_hf_model: Any):
    """A mixed batch names an adapter for each prompt, which fused adapters leave to PEFT."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        model = get_peft_model(random_hf_model("llama"), config)
    tokens, names = torch.arange(48).view(2, 24), ["default", "__base__"]
    model.eval()
    with torch.no_grad():
        expected = model(tokens, adapter_names=names).logits
        lora_merging.fuse_adapters(model)
        torch.testing.assert_close(model(tokens, adapter_names=names).logits, expected)
