"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): which state of a model tracks the alignment?

On the base model of `icatune/needs`. Where the colon or a letter of the output predicts letter j, a linear probe of the
residual stream decodes Ã(j). Is it decoded better than a control task, is the probe uncertain where the exact posterior
is, and does the model answer by another alignment if what was decoded comes from another prompt?
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from align_circuits.beyond.needs import (
    SYMBOLS,
    TESTED,
    Architecture,
    Drawn,
    Learning,
    draw,
    learned,
    network,
    posterior,
    seed_ranges,
    tokens,
    trained,
)
from align_circuits.heads.interchange_interventions import interchange_accuracy
from align_circuits.hooks.edits import Patch
from align_circuits.hooks.names import name_of
from align_circuits.models.loading import load
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study
from align_circuits.papers.statistics import mean_rows, per_seed
from align_circuits.prompts.prompts import Prompts, next_token_targets
from align_circuits.report import plots
from align_circuits.run.forward_pass import capture
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table

NETWORKS = ("trained", "untrained")

BASE, LEARNING = Architecture(4), Learning()
"""The base of `icatune/needs`, and how it is trained there."""


def probed(
    *,
    architecture: Mapping[str, Any],
    learning: Mapping[str, Any],
    x_len: int,
    fitted: int,
    prompts: int,
    trained_in: str,
    seed: int,
) -> pd.DataFrame:
    """Probes and patches the residual stream after each layer; the function of a job.

    Args:
        architecture: `Architecture`.
        learning: `Learning`.
        x_len: m.
        fitted: Prompts that probes are fitted on.
        prompts: Others, for all that is measured.
        trained_in: The folder of all trainings.
        seed: Of weights and prompts.

    Returns:
        By `network` (trained or not), `layer` and `metric`, means over letters: `alignment`, the accuracy of the probe
        at the last example; `control task`, that of a probe of a random function of the input (Hewitt and Liang, 2019);
        `rank correlation`, Spearman's of the entropies of probe and exact posterior, over prompts, after one example
        and after two, the mean (no interval). And of the trained network, by what is `patched` where it predicts the
        first letter, `interchange`: how often its answer is the symbol of the *base* prompt at the place that the
        *source* prompt's alignment tells, where neither prompt's own answer is that; `kept`, how often it is still the
        base prompt's.
    """
    shape, how = Architecture(**architecture), Learning(**{**learning, "x_lens": tuple(learning["x_lens"])})
    fit = draw(fitted, x_len, how.n_examples, 2 * TESTED + seed)
    test = draw(prompts, x_len, how.n_examples, 3 * TESTED + seed)
    rows = []
    for name in NETWORKS:
        model = trained(shape, how, seed, trained_in) if name == "trained" else network(shape, how, seed)
        bridge = load(model.eval())
        for layer in range(bridge.cfg.n_layers):
            keys = {"network": name, "layer": layer, "patched": None}
            frame, directions = _probes(fit, test, _stream(bridge, fit, layer), _stream(bridge, test, layer), seed)
            rows.append(frame.assign(**keys))
            if name == "trained":
                rows.append(_exchanged(bridge, test, layer, directions, seed).assign(network=name, layer=layer))
    return pd.concat(rows, ignore_index=True)


def _stream(model: Any, drawn: Drawn, layer: int) -> Float[Tensor, "prompt example letter d"]:
    """The residual stream where each letter is predicted."""
    ids, columns = tokens(drawn)
    name = name_of("resid_post", layer)
    return capture(model, Prompts.from_tokens(ids), [name])[name][:, columns - 1]


def _probes(
    fit: Drawn, test: Drawn, of_fit: Tensor, of_test: Tensor, seed: int
) -> tuple[pd.DataFrame, Float[Tensor, "k d"]]:
    """The metrics of probes, and an orthonormal basis of what the probe of the first letter reads."""
    m = fit["x"].shape[2]
    oracle = _entropy(posterior(test["x"][:, :-1], test["y"][:, :-1]))  # [prompt examples letter]
    random = torch.from_numpy(np.random.default_rng(seed).integers(0, m, (m, SYMBOLS**m)))
    alignment, control, correlations, directions = [], [], [], None
    for letter in range(m):
        # Before the first example there is nothing to decode.
        x, last = of_fit[:, 1:, letter].flatten(0, 1).numpy(), of_test[:, -1, letter].numpy()
        target = fit["aligned"].expand_as(fit["x"])[:, 1:, letter].flatten().numpy()
        probe = _fitted(x, target)
        alignment.append(probe.predict(last) == test["aligned"][:, 0, letter].numpy())
        types = [random[letter][_type(drawn)] for drawn in (fit, test)]
        control.append(_fitted(x, types[0][:, 1:].flatten().numpy()).predict(last) == types[1][:, -1].numpy())
        for examples in (1, 2):
            probabilities = torch.from_numpy(probe.predict_proba(of_test[:, examples, letter].numpy()))
            correlations.append(_rank_correlation(_entropy(probabilities), oracle[:, examples, letter]))
        directions = _basis(probe) if directions is None else directions
    values = np.stack([np.mean(alignment, 0), np.mean(control, 0)])
    frame = mean_rows(pd.DataFrame({"metric": ["alignment", "control task"]}), values)
    correlation = {"metric": "rank correlation", "value": float(np.mean(correlations)), "n": len(of_test)}
    assert directions is not None
    return pd.concat([frame, pd.DataFrame([correlation])], ignore_index=True), directions


