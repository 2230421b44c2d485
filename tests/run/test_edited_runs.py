"""Edited runs by replay beside the reference engine, run by run: random models, prompts, edits and splits."""

from dataclasses import dataclass, replace
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_hand_built import hand_built
from refusals import refused
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaMLP

import align_circuits as ac
from align_circuits.heads.ablate import ablation_baseline
from align_circuits.hooks import replay
from align_circuits.hooks.compat import architectures, attention_functions
from align_circuits.hooks.edits import Edit
from align_circuits.hooks.names import HEAD_SITES, ROTATED_SITES, name_of, site_of
from align_circuits.hooks.replay import REPLAY_SITES
from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltMLP
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.prompts.relations import Relation
from align_circuits.run import batch_sizes, edited_runs, unedited_runs
from align_circuits.run.edited_runs import run_edited

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EDITS = ("zero", "mean", "resample", "patch", "steer")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "mistral": ("mistral", {"num_hidden_layers": 3}),
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, in turn": ("gpt_neox", {"use_parallel_residual": False}),
    "hand-built": ("hand-built", {}),
    "hand-built, zeros": ("hand-built", {"d_head": 40, "n_key_value_heads": 2, "zeros": True}),
    "planted": ("planted", {}),
}


@pytest.fixture(scope="module")
def models(random_hf_model):
    made: dict[Any, Any] = {}

    def make(kind: str, dtype: torch.dtype) -> Any:
        if (kind, dtype) not in made:
            name, changes = KINDS[kind]
            if name == "planted":
                made[kind, dtype] = ac.planted_circuit(ac.Seq2SeqTask(x_len=3, n_examples=4), noise=0.1).to(dtype)
            elif name == "hand-built":
                made[kind, dtype] = hand_built(**changes).to(dtype)
            else:
                made[kind, dtype] = ac.load(random_hf_model(name, **changes).to(dtype))
        return made[kind, dtype]

    return make


