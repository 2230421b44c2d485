"""Interchange interventions: whether a patched activation brings the other prompt's answer along."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.hooks.edits import Edit, Patch, edits_provenance
from align_circuits.hooks.head_names import HeadLike, heads_of, shared_at
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import HeadSite
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.baseline_metrics import baseline_table, other_run
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import OwnMetric, TargetMetrics, by_kind
from align_circuits.tables.intervals import proportion_change, unpaired_difference
from align_circuits.tables.tables import Table

NOTHING = "nothing"
"""The name of the unpatched run, the control of all others."""

HEAD = "head"
"""The name of all runs with a single head patched."""


@checked
@leaves_as_found
def interchange_accuracy(
    model: HookedModel,
    pair: Pair,
    *,
    heads: Sequence[HeadLike] | None = None,
    sets: Mapping[str, Sequence[HeadLike]] | None = None,
    edits: Mapping[str, Sequence[Edit]] | None = None,
    site: HeadSite = "z",
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns interchange-intervention accuracy: how often a patched model gives the other prompt's answer.

    The base prompts run with an activation of the source prompts, in which another answer is right. `"interchange"` is
    the share of targets whose prediction is then right in the source prompt, `"corrupted_correct"` the share whose
    prediction is still right in the base prompt. Only targets count whose answers are known in both and have no token
    in common. 1 for a head that alone carries what distinguishes the answers; the row `"nothing"`, the unpatched run,
    shows the level of a head that carries nothing of it.

    Source: Geiger et al. (2021), "Causal Abstractions of Neural Networks". Misleads where several heads carry the same
    (each alone changes nothing: patch them as a set), and where the base prompt is answered wrongly.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        pair: Clean and corrupted prompts with known answers in both, as `Seq2SeqTask.corrupt(prompts, "query")` and
            `Prompts.from_pairs(..., corrupted_answer=)` return them. Its metric is not used; its kind of targets is.
        heads: Which heads are patched, each alone; all by default.
        sets: Sets of heads by name, each patched together.
        edits: Other patches by name, such as `{"middle": [Patch(site="resid_post", layers=[3])]}`; a `Patch` without
            values takes those of the source prompts.
        site: What is patched of a head. Under grouped-query attention the heads that share a key head are patched
            together at `"k"` and `"v"`, and have equal rows.
        options: Engine and batch size.

    Returns:
        A table keyed by level, layer, head, `patched` (`"head"`, the name of a set or of an edit, or `"nothing"`) and
        `metric`; 95% intervals over prompts.

    Raises:
        ValueError: Prompts whose answers are not known in both, or that have an answer in common at every target; a
            head that the model does not have; a set or an edit without anything; a name given twice.
    """
    selected, differ = heads_of(model.cfg, heads), _where_answers_differ(pair)
    sets, edits = sets or {}, edits or {}
    patches: dict[str, Sequence[Edit]] = {}
    for name, together in sets.items():
        if not len(together):
            raise ValueError(f"sets[{name!r}] has no heads: name at least one")
        patches[name] = [Patch(heads_of(model.cfg, together), site=site)]
    for name, given in edits.items():
        if isinstance(given, Edit) or not len(given):
            raise ValueError(f"edits[{name!r}]: give a list of edits, with at least one")
    if taken := {NOTHING, HEAD, *sets} & {*edits} or {NOTHING, HEAD} & {*sets}:
        raise ValueError(f"the name {min(taken)!r} is given twice, or means the model or a head: take another")
    patches |= edits
    shared = shared_at(model.cfg, site)
    firsts = [(layer, head // shared * shared) for layer, head in selected]
    groups = [*dict.fromkeys(firsts)]  # heads that share a key head have a row each, but one patch, which runs once
    of_groups = [[Patch([(layer, first + i) for i in range(shared)], site=site)] for layer, first in groups]
    edit_sets = [[], *of_groups, *patches.values()]
    # The answer of the source prompts is "interchange", that of the base prompts "corrupted_correct".
    right = [(pair.clean.correct, "clean"), (pair.corrupted.own_correct, "corrupted")]
    metrics = [_answers(pair.clean, *side) for side in (right if pair.direction == "denoise" else right[::-1])]
    # Of all targets, so that these runs may share their unedited one with other sweeps; then of those that count.
    of_all = TargetMetrics.of(pair.base, metrics)
    values, engine = of_all.measure_edited(model, edit_sets, source=pair.source, with_source=True, options=options)
    run_of = [0, *(1 + groups.index(first) for first in firsts), *range(1 + len(groups), values.shape[1])]
    values = values[:, run_of][..., differ.numpy()]
    targets = TargetMetrics.of(pair.base.select_targets(differ), metrics)
    rows = [("model", None, None, NOTHING), *(("head", *head, HEAD) for head in selected)]
    rows += [("set", None, None, name) for name in patches]
    keys = pd.DataFrame(rows, columns=["level", "layer", "head", "patched"])
    named = pd.DataFrame({"metric": ["interchange", "corrupted_correct"]})
    keys = named.merge(keys, how="cross").loc[:, [*keys, "metric"]]
    means = np.stack([targets.by_prompt(of_metric)[0] for of_metric in values])  # metric, run, prompt
    weights = np.tile(targets.weights, (len(keys), 1))
    settings = {
        "site": site,
        "sets": {name: [list(head) for head in heads_of(model.cfg, together)] for name, together in sets.items()},
        "edits": {name: edits_provenance(given)["edits"] for name, given in edits.items()},
    }
    provenance = replace(pair, metric=None).provenance("interchange", model, settings, engine)
    by_run, group = means[:, :-1].reshape(len(keys), -1), pair.base.group
    table = Table.from_prompts(keys, by_run, weights, provenance, group=group)
    runs = {pair.base_run: means[:, 0], other_run(pair.base_run): means[:, -1]}
    return replace(table, baselines=baseline_table(named, runs, weights[:2], provenance, group))


def interchange_verdicts(interchanges: Table, alpha: float) -> pd.DataFrame:
    """Returns whether each patch of a table of interchange interventions carries the other prompt's answer.

    A patch does if the whole 95% interval of how far its `"interchange"` exceeds that of the unpatched run lies above
    0, and the set `"named"` if it also does better than the sets `"random 0"`, `"random 1"`, ... of as many heads. The
    interval is over prompts, of which both runs are paired; without per-prompt values it is wider, that of two runs as
    if of other prompts. Of each patch by itself: among many that carry nothing some are called so by chance.

    Args:
        interchanges: What `interchange_accuracy` returned.
        alpha: The limit of the p-value beside random sets, (1 + sets that do as well) / (1 + sets).

    Returns:
        A row for each patch but the random ones, with `layer`, `head`, `patched`, `carries`, the interchange accuracy
        `value` with its interval, `unpatched` (that of the unpatched run), `kept` (how often the answer of the base
        prompt is given), and, of `"named"`, the number and the best of its `controls` and `p`.
    """
    frame = interchanges.frame
    rows, kept = (frame.loc[frame["metric"] == metric] for metric in ("interchange", "corrupted_correct"))
    rows = rows.assign(kept=kept["value"].to_numpy()).drop(columns=["metric", "n", "level"])
    drawn = rows["patched"].str.fullmatch(r"random \d+")
    controls, nothing = rows.loc[drawn, "value"], rows[rows["patched"] == NOTHING]
    rows = rows[~drawn & (rows["patched"] != NOTHING)].assign(unpatched=nothing["value"].item(), n_controls=0)
    rows[["controls", "p"]] = np.nan
    if interchanges.values is None or interchanges.weights is None:
        ends, of_nothing = (each[["value", "low", "high"]].to_numpy(float) for each in (rows, nothing))
        low, _ = unpaired_difference(ends, np.broadcast_to(of_nothing, ends.shape))
    else:
        change = interchanges.values[rows.index] - interchanges.values[nothing.index]
        low, _ = proportion_change(change, interchanges.weights[rows.index], yes_or_no=True)
    rows["carries"] = low > 0
    named = rows["patched"] == "named"
    if named.any() and len(controls):
        p = (1 + (controls >= rows.loc[named, "value"].item()).sum()) / (1 + len(controls))
        rows.loc[named, ["n_controls", "controls", "p"]] = len(controls), controls.max(), p
        rows.loc[named, "carries"] &= p <= alpha
    return rows.reset_index(drop=True)


def _answers(clean: Prompts, right: Bool[Tensor, "target answer"] | None, name: str) -> OwnMetric:
    """The metric of whether a prediction is right."""
    assert right is not None  # answers_differ has seen both

    def metric(logits: Float[Tensor, "target d_vocab"], targets: pd.DataFrame) -> Float[Tensor, " target"]:
        answer = logits.argmax(1).cpu()[:, None] == clean.answer_tokens
        return (answer & right[torch.from_numpy(targets.index.to_numpy(copy=True))]).any(1).to(logits)

    metric.__name__ = name
    return metric


def answers_differ(pair: Pair) -> Bool[Tensor, " target"]:
    """Returns at which targets of the pair's kind the answers of both prompts are known and have no token in common."""
    if pair.corrupted.own_correct is None or pair.clean.correct is None:
        return torch.zeros(len(pair.clean.targets), dtype=torch.bool)
    clean, corrupted = pair.clean.correct, pair.corrupted.own_correct
    of_kind = torch.from_numpy(by_kind(pair.clean)[pair.kind or "all"])
    return corrupted.any(1) & ~(clean & corrupted).any(1) & of_kind


def _where_answers_differ(pair: Pair) -> Bool[Tensor, " target"]:
    """At which targets each of the pair's prompts has an answer of its own."""
    differ = answers_differ(pair)
    if not differ.any():
        why = "both give the same answers"
        if pair.corrupted.own_correct is None or pair.clean.correct is None:
            unknown = "corrupted" if pair.corrupted.own_correct is None else "clean"
            why = f"the answers to the {unknown} prompts are not known"
        raise ValueError(
            f"{why}: interchange takes pairs whose answers are known and differ, as Prompts.from_pairs(..., "
            "corrupted_answer=) and Seq2SeqTask.corrupt(prompts, 'query') make them"
        )
    return differ
