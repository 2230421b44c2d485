"""Methods that find heads: from a model and a pair of prompts to a score of every head, the higher the more it matters.

Each returns a grid `[layer head]`, or one for each role where it tells roles apart. Of `METHODS`, attention, direct
effects, AtP and `localize` take all prompts of the pair; the others, whose price grows with heads or edges, its first
`FEW`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from transformer_lens.head_detector import compute_head_attention_similarity_score

from align_circuits.circuits.direct_effects import direct_logit_attribution
from align_circuits.circuits.edge_attribution import EdgeMethod, attribute_edges
from align_circuits.circuits.head_attribution import HeadMethod, attribute_heads
from align_circuits.heads.ablate import How, ablate_heads
from align_circuits.heads.localization import Localization
from align_circuits.heads.localize_heads import localize
from align_circuits.heads.patch import patch_heads
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Patch
from align_circuits.hooks.gradients import gradients_at
from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.names import name_of
from align_circuits.models.parameters import device_of
from align_circuits.run.forward_pass import capture
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Direction, Pair
from align_circuits.tables.ranking import RISE_WITH_DAMAGE

Grid = Float[ndarray, "layer head"]

Scores = Grid | Mapping[str, Grid]
"""A score of every head, or one for each role, by the name of the relation that such a head follows."""

Localizer = Callable[[HookedModel, Pair], Scores]
"""A method that finds heads. The pair's prompts hold the relations of the roles; its metric is the log-probability of
the targets unless it has another."""

FEW = 4
"""Prompts for `PRICEY` methods."""

_CUTS = (0.1, 0.01)
"""What a head may cost, in nats, and still be pruned: from coarse circuits to fine ones."""

_MASK_STEPS, _MASK_RATE, _MASK_PRICE = 60, 0.2, 0.02  # updates of Adam, its learning rate, nats an open gate


def attention(model: HookedModel, pair: Pair) -> dict[str, Grid]:
    """Scores heads by their attention alone: the standard score of each role (`score_heads`).

    Source: Voita et al. (2019), "Analyzing Multi-Head Self-Attention"; Olsson et al. (2022) for induction.
    """
    roles = _roles(pair)
    scores = score_heads(model, pair.clean, roles)
    return {role: np.nan_to_num(scores.to_array(role)) for role in roles}


def head_detector(model: HookedModel, pair: Pair) -> dict[str, Grid]:
    """Scores heads by TransformerLens's detector, with each role's keys as the pattern to detect.

    The "mul" measure: the share of all attention that lies on the pattern.

    Source: TransformerLens, `head_detector.compute_head_attention_similarity_score`, which `detect_head` calls.
    """
    prompts, patterns = pair.clean, {}
    for role in _roles(pair):
        relation = prompts.relations[role]
        keys, _ = relation.expand()
        length = prompts.mask.shape[1]
        patterns[role] = torch.zeros(len(prompts), length, length)
        patterns[role][relation.prompt, relation.query] = keys.float()
    names = [name_of("pattern", layer) for layer in range(model.cfg.n_layers)]
    cached = capture(model, prompts, names)
    grids = {role: np.zeros((model.cfg.n_layers, model.cfg.n_heads)) for role in patterns}
    for role, pattern in patterns.items():
        for layer, head in heads_of(model.cfg):
            similarities = [
                compute_head_attention_similarity_score(
                    cached[names[layer]][row, head],
                    pattern[row],
                    # The relation says which tokens count, and its keys may be the first token or the query itself.
                    exclude_bos=False,
                    exclude_current_token=False,
                    error_measure="mul",
                )
                for row in range(len(prompts))
            ]
            grids[role][layer, head] = np.mean(similarities)
    return grids


def _metric_of(pair: Pair) -> str:
    """The name of the metric by which the localizers of a pair score."""
    return pair.target_metrics.names[0]


def _sign(pair: Pair) -> int:
    """-1 for a metric that rises with damage, as a divergence does; 1 for all others."""
    return -1 if _metric_of(pair) in RISE_WITH_DAMAGE else 1


def ablation(how: How, model: HookedModel, pair: Pair) -> Grid:
    """Scores heads by what ablating each alone costs of the pair's metric (`ablate_heads`)."""
    table = ablate_heads(model, pair.clean, how, metrics=(pair.metric or "log_prob",))
    return -_sign(pair) * table.where(kind=pair.kind or "all").to_array(_metric_of(pair))


