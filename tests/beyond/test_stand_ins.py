"""Whether other heads can stand in for a model's aligners."""

from typing import Any

import pandas as pd
import pytest
from measured import table_of

from align_circuits.beyond import stand_ins
from align_circuits.beyond.prosthesis import GOLD, KEY, LOOKUP, QUERY, RANDOM, ROLES, WRONG, drawn
from align_circuits.beyond.stand_ins import (
    BLIND,
    INTACT,
    STAND_INS,
    aligners_of,
    best_stand_in,
    by_layer,
    rank_of_layers,
    stood_in,
    with_blind,
)
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tasks.seq2seq import Seq2SeqTask

TASK: dict[str, Any] = {"x_len": 5, "phrase_len": 2, "n_examples": 4}


@pytest.mark.parametrize("seed", range(2))
def test_in_a_planted_circuit_only_the_aligner_writes_what_the_lookup_reads(seed, monkeypatch):
    model = planted_circuit(Seq2SeqTask(**TASK), seed, decoys=("off_by_one",))
    monkeypatch.setattr(stand_ins, "loaded", lambda _: model)
    rows: Any = stood_in(model="", task=TASK, prompts=4, draws=3, seed=seed).assign(seed=seed)
    accuracy = rows[rows["metric"] == "accuracy"]
    for side, role in ROLES.items():
        of_side = accuracy[accuracy["side"] == side]
        of: Any = of_side[of_side["part"] == "aligners"].groupby("of")["value"].mean()
        assert of[INTACT] == of[GOLD] == 1
        assert max(of[BLIND], of[WRONG]) < 0.7 < of[RANDOM]
        layer = next(layer for (layer, _), kind in model.kinds.items() if kind == role)
        layers = of_side[of_side["part"] == "layers"].set_index("layer")
        assert layers["own"].to_dict() == {at: float(at == layer) for at in range(model.cfg.n_layers)}
        assert layers.loc[layer, "value"] == 1
        assert layers.drop(index=layer)["value"].max() < 0.7
    heads = accuracy[accuracy["part"] == "heads"].set_index(["layer", "head"])
    assert [head for head, of in model.kinds.items() if of == "align_query"] == heads.index[
        heads["value"] == 1
    ].to_list()


def test_blind_heads_attend_to_the_whole_input_of_their_example():
    both, _ = drawn(char_tokenizer(), TASK, 2, seed=0)
    prompts = with_blind(both, TASK["n_examples"])
    for side in (KEY, QUERY):
        blind, gold = (prompts.relations[f"{of} {side}"] for of in (BLIND, GOLD))
        assert blind.query.tolist() == gold.query.tolist()
        for row in range(0, len(gold), 7):
            assert len(blind.keys_of(row)) == TASK["x_len"]
            assert set(gold.keys_of(row)) < set(blind.keys_of(row))


def test_a_stand_in_has_no_aligner_and_is_chosen_by_the_other_seeds():
    values = {0: (0.9, 0.8), 1: (0.2, 0.6), 2: (0.5, 0.1)}
    rows = [
        {"seed": seed, "layer": layer, "value": value, "own": float((layer, seed) == (0, 1))}
        for layer, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    table = table_of(rows, part="layers", side=QUERY, metric="accuracy", of=GOLD)
    assert best_stand_in("layers", QUERY)(table).tolist() == [0.2, 0.1]  # layer 1 by seed 1, layer 2 by seed 0


def test_single_heads_by_layer_and_the_ranks_of_other_tuned_seeds():
    values = {(0, 0): (0.9, 0.8), (0, 1): (0.1, 0.3), (1, 0): (0.5, 0.3), (1, 1): (0.4, 0.6), (3, 0): (0.2, 0.2)}
    rows: list[dict[str, Any]] = [
        {
            "part": "heads",
            "seed": seed,
            "layer": layer,
            "head": head,
            "value": value,
            "own": float((layer, head) == (0, 0)),
        }
        for (layer, head), of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    tuned = [{"part": "aligner", "side": side, "layer": layer} for side, layer in ((QUERY, 1), (QUERY, 3), (LOOKUP, 0))]
    heads = table_of(rows, side=QUERY, metric="accuracy").frame
    table = table_of(pd.concat([heads, pd.DataFrame(tuned)]))
    assert by_layer(table).to_dict() == {0: 0.2, 1: 0.5, 3: 0.2}  # without the aligner L0H0
    assert rank_of_layers(QUERY)(table).tolist() == [1, 0]
    assert rank_of_layers(LOOKUP)(table).tolist() == [0]
    assert best_stand_in("heads", QUERY, 0.5)(table).tolist() == [0.2, 0.2]  # layer 3 of 0 to 3
    assert best_stand_in("heads", QUERY, 0, 0.5)(table).tolist() == [0.4, 0.3]  # L1H0 by seed 0, L1H1 by seed 1


def test_without_an_aligner_the_best_head_is_one():
    table = table_of({"layer": [0, 0, 1], "head": [0, 1, 0], "value": [0.2, 0.7, 0.1]})
    assert aligners_of(table.frame) == [(0, 1)]
    assert aligners_of(table.frame.assign(value=[0.8, 0.75, 0.74])) == [(0, 0), (0, 1)]
    assert len(STAND_INS.check(table_of_claims())) == 9


def table_of_claims() -> Any:
    """Any table with all rows that the claims read."""
    about = {"metric": "accuracy", "value": 0.5, "own": 0.0, "layer": 0, "head": 0}
    rows = [
        {**about, "part": part, "side": side, "of": of, "seed": seed}
        for part, kinds in (("aligners", (INTACT, BLIND, RANDOM, GOLD, WRONG)), ("layers", (GOLD,)), ("heads", (GOLD,)))
        for side in ROLES
        for of in kinds
        for seed in range(2)
    ]
    return table_of(rows)
