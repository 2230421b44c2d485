"""Ablates heads, one at a time, and measures what it changes in the model's predictions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from align_circuits.checks import checked, listed
from align_circuits.heads.effects import check_screen, edit_effects
from align_circuits.hooks.edits import Ablate, AblationBaseline, MeansBy, Patch, default_groups, groups_of
from align_circuits.hooks.head_names import HeadLike, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found, once_a_call
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, ROTATED_SITES, Site, is_pattern, name_of
from align_circuits.jobs.sweeps import SweepParts
from align_circuits.models.parameters import model_identity, provenance_of
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.run.forward_pass import capture, forward
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import BOTH, Metric, TargetMetrics, by_kind
from align_circuits.tables.tables import Table
from align_circuits.tasks.partners import next_unrelated

How = Literal["zero", "mean", "resample"]


@checked
@leaves_as_found
def ablate_heads(
    model: HookedModel,
    prompts: Prompts,
    how: How = "mean",
    *,
    heads: Sequence[HeadLike] | None = None,
    baseline: Prompts | None = None,
    by: MeansBy | None = None,
    metrics: Metric | Sequence[Metric] = BOTH,
    screen: float | None = None,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what ablating each head alone changes: by default the log-probability of the targets, and the accuracy.

    Below zero the model uses the head. See `Ablate` for the kinds of ablation, and for what misleads.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets.
        how: `"mean"` over tokens of the same group, `"resample"` from another prompt (an unrelated one, where at most
            half of all are related), or `"zero"`.
        heads: Which heads, as `(2, 3)` or `"L2H3"`; all by default.
        baseline: The prompts whose activations replace those of the head; by default `prompts`. Not with `"zero"`.
        by: With `"mean"`: which tokens are a group, as for `ablation_baseline`.
        metrics: What is measured, one or several, as `Pair.metric`; `"kl"` is the divergence from the intact model.
        screen: A share of the heads, as for `patch_heads`: these are ablated, and the others' effects estimated.
        options: Engine and batch size.

    Returns:
        A table keyed by level, layer, head, `kind` (`"all"`, `"first"`, `"later"` targets) and `metric`: `"log_prob"`,
        the change of the mean log-probability of the target's token in nats, and `"accuracy"`, the change of accuracy.
        The 95% intervals are over prompts, paired. `Table.baselines` has the metrics of the intact model. With `screen`
        also by `estimated`, as `patch_heads`.

    Raises:
        ValueError: A head that the model does not have, prompts without targets, baseline prompts that do not fit,
            `baseline` or `by` with a kind of ablation that does not use it, a screen that is no share, or one without a
            metric that has a gradient.
    """
    selected, source = heads_of(model.cfg, heads), None
    if baseline is not None and how == "zero":
        raise ValueError("baseline= with how='zero': zeros are taken from no prompts; leave it out")
    _check_by(how, by)
    if how == "mean" and by is None and default_groups(prompts) == "kind":
        by = "kind"  # whatever the baseline prompts are: the tokens that run must be in its groups
    check_screen(screen)
    if how == "resample":
        _check_resampling(baseline or prompts)
        # Each prompt's activations are replaced by the next one's that is not related to it.
        source, edit = (baseline or prompts)[next_unrelated(baseline or prompts)], Patch()
    else:
        edit = Ablate(how=how, baseline=ablation_baseline(model, baseline or prompts, how, by=by, options=options))
    targets = TargetMetrics.of(prompts, listed(metrics)).with_reference(model, prompts, options=options)
    settings = {"how": how, "baseline": (baseline or prompts).digest, "metrics": targets.names}
    if isinstance(edit, Ablate) and edit.baseline is not None and how == "mean":
        settings["by"] = edit.baseline.by if isinstance(edit.baseline.by, str) else [*edit.baseline.by]
    settings |= {} if screen is None else {"screen": screen}
    return edit_effects(
        model,
        targets,
        by_kind(prompts),
        pd.DataFrame(selected, columns=["layer", "head"]),
        [replace(edit, heads=[head]) for head in selected],
        range(len(selected)),
        lambda engine: provenance_of("ablate_heads", model, prompts, engine, settings),
        source=source,
        screen=screen,
        options=options,
    )


