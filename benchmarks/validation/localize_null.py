"""Why are p-values of random heads small for some roles? Other prompts, other embeddings, tokens without a role."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch

from align_circuits.heads.permutation_tests import p_values
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study
from align_circuits.papers.statistics import NOT_MEASURED, Measured, seed_rows
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.report import plots
from align_circuits.tables.tables import Table
from align_circuits.validation.localize_ground_truth import LEVELS, random_model, random_task

SAMPLES = ("first prompts", "other prompts", "other embeddings", "random tokens")
"""What each head reads: prompts; other prompts; the first with all token embeddings drawn anew; and the first with
tokens drawn at random, so that the keys are where they were and nothing shows where."""

OF_FEW_TOKENS = {"relation": "facts", "grammar": "facts", "same_type": "demonstrations"}
"""The roles that few different tokens have, by the family of their prompts."""

OF_RECURRING_TOKENS = {**OF_FEW_TOKENS, "lookup": "standard"}
"""Those, and a role whose true keys repeat pairs of letters within a prompt: each prompt has automata of its own."""

LAYOUT = (TokenKind.PAD, TokenKind.BOS, TokenKind.COLON, TokenKind.SEPARATOR)


@dataclass(frozen=True)
class Null:
    """How many models of random weights."""

    models: int = 80
    """For each family of prompts."""
    families: tuple[str, ...] = ("facts", "demonstrations", "standard")
    first_seed: int = 2000
    """Other models than those of `localize/ground-truth`."""
    gains: tuple[float, ...] = (1.0, 4.0)
    """By what their query and key weights are multiplied, in turn."""
    n: int = 12
    """Prompts in a sample."""


def of_samples(*, family: str, gain: float, n: int, seed: int) -> pd.DataFrame:
    """Tests every head of one model of random weights on each of `SAMPLES`; the function of a job.

    Returns:
        The p-value of each role and head, a column for each of `SAMPLES`.
    """
    model, task = random_model(family, gain, seed), random_task(family, seed)
    prompts = task.sample(2 * n, getattr(model, "tokenizer", None), seed=seed)
    first, other = prompts[:n], prompts[n:]
    names = [role for role in task.roles if len(first.relations.get(role, ()))]
    redrawn = random_model(family, gain, seed, embeddings=10**6 + seed)
    read = ((model, first), (model, other), (redrawn, first), (model, without_roles(first, seed)))
    p = [p_values(reader, text, names, seed=seed) for reader, text in read]
    return pd.DataFrame(
        {"role": role, **{sample: values[role][head] for sample, values in zip(SAMPLES, p, strict=True)}}
        for role in names
        for head in [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    )


def without_roles(prompts: Prompts, seed: int) -> Prompts:
    """Prompts with a random one of their tokens at each position, but for separators, colons and the like."""
    free = prompts.mask & ~torch.isin(prompts.token_kinds, torch.tensor(LAYOUT))
    tokens = prompts.tokens[free].unique()
    drawn = torch.randint(len(tokens), free.shape, generator=torch.Generator().manual_seed(seed))
    return replace(prompts, inputs=torch.where(free, tokens[drawn], prompts.tokens))


def _jobs(config: Null, _: Inputs) -> list[Measurement]:
    return [
        Measurement(
            of_samples,
            {"family": family, "gain": config.gains[seed % len(config.gains)], "n": config.n},
            seed,
            {"family": family},
        )
        for family in config.families
        for seed in range(config.first_seed, config.first_seed + config.models)
    ]


def _summarize(_: Null, rows: Rows) -> pd.DataFrame:
    """Shares of heads, averaged over models: heads of one model are no independent observations."""
    p: Any = rows["of_samples"]
    p = p.assign(model=p.groupby(["family", "seed"]).ngroup())
    parts = []
    for (family, role), group in p.groupby(["family", "role"]):
        small = group[group[SAMPLES[0]] <= 0.01]
        for of, heads, levels in (("all heads", group, LEVELS), ("heads with p <= .01", small, (0.05,))):
            for sample, level in itertools.product(SAMPLES, levels):
                shares = (heads[sample] <= level + 1e-12).groupby(heads["model"]).mean()
                keys = {"family": family, "role": role, "reading": sample, "of": of, "at": level}
                if len(shares):
                    parts.append(seed_rows(pd.DataFrame([keys]), shares.to_numpy(dtype=float)[None]))
    return pd.concat(parts, ignore_index=True)


def _check(table: Table) -> list[Claim]:
    def share(of: str, role: str, family: str, reading: str) -> Measured:
        frame = table.frame
        at = (frame["of"] == of) & (frame["role"] == role) & (frame["family"] == family) & (frame["at"] == 0.05)
        found = frame[at & (frame["reading"] == reading)]
        if not len(found):  # such as no head with p <= .01, which shows nothing
            return NOT_MEASURED
        return Measured(*found.iloc[0][["value", "low", "high"]].astype(float))

    of_all, of_small = partial(share, "all heads"), partial(share, "heads with p <= .01")
    known = set(table.frame["family"])
    few, recurring = (
        [(role, family) for role, family in roles.items() if family in known]
        for roles in (OF_FEW_TOKENS, OF_RECURRING_TOKENS)
    )
    first, other, redrawn, random = SAMPLES
    return [
        *(
            Claim(f"{role}: with tokens at random the share of p-values up to .05").at_most(
                0.07, of_all(role, family, random), of_all(role, family, first), "with the prompts' own tokens"
            )
            for role, family in few
        ),
        *(
            Claim(f"{role}: heads with p up to .01 have p up to .05 on other prompts").at_least(
                0.4, of_small(role, family, other), of_small(role, family, redrawn), "with other token embeddings"
            )
            for role, family in recurring
        ),
    ]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    frame: Any = table.where(of="all heads").frame
    frame = frame[frame["reading"].isin([SAMPLES[0], SAMPLES[-1]])]
    panels = {
        f"{role}, {family}": part
        for (role, family), part in frame.groupby(["role", "family"])
        if OF_RECURRING_TOKENS.get(role) == family
    }
    return {"p-values": plots.curves(panels, x="at", by="reading", label="p", value="share of heads with p up to")}


NULL = Experiment(
    "localize/null",
    "Why are some p-values of heads of random weights small?",
    "the package's own promise",
    Study("localize/null", {"smoke": Null(1), "cpu": Null(), "paper": Null()}, _jobs, _summarize),
    _draw,
    _check,
)
