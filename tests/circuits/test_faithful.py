"""Circuits: exact at both ends, monotone where they should be, and equal to runs that hooks freeze by hand."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.circuits.edge_attribution import attribute_edges
from align_circuits.circuits.faithful import (
    FRACTIONS,
    _drawn,
    circuit_model_distance,
    circuit_performance_ratio,
    completeness,
    faithfulness,
    minimality,
)
from align_circuits.hooks.graph import Graph
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables import intervals as stats
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)


@pytest.fixture(scope="module")
def pair(char_tokenizer):
    clean = TASK.sample(3, char_tokenizer, seed=0)
    return {"clean": clean, "corrupted": TASK.corrupt(clean, "query", seed=1)}


@pytest.fixture
def noise(pair) -> ac.Pair:
    return ac.Pair(**pair, direction="noise")


def test_ends_are_exact_and_the_rest_is_what_frozen_runs_say(llama, pair, noise):
    """With one edge patched, and with all of the embedding's edges patched, a run says what hooks by hand say."""
    scores = attribute_edges(llama, noise, method="eap")
    curve = faithfulness(llama, noise, scores, heads={"all heads": [(i, j) for i in range(2) for j in range(4)]})
    log_probs: Any = curve.where(metric="log_prob").frame.set_index(["circuit", "edges"])["value"]
    ends = {name: float(TargetMetrics.of(pair[name]).measure(llama)[0].mean()) for name in ("clean", "corrupted")}
    n = int(Graph.of(llama.cfg).edges.sum())
    assert log_probs["edges", n] == pytest.approx(ends["clean"], abs=1e-5)
    assert log_probs["edges", 0] == pytest.approx(ends["corrupted"], abs=1e-5)
    assert log_probs["all heads", n] == pytest.approx(ends["clean"], abs=1e-5)
    f: Any = curve.where(metric="faithfulness", circuit="edges").frame.set_index("edges")["value"]
    assert (f[0], f[n]) == (0, 1)
    assert sorted(f.index.unique()) == sorted({0, *(round(share * n) for share in FRACTIONS)})
    middle = round(0.5 * n)
    expected = (log_probs["edges", middle] - ends["corrupted"]) / (ends["clean"] - ends["corrupted"])
    assert f[middle] == pytest.approx(expected, abs=1e-3)
    kept: Any = scores.frame.nsmallest(round(0.2 * n), "value")
    frozen = circuit_by_hand(llama, pair, set(zip(kept["sender"], kept["receiver"], strict=True)))
    assert log_probs["edges", round(0.2 * n)] == pytest.approx(frozen, abs=1e-5)


