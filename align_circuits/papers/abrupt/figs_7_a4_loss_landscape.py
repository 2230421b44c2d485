"""Abrupt learning (Reddy, 2024): the phenomenological loss, Figs. 7 and A.4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray
from scipy.integrate import solve_ivp

from align_circuits.papers.abrupt.figs_1_3_4_network import SOURCE
from align_circuits.papers.abrupt.nested_logits import PARAMETERS, NestedLogits
from align_circuits.papers.claims import Check, Experiment, Measured
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table


@dataclass(frozen=True)
class Flow:
    """Gradient flows on the loss, and a grid of the landscape."""

    n_labels: int
    n_pairs: int
    starts: Mapping[str, tuple[float, float, float]]
    """Where each path begins, (ξ, α, β_1), by name."""
    until: float
    """The time of the end; learning rate times steps."""
    probes: int = 250
    xi: tuple[float, float] = (-4.0, 14.0)
    y: tuple[float, float] = (-2.0, 9.0)
    grid: int = 41


def _run(config: Flow, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    times = np.concatenate([[0.0], np.geomspace(1.0, config.until, config.probes)])
    rows = []
    for labels in dict.fromkeys((config.n_labels, 4 * config.n_pairs)):  # L > N too, beside L = N
        loss = NestedLogits(labels, config.n_pairs)
        for name, start in config.starts.items():
            path = loss.gradient_flow(times, np.array(start))
            columns = dict(zip(PARAMETERS, path.T, strict=True)) | {"loss": loss(path)}
            for measure, values in columns.items():
                rows.append(
                    pd.DataFrame(
                        {"time": times, "measure": measure, "value": values, "start": name, "n_labels": labels}
                    )
                )
    xi, y = np.linspace(*config.xi, config.grid), np.linspace(*config.y, config.grid)
    across, up = (values.ravel() for values in np.meshgrid(xi, y))
    height = NestedLogits(config.n_labels, config.n_pairs).at(across, up)
    rows.append(
        pd.DataFrame({"measure": "landscape", "value": height, "xi": across, "y": up, "n_labels": config.n_labels})
    )
    frame = pd.concat(rows, ignore_index=True).round({"time": 4, "xi": 4, "y": 4})
    frame = frame.assign(value=frame["value"].round(6), n_pairs=config.n_pairs, low=np.nan, high=np.nan, n=1)
    return Table(frame, Provenance("gradient_flow", {"starts": {k: list(v) for k, v in config.starts.items()}}))


def path_of(table: Table, measure: str, start: str, n_labels: int) -> tuple[ndarray, ndarray]:
    """Returns times and values of one path."""
    rows = table.where(measure=measure, start=start, n_labels=n_labels).frame
    return rows["time"].to_numpy(float), rows["value"].to_numpy(float)


def _falls(times: Float[ndarray, " time"], loss: Float[ndarray, " time"], level: float) -> float:
    """The first time at which the loss is below a level."""
    return float(times[(loss < level).argmax()]) if (loss < level).any() else float("inf")


def width_of_fall(times: Float[ndarray, " time"], loss: Float[ndarray, " time"], top: float) -> float:
    """Returns the time from 80% to 20% of `top`, over the time at 20%: 0 is a cliff, 1 a steady decline."""
    return 1 - _falls(times, loss, 0.8 * top) / _falls(times, loss, 0.2 * top)


def exact(value: float) -> Measured:
    """A number without chance in it."""
    return Measured(value, value, value)


def _sizes(table: Table) -> tuple[int, int, int]:
    drawn = table.where(measure="landscape").frame["n_labels"].to_numpy(int)
    return int(drawn[0]), int(table.frame["n_labels"].to_numpy().max()), int(table.frame["n_pairs"].to_numpy()[0])


def draw_landscape(table: Table, window: Mapping[str, tuple[float, float]] | None = None) -> go.Figure:
    """Returns the loss over ξ and y as a map, with the paths on it, from green to red."""
    n_labels, _, n_pairs = _sizes(table)
    grid = table.where(measure="landscape").frame.pivot(index="y", columns="xi", values="value")
    heat = go.Contour(
        z=grid.to_numpy(),
        x=grid.columns,
        y=grid.index,
        colorscale=plots.SEQUENTIAL,
        colorbar={"title": "loss (nats)"},
        contours={"coloring": "heatmap"},
        line={"width": 0.5, "color": "rgba(255,255,255,.4)"},
    )
    figure = go.Figure(heat)
    for place, start in enumerate(table.frame["start"].dropna().unique()):
        xi, alpha, beta = (path_of(table, name, start, n_labels)[1] for name in PARAMETERS)
        y = alpha * np.exp(beta) / (np.exp(beta) + n_pairs)
        line = {"color": plots.COLOURS[place], "width": 3}
        figure.add_scatter(x=xi, y=y, mode="lines", name=str(start), line=line)
        for at, colour in ((0, "#009E73"), (-1, "#D55E00")):
            figure.add_scatter(
                x=xi[[at]], y=y[[at]], mode="markers", marker={"size": 10, "color": colour}, showlegend=False
            )
    figure.update_xaxes(title="ξ, the classifier", range=[grid.columns.min(), grid.columns.max()])
    figure.update_yaxes(title="y, the target's score of the right label", range=[grid.index.min(), grid.index.max()])
    for axis, limits in (window or {}).items():
        figure.layout[f"{axis}axis"].range = limits
    return plots.styled(figure, "", height=460)


def _draw_fig7(table: Table) -> dict[str, go.Figure]:
    n_labels, _, _ = _sizes(table)
    paths: Any = table.where(start="origin", n_labels=n_labels).frame
    paths = paths.rename(columns={"time": "t"}).assign(low=np.nan, high=np.nan)
    learned = paths[paths["measure"].isin(PARAMETERS)]
    return {
        "a": plots.curves(
            {"": paths[paths["measure"] == "loss"]}, x="t", by="measure", label="time", value="loss (nats)"
        ),
        "b": plots.curves({"": learned}, x="t", by="measure", label="time", value="parameter"),
        "c": draw_landscape(table),
    }


def _check_fig7(table: Table) -> list[Check]:
    n_labels, _, n_pairs = _sizes(table)
    times, loss = path_of(table, "loss", "origin", n_labels)
    parameters = {name: path_of(table, name, "origin", n_labels)[1] for name in PARAMETERS}
    cliff = _falls(times, loss, np.log(n_pairs) / 2)
    before = int((times >= 0.5 * cliff).argmax())
    return [
        Check(
            "The loss falls off a cliff (time from 80% to 20% of log L, over the time at 20%)",
            relation="<=",
            threshold=0.5,
            measured=exact(width_of_fall(times, loss, np.log(n_labels))),
            control=exact(width_of_fall(times, _classifier_alone(times, n_labels), np.log(n_labels))),
            control_is="a softmax classifier alone",
        ),
        Check(
            "ξ rises first: halfway to the cliff it has gone further than the others (ξ over α)",
            relation=">=",
            threshold=2.0,
            measured=exact(parameters["xi"][before] / parameters["alpha"][before]),
            control=exact(parameters["xi"][-1] / parameters["alpha"][-1]),
            control_is="at the end",
        ),
    ]


def _classifier_alone(times: Float[ndarray, " time"], n_labels: int) -> Float[ndarray, " time"]:
    """The loss of a single logit, log(1 + (L-1) exp(-ξ)), under gradient flow from ξ = 0."""

    def speed(_: float, xi: Float[ndarray, " 1"]) -> Float[ndarray, " 1"]:
        return 1 / (1 + np.exp(xi) / (n_labels - 1))

    xi = solve_ivp(speed, (0.0, float(times[-1])), [0.0], "LSODA", times, rtol=1e-9, atol=1e-12).y[0]
    return np.log1p((n_labels - 1) * np.exp(-xi))


FIG7 = Experiment(
    name="abrupt/fig7",
    title="Three nested logits: the cliff",
    source=f"{SOURCE}, Fig. 7",
    scales={
        "smoke": Flow(32, 8, {"origin": (0.0, 0.0, 0.0)}, until=1000.0, probes=300, grid=9),
        "cpu": Flow(32, 8, {"origin": (0.0, 0.0, 0.0)}, until=1000.0),
        "paper": Flow(32, 8, {"origin": (0.0, 0.0, 0.0)}, until=1000.0),
    },
    run=_run,
    draw=_draw_fig7,
    check=_check_fig7,
    makes_models=True,
    published="A slow phase, then a cliff; β_1, α and ξ are learned one after the other.",
)


# Figure A.4


def _draw_a4(table: Table) -> dict[str, go.Figure]:
    n_labels, _, _ = _sizes(table)
    frame: Any = table.where(measure="loss", n_labels=n_labels).frame
    frame = frame[frame["time"] > 0].assign(low=np.nan, high=np.nan)
    frame["log_time"] = np.log10(frame["time"])
    return {
        "a": plots.curves({"": frame}, x="log_time", by="start", label="log10 time", value="loss (nats)"),
        "b": draw_landscape(table),
    }


def _check_a4(table: Table) -> list[Check]:
    n_labels, more, n_pairs = _sizes(table)
    fast, slow = (path_of(table, "loss", start, n_labels) for start in ("towards ICL", "away from it"))
    level = np.log(n_pairs) / 20
    with_more = path_of(table, "loss", "towards ICL", more)
    back = path_of(table, "loss", "away from it", more)

    def later(path: tuple[ndarray, ndarray], first: float, last: float) -> float:
        """The loss at one time over that at an earlier one."""
        return float(np.interp(last, *path) / np.interp(first, *path))

    return [
        Check(
            "L = N: two starts near the saddle part (time to a twentieth of the loss, the one over the other)",
            relation=">=",
            threshold=3.0,
            measured=exact(_falls(*slow, level) / _falls(*fast, level)),
            control=exact(_falls(*back, level) / _falls(*with_more, level)),
            control_is=f"L = {more}: one path",
        ),
        Check(
            "L = N takes longer than L > N (time to a twentieth of the loss, the one over the other)",
            relation=">=",
            threshold=3.0,
            measured=exact(_falls(*fast, level) / _falls(*with_more, level)),
            control=exact(_falls(*back, level) / _falls(*with_more, level)),
            control_is=f"L = {more}, the other start",
        ),
        Check(
            "The slow branch is a valley, no minimum: its loss keeps falling (at time 1e5 over 1e3)",
            relation="<=",
            threshold=0.1,
            measured=exact(later(slow, 1e3, 1e5)),
            control=exact(later(slow, 1.0, 1e2)),
            control_is="on the saddle, at time 1e2 over 1",
            published="'a sub-optimal minimum'",
        ),
    ]


def _figa4(until: float, **changes: Any) -> Flow:
    starts = {"towards ICL": (0.1, 0.1, 0.0), "away from it": (-0.1, -0.1, 0.0)}
    return Flow(8, 8, starts, until, xi=(-14.0, 14.0), y=(-9.0, 9.0), **changes)


FIGA4 = Experiment(
    name="abrupt/figA4",
    title="As many labels as pairs: a saddle, and the slow valley off it",
    source=f"{SOURCE}, Fig. A.4",
    scales={"smoke": _figa4(1e5, grid=9), "cpu": _figa4(1e5), "paper": _figa4(1e5)},
    run=_run,
    draw=_draw_a4,
    check=_check_a4,
    makes_models=True,
    published="Two behaviours from two starts near the origin: learning in context, or slow convergence elsewhere.",
)