@checked
@leaves_as_found
def ablation_baseline(
    model: HookedModel,
    prompts: Prompts,
    how: How = "mean",
    *,
    by: MeansBy | None = None,
    site: Site = "z",
    layers: Sequence[int] | None = None,
    hook: str | None = None,
    options: RunOptions = RunOptions(),
) -> AblationBaseline:
    """Returns the values by which `Ablate` replaces activations, measured on baseline prompts.

    Args:
        model: The model that will be ablated.
        prompts: The baseline prompts.
        how: `"mean"` keeps one mean for each group of tokens, `"resample"` every activation; `"zero"` needs nothing.
        by: With `"mean"`: whether tokens of one `"kind"` are a group, or those at one `"position"`, or those at one of
            these named positions, with all others as one more group. By default positions where prompts are aligned
            texts (at least eight of one length, with named positions at the same places), and kinds otherwise. Tokens
            of texts from which nothing is predicted any more, such as the answer, are left out of means over kinds and
            names.
        site: Which activations.
        layers: In which layers; all by default.
        hook: The full name of a hook point instead, as for `Ablate(hook=...)`.
        options: Engine and batch size.

    Raises:
        ValueError: An unknown kind or site, a position that a single prompt has, or prompts that cannot be resampled: a
            single one, or some of them padded.
    """
    _check_by(how, by)
    if how not in ("zero", "mean", "resample"):
        raise ValueError(f"how={how!r}: choose 'mean', 'resample' or 'zero'")
    if site not in (known := (*HEAD_SITES, *ROTATED_SITES, *LAYER_SITES)):
        raise ValueError(f"site={site!r}: choose one of {', '.join(known)}")
    names = [name_of(site, layer) for layer in (range(model.cfg.n_layers) if layers is None else layers)]
    names = names if hook is None else [hook]
    if how == "zero" or not names:
        return AblationBaseline()
    if not len(prompts):
        raise ValueError("no prompts to average over or to resample: give at least one")
    if how == "resample":
        _check_resampling(prompts)
        others = next_unrelated(prompts).roll(1)  # an edit takes the next row for each prompt
        values = capture(model, prompts, names, options=options)
        return AblationBaseline(values={name: of_all[others] for name, of_all in values.items()})
    if any(map(is_pattern, names)):
        raise ValueError("a pattern has no mean over tokens of a kind: resample it, set it to zero, or clamp it")
    # Within a call that ablates several times, such as `localize`, each mean is measured once.
    by = default_groups(prompts) if by is None else by
    group, counted = groups_of(prompts, by), prompts.mask
    if by != "position":  # where the answer is a group of its own, it weighs on no other
        read = counted & ~_unread(prompts)
        # Where nothing of a group is read, an engine that replaces all tokens needs a mean all the same.
        counted = read | (counted & ~torch.isin(group, group[read]))
    if by != "kind" and (1 in group[counted].bincount()):
        raise ValueError(
            f"by={by!r}: a position occurs in a single one of the {len(prompts)} prompts, whose mean would be its own "
            "activation: give more prompts, or by='kind'"
        )
    measured_on = (prompts.digest, by, group.numpy().tobytes(), options.engine, options.batch_size)
    means: dict[str, Tensor] = once_a_call(model, ("means", *measured_on), dict)
    if missing := [name for name in names if name not in means]:
        identity = {"verb": "ablation_baseline", "prompts": prompts, "by": by, "hooks": missing}
        if options.cache_dir is not None:
            identity |= {"model": model_identity(model), "options": options.identity}
        sweep = SweepParts(options.cache_dir, "means for ablations", identity)
        # Kept like the sweep that they serve, which is another one where they differ in the last bit.
        computes = {"means": lambda: (_means_by_group(model, prompts, group, counted, missing, options).numpy(), "")}
        ((_, values, _),) = sweep.measure(computes)
        means |= {name: torch.from_numpy(value) for name, value in zip(missing, values, strict=True)}
    return AblationBaseline(means={name: means[name] for name in names}, by=by)


def _check_by(how: str, by: MeansBy | None) -> None:
    if by is not None and how != "mean":
        raise ValueError(f"by={by!r} with how={how!r}: groups of tokens are for 'mean' alone; leave it out")


def _check_resampling(prompts: Prompts) -> None:
    if len(prompts) < 2 or not prompts.of_one_length:
        lengths = prompts.mask.sum(1)
        raise ValueError(
            f"{len(prompts)} prompts of {int(lengths.min())} to {int(lengths.max())} tokens: "
            "resampling takes at least two, of one length"
        )


def _means_by_group(
    model: HookedModel,
    prompts: Prompts,
    group: Int[Tensor, "prompt pos"],
    counted: Bool[Tensor, "prompt pos"],
    names: Sequence[str],
    options: RunOptions,
) -> Float[Tensor, "hook group ..."]:
    """The mean activation at each hook point of the counted tokens of each group."""
    count = int(group.max()) + 1
    sums: dict[str, Tensor] = {}
    seen = {name: torch.zeros(len(prompts), dtype=torch.bool) for name in names}

    def add(name: str, rows: Int[Tensor, " batch"], activation: Float[Tensor, "batch pos ..."]) -> None:
        new = ~seen[name][rows]  # a batch that ran out of memory comes again, and counts once
        rows, activation = rows[new], activation[new.to(activation.device)]
        length = activation.shape[1]
        real = counted[rows, -length:].to(activation.device)
        groups = group[rows, -length:].to(activation.device)[real]
        # Sums over thousands of tokens lose digits in float32.
        if name not in sums:
            sums[name] = torch.zeros(count, *activation.shape[2:], dtype=torch.float64, device=activation.device)
        sums[name].index_add_(0, groups, activation[real].double())
        seen[name][rows] = True

    forward(
        model,
        prompts,
        prompt=torch.arange(len(prompts)),
        query=torch.full((len(prompts),), prompts.mask.shape[1] - 1),
        on_activation={name: lambda rows, x, name=name: add(name, rows, x) for name in names},
        options=options,
    )
    tokens = torch.bincount(group[counted], minlength=count)
    return torch.stack([(sums[name].cpu() / tokens.view(-1, *[1] * (sums[name].ndim - 1))).float() for name in names])


def _unread(prompts: Prompts) -> Bool[Tensor, "prompt pos"]:
    """The tokens of texts after the last that a target is predicted from; no mean is about them."""
    length, (prompt, query) = prompts.mask.shape[1], map(prompts.column, ("prompt", "query_pos"))
    last = torch.full((len(prompts),), length).scatter_reduce(0, prompt, query, "amax", include_self=False)
    return (torch.arange(length) > last[:, None]) & (prompts.token_kinds == TokenKind.TEXT)