def patching(direction: Direction, model: HookedModel, pair: Pair) -> Grid:
    """Scores heads by patching each alone between the two runs (`patch_heads`)."""
    chosen = replace(pair, metric=pair.metric or "log_prob", kind=pair.kind or "all", direction=direction)
    sign = _sign(pair) * (1 if direction == "denoise" else -1)
    return sign * patch_heads(model, chosen).to_array(_metric_of(pair))


def direct_effect(model: HookedModel, pair: Pair) -> Grid:
    """Scores heads by what the path from them to the logits, past all other heads and MLPs, does for the answer.

    The size of what a head adds to the gold token's logit (`direct_logit_attribution`), less what it adds on the
    corrupted prompts.

    Source: path patching to the logits, Wang et al. (2022), "Interpretability in the Wild", §3.1.
    """
    clean, corrupted = (
        direct_logit_attribution(model, prompts, kind=pair.kind or "all").heads().to_array("direct_logit")
        for prompts in (pair.clean, pair.corrupted)
    )
    return np.abs(clean - corrupted)


def head_attribution(method: HeadMethod, model: HookedModel, pair: Pair) -> Grid:
    """Sums the size of a head's scores at its output and its query (`attribute_heads`)."""
    table = attribute_heads(model, replace(pair, direction="noise"), method=method, sites=("z", "q"))
    return np.sum([np.abs(table.where(site=site).to_array(_metric_of(pair))) for site in ("z", "q")], axis=0)


def edge_attribution(method: EdgeMethod, model: HookedModel, pair: Pair) -> Grid:
    """Sums the size of the scores of all edges that leave a head (`attribute_edges`)."""
    frame: Any = attribute_edges(model, replace(pair, direction="noise"), method=method).frame
    of_sender = frame.assign(value=frame["value"].abs()).groupby("sender")["value"].sum()
    senders = [f"L{layer}H{head}" for layer, head in heads_of(model.cfg)]
    return of_sender[senders].to_numpy().reshape(model.cfg.n_layers, model.cfg.n_heads)


def pruning(model: HookedModel, pair: Pair) -> Grid:
    """Scores heads by greedy pruning: which survive how coarse a cut.

    From the last layer to the first, each head is patched from the corrupted prompts and stays so if that costs less
    than the cut, on top of all heads that stay patched already. The score is the number of cuts that a head survives.

    Source: after Conmy et al. (2023), "Towards Automated Circuit Discovery", with heads in place of edges.
    """
    noised = replace(pair, direction="noise")
    targets = noised.prepared(model, RunOptions()).target_metrics
    grid = np.zeros((model.cfg.n_layers, model.cfg.n_heads))

    def mean_metric(patched: list[Head]) -> float:
        edits = [Patch(patched)] if patched else []
        return float(targets.measure_edited(model, [edits], source=noised.source)[0].mean())

    for cut in _CUTS:
        pruned: list[Head] = []
        current = mean_metric(pruned)
        for head in reversed(heads_of(model.cfg)):
            without = mean_metric([*pruned, head])
            if _sign(pair) * (current - without) < cut:
                pruned, current = [*pruned, head], without
            else:
                grid[head] += 1
    return grid