@pytest.fixture(scope="module", autouse=True)
def exact_softmax():
    """Lifts what Hugging Face and TransformerLens do to float64: their softmax is in float32 whatever the weights."""
    plain = torch.nn.functional.softmax

    def softmax(x: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return plain(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


@dataclass(frozen=True)
class Case:
    """A model, prompts, what is done to them, and how the work is split."""

    kind: str
    dtype: torch.dtype
    lengths: tuple[int, ...]
    shared: int
    """How many columns the other prompts share."""
    edit_sets: tuple[tuple[tuple[str, str, int, int, int | None], ...], ...]
    """Of each edit what it does, at which site, layer and head, from which column."""
    seed: int
    engine: str
    batch_size: Any
    tokens: int


def cases() -> st.SearchStrategy[Case]:
    edits = st.tuples(
        st.sampled_from(EDITS),
        st.sampled_from(REPLAY_SITES),
        st.integers(0, 1),
        st.integers(0, 3),
        st.none() | st.integers(0, 11),
    )
    return st.builds(
        Case,
        kind=st.sampled_from(list(KINDS)),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        lengths=st.lists(st.integers(4, 12), min_size=1, max_size=3).map(tuple)
        | st.integers(2, 3).map(lambda n: (9,) * n),
        shared=st.integers(0, 12),
        edit_sets=st.lists(st.lists(edits, max_size=2).map(tuple), min_size=1, max_size=6).map(tuple),
        seed=st.integers(0, 10**6),
        engine=st.sampled_from(["auto", "fast"]),
        batch_size=st.sampled_from(["auto", "auto", 1, 2]),
        tokens=st.sampled_from([1, 30, 2048]),
    )


def prompts_of(case: Case, seed: int) -> Prompts:
    """Prompts of few different tokens, of several kinds and two examples."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(12, (length,), generator=generator).tolist() for length in case.lengths]
    prompts = Prompts.from_tokens(ids)
    kinds = torch.randint(2, 4, prompts.mask.shape, generator=generator).where(prompts.mask, TokenKind.PAD.value)
    prompts = replace(prompts, token_kinds=kinds, example=torch.zeros_like(kinds).where(prompts.mask, -1))
    width, queries = prompts.mask.shape[1], (1, 2, 3)
    columns = [(prompt, width - length) for prompt, length in enumerate(case.lengths)]
    pairs = [(prompt, first + query, [first + query // 2]) for prompt, first in columns for query in queries]
    return prompts.with_relations(half=Relation.from_pairs(pairs[: 3 * len(columns) - 1], prompts=prompts))


def edit_of(model: Any, prompts: Prompts, spec: tuple[str, str, int, int, int | None], seed: int) -> Edit:
    """The edit that a case tells of."""
    what, site, layer, head, first = spec
    if isinstance(model, HandBuilt):
        site = site.removeprefix("rot_")  # which it does not have
    elif model.cfg.architecture.startswith("GPT") and site in ("q", "k", *ROTATED_SITES):
        site = "z"  # whose hooks never fire here
    if site == "resid_mid" and architectures.is_parallel(model.blocks[0]):
        site = "attn_out"
    of_heads = site in HEAD_SITES + ROTATED_SITES
    place: Any = {"heads": [(layer, head)]} if of_heads else {"layers": [layer]}
    if site in ("k", "v", "rot_k"):
        shared = 4 // (model.cfg.n_key_value_heads or 4)
        place = {"heads": [(layer, head // shared * shared + i) for i in range(shared)]}
    generator = torch.Generator().manual_seed(seed)
    if site == "pattern" and what in ("mean", "resample"):
        return ac.Clamp([(layer, head)], "half")
    positions = None
    if first is not None:
        later = torch.arange(prompts.mask.shape[1]) >= first
        positions = (torch.rand(prompts.mask.shape, generator=generator) < 0.5) & later
    place |= {"site": site, "positions": positions}
    if site == "pattern" and what != "zero":
        shape = (len(prompts), model.cfg.n_heads, *[prompts.mask.shape[1]] * 2)
        # None at padding: batches leave columns out that are padding in all of their prompts.
        pattern = torch.rand(shape, generator=generator).tril() * prompts.mask[:, None, None]
        return ac.Patch(**place, values={name_of(site, layer): nn.functional.normalize(pattern, p=1, dim=-1)})
    if what == "steer":
        cfg = model.cfg
        size = cfg.d_head if of_heads else cfg.d_mlp if site == "mlp_post" else cfg.d_model
        return ac.Steer(**place, vector=torch.randn(size, generator=generator), scale=0.5)
    if what == "patch" or site in ROTATED_SITES:  # which have no means
        return ac.Patch(**place)
    resamples = what == "resample" and len(prompts) > 1 and bool(prompts.mask.all())
    how: Any = what if what == "mean" or resamples else "zero"
    if how == "zero":
        return ac.Ablate(**place, how="zero")
    reference = ablation_baseline(model, prompts, how, site=place["site"], options=ac.RunOptions(engine="reference"))
    return ac.Ablate(**place, how=how, baseline=reference)


def logits_of(
    model: Any,
    prompts: Prompts,
    edit_sets: Any,
    rows: Any,
    engine: Any = "auto",
    batch_size: Any = "auto",
    **options: Any,
) -> tuple[Tensor, str]:
    """The logits [edit_set row d_vocab], and what ran."""
    found = torch.full((len(edit_sets), len(rows[0]), model.cfg.d_vocab), torch.nan, dtype=torch.float64)

    def keep(edit_set: int, batch: Tensor, logits: Tensor) -> None:
        found[edit_set, batch] = logits.double()

    options |= {"on_logits": keep, "options": ac.RunOptions(engine, batch_size)}
    ran = run_edited(model, prompts, edit_sets, prompt=rows[0], query=rows[1], **options)
    assert not found.isnan().any(), "every row of every edit set is handed over"
    return found, ran


def replayed(model: Any, prompts: Prompts, edit_sets: Any, rows: Any, atol: float = 1e-5, **options: Any) -> Tensor:
    """The logits by replay, after a comparison with the reference engine up to a share of the largest."""
    source = options.get("source")
    expected, ran = logits_of(model, prompts, edit_sets, rows, source=source, engine="reference")
    assert ran == "reference"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_sizes, "CPU_TOKENS", options.pop("tokens", batch_sizes.CPU_TOKENS))
        found, ran = logits_of(model, prompts, edit_sets, rows, **options)
    assert ran == "replay"
    torch.testing.assert_close(found, expected, atol=atol * max(1.0, float(expected.abs().max())), rtol=0)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(case=cases())
def test_replay_equals_the_reference_engine(models, case):
    model, prompts = models(case.kind, case.dtype), prompts_of(case, case.seed)
    others = prompts_of(case, case.seed + 1)
    same = torch.arange(prompts.mask.shape[1]) < case.shared
    source = replace(others, inputs=torch.where(same, prompts.tokens, others.tokens))
    edit_sets = [
        [edit_of(model, prompts, spec, case.seed + i) for i, spec in enumerate(edit_set)] for edit_set in case.edit_sets
    ]
    chosen = torch.rand(len(prompts.targets), generator=torch.Generator().manual_seed(case.seed)) < 0.6
    rows = [prompts.column(name)[chosen] for name in ("prompt", "query_pos")]
    atol = {torch.float32: 1e-5, torch.float64: 1e-10}[case.dtype]
    options = {"source": source, "engine": case.engine, "batch_size": case.batch_size, "tokens": case.tokens}
    replayed(model, prompts, edit_sets, rows, atol, **options)


@pytest.mark.parametrize(
    ("lengths", "dtype", "atol"), [((9, 12, 5), torch.float64, 1e-10), ((10, 10), torch.float32, 1e-5)]
)
@pytest.mark.parametrize("kind", ["hand-built, zeros", "planted"])
def test_hand_built_models_replay_every_edit_at_every_site(models, kind, lengths, dtype, atol):
    """All in one call, so that edit sets join one another at every place."""
    model, case = models(kind, dtype), replace(PLAIN, lengths=lengths)
    prompts, others = prompts_of(case, 3), prompts_of(case, 4)
    source = replace(others, inputs=torch.where(torch.arange(max(lengths)) < 5, prompts.tokens, others.tokens))
    edits = product((site for site in REPLAY_SITES if site not in ROTATED_SITES), EDITS)
    places = cycle(product((None, 6), ((0, 3), (1, 1), (model.cfg.n_layers - 1, 2))))
    specs: Any = [(what, site, *head, first) for (site, what), (first, head) in zip(edits, places, strict=False)]
    edit_sets = [[edit_of(model, prompts, spec, seed)] for seed, spec in enumerate(specs)]
    edit_sets += [[ac.Clamp([(0, 1), (1, 2)], "half")], [edit for edits in edit_sets[::7] for edit in edits], []]
    found = replayed(model, prompts, edit_sets, every_row(prompts), atol, source=source)
    assert (found[:-1] != found[-1]).any(2).any(1).float().mean() > 0.7


class Doubled(HandBuilt):
    """Whose forward is another than that of its parts."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


class Louder(HandBuiltMLP):
    def forward(self, residual: Tensor) -> Tensor:
        return 2 * super().forward(residual)


def with_own_mlp() -> HandBuilt:
    model = hand_built()
    mlp = Louder(model.cfg)
    mlp.load_state_dict(model.blocks[1].mlp.state_dict())
    model.blocks[1].mlp = mlp
    return model


def with_own_forward() -> HandBuilt:
    model = hand_built()
    forward = model.forward
    model.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)
    return model


def with_torch_hook() -> HandBuilt:
    model = hand_built()
    model.blocks[0].mlp.register_forward_hook(lambda _module, _input, output: 2 * output)
    return model


def with_hook() -> HandBuilt:
    model = hand_built()
    doubled: Any = lambda z, hook: 2 * z  # noqa: ARG005, E731 - TransformerLens's keyword
    model.add_hook("blocks.1.attn.hook_z", doubled)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hand_built(Doubled), "Doubled has a forward of its own"),
        (with_own_mlp, "blocks.1.mlp has a forward of its own"),
        (with_own_forward, "HandBuilt has a forward of its own"),
        (with_torch_hook, r"hooks are attached \(blocks.0.mlp\)"),
        (with_hook, r"hooks are attached \(blocks.1.attn.hook_z\)"),
    ],
)
def test_hand_built_models_that_compute_otherwise_are_not_replayed(make, reason):
    model, prompts, edit_sets = make(), prompts_of(PLAIN, 0), [[], [ac.Ablate([(0, 1)], how="zero")]]
    found, ran = logits_of(model, prompts, edit_sets, every_row(prompts))
    assert ran == "reference"
    expected, _ = logits_of(hand_built(), prompts, edit_sets, every_row(prompts))
    assert ((found - expected).abs().amax((1, 2)) > 0.1).all(), "what is its own counts"
    refused(reason, logits_of, model, prompts, edit_sets, every_row(prompts), engine="fast")


