"""What heads attend to and what the model predicts, read in a single pass."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.heads.score import ScoreAccumulator, resolve
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.models.protocol import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.alike_prompts import Rows, forward_alike
from align_circuits.run.evaluation import evaluation_table
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Table


class OnePass:
    """Collects the scores of heads, and accuracy and log-probability of targets, as a pass gives them.

    Args:
        model: Whose heads are scored.
        prompts: Prompts with targets and relations.
        metrics: As `score_heads` takes them.
    """

    def __init__(self, model: HookedModel, prompts: Prompts, metrics: Sequence[str] | None = None):
        self.scores = ScoreAccumulator(resolve(prompts, metrics), model.cfg.n_layers, model.cfg.n_heads, len(prompts))
        self.targets = TargetMetrics.of(prompts, ("accuracy", "log_prob"))
        self.values = np.full((2, len(self.targets.token)), np.nan)
        # Every position that either of the two needs is read once. `_index` says where each of these rows stands among
        # those of the scores (0) and of the targets (1); -1: it is not among them.
        needed = torch.cat([torch.stack([reader.prompt, reader.query], 1) for reader in (self.scores, self.targets)])
        rows, inverse = needed.unique(dim=0, return_inverse=True)
        self._index = torch.full((2, len(rows)), -1)
        self._index[0, inverse[: len(self.scores.prompt)]] = torch.arange(len(self.scores.prompt))
        self._index[1, inverse[len(self.scores.prompt) :]] = torch.arange(len(self.targets.prompt))
        self.rows = Rows(prompts, *rows.T.contiguous(), self._add_pattern, self._add_logits)

    def _rows_of(self, reader: int, row: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        own = self._index[reader, row]
        return own[own >= 0], values[(own >= 0).to(values.device)]

    def _add_pattern(self, row: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        own, pattern = self._rows_of(0, row, pattern)
        self.scores.add(own, layer, pattern)

    def _add_logits(self, row: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
        self.targets.assign(self.values, *self._rows_of(1, row, logits))


@leaves_as_found
def score_and_evaluate(
    model: HookedModel, prompts: Prompts, *, options: RunOptions = RunOptions()
) -> tuple[Table, Table]:
    """Returns the tables of `score_heads` and of `evaluate`, from one pass in place of two.

    Log-probabilities differ from those of `evaluate` by rounding.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets and relations.
        options: Engine and batch size.

    Raises:
        ValueError: As `score_heads` and `evaluate` do.
    """
    both = OnePass(model, prompts)
    engine = forward_alike(model, [both.rows], options=options)
    provenance = provenance_of("score_heads", model, prompts, engine, {"metrics": list(both.scores.metrics)})
    return (
        both.scores.table(provenance),
        evaluation_table(prompts, both.values, replace(provenance, verb="evaluate", settings={})),
    )
