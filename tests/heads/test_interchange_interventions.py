"""Interchange interventions beside a loop with hooks, and on a circuit whose heads are known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from effects_by_hand import values_of
from torch import Tensor

import align_circuits as ac
from align_circuits.heads.interchange_interventions import interchange_verdicts
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=1, n_examples=6)


@pytest.fixture(scope="module")
def planted(char_tokenizer) -> tuple[Any, ac.Prompts, ac.Prompts]:
    clean = TASK.sample(8, char_tokenizer, seed=1)
    return ac.planted_circuit(TASK, seed=3), clean, TASK.corrupt(clean, "query", seed=2)


@pytest.fixture(scope="module")
def halves(char_tokenizer) -> tuple[ac.Prompts, ac.Prompts]:
    """Pairs of different lengths; a random half of all tokens answers each prompt, the others its partner."""
    clean, corrupted = ac.Prompts.from_pairs(
        ["ab:", "xcd:", "be:", "fad:"], ["ba:", "xdc:", "eb:", "daf:"], char_tokenizer, answer=["ac", "c", "d", "ee"]
    )
    correct = torch.rand(len(clean.targets), 64, generator=torch.Generator().manual_seed(0)) < 0.5
    answers: dict[str, Any] = {"answer_tokens": torch.arange(64), "correct": correct}
    own = ~correct
    own[1] = False  # the second letter of the first answer
    return replace(clean, **answers), replace(corrupted, **answers, own_correct=own)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize(("kind", "site"), [(None, "z"), ("first", "z"), (None, "v")])
def test_equals_a_loop_with_hooks(llama, halves, direction, kind, site):
    """Two heads share each value."""
    pair, shared = ac.Pair(*halves, kind=kind, direction=direction), 2 if site == "v" else 1
    sets = {"two": [(0, 2), (0, 3), (1, 0), (1, 1)]}
    stream = {"stream": [ac.Patch(site="resid_post", layers=[0])]}
    table = ac.interchange_accuracy(llama, pair, sets=sets, edits=stream, site=site)
    inputs = {}
    if not pair.base.mask.all():
        inputs = {"attention_mask": pair.base.mask.long(), "position_ids": (pair.base.mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        of_source, cache = llama.run_with_cache(pair.source.tokens, **inputs)
    cases: dict[tuple, Any] = {(None, None, "nothing"): {}, (None, None, "stream"): "stream"}
    cases[None, None, "two"] = {0: [2 // shared, 3 // shared], 1: [0, 1 // shared]}
    cases |= {(layer, head, "head"): {layer: [head // shared]} for layer in range(2) for head in range(4)}
    clean, corrupted = halves
    right: Any = {"clean": clean.correct, "corrupted": corrupted.own_correct}
    source, base = ("clean", "corrupted") if direction == "denoise" else ("corrupted", "clean")
    kinds, expected = clean.targets["kind"].tolist(), {}
    counted = [row for row in range(len(kinds)) if row != 1 and kind in (None, kinds[row])]

    def share(logits: Tensor, side: str) -> float:
        places: list[Any] = [clean.targets.iloc[row] for row in counted]
        answers = [int(logits[place["prompt"], place["query_pos"]].argmax()) for place in places]
        return sum(bool(right[side][row, answer]) for row, answer in zip(counted, answers, strict=True)) / len(counted)

    for key, patched in cases.items():
        hooks: Any = [("blocks.0.hook_resid_post", lambda x, hook: cache["blocks.0.hook_resid_post"])]  # noqa: ARG005
        if patched != "stream":
            hooks = []
            for layer, heads in patched.items():
                name = f"blocks.{layer}.attn.hook_{site}"

                def put(x: Tensor, hook: Any, name: str = name, heads: Any = heads) -> Tensor:  # noqa: ARG001
                    x = x.clone()
                    x[:, :, heads] = cache[name][:, :, heads]
                    return x

                hooks.append((name, put))
        with torch.no_grad():
            logits = llama.run_with_hooks(pair.base.tokens, fwd_hooks=hooks, **inputs)
        expected |= {(*key, "interchange"): share(logits, source), (*key, "corrupted_correct"): share(logits, base)}
    assert values_of(table, "layer", "head", "patched", "metric") == pytest.approx(expected)
    assert len(set(expected.values())) > 2
    assert table.baselines is not None
    baselines = table.baselines.frame.set_index(["run", "metric"])["value"].to_dict()
    for metric, side in (("interchange", source), ("corrupted_correct", base)):
        assert baselines[source, metric] == pytest.approx(share(of_source, side))
        assert baselines[base, metric] == pytest.approx(expected[None, None, "nothing", metric])
    levels = table.frame.drop_duplicates("patched").set_index("patched")["level"].to_dict()
    assert levels == {"nothing": "model", "head": "head", "two": "set", "stream": "set"}
    settings = table.provenance.settings
    assert settings["sets"]["two"][1] == [0, 3] and settings["edits"]["stream"][0]["layers"] == [0]
    assert settings["direction"] == direction and settings["kind"] == (kind or "all")


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_a_planted_circuit_brings_the_answer_along(planted, direction):
    model, clean, corrupted = planted
    by_role: dict[str, list] = {}
    for head, role in model.roles.items():
        by_role.setdefault(str(role), []).append(head)
    others = [head for head in model.kinds if model.roles.get(head) not in ("align_query", "lookup")]
    sets = {"aligners": by_role["align_query"], "lookup": by_role["lookup"], "random 0": others[:2]}
    sets["named"] = by_role["align_query"]
    pair = ac.Pair(clean, corrupted, direction=direction)
    table = ac.interchange_accuracy(model, pair, heads=[*by_role["align_query"], *others], sets=sets)
    found = values_of(table, "layer", "head", "patched", "metric")
    for name, expected in {"aligners": 1.0, "lookup": 1.0, "random 0": 0.0, "nothing": 0.0}.items():
        assert found[None, None, name, "interchange"] == expected, name
        assert found[None, None, name, "corrupted_correct"] == 1 - expected, name
    for layer, head in others:
        assert found[layer, head, "head", "interchange"] == 0
    if len(by_role["align_query"]) == 1:
        assert found[*by_role["align_query"][0], "head", "interchange"] == 1
    for alpha, named in ((0.5, True), (0.49, False)):  # beside one random set p is 1/2
        verdicts: Any = interchange_verdicts(table, alpha)[lambda rows: rows["patched"] != "head"].set_index("patched")
        assert verdicts["carries"].to_dict() == {"aligners": True, "lookup": True, "named": named}
        assert verdicts.loc["named", ["n_controls", "controls", "p", "kept"]].tolist() == [1, 0, 0.5, 0]
    normalized: Any = table.normalized().frame  # 1 is the clean answer, whichever run is patched
    brought = normalized.set_index(["patched", "metric"])["value"].to_dict()
    assert brought["aligners", "interchange"] == float(direction == "denoise") == 1 - brought["nothing", "interchange"]


def test_what_a_patch_carries_is_more_than_what_it_scrambles():
    """Seven of sixteen answers gained and two lost (sign test: p = .18) are not enough, and ten and none are."""
    values = np.zeros((3, 16))
    values[0, :2], values[1, 2:9], values[2, :12] = 1, 1, 1
    rows = [("model", None, None, "nothing"), ("head", 0, 1, "head"), ("head", 1, 0, "head")]
    keys = pd.DataFrame(rows, columns=["level", "layer", "head", "patched"])
    table = Table.from_prompts(
        pd.concat([keys.assign(metric=metric) for metric in ("interchange", "corrupted_correct")]),
        np.concatenate([values, 1 - values]),
        np.ones((6, 16)),
        Provenance("interchange"),
    )
    assert interchange_verdicts(table, 0.05)["carries"].tolist() == [False, True]
    apart = interchange_verdicts(Table(table.frame, table.provenance), 0.05)
    assert apart["carries"].tolist() == [False, True], "without values of prompts"


def test_refusals(llama, halves):
    pair = ac.Pair(*halves)
    patch = [ac.Patch(site="resid_post", layers=[0])]
    for arguments, message in [
        ({"sets": {"none": []}}, r"sets\['none'\] has no heads: name at least one"),
        ({"edits": {"none": []}}, r"edits\['none'\]: give a list of edits, with at least one"),
        ({"sets": {"nothing": [(0, 0)]}}, "the name 'nothing' is given twice, or means the model or a head"),
        ({"edits": {"head": patch}}, "the name 'head' is given twice"),
        ({"sets": {"a": [(0, 0)]}, "edits": {"a": patch}}, "the name 'a' is given twice"),
        ({"heads": [(0, 4)]}, "no head L0H4"),
        ({"sets": {"a": [(2, 0)]}}, "no head L2H0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ac.interchange_accuracy(llama, pair, **arguments)
    clean, corrupted = halves
    for one, other, why in [
        (clean, replace(corrupted, own_correct=None), "the answers to the corrupted prompts are not known"),
        (replace(clean, correct=None), corrupted, "the answers to the clean prompts are not known"),
        (clean, replace(corrupted, own_correct=clean.correct), "both give the same answers"),
    ]:
        with pytest.raises(ValueError, match=f"{why}: interchange takes pairs whose answers are known and differ"):
            ac.interchange_accuracy(llama, ac.Pair(one, other))