def test_edits_that_no_part_of_a_hand_built_model_can_make_are_left_to_its_hooks():
    model, prompts = hand_built(), prompts_of(PLAIN, 0)
    scores, rotated = (
        ac.Ablate(hook="blocks.0.attn.hook_attn_scores", how="zero"),
        ac.Ablate([(0, 1)], site="rot_q", how="zero"),
    )
    pattern = ac.Patch([(0, 1)], site="pattern")
    for edit, reason in [
        (scores, "replay does not edit blocks.0.attn.hook_attn_scores"),
        (pattern, "replay does not keep the patterns of other prompts"),
        (rotated, "it has no hook point blocks.0.attn.hook_rot_q"),
    ]:
        options: Any = {"source": prompts}
        if edit is rotated:
            with pytest.raises(ValueError, match=r"no hook point 'blocks.0.attn.hook_rot_q' in this HandBuilt"):
                logits_of(model, prompts, [[edit]], every_row(prompts), **options)
        else:
            assert logits_of(model, prompts, [[edit]], every_row(prompts), **options)[1] == "reference"
        with pytest.raises(ValueError, match=f"the fast engine cannot run this model: {reason}"):
            logits_of(model, prompts, [[edit]], every_row(prompts), engine="fast", **options)


PLAIN = Case("llama", torch.float32, (9, 9, 9), 5, (), 0, "auto", "auto", 2048)


