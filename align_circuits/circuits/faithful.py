"""Circuits as sets of edges: how much of the model's behaviour is left when all other edges are corrupted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.integrate import trapezoid
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.circuits.decomposition import on_merged_weights, residual_edges_of
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.head_names import Head, HeadLike, describe, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.residual_edges import PatchEdges, hook_points, sent_from
from align_circuits.run.forward_pass import capture, choose_engine
from align_circuits.run.options import RunOptions, progress_bar
from align_circuits.run.pairs import Pair
from align_circuits.run.prompt_checks import check_fits
from align_circuits.run.target_metrics import EDIT_SETS_A_PART
from align_circuits.tables import intervals as stats
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.ranking import RISE_WITH_DAMAGE
from align_circuits.tables.tables import SHARES, VALUES, Table, directions_of, joined_in

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of edges at which Mueller et al. (2025) measure a circuit."""

ROUNDING = 1e-5
"""A smaller change of the metric, in every prompt, is none."""

Circuits = Bool[Tensor, "circuit receiver sender"]
"""The edges that each circuit keeps, by the places of a `Graph`'s receivers and senders."""


@checked
@leaves_as_found
@on_merged_weights
def faithfulness(
    model: HookedModel,
    pair: Pair,
    scores: Table,
    *,
    fractions: Sequence[float] = FRACTIONS,
    by: Literal["signed", "absolute"] = "signed",
    heads: Mapping[str, Sequence[HeadLike]] | None = None,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns how faithful the circuits are that keep the best edges: f(C) = (M(C) - M(none)) / (M(all) - M(none)).

    In a circuit's run the edges that it keeps carry what really arrives, and all others what they carry on the
    corrupted prompts. M is the mean over prompts of the metric of such a run; with all edges it is the model's on clean
    prompts, with none that on corrupted ones: f is 1 and 0 for these two. It may leave [0, 1].

    Source: Mueller et al. (2025), "MIB: A Mechanistic Interpretability Benchmark", §3; Wang et al. (2022); Hanna et al.
    (2024). Edges are kept by score alone; those that lead nowhere change nothing. Misleads as a sign that a circuit is
    all there is: a backup that the corruption also reaches is never missed. The control is `completeness`.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        pair: Clean and corrupted prompts; the metric is the log-probability of all targets unless the pair has another,
            and the direction is `"noise"` always.
        scores: Of edges, from `attribute_edges` or `patch_edges` in the direction `"noise"`, best from other prompts.
        fractions: The shares of edges that circuits keep, above 0, at most 1; none and all are added, and shares that
            come to the same number of edges are measured once.
        by: `"signed"` keeps first the edges whose corruption costs most (for CPR), `"absolute"` those whose corruption
            changes most (for CMD).
        heads: Sets of heads by name, such as those that `localize` found: each is measured as the circuit of all edges
            among them, the embedding, the MLPs and the logits (`Graph.among`).
        options: Engine and batch size.

    Returns:
        A table keyed by `circuit` (`"edges"`, or a name of `heads`), `fraction` (share of edges kept), `edges` (their
        number) and `metric`: `"faithfulness"`, and the pair's metric under its own name. The intervals are over
        prompts, those of a ratio for faithfulness.

    Raises:
        ValueError: Scores of other edges, or of direction `"denoise"` for circuits chosen `by="signed"`; fractions
            outside (0, 1], prompts that do not match, or prompts on which the corruption changes nothing.
    """
    fractions = np.ravel(fractions).tolist()
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions={tuple(fractions)}: give shares of edges above 0, at most 1")
    if by not in ("signed", "absolute"):
        raise ValueError(f"by={by!r}: choose 'signed' or 'absolute'")
    if heads and "edges" in heads:
        raise ValueError("heads: 'edges' is what circuits chosen by scores are called; give this set another name")
    runs = CircuitRuns(model, pair, options)
    graph, order = runs.graph, _order(scores, runs.graph, by)
    # None and all of the edges run like any circuit, not as plain runs: so f is 0 and 1 there exactly.
    counts = sorted({0, *(round(fraction * len(order)) for fraction in fractions), len(order)})
    ranks = torch.full(graph.edges.shape, len(order))
    ranks[tuple(order.T)] = torch.arange(len(order))
    sets = heads or {}
    circuits = torch.stack([*(ranks < count for count in counts), *map(graph.among, sets.values())])
    values = runs.measure(circuits)
    none, all_of = values[0], values[len(counts) - 1]
    if not np.nanmax(np.abs(all_of - none)) > ROUNDING:
        raise ValueError("the corrupted prompts change no prediction of the model: take another corruption")
    changes = np.concatenate([values - none, [all_of - none]])
    weights = np.broadcast_to(runs.targets.weights, changes.shape)
    if pair.clean.group is not None:
        changes, weights = stats.by_group(changes, weights, pair.clean.group.numpy())
    value, low, high = stats.ratio(changes[:-1], changes[-1], weights[0], runs.targets.names[0] in SHARES)
    # None and all of the edges have these by definition.
    low[[0, len(counts) - 1]] = high[[0, len(counts) - 1]] = value[[0, len(counts) - 1]]
    edges = circuits.sum((1, 2)).numpy()
    keys = {"circuit": ["edges"] * len(counts) + [*sets], "fraction": edges / len(order), "edges": edges}
    provenance = runs.provenance("faithfulness", {"fractions": list(fractions), "by": by})
    of_metric = pd.DataFrame({**keys, "metric": runs.targets.names[0]})
    measured = runs.targets.table(of_metric, values, provenance, measured=True).frame
    of_model = pd.DataFrame({**keys, "metric": "faithfulness", "value": value, "low": low, "high": high})
    return Table(pd.concat([of_model.assign(n=measured["n"]), measured], ignore_index=True), provenance)


def circuit_performance_ratio(table: Table) -> float:
    """Returns the circuit performance ratio: the area under faithfulness over the share of edges, by trapezoids.

    Over the shares that were measured above 0, up to 1; near 1 for a model whose smallest circuit does all (what lies
    below the smallest share is left out), more where a circuit does better than the model. Source: Mueller et al.
    (2025), §3; for circuits that were chosen `by="signed"`.

    Args:
        table: What `faithfulness` returned.
    """
    return _area(table, lambda f: f)


def circuit_model_distance(table: Table) -> float:
    """Returns the circuit-model distance: the area between faithfulness and 1 over the share of edges, by trapezoids.

    0 is best: every circuit then behaves as the model. Source: Mueller et al. (2025), §3; for circuits that were chosen
    `by="absolute"`.

    Args:
        table: What `faithfulness` returned.
    """
    return _area(table, lambda f: np.abs(1 - f))


@checked
@leaves_as_found
@on_merged_weights
def completeness(
    model: HookedModel,
    heads: Sequence[HeadLike],
    pair: Pair,
    *,
    draws: int = 10,
    seed: int = 0,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns the metric of a circuit of heads and that of the model when both lose the same heads.

    F(C - K) beside F(M - K), for sets K of the circuit's heads: none of them, each alone, all of them, and random
    ones. A circuit that does what the model does, in the same way, loses what the model loses; where the model loses
    less, it has heads that the circuit lacks. Source: Wang et al. (2022), §4.1.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        heads: The circuit, with all edges among them, the embedding, the MLPs and the logits.
        pair: Clean and corrupted prompts; the metric is the log-probability of all targets unless the pair has another,
            and the direction is `"noise"` always.
        draws: How many random sets, each head with probability one half.
        seed: Of the sets.
        options: Engine and batch size.

    Returns:
        A table keyed by `without` (K, as people write heads), `of` (`"circuit"`, `"model"`, or their `"difference"`)
        and `metric`, with intervals over prompts, paired for the difference.

    Raises:
        ValueError: No heads, a head that the model does not have, or prompts that do not match.
    """
    heads, runs = heads_of(model.cfg, heads), CircuitRuns(model, pair, options)
    sets = [*dict.fromkeys([(), *((head,) for head in heads), tuple(heads), *_drawn(heads, draws, seed)])]
    remaining = [[head for head in of if head not in removed] for of in (heads, runs.graph.heads) for removed in sets]
    values = runs.measure(torch.stack([runs.graph.among(kept) for kept in remaining]))
    circuit, model_values = values[: len(sets)], values[len(sets) :]
    without = [describe(removed) or "nothing" for removed in sets]
    rows = [(name, of) for of in ("circuit", "model", "difference") for name in without]
    keys = pd.DataFrame(rows, columns=["without", "of"]).assign(metric=runs.targets.names[0])
    settings = {"heads": [list(head) for head in heads], "draws": draws, "seed": seed}
    values = np.concatenate([values, circuit - model_values])
    changes = (keys["of"] == "difference").to_numpy()
    provenance = runs.provenance("completeness", settings)
    return runs.targets.table(keys, values, provenance, measured=~changes, changes=changes)


@checked
@leaves_as_found
@on_merged_weights
def minimality(
    model: HookedModel,
    heads: Sequence[HeadLike],
    pair: Pair,
    *,
    draws: int = 10,
    seed: int = 0,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns how much a circuit needs each of its heads: F(C - K - head) - F(C - K), for the K that shows it most.

    Near 0 for a head that the circuit can do without, whatever else it loses. K is empty, or one of the random sets of
    `completeness`, chosen for the largest absolute mean: so noise looks like need, the more the more sets there are.
    Source: Wang et al. (2022), §4.2. Arguments as for `completeness`.

    Returns:
        A table keyed by layer, head, `without` (K) and `metric`, with intervals over prompts.

    Raises:
        ValueError: No heads, a head that the model does not have, or prompts that do not match.
    """
    heads, runs = heads_of(model.cfg, heads), CircuitRuns(model, pair, options)
    sets = dict.fromkeys([(), *_drawn(heads, draws, seed)])
    cases = [(head, removed) for head in heads for removed in sets if head not in removed]
    lost = [gone for head, removed in cases for gone in ((*removed, head), removed)]
    remaining = [tuple(head for head in heads if head not in gone) for gone in lost]
    circuits = list(dict.fromkeys(remaining))  # several cases share a circuit, which is run once
    values = runs.measure(torch.stack([runs.graph.among(kept) for kept in circuits]))
    row_of = [circuits.index(kept) for kept in remaining]
    change = values[row_of[::2]] - values[row_of[1::2]]
    means = np.abs(stats.weighted_mean(change, np.broadcast_to(runs.targets.weights, change.shape)))
    best = [max((i for i, (of, _) in enumerate(cases) if of == head), key=lambda i: means[i]) for head in heads]
    rows = [(*head, describe(removed) or "nothing") for head, removed in (cases[i] for i in best)]
    keys = pd.DataFrame(rows, columns=["layer", "head", "without"]).assign(metric=runs.targets.names[0])
    settings = {"heads": [list(head) for head in heads], "draws": draws, "seed": seed}
    return runs.targets.table(keys, change[best], runs.provenance("minimality", settings), changes=True)


class CircuitRuns:
    """Runs of circuits on clean prompts, in which all other edges carry what they carry on the corrupted ones.

    So it is whatever the direction of the pair, which is about patches.
    """

    def __init__(self, model: HookedModel, pair: Pair, options: RunOptions):
        check_fits(model, pair.clean)
        pair = replace(pair, direction="noise").prepared(model, options)
        self._model, self._pair, self.targets = model, pair, pair.target_metrics
        self._residual_edges = residual_edges_of(model, pair.clean)
        self.graph = self._residual_edges.graph
        # Once for all runs, so that those of the circuits and of the source differ by no engine's rounding.
        self._options = replace(options, engine=choose_engine(model, options, hook_points(self.graph)))
        self._source = capture(model, pair.corrupted, sent_from(self.graph), options=self._options)

    def measure(self, circuits: Circuits) -> Float[ndarray, "circuit prompt"]:
        """Returns the mean metric of each prompt when the model keeps only a circuit."""
        patched = self.graph.edges & ~circuits

        def run(corrupted: Circuits) -> tuple[Float[ndarray, "circuit prompt"], str]:
            edit = PatchEdges(self._residual_edges, self._source, corrupted)
            values, engine = self.targets.measure(self._model, [edit], len(corrupted), options=self._options)
            return self.targets.by_prompt(values[0])[0], engine

        edges = [row.nonzero().tolist() for row in patched] if self._options.cache_dir is not None else None
        sweep = self._pair.sweep_parts("circuits", self._model, {"patched": edges}, self._options)
        splits = enumerate(patched.split(EDIT_SETS_A_PART))
        computes = {f"circuits-{index:05d}": partial(run, some) for index, some in splits}
        return np.concatenate(sweep.measure_all(computes, progress_bar(self._options, len(circuits), "circuit")))

    def provenance(self, verb: str, settings: Mapping[str, Any]) -> Provenance:
        """Returns where the runs came from."""
        return self._pair.provenance(verb, self._model, settings, self._options.engine)


def _order(scores: Table, graph: Graph, by: str) -> Int[Tensor, "edge 2"]:
    """Edges as places of receiver and sender, those to keep first."""
    frame: Any = scores.frame
    if not {"sender", "receiver"} <= set(frame.columns) or len(frame) != int(graph.edges.sum()):
        raise ValueError(
            f"{len(frame)} scores, but the model has {int(graph.edges.sum())} edges: give what attribute_edges or "
            "patch_edges returned for this model, all edges and one metric"
        )
    if any(each.settings.get("normalized") for each in joined_in(scores)):
        raise ValueError("these scores are normalized(), where what matters least need not lie at 0: give the effects")
    # For its errors about names that the graph does not have.
    graph.select(zip(frame["sender"], frame["receiver"], strict=True))
    if (twice := frame.duplicated(["sender", "receiver"])).any():
        edge = frame.loc[twice, ["sender", "receiver"]].iloc[0]
        raise ValueError(f"the edge {edge['sender']} -> {edge['receiver']} has two scores: give one an edge")
    if unknown := int(frame["value"].isna().sum()):
        raise ValueError(f"{unknown} of {len(frame)} scores are NaN: an order of edges needs a score for each")
    if by == "signed" and "denoise" in directions_of(scores):
        raise ValueError(
            "these scores are of direction 'denoise', where an edge that is needed lies above zero and not below: give "
            "scores of direction 'noise', or by='absolute'"
        )
    value = frame["value"].to_numpy(dtype=float)
    if "metric" in frame:
        value = np.where(frame["metric"].isin(RISE_WITH_DAMAGE), -value, value)
    # Signed scores ascend, since what noise takes away lies below 0. Stable: tied edges keep the order of the table, on
    # every machine.
    order = np.argsort(-np.abs(value) if by == "absolute" else value, kind="stable")
    receiver = frame["receiver"].map({receiver.name: index for index, receiver in enumerate(graph.receivers)})
    sender = frame["sender"].map({sender.name: index for index, sender in enumerate(graph.senders)})
    return torch.from_numpy(np.stack([receiver, sender], 1)[order])


def _area(table: Table, height: Callable[[ndarray], ndarray]) -> float:
    """The area under a function of faithfulness over the share of edges."""
    frame: Any = table.where(circuit="edges", metric="faithfulness").frame.sort_values("edges")
    if apart := [key for key in frame.columns.drop(["edges", "fraction", *VALUES]) if frame[key].nunique() > 1]:
        raise ValueError(f"several curves, told apart by {apart[0]}: choose one with .where({apart[0]}=...)")
    frame = frame.loc[frame["fraction"] > 0]
    if frame["edges"].duplicated().any() or len(frame) < 2:
        raise ValueError(
            f"faithfulness at {frame['edges'].nunique()} sizes above 0 in {len(frame)} rows: an area takes two sizes "
            "or more, and each once; measure it at more fractions"
        )
    return float(trapezoid(height(frame["value"].to_numpy(dtype=float)), frame["fraction"].to_numpy(dtype=float)))


def _drawn(heads: Sequence[Head], draws: int, seed: int) -> list[tuple[Head, ...]]:
    """Random sets of heads, each head with probability one half."""
    if not len(heads):
        raise ValueError("no heads: a circuit needs at least one, such as those that localize found")
    if draws < 0:
        raise ValueError(f"draws={draws}: give how many random sets of heads are taken away, 0 for none")
    chosen = np.random.default_rng(seed).random((draws, len(heads))) < 0.5
    return [tuple(head for head, lost in zip(heads, row, strict=True) if lost) for row in chosen]
