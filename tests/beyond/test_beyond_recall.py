"""Beyond the paper on contextual recall: what is planted is found, and what is not is not."""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

import align_circuits as ac
from align_circuits.beyond.finding_3 import ATTENTION, FINDING_3, LOSSES, READINGS
from align_circuits.beyond.forced_attention import BRIDGE, DISTANCES, INTACT, forced, with_relation_back
from align_circuits.beyond.share_of_icl import SHARE
from align_circuits.papers.claims import Claim, checks_of
from align_circuits.papers.lab import drawn_by
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import raised_above
from align_circuits.papers.recall.figures.studies import (
    drawn_if_facts_are_learned,
    of_common_seeds,
    only_if_facts_are_learned,
)
from align_circuits.papers.recall.models.gpt2 import small_gpt2
from align_circuits.papers.recall.task.sequences import DemonstrationsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.statistics import per_seed
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

CHAINS = RecallWorld.small()
ICL = DemonstrationsTask(CHAINS, 5)

KNOWING = {"facts": 1.0, "facts_before": 0.0}


def table(rows: Any) -> Table:
    """A table of models that know their facts, where the rows do not say otherwise."""
    frame = pd.DataFrame(rows)
    told = {name: value for name, value in KNOWING.items() if name not in frame}
    return Table(frame.assign(**told, low=np.nan, high=np.nan, n=10), Provenance("test"))


@pytest.mark.parametrize("decides", [True, False])
def test_the_format_that_is_learned_first_is_that_of_the_share(decides):
    # the step at which each format comes, by its share; at .05 one model never learns ICL
    grm, icl = {0.05: 10, 0.5: 30 if decides else 10}, {0.05: 30, 0.5: 10 if decides else 30}
    rows = [
        {"share": share, "seed": seed, "step": step, "probe": probe, "match": "exact", "value": float(learned)}
        for share in (0.05, 0.5)
        for seed in range(40)
        for step in range(0, 50, 10)
        for probe, at in (("grm_held_out", grm[share]), ("icl_held_out", icl[share]))
        for learned in [step >= at and not (share == 0.05 and probe == "icl_held_out" and seed == 0)]
    ]
    facts, rare, often, more = SHARE.check(table(rows))
    assert facts.met and rare.met
    assert rare.control_fails == often.met == decides
    assert more.measured.value == pytest.approx(1 / 40)


def test_claims_are_judged_in_models_that_know_their_facts():
    known = {"facts": 0.95, "facts_before": 0.0}
    unknown = {"facts": 0.94, "facts_before": 0.0}
    rows = [{**known, "div": 0.5, "seed": 0, "value": 1.0}, {**unknown, "div": 0.5, "seed": 1, "value": 0.0}]
    rows.append({**unknown, "div": 0.2, "seed": 0, "value": 0.0})
    claims = [Claim("value").at_least(0.5, per_seed(), np.zeros(1), "nothing")]
    share, value = checks_of(only_if_facts_are_learned(claims), table(rows))
    assert share.measured.value == pytest.approx(1 / 3)
    assert (share.control.value, value.measured.value) == (0.0, 1.0)
    assert [each.claim for each in checks_of(only_if_facts_are_learned(claims, said=False), table(rows))] == ["value"]
    _, value = checks_of(only_if_facts_are_learned(claims), table(rows[1:]))
    assert value.verdict == "not testable", "no model knows its facts"
    draw = drawn_if_facts_are_learned(lambda found: {str(len(found)): go.Figure()})
    assert list(drawn_by(draw, table(rows))) == ["1"]
    assert list(drawn_by(draw, table(rows[1:]))) == ["2, no model knows its facts"]


def test_differences_are_of_common_seeds():
    one, other = (table([{"seed": seed, "value": seed} for seed in seeds]) for seeds in ((1, 2, 3), (2, 3, 4)))
    for part in of_common_seeds(one, other):
        assert per_seed()(part).tolist() == [2, 3]