def _fitted(x: ndarray, target: ndarray) -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300)).fit(x, target)


def _type(drawn: Drawn) -> Tensor:
    """A number for each input of an example."""
    return (drawn["x"] * SYMBOLS ** torch.arange(drawn["x"].shape[2])).sum(2)


def _entropy(probabilities: Float[Tensor, "*row place"]) -> Float[Tensor, "*row"]:
    """In nats."""
    return torch.special.entr(probabilities).sum(-1)


def _rank_correlation(left: Tensor, right: Tensor) -> float:
    """Spearman's; 0 where one of them is the same in all prompts."""
    if min(float(left.std()), float(right.std())) < 1e-12:
        return 0.0
    result: Any = spearmanr(left.numpy(), right.numpy())
    return float(result.statistic)


def _basis(probe: Pipeline) -> Float[Tensor, "k d"]:
    """An orthonormal basis of the directions that tell the probe's classes apart, one less than there are."""
    scale, regression = (step for _, step in probe.steps)
    weights = torch.from_numpy(regression.coef_ / scale.scale_)
    weights = weights - weights.mean(0)
    return torch.linalg.svd(weights, full_matrices=False).Vh[: max(1, len(weights) - 1)].float()


def _exchanged(model: Any, base: Drawn, layer: int, directions: Float[Tensor, "k d"], seed: int) -> pd.DataFrame:
    """How often a patch from another prompt makes the model answer by that prompt's alignment."""
    n, length, m = base["x"].shape
    other = draw(n, m, length - 1, 4 * TESTED + seed)
    equal = {**other, "aligned": base["aligned"], "y": other["x"].gather(2, base["aligned"].expand_as(other["x"]))}
    # The symbol of the base prompt where the other prompt's alignment points to.
    swapped = base["x"][:, -1].gather(1, other["aligned"][:, 0])[:, 0]
    noise = torch.randn(directions.shape, generator=torch.Generator().manual_seed(seed))
    parts = {"stream": None, "probe": directions, "random": torch.linalg.qr(noise.T).Q.T.contiguous()}
    frames = []
    for source, sign in ((other, ""), (equal, ", equal alignment")):
        # Neither prompt's own answer counts: a patch that brings an answer along must not pass for an alignment.
        kept = (swapped != base["y"][:, -1, 0]) & (swapped != source["y"][:, -1, 0])
        chosen, given = ({name: part[kept] for name, part in drawn.items()} for drawn in (base, source))
        pair = _pair(chosen, given, swapped[kept])
        edits = {
            part + sign: [Patch(site="resid_post", layers=[layer], positions="predicts", direction=rows)]
            for part, rows in parts.items()
        }
        frames.append(interchange_accuracy(model, pair, heads=[], edits=edits).frame)
    joined: Any = pd.concat(frames).drop_duplicates(["patched", "metric"])
    return joined[["patched", "metric", "value", "low", "high", "n"]]


def _pair(base: Drawn, source: Drawn, swapped: Tensor) -> Pair:
    """Base prompts as clean, the first letter of their test example as target; `swapped` is right in the others."""
    (ids, columns), (others, _) = tokens(base), tokens(source)
    column = int(columns[-1, 0])
    first = int(ids[0, column]) - int(base["y"][0, -1, 0])
    rows = torch.arange(len(ids))
    prompts = Prompts.from_tokens(ids)
    prompts = replace(
        prompts,
        targets=next_token_targets(rows, torch.full_like(rows, column - 1), ids[:, column], kind="first"),
        relations={},
        answer_tokens=first + torch.arange(SYMBOLS),
        correct=base["y"][:, -1, :1] == torch.arange(SYMBOLS),
        positions={"predicts": torch.full_like(rows, column - 1)},
    )
    own = swapped[:, None] == torch.arange(SYMBOLS)
    corrupted = replace(prompts, inputs=others, own_correct=own, task={**prompts.task, "corrupted": {"kind": "own"}})
    return Pair(prompts, corrupted, direction="noise")