def circuit_by_hand(model: Any, pair: dict[str, ac.Prompts], kept: set[tuple[str, str]]) -> float:
    """Every receiver in turn reads the sum of its senders' outputs, by Hugging Face's own modules."""
    _, corrupted = model.run_with_cache(pair["corrupted"].tokens)
    layers, tokens = model.original_model.model.layers, pair["clean"].tokens
    cos, sin = (corrupted[f"rotary_emb.hook_{part}"] for part in ("cos", "sin"))

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [prompt pos head d_head]
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos[:, :, None] + turned * sin[:, :, None]

    outputs, other = (
        {"input": model.original_model.model.embed_tokens(tokens)},
        {"input": corrupted["blocks.0.hook_resid_pre"]},
    )

    def reads(receiver: str) -> torch.Tensor:
        return sum(outputs[name] if (name, receiver) in kept else other[name] for name in outputs)  # pyright: ignore[reportReturnType]

    with torch.no_grad():
        for number, layer in enumerate(layers):
            weights = {
                site: getattr(layer.self_attn, f"{site}_proj").weight.view(-1, 8, 32) for site in ("q", "k", "v")
            }
            out = layer.self_attn.o_proj.weight.view(32, 4, 8)
            new = {}
            for head in range(4):
                names = [f"L{number}H{head}.q", f"L{number}KV{head // 2}.k", f"L{number}KV{head // 2}.v"]
                q, k, v = (
                    layer.input_layernorm(reads(name)) @ weights[name[-1]][head // (1 if name[-1] == "q" else 2)].T
                    for name in names
                )
                q, k = (rotated(x[:, :, None])[:, :, 0] for x in (q, k))
                scores = q @ k.transpose(1, 2) / 8**0.5
                scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
                new[f"L{number}H{head}"] = scores.softmax(-1) @ v @ out[:, head].T
                z = corrupted[f"blocks.{number}.attn.hook_z"][:, :, head]
                other[f"L{number}H{head}"] = z @ out[:, head].T
            outputs |= new
            outputs[f"M{number}"] = layer.mlp(layer.post_attention_layernorm(reads(f"M{number}")))
            other[f"M{number}"] = corrupted[f"blocks.{number}.hook_mlp_out"]
        logits = model.original_model.lm_head(model.original_model.model.norm(reads("logits")))
    clean = pair["clean"]
    prompt, query, token = (clean.column(name) for name in ("prompt", "query_pos", "token"))
    return float(logits[prompt, query].log_softmax(-1).gather(1, token[:, None]).mean())


def test_a_planted_circuit_is_all_there_is(char_tokenizer):
    """On prompts that differ in the test input: aligners and lookup heads restore all, and none of them is idle."""
    model = ac.planted_circuit(TASK, seed=0)
    clean = TASK.sample(3, char_tokenizer, seed=0)
    pair: Any = {"clean": clean, "corrupted": TASK.corrupt(clean, "query", seed=1)}
    noise = ac.Pair(**pair, direction="noise")
    places = {kind: place for place, kind in model.kinds.items()}
    true = [places[kind] for kind in ("align_query", "align_key", "lookup", "backup")]
    idle = [*true, places["gold_without_output"]]
    scores = attribute_edges(model, noise)
    curve = faithfulness(model, noise, scores, fractions=(0.002, 0.01), heads={"true": true, "without": true[1:]})
    f: Any = curve.where(metric="faithfulness").frame.set_index(["circuit", "edges"])["value"]
    n = int(f["edges"].index.max())
    assert f["true"].iloc[0] == pytest.approx(1, abs=0.02)
    assert f["without"].iloc[0] < 0.2
    assert f["edges", round(0.01 * n)] == pytest.approx(1, abs=0.05), "eleven edges of a thousand are enough"
    whole = completeness(model, true, noise, draws=2)
    assert np.abs(whole.where(of="difference").frame["value"]).max() < 0.05
    assert np.min(whole.where(of="model").frame["value"]) < -0.5
    needed: Any = minimality(model, idle, noise, draws=2).frame.set_index(["layer", "head"])["value"]
    assert (needed[true] < -0.01).all()
    assert needed[idle[-1]] == pytest.approx(0, abs=1e-5)


def test_random_sets_of_heads_lose_each_with_probability_one_half():
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    drawn = _drawn(heads, 1000, seed=0)
    assert len(drawn) == 1000 and len(set(drawn)) > 200 and drawn == _drawn(heads, 1000, seed=0)
    shares = np.mean([[head in lost for head in heads] for lost in drawn], axis=0)
    assert np.abs(shares - 0.5).max() < 0.06, "nearly four standard errors"


def test_sets_of_heads_that_are_taken_away_have_names(llama, noise):
    """Without random ones: nothing, each head, and all."""
    lost = completeness(llama, ["L0H1", "L1H2"], noise, draws=0).where(of="circuit").frame
    assert list(lost["without"]) == ["nothing", "L0H1", "L1H2", "L0H1 L1H2"]
    assert list(minimality(llama, ["L0H1", "L1H2"], noise, draws=0).frame["without"]) == ["nothing"] * 2


def test_circuits_do_not_depend_on_the_direction_of_the_pair(llama, pair):
    noise, denoise = (ac.Pair(**pair, direction=direction) for direction in ("noise", "denoise"))
    expected = completeness(llama, ["L0H1"], noise, draws=0).frame
    pd.testing.assert_frame_equal(completeness(llama, ["L0H1"], denoise, draws=0).frame, expected)


def test_shares_of_circuits_stay_within_their_bounds(llama, noise):
    pair = replace(noise, metric="accuracy")
    lost = completeness(llama, ["L0H1"], pair, draws=0)
    assert lost.values is not None and lost.weights is not None
    changes = (lost.frame["of"] == "difference").to_numpy()
    for rows, interval in ((~changes, stats.proportion), (changes, stats.proportion_change)):
        ends = np.stack(interval(lost.values[rows], lost.weights[rows]), 1)
        np.testing.assert_array_equal(lost.frame.loc[rows, ["low", "high"]].to_numpy(), ends)
    needed = minimality(llama, ["L0H1"], pair, draws=0)
    assert needed.values is not None and needed.weights is not None
    np.testing.assert_array_equal(needed.frame["low"], stats.proportion_change(needed.values, needed.weights)[0])


def curve_of(fractions: list[float], values: list[float]) -> Table:
    frame = pd.DataFrame({"circuit": "edges", "fraction": fractions, "edges": [round(100 * x) for x in fractions]})
    frame = frame.assign(metric="faithfulness", value=values, low=0.0, high=1.0, n=1)
    return Table(frame, Provenance("test"))


def test_a_folder_of_results_knows_its_circuits(llama, noise, tmp_path):
    kept = ac.RunOptions(cache_dir=tmp_path)
    scores = attribute_edges(llama, noise, method="eap")
    faithfulness(llama, noise, scores, fractions=[0.1], options=kept)
    of_others, alone = (
        faithfulness(llama, noise, scores, fractions=[0.5], options=options).frame["value"]
        for options in (kept, ac.RunOptions())
    )
    np.testing.assert_allclose(of_others, alone, atol=1e-6)


def test_edges_that_raise_a_divergence_most_are_kept_first(llama, noise):
    scores = attribute_edges(llama, noise)
    frame: Any = scores.frame
    as_kl = Table(frame.assign(metric="kl", value=-frame["value"]), scores.provenance)
    first, second = (faithfulness(llama, noise, given, fractions=[0.2]).frame for given in (scores, as_kl))
    np.testing.assert_array_equal(first["value"], second["value"])


def test_areas_by_hand():
    curve = curve_of([0.0, 0.1, 0.5, 1.0], [9.0, 0.0, 2.0, 1.0])
    assert circuit_performance_ratio(curve) == pytest.approx(0.4 * 1 + 0.5 * 1.5)
    assert circuit_model_distance(curve) == pytest.approx(0.4 * 1 + 0.5 * 0.5)
    two = Table.concat({"one": curve, "other": curve}, key="method")
    refused(r"several curves, told apart by method: choose one with \.where\(method=", circuit_model_distance, two)
    assert circuit_model_distance(two.where(method="one")) == circuit_model_distance(curve)
    for fractions in ([0.0, 1.0], [0.0, 0.5, 0.5]):
        refused(
            "an area takes two sizes or more, and each once",
            circuit_performance_ratio,
            curve_of(fractions, [1.0] * len(fractions)),
        )
    perfect = curve_of([0.01, 1.0], [1.0, 1.0])
    assert (circuit_performance_ratio(perfect), circuit_model_distance(perfect)) == (pytest.approx(0.99), 0)


def test_the_interval_of_a_ratio_is_that_of_means():
    rng = np.random.default_rng(0)
    below = rng.normal(2, 0.3, 200)
    above = 0.5 * below + rng.normal(0, 0.3, (1, 200))
    value, low, high = stats.ratio(above, below, np.ones(200))
    assert value[0] == pytest.approx(above.mean() / below.mean())
    error = (above[0] - value[0] * below).std() / below.mean() / 200**0.5  # the delta method
    assert high[0] - low[0] == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_refusals(llama, pair, noise):
    scores = attribute_edges(llama, noise, method="eap")
    scores_of_patches = ac.patch_edges(llama, noise)
    for options, message in (
        ({"fractions": (0.0,)}, r"fractions=\(0\.0,\): give shares"),
        ({"fractions": (0.5, 1.5)}, r"fractions=\(0\.5, 1\.5\): give shares"),
        ({"by": "size"}, "by='size': choose 'signed' or 'absolute'"),
        ({"scores": replace(scores, frame=scores.frame[:5], values=None)}, "5 scores, but the model has 82 edges"),
        ({"heads": {"wrong": [(7, 0)]}}, "no head L7H0"),
        ({"heads": {"edges": [(0, 0)]}}, "heads: 'edges' is what circuits chosen by scores are called"),
        ({"scores": scores_of_patches.normalized(), "by": "absolute"}, r"these scores are normalized\(\)"),
        ({"scores": replace(scores, frame=scores.frame.iloc[[0, *range(81)]])}, "has two scores: give one an edge"),
        ({"scores": replace(scores, frame=scores.frame.assign(value=np.nan))}, "82 of 82 scores are NaN"),
    ):
        given = {"scores": scores, "pair": noise, **options}
        refused(message, inspect.unwrap(faithfulness), llama, **given)  # annotations unchecked
    same = ac.Pair(pair["clean"], pair["clean"], direction="noise")
    refused("change no prediction of the model", faithfulness, llama, same, scores)
    other_way = attribute_edges(llama, ac.Pair(**pair), method="eap")
    message = "of direction 'denoise', where an edge that is needed lies above zero"
    refused(message, faithfulness, llama, noise, other_way, by="signed")
    frame: Any = other_way.frame
    joined = Table.concat([Table(frame[some], other_way.provenance) for some in (slice(40), slice(40, None))])
    refused("of direction 'denoise'", faithfulness, llama, noise, joined, by="signed")
    assert len(faithfulness(llama, noise, other_way, by="absolute"))
    for verb in (completeness, minimality):
        assert inspect.signature(verb).parameters["draws"].default == 10
        refused("no heads: a circuit needs at least one", verb, llama, [], noise)
        refused("draws=-1: give how many random sets", verb, llama, [(0, 0)], noise, draws=-1)