def test_forced_attention_is_that_of_a_hook_by_hand():
    net: Any = ac.load(small_gpt2(CHAINS.d_vocab, ICL.length, d_model=16, seed=3))
    prompts = ICL.sample(300, seed=1)
    rows = {
        (row["layer"], row["place"]): row["value"] for row in forced(net, prompts, CHAINS) if row["match"] == "type"
    }
    type_of, asked = torch.from_numpy(CHAINS.type_of), prompts.latent["type"][:, -1]
    for (layer, place), value in rows.items():

        def look(pattern: torch.Tensor, hook: Any, place: str = place) -> torch.Tensor:  # noqa: ARG001
            row = torch.nn.functional.one_hot(torch.tensor(pattern.shape[3] - 1 - DISTANCES[place]), pattern.shape[3])
            return torch.cat([pattern[:, :, :-1], row.to(pattern).expand_as(pattern[:, :, -1:])], 2)

        hooks = [(f"blocks.{layer}.attn.hook_pattern", look)] if layer is not None else []
        said = net.run_with_hooks(prompts.tokens, fwd_hooks=hooks)[:, -1].argmax(-1)
        assert value == pytest.approx(float((type_of[said] == asked).double().mean()))
    assert len(set(rows.values())) > 2  # places and layers differ


def test_a_relation_to_an_earlier_token_is_added():
    prompts = with_relation_back(ICL.sample(2, seed=0), "before", 3)
    relation, last = prompts.relations["before"], prompts.mask.shape[1] - 1
    assert relation.query.tolist() == [last, last]
    assert relation.keys_of(1) == [last - 3]
    assert "before" not in ICL.sample(2, seed=0).relations


def test_the_bridge_is_claimed_only_where_the_query_subject_brings_it():
    def rows(gain: float) -> Table:
        forced = [(None, INTACT), *product((0, 1), DISTANCES)]
        exact = [
            {"kind": kind, "layer": layer, "place": place, "match": "exact", "value": gain * recalls}
            for kind in ("pt", "icl", "icl+grm")
            for layer, place in forced
            for recalls in [(kind, layer, place) == ("icl+grm", 0, "itself")]
        ]
        looks = [
            {"kind": kind, "layer": 0, "place": place, "match": "attention", "value": 0.9 if reads else 0.1}
            for kind in ("pt", "icl", "icl+grm")
            for place in ("ICL", "ICL+Grm")
            for reads in [(kind, place) == ("icl+grm", "ICL+Grm")]
        ]
        return table([{**row, "seed": seed} for seed in range(3) for row in exact + looks])

    assert all(check.met and check.control_fails for check in BRIDGE.check(rows(0.8)))
    assert [check.met for check in BRIDGE.check(rows(0.3))] == [True, True, False, False, False]


def test_finding_3_is_judged_in_seeds_that_know_their_facts():
    """Recall is planted: with S_ft from 0, after a grammar token, or with layer 1 on the subject if the loss allows."""

    def recalls(kind: str | None, loss: str | None, grammar: int, attention: str) -> bool:
        after_grammar = grammar == 4 or (grammar == 1 and loss != "all")
        reads = attention == "query subject" and loss != "all"
        return kind is not None and attention != "separator" and (kind == "icl+grm from 0" or after_grammar or reads)

    def rows(ignorant: tuple[int, ...]) -> Table:
        models = [(None, None), *((kind, loss) for kind in READINGS for loss in LOSSES)]
        found: list[dict[str, Any]] = []
        for seed in range(6):
            for kind, loss in models:
                keys = {"kind": kind, "loss": loss, "seed": seed}
                found.append({**keys, "match": "pt", "value": 0.5 if seed in ignorant else 0.99 - seed / 1000})
                for grammar in (0, 1, 4):
                    for attention in ATTENTION:
                        value = 0.9 * recalls(kind, loss, grammar, attention) * (seed not in ignorant) + seed / 1000
                        places = {"grammar": grammar, "attention": attention, "match": "exact"}
                        found.append({**keys, **places, "value": value})
        return table(found)

    checks = FINDING_3.check(rows(()))
    assert all(check.met and check.control_fails for check in checks)
    assert FINDING_3.check(rows((0, 5)))[0].measured.value == pytest.approx(4 / 6)
    assert [check.met for check in FINDING_3.check(rows((0, 5)))[1:]] == [True] * (len(checks) - 1)
    assert FINDING_3.draw(rows(()))
    assert {check.verdict for check in FINDING_3.check(rows(tuple(range(6))))[1:]} == {"not testable"}


def test_a_weight_matrix_raises_what_was_planted():
    own, others = torch.zeros(4, 3), torch.zeros(4, 3)
    own[0, 0] = own[1, 1] = 1.0
    others[2:, :2] = 1.0
    ov = torch.zeros(4, 3)
    ov[0, 0] = 1.0  # above both others; token 1 ties with one of its others and is below the other
    ov[3, 1] = 2.0
    assert raised_above(ov, own, others) == pytest.approx((1 + 0.25) / 2)
