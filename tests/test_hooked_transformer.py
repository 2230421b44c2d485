"""The same numbers from a `HookedTransformer` of TransformerLens 3 as from the same weights in a bridge.

Runs in an environment of its own: `make test-tl3`.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
import torch
from frozen import Twin, of_lengths

if int(version("transformer-lens").split(".")[0]) > 3:
    pytest.skip("TransformerLens 4 has no HookedTransformer: make test-tl3", allow_module_level=True)

import align_circuits as ac
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES

tl: Any = import_module("transformer_lens")  # of which type checkers see version 4
convert: Any = import_module("transformer_lens.pretrained.weight_conversions.llama").convert_llama_weights

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=1, n_examples=2)
SITES: Any = (*HEAD_SITES, "rot_q", "rot_k", *LAYER_SITES)


def both(hf: Any, tokenizer: Any, *, folded: bool) -> tuple[Any, Any]:
    """The same weights as a `HookedTransformer`, its norms folded into what reads them or not, and in a bridge."""
    cfg = tl.HookedTransformerConfig(
        n_layers=2,
        d_model=32,
        n_ctx=64,
        d_head=8,
        n_heads=4,
        n_key_value_heads=2,
        d_mlp=48,
        d_vocab=64,
        act_fn="silu",
        normalization_type="RMS",
        final_rms=True,
        gated_mlp=True,
        eps=hf.config.rms_norm_eps,
        positional_embedding_type="rotary",
        rotary_dim=8,
        rotary_adjacent_pairs=False,
        rotary_base=int(hf.config.rope_parameters["rope_theta"]),
        original_architecture="LlamaForCausalLM",
    )
    with torch.random.fork_rng(devices=[]), pytest.warns(DeprecationWarning, match="removed in 4.0"):
        hooked = tl.HookedTransformer(cfg)
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if "norm" in name:
                weight *= torch.linspace(0.5, 2, len(weight))
        weights = {name: weight.clone() for name, weight in convert(hf, cfg).items()}
        if folded:
            hooked.load_and_process_state_dict(weights, center_writing_weights=False)
        else:
            hooked.load_state_dict(weights, strict=False)
    hooked.tokenizer = tokenizer
    return ac.load(hooked), ac.load(hf, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def models(random_hf_model, char_tokenizer):
    return both(random_hf_model("llama", seed=1), char_tokenizer, folded=False)


@pytest.fixture(scope="module")
def folded(random_hf_model, char_tokenizer):
    return both(random_hf_model("llama", seed=1), char_tokenizer, folded=True)


@pytest.fixture(scope="module")
def clean(char_tokenizer):
    return TASK.sample(4, char_tokenizer, seed=0)


@pytest.fixture(scope="module")
def pair(clean):
    return {"clean": clean, "corrupted": TASK.corrupt(clean, "query", seed=1)}


def alike(models: Any, verb: Any, *engines: str) -> None:
    """Runs a verb on both models, and checks that its tables hold the same numbers, and more than zeros."""
    ours, theirs = (verb(model) for model in models)
    values = ours.frame["value"].to_numpy(dtype=float)
    assert values == pytest.approx(theirs.frame["value"].to_numpy(dtype=float), abs=2e-5, nan_ok=True)
    assert abs(values).max() > 1e-2
    keys = [name for name in ours.frame if name not in ("value", "low", "high")]
    assert ours.frame[keys].equals(theirs.frame[keys])
    assert (ours.provenance.engine, theirs.provenance.engine) == engines


def test_a_hooked_transformer_is_taken_as_it_is(models):
    hooked, _ = models
    assert isinstance(hooked, tl.HookedTransformer)
    with pytest.raises(ValueError, match="a HookedTransformer is no TransformerBridge"):
        ac.evaluate(hooked, TASK.sample(1, hooked.tokenizer), options=ac.RunOptions(engine="fast"))


@pytest.mark.parametrize("verb", [ac.evaluate, ac.score_heads])
def test_evaluation_and_scores(models, clean, verb):
    alike(models, lambda model: verb(model, clean), "reference", "fast")


def test_padded_prompts(models):
    alike(models, lambda model: ac.evaluate(model, of_lengths((12, 9, 10), 0)), "reference", "fast")


@pytest.mark.parametrize(
    "edit", [ac.Ablate([(0, 1), (1, 2)], how="zero"), ac.Ablate(layers=[1], site="mlp_out", how="zero")]
)
def test_edits(models, clean, edit):
    alike(models, lambda model: ac.evaluate(model, clean, edits=[edit]), "reference", "fast")


def test_edits_as_plain_hooks(models, clean):
    hooked, _ = models
    zero = ac.Ablate([(0, 1), (1, 2)], how="zero")
    with hooked.hooks(fwd_hooks=zero.fwd_hooks(hooked)):
        found = ac.evaluate(hooked, clean)
    assert found.frame["value"].equals(ac.evaluate(hooked, clean, edits=[zero]).frame["value"])
    assert not found.frame["value"].equals(ac.evaluate(hooked, clean).frame["value"])


@pytest.mark.parametrize("site", SITES)
def test_patches(models, pair, site):
    def patched(model: Any) -> ac.Table:
        return ac.patch_heads(model, ac.Pair(**pair), sites=[site])

    alike(models, patched, "reference", patched(models[1]).provenance.engine)


@pytest.mark.parametrize("how", ["mean", "zero", "resample"])
def test_ablations(models, clean, how):
    alike(models, lambda model: ac.ablate_heads(model, clean, how), "reference", "replay")


@pytest.mark.parametrize("method", ["atp", "atp_star", "ig_inputs"])
def test_attribution_of_heads(models, pair, method):
    sites: Any = ["z", "q", "k", "v", "mlp_out"]
    theirs = "reference" if method == "atp_star" else "fast"
    alike(
        models,
        lambda model: ac.attribute_heads(model, ac.Pair(**pair, direction="noise"), method=method, sites=sites),
        "reference",
        theirs,
    )


@pytest.mark.parametrize("method", ["eap", "eap_ig_inputs", "eap_ig_activations", "atp_star"])
def test_attribution_of_edges(models, pair, method):
    theirs = "reference" if method == "atp_star" else "fast"
    alike(
        models,
        lambda model: ac.attribute_edges(model, ac.Pair(**pair, direction="noise"), method=method),
        "reference",
        theirs,
    )


@pytest.mark.parametrize("kind", ["models", "folded"])
def test_edges_and_paths(request, kind, pair):
    models = request.getfixturevalue(kind)
    edges = [("L0H1", "L1H2.q"), ("L0H3", "L1KV1.v"), ("L0H0", "logits"), ("input", "M1"), ("M0", "L1KV0.k")]
    paths: Any = {"senders": ["L0H1", "L0H2"], "receivers": ["L1H2.q", "L1KV1.k"]}
    alike(
        models,
        lambda model: ac.patch_edges(model, ac.Pair(**pair, direction="noise"), edges=edges),
        "reference",
        "fast",
    )
    alike(models, lambda model: ac.patch_paths(model, ac.Pair(**pair, direction="noise"), **paths), "reference", "fast")


def test_an_ungrouped_model_has_a_key_for_every_head(models, pair, monkeypatch):
    hooked, noise = models[0], ac.Pair(**pair, kind="all", metric="log_prob", direction="noise")
    monkeypatch.setattr(hooked.cfg, "ungroup_grouped_query_attention", True)
    twin, edge = Twin(hooked, *pair.values()), ("L0H1", "L1H2.k")
    head = ac.patch_heads(hooked, noise, sites=["k"], heads=["L1H2"]).frame["value"].item()
    assert head == pytest.approx(twin.patched("blocks.1.attn.hook_k", column=2), abs=1e-5)
    found = ac.patch_edges(hooked, noise, edges=[edge]).frame["value"].item()
    assert found == pytest.approx(twin.effect(*edge, freeze_mlps=True), abs=1e-5)


@pytest.mark.parametrize("kind", ["models", "folded"])
def test_direct_logits(request, kind, clean):
    alike(request.getfixturevalue(kind), lambda model: ac.direct_logit_attribution(model, clean), "reference", "fast")


def test_localize(models):
    hooked, bridge = models
    ours, theirs = (ac.localize(model, TASK, n=16, seed=1, n_controls=2) for model in (hooked, bridge))
    assert ours.heads_by_role == theirs.heads_by_role
    for name in ("patching_effects", "ablation_effects", "set_ablations", "table"):
        left, right = (getattr(result if name == "table" else result.evidence, name).frame for result in (ours, theirs))
        assert left["value"].to_numpy(dtype=float) == pytest.approx(
            right["value"].to_numpy(dtype=float), abs=2e-5, nan_ok=True
        )
    assert ours.table.provenance.engine != theirs.table.provenance.engine


def test_localize_finds_a_planted_circuit():
    task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4)
    model = ac.planted_circuit(task, seed=3)
    result = ac.localize(model, task, n=24, seed=1, n_controls=3)
    assert set(result.named_heads) == {head for head, role in model.roles.items() if role in result.heads_by_role}
