"""Patching of sites beside plain TransformerLens hooks: one prompt at a time, without padding, one place at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from effects_by_hand import values_of
from legs import product
from torch import Tensor

import align_circuits as ac
from align_circuits.hooks.names import LAYER_SITES, name_of
from align_circuits.prompts.prompts import WRONG, Prompts

GENERATOR = torch.Generator().manual_seed(0)
BASIS = torch.linalg.qr(torch.randn(32, 3, generator=GENERATOR)).Q.T
NEURONS = [3, 0, 7]
COLUMNS = ("query_pos", "token", WRONG)
PLACE = ("site", "layer", "position")
Part = Callable[[Tensor, Tensor], Tensor]
"""(old, source) -> what replaces the old activation."""


def a_pair() -> tuple[Prompts, Prompts]:
    """Padded prompts that differ in two tokens; only the last two tokens are targets."""
    ids = [torch.randint(64, (length,), generator=GENERATOR).tolist() for length in (7, 5, 8)]
    clean = Prompts.from_tokens(ids).select_targets(lambda targets: targets["query_pos"] >= 5)
    wrong = torch.randint(64, (len(clean.targets),), generator=GENERATOR).numpy()
    places = {"END": torch.tensor([7, 7, 7]), "S2": torch.tensor([2, 4, 1])}
    clean = replace(clean, targets=clean.targets.assign(**{WRONG: wrong}), positions=places)
    changed = clean.inputs.clone()
    for row, column in enumerate(places["S2"]):
        changed[row, column : column + 2] = torch.randint(64, (2,), generator=GENERATOR)
    return clean, replace(clean, inputs=changed, relations={})


CLEAN, CORRUPTED = a_pair()


def patch_hooks(hook_point: str, new: Callable[[Tensor], Tensor]) -> list[Any]:
    """On a bridge `hook_resid_mid` is what the MLP reads alone: the stream is changed by what attention adds to it."""
    if not hook_point.endswith("resid_mid"):
        return [(hook_point, lambda x, hook: new(x))]  # noqa: ARG005
    layer, before = hook_point.split(".")[1], []
    return [
        (f"blocks.{layer}.hook_resid_pre", lambda x, hook: before.append(x)),  # noqa: ARG005
        (f"blocks.{layer}.hook_attn_out", lambda x, hook: new(before[-1] + x) - before[-1]),  # noqa: ARG005
    ]


@dataclass(frozen=True)
class Alone:
    """One prompt without padding, and its targets."""

    row: int
    corrupted: Tensor
    cache: Mapping[str, Tensor]
    """The activations of the clean run."""
    reference: Tensor
    """Its logits [pos d_vocab]."""
    before: Tensor
    """The logits of the corrupted run."""

    def measured(self, logits: Tensor) -> dict[str, list[float]]:
        own = CLEAN.column("prompt") == self.row
        query, token, wrong = (CLEAN.column(name)[own] for name in COLUMNS)
        query = query - int((~CLEAN.mask[self.row]).sum())
        at, kept = logits[query], self.reference[query].log_softmax(-1)
        gold = at.gather(1, token[:, None])[:, 0]
        return {
            "log_prob": (gold - at.logsumexp(-1)).tolist(),
            "logit_diff": (gold - at.gather(1, wrong[:, None])[:, 0]).tolist(),
            "kl": (kept.exp() * (kept - at.log_softmax(-1))).sum(-1).tolist(),
        }


@pytest.fixture(scope="module")
def alone(models) -> dict[str, list[Alone]]:
    """Every prompt by itself, under each model."""
    found: dict[str, list[Alone]] = {name: [] for name in models}
    for name, model in models.items():
        for row, real in enumerate(CLEAN.mask):
            clean, corrupted = (prompts.tokens[row][real][None] for prompts in (CLEAN, CORRUPTED))
            with torch.no_grad():
                reference, cache = model.run_with_cache(clean)
                found[name].append(Alone(row, corrupted, cache, reference[0], model(corrupted)[0]))
    return found


def by_hand(model: Any, alone: list[Alone], hook_point: str, mask: Tensor, part: Part, metric: str) -> float:
    """The mean change of a metric, over targets."""
    changes: list[float] = []
    for prompt in alone:
        here = mask[prompt.row][CLEAN.mask[prompt.row]][None]
        source = prompt.cache[hook_point]

        def new(x: Tensor, source: Tensor = source, here: Tensor = here) -> Tensor:
            return torch.where(here.reshape(*here.shape, *[1] * (x.ndim - 2)), part(x, source), x)

        with torch.no_grad():
            after = model.run_with_hooks(prompt.corrupted, fwd_hooks=patch_hooks(hook_point, new))[0]
        changes += np.subtract(prompt.measured(after)[metric], prompt.measured(prompt.before)[metric]).tolist()
    return float(np.mean(changes))


def whole(_: Tensor, source: Tensor) -> Tensor:
    return source


def of_neurons(old: Tensor, source: Tensor) -> Tensor:
    new = old.clone()
    new[..., NEURONS] = source[..., NEURONS]
    return new


def of_direction(old: Tensor, source: Tensor) -> Tensor:
    return old + sum(((source - old) @ row)[..., None] * row for row in BASIS)


def columns_of(mask: Tensor) -> dict[int, Tensor]:
    return {column: mask & (torch.arange(mask.shape[1]) == column) for column in range(mask.shape[1])}


@pytest.mark.parametrize(("metric", "name"), product(["log_prob", "logit_diff", "kl"], ["llama", "gpt2"]))
def test_every_site_and_column_equals_a_loop(models, alone, name, metric):
    model = models[name]
    sites = LAYER_SITES if metric == "log_prob" else ("resid_mid", "mlp_post")
    table = ac.patch_sites(model, ac.Pair(CLEAN, CORRUPTED, metric, "all"), sites)
    found = values_of(table, *PLACE)
    assert table.provenance.engine == "replay" and len(found) == len(sites) * 2 * 8
    for (site, layer, column), value in found.items():
        if column in (2, 4, 7):
            expected = by_hand(model, alone[name], name_of(site, layer), columns_of(CLEAN.mask)[column], whole, metric)
            assert value == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, found.values())) > 1e-2
    frame: Any = table.frame
    assert list(frame.columns[:7]) == ["site", "level", "layer", "position", "direction", "kind", "metric"]
    assert (frame["low"] <= frame["value"]).all() and (frame["value"] <= frame["high"]).all()
    reference = ac.patch_sites(
        model, ac.Pair(CLEAN, CORRUPTED, metric, "all"), sites, options=ac.RunOptions("reference", 2)
    )
    ends = ["low", "high"]  # over three prompts, corrected for skew, they magnify rounding
    frames: Any = (table.frame, reference.frame)
    pd.testing.assert_frame_equal(*(each.drop(columns=ends) for each in frames), atol=1e-5)
    pd.testing.assert_frame_equal(*(each[ends] for each in frames), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("part", "fields"), [(of_neurons, {"neurons": NEURONS}), (of_direction, {"direction": BASIS})])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_neurons_directions_and_hook_points_equal_a_loop(models, alone, name, part, fields):
    model, named = models[name], ["END", "S2"]
    sites = ["attn_out", "resid_mid", "mlp_post", "hook_embed", "blocks.1.ln1.hook_out"]
    if part is of_direction:
        sites.remove("mlp_post")  # which has another size
    table = ac.patch_sites(model, ac.Pair(CLEAN, CORRUPTED, "log_prob", "all"), sites, positions=named, **fields)
    found = values_of(table, *PLACE)
    assert len(found) == 2 * (2 * (len(sites) - 2) + 2)
    for (site, layer, position), value in found.items():
        hook_point = site if "hook" in site else name_of(site, layer)
        expected = by_hand(model, alone[name], hook_point, CLEAN.mask_of(position), part, "log_prob")
        assert value == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, found.values())) > 1e-3
    levels: Any = table.frame.set_index("site")["level"]
    assert set(levels["hook_embed"]) == {"model"} and set(levels["blocks.1.ln1.hook_out"]) == {"layer"}
    settings = table.provenance.settings
    assert settings["direction"] == "denoise"
    assert settings["neurons"] == NEURONS if part is of_neurons else len(settings["direction_digest"]) == 16


def test_positions_may_be_masks_groups_and_all(models, alone):
    model, pair = models["llama"], ac.Pair(CLEAN, CORRUPTED, "log_prob", "all")
    options: dict[str, Any] = {"sites": ["resid_post"], "layers": [0]}
    named = values_of(ac.patch_sites(model, pair, **options, positions=["END", "S2"]), *PLACE)
    masks = {name: CLEAN.mask_of(name) for name in ("END", "S2")}
    assert values_of(ac.patch_sites(model, pair, **options, positions=masks), *PLACE) == pytest.approx(named, abs=1e-6)
    whole_stream = values_of(ac.patch_sites(model, pair, **options, positions=None), *PLACE)
    assert list(whole_stream) == [("resid_post", 0, "all")]
    every_head = ac.patch_sites(model, pair, ["z"], layers=[1], positions="END")
    expected = by_hand(model, alone["llama"], "blocks.1.attn.hook_z", masks["END"], whole, "log_prob")
    assert values_of(every_head, *PLACE) == pytest.approx({("z", 1, "END"): expected}, abs=1e-5)
    heads = ac.patch_heads(model, pair, sites=["resid_post"], heads=[(0, 0)], positions=["END", "S2"])
    assert heads.frame["positions"].tolist() == ["END", "S2"]
    assert heads.frame["value"].tolist() == list(named.values())


def test_what_is_named_differently_is_refused(models, random_hf_model):
    model, pair = models["llama"], ac.Pair(CLEAN, CORRUPTED)
    for fields, message in [
        (
            {"sites": ["attention"]},
            "site='attention': choose one of resid_pre, attn_out, .* or the full name of a hook",
        ),
        ({"sites": ["ln_final.hook_norm"]}, "no hook point 'ln_final.hook_norm' .*ln_final.hook_normalized"),
        ({"sites": ["hook_pos_embed"]}, "'hook_pos_embed' never fired.* Among those that fire are .*hook_embed"),
        ({"sites": ["z"], "layers": [2]}, "no head L2H0"),
        ({"layers": [2]}, "no layer 2: this model has layers 0 to 1"),
        ({"neurons": [32]}, "no neuron 32 at 'blocks.0.hook_resid_pre': it has 32"),
        ({"positions": {"x": CLEAN.mask[:, 1:]}}, r"positions\['x'\] is torch.bool of \(3, 7\)"),
        ({"positions": []}, r"positions=\[\]: give masks .* of which these prompts have 'END', 'S2'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ac.patch_sites(model, pair, **fields)
    with pytest.raises(KeyError, match="no position 'IO' in these prompts: they have 'END', 'S2'"):
        ac.patch_sites(model, pair, positions=["IO"])
    parallel = ac.load(random_hf_model("gpt_neox"))
    for engine in ("auto", "reference"):
        with pytest.raises(ValueError, match="read the same stream, so there is none between them; take 'resid_pre'"):
            ac.patch_sites(parallel, pair, ["resid_mid"], options=ac.RunOptions(engine))
    assert len(ac.patch_sites(parallel, pair, ["mlp_post"], positions=["END"]).frame) == 2 * 2 * 2


@pytest.mark.filterwarnings("ignore")  # TransformerLens's, of hook points that only show
@pytest.mark.parametrize("kind", ["Gemma4", "OPT", "Bert"])
def test_a_layer_that_goes_on_after_its_mlp_has_no_stream_between_to_change(kind):
    """OPT-350m and BERT norm the stream there: what was added to it before and after would count twice."""
    settings: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {
        "Gemma4": {"num_key_value_heads": 2, "head_dim": 8, "vocab_size_per_layer_input": 64},
        "OPT": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
        "Bert": {"is_decoder": True},
    }[kind] | {"vocab_size": 64}
    config = getattr(transformers, {"Gemma4": "Gemma4TextConfig"}.get(kind, f"{kind}Config"))(**settings)
    with torch.random.fork_rng(devices=[]):
        hf = getattr(transformers, "BertLMHeadModel" if kind == "Bert" else f"{kind}ForCausalLM")(config).eval()
    model, pair = ac.load(hf), ac.Pair(CLEAN, CORRUPTED)
    with pytest.raises(ValueError, match=f"_mid' would reach the MLP alone: after it this {kind}"):
        ac.patch_sites(model, pair, ["resid_mid"])
    assert len(ac.patch_sites(model, pair, ["resid_pre", "attn_out"]).frame) > 0


@pytest.mark.filterwarnings("ignore:A forward hook edited")  # of TransformerLens
@pytest.mark.parametrize("how", ["patched", "ablated"])
def test_scales_of_norms_are_changed_in_prompts_of_unequal_length(random_hf_model, how):
    """Activations are divided by them at padding too."""
    model, point = ac.load(random_hf_model("llama")), "blocks.1.ln1.hook_scale"
    rng = np.random.default_rng(0)
    clean = [rng.integers(4, 60, length).tolist() for length in (8, 5, 7)]
    corrupted = [[*rng.integers(4, 60, len(ids) - 1).tolist(), ids[-1]] for ids in clean]  # with the same last target

    def effect(*rows: int) -> Any:
        of, other = (Prompts.from_tokens([texts[row] for row in rows]) for texts in (clean, corrupted))
        of, other = (each.select_targets(each.column("query_pos") == each.tokens.shape[1] - 2) for each in (of, other))
        if how == "patched":
            return ac.patch_sites(model, ac.Pair(of, other), [point], positions=None).values
        baseline = ac.ablation_baseline(model, Prompts.from_tokens(clean), hook=point)
        return ac.evaluate(model, of, metrics="log_prob", edits=[ac.Ablate(hook=point, baseline=baseline)]).values

    np.testing.assert_allclose(effect(0, 1, 2)[:1], np.concatenate([effect(row)[:1] for row in range(3)], 1), atol=1e-5)
