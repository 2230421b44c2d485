"""Abrupt learning (Reddy, 2024): the phenomenological loss, Figs. 7 and A.4."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray
from scipy.special import wrightomega

from align_circuits.papers.abrupt.grid import SOURCE
from align_circuits.papers.abrupt.theory import NestedLogits
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Measurement, Scale, Study
from align_circuits.papers.statistics import Measured, exact
from align_circuits.report import plots
from align_circuits.tables.tables import Table


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


def flows(**config: Any) -> pd.DataFrame:
    """Returns the paths of a `Flow` and its landscape: the job of a study."""
    flow = Flow(**config)
    times = np.concatenate([[0.0], np.geomspace(1.0, flow.until, flow.probes)])
    frames = []
    for n_labels in dict.fromkeys((flow.n_labels, 4 * flow.n_pairs)):  # L > N too, beside L = N
        loss = NestedLogits(n_labels, flow.n_pairs)
        for name, start in flow.starts.items():
            path = loss.gradient_flow(times, np.array(start))
            wide = pd.DataFrame(path, columns=pd.Index(NestedLogits.parameters)).assign(loss=loss(path), time=times)
            frames.append(wide.melt("time", var_name="measure").assign(start=name, n_labels=n_labels))
    xi, y = (axis.ravel() for axis in np.meshgrid(np.linspace(*flow.xi, flow.grid), np.linspace(*flow.y, flow.grid)))
    height = NestedLogits(flow.n_labels, flow.n_pairs).of_score(xi, y)
    frames.append(pd.DataFrame({"measure": "landscape", "value": height, "xi": xi, "y": y, "n_labels": flow.n_labels}))
    frame = pd.concat(frames, ignore_index=True).round({"time": 4, "xi": 4, "y": 4, "value": 6})
    return frame.assign(n_pairs=flow.n_pairs, low=np.nan, high=np.nan, n=1)


def _study(name: str, full: Flow, **smoke: int) -> Study:
    """The smallest scale has the `smoke` changes; the others are the paper's own."""
    scales: dict[Scale, Flow] = {"smoke": replace(full, grid=9, **smoke), "cpu": full, "paper": full}
    return Study(name, scales, lambda flow, _: [Measurement(flows, asdict(flow), seed=None)])


def _path(table: Table, start: str, n_labels: int) -> dict[str, Float[ndarray, " time"]]:
    """One path: its time, loss and parameters."""
    frame = table.where(start=start, n_labels=n_labels).frame
    wide = frame.pivot(index="time", columns="measure", values="value").reset_index()
    return {str(name): wide[name].to_numpy(float) for name in wide}


def _time_below(times: Float[ndarray, " time"], loss: Float[ndarray, " time"], level: float) -> float:
    """The first time at which the loss is below a level."""
    return float(times[(loss < level).argmax()]) if (loss < level).any() else float("inf")


def width_of_fall(times: Float[ndarray, " time"], loss: Float[ndarray, " time"], top: float) -> float:
    """Returns the time from 80% to 20% of `top`, over the time at 20%: 0 is a cliff, 1 a steady decline."""
    return 1 - _time_below(times, loss, 0.8 * top) / _time_below(times, loss, 0.2 * top)


def _sizes(table: Table) -> tuple[int, int, int]:
    """L of the landscape, the larger L beside it, and N."""
    frame: Any = table.frame
    drawn: Any = table.where(measure="landscape").frame["n_labels"]
    return int(drawn.iloc[0]), int(frame["n_labels"].max()), int(frame["n_pairs"].iloc[0])


def draw_landscape(table: Table) -> go.Figure:
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
    for index, start in enumerate(table.frame["start"].dropna().unique()):
        path = _path(table, start, n_labels)
        xi, y = path["xi"], path["alpha"] * np.exp(path["beta_1"]) / (np.exp(path["beta_1"]) + n_pairs)
        line = {"color": plots.COLOURS[index], "width": 3}
        figure.add_scatter(x=xi, y=y, mode="lines", name=str(start), line=line)
        for end, colour in ((0, "#009E73"), (-1, "#D55E00")):
            dot = {"size": 10, "color": colour}
            figure.add_scatter(x=xi[[end]], y=y[[end]], mode="markers", marker=dot, showlegend=False)
    figure.update_xaxes(title="ξ, the classifier", range=[grid.columns.min(), grid.columns.max()])
    figure.update_yaxes(title="y, the target's score of the right label", range=[grid.index.min(), grid.index.max()])
    return plots.styled(figure, "", height=460)


# Figure 7


