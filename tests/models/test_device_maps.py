"""Models whose layers are on several devices, or kept on disk until they run: the same numbers as in one place.

`on_a_gpu.py` has those that are split over two GPUs.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from legs import product
from refusals import refused

import align_circuits as ac
from align_circuits.circuits.faithful import completeness
from align_circuits.models.parameters import parameters_of

TASK = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=2)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, random_hf_model, char_tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    random_hf_model(request.param).save_pretrained(place)
    char_tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def models(folder):
    """The same model in memory, and with its last layer, norm and unembedding on disk."""
    return ac.load(folder, device="cpu"), ac.load(folder, device_map=device_map_of(folder))


def device_map_of(folder: Path) -> dict[str, str]:
    llama = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    gpt2 = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.h.0": "cpu", "transformer.h.1": "disk"}
    if folder.name.startswith("llama"):
        return llama | {"model.norm": "disk", "lm_head": "disk"}
    return gpt2 | {"transformer.ln_f": "disk", "lm_head": "cpu"}


def pair(model: Any, kind: Any = "query", **how: Any) -> ac.Pair:
    prompts = TASK.sample(4, model.tokenizer, seed=0)
    return ac.Pair(prompts, TASK.corrupt(prompts, kind, seed=1), **how)


VERBS: dict[str, Any] = {
    "score": lambda model: ac.score_heads(model, pair(model).clean),
    "score by hooks": lambda model: ac.score_heads(model, pair(model).clean, options=ac.RunOptions(engine="reference")),
    "evaluate": lambda model: ac.evaluate(model, pair(model).clean, edits=[ac.Clamp([(1, 1)], "lookup")]),
    "patch": lambda model: ac.patch_heads(model, pair(model)),
    "ablate": lambda model: ac.ablate_heads(model, pair(model).clean, "mean"),
    "attribute heads": lambda model: ac.attribute_heads(model, pair(model, direction="noise")),
    "attribute edges": lambda model: ac.attribute_edges(model, pair(model, direction="noise"), method="eap"),
    "patch edges": lambda model: ac.patch_edges(model, pair(model), edges=[("L0H1", "L1H2.q"), ("M0", "logits")]),
    "direct logits": lambda model: ac.direct_logit_attribution(model, pair(model).clean),
    "patch sites": lambda model: ac.patch_sites(model, pair(model), ["resid_pre", "mlp_out"], positions=None),
    "patch paths": lambda model: ac.patch_paths(model, pair(model), receivers=["L1H0.q", "logits"]),
    "interchange": lambda model: ac.interchange_accuracy(model, pair(model), sets={"two": [(0, 1), (1, 2)]}),
    "attribute queries": lambda model: ac.attribute_heads(model, pair(model), method="atp_star", sites=["q"]),
    "head profile": lambda model: ac.head_profile(model, pair(model).clean, [pair(model, "labels")]),
    "completeness": lambda model: completeness(model, [(0, 1)], pair(model, direction="noise"), draws=1),
    "localize": lambda model: ac.localize(model, TASK, 8, n_controls=1).table,
}


@pytest.mark.parametrize(("verb", "folder"), product(VERBS, ["llama", "gpt2"]), indirect=["folder"])
def test_a_layer_on_disk_changes_no_number(models, verb):
    whole, offloaded = (VERBS[verb](model) for model in models)
    assert whole.provenance.engine == offloaded.provenance.engine
    assert whole.provenance.model["weights"] == offloaded.provenance.model["weights"]
    ends = ["low", "high"]  # over four prompts corrections for skew magnify rounding many times
    one, other = (table.frame.drop(columns=ends) for table in (whole, offloaded))
    pd.testing.assert_frame_equal(one, other, atol=1e-5, rtol=1e-5)


def test_weights_on_disk_are_read_when_they_are_needed_and_removed_with_the_model(folder):
    offloaded = ac.load(folder, device_map=device_map_of(folder))
    inside = dict(offloaded.original_model.named_parameters())
    assert {value.is_meta for value in inside.values()} == {True, False}
    for name, value in parameters_of(ac.load(folder, device="cpu")):
        torch.testing.assert_close(dict(parameters_of(offloaded))[name], value, atol=0, rtol=0)
    assert {value.is_meta for value in dict(offloaded.original_model.named_parameters()).values()} == {True, False}


def test_what_cannot_be_spread_is_refused(folder, models, monkeypatch):
    good = device_map_of(folder)
    first = next(iter(good))
    gone = {name: place for name, place in good.items() if name != first}
    for device_map, message in (
        ("fastest", "device_map='fastest': give 'auto', 'balanced'"),
        ({"model.layers.70": 0}, "names 'model.layers.70', which is no module of a"),
        (good | {first: 3}, f"puts '{first}' on 3, but PyTorch finds 0 GPUs"),
        (good | {first: "attic"}, f"puts '{first}' on 'attic'"),
        (gone, f"has no place for '{first}.weight' and 0 other tensors"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        refused(message.replace("[", r"\["), ac.load, folder, device_map=device_map)
    refused("device='cpu' and a device_map: give one of them", ac.load, folder, device="cpu", device_map="auto")
    refused("a model in memory stays as it is", ac.load, models[0], device_map="auto")
    refused("tune takes a model on one device", ac.tune, models[1], TASK)