def every_row(prompts: Prompts) -> list[Tensor]:
    return [prompts.column("prompt"), prompts.column("query_pos")]


def test_patterns_are_edited_in_the_rows_of_their_runs(models):
    model, prompts = models(PLAIN.kind, PLAIN.dtype), prompts_of(PLAIN, 0)
    edits = [[ac.Ablate([(layer, head)], site="pattern", how="zero")] for layer, head in ((0, 0), (0, 1), (1, 0))]
    found = replayed(model, prompts, edits, every_row(prompts))
    assert not torch.allclose(found[0], found[1])


def test_a_few_queries_equal_the_reference_engine(models):
    """With no edit after the last attention, which thus computes these queries alone."""
    rows = [torch.arange(3), torch.tensor([3, 5, 7])]
    replayed(models("llama", torch.float32), prompts_of(PLAIN, 0), [[], [ac.Ablate([(0, 1)], how="zero")]], rows)


def test_earlier_positions_and_lower_layers_are_run_once(models):
    """Counts the tokens that pass each layer's MLP."""
    model, prompts = models("qwen3", torch.float32), prompts_of(PLAIN, 0)
    source = replace(prompts, inputs=torch.where(torch.arange(9) < 5, prompts.tokens, prompts.tokens.flip(0)))
    edit_sets = [[ac.Patch([(layer, head)])] for layer in (1, 2) for head in range(4)]
    rows = [torch.arange(3), torch.full((3,), 7)]
    passed = dict.fromkeys(range(3), 0)
    layers = {block.mlp.original_component.down_proj: layer for layer, block in enumerate(model.blocks)}

    def count(module: Any, args: Any) -> None:
        if module in layers:
            passed[layers[module]] += args[0].shape[:-1].numel()

    hook = nn.modules.module.register_module_forward_pre_hook(count)
    _, ran = logits_of(model, prompts, edit_sets, rows, source=source)
    hook.remove()
    once, other, one = 3 * 8, 3 * 3, 3 * 1  # columns up to the query, from the first other token on, and the query
    assert ran == "replay"
    assert passed == {0: once + other, 1: once + other + 4 * other, 2: one + one + 8 * one}


