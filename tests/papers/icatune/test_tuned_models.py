"""What experiments measure of tuned models: shared runs, attention, emergence, and checks that can fail."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from measured import table_of

import align_circuits as ac
from align_circuits.cli import main
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.icatune import conjecture
from align_circuits.papers.icatune import figs_1_5_8_11_attention as attention_figures
from align_circuits.papers.icatune import tuned_models as tuned
from align_circuits.papers.icatune.alignment_oracles import align_by_em
from align_circuits.papers.icatune.fig_2_data import _accepted
from align_circuits.papers.icatune.fig_4_emergence import FIG4, lag
from align_circuits.papers.icatune.fig_6_standard_tuning import FIG6, STANDARD, _methods, _summarize
from align_circuits.papers.icatune.figs_7_10_alignments_and_layers import FIG10
from align_circuits.papers.icatune.tuned_models import SMOKE, SMOKE_TASK, Arm
from align_circuits.papers.icatune.tuning_courses import KEYS, LAYERS_APART, before_in
from align_circuits.papers.lab import Inputs
from align_circuits.papers.statistics import as_rows
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table
from align_circuits.training.tuning import TuneConfig

ARM = Arm("ICA-Tune", SMOKE_TASK, SMOKE, (0, 1))


def tune(model: str, runs: Path, arm: Arm, ends: int = 0) -> Table:
    """The courses of the tunings, or what is measured before and after on `ends` prompts."""
    measured = [tuned.at_ends] if ends else []
    study = tuned.tuned_study("test/tuned", lambda _, rows: rows["ends" if ends else "course"], measured)
    return study.run(tuned.Tunings((arm,), ends), models=[model], folder=runs)


def test_a_model_is_tuned_once_for_all_that_is_measured_of_it(folder, tmp_path, monkeypatch):
    course = tune(folder, tmp_path, ARM)
    assert set(course.frame["seed"]) == {0, 1} and set(course.frame["arm"]) == {"ICA-Tune"}
    assert course.provenance.model["name"] == folder
    assert len(list((tmp_path / "trained").iterdir())) == 2
    trained, real = [], torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda *a, **k: trained.append(1) or real(*a, **k))
    tune(folder, tmp_path, ARM, ends=3)
    assert not trained, "tuned again"
    tune(folder, tmp_path, replace(ARM, config={**ARM.config, "lr": 1e-3}))
    assert len(trained) == 2 * SMOKE["steps"]


def test_before_tuning_arms_on_one_task_share_a_job_and_claims_about_single_seeds_take_more_prompts(folder, tmp_path):
    arms = ARM, replace(ARM, name="larger", config={**SMOKE, "lr": 0.1})
    study = tuned.tuned_study("test/tuned", lambda _, rows: rows["ends"], [tuned.at_ends])
    config = tuned.Tunings(arms, 2, n_claimed=5)
    jobs = study.jobs(config, Inputs({folder: {"weights": ""}}, ""))
    assert len({str(each.job) for each in jobs}) == 6 and len(jobs) == 8
    counts: Any = study.run(config, models=[folder], folder=tmp_path).where(metric="accuracy", kind="first").frame
    for (part, condition), n in counts.groupby(["part", "condition"])["n"]:
        letters = 3 * (5 if condition in tuned.CLAIMED[part] else 2)
        assert set(n) == {letters}


def test_mean_attention_equals_a_loop(folder):
    model = tuned.loaded(folder)
    prompts = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=2).sample(4, model.tokenizer, seed=3)
    names = ["blocks.1.attn.hook_pattern"]
    _, cache = model.run_with_cache(prompts.tokens, names_filter=names)
    pattern, tokens = cache[names[0]][:, 2], prompts.tokens
    colon = model.tokenizer.convert_tokens_to_ids(":")
    expected = {"align": np.zeros((6, 3)), "lookup": np.zeros((6, 6))}
    for row in range(4):
        *examples, last = (tokens[row] == colon).nonzero()[:, 0].tolist()
        for letter in range(6):
            for place in range(3):
                symbol = int(tokens[row, last - 3 + place])
                expected["align"][letter, place] += float(pattern[row, last + letter, last - 3 + place]) / 4
                for near, offset in itertools.product(examples, range(2)):
                    there = near + 1 + 2 * tokens[row, near - 3 : near].tolist().index(symbol) + offset
                    expected["lookup"][letter, 2 * place + offset] += float(pattern[row, last + letter, there]) / 4
    for what, wanted in expected.items():
        found: Any = attention_figures._mean_attention(model, prompts, (1, 2), what)
        grid = found.pivot(index="query", columns="key", values="value").to_numpy()
        np.testing.assert_allclose(grid, wanted, atol=1e-5)


def emergence_table(steps: dict[str, list[float]]) -> Table:
    return table_of(
        [
            {"arm": "a", "part": "emergence", "seed": seed, "metric": metric, "value": value}
            for metric, values in steps.items()
            for seed, value in enumerate(values)
        ]
    )


def test_before_counts_only_what_emerged_and_was_earlier():
    table = emergence_table({"align": [10, 30, 20, np.nan, np.nan], "lookup": [20, 20, 20, 40, np.nan]})
    assert before_in("align", "lookup")(table).tolist() == [True, False, False, False]
    assert before_in("lookup", "align")(table).tolist() == [False, True, False, True], (
        "of the last seed there is no order"
    )
    assert before_in("align", "lookup")(emergence_table({"align": [10, 10]})).all()


def test_a_tenth_of_the_steps_is_that_of_each_tuning_whatever_else_was_tuned():
    courses = [
        pd.DataFrame(
            {"arm": arm, "seed": 0, "step": np.arange(0, last + 1, last // 20), "value": np.linspace(0, 1, 21)}
        )
        for arm, last in (("short", 240), ("long", 1000))
    ]
    about = {"metric": "accuracy", "kind": "first", "level": "model", "ood": False, "offset": None}
    found: Any = tuned.emerged(pd.concat(courses).assign(**about))
    short, long = found[found["part"] == "abruptness"]["value"]
    assert short == pytest.approx(long) and short < 0.2


def test_layers_apart_pairs_seeds():
    rows = [
        {"seed": seed, "metric": name, "layer": layer}
        for name, layers in (("align_query_attention", (1, 3)), ("lookup_attention", (4, 4)))
        for seed, layer in enumerate(layers)
    ]
    table = table_of(rows, part="after", condition="in distribution", of="best head", value=1.0)
    assert LAYERS_APART.at(part="after")(table).tolist() == [3, 1]


def test_courses_are_means_over_seeds_and_keep_the_last_probe():
    rows = []
    for seed, step in itertools.product((0, 1), (0, 1, 2, 3)):
        about = {"seed": seed, "step": step}
        rows.append({**about, "metric": "accuracy", "kind": "first", "level": "model", "value": seed / 2 + step / 10})
        for level, head, value in (("layer", None, -0.1), ("head", 0, 0.0), ("head", 1, 0.1)):
            of_heads = {"metric": "lookup", "kind": "all", "level": level, "layer": 0, "head": head}
            rows.append({**about, **of_heads, "value": value + seed / 2})
    course = pd.DataFrame(rows).assign(arm="a", ood=False, offset=None, low=0.0, high=1.0, n=4)
    found: Any = tuned.courses(course, every=2)
    rows: Any = as_rows([found], KEYS)
    assert sorted(found["step"].unique()) == [0, 2, 3] and rows["seed"].isna().all()
    model = found[found["of"] == "model"].set_index("step")["value"]
    assert model.to_dict() == pytest.approx({0: 0.25, 2: 0.45, 3: 0.55})
    assert found[found["of"] == "best head"]["value"].to_list() == pytest.approx([0.35] * 3)


def test_the_prior_of_figure_7_goes_from_the_weakest_to_the_strongest():
    rows = [
        {"arm": f"λ = {decay}", "part": part, "step": step, "value": value}
        for decay, late in ((1, 0.5), (16, 1.0), (4, 0.6))
        for part, step, value in (("mean", None, late), ("course", 0, 0.3), ("course", 9, late))
    ]
    ends = {end: [row["value"] for row in rows] for end in ("low", "high")}
    about = {"seed": None, "condition": "in distribution", "metric": "accuracy", "kind": "first"}
    faster, learned, *between = EXPERIMENTS["icatune/fig7"].check(table_of(rows, **about, **ends))
    assert faster.claim.startswith("λ = 16 is learned faster than λ = 1 ") and faster.measured.value == 0.5
    assert learned.met and learned.control_fails
    assert [check.claim[: check.claim.index(" (")] for check in between] == [
        "λ = 4 is ahead of λ = 1 on average over steps",
        "λ = 16 is ahead of λ = 4 on average over steps",
    ]
    assert all(check.met and check.control_fails for check in between)


def test_phrases_are_accepted_by_their_own_automata_alone(char_tokenizer):
    task = ac.Seq2SeqTask(x_len=3, phrase_len=3, n_examples=1, alignment="permutation")
    accepted = _accepted(task.sample(30, char_tokenizer, seed=0)).float().mean(0)
    gold = torch.zeros(3, 3, dtype=torch.bool)
    gold[torch.arange(3), list(task.aligned)] = True
    assert (accepted[gold] == 1).all() and (accepted[~gold] < 0.2).all()


def test_standard_tuning_reads_no_more_examples_than_there_are():
    task = {**SMOKE_TASK, "automata": "task"}
    arms = _methods(SMOKE_TASK, SMOKE, 88, (0,), (20, 800))
    assert all(arm.task == task for arm in arms)
    batches = {arm.name: TuneConfig(**arm.config).batch for arm in arms}
    assert batches == {"ICA-Tune, N = 20": 2, "standard, N = 20": 20, "ICA-Tune, N = 800": 2, "standard, N = 800": 88}
    assert {TuneConfig(**arm.config).dataset_size for arm in arms} == {20, 800}


@pytest.mark.parametrize(("at_8", "expected"), [(0.9, [True, True]), (1.0, [False, True])])
def test_longer_inputs_are_blamed_only_where_standard_tuning_falls_short_of_them(at_8, expected):
    ends = {"ICA-Tune, N = 800, m = 5": 1.0, "standard, N = 800, m = 5": 1.0}
    ends |= {"ICA-Tune, N = 800, m = 8": 1.0, "standard, N = 800, m = 8": at_8}
    about = {"part": "course", "condition": "in distribution", "metric": "accuracy", "kind": "all"}
    rows = [
        {"arm": arm, "step": step, "value": value, "low": value - 0.01, "high": value + 0.01}
        for arm, end in ends.items()
        for step, value in ((0, 0.3), (200, end))
    ]
    checks = STANDARD.check(table_of(rows, **about))
    assert [check.met for check in checks] == expected
    assert checks[1].control_fails == (at_8 < 1)


def test_arms_of_one_recipe_are_judged_together():
    kept = Table.load(Path(__file__).parents[3] / "docs/results/icatune-fig4/smollm2")
    frame: Any = kept.frame
    frame = frame[frame["arm"] == tuned.SMOLLM2_ICA.name]
    others = frame.assign(arm=tuned.SMOLLM2_MORE.name, seed=frame["seed"] + 10)
    checks = FIG4.check(Table(pd.concat([frame, others], ignore_index=True), kept.provenance))
    alone = FIG4.check(Table(frame, kept.provenance))
    assert [check.claim for check in checks] == [check.claim for check in alone]
    assert {2 * len(check.measured.seeds) for check in alone} == {len(check.measured.seeds) for check in checks}
    assert [check.measured.value for check in checks] == pytest.approx([check.measured.value for check in alone])


def test_lags_are_those_that_the_details_tell():
    kept = Table.load(Path(__file__).parents[3] / "docs/results/icatune-fig4/smollm2")
    told = [lag(kept, {"six more seeds", "another six seeds"}, "align_query", of) for of in ("lookup", "accuracy")]
    assert [f"{told[0]:.1f}", f"{told[1]:.0f}"] == ["17.5 [-5.5, 40.5]", "-4 [-45, 37]"]
    assert f"{lag(kept, 'larger steps', 'align_query', 'accuracy'):.0f}".startswith("-7 ")


def test_fig_6_is_judged_by_seeds_where_its_table_has_them():
    rows = pd.DataFrame(
        {"arm": f"{method}, N = {n}", "seed": seed, "step": step, "ood": ood, "value": value}
        for method, loss in (("ICA-Tune", 0.0), ("standard", 0.2))
        for n in (50, 800)
        for seed in range(5)
        for ood in (False, True)
        for step, value in ((0, 0.2), (10, 0.5), (20, 0.5), (30, 0.5), (40, 1 - loss * ood))
    ).assign(metric="accuracy", kind="all", level="model", offset=np.nan, layer=np.nan, low=np.nan, high=np.nan, n=10)
    heads = rows.assign(metric="align_query", level="head", layer=1, head=0)
    layers = heads.assign(level="layer", head=np.nan)
    summarized = _summarize(tuned.Tunings((), every=1), {"course": pd.concat([rows, heads, layers], ignore_index=True)})
    checks = {check.claim: check for check in FIG6.check(Table(summarized, Provenance("test")))}
    learned = checks["ICA-Tune learns from N = 50 examples (accuracy, all tokens)"]
    assert learned.measured.seeds == (1.0,) * 5 and learned.verdict == "no evidence"  # so is standard fine-tuning
    (lost,) = (check for claim, check in checks.items() if claim.startswith("Standard fine-tuning loses more"))
    np.testing.assert_allclose(lost.measured.seeds, [0.2] * 5)
    assert lost.verdict == "holds" and lost.control.value == 0


@pytest.mark.parametrize("experiment", [FIG4, FIG6, FIG10, STANDARD])
def test_scales_for_the_paper_are_valid(experiment):
    config: Any = experiment.scales["paper"]
    inputs = Inputs({"llama": {"n_layers": 32}}, "")
    arms: Any = config.arms(inputs) if callable(config.arms) else config.arms
    for arm in arms:
        TuneConfig(**arm.config)
        ac.Seq2SeqTask(**arm.task)


@pytest.mark.slow
def test_figure_4_tells_success_from_failure(folder, tmp_path):
    experiment = EXPERIMENTS["icatune/fig4"]
    config = replace(experiment.scales["smoke"], arms=(ARM,), n=3)
    table = experiment.run(config, models=[folder], jobs=1, folder=tmp_path)
    assert list(table.frame.columns) == [*KEYS, *VALUES]
    failed = {check.claim: check.met for check in experiment.check(table)}
    assert not any(holds for claim, holds in failed.items() if claim.startswith(("After", "A head", "The gain")))
    frame = table.frame.copy()
    good = (frame["part"] == "after") & (frame["condition"] != "labels corrupted")
    ahead = frame["metric"].isin(["accuracy", "align_query"]) & (frame["kind"] != "later")
    frame.loc[good & ahead, ["value", "low", "high"]] = 1.0
    frame.loc[(frame["part"] == "before") & (frame["metric"] == "align_query"), ["value", "low", "high"]] = 0.2
    frame.loc[(frame["part"] == "emergence") & (frame["metric"] == "align_query"), "value"] = 1.0
    frame.loc[frame["part"] == "abruptness", "value"] = 0.8 + frame["seed"].astype(float) / 100
    checks = {check.claim: check for check in experiment.check(Table(frame, table.provenance))}
    for claim, check in checks.items():
        if not claim.startswith("Lookup heads lie"):
            assert check.met and check.control_fails, claim


def test_conjecture_prompts_hold_one_alignment_each():
    drawn = conjecture.draw(6, 4, 5, seed=2)
    ids, positions = conjecture.tokens(drawn)
    assert ids.shape == (6, 6 * 10) and torch.equal(ids[:, positions].view(6, 6, 4), drawn["y"])
    assert len({tuple(row) for row in drawn["aligned"][:, 0].tolist()}) > 1
    for x, y, aligned in zip(drawn["x"], drawn["y"], drawn["aligned"][:, 0].tolist(), strict=True):
        letter_of: dict[int, int] = {}
        for symbols, letters in zip(x.tolist(), y.tolist(), strict=True):
            for phrase, letter in enumerate(letters):
                assert letter_of.setdefault(symbols[aligned[phrase]], letter) == letter
        assert len(set(letter_of.values())) == 4
    assert list(align_by_em(drawn["x"][0, :-1], drawn["y"][0, :-1]).alignment) == drawn["aligned"][0, 0].tolist()
    assert conjecture.by_em(drawn["x"][0], drawn["y"][0]).all()


def test_reproduce_shares_tuned_models_unless_told_otherwise(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "icatune/prior", "--scale", "smoke"]) == 0
    assert main(["reproduce", "icatune/fig1", "--scale", "smoke", "--model", folder]) == 0
    assert (Path("runs") / "icatune" / "fig1" / "smoke" / "table.csv").is_file()
    assert main(["reproduce", "icatune/appF", "--scale", "smoke"]) == 0
    assert (Path("runs") / "jobs").is_dir()
    assert "claim" in capsys.readouterr().out
