"""Which methods find the edges that a circuit uses? Small circuits of the zoo, whose edges are known."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.circuits.faithful import circuit_model_distance, circuit_performance_ratio, faithfulness
from align_circuits.hooks.graph import Graph, Receiver, Sender
from align_circuits.localizers.benchmarked_edge_methods import CUTS, EDGE_METHODS
from align_circuits.localizers.comparison import agreement, names_agreement
from align_circuits.localizers.registry import edge_localizer
from align_circuits.models.planted.circuit_parts import CONTENT
from align_circuits.models.planted.planted_model import CIRCUIT_KINDS, PlantedModel
from align_circuits.models.planted.zoo import PUBLIC, zoo_circuit
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, on_one_thread
from align_circuits.papers.localizer_zoo import auroc_map, seconds_of
from align_circuits.papers.statistics import Measured, mean_row, seed_rows
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table
from align_circuits.tasks.task import exchanged

Edge = tuple[str, str]
"""The names of sender and receiver."""

RANDOM = "random order"
"""The control of all methods."""

EXACT, ABOVE = "edge patching", " above edge patching"

SHARED = {1: "alone", 2: "2 to 4", 5: "5 or more"}
"""How many known edges do the same work, from so many on: those between heads of the same two kinds."""

KEPT = {cut: f"kept at {cut:g}" for cut in CUTS}

_UNSURE = ("repair", "diffuse")
"""Kinds of heads whose edges are neither right nor wrong: one matters once others are gone, the other makes the letters
of a prompt likelier without choosing between them."""

_TO_REPAIR = ("looked up", "sure")
"""What only a head that repairs needs."""


@dataclass(frozen=True)
class Edges:
    """Which circuits, prompts and methods."""

    circuits: int
    """How many circuits, of the first seeds of the public zoo that have these layers and heads."""
    methods: tuple[str, ...] = tuple(EDGE_METHODS)
    n_layers: int = 5
    n_heads: int = 6
    n: int = 2
    """Prompts that a method sees: most take a run for each edge."""
    n_measured: int = 6
    """Other prompts, on which the faithfulness of circuits is measured."""

    @property
    def seeds(self) -> list[int]:
        """The seeds of the circuits."""
        shapes = ((seed, zoo_circuit(seed).circuit) for seed in PUBLIC)
        alike = (seed for seed, of in shapes if (of["n_layers"], of["n_heads"]) == (self.n_layers, self.n_heads))
        return [*islice(alike, self.circuits)]


def known_edges(model: PlantedModel) -> tuple[dict[Edge, int], list[Edge]]:
    """Returns the edges that carry what differs between prompts, and those that the circuit does not use at all.

    With each of the first comes the number of edges that do the same work: between heads of the same kinds, into the
    same kind of input. Left out are edges that carry places, which are the same in all prompts of a layout so that no
    exchange of prompts shows them; edges of heads that repair or that only say which letters occur; and those of an MLP
    that is silent.
    """
    graph, used = Graph.of(model.cfg), model.edges

    def kinds(part: Sender | Receiver) -> tuple[str, ...]:
        """The kinds of the head, or of the heads that share the key head; otherwise the part's own name."""
        if part.layer is None or part.head is None:
            return (part.name,)
        shared = part.shared if isinstance(part, Receiver) else 1
        heads = range(part.head * shared, (part.head + 1) * shared)
        return tuple(sorted({model.kinds[part.layer, head] for head in heads}))

    positive: dict[Edge, tuple[Any, ...]] = {}
    negative = []
    diffuse = {f"M{layer}" for (layer, _), kind in model.kinds.items() if kind == "diffuse"}
    for receiver, sender in graph.edges.nonzero().tolist():
        ends = graph.senders[sender], graph.receivers[receiver]
        edge = ends[0].name, ends[1].name
        content = set(used.get(edge, ())) & set(CONTENT) - set(_TO_REPAIR)
        # No phrase of one letter goes on, so that the MLP that carries symbols on is silent.
        silent = model.task.phrase_len == 1 and "M" in (edge[0][0], edge[1][0])
        read = [kind for kind in kinds(ends[1]) if kind in CIRCUIT_KINDS or "." not in edge[1]]
        if content and not silent and "repair" not in (*kinds(ends[0]), *kinds(ends[1])):
            positive[edge] = (kinds(ends[0]), tuple(read), ends[1].site)
        unsure = {*kinds(ends[0]), *kinds(ends[1])} & set(_UNSURE) or (edge[0] in diffuse and edge[1] == "logits")
        if edge not in used and not unsure:
            negative.append(edge)
    counts = Counter(positive.values())
    return {edge: counts[work] for edge, work in positive.items()}, negative


