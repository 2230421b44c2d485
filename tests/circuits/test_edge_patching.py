"""Edges and paths beside runs that freeze everything else by hooks, one head at a time."""

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from effects_by_hand import by_edge, edges_of
from frozen import Twin, of_lengths, unchecked
from legs import slow_but
from peft import LoraConfig, get_peft_model
from refusals import refused

import align_circuits as ac
from align_circuits.circuits.pruning import prune_edges
from align_circuits.hooks.graph import Graph
from align_circuits.tables.intervals import proportion_change

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)
ARCHITECTURES = ("llama", "qwen3", "gpt2", "gpt_neox")


@pytest.fixture(scope="module")
def clean(char_tokenizer) -> ac.Prompts:
    return TASK.sample(3, char_tokenizer, seed=0)


@pytest.fixture(scope="module")
def corrupted(clean) -> ac.Prompts:
    return TASK.corrupt(clean, "query", seed=1)


@pytest.fixture(scope="module")
def noise(clean, corrupted) -> ac.Pair:
    return ac.Pair(clean, corrupted, direction="noise")


@pytest.fixture(scope="module")
def models(random_hf_model, char_tokenizer):
    return {name: ac.load(random_hf_model(name), tokenizer=char_tokenizer) for name in ARCHITECTURES}


def test_changes_of_accuracy_stay_within_their_bounds(models, noise):
    """Student's interval has length 0 where no prompt changes, as if that were certain."""
    pair = ac.Pair(noise.clean, noise.corrupted, metric="accuracy")
    for table in (
        ac.patch_edges(models["llama"], pair, edges=[("input", "logits")]),
        ac.patch_paths(models["llama"], pair, senders=["L0H0"]),
    ):
        assert table.values is not None and table.weights is not None
        low, high = proportion_change(table.values, table.weights)
        assert table.frame["low"].tolist() == pytest.approx(low) and table.frame["high"].tolist() == pytest.approx(high)
        assert (high - low > 0.1).all()


@pytest.mark.parametrize("name", slow_but(["llama", "gpt_neox"], ARCHITECTURES))
def test_edges_equal_runs_with_everything_frozen(models, name, noise, clean, corrupted):
    model = models[name]
    some = None if name == "llama" else edges_of(model)[::6]
    found = by_edge(ac.patch_edges(model, noise, edges=some))
    twin = Twin(model, clean, corrupted)
    assert found == pytest.approx({edge: twin.effect(*edge, freeze_mlps=True) for edge in found}, abs=1e-5)
    assert set(found) == set(edges_of(model) if some is None else some)
    assert sum(abs(value) > 1e-3 for value in found.values()) > 0.5 * len(found)


@pytest.mark.parametrize("name", slow_but(["gpt2", "qwen3"], ARCHITECTURES))
def test_paths_equal_runs_with_heads_frozen(models, name, noise, clean, corrupted):
    model, senders = models[name], ["input", "L0H1", "M0"]
    shared = "KV" if name in ("llama", "qwen3") else "H"
    receivers = ["L1H0.q", f"L1{shared}1.k", f"L1{shared}0.v", "M1", "logits"]
    found = by_edge(ac.patch_paths(model, noise, senders=senders, receivers=receivers))
    twin = Twin(model, clean, corrupted)
    expected = {pair: twin.effect(*pair, freeze_mlps=False) for pair in found}
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(found) == len(senders) * len(receivers)
    direct = by_edge(ac.patch_edges(model, noise, edges=found))
    if name != "gpt_neox":  # whose heads and MLP read side by side
        assert found["L0H1", "logits"] != pytest.approx(direct["L0H1", "logits"], abs=1e-3), "an MLP lies between"
    assert found["M0", "L1H0.q"] == pytest.approx(direct["M0", "L1H0.q"], abs=1e-5), "none lies between"


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.parametrize("lengths", [(9, 6, 11), (8, 8, 8)], ids=["padded", "double"])
def test_on_padded_prompts_and_in_double_precision(random_hf_model, lengths):
    """Apart: on padded prompts in double precision the bridge's own attention is NaN."""
    double = len(set(lengths)) == 1
    model = ac.load(random_hf_model("llama", seed=3).to(torch.float64 if double else torch.float32))
    run, other = of_lengths(lengths, 0), of_lengths(lengths, 1)
    noise, batches = ac.Pair(run, other, direction="noise"), ac.RunOptions(batch_size=2)
    exact: Any = {"abs": 1e-10 if double else 1e-5}
    some = [("input", "L0KV1.v"), ("M0", "L1H3.q"), ("L0H2", "L1KV0.k"), ("L1H1", "M1"), ("L0H0", "logits")]
    edges = by_edge(ac.patch_edges(model, noise, edges=some, options=batches))
    twin = Twin(model, run, other)
    assert edges == pytest.approx({edge: twin.effect(*edge, freeze_mlps=True) for edge in edges}, **exact)
    receivers, senders = ["L1H3.q", "L1KV0.k", "L1KV1.v", "M1", "logits"], ["L0H0", "L0H3", "L1H0"]
    paths = by_edge(ac.patch_paths(model, noise, senders=senders, receivers=receivers, options=batches))
    expected = {pair: twin.effect(*pair, freeze_mlps=False) for pair in paths}
    assert paths == pytest.approx(expected, **exact)
    assert ("L1H0", "L1H3.q") not in paths and ("L1H0", "M1") in paths