@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_is_not_fused_equals_the_fused_one(masked):
    """Elsewhere than on the CPU."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, size, 8, generator=generator) for size in (5, 7, 7))
    mask = torch.where(torch.rand(2, 1, 5, 7, generator=generator) < 0.5, 0.0, torch.finfo(torch.float32).min)
    expected = attention_functions.fused_attention(query, key, value, 0.3, mask if masked else None)
    found = replay.plain_attention(query, key, value, 0.3, mask if masked else None)
    torch.testing.assert_close(found, tuple(expected))


def test_a_batch_that_runs_out_of_memory_is_halved(random_hf_model):
    model, prompts = ac.load(random_hf_model("llama")), prompts_of(PLAIN, 0)
    edit_sets = [[ac.Ablate([(layer, head)], how="zero")] for layer in (0, 1) for head in range(4)]
    expected, _ = logits_of(model, prompts, edit_sets, every_row(prompts))
    sizes, last = [], model.blocks[1].mlp.original_component.down_proj

    def small_memory(module: Any, args: Any) -> None:
        if module is last:
            sizes.append(args[0].shape[:-1].numel())
            if sizes[-1] > 30:
                raise torch.OutOfMemoryError("out of memory")

    hook = nn.modules.module.register_module_forward_pre_hook(small_memory)
    try:
        found, ran = logits_of(model, prompts, edit_sets, every_row(prompts))
        assert ran == "replay" and max(sizes) > 30 >= sizes[-1]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        with pytest.raises(torch.OutOfMemoryError):
            logits_of(model, prompts, edit_sets, every_row(prompts), batch_size=8)
    finally:
        hook.remove()


@pytest.mark.parametrize("at", ["model.layers.0", "model.layers.1.mlp", "model.norm", "lm_head"])
def test_a_hook_of_pytorch_on_any_module_counts(at, random_hf_model):
    """Replay runs few modules as a whole, so that a hook of the user's might not fire."""
    model, prompts, edits = (
        ac.load(random_hf_model("llama")),
        prompts_of(PLAIN, 0),
        [[], [ac.Ablate([(0, 1)], how="zero")]],
    )
    plain, ran = logits_of(model, prompts, edits, every_row(prompts))
    assert ran == "replay"
    hf = {name.replace("._original_component", ""): each for name, each in model.original_model.named_modules()}

    def double(_module: Any, _given: Any, result: Any) -> Any:
        return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

    hf[at].register_forward_hook(double)
    hooked, ran = logits_of(model, prompts, edits, every_row(prompts))
    expected, _ = logits_of(model, prompts, edits, every_row(prompts), engine="reference")
    assert ran == "fast"
    torch.testing.assert_close(hooked, expected, atol=1e-5, rtol=1e-5)
    assert ((hooked - plain).abs().amax((1, 2)) > 1e-3).all()


def scaled(module: Any) -> None:
    """Gives a module a forward pass of its own, which doubles what it returns."""
    forward = module.forward

    def double(*args: Any, **options: Any) -> Any:
        result = forward(*args, **options)
        return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

    module.forward = double


class OwnMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def of_class(kind: type) -> Any:
    return lambda module: setattr(module, "__class__", kind)


def with_relu(module: Any) -> None:
    module.act_fn = nn.ReLU()


class OwnSiLU(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.tanh(x)


def pruned(module: Any) -> None:
    mask = (torch.arange(len(module.weight)) % 3 > 0).float()
    prune.custom_from_mask(module, "weight", mask)
    module.weight_orig.data.mul_(3)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("at", "change", "engine"),
    [
        ("model.layers.0.mlp", scaled, "replay"),
        ("model.layers.0.mlp", of_class(OwnMLP), "replay"),
        ("model.layers.0.mlp", with_relu, "replay"),
        ("model.layers.0.mlp", lambda module: setattr(module, "act_fn", OwnSiLU()), "replay"),
        ("model.layers.0.mlp.act_fn", scaled, "replay"),
        ("model.layers.0.input_layernorm", scaled, "replay"),
        ("model.layers.0.input_layernorm", pruned, "replay"),
        ("model.layers.0", scaled, "fast"),
        ("model.norm", scaled, "replay"),
    ],
)
def test_a_forward_pass_of_ones_own_counts(at, change, engine, first, random_hf_model):
    """Of a class or of a module, changed before the model is loaded or after; replay writes few of them out."""
    prompts, edits = prompts_of(PLAIN, 0), [[], [ac.Ablate([(0, 1)], how="zero")]]
    hf, plain = random_hf_model("llama"), random_hf_model("llama")
    part = hf.get_submodule(at)
    unchanged, _ = logits_of(ac.load(random_hf_model("llama")), prompts, edits, every_row(prompts))
    if first:
        change(part)
    model = ac.load(hf)
    if not first:
        change(part)
    change(plain.get_submodule(at))
    found, ran = logits_of(model, prompts, edits, every_row(prompts))
    with torch.no_grad():
        expected = plain(prompts.tokens).logits.double()
    rows = every_row(prompts)
    assert ran == engine
    torch.testing.assert_close(found[0], expected[rows[0], rows[1]], atol=1e-4, rtol=1e-4)
    by_hooks, _ = logits_of(model, prompts, edits, rows, engine="reference")
    torch.testing.assert_close(found, by_hooks, atol=1e-4, rtol=1e-4)
    assert ((found - unchanged).abs().amax((1, 2)) > 1e-3).all()