def compare_edges(*, methods: list[str], n: int, n_measured: int, seed: int) -> list[dict[str, Any]]:
    """Measures how every method scores the edges of one circuit; the function of a job.

    The corrupted prompts are other prompts of the task (`exchanged`). Edges are ranked by the size of their score.

    Args:
        methods: Their names.
        n: Prompts that they see.
        n_measured: Other prompts, for faithfulness.
        seed: Of the circuit and the prompts.

    Returns:
        By method, and by how many edges do the same work, the agreement of its scores with the known edges; by method
        CPR (edges by signed score) and CMD (by size), and its `cost`, in passes of the model over the `n` prompts.
    """
    on_one_thread()
    circuit = zoo_circuit(seed)
    model = circuit.build()
    pair, measured = (
        Pair(*exchanged(model.task.sample(size, model.tokenizer, seed=number)), direction="noise")
        for size, number in ((n, seed), (n_measured, seed + 1))
    )
    rows: list[dict[str, Any]] = []

    def add(method: str, values: Mapping[str, float], shared: str = "all") -> None:
        rows.extend(
            {"method": method, "shared": shared, "metric": name, "value": each} for name, each in values.items()
        )

    positive, negative = known_edges(model)
    groups = {"all": [*positive]}
    for (first, name), end in zip(SHARED.items(), [*list(SHARED)[1:], np.inf], strict=True):
        groups[name] = [edge for edge, count in positive.items() if first <= count < end]
    add("known edges", {"share": len(positive) / (len(positive) + len(negative))})
    a_pass = seconds_of(lambda: model(pair.clean.tokens))
    tables: dict[str, Table] = {}
    for method in methods:
        began = time.process_time()
        tables[method] = edge_localizer(method)(model, pair)
        add(method, {"cost": (time.process_time() - began) / a_pass})
    first = tables[methods[0]]
    drawn = np.random.default_rng(seed).standard_normal(len(first))
    tables[RANDOM] = replace(first, frame=first.frame.assign(value=drawn), values=None, weights=None)
    for method, table in tables.items():
        scores: Any = table.frame.set_index(["sender", "receiver"])["value"].abs().to_dict()
        for name, edges in groups.items():
            if not edges:
                continue
            found = agreement(scores, edges, negative)
            add(method, found if name == "all" else {"auroc": found["auroc"]}, name)
            for cut in CUTS if method == "ACDC" else ():
                kept = [edge for edge in (*edges, *negative) if scores[edge] >= cut]
                agreed = names_agreement(kept, edges)
                of_all = {f"false, {KEPT[cut]}": agreed["false_discoveries"]} if name == "all" else {}
                add(method, {KEPT[cut]: agreed["recall"], **of_all}, name)
        ratio = circuit_performance_ratio(faithfulness(model, measured, table, by="signed"))
        distance = circuit_model_distance(faithfulness(model, measured, table, by="absolute"))
        add(method, {"circuit_performance_ratio": ratio, "circuit_model_distance": distance})
    return rows


def _jobs(config: Edges, _: Inputs) -> list[Measurement]:
    common = {"methods": list(config.methods), "n": config.n, "n_measured": config.n_measured}
    return [Measurement(compare_edges, common, seed) for seed in config.seeds]


def _summarize(_: Edges, rows: Rows) -> pd.DataFrame:
    """Means over circuits, and of the difference to edge patching in the same circuits."""
    frame: Any = rows["compare_edges"]
    wide = frame.set_index(["method", "shared", "metric", "seed"])["value"].unstack("seed")
    tables = [seed_rows(wide.index.to_frame(index=False), wide.to_numpy(float))]
    others = [index for index in wide.index if index[0] != EXACT and (EXACT, *index[1:]) in wide.index]
    if others:
        above = wide.loc[others].to_numpy(float) - wide.loc[[(EXACT, *index[1:]) for index in others]].to_numpy(float)
        keys = wide.loc[others].index.to_frame(index=False)
        tables.append(seed_rows(keys.assign(metric=keys["metric"] + ABOVE), above))
    return pd.concat(tables, ignore_index=True)