def test_directions_engines_and_batches(models, clean, corrupted):
    model, edges = models["llama"], [("L0H1", "L1H2.q"), ("input", "L1KV1.v"), ("M0", "logits")]
    for verb, options in ((ac.patch_edges, {"edges": edges}), (ac.patch_paths, {"receivers": ["L1H2.q", "logits"]})):
        table = verb(model, ac.Pair(clean, corrupted), **options)  # pyright: ignore[reportArgumentType]
        assert table.provenance.engine == "fast" and table.provenance.settings["direction"] == "denoise"
        twin = Twin(model, corrupted, clean)
        for edge, value in by_edge(table).items():
            assert value == pytest.approx(twin.effect(*edge, freeze_mlps=verb is ac.patch_edges), abs=1e-5)
        others = [ac.RunOptions(engine="reference"), ac.RunOptions(batch_size=2)]
        for other in others:
            again = verb(model, ac.Pair(clean, corrupted), **options, options=other)  # pyright: ignore[reportArgumentType]
            assert by_edge(again) == pytest.approx(by_edge(table), abs=1e-5)


def test_refusals(models, random_hf_model, noise, clean, corrupted):
    model: Any = models["llama"]
    pair: Any = {"clean": clean, "corrupted": corrupted}
    for edges, message in (
        ([("L0H9", "logits")], "no sender 'L0H9' in this model: it has input, L0H0"),
        ([("L0H1", "L1H0.k")], r"no receiver 'L1H0\.k'"),
        ([("L1H0", "L1H2.q")], r"no edge from L1H0 to L1H2\.q: L1H2\.q reads before"),
        ([], "no edges: name at least one"),
    ):
        with pytest.raises(KeyError if message.startswith(("no sender", "no rec")) else ValueError, match=message):
            ac.patch_edges(model, noise, edges=edges)
    with pytest.raises(ValueError, match=r"\['L0H1'\] is no sender: give names or heads, such as"):
        inspect.unwrap(Graph.sender)(Graph.of(model.cfg), ["L0H1"])  # without the checks of annotations
    refused("none of the receivers comes after", ac.patch_paths, model, noise, senders=["M1"], receivers=["L1H2.q"])
    for wrong, message in (
        ({"metric": "loss"}, "metric='loss': choose one of 'accuracy', 'choice_accuracy', 'log_prob', 'logit', 'prob'"),
        ({"direction": "up"}, "direction='up': choose 'noise'"),
    ):
        refused(message, unchecked, ac.Pair, **pair, **wrong)
    refused("no targets of kind 'later': these prompts have 'all', 'first'", ac.Pair, **pair, kind="later")
    gemma2, olmo2 = (ac.load(random_hf_model(name), tokenizer=None) for name in ("gemma2", "olmo2"))
    refused("norms what its attention or its MLP adds", ac.patch_edges, gemma2, noise)
    for receiver, normed_together in (("L1H2.q", "queries"), ("L1KV0.k", "keys")):
        message = f"layer 1 norms the {normed_together} of all its heads together"
        refused(message, ac.patch_paths, olmo2, noise, receivers=[receiver, "logits"])
    assert len(ac.patch_paths(olmo2, noise, senders=["M0"], receivers=["L1KV0.v", "M1"])) == 2


def adapted(model: Any, targets: str) -> Any:
    """A model with LoRA that changes what it computes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    return made


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # inside peft 0.21
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # of GPT-2, where peft corrects it
@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", r".*(q|v|o|down)_proj"), pytest.param("gpt2", r".*(attn|mlp)\.c_proj", marks=pytest.mark.slow)],
)
def test_edges_of_a_model_with_an_adapter_are_those_of_the_merged_model(random_hf_model, noise, name, targets):
    whole, merged = (adapted(copy.deepcopy(random_hf_model(name)), targets) for _ in range(2))
    model, expected = ac.load(whole), ac.load(merged.merge_and_unload())
    before = {name: (value, value.clone()) for name, value in whole.named_parameters()}
    provenance = ac.evaluate(model, noise.clean).provenance.model
    for verb in (ac.patch_edges, ac.attribute_edges, partial(prune_edges, cut=1e-3)):
        found, wanted = (verb(of, noise) for of in (model, expected))
        assert by_edge(found) == pytest.approx(by_edge(wanted), abs=1e-5)
        assert found.provenance.model == provenance
    direct = [ac.direct_logit_attribution(of, noise.clean).frame["value"] for of in (model, expected)]
    assert direct[0].tolist() == pytest.approx(direct[1].tolist(), abs=1e-5)
    assert not any(getattr(layer, "merged", False) for layer in whole.modules())
    for name, value in whole.named_parameters():
        assert value is before[name][0] and torch.equal(value, before[name][1])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # inside peft 0.21
def test_an_adapter_that_merging_would_round_is_refused(random_hf_model, noise):
    """In bfloat16 it would pass for rounding."""
    base = copy.deepcopy(random_hf_model("llama")).bfloat16()
    refused(
        r"q_proj.* carries an adapter, .* merge it first",
        ac.patch_edges,
        ac.load(adapted(base, ".*(q_proj|v_proj)")),
        noise,
    )