def hooked(module: Any) -> None:
    module.register_forward_pre_hook(lambda _module, given: (2 * given[0],))


@pytest.mark.parametrize("change", [scaled, hooked])
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("llama", "model.layers.1.self_attn"),
        ("gpt2", "transformer.h.1.attn"),
        ("gpt2", "transformer.ln_f"),
        ("phi3", "model.layers.1.mlp"),
        ("phi3", "model.layers.0.mlp.gate_up_proj"),
        ("bloom", "transformer.word_embeddings_layernorm"),
    ],
)
def test_what_a_bridge_computes_by_itself_cannot_be_changed_on_a_module(kind, at, change, random_hf_model):
    hf = random_hf_model(kind)
    part = hf.get_submodule(at)
    model = ac.load(hf)
    change(part)
    with pytest.raises(ValueError, match=f"of your own on a {type(part).__name__} has no effect"):
        logits_of(model, prompts_of(PLAIN, 0), [[]], every_row(prompts_of(PLAIN, 0)))


def test_an_attention_function_of_ones_own_is_refused(random_hf_model):
    hf = random_hf_model("llama")
    model, rows = ac.load(hf), every_row(prompts_of(PLAIN, 0))
    AttentionInterface.register("mine", lambda _module, query, *_, **__: (torch.zeros_like(query).mT, None))
    try:
        hf.set_attn_implementation("mine")
        with pytest.raises(ValueError, match="of your own on a model whose attention is 'mine' has no effect"):
            logits_of(model, prompts_of(PLAIN, 0), [[]], rows)
        hf.set_attn_implementation("sdpa")
        logits_of(model, prompts_of(PLAIN, 0), [[]], rows)
    finally:
        AttentionInterface._global_mapping.pop("mine")


def test_bfloat16_stays_near(random_hf_model):
    model, prompts = ac.load(random_hf_model("llama").to(torch.bfloat16)), prompts_of(PLAIN, 0)
    edit_sets = [[], [ac.Ablate([(0, 1)], how="zero")], [ac.Ablate(site="mlp_out", layers=[1], how="zero")]]
    found, ran = logits_of(model, prompts, edit_sets, every_row(prompts))
    expected, _ = logits_of(model, prompts, edit_sets, every_row(prompts), engine="reference")
    assert ran == "replay"
    scale = expected.abs().mean()
    assert (found - expected).abs().mean() < 0.02 * scale and (expected[1] - expected[0]).abs().mean() > 0.1 * scale


def test_what_the_cone_cannot_do_goes_to_the_other_engines_and_is_told(models, random_hf_model):
    prompts = prompts_of(PLAIN, 0)
    rows, llama = every_row(prompts), models("llama", torch.float32)
    pattern, q = [ac.Patch([(0, 1)], site="pattern")], [ac.Ablate([(0, 1)], site="q", how="zero")]
    gpt2 = models("gpt2", torch.float32)
    assert logits_of(llama, prompts, [q, pattern], rows, source=prompts)[1] == "fast"
    assert logits_of(gpt2, prompts, [q, pattern], rows, source=prompts)[1] == "reference"
    other = ac.load(random_hf_model("gemma2"))
    zero = [ac.Ablate([(0, 1)], how="zero")]
    assert logits_of(other, prompts, [zero], rows)[1] == "reference"
    for model, edit_set, message in [
        (other, zero, "Gemma2ForCausalLM caps its attention scores"),
        (gpt2, q, "not fire"),
    ]:
        refused(message, logits_of, model, prompts, [edit_set], rows, engine="fast")


def test_refusals(models):
    model, prompts = models("llama", torch.float32), prompts_of(PLAIN, 0)
    with pytest.raises(ValueError, match=r"holds 2 prompts of up to 9 tokens, .* 3 of 9: they must match"):
        logits_of(model, prompts, [[]], every_row(prompts), source=prompts[:2])
    with pytest.raises(ValueError, match=r"no values for 'blocks.0.attn.hook_z'"):
        logits_of(model, prompts, [[ac.Patch([(0, 0)])]], every_row(prompts))