@dataclass(frozen=True)
class States:
    """The base of `icatune/needs`, at one length."""

    architecture: Architecture = BASE
    learning: Learning = LEARNING
    x_len: int = 3
    fitted: int = 500
    prompts: int = 500
    tested: int = 200
    """Prompts of the test of `icatune/needs`, which shares the trainings."""
    seeds: tuple[int, ...] = (3, 4, 5, 6, 7, 8)


def _about(config: States, inputs: Inputs) -> dict[str, Any]:
    return {
        "architecture": asdict(config.architecture),
        "learning": asdict(config.learning),
        "trained_in": inputs.trained,
    }


def _train(config: States, inputs: Inputs) -> list[Measurement]:
    about = _about(config, inputs) | {"shuffled": False, "prompts": config.tested}
    return [Measurement(learned, about, seed) for seed in config.seeds]


def _jobs(config: States, inputs: Inputs) -> list[Measurement]:
    about = _about(config, inputs) | {"x_len": config.x_len, "fitted": config.fitted, "prompts": config.prompts}
    return [Measurement(probed, about, seed) for seed in config.seeds]


def _summarize(config: States, rows: Rows) -> pd.DataFrame:
    """What was probed and patched, and the accuracy of the models at that length."""
    accuracy = rows["learned"]
    accuracy = accuracy[accuracy["x_len"] == config.x_len].drop(columns="x_len")
    accuracy = accuracy.assign(network="trained", metric="accuracy", patched=None, layer=None)
    return pd.concat([accuracy, rows["probed"]], ignore_index=True)


def _check(table: Table) -> list[Claim]:
    layer = max(0, table.provenance.settings["config"]["architecture"]["blocks"] // 2 - 1)
    after = f"after layer {layer}"
    probes = per_seed(layer=layer, patched=None)
    swapped = per_seed(layer=layer, network="trained", metric="interchange")
    return [
        Claim(f"A linear probe decodes the alignment {after} (accuracy minus that of a control task)").at_least(
            0.05,
            *probes.rise("metric", "control task", "alignment").beside("network", *NETWORKS),
            "the untrained network",
        ),
        Claim(f"It is uncertain where the posterior is (rank correlation of entropies {after})").at_least(
            0.1, *probes.at(metric="rank correlation").beside("network", *NETWORKS), "the untrained network"
        ),
        Claim(f"The stream {after} carries the alignment (answers by the source prompt's alignment)").at_least(
            0.3, *swapped.beside("patched", "stream", "stream, equal alignment"), "a source prompt of equal alignment"
        ),
        Claim(f"What the probe reads does not carry it {after} (answers by the source prompt's alignment)").at_most(
            0.1, *swapped.beside("patched", "probe", "stream"), "the whole stream"
        ),
    ]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    frame: Any = table.frame[table.frame["layer"].notna()].astype({"layer": int})
    mean = seed_ranges(frame, ["network", "layer", "metric", "patched"])
    panels = {f"{name} network": probes for name, probes in mean[mean["patched"].isna()].groupby("network")}
    patches = mean[(mean["metric"] == "interchange") & (mean["patched"] != "nothing")]
    return {
        "probes": plots.curves(panels, x="layer", by="metric", label="layer"),
        "interchange": plots.curves({"": patches}, x="layer", by="patched", label="layer"),
    }


POSTERIOR = Experiment(
    "icatune/posterior",
    "Which internal state tracks the posterior over alignments: probes, control tasks, interchange",
    "beyond Agarwal and Sarawagi (2025), §5; the claims were written after a look at one model of another seed",
    Study(
        "icatune/posterior",
        {
            "smoke": States(
                Architecture(2, width=16), Learning((2, 3), n_examples=3, steps=4, tokens=60), 3, 40, 40, 4, (0, 1)
            ),
            "cpu": States(),
            "paper": States(
                Architecture(8),
                Learning((2, 3, 4, 5, 6, 8), n_examples=16, steps=20000, tokens=8000),
                4,
                2000,
                1000,
                1000,
                (0, 1, 2, 3, 4, 5),
            ),
        },
        _jobs,
        _summarize,
        _train,
    ),
    _draw,
    _check,
    about=About.BEYOND,
)
