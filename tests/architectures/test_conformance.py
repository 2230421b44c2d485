"""Every architecture by the verbs: equal to plain Hugging Face, or refused with a reason."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from zoo import ARCHITECTURES, tiny

import align_circuits as ac
from align_circuits.run.forward_pass import capture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unchecked_shapes"),
    pytest.mark.filterwarnings("ignore"),  # TransformerLens's, of hook points that are off or only show
]

TEXTS = [[1, *range(5, 24)], [1, 9, 8, 7, 6, 5, 9, 8, 7]]
"""Two prompts of different lengths: longer and shorter than windows and the range of short rotary factors."""

ENGINES = ("auto", "reference")

REFUSED_AT_LOAD = {
    "falcon-40b": "TransformerLens cannot wrap this FalconForCausalLM",
    "falcon-alibi": "TransformerLens computes other logits of this FalconForCausalLM",
    "bert": "is no decoder: its logits depend on tokens to come",
    "mamba": "layer 0 of this MambaForCausalLM has no attention pattern",
}
"""What is refused, by a part of the message."""

NO_EDGES = {
    **dict.fromkeys(("gemma2", "gemma3", "olmo2", "olmo3", "glm4", "exaone4"), "norms what its attention or its MLP"),
    "olmoe": "norms the queries of all its heads together",
}
"""Where edges along the residual stream are not defined, by a part of the reason."""

NO_PATTERN = ("gptj", "gpt-neo", "opt", "xglm")
"""What leaves attention to Hugging Face: a change of `hook_pattern` would be dropped."""

NO_FLOAT64 = ("olmoe", "mixtral", "qwen3-moe", "gpt-oss", "xglm")
"""What transformers itself does not run in float64."""

QUERIES_TOGETHER = ("olmo2", "olmo3", "olmoe")
"""What norms the queries of all heads as one vector."""


def log_prob(model: Any, **options: Any) -> float:
    """What `evaluate` says of the mean log-probability on both prompts."""
    table = ac.evaluate(model, ac.Prompts.from_tokens(TEXTS), **options)
    return float(table.where(metric="log_prob", kind="all", offset=None).frame["value"].iloc[0])


def by_hand(model: Any) -> float:
    """The same by Hugging Face, each prompt alone."""
    with torch.no_grad():
        rows = [
            model(torch.tensor([text])).logits[0].double().log_softmax(-1)[range(len(text) - 1), text[1:]]
            for text in TEXTS
        ]
    return float(torch.cat(rows).mean())


def without_head(model: Any, layer: int, head: int) -> Any:
    """A copy in which what a head writes is 0, by the weights of the output projection."""
    changed = deepcopy(model)
    named = [module for name, module in changed.named_modules() if name.endswith(ATTENTION)]
    attention = [module for module in named if any(hasattr(module, name) for name in OUT)][layer]
    out = next(getattr(attention, name) for name in OUT if hasattr(attention, name))
    width = out.weight.shape[0 if type(out).__name__ == "Conv1D" else 1] // 4
    columns = slice(head * width, (head + 1) * width)
    with torch.no_grad():
        if type(out).__name__ == "Conv1D":
            out.weight[columns] = 0
        else:
            out.weight[:, columns] = 0
    return changed


ATTENTION = ("self_attn", ".attn.attention", ".attn", "self_attention", ".attention")
OUT = ("o_proj", "out_proj", "dense", "c_proj")


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name not in REFUSED_AT_LOAD])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def hf(name) -> Any:
    return tiny(name)


@pytest.fixture(scope="module")
def model(hf) -> Any:
    return ac.load(deepcopy(hf))


@pytest.mark.parametrize("engine", ENGINES)
def test_prompts_of_any_length_are_read_as_alone(model, hf, engine):
    assert log_prob(model, options=ac.RunOptions(engine=engine)) == pytest.approx(by_hand(hf), abs=1e-4)


def test_padded_prompts_are_read_in_float64(name):
    hf = tiny(name, torch.float64)
    if name in NO_FLOAT64:
        with pytest.raises(ValueError, match="Hugging Face cannot run this"):
            ac.load(hf)
        return
    assert log_prob(ac.load(deepcopy(hf))) == pytest.approx(by_hand(hf), abs=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_without_output_writes_nothing(model, hf, engine):
    edit = ac.Ablate([(1, 2)], how="zero")
    right = by_hand(without_head(hf, 1, 2))
    assert abs(right - by_hand(hf)) > 1e-4, "the head matters"
    assert log_prob(model, edits=[edit], options=ac.RunOptions(engine=engine)) == pytest.approx(right, abs=1e-4)


def test_a_pattern_of_zeros_is_an_output_of_zeros_or_refused(model, name):
    edits = [[ac.Ablate([(1, 2)], site=site, how="zero")] for site in ("z", "pattern")]
    if name in NO_PATTERN:
        with pytest.raises(ValueError, match="hook_pattern' changes nothing in this model"):
            log_prob(model, edits=edits[1])
        return
    z, pattern = (log_prob(model, edits=edit) for edit in edits)
    assert pattern == pytest.approx(z, abs=1e-5)


def pair(positions: tuple[int, ...] = (2, 5)) -> ac.Pair:
    """One prompt and another that differs at two tokens."""
    clean = ac.Prompts.from_tokens(TEXTS[:1])
    tokens = clean.tokens.clone()
    tokens[:, list(positions)] = 40
    return ac.Pair(clean, replace(clean, inputs=tokens, relations={}), metric="log_prob")


def test_a_query_is_patched_by_itself_or_refused(model, name):
    if name in QUERIES_TOGETHER:
        with pytest.raises(ValueError, match="norms the queries of all heads of layer 0 together"):
            ac.patch_heads(model, pair(), sites=["q"])
        with pytest.raises(ValueError, match="take 'rot_q', which comes after the norm"):
            ac.attribute_heads(model, pair(), sites=["q"])
        return
    fast, reference = (
        ac.patch_heads(model, pair(), sites=["q"], options=ac.RunOptions(engine=engine)).frame["value"].to_numpy()
        for engine in ENGINES
    )
    np.testing.assert_allclose(fast, reference, atol=1e-4)
    assert abs(reference).max() > 1e-4


def test_edges_are_patched_or_refused_with_the_reason(model, name):
    edges = [("L0H0", "logits"), ("L0H1", "L1H0.q"), ("M0", "L1H1.q")]
    if name in NO_EDGES:
        with pytest.raises(ValueError, match=NO_EDGES[name]):
            ac.patch_edges(model, pair(), edges=edges)
        return
    assert abs(ac.patch_edges(model, pair(), edges=edges).frame["value"]).max() > 1e-6


def hooks_of(model: Any) -> dict[str, torch.Tensor]:
    """What every hook point shows that fires, with those on that TransformerLens leaves off."""
    seen: dict[str, torch.Tensor] = {}

    def keep(activation: Any, hook: Any) -> None:
        if isinstance(activation, torch.Tensor):
            seen[hook.name] = activation.detach().clone()

    with torch.no_grad():
        model.run_with_hooks(torch.tensor(TEXTS[:1]), fwd_hooks=[(lambda _: True, keep)])
    return seen


VERBS: dict[str, Callable[[Any], Any]] = {
    "score_heads": lambda model: ac.score_heads(model, ac.Prompts.from_tokens(TEXTS)),
    "evaluate": lambda model: log_prob(model),
    "patch_heads": lambda model: ac.patch_heads(model, pair(), sites=["z"]),
    "capture": lambda model: capture(model, ac.Prompts.from_tokens(TEXTS), ["blocks.0.hook_resid_pre"]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_hooks_show_after_a_verb_what_they_show_on_a_fresh_bridge(hf, verb):
    fresh, used = ac.load(deepcopy(hf)), ac.load(deepcopy(hf))
    VERBS[verb](used)
    for model in (fresh, used):
        for switch in ("set_use_split_qkv_input", "set_use_hook_mlp_in"):
            try:
                getattr(model, switch)(True)
            except (NotImplementedError, ValueError):
                continue  # TransformerLens does not have it for this architecture
    expected, found = hooks_of(fresh), hooks_of(used)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("changed", [name for name in ARCHITECTURES if name not in REFUSED_AT_LOAD])
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
    for engine in ENGINES:
        assert log_prob(model, options=ac.RunOptions(engine=engine)) == pytest.approx(right, abs=1e-4)


def parameters_that_run(model: Any) -> Iterator[torch.nn.Parameter]:
    """The parameters that get a gradient when the wrapped model is trained."""
    model.original_model.zero_grad()
    with torch.enable_grad():
        model.original_model(torch.tensor(TEXTS[:1])).logits.square().sum().backward()
    unique = {id(each): each for each in model.original_model.parameters() if each.grad is not None}
    yield from unique.values()
    model.original_model.zero_grad()


@pytest.mark.parametrize("refused", REFUSED_AT_LOAD)
def test_what_cannot_be_read_is_refused_at_the_door(refused):
    with pytest.raises(ValueError, match=REFUSED_AT_LOAD[refused]):
        ac.load(tiny(refused))
