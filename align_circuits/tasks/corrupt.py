"""Minimal pairs: prompts that differ from clean ones in one respect, token for token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from align_circuits.prompts.prompts import Prompts
from align_circuits.tasks.automaton import Automata
from align_circuits.tasks.gold_relations import write
from align_circuits.tasks.grammar import sample_orders, sample_uniform_orders
from align_circuits.tasks.layout import Layout
from align_circuits.tasks.rng import Rng

Corruption = Literal["query", "labels", "alignment"]


def corrupt_seq2seq(
    prompts: Prompts,
    kind: Corruption,
    seed: int,
    *,
    layout: Layout,
    ood: bool,
    sample_automata: Callable[[Rng, int], Automata],
) -> Prompts:
    """Returns the corrupted halves of minimal pairs, as `Seq2SeqTask.corrupt` describes them.

    `ood`: whether the test input may be any permutation. `sample_automata` draws automata for a number of prompts.
    """
    if kind not in get_args(Corruption):
        raise ValueError(f"corruption {kind!r}: choose one of {', '.join(map(repr, get_args(Corruption)))}")
    if "corrupted" in prompts.task:
        raise ValueError(
            f"these prompts are already corrupted ({prompts.task['corrupted']['kind']!r}): give the clean ones"
        )
    if kind != "query" and prompts.latent["order"].shape[1] == 1:
        raise ValueError(f"there are no examples whose {kind} could be corrupted: n_examples is 0")
    aligned = list(prompts.task["aligned"])
    m, rng = len(aligned), Rng(seed, f"corrupt.{kind}")
    order, phrases = prompts.latent["order"].clone(), prompts.latent["phrases"].clone()
    copied = order[:, :, aligned]
    if kind == "query":
        if m == 1:
            raise ValueError("x_len is 1, so there is only one possible input: use longer inputs")
        sample = sample_uniform_orders if ood else sample_orders
        order[:, -1] = _redraw(
            lambda n: sample(rng, n, 1, m)[:, 0],
            lambda new, row: (new[:, aligned] != copied[row, -1]).all(1),
            len(prompts),
        )
        copied[:, -1] = order[:, -1, aligned]
    elif kind == "labels":
        uniform = rng.uniform("letters", *phrases[:, :-1].shape)
        phrases[:, :-1], _ = sample_automata(rng, len(prompts)).walk(copied[:, :-1], uniform)
    else:
        if len(set(aligned)) == 1:
            raise ValueError(
                "all phrases translate the same input position, so no order of phrases contradicts the alignment"
            )
        # Phrases may share a position, and exchanging two that do contradicts nothing: positions are compared.
        position = torch.tensor(aligned)
        rows = order[:, :-1, 0].numel()
        moved = _redraw(lambda n: rng.order("phrases", n, m), lambda new, _: (position[new] != position).any(1), rows)
        moved = moved.view_as(copied[:, :-1])
        copied[:, :-1] = copied[:, :-1].gather(2, moved)
        phrases[:, :-1] = phrases[:, :-1].gather(2, moved[..., None].expand_as(phrases[:, :-1]))
    own_correct = None
    if kind == "query" and prompts.correct is not None:
        # The first letters that the automata of the new symbols write. Of later letters, which follow the letters of
        # the clean prompt, nothing is known.
        rows = torch.arange(len(prompts))[:, None]
        letters = prompts.latent["letter"][rows, copied[:, -1], 0].long()
        # A missing edge has letter -1, which falls into column 0.
        known = torch.nn.functional.one_hot(letters + 1, len(prompts.answer_tokens) + 1).any(2)[..., 1:]
        own_correct = torch.zeros_like(prompts.correct)
        first = prompts.column("offset") == 0
        own_correct[first] = known[prompts.column("prompt")[first], prompts.column("phrase")[first]]
    latent = {**prompts.latent, "order": order, "phrases": phrases}
    fixed, symbols = (torch.tensor(prompts.task[name]) for name in ("fixed", "symbols"))
    inputs = write(layout, latent, copied, fixed, symbols, prompts.answer_tokens)
    task = {**prompts.task, "corrupted": {"kind": kind, "seed": seed}}
    return replace(prompts, inputs=inputs, own_correct=own_correct, latent=latent, task=task)


def _redraw(
    draw: Callable[[int], Int[Tensor, "row pos"]],
    fits: Callable[[Int[Tensor, "row pos"], Int[Tensor, " row"]], Bool[Tensor, " row"]],
    n: int,
) -> Int[Tensor, "row pos"]:
    """Draws each row until it fits, so that it is uniform among the rows that fit."""
    drawn, open_rows = draw(n), torch.arange(n)
    while True:
        open_rows = open_rows[~fits(drawn[open_rows], open_rows)]
        if not len(open_rows):
            return drawn
        drawn[open_rows] = draw(len(open_rows))