@pytest.mark.parametrize(
    ("most", "index", "expected"),
    [(270, 0, 2), (269, 0, 1), (749, 0, 2), (750, 0, 3), (0, 0, 1), (0, 1, 2), (629, 1, 1), (630, 1, 2)],
)
def test_activations_are_cached_for_as_many_edit_sets_as_memory_should_hold(monkeypatch, most, index, expected):
    """Those of the next edit set in any case: z takes 120 numbers, the pattern 150 and the neurons 480."""
    z, pattern, neurons = (name_of(site, 0) for site in ("z", "pattern", "mlp_post"))
    names = [[z], [pattern, neurons], [neurons, z]] if most == 0 else [[z], [pattern], [neurons]]
    cfg = SimpleNamespace(n_heads=2, d_model=8, d_mlp=32)
    runs: Any = SimpleNamespace(
        model=SimpleNamespace(cfg=cfg), prompts=SimpleNamespace(mask=torch.ones(3, 5)), names=names
    )
    monkeypatch.setattr(edited_runs, "NUMBERS_CACHED", most)
    assert edited_runs._next_names(runs, index) == [z, pattern, neurons][index:][:expected]
    del cfg.d_mlp
    assert edited_runs._width(cfg, neurons, 5) == 8


def test_names_of_sites_can_be_read():
    assert [site_of(name_of(site, 12)) for site in REPLAY_SITES] == [(12, site) for site in REPLAY_SITES]
    others = ("blocks.0.hook_z", "blocks.0.mlp.hook_out", "blocks.0.attn.hook_mlp_post", "blocks.0.hook_mlp_post")
    assert [site_of(name) for name in (*others, "hook_embed", "blocks.0.mlp.hook_pre")] == [None] * 6


@pytest.mark.parametrize(("missing", "together"), [(0, [3, 1]), (1, [2, 2])])
def test_of_the_other_run_as_much_is_kept_as_memory_should_hold(models, monkeypatch, missing, together):
    """Of 27 tokens 32 numbers of z, 4 heads with 9 keys, 48 neurons; what one edit set needs comes at once."""
    model, prompts, captured = models("llama", torch.float32), prompts_of(PLAIN, 0), []
    capture = edited_runs.capture

    def counting(*arguments: Any, **options: Any) -> Any:
        captured.append(arguments[2])
        return capture(*arguments, **options)

    monkeypatch.setattr(edited_runs, "capture", counting)
    monkeypatch.setattr(edited_runs, "NUMBERS_CACHED", 27 * (32 + 4 * 9 + 48) - missing)
    sites: Any = [("z", 0), ("pattern", 0), ("mlp_post", 0), ("z", 1)]
    edits = [
        ac.Patch(layers=[layer], site=site) if site == "mlp_post" else ac.Patch([(layer, 0)], site=site)
        for site, layer in sites
    ]
    names = [name_of(site, layer) for site, layer in sites]
    logits_of(model, prompts, [[edit] for edit in edits], every_row(prompts), source=prompts, engine="reference")
    assert captured == [names[: together[0]], names[together[0] :]]
    captured.clear()
    monkeypatch.setattr(edited_runs, "NUMBERS_CACHED", 0)
    both = [edits[:2], edits[2:]]
    logits_of(model, prompts, both, every_row(prompts), source=prompts, engine="reference")
    assert list(map(set, captured)) == [set(names[:2]), set(names[2:])]


@pytest.fixture
def made(monkeypatch):
    """Grows by one for each unedited run."""
    run, made = replay.Replay.run.__func__, []
    monkeypatch.setattr(replay.Replay, "run", classmethod(lambda *a, **k: made.append(1) or run(*a, **k)))
    return made


def at_two_queries(model: Any, prompts: Prompts, edit_sets: Any, source: Prompts | None) -> Tensor:
    """The logits of three prompts of 12 tokens, by replay."""
    rows = [torch.arange(3).repeat_interleave(2), torch.tensor([8, 11] * 3)]
    logits, ran = logits_of(model, prompts, edit_sets, rows, source=source)
    assert ran == "replay"
    return logits


