"""Adapters are merged while a model is measured: the same logits, and all is as it was afterwards."""

import copy
from typing import Any

import pytest
import torch
from found import TASK, changed, found
from peft import AdaLoraConfig, IA3Config, LoraConfig, VeraConfig, get_peft_model
from peft.tuners.lora import Linear
from refusals import refused

import align_circuits as ac
from align_circuits.hooks.compat import bridges, lora_merging
from align_circuits.hooks.left_as_found import modules_in
from align_circuits.models.parameters import model_provenance, parameters_of
from align_circuits.run import edited_runs

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # inside peft 0.21
TOKENS = torch.tensor([[2, 40, 14, 51, 40, 14], [2, 9, 33, 60, 5, 61]])


@pytest.fixture
def adapted(random_hf_model, char_tokenizer):
    """A bridge over a model with an adapter that matters, and the plain model whose weights it shares."""

    def make(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
        plain = random_hf_model("llama").to(dtype)
        shared = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            targets = ["q_proj", "v_proj", "down_proj"]
            config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **settings)
            peft_model = get_peft_model(shared, config, autocast_adapter_dtype=False)
            for name, value in peft_model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(value, std=0.5)
        return ac.load(peft_model.eval(), tokenizer=char_tokenizer), plain.eval()

    return make


def layers_of(model: Any) -> list[Any]:
    return [module for module in bridges.modules_of(bridges.wrapped(model)) if isinstance(module, Linear)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_logits_are_the_same_and_weights_come_back_untouched(dtype, tolerance, adapted):
    model, plain = adapted(dtype)
    weights = {name: (id(weight), weight.clone()) for name, weight in bridges.wrapped(model).named_parameters()}
    with torch.no_grad():
        apart, base = model(TOKENS), plain(TOKENS).logits
        with lora_merging.merged_adapters(modules_in(model)):
            assert layers_of(model) and all(layer.merged for layer in layers_of(model))
            torch.testing.assert_close(model(TOKENS), apart, atol=tolerance, rtol=0)
            torch.testing.assert_close(plain(TOKENS).logits, base, atol=0, rtol=0)  # which shares the weights
        assert (apart - base).abs().max() > 0.1, "the adapter matters"
        assert not any(layer.merged for layer in layers_of(model))
        torch.testing.assert_close(model(TOKENS), apart, atol=0, rtol=0)
    for name, weight in bridges.wrapped(model).named_parameters():
        assert weights[name][0] == id(weight)
        torch.testing.assert_close(weights[name][1], weight, atol=0, rtol=0)


def test_what_a_sum_would_change_stays_apart(adapted):
    narrow, _ = adapted(torch.bfloat16)
    dora, _ = adapted(use_dora=True)
    off, _ = adapted()
    hooked, _ = adapted()
    for layer in layers_of(off):
        layer.enable_adapters(False)
    layers_of(hooked)[0].register_forward_hook(lambda *_: None)
    layers_of(hooked)[1].lora_A["default"].register_forward_hook(lambda *given: 0 * given[-1])
    for model, merged in ((narrow, 0), (dora, 0), (off, 0), (hooked, len(layers_of(hooked)) - 2)):
        with torch.no_grad():
            before = model(TOKENS)
            with lora_merging.merged_adapters(modules_in(model)):
                assert sum(layer.merged for layer in layers_of(model)) == merged
                torch.testing.assert_close(model(TOKENS), before, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[9, 40]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        VeraConfig(r=2, target_modules=["o_proj"]),
        AdaLoraConfig(target_modules=["q_proj"], total_step=9),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_adapters_stay_apart(config, random_hf_model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped = get_peft_model(random_hf_model("llama"), config).eval()
        for _, weight in parameters_of(wrapped):
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.5)
    model, prompts = ac.load(wrapped), ac.Prompts.from_tokens(TOKENS.tolist())
    effects = {
        engine: ac.ablate_heads(model, prompts, "zero", options=ac.RunOptions(engine=engine)).frame["value"].to_numpy()
        for engine in ("fast", "reference")
    }
    assert abs(effects["fast"]).max() > 1e-3
    assert effects["fast"] == pytest.approx(effects["reference"], abs=1e-5)
    refused("carries an adapter, which the weights of heads do not show", ac.direct_logit_attribution, model, prompts)


def test_provenance_is_that_of_the_weights_as_they_are(adapted, monkeypatch):
    model, _ = adapted()
    before, state, seen = model_provenance(model), found(model), []
    decoder_of = edited_runs.decoder_of

    def watched(bridge: Any) -> Any:
        seen.append(all(layer.merged for layer in layers_of(model)))
        return decoder_of(bridge)

    monkeypatch.setattr(edited_runs, "decoder_of", watched)
    result = ac.localize(model, TASK, 8, n_controls=1)
    assert seen and all(seen), "merged while sweeps run"
    assert result.table.provenance.model == before == result.evidence.ablation_effects.provenance.model
    assert not changed(state, found(model))


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupt_amid_the_merging_leaves_nothing(after, adapted, monkeypatch):
    model, _ = adapted()
    pair = ac.Pair(*TASK.pairs(TASK.sample(2, model.tokenizer, seed=0), 0))
    state, weights = found(model), list(bridges.wrapped(model).parameters())
    calls, merge = [0], Linear.merge

    def interrupted(self: Any, *arguments: Any, **settings: Any) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        merge(self, *arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(Linear, "merge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ac.patch_heads(model, pair)
    assert not changed(state, found(model))
    assert all(one is other for one, other in zip(weights, bridges.wrapped(model).parameters(), strict=True))
    assert not any(layer.merged for layer in layers_of(model))
