"""Every architecture by every verb: equal to plain Hugging Face, or refused with a reason."""

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain import FUSED, Plain, first
from table import pages
from verbs import LOG_PROB, REFUSED, REFUSED_AT_LOAD, TEXTS, VERBS, Case, evaluated, of_heads
from zoo import ARCHITECTURES, tiny

import align_circuits as ac

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unchecked_shapes"),
    pytest.mark.filterwarnings("ignore"),  # TransformerLens's, of hook points that are off or only show
]

ENGINES = ("auto", "reference")

FAST = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt-neox")
"""One of each architecture that has two engines."""

LOADED = [name for name in ARCHITECTURES if name not in REFUSED_AT_LOAD]

NO_FLOAT64 = ("olmoe", "mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "xglm")
"""What transformers itself does not run in float64."""


@pytest.fixture(scope="module", params=LOADED)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(name) -> Plain:
    return Plain(tiny(name))


@pytest.fixture(scope="module")
def model(name) -> Any:
    return ac.load(tiny(name))


@pytest.mark.parametrize("verb", VERBS)
@torch.no_grad()
def test_a_verb_is_equal_to_hugging_face_or_refused(model, plain, name, verb):
    for engine in ENGINES if name in FAST else ENGINES[:1]:
        case = Case(plain, model, ac.RunOptions(engine=engine))
        if reason := REFUSED.get(verb, {}).get(name):
            with pytest.raises(ValueError, match=re.escape(reason)):
                VERBS[verb](case)
            continue
        found, right = (np.asarray(each, dtype=float) for each in VERBS[verb](case))
        assert found.shape == right.shape
        size = abs(right).max()
        assert size > 1e-4, "something happens"
        np.testing.assert_allclose(found, right, atol=2e-5 + 1e-4 * size, rtol=0)


def test_padded_prompts_are_read_in_float64(name):
    hf = tiny(name, torch.float64)
    if name in NO_FLOAT64:
        with pytest.raises(ValueError, match="Hugging Face cannot run this"):
            ac.load(hf)
        return
    case = Case(Plain(hf), ac.load(hf), ac.RunOptions())
    with torch.no_grad():
        assert evaluated(case) == pytest.approx(float(case.log_prob()), abs=1e-5)


def hooks_of(model: Any) -> dict[str, torch.Tensor]:
    """What every hook point shows that fires, with those on that TransformerLens leaves off."""
    for switch in ("set_use_split_qkv_input", "set_use_hook_mlp_in", "set_use_attn_result"):
        try:
            getattr(model, switch)(True)
        except (NotImplementedError, ValueError):
            continue  # TransformerLens does not have it for this architecture
    seen: dict[str, torch.Tensor] = {}

    def keep(activation: Any, hook: Any) -> None:
        if isinstance(activation, torch.Tensor):
            seen[hook.name] = activation.detach().clone()

    with torch.no_grad():
        model.run_with_hooks(torch.tensor(TEXTS[:1]), fwd_hooks=[(lambda _: True, keep)])
    return seen


def fails(*_: Any, **__: Any) -> None:
    raise KeyError("in the middle of a verb")


def test_hooks_show_after_all_verbs_what_they_show_on_a_fresh_bridge(model, plain, name):
    for verb in ("score_heads", "patch_sites"):  # and all that ran on this model before
        VERBS[verb](Case(plain, model, ac.RunOptions()))
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", fails)]), pytest.raises(KeyError, match="in the middle"):
        log_prob(model)
    expected, found = hooks_of(ac.load(tiny(name))), hooks_of(model)
    assert expected.keys() == found.keys()
    assert [point for point in expected if not torch.equal(expected[point], found[point])] == []


def log_prob(model: Any, engine: Any = "auto") -> float:
    return evaluated(Case(None, model, ac.RunOptions(engine=engine)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("changed", LOADED)
def test_weights_that_change_after_loading_count(changed):
    model = ac.load(tiny(changed))
    before = log_prob(model)
    generator = torch.Generator().manual_seed(1)
    wrapped = model.original_model
    with torch.no_grad():
        for parameter in parameters_that_run(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        rows = [
            wrapped(torch.tensor([text])).logits[0].log_softmax(-1)[range(len(text) - 1), text[1:]] for text in TEXTS
        ]
    right = float(torch.cat(rows).mean())
    assert abs(right - before) > 1e-4
    for engine in ENGINES if changed in FAST else ENGINES[:1]:
        assert log_prob(model, engine) == pytest.approx(right, abs=1e-4)


def parameters_that_run(model: Any) -> Iterator[torch.nn.Parameter]:
    """The parameters that get a gradient when the wrapped model is trained."""
    model.original_model.zero_grad()
    with torch.enable_grad():
        model.original_model(torch.tensor(TEXTS[:1])).logits.square().sum().backward()
    unique = {id(each): each for each in model.original_model.parameters() if each.grad is not None}
    yield from unique.values()
    model.original_model.zero_grad()


@pytest.mark.parametrize("how", ["written to", "replaced", "one number", "one number of .data", "bias"])
@pytest.mark.parametrize(
    "fused", ["gpt2", "gpt-bigcode", "phi3", "gpt-neox", "falcon-sequential", "bloom", "mpt", "glm"]
)
@torch.no_grad()
def test_a_fused_projection_that_changes_alone_counts_or_is_refused(fused, how):
    """Queries, keys and values, of GLM both inputs of a gated MLP."""
    plain, model = Plain(tiny(fused)), ac.load(tiny(fused))
    before = log_prob(model)
    layers: Any
    if fused == "glm":
        owners: Any = plain.layers[0].mlp, model.blocks[0].mlp.original_component
        layers = [owner.gate_up_proj for owner in owners]
    else:
        layers = [first(plain.attention[0], FUSED), model.blocks[0].attn.qkv.original_component]
    if how == "bias" and layers[0].bias is None:
        pytest.skip("has no bias")
    for layer in layers:
        if how == "written to":
            layer.weight.mul_(1.5)
        elif how == "replaced":
            layer.weight = torch.nn.Parameter(layer.weight * 1.5)
        elif how == "one number":
            layer.weight[3, 1] += 20
        elif how == "one number of .data":
            layer.weight.data[3, 1] += 20
        else:
            layer.bias += torch.linspace(-1, 1, len(layer.bias))
    right = float(Case(plain, model, ac.RunOptions()).log_prob())
    assert abs(right - before) > 1e-4
    if fused in ("gpt2", "gpt-bigcode", "phi3", "glm") and how != "replaced":  # whose parts are views of it
        assert log_prob(model) == pytest.approx(right, abs=1e-4)
    else:
        with pytest.raises(ValueError, match="the fused projection of layer 0 has changed"):
            log_prob(model)


@pytest.mark.parametrize("norming", ["olmo2", "olmo3", "olmoe"])
@torch.no_grad()
def test_what_a_norm_over_all_heads_leaves_apart_is_equal(norming):
    """Values are not normed; a change of one head's keys or queries would rescale the others, by any verb."""
    case = Case(Plain(tiny(norming)), ac.load(tiny(norming)), ac.RunOptions())
    found = of_heads(ac.patch_heads(case.model, case.pair, sites=["v"]), **LOG_PROB)
    shared = case.plain.n_heads // case.plain.n_keys
    right = case.patched([("v", layer, head // shared) for layer, head in case.plain.heads])
    np.testing.assert_allclose(found, right, atol=1e-4)
    sites: Any = (("q", "queries"), ("k", "keys"))
    for site, what in sites:
        heads = case.plain.heads[:shared]
        for refused in (
            lambda site=site: ac.patch_heads(case.model, case.pair, sites=[site]),
            lambda site=site, heads=heads: evaluated(case, ac.Steer(heads, site=site, vector=torch.ones(8))),
        ):
            with pytest.raises(ValueError, match=f"norms the {what} of all heads of layer 0 together"):
                refused()


@pytest.mark.parametrize("refused", REFUSED_AT_LOAD)
def test_what_cannot_be_read_is_refused_at_the_door(refused):
    with pytest.raises(ValueError, match=re.escape(REFUSED_AT_LOAD[refused])):
        ac.load(tiny(refused))


@pytest.mark.parametrize("page", pages())
def test_pages_say_what_the_suite_finds(page):
    assert page.read_text(encoding="utf-8") == pages()[page], "run python tests/architectures/table.py --write"


def test_effects_of_a_long_rope_are_estimated_on_whole_prompts():
    """Keys of the first tokens alone would be turned by the factors of short prompts."""
    model = ac.load(tiny("llama-long-rope"))
    tokens = torch.randint(5, 60, (3, 24), generator=torch.Generator().manual_seed(1))
    prompts = ac.Prompts.from_tokens(tokens.tolist()).select_targets(lambda targets: targets["target_pos"] >= 21)
    corrupted = prompts.inputs.clone()
    corrupted[:, 8] = 3
    pair = ac.Pair(prompts, replace(prompts, inputs=corrupted, relations={}), metric="logit")
    for site in ("z", "v"):
        estimates = [
            ac.patch_heads(model, pair, sites=[site], screen=0.01, options=ac.RunOptions(engine=engine)).frame["value"]
            for engine in ("auto", "reference")
        ]
        np.testing.assert_allclose(estimates[0], estimates[1], atol=1e-4)


def test_direct_effects_of_an_adapter_of_the_output_matrix_are_those_of_merged_weights():
    for name, target in (("gpt-neox", "dense"), ("llama", "o_proj")):
        with torch.random.fork_rng(devices=[]):
            adapted = get_peft_model(tiny(name), LoraConfig(r=2, target_modules=[target]))
        for weight_name, weight in adapted.named_parameters():
            if "lora_" in weight_name:
                torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(1))
        prompts = ac.Prompts.from_tokens([[1, 5, 6, 7, 8, 9]])
        merged = ac.load(copy.deepcopy(adapted).merge_and_unload())
        right = ac.direct_logit_attribution(merged, prompts).frame["value"]
        found = ac.direct_logit_attribution(ac.load(adapted.base_model.model), prompts).frame["value"]
        np.testing.assert_allclose(found, right, atol=1e-4, err_msg=name)