def _draw_fig7(table: Table) -> dict[str, go.Figure]:
    path = table.where(start="origin", n_labels=_sizes(table)[0])
    loss, parameters = (path.where(measure=names).frame for names in (["loss"], NestedLogits.parameters))
    return {
        "a": plots.curves({"": loss}, x="time", by="measure", label="time", value="loss (nats)"),
        "b": plots.curves({"": parameters}, x="time", by="measure", label="time", value="parameter"),
        "c": draw_landscape(table),
    }


def _check_fig7(table: Table) -> list[Claim]:
    n_labels, _, n_pairs = _sizes(table)
    path = _path(table, "origin", n_labels)
    times, loss, xi, alpha = (path[name] for name in ("time", "loss", "xi", "alpha"))
    cliff = _time_below(times, loss, np.log(n_pairs) / 2)
    halfway = int((times >= 0.5 * cliff).argmax())
    # A classifier alone has the loss log(1 + 1/ω) with ω = exp(ξ) / (L-1). Its flow dξ/dt = 1 / (1 + ω) from ξ = 0 is
    # ω + log ω = t + 1/(L-1) - log(L-1): ω is the Wright omega function of the right side.
    others = n_labels - 1
    alone = np.log1p(1 / wrightomega(times + 1 / others - np.log(others)))
    width, alone_width = (exact(width_of_fall(times, course, np.log(n_labels))) for course in (loss, alone))
    return [
        Claim("The loss falls off a cliff (time from 80% to 20% of log L, over the time at 20%)").at_most(
            0.5, width, alone_width, "a softmax classifier alone"
        ),
        Claim("ξ rises first: halfway to the cliff it has gone further than the others (ξ over α)").at_least(
            2.0, exact(xi[halfway] / alpha[halfway]), exact(xi[-1] / alpha[-1]), "at the end"
        ),
    ]


FIG7 = Experiment(
    name="abrupt/fig7",
    title="Three nested logits: the cliff",
    source=f"{SOURCE}, Fig. 7",
    study=_study("abrupt/fig7", Flow(32, 8, {"origin": (0.0, 0.0, 0.0)}, until=1000.0), probes=300),
    figures=_draw_fig7,
    claims=_check_fig7,
    published="A slow phase, then a cliff; β_1, α and ξ are learned one after the other.",
)


# Figure A.4

_STARTS = {"towards ICL": (0.1, 0.1, 0.0), "away from it": (-0.1, -0.1, 0.0)}


def _draw_a4(table: Table) -> dict[str, go.Figure]:
    loss: Any = table.where(measure="loss", n_labels=_sizes(table)[0]).frame
    loss = loss[loss["time"] > 0].assign(log_time=lambda later: np.log10(later["time"]))
    return {
        "a": plots.curves({"": loss}, x="log_time", by="start", label="log10 time", value="loss (nats)"),
        "b": draw_landscape(table),
    }


def _check_a4(table: Table) -> list[Claim]:
    n_labels, more, n_pairs = _sizes(table)
    paths = [_path(table, start, count) for count in (n_labels, more) for start in _STARTS]
    level = np.log(n_pairs) / 20
    fast, slow, with_more, other_start = (_time_below(path["time"], path["loss"], level) for path in paths)

    def decline(first: float, last: float) -> Measured:
        """The loss of the slow branch at one time over that at an earlier one."""
        before, after = np.interp((first, last), paths[1]["time"], paths[1]["loss"])
        return exact(float(after / before))

    return [
        Claim(
            "L = N: two starts near the saddle part (time to a twentieth of the loss, the one over the other)"
        ).at_least(3.0, exact(slow / fast), exact(other_start / with_more), f"L = {more}: one path"),
        Claim("L = N takes longer than L > N (time to a twentieth of the loss, the one over the other)").at_least(
            3.0, exact(fast / with_more), exact(other_start / with_more), f"L = {more}, the other start"
        ),
        Claim(
            "The slow branch is a valley, no minimum: its loss keeps falling (at time 1e5 over 1e3)",
            "'a sub-optimal minimum'",
        ).at_most(0.1, decline(1e3, 1e5), decline(1.0, 1e2), "on the saddle, at time 1e2 over 1"),
    ]


FIGA4 = Experiment(
    name="abrupt/figA4",
    title="As many labels as pairs: a saddle, and the slow valley off it",
    source=f"{SOURCE}, Fig. A.4",
    study=_study("abrupt/figA4", Flow(8, 8, _STARTS, until=1e5, xi=(-14.0, 14.0), y=(-9.0, 9.0))),
    figures=_draw_a4,
    claims=_check_a4,
    published="Two behaviours from two starts near the origin: learning in context, or slow convergence elsewhere.",
)
