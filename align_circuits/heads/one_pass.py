"""What heads attend to and what the model predicts, read in a single pass."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.permutation_tests import PermutationTests
from align_circuits.heads.score import ScoreAccumulator, resolve
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.alike_prompts import Rows, forward_alike
from align_circuits.run.evaluation import evaluation_table
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Table


class OnePass:
    """Collects the scores of heads, and accuracy and log-probability of targets, as a pass gives them."""

    def __init__(self, model: HookedModel, prompts: Prompts, metrics: Sequence[str] | None = None):
        self.scores = ScoreAccumulator(resolve(prompts, metrics), model.cfg.n_layers, model.cfg.n_heads, len(prompts))
        self.targets = TargetMetrics.of(prompts, ("accuracy", "log_prob"))
        self.values = np.full((2, len(self.targets.token)), np.nan)
        self.rows = Rows.joined(
            prompts,
            [(self.scores.prompt, self.scores.query, self.scores.add)],
            [(self.targets.prompt, self.targets.query, partial(self.targets.assign, self.values))],
        )


@leaves_as_found
def score_and_test(
    model: HookedModel,
    prompts: Prompts,
    metrics: Sequence[str],
    relations: Sequence[str],
    *,
    seed: int = 0,
    options: RunOptions = RunOptions(),
) -> tuple[Table, dict[str, Float[ndarray, "layer head"]]]:
    """Returns the table of `score_heads` and the p-values of `p_values`, and raises what they do, from one pass."""
    scores = ScoreAccumulator(resolve(prompts, metrics), model.cfg.n_layers, model.cfg.n_heads, len(prompts))
    tests = PermutationTests(model, prompts, relations, seed=seed, options=options)
    rows = Rows.joined(prompts, [(scores.prompt, scores.query, scores.add), *tests.readers])
    engine = forward_alike(model, [rows], options=options)
    provenance = provenance_of("score_heads", model, prompts, engine, {"metrics": list(scores.metrics)})
    return scores.table(provenance, prompts.group), tests.p_values()


@leaves_as_found
def score_and_evaluate(
    model: HookedModel, prompts: Prompts, metrics: Sequence[str] | None = None, *, options: RunOptions = RunOptions()
) -> tuple[Table, Table]:
    """Returns the tables of `score_heads` and of `evaluate`, and raises what they do, from one pass in place of two.

    Log-probabilities differ from those of `evaluate` by rounding.
    """
    both = OnePass(model, prompts, metrics)
    engine = forward_alike(model, [both.rows], options=options)
    provenance = provenance_of("score_heads", model, prompts, engine, {"metrics": list(both.scores.metrics)})
    evaluated = replace(provenance, verb="evaluate", settings={"metrics": both.targets.names})
    return both.scores.table(provenance, prompts.group), evaluation_table(both.targets, both.values, evaluated)