def _check(table: Table) -> list[Claim]:
    if not {RANDOM, *EDGE_METHODS} <= set(table.frame["method"]):
        return []  # other methods

    def value(method: str, metric: str, shared: str = "all") -> Measured:
        return mean_row(method=method, metric=metric, shared=shared)(table)

    precision, cpr, cmd = "average_precision", "circuit_performance_ratio", "circuit_model_distance"
    coarse, fine = (KEPT[cut] for cut in CUTS)
    found = value(RANDOM, "recall_at_size")
    wrong = Measured(1 - found.value, 1 - found.high, 1 - found.low)
    return [
        *(
            Claim(f"{method} finds the edges (average precision)").at_least(
                0.9, value(method, precision), value(RANDOM, precision), RANDOM
            )
            for method in (EXACT, "EAP", "EAP-IG, inputs", "ACDC")
        ),
        Claim("EAP-IG (inputs) comes close to edge patching (average precision, difference)").at_least(
            -0.1, value("EAP-IG, inputs", precision + ABOVE), value(RANDOM, precision + ABOVE), RANDOM
        ),
        Claim("Path patching takes paths through MLPs for edges (average precision, less edge patching)").at_most(
            -0.02, value("path patching", precision + ABOVE), value("ACDC", precision + ABOVE), "ACDC"
        ),
        Claim(f"ACDC keeps the known edges, cut {CUTS[1]:g} (recall)").at_least(
            0.9, value("ACDC", fine), value("ACDC", coarse), f"cut {CUTS[0]:g}"
        ),
        Claim(f"ACDC keeps few others, cut {CUTS[1]:g} (share)").at_most(
            0.1, value("ACDC", f"false, {fine}"), wrong, f"{RANDOM}, as many edges as there are"
        ),
        Claim(f"ACDC drops edges that share their work with four or more, cut {CUTS[0]:g} (recall)").at_most(
            0.5, value("ACDC", coarse, "5 or more"), value("ACDC", coarse, "alone"), "edges alone"
        ),
        Claim("The edges that ACDC keeps do all (CPR)").at_least(0.9, value("ACDC", cpr), value(RANDOM, cpr), RANDOM),
        Claim(
            "Signed scores do worse, as corrupting some edges helps by chance (CPR, ACDC less edge patching)"
        ).at_least(
            0.1, value("ACDC", cpr + ABOVE), value("EAP", cpr + ABOVE), "EAP in place of ACDC, ordered by sign as well"
        ),
        *(
            Claim(f"Circuits of {method} behave as the model (CMD)").at_most(
                0.05, value(method, cmd), value(RANDOM, cmd), RANDOM
            )
            for method in (EXACT, "EAP", "EAP-IG, inputs", "ACDC")
        ),
    ]


def overview(table: Table) -> pd.DataFrame:
    """Returns a row for each method: AUROC by how many edges do the same work, then what it finds, and its cost."""
    frame: Any = table.frame
    auroc = frame[frame["metric"] == "auroc"].pivot_table(index="method", columns="shared", values="value")
    auroc = auroc[["all", *(name for name in SHARED.values() if name in auroc)]]
    names = {
        "average_precision": "average precision",
        "recall_at_size": "edges found, of as many",
        "circuit_performance_ratio": "CPR",
        "circuit_model_distance": "CMD",
        "cost": "cost in passes",
    }
    rest = frame[(frame["shared"] == "all") & frame["metric"].isin(names)]
    rest = rest.pivot_table(index="method", columns="metric", values="value").rename(columns=names)
    return auroc.rename(columns=lambda name: f"AUROC, {name}").join(rest[list(names.values())]).loc[_methods(table)]


def _methods(table: Table) -> list[str]:
    scored = dict.fromkeys(table.where(metric="auroc", shared="all").frame["method"])
    return [*(method for method in EDGE_METHODS if method in scored), *(m for m in scored if m not in EDGE_METHODS)]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    wide = overview(table).filter(like="AUROC").rename(columns=lambda name: name.removeprefix("AUROC, "))
    return {"auroc of edges": auroc_map(wide, "known edges that do the same work", 360)}


_WHOLE = Edges(16)

EDGE_ZOO = Experiment(
    "localizers/edges",
    "Which methods find the edges that a circuit uses? Small circuits of the public zoo",
    "the package's own benchmark",
    Study(
        "localizers/edges",
        {"smoke": Edges(1, ("EAP",), n_measured=2), "cpu": _WHOLE, "paper": _WHOLE},
        _jobs,
        _summarize,
    ),
    _draw,
    _check,
)
