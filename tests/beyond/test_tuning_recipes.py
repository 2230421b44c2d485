"""What of a recipe is changed in each arm, and the claims on arms."""

from dataclasses import asdict
from typing import Any

import pytest
from measured import table_of

from align_circuits.beyond.tuning_recipes import RECIPE, SINGLE_LAYER
from align_circuits.papers.icatune.tuned_models import SMOLLM2, TOY
from align_circuits.training.tuning import TuneConfig

PROBES = {"probe_every", "probe_prompts", "precision"}


def changed(one: TuneConfig, other: TuneConfig) -> set[str]:
    """The settings in which two tunings differ, but for probes and precision."""
    return {name for name, value in asdict(one).items() if value != asdict(other)[name]} - PROBES


@pytest.mark.parametrize(("scale", "recipe"), [("cpu", TOY), ("smollm2", SMOLLM2)])
def test_the_arms_go_through_all_that_tells_the_recipe_from_the_papers(scale, recipe):
    ours, config = TuneConfig(**recipe), RECIPE.scales[scale]
    *parts, last = (TuneConfig(**arm.config) for arm in config.arms)
    of_parts = [changed(part, ours) - {"steps"} for part in parts]
    assert sum(map(len, of_parts)) == len(set().union(*of_parts)), "each setting is changed in one arm"
    paper = TuneConfig(projections=("q", "k", "v"), batch=1)  # the defaults, written out
    assert set().union(*of_parts) | {"steps", "warmup"} >= changed(ours, paper)
    assert changed(last, paper) == {"lr"} and last.lr == pytest.approx(15 * paper.lr)
    seen = {part.steps * part.prompts_per_step for part in parts}
    assert seen == {ours.steps * ours.prompts_per_step}, "all see as many prompts"


def test_one_layer_gets_more_steps_or_more_projections_or_company():
    known = TuneConfig(**{**TOY, "projections": ("q", "k"), "layers": 2})  # as in icatune/fig10
    arms = [TuneConfig(**arm.config) for arm in SINGLE_LAYER.scales["cpu"].arms]
    assert [changed(arm, known) for arm in arms] == [{"steps"}, {"projections"}, {"layers"}]


@pytest.mark.parametrize("experiment", [RECIPE, SINGLE_LAYER])
def test_an_arm_suffices_where_first_letters_are_right_after_it_and_not_before(experiment):
    arms = [arm.name for arm in experiment.scales["cpu"].arms]
    rows: list[dict[str, Any]] = [
        {"arm": arm, "seed": seed, "part": part, "value": value}
        for place, arm in enumerate(arms)
        for seed in range(6)
        for part, value in (("before", 0.3 + seed / 100), ("after", (0.99, 0.5)[place % 2] + seed / 1000))
    ]
    table = table_of(rows, condition="in distribution", metric="accuracy", kind="first", of="model")
    verdicts = [check.verdict for check in experiment.check(table)]
    assert verdicts == [("holds", "fails")[place % 2] for place in range(len(arms))]
