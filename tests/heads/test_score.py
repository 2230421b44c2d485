"""Scores of heads beside loops over TransformerLens's cached patterns, and beside its own head detector."""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformer_lens.head_detector import detect_head

import align_circuits as ac
from align_circuits.heads import score as scoring
from align_circuits.heads.attention_metrics import TIE
from align_circuits.prompts import relations as rel
from align_circuits.prompts.prompts import TokenKind

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=3)
SHARP = 0.6
"""The spread of random weights; at the usual 0.02 attention is uniform and most mistakes would not show."""


@pytest.fixture(scope="module")
def models(random_hf_model, char_tokenizer):
    """The planted circuit, a GPT-2 and a grouped-query Llama with random weights."""
    gpt2 = random_hf_model("gpt2", initializer_range=SHARP)
    llama = random_hf_model("llama", initializer_range=SHARP, num_hidden_layers=3)
    return {
        "planted": ac.planted_circuit(TASK, seed=0),
        "gpt2": ac.load(gpt2, tokenizer=char_tokenizer),
        "llama": ac.load(llama, tokenizer=char_tokenizer),
    }


@pytest.fixture(scope="module")
def prompts(char_tokenizer) -> ac.Prompts:
    return TASK.sample(5, char_tokenizer, seed=0)


RUNS = [("planted", "reference"), *((name, engine) for name in ("gpt2", "llama") for engine in ("fast", "reference"))]


def patterns(model, prompts: ac.Prompts) -> list[dict[int, torch.Tensor]]:
    """Each prompt's attention [head query key] by layer, run alone and without padding."""
    found = []
    for tokens, mask in zip(prompts.tokens, prompts.mask, strict=True):
        _, cache = model.run_with_cache(tokens[mask][None], names_filter=lambda name: name.endswith("hook_pattern"))
        found.append({layer: cache["pattern", layer][0].detach().double() for layer in range(model.cfg.n_layers)})
    return found


def looped(
    attention_of: list[dict[int, torch.Tensor]], prompts: ac.Prompts, relation: rel.Relation
) -> dict[str, dict[tuple[int, int], float]]:
    """A relation's measures from their definitions, by measure, then by layer and head."""
    rows = defaultdict(list)
    for index, by_layer in enumerate(attention_of):
        left = int((~prompts.mask[index]).sum())
        candidate_label, key_label = relation.candidate_label[index].tolist(), relation.key_label[index].tolist()
        for row in (relation.prompt == index).nonzero()[:, 0].tolist():
            query, key_value, among = (
                int(part[row]) for part in (relation.query, relation.key_value, relation.candidate_value)
            )
            candidates = [p for p in range(left, query + 1) if candidate_label[p] == among]
            keys = [p for p in candidates if key_label[p] == key_value]
            keys = [p for p in keys if p < query] if relation.keys_before_query else keys
            for layer, pattern in by_layer.items():
                for head in [*range(len(pattern)), None]:
                    attention = pattern.mean(0) if head is None else pattern[head]
                    row_of_attention = attention[query - left].tolist()
                    attends = {p: row_of_attention[p - left] for p in candidates}
                    rows[layer, head].append(
                        (index, sum(attends[p] for p in keys), sum(attends.values()), attends, keys)
                    )
    hit, mass, attention_on, mean = {}, {}, {}, {}
    for place, found in rows.items():
        hits = []
        for _, _, whole, attends, keys in found:
            best = [p for p in attends if attends[p] >= max(attends.values()) * (1 - TIE)]
            hits.append(sum(p in keys for p in best) / len(best) if whole > 0 else 0)
        ratios = [part / whole for _, part, whole, _, _ in found if whole > 0]
        hit[place] = np.mean(hits)
        of_prompts = []  # each prompt's ratio of sums, once for each of its rows with any attention to candidates
        for index in {index for index, *_ in found}:
            own = [(part, whole) for at, part, whole, _, _ in found if at == index and whole > 0]
            of_prompts += len(own) * [sum(part for part, _ in own) / sum(whole for _, whole in own)] if own else []
        mass[place] = np.mean(of_prompts) if of_prompts else math.nan
        attention_on[place] = np.mean([part for _, part, _, _, _ in found])
        mean[place] = np.mean(ratios) if ratios else math.nan
    return {"hit": hit, "mass": mass, "attention": attention_on, "mean": mean}


