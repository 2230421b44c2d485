"""The statistics and checks of contextual recall, on tables whose answer is planted."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from align_circuits.papers.lab import Inputs
from align_circuits.papers.recall.figures.figs_2_to_7_15_training import FIG2, FIG3, FIG4, FIG5, FIG6, FIG15
from align_circuits.papers.recall.figures.figs_8_16_17_18_task_vectors import FIG8, FIG16, FIG17, FIG18, by_type
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import HEADS
from align_circuits.papers.recall.figures.figs_13_14_19_24_held_out import FIG13, FIG14
from align_circuits.papers.recall.figures.gpt2_models import SMOKE, Trainings, curves_study, finetuned, pretrained
from align_circuits.papers.recall.metrics import MATCHES
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

STEPS = np.arange(0, 101, 10)
READ = {"icl+grm": 1e9, "icl+grm from 0": 50}
"""When recall comes under each reading of S_ft."""


def curves(middle: Callable[[str, str], float], probes: tuple[str, ...], **keys: Any) -> pd.DataFrame:
    """Three seeds; each match of each probe rises from 0 to 1 around its step."""
    rows = [
        {"seed": seed, "step": step, "probe": probe, "match": match, "value": (step - middle(probe, match) - seed) / 20}
        for seed, probe, match, step in product(range(3), probes, MATCHES, STEPS)
    ]
    frame = pd.DataFrame(rows).assign(**keys, low=np.nan, high=np.nan, n=100)
    return frame.assign(value=(0.5 + frame["value"]).clip(0, 1))


def table(*frames: pd.DataFrame) -> Table:
    return Table(pd.concat(frames, ignore_index=True), Provenance("test"))


def holds(checks: list[Any]) -> list[bool]:
    assert all(check.control_fails for check in checks if check.met)
    return [check.met for check in checks]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ({"type": 20, "exact": 50, "subject": 50}, [True, True, True, True]),
        ({"type": 50, "exact": 50, "subject": 20}, [True, False, False, True]),
    ],
)
def test_the_order_of_learning_is_seen_and_its_reverse_too(at, expected):
    found = table(curves(lambda probe, match: at.get(match, 0) if probe == "pt" else 1e9, ("pt", "icl"), stage="pt"))
    assert holds(FIG2.check(found)) == expected


def test_a_model_that_recalls_without_finetuning_refutes_the_first_finding():
    found = table(curves(lambda _probe, _match: 50, ("pt", "icl"), stage="pt"))
    assert [check.met for check in FIG2.check(found)] == [True, False, False, False]


@pytest.mark.parametrize("generalizes", [True, False])
def test_generalization_is_seen_where_it_is(generalizes):
    found = curves(
        lambda probe, _match: 50 if probe == "icl_seen" or generalizes else 1e9,
        ("icl_seen", "icl_held_out"),
        stage="icl",
    )
    assert holds(FIG3.check(table(found))) == [True, generalizes]


def test_both_readings_of_finding_3_are_judged_on_their_own():
    probes = "icl_seen", "icl_held_out"
    never, comes = (curves(lambda _probe, _match, at=at: at, probes, stage=s) for s, at in READ.items())
    assert [check.met for check in FIG4.check(table(never, comes))] == [False, False, True, True]


def test_the_check_names_the_format_that_is_learned_first():
    def at(first: str, stage: str) -> pd.DataFrame:
        probes = "grm_held_out", "icl_held_out"
        return curves(lambda probe, _match: 20 if probe.startswith(first) else 60, probes, stage=stage)

    found = table(at("grm", "icl+grm"), at("icl", "icl+grm from 0"))
    assert [check.met for check in FIG15.check(found)] == [True, True, False, True]


@pytest.mark.parametrize("matters", [True, False])
def test_what_depends_on_subjects_is_told_from_what_does_not(matters):
    frames = [
        curves(
            lambda probe, _match, n=n: 95 if probe == "icl_held_out" and n == 8 and matters else 50,
            ("pt", "icl_held_out"),
            stage=stage,
            n_seen=n,
        )
        for stage in ("icl", *READ)
        for n in (8, 32)
    ]
    assert holds(FIG5.check(table(*frames))) == [matters] * 3


def test_length_and_diversity_are_credited_apart():
    frames = [
        curves(
            lambda _probe, match, s=s: 1e9 if match == "exact" and s == 6 else 20,
            ("pt", "icl_held_out"),
            stage=stage,
            grammar_len=s,
            div=div,
        )
        for stage in ("pt", "icl+grm")
        for s in (6, 16)
        for div in (0.2, 0.5)
    ]
    assert holds(FIG6.check(table(*frames))) == [True, False, True, False]


def clusters(strength: Callable[[float, float], float], steers: bool = True) -> Table:
    """A table of clusters in which layer-2 attention has the silhouette `strength(div, demos)` after finetuning."""
    rows: list[dict[str, Any]] = []
    for div, seed in product((0.2, 0.5), range(3)):
        for stage, demos in product(("pt", "ft"), (0, 1, 8)):
            keys = {"div": div, "seed": seed, "stage": stage, "demos": demos}
            clustered = strength(div, demos) * (stage == "ft")
            rows.append({**keys, "metric": "exact", "value": clustered})
            for layer, site in product((0, 1), ("attn_out", "resid_post")):
                share = layer * (1.0 if site == "attn_out" else 0.5)
                for metric, value in (("silhouette", clustered * share), ("shuffled", 0.0)):
                    rows.append({**keys, "layer": layer, "site": site, "metric": metric, "value": value})
            for metric, one, other in product(("cosine_apart", "cosine"), range(3), range(3)):
                value = clustered if one == other else 0.0
                rows.append({**keys, "metric": metric, "type": one, "other": other, "value": value})
        for beta, queries in product((-1.0, 0.0, 0.2, 0.4, 1.0), ("seen", "held-out")):
            mixed = max(beta, 0.0) if steers else 0.0
            keys = {"div": div, "seed": seed, "stage": "ft", "queries": queries, "beta": beta, "metric": "rank"}
            rows.append({**keys, "answer": "original", "value": 10 * mixed})
            rows.append({**keys, "answer": "target", "value": 10 * (1 - mixed) ** (1 + 10 * div)})
    return table(pd.DataFrame(rows).assign(facts=1.0, facts_before=0.0, low=np.nan, high=np.nan, n=50))


def test_clusters_that_grow_are_distinguished_from_constant_ones():
    grow = clusters(lambda div, demos: div * demos / 8)
    assert [holds(figure.check(grow)) for figure in (FIG8, FIG16, FIG17, FIG18)] == [
        [True] * 5,
        [True] * 2,
        [True],
        [True] * 3,
    ]
    stay = clusters(lambda _div, _demos: 0.4, steers=False)
    assert [check.met for check in FIG8.check(stay)] == [True] + [False] * 4
    assert [check.met for check in FIG17.check(stay)] == [True]
    assert not FIG17.check(stay)[0].control_fails  # together without demonstrations: nothing is shown
    assert [check.met for check in FIG18.check(stay)] == [False] * 3
    for figure in (FIG8, FIG16, FIG17, FIG18):
        assert all(drawn.data for drawn in figure.draw(grow).values())


def test_as_many_contexts_of_each_type():
    groups = by_type(SMOKE.demonstrations(0, "icl", held_out=True), 5, seed=0)
    assert [len(group) for group in groups] == [5] * 3
    for place, group in enumerate(groups):
        assert (group.latent["type"] == place).all()
        assert not set(group.latent["subject"][:, -1].tolist()) & set(SMOKE.world_of(0).split(8, seed=0)[0])


def test_values_seen_and_subjects_are_credited_only_where_they_matter():
    frames = [
        curves(
            lambda probe, _match, count=count: 1e9 if probe == "held_out" and count == 3 else 50,
            ("seen", "held_out"),
            n_subjects=8,
            n_seen=4,
            values=count,
        )
        for count in (3, 5)
    ]
    assert holds(FIG13.check(table(*frames))) == [True]
    many = [
        pd.concat(
            [
                curves(lambda _probe, _match, m=m: 50 if m == 8 else 1e9, ("held_out",), n_subjects=m),
                curves(lambda _probe, _match: 50, ("pt",), n_subjects=m),
                pd.DataFrame(
                    {"seed": seed, "match": what, "value": 0.9 if m == 8 and "another" not in what else 0.1}
                    for seed in range(3)
                    for what in ("f_subj, centred", "f_rel", "f_subj, centred, of another", "f_rel of another")
                ).assign(step=0, probe="cosine", n_subjects=m, n=1),
            ]
        )
        for m in (8, 64)
    ]
    assert holds(FIG14.check(table(*many))) == [True] * 5
    ignorant = curves(lambda _probe, _match: 1e9, ("pt",), n_subjects=64)
    unknown = pd.concat([many[1].query("probe != 'pt'"), ignorant])
    checks = FIG14.check(table(many[0], unknown))
    assert [check.met for check in checks[:2]] == [True, False]
    assert [check.verdict for check in checks[2:]] == ["not testable"] * 3, "nothing is compared"


def test_figures_share_the_pretraining_and_finish_it_once(tmp_path, monkeypatch):
    first = pretrained(SMOKE, 0, tmp_path)
    again = pretrained(replace(SMOKE, n_seen=4, seeds=5), 0, tmp_path)
    assert again.folder == first.folder
    assert pretrained(SMOKE.changed(div=0.3), 0, tmp_path).folder != first.folder
    one, other = finetuned(SMOKE, 0, "icl", tmp_path), finetuned(replace(SMOKE, n_seen=4), 0, "icl", tmp_path)
    assert one.folder != other.folder
    assert finetuned(SMOKE, 0, "icl", tmp_path).log.equals(one.log)
    for mine, theirs in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    monkeypatch.setattr("align_circuits.jobs.code_versions.versions", lambda: {"torch": "another"})
    assert pretrained(SMOKE, 0, tmp_path).folder != first.folder, "other code trains other models"


def test_heads_are_shown_of_the_first_seed_whatever_it_is():
    jobs = HEADS.study.jobs(replace(HEADS.scales["smoke"], first_seed=3, seeds=2), Inputs({}, ""))
    assert [(job.seed, job.config["shown"]) for job in jobs] == 2 * [(3, True), (4, False)]


def test_a_size_follows_its_world():
    changed = SMOKE.changed(n_subjects=32, div=0.3)
    assert (changed.world.n_values, changed.n_seen, changed.world.div) == ((4, 4, 4), 16, 0.3)
    full = replace(SMOKE, world=replace(SMOKE.world, n_values=(16, 4, 4))).changed(n_subjects=8, n_seen=2)
    assert (full.world.n_values, full.n_seen) == ((8, 4, 4), 2)


@pytest.mark.slow
def test_trainings_in_two_processes_are_those_of_one(tmp_path):
    setup = replace(SMOKE, seeds=2, pretraining=replace(SMOKE.pretraining, steps=2), n_prompts=8)
    setup = replace(setup, finetuning=replace(setup.finetuning, steps=2))
    config = Trainings(setup, ("pt", "icl"), ({"n_seen": 6}, {"n_seen": 8}))
    study = curves_study("test", config, config, config)
    alone = study.run(config, folder=tmp_path / "alone")
    together = study.run(config, jobs=2, folder=tmp_path / "together")
    pd.testing.assert_frame_equal(alone.frame, together.frame)
    trained = {path.name for path in (tmp_path / "alone" / "trained").iterdir()}
    assert {path.name for path in (tmp_path / "together" / "trained").iterdir()} == trained
    assert len(trained) == 2 + 4
    jobs = [path.name.partition("-")[0] for path in (tmp_path / "together" / "jobs").glob("[!.]*.json")]
    assert sorted(jobs) == ["finetune"] * 4 + ["pretrain"] * 2  # both cells of the grid share the pretrainings


def test_a_cell_may_change_a_pair_of_numbers(tmp_path):
    setup = replace(SMOKE, seeds=1, pretraining=replace(SMOKE.pretraining, steps=1), n_prompts=4)
    config = Trainings(setup, ("pt",), ({"grammar_len": 4, "grammar_lens": (1, 3)}, {"grammar_len": 5}))
    frame = curves_study("test", config, config, config).run(config, folder=tmp_path).frame
    assert frame["grammar_len"].unique().tolist() == [4, 5]
    assert "grammar_lens" not in frame


def test_cells_that_a_table_cannot_tell_apart_are_refused():
    with pytest.raises(ValueError, match="changes that differ in pairs alone"):
        Trainings(SMOKE, ("pt",), ({"grammar_lens": (1, 2)}, {"grammar_lens": (1, 3)}))