def learned_masks(model: HookedModel, pair: Pair) -> Grid:
    """Scores heads by gates between 0 and 1 that gradient descent learns: a head's own output, or the corrupted run's.

    Minimised is what the pair's metric loses plus a price for every open gate; the score is the gate.

    Source: after Cao et al. (2021), "Low-Complexity Probing via Finding Subnetworks", and Bhaskar et al. (2024),
    "Finding Transformer Circuits with Edge Pruning", with plain sigmoid gates of heads.
    """
    noised = replace(pair, direction="noise").prepared(model, RunOptions())
    cfg, device = model.cfg, device_of(model)
    names = [name_of("z", layer) for layer in range(cfg.n_layers)]
    corrupted = {name: z.to(device) for name, z in capture(model, noised.source, names).items()}
    # sigmoid(2) = .88: the gates begin nearly open, where the sigmoid is not yet flat.
    gates = torch.full((cfg.n_layers, cfg.n_heads), 2.0, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([gates], lr=_MASK_RATE)
    tokens, mask = noised.inputs(device)
    for _ in range(_MASK_STEPS):
        opened = gates.detach().sigmoid()
        changes = {
            name: partial(torch.lerp, corrupted[name], weight=by_head[:, None])
            for name, by_head in zip(names, opened, strict=True)
        }
        grads = gradients_at(model, tokens, mask, names, noised.queries, noised.mean_metric, changes)
        # After the gate z lies opened * (z - corrupted) away from the corrupted run, and d opened / d gate is
        # opened * (1 - opened): so what the gate is worth needs no gradient of its own.
        worth = torch.stack([((grads[name][0] - corrupted[name]) * grads[name][1]).sum((0, 1, 3)) for name in names])
        gates.grad = (1 - opened) * (_MASK_PRICE * opened - _sign(pair) * worth / len(tokens))
        optimizer.step()
    return gates.detach().sigmoid().double().cpu().numpy()


def localized(redundant: bool, model: HookedModel, pair: Pair) -> dict[str, Grid]:
    """Scores heads by `localize`: those that it names first, or with redundant ones; then by score and p-value."""
    roles = _roles(pair)
    # Without control sets, which cost runs and tell of sets of heads, not of which head comes first.
    result = localize(model, pair.clean, corrupted=pair.corrupted, roles=roles, n_controls=0, redundant=redundant)
    return {role: _ranked(result, role, result.redundant_heads(role)) for role in result.heads_by_role}


def _ranked(result: Localization, role: str, named: Any) -> Grid:
    """Named heads lie in [1, 2], the others in [0, 1]."""
    score, p = (result.table.where(role=role, metric=metric).to_array(metric) for metric in ("score", "p"))
    grid = np.nan_to_num(score) * (1 - p) / 2
    for head in named:
        grid[head] += 1.5
    return grid


def named_in(grid: Grid) -> set[Head]:
    """Returns the heads that a grid of `localized` names."""
    return {(int(layer), int(head)) for layer, head in np.argwhere(grid >= 1)}


def _roles(pair: Pair) -> list[str]:
    return [role for role, relation in pair.clean.relations.items() if len(relation)]


def on_few(method: Localizer, model: HookedModel, pair: Pair) -> Scores:
    """Scores heads by a method, on a pair's first `FEW` prompts."""
    return method(model, replace(pair, clean=pair.clean[:FEW], corrupted=pair.corrupted[:FEW]))


ON_ALL_PROMPTS: Mapping[str, Localizer] = {
    "attention": attention,
    "head detector": head_detector,
    "ablation, zero": partial(ablation, "zero"),
    "ablation, mean": partial(ablation, "mean"),
    "ablation, resample": partial(ablation, "resample"),
    "patching, denoise": partial(patching, "denoise"),
    "patching, noise": partial(patching, "noise"),
    "direct effect": direct_effect,
    "AtP": partial(head_attribution, "atp"),
    "AtP*": partial(head_attribution, "atp_star"),
    "EAP": partial(edge_attribution, "eap"),
    "EAP-IG": partial(edge_attribution, "eap_ig_inputs"),
    "pruning": pruning,
    "learned masks": learned_masks,
    "localize": partial(localized, False),
    "localize, redundant": partial(localized, True),
}
"""The methods of this package, by name, on whatever pair they are given."""

PRICEY = (
    "head detector",
    *("ablation, zero", "ablation, mean", "ablation, resample", "patching, denoise", "patching, noise"),
    *("EAP", "EAP-IG", "pruning", "learned masks"),
)
"""The methods whose price grows with heads or edges."""

METHODS: Mapping[str, Localizer] = {
    name: partial(on_few, method) if name in PRICEY else method for name, method in ON_ALL_PROMPTS.items()
}
"""The methods of this package as the benchmark runs them."""
