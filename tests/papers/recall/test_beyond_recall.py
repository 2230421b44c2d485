"""Beyond the paper on contextual recall: what is planted is found, and what is not is not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

import align_circuits as ac
from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.recall.beyond.finding_3 import ATTENTION, FINDING_3, LOSSES, READINGS
from align_circuits.papers.recall.beyond.forced_attention import BRIDGE, DISTANCES, INTACT, forced, with_relation_back
from align_circuits.papers.recall.beyond.layer_2_attention import CARRIER, last_demonstrations, measure, token_groups
from align_circuits.papers.recall.beyond.mixed_training import MIXING
from align_circuits.papers.recall.beyond.share_of_icl import SHARE
from align_circuits.papers.recall.beyond.suppress_or_boost import STRATEGIES
from align_circuits.papers.recall.beyond.swapped_heads import EXCHANGE, SITES, parts_of, swapped
from align_circuits.papers.recall.figures.common import (
    drawn_if_facts_are_learned,
    of_common_seeds,
    only_if_facts_are_learned,
    per_seed,
)
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import raised_above
from align_circuits.papers.recall.metrics import MATCHES
from align_circuits.papers.recall.models.gpt2 import small_gpt2
from align_circuits.papers.recall.models.training import MixedTask
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import HEADS, finetuned, pretrained
from align_circuits.prompts.prompts import Role
from align_circuits.tables.tables import Provenance, Table

WORLD = RecallWorld.small(relation_tokens=True, n_grammar=3)
FACTS = FactsTask(WORLD, 3, 4, p_grammar=0.0)
CONTEXT = DemonstrationsTask(WORLD, 6)
LENGTH = max(FACTS.length, CONTEXT.length)
PT, FT = pretrained(WORLD, LENGTH, 4).model(), finetuned(WORLD, LENGTH, 4).model()
HEAD = {name: place for place, name in enumerate(HEADS)}

CHAINS = RecallWorld.small()
ICL = DemonstrationsTask(CHAINS, 5)

KNOWING = {"facts": 1.0, "facts_before": 0.0}


def table(rows: Any) -> Table:
    """A table of models that know their facts, where the rows do not say otherwise."""
    frame = pd.DataFrame(rows)
    told = {name: value for name, value in KNOWING.items() if name not in frame}
    return Table(frame.assign(**told, low=np.nan, high=np.nan, n=10), Provenance("test"))


def test_swapping_heads_of_the_constructions_does_what_the_theorem_says():
    context = CONTEXT.sample(48, seed=0)
    parts = parts_of(PT, FACTS.sample(16, seed=0))
    assert parts == {
        (0, HEAD["subject"]): "subject head",
        (0, HEAD["relation"]): "relation head",
        (0, HEAD["grammar"]): "other head",
    }
    rows = {(row["site"], row["head"]): row["value"] for row in swapped(FT, PT, context)}
    assert set(rows) == {("none", None)} | {(site, head) for site in SITES for head in range(3)}
    assert rows["none", None] == 1
    assert rows["pattern", HEAD["relation"]] < 0.7  # it looked for relation tokens, of which there are none
    assert all(rows[site, HEAD["grammar"]] == 1 for site in SITES)
    alone = {row["value"] for row in swapped(FT, FT, context)}
    assert alone == {1.0}


def test_swapped_heads_are_those_of_a_hook_by_hand():
    nets: list[Any] = [ac.load(small_gpt2(CHAINS.d_vocab, ICL.length, d_model=16, seed=seed)) for seed in (0, 1)]
    prompts = ICL.sample(200, seed=0)
    tokens, gold = prompts.tokens, prompts.column("token")
    rows = {(row["site"], row["layer"]): row["value"] for row in swapped(nets[0], nets[1], prompts)}
    for (site, layer), found in rows.items():
        hooks = []
        if site != "none":
            name = f"blocks.{layer}.attn.hook_{site}"
            _, kept = nets[1].run_with_cache(tokens)
            hooks = [(name, lambda value, hook, kept=kept, name=name: kept[name])]  # noqa: ARG005 - TransformerLens's
        logits = nets[0].run_with_hooks(tokens, fwd_hooks=hooks)[:, -1]
        assert found == pytest.approx((logits.argmax(-1) == gold).double().mean().item())


def test_token_groups_partition_the_prompt():
    prompts = ICL.sample(4, seed=0)
    places = token_groups(prompts)
    assert (torch.stack(list(places.values())).sum(0) == 1).all()
    assert places["query"].nonzero()[:, 1].tolist() == [15] * 4
    assert places["attributes"].nonzero()[:5, 1].tolist() == [1, 4, 7, 10, 13]
    assert (prompts.roles[places["subjects"]] == Role.INPUT).all()
    last = last_demonstrations(prompts)
    assert {k: int(mask.sum()) for k, mask in last.items()} == {"1": 12, "2": 24, "4": 48, "5": 60}
    assert last["1"][0].nonzero()[:, 0].tolist() == [12, 13, 14]


def test_patching_the_whole_prompt_is_the_other_prompt():
    model = ac.load(small_gpt2(CHAINS.d_vocab, ICL.length, d_model=16, seed=3))
    clean = ICL.sample(60, seed=1)
    corrupted = ICL.corrupt(clean, "type", seed=1)
    found = table(measure(model, clean, corrupted)).where(metric="log_prob")
    rows = {"predictor": "model", "metric": "log_prob", "kind": "all", "offset": None}
    tables = [ac.evaluate(model, prompts).where(**rows).frame for prompts in (clean, corrupted)]
    own, other = (frame["value"].to_numpy(float).item() for frame in tables)
    whole = {
        edit: found.where(edit=edit, site="resid_pre").frame["value"].to_numpy(float).item()
        for edit in ("denoise", "noise")
    }
    assert whole["denoise"] == pytest.approx(own - other, abs=1e-5)
    assert whole["noise"] == pytest.approx(other - own, abs=1e-5)
    assert found.where(edit="none", positions="clean").frame["value"].to_numpy(float).item() == pytest.approx(
        own, abs=1e-5
    )
    after: Any = found.where(edit="denoise", site="resid_post", layer=1).frame.set_index("positions")["value"]
    assert after["query"] == pytest.approx(whole["denoise"], abs=1e-5)  # nothing else reaches the answer any more
    assert after["attributes"] == 0


@pytest.mark.parametrize("carries", [True, False])
def test_attention_that_carries_the_type_is_distinguished_from_attention_that_only_steers(carries):
    rows = []
    for seed in range(3):
        for edit, sign in (("denoise", 1), ("noise", -1), ("ablate", -1)):
            for layer in (0, 1):
                here = layer == 1 and carries
                rows.append(
                    {"edit": edit, "site": "z", "layer": layer, "positions": "query", "value": sign * 0.8 * here}
                )
        for place in ("attributes", "subjects"):
            rows.append(
                {
                    "edit": "denoise",
                    "site": "resid_post",
                    "layer": 0,
                    "positions": place,
                    "value": 0.8 * (place == "attributes") * carries,
                }
            )
        for row in rows[-8:]:
            row.update(seed=seed, kind="icl", metric="accuracy")
    checks = CARRIER.check(table(rows))
    assert [check.met for check in checks] == [True] + [carries] * 4
    assert all(check.control_fails for check in checks)


def test_suppressing_heads_are_distinguished_from_boosting_ones():
    def of(suppressing: list[bool]) -> Table:
        rows: list[dict[str, Any]] = []
        for seed, suppresses in enumerate(suppressing):
            for stage in ("untrained", "pretrained", "finetuned"):
                common = {"stage": stage, "seed": seed, "positions": "relative", "sequences": "pretraining"}
                rows.append({**common, "metric": "exact", "head": -1, "value": float(stage != "untrained")})
                for head in range(2):
                    mine = head == seed % 2
                    rows.append(
                        {**common, "metric": "attention", "head": head, "what": "subject", "value": float(mine)}
                    )
                    entries = {"subject to own": 0.5, "subject to other values": 0.3, "subject to other tokens": 0.5}
                    if mine and not suppresses:
                        entries = {
                            "subject to own": 0.9,
                            "subject to other values": 0.4,
                            "subject to other tokens": 0.5,
                        }
                    rows += [
                        {**common, "metric": "weight", "head": head, "what": what, "value": value}
                        for what, value in entries.items()
                    ]
        return table(rows)

    assert [check.met for check in STRATEGIES.check(of([True, True, True]))] == [True] * 3
    some = STRATEGIES.check(of([True, False, True]))
    assert [check.met for check in some] == [True, False, False]
    assert some[1].measured.value == pytest.approx(2 / 3)


@pytest.mark.parametrize(("mixed", "expected"), [(0.9, [True, True, True, True]), (0.1, [False, False, True, False])])
def test_one_stage_is_held_against_two(mixed, expected):
    ends = {
        ("mixed", "pt"): 1.0,
        ("mixed", "icl_seen"): 1.0,
        ("mixed", "icl_held_out"): mixed,
        ("staged", "pt"): 0.3,
        ("staged", "icl_seen"): 1.0,
        ("staged", "icl_held_out"): 0.9,
    }
    rows = [
        {"stage": stage, "probe": probe, "match": match, "seed": seed, "step": step, "value": end * (step > 0)}
        for (stage, probe), end in ends.items()
        for match in MATCHES
        for seed in range(3)
        for step in (0, 10)
    ]
    assert [check.met for check in MIXING.check(table(rows))] == expected


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


def swaps(ignorant: int | None = None) -> Table:
    """Heads that carry all that finetuning brings; one seed may not know its facts, and then has no such heads."""
    rows = []
    for seed in range(3):
        for model, key, other in (("GPT-2", "layer 2", "layer 1"), ("attention-only", "relation head", "other head")):
            for receiver in ("pt", "ft"):
                has = float(receiver == "ft")
                common = {"model": model, "receiver": receiver, "probe": "icl", "seed": seed}
                rows.append({**common, "site": "none", "part": "none", "value": has})
                rows.append({**common, "probe": "pt", "site": "none", "part": "none", "value": float(seed != ignorant)})
                carried = has if seed == ignorant else 1 - has
                rows.append({**common, "site": "z", "part": key, "value": carried})
                rows.append({**common, "site": "z", "part": other, "value": has})
                rows.append({**common, "site": "pattern", "part": key, "value": 0.0})
                rows.append({**common, "site": "v", "part": key, "value": has})
    return table(rows)


def test_exchanges_are_credited_to_the_head_that_matters():
    checks = EXCHANGE.check(swaps())
    assert all(check.met and check.control_fails for check in checks)
    assert len(checks) == 7


def test_exchanges_count_in_models_that_know_their_facts():
    checks = EXCHANGE.check(swaps(ignorant=1))
    assert [check.measured.value for check in checks] == pytest.approx([2 / 3, 1, 1, 2 / 3, 1, 1, 1])


def test_claims_are_judged_in_models_that_know_their_facts():
    known = {"facts": 0.95, "facts_before": 0.0}
    unknown = {"facts": 0.94, "facts_before": 0.0}
    rows = [{**known, "div": 0.5, "seed": 0, "value": 1.0}, {**unknown, "div": 0.5, "seed": 1, "value": 0.0}]
    rows.append({**unknown, "div": 0.2, "seed": 0, "value": 0.0})

    def check(found: Table) -> list[Check]:
        return [Claim("value").at_least(0.5, per_seed(found), np.zeros(1), "nothing")]

    share, value = only_if_facts_are_learned(check)(table(rows))
    assert share.measured.value == pytest.approx(1 / 3)
    assert (share.control.value, value.measured.value) == (0.0, 1.0)
    assert [each.claim for each in only_if_facts_are_learned(check, said=False)(table(rows))] == ["value"]
    assert len(only_if_facts_are_learned(check)(table(rows[1:]))) == 1  # no model knows its facts: nothing is judged
    draw = drawn_if_facts_are_learned(lambda found: {str(len(found)): go.Figure()})
    assert list(draw(table(rows))) == ["1"]
    assert list(draw(table(rows[1:]))) == ["2, no model knows its facts"]


def test_differences_are_of_common_seeds():
    one, other = (table([{"seed": seed, "value": seed} for seed in seeds]) for seeds in ((1, 2, 3), (2, 3, 4)))
    for part in of_common_seeds(one, other):
        assert per_seed(part).tolist() == [2, 3]


def test_a_mixture_draws_from_both_tasks():
    facts, shown = FactsTask(CHAINS, 2, 3), ICL
    lengths = {facts.length - 1: "facts", shown.length - 1: "demonstrations"}
    kinds = [lengths[MixedTask(facts, shown, 0.3).batch(seed, 2)[0].shape[1]] for seed in range(200)]
    assert 0.2 < np.mean([kind == "demonstrations" for kind in kinds]) < 0.4
    for share, task in ((0.0, facts), (1.0, shown)):
        for mine, theirs in zip(MixedTask(facts, shown, share).batch(5, 3), task.batch(5, 3), strict=True):
            assert (mine == theirs).all()
    with pytest.raises(ValueError, match="share is 2"):
        MixedTask(facts, shown, 2.0)
    with pytest.raises(ValueError, match="two worlds"):
        MixedTask(facts, replace(shown, world=replace(CHAINS, world_seed=1)), 0.5)


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
        seeds, kinds = range(3), ("pt", "icl", "icl+grm")
        exact = [
            {
                "kind": kind,
                "seed": seed,
                "layer": layer,
                "place": place,
                "match": "exact",
                "value": gain if (kind, layer, place) == ("icl+grm", 0, "itself") else 0.0,
            }
            for kind in kinds
            for seed in seeds
            for layer, place in [(None, INTACT), *((layer, place) for layer in (0, 1) for place in DISTANCES)]
        ]
        looks = [
            {
                "kind": kind,
                "seed": seed,
                "layer": 0,
                "place": place,
                "match": "attention",
                "value": 0.9 if place == "ICL+Grm" and kind == "icl+grm" else 0.1,
            }
            for kind in kinds
            for seed in seeds
            for place in ("ICL", "ICL+Grm")
        ]
        return table(exact + looks)

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
    assert not any(check.verdict.startswith("holds") for check in FINDING_3.check(rows(tuple(range(6)))))


def test_a_weight_matrix_raises_what_was_planted():
    own, others = torch.zeros(4, 3), torch.zeros(4, 3)
    own[0, 0] = own[1, 1] = 1.0
    others[2:, :2] = 1.0
    ov = torch.zeros(4, 3)
    ov[0, 0] = 1.0  # above both others; token 1 ties with one of its others and is below the other
    ov[3, 1] = 2.0
    assert raised_above(ov, own, others) == pytest.approx((1 + 0.25) / 2)