@pytest.mark.parametrize("most", [2**28, 4000, 0])
def test_sweeps_share_unedited_runs_as_far_as_they_fit(most, models, monkeypatch, made):
    """Whatever is kept, the numbers are those of sweeps alone; with room, the prompts run once."""
    model = models("llama", torch.float64)
    monkeypatch.setattr(unedited_runs, "NUMBERS_CACHED", most)
    prompts = Prompts.from_tokens(torch.randint(3, 64, (3, 12), generator=torch.Generator().manual_seed(1)))
    other = Prompts.from_tokens(torch.randint(3, 64, (3, 12), generator=torch.Generator().manual_seed(2)))
    late = prompts.mask & (torch.arange(12) >= 8)
    sweeps: list[list[list[Edit]]] = [
        [[]],
        [[ac.Ablate([(1, 2)], how="zero")], [ac.Ablate([(1, 0)], how="zero")]],
        [[ac.Ablate([(0, 1)], how="zero")], []],
        [[ac.Patch([(0, 3)], positions=late)], [ac.Patch(site="resid_post", layers=[0], positions=late)]],
        [[ac.Ablate([(0, 1), (1, 1)], how="zero")]],
        [[ac.Patch([(1, 3)], positions=late)]],
    ]

    def measured(edit_sets: Any) -> Tensor:
        return at_two_queries(model, prompts, edit_sets, other)

    alone = [measured(edit_sets) for edit_sets in sweeps]
    made.clear()
    with unedited_runs.shared_runs(model):
        for edit_sets, expected in zip(sweeps, alone, strict=True):
            torch.testing.assert_close(measured(edit_sets), expected, atol=1e-10, rtol=0)
    runs = len(made)
    if most == 2**28:
        assert runs == 3, "nothing edited, then one site, then two"
    else:
        assert runs > 3
    made.clear()
    measured(sweeps[2])
    assert len(made) == 1, "nothing is kept longer"


def test_the_unedited_runs_that_were_used_last_are_kept(models, monkeypatch, made):
    """Two fit: a third takes the place of that which was not used for the longest time."""
    model = models("llama", torch.float32)
    one_run = 3 * 12 * model.cfg.n_layers * (2 * model.cfg.d_model + 2 * model.cfg.n_key_value_heads * model.cfg.d_head)
    monkeypatch.setattr(unedited_runs, "NUMBERS_CACHED", 2 * one_run + 3 * 64)  # and the logits of one query
    batches = [
        Prompts.from_tokens(torch.randint(3, 64, (3, 12), generator=torch.Generator().manual_seed(seed)))
        for seed in range(3)
    ]
    edit_sets: list[list[Edit]] = [[ac.Ablate([(1, 2)], how="zero")]]

    def runs_of(batch: int) -> int:
        made.clear()
        rows: dict[str, Any] = {"prompt": torch.arange(3), "query": torch.full((3,), 11)}
        run_edited(model, batches[batch], edit_sets, **rows, on_logits=lambda *_: None)
        return len(made)

    with unedited_runs.shared_runs(model):
        assert [runs_of(batch) for batch in (0, 1, 0, 2, 0, 2, 1, 2, 0)] == [1, 1, 0, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(("differs", "runs"), [(9, 1), (2, 2)], ids=["late", "early"])
@pytest.mark.parametrize("padded", [0, 2], ids=["whole", "padded"])
def test_runs_of_prompts_that_begin_alike_share_their_beginning(models, made, differs, runs, padded):
    model = models("llama", torch.float64)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (3, 12), generator=generator)
    others = torch.cat([tokens[:, :differs], torch.randint(3, 64, (3, 12 - differs), generator=generator)], 1)
    clean, corrupted = (
        Prompts.from_tokens([first[padded:], *rest]) for first, *rest in (tokens.tolist(), others.tolist())
    )
    ablations: list[list[Edit]] = [[ac.Ablate([(layer, 1)], how="zero")] for layer in range(model.cfg.n_layers)]
    patches: list[list[Edit]] = [[ac.Patch([(layer, 0)])] for layer in range(model.cfg.n_layers)]

    sweeps = [(clean, ablations, None), (corrupted, patches, clean), (corrupted, [[], *ablations], None)]
    alone = [at_two_queries(model, *sweep) for sweep in sweeps]
    made.clear()
    with unedited_runs.shared_runs(model):
        for sweep, expected in zip(sweeps, alone, strict=True):
            torch.testing.assert_close(at_two_queries(model, *sweep), expected, atol=1e-10, rtol=0)
    assert len(made) == runs


def test_no_hook_point_comes_after_all_layers():
    assert replay.order_of([]) > replay.order_of([name_of("mlp_out", 999)])


def test_logits_of_few_edit_sets_at_a_time_are_the_same(models, monkeypatch):
    model, prompts = models("llama", torch.float32), prompts_of(PLAIN, 0)

    def effects() -> Any:
        return ac.ablate_heads(model, prompts, "zero").frame["value"].to_numpy()

    expected = effects()
    monkeypatch.setattr(replay, "_LOGITS_AT_ONCE", 1)
    np.testing.assert_allclose(effects(), expected, atol=1e-6)
