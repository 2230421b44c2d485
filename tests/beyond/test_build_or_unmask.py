"""Whether heads that tuning makes were there before."""

from typing import Any

import pytest
from measured import table_of

import align_circuits as ac
from align_circuits.beyond import build_or_unmask
from align_circuits.beyond.build_or_unmask import TOP, UNMASK, after, clamped
from align_circuits.papers.lab import Inputs

TASK: dict[str, Any] = {"x_len": 3, "phrase_len": 2, "n_examples": 2}


def test_what_clamping_gains_is_the_difference_of_two_evaluations(random_hf_model, char_tokenizer, monkeypatch):
    bridge = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    monkeypatch.setattr(build_or_unmask, "loaded", lambda _: bridge)
    rows = clamped(model="", task=TASK, role="align_query", prompts=4, seed=1)
    assert len(rows) == bridge.cfg.n_layers * bridge.cfg.n_heads
    prompts = ac.Seq2SeqTask(**TASK, task_seed=1).sample(4, bridge.tokenizer, build_or_unmask.FRESH + 1)
    head = (bridge.cfg.n_layers - 1, 1)
    first = {"metric": "log_prob", "predictor": "model", "kind": "first", "offset": None}
    with_edit, without = (
        ac.evaluate(bridge, prompts, edits=edits).where(**first).frame["value"].item()
        for edits in ([ac.Clamp([head], "align_query")], [])
    )
    gain = rows[(rows["layer"] == head[0]) & (rows["head"] == head[1])]["value"].item()
    assert gain == pytest.approx(with_edit - without, abs=1e-6)
    assert gain != 0


def test_named_heads_are_looked_up_in_the_ranking_of_their_role():
    gains = [
        {"what": "clamped", "part": "before", "role": role, "layer": 0, "head": head, "value": sign * head}
        for role, sign in (("align_query", 1.0), ("lookup", -1.0))
        for head in range(8)
    ]
    heads = {("named", "align_query"): (7, 5), ("random", "align_query"): (4,), ("named", "lookup"): (0, 3)}
    named = [
        {"what": "named", "part": "after", "role": role, "layer": 0, "head": head, "of": of, "arm": "a", "seed": 0}
        for (of, role), those in heads.items()
        for head in those
    ]
    intact = {"what": "ablated", "role": None, "of": "nothing", "seed": 0, "value": 1.0}
    seen = [intact | {"part": "before"}, intact | {"part": "after", "arm": "a"}]  # the seeds that were measured
    table = table_of([*gains, *named, *seen], metric="log_prob", low=0.0, high=1.0)
    (check,) = (each for each in UNMASK.check(table) if "unmasks" in each.claim)
    assert TOP == 3
    assert (check.measured.value, check.control.value) == (3 / 4, 0.0)


def test_the_adapter_of_the_package_is_measured_beside_its_own_base_alone():
    config, study = UNMASK.scales["smollm2"], UNMASK.study
    jobs = study.jobs(config, Inputs({"smollm2": {"weights": ""}}, ""))
    assert [job.config["adapter"] for job in jobs if job.function is after] == ["smollm2-ica"]
    with pytest.raises(ValueError, match="give --model smollm2"):
        study.train(config, Inputs({"toy-llama": {"weights": ""}}, ""))