def frame_of(table: ac.Table, **keys) -> Any:  # pandas' own annotations take every comparison for a Series
    return table.where(**keys).frame


def values(table: ac.Table, metric: str) -> dict[Any, float]:
    frame = frame_of(table, metric=metric)
    heads = [None if pd.isna(head) else head for head in frame["head"]]
    return dict(zip(zip(frame["layer"], heads, strict=True), frame["value"], strict=True))


@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_every_relation_equals_loops_over_the_cache(models, prompts, name, engine):
    model = models[name]
    suffixes = ("", "_hit", "_mass", "_attention", "_mean")
    metrics = [f"{relation}{suffix}" for relation in prompts.relations for suffix in suffixes]
    table = ac.score_heads(model, prompts, metrics, options=ac.RunOptions(engine=engine))
    assert table.provenance.engine == engine
    assert len(table) == len(metrics) * model.cfg.n_layers * (model.cfg.n_heads + 1)
    attention_of = patterns(model, prompts)
    for relation in prompts.relations:
        expected = looped(attention_of, prompts, prompts.relations[relation])
        for measure in ("hit", "mass", "attention", "mean"):
            assert values(table, f"{relation}_{measure}") == pytest.approx(expected[measure], abs=1e-5, nan_ok=True)
        standard = "hit" if relation.startswith("align") else "mass"
        assert values(table, relation) == pytest.approx(expected[standard], abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_sink_and_entropy_equal_loops_over_the_cache(models, name, engine):
    model = models[name]
    tokens = [[1, 20, 21, 22, 20], [1, 30, 31]]
    prompts = ac.Prompts.from_tokens(tokens if name != "planted" else tokens[:1])
    table = ac.score_heads(model, prompts, ["sink", "entropy"], options=ac.RunOptions(engine=engine))
    attention_of = patterns(model, prompts)
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            sink, entropy = [], []
            for pattern, row in zip(attention_of, tokens, strict=False):
                for query in range(1, len(row) - 1):  # the last token predicts nothing, the first attends to itself
                    attention = pattern[layer][head, query, : query + 1]
                    sink.append(attention[0].item())
                    entropy.append(-sum(p * math.log(p) for p in attention.tolist() if p > 0))
            assert values(table, "sink")[layer, head] == pytest.approx(np.mean(sink), abs=1e-5)
            assert values(table, "entropy")[layer, head] == pytest.approx(np.mean(entropy), abs=1e-5)


@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_equal_to_the_head_detector_of_transformer_lens(models, char_tokenizer, name, engine):
    """The detector averages over all positions; ours leaves out those without a key, whose score is 0."""
    model, text = models[name], "ABCab|ABCab|BACba"
    tokens = model.to_tokens(text)[0].tolist()
    assert tokens == char_tokenizer(text)["input_ids"]
    asking_everywhere = [*tokens, 0]  # the last token asks nothing, so one more is put behind
    table = ac.score_heads(model, ac.Prompts.from_tokens([asking_everywhere]), options=ac.RunOptions(engine=engine))
    for metric in ("previous", "duplicate", "induction"):
        detected = detect_head(model, text, f"{metric}_token_head" if metric != "induction" else "induction_head")  # pyright: ignore[reportArgumentType]
        rows = table.where(metric=metric).frame["n"].iloc[0]
        assert 0 < rows < len(tokens)
        assert detected.max() > 0.01
        np.testing.assert_allclose(table.to_array(metric) * rows / len(tokens), detected, atol=1e-5)


def test_planted_heads_are_found(models, prompts):
    model = models["planted"]
    table = ac.score_heads(model, prompts)
    for metric in ("align_query", "align_key", "lookup"):
        frame = frame_of(table.top(metric, 1))
        place = int(frame["layer"][0]), int(frame["head"][0])
        assert model.kinds[place] in (metric, "gold_without_output", "backup", "diffuse")
        assert frame["value"][0] > 0.95
    assert set(table.frame["metric"]) == {*prompts.relations, "lookup_mean", "sink", "entropy"}
    assert table.provenance.data["digest"] == prompts.digest
    assert table.provenance.settings["metrics"][-1] == "entropy"


def test_a_layer_without_attention_is_told(prompts):
    metrics: Any = {"lookup": (prompts.relations["lookup"], print)}
    accumulator = scoring.ScoreAccumulator(metrics, layers=3, heads=2, prompts=len(prompts))
    for seen, layer in (([], 0), ([0, 2], 1)):
        accumulator.seen[seen] = True
        with pytest.raises(RuntimeError, match=f"the engine gave no attention for layer {layer}: "):
            accumulator.measured()


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_batches_and_chunks_of_rows_change_nothing(models, prompts, engine, monkeypatch):
    whole = ac.score_heads(models["llama"], prompts, options=ac.RunOptions(engine=engine, batch_size=5))
    monkeypatch.setattr(scoring, "_NUMBERS_AT_ONCE", 4000)
    chunked = ac.score_heads(models["llama"], prompts, options=ac.RunOptions(engine=engine, batch_size=2))
    columns = ["value", "low", "high", "n"]
    np.testing.assert_allclose(whole.frame[columns], chunked.frame[columns], atol=1e-6)


@pytest.mark.parametrize(("at_once", "sizes"), [(3, [1] * 5), (2 * 4 * 9, [2, 2, 1]), (5 * 4 * 9, [5])])
def test_no_chunk_of_rows_holds_more_attention_than_allowed(at_once, sizes, monkeypatch):
    """Unless a single row does."""
    monkeypatch.setattr(scoring, "_NUMBERS_AT_ONCE", at_once)
    prompts = ac.Prompts.from_tokens([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    metrics = scoring.resolve(prompts, ["sink"])
    accumulator = scoring.ScoreAccumulator(metrics, layers=1, heads=4, prompts=1)
    chunks = list(accumulator._chunks(torch.arange(5), torch.ones(5, 4, 9)))
    assert [len(part) for _, part in chunks] == [len(chunk.rows) for chunk, _ in chunks] == sizes


def test_masks_have_two_columns_for_each_entry_of_a_row():
    prompts = ac.Prompts.from_tokens([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    own = rel.Relation.from_pairs([(0, 4, [key]) for key in range(3)] + [(0, 5, [1])], prompts=prompts)
    metrics = scoring.resolve(prompts.with_relations(own=own), ["own", "sink"])
    accumulator = scoring.ScoreAccumulator(metrics, layers=1, heads=1, prompts=1)
    rows = torch.tensor([row for row, query in enumerate(accumulator.query.tolist()) if query in (4, 5)])
    assert accumulator._chunk(rows, torch.ones(2, 1, 9)).masks.shape == (2, 9, 2 * 3 + 2 * 1)


def test_padding_changes_nothing(models):
    rows = [[1, 20, 21, 20, 21, 22, 20], [1, 30, 30, 31]]
    together = ac.score_heads(models["llama"], ac.Prompts.from_tokens(rows))
    assert together.values is not None
    for index, row in enumerate(rows):
        alone = ac.score_heads(models["llama"], ac.Prompts.from_tokens([row]))
        assert alone.values is not None
        np.testing.assert_allclose(together.values[:, index], alone.values[:, 0], atol=1e-5)


def test_a_row_that_comes_twice_counts_once(models, prompts, monkeypatch):
    """As after an out-of-memory, when a batch that was half through comes again in two parts."""
    once = ac.score_heads(models["llama"], prompts)
    real = scoring.forward

    def twice(*args, on_pattern, **kwargs):
        def stutter(rows, layer, pattern):
            half = len(rows) // 2
            on_pattern(rows[:half], layer, pattern[:half])
            on_pattern(rows, layer, pattern)

        return real(*args, on_pattern=stutter, **kwargs)

    monkeypatch.setattr(scoring, "forward", twice)
    again = ac.score_heads(models["llama"], prompts)
    np.testing.assert_allclose(again.frame["value"], once.frame["value"], atol=1e-12)
    assert again.frame["n"].tolist() == once.frame["n"].tolist()


def test_n_counts_targets_and_the_interval_holds_the_value(models, prompts):
    table = ac.score_heads(models["gpt2"], prompts)
    frame = frame_of(table)[table.frame["n"] > 0]
    for metric, rows in frame.groupby("metric"):
        if metric in prompts.relations:
            assert set(rows["n"]) == {len(prompts.relations[str(metric)])}
    assert (frame["low"] <= frame["value"] + 1e-9).all()
    assert (frame["value"] <= frame["high"] + 1e-9).all()


def test_lookup_counts_prompts_by_targets_and_not_by_attention(models, prompts):
    """The interval and the value see the same weights."""
    table = ac.score_heads(models["gpt2"], prompts, ["lookup", "lookup_attention"])
    assert table.values is not None and table.weights is not None
    lookup = (table.frame["metric"] == "lookup").to_numpy()
    values, targets = table.values[lookup], prompts.relations["lookup"].prompt.bincount().numpy()
    assert (table.weights == targets).all()
    np.testing.assert_allclose(table.frame["value"][lookup], values @ targets / targets.sum())


def test_a_metric_without_any_row_has_no_value(models):
    table = ac.score_heads(models["llama"], ac.Prompts.from_tokens([[1, 20, 21], [1, 22, 23]]))
    nothing = frame_of(table, metric="induction")
    assert (nothing["n"] == 0).all()
    assert nothing[["value", "low", "high"]].isna().all(axis=None)
    assert frame_of(table, metric="previous")["value"].notna().all()
    assert len(table.top("induction")) == 0


def test_prompts_of_which_only_some_have_a_row(models):
    both = ac.score_heads(models["llama"], ac.Prompts.from_tokens([[1, 20, 21], [1, 22, 22, 23]]), ["duplicate"])
    alone = ac.score_heads(models["llama"], ac.Prompts.from_tokens([[1, 22, 22, 23]]), ["duplicate"])
    assert (frame_of(both)["n"] == 1).all()
    np.testing.assert_allclose(both.frame["value"], alone.frame["value"], atol=1e-6)


def test_a_relation_of_ones_own_measures_mass(models, prompts):
    also = (prompts.token_kinds == TokenKind.OUTPUT) & (prompts.example == prompts.example.amax(1, keepdim=True))
    wide = rel.with_candidates(prompts.relations["align_query"], also)
    mine = replace(prompts, relations={"wide": wide, "align_query": prompts.relations["align_query"]})
    table = ac.score_heads(models["gpt2"], mine, ["wide", "wide_hit", "align_query"])
    expected = looped(patterns(models["gpt2"], mine), mine, wide)
    assert values(table, "wide") == pytest.approx(expected["mass"], abs=1e-5)
    assert values(table, "wide_hit") == pytest.approx(expected["hit"], abs=1e-5)
    assert values(table, "wide_hit") != values(table, "align_query"), "more candidates, fewer hits"


def distance(attention, targets):
    """How far back a head attends on average; only from the first letters of phrases."""
    query, pos = torch.tensor(targets["query_pos"].to_numpy()), torch.arange(attention.shape[-1])
    back = (query[:, None] - pos).to(attention)
    asked = torch.tensor((targets["kind"] == "first").to_numpy())
    return (attention.mul_(back[:, None])).sum(-1).where(asked[:, None], torch.nan)


@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_a_score_of_ones_own_equals_loops_over_the_cache(models, prompts, name, engine):
    model, padded = models[name], ac.Prompts.from_tokens([[1, 20, 21, 22], [1, 23, 23, 24, 25, 26]])
    for asked in (prompts, replace(padded, relations={}, targets=padded.targets.assign(kind=["first", "later"] * 4))):
        table = ac.score_heads(model, asked, [distance, "sink"], options=ac.RunOptions(engine=engine, batch_size=2))
        found, expected = values(table, "distance"), defaultdict(list)
        firsts = asked.targets[asked.targets["kind"] == "first"]
        for prompt, query in zip(firsts["prompt"], firsts["query_pos"], strict=True):
            left = int((~asked.mask[prompt]).sum())
            if query == left:  # the first token attends to itself alone
                continue
            for layer, pattern in patterns(model, asked[[prompt]])[0].items():
                for head in [*range(len(pattern)), None]:
                    attention = pattern.mean(0) if head is None else pattern[head]
                    far = sum(
                        (query - left - pos) * float(attention[query - left, pos]) for pos in range(query + 1 - left)
                    )
                    expected[layer, head].append(far)
        assert found.keys() == expected.keys()
        np.testing.assert_allclose([*found.values()], [np.mean(expected[place]) for place in found], rtol=1e-4)
        rows = frame_of(table, metric="distance")
        assert set(rows["n"]) == {len(expected[0, 0])} and (rows["high"] > 1).any()  # no share: 1 bounds no interval
        assert table.provenance.settings["metrics"] == ["distance", "sink"]
        alone = values(ac.score_heads(model, asked, ["sink"]), "sink")
        assert values(table, "sink") == pytest.approx(alone, rel=1e-4)  # the function changed what it was given
    best = table.top("distance", 1).frame
    assert best["value"].item() == max(value for (_, head), value in found.items() if head is not None)
    assert ac.plots.head_map(table, "distance").data and ac.plots.top_heads(table, ["distance"]).data


def test_a_score_of_ones_own_can_read_tokens_and_named_positions(models):
    prompts = ac.Prompts.from_tokens([[1, 20, 21, 22], [1, 23, 24, 25]])
    prompts = replace(prompts, positions={"country": torch.tensor([1, 2])})

    def on_country(attention, targets):
        of_target = list(targets["prompt"])  # torch warns of the arrays of pandas, which cannot be written to
        assert prompts.tokens[of_target, list(targets["target_pos"])].tolist() == list(targets["token"])
        return attention[torch.arange(len(targets)), :, prompts.positions["country"][of_target]]

    found = values(ac.score_heads(models["llama"], prompts, [on_country]), "on_country")
    attention = [
        patterns(models["llama"], prompts[[index]])[0][0][1, 1:-1, column] for index, column in enumerate((1, 2))
    ]
    assert found[0, 1] == pytest.approx(float(torch.stack(attention).mean()), rel=1e-5)


def test_a_function_that_is_no_score_is_refused(models, prompts):
    def one(attention):
        return attention.sum(-1)

    def whole(attention, _):
        return attention

    def number(_attention, _targets):
        return 1.0

    for metrics, message in [
        ([one], r"metric 'one': .*; a metric takes \(attention, targets\)"),
        ([whole], r"metric 'whole' returned \(\d+, 4, \d+\): .* number for each of the \d+ targets and 4 heads"),
        ([number], "metric 'number' returned float: it must return a tensor"),
        ([distance, distance], "two metrics are called 'distance'"),
        (["sink", "sink"], "two metrics are called 'sink'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ac.score_heads(models["llama"], prompts, metrics)
    mistyped: Any = [3]
    with pytest.raises(TypeError, match=r"metrics\[0\] is 3, not"):
        ac.score_heads(models["llama"], prompts, mistyped)
    with pytest.raises(KeyError, match="and in Python functions of attention and targets"):
        ac.score_heads(models["llama"], prompts, ["distance"])


def test_bf16_models_are_scored(random_hf_model, prompts):
    table = ac.score_heads(ac.load(random_hf_model("llama").bfloat16()), prompts)
    assert frame_of(table)["value"].between(0, 10).all()
    assert table.provenance.model["dtype"] == "bfloat16"


def test_what_cannot_be_scored_is_refused(models, prompts, byte_bpe_tokenizer):
    of_others = ac.Prompts.from_tokens([[5, 6, 5]], tokenizer=byte_bpe_tokenizer)

    def named_as(name):
        return prompts.with_relations(**{name: prompts.relations["lookup"]})

    for asked, metrics, message in [
        (prompts[:0], None, "no prompts to score"),
        (replace(prompts, relations={}), None, "hold no relation"),
        (named_as("sink"), None, "relation 'sink' has the name of a metric of heads"),
        (named_as("lookup_mass"), None, "relation 'lookup_mass' has the name of a metric of heads"),
        (prompts, [], "no metrics to score"),
        (of_others, None, "another tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            ac.score_heads(models["llama"], asked, metrics)
    with pytest.raises(
        KeyError, match=r"no metric 'aligns' .* did you mean 'align_\w+'\? they have align_query.*entropy"
    ):
        ac.score_heads(models["llama"], prompts, ["align_query", "aligns", "lookups"])


def test_a_layers_mean_attention_has_no_head(models, prompts):
    table = ac.score_heads(models["llama"], prompts, ["previous"])
    means = frame_of(table, head=None)
    assert means["level"].tolist() == ["layer"] * 3 and means["layer"].tolist() == [0, 1, 2]
    assert set(frame_of(table.heads())["level"]) == {"head"} and len(table.heads()) == 3 * 4
