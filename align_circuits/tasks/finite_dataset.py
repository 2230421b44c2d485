"""A finite set of examples, paper 1's D, and prompts whose examples are drawn from it."""

from dataclasses import replace
from typing import Any

import torch

from align_circuits.prompts.prompts import Prompts
from align_circuits.tasks.labels import gold, write
from align_circuits.tasks.layout import layout
from align_circuits.tasks.references import oracle_accuracy
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.seq2seq import Seq2SeqTask

FROM_TEST = ("symbols", "letter", "next")
"""What all examples of a task with fixed automata share."""


def sample_finite_dataset(task: Seq2SeqTask, n: int, tokenizer: Any, seed: int = 0) -> Prompts:
    """Draws `n` examples `x:y`, each a prompt of its own without examples before it.

    Raises:
        ValueError: Automata are drawn anew for each prompt, so that examples of two prompts do not belong together.
    """
    if task.automata != "task":
        raise ValueError(
            "automata='prompt' draws new automata for each prompt, so examples cannot be shared by prompts: "
            "give the task automata='task'"
        )
    return replace(task, n_examples=0).sample(n, tokenizer, seed)


def in_context(task: Seq2SeqTask, pool: Prompts, test: Prompts | None = None, *, n: int = 1, seed: int = 0) -> Prompts:
    """Returns prompts whose k examples are drawn from a pool, without replacement within a prompt.

    Args:
        task: Whose k, with fixed automata; the pool is a `sample_finite_dataset` of it.
        pool: The examples.
        test: The test examples, a `sample_finite_dataset` of the same task; by default `n` different ones from the
            pool, which then are not among their own prompt's examples.
        n: The number of prompts where there is no `test`.
        seed: Which examples.

    Raises:
        ValueError: The pool is too small.
    """
    k, streams = task.n_examples, Rng(seed, "pool")
    needed = max(k + 1, n) if test is None else k
    if len(pool) < needed:
        raise ValueError(
            f"a pool of {len(pool)} examples, but {needed} different ones are needed (k={k}, {n} prompts): "
            "draw a larger pool, or take fewer examples or prompts"
        )
    if test is None:
        own = streams.order("test", 1, len(pool))[0, :n]
        rows = streams.order("examples", n, len(pool) - 1)[:, :k]
        rows, test = rows + (rows >= own[:, None]), pool[own]  # skips the prompt's own test example
    else:
        rows = streams.order("examples", len(test), len(pool))[:, :k]
    aligned = list(task.aligned)
    places = layout(task.style, task.x_len, task.phrase_len, k, test.task["bos"])
    latent = {name: test.latent[name] for name in FROM_TEST}
    latent |= {
        name: torch.cat([pool.latent[name][rows, 0], test.latent[name]], 1) for name in ("order", "phrases")
    }  # [prompt example ...]
    fixed, symbols = (torch.tensor(test.task[name]) for name in ("fixed", "symbols"))
    which = latent["order"][:, :, aligned]
    inputs = write(places, latent, which, fixed, symbols, test.answer_tokens)
    targets, relations = gold(places, inputs, latent, aligned)
    references = {name: test.targets[name] for name in ("chance", "memoryless", "history") if name in test.targets}
    if references and test.correct is not None:
        accepted = test.correct.view(len(test), task.x_len, task.phrase_len, -1)
        references["oracle"] = oracle_accuracy(which, latent["phrases"], accepted).flatten().numpy()
    return replace(
        test,
        inputs=inputs,
        mask=torch.ones_like(inputs, dtype=torch.bool),
        roles=places.roles.expand_as(inputs),
        example=places.example.expand_as(inputs),
        targets=targets.assign(**references),
        relations=relations,
        latent=latent,
        token_strings={**pool.token_strings, **test.token_strings},
        task={**test.task, "pool": {"examples": len(pool), "digest": pool.digest, "k": k, "seed": seed}},
    )
