"""A finite dataset of examples (Agarwal & Sarawagi, 2025: D), and prompts whose examples are drawn from it."""

from dataclasses import replace
from typing import Any

import torch

from align_circuits.checks import checked
from align_circuits.prompts.prompts import Prompts
from align_circuits.tasks.gold_relations import targets_and_relations, write
from align_circuits.tasks.layout import layout_of
from align_circuits.tasks.references import oracle_accuracy
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.seq2seq import Seq2SeqTask, config_of

SHARED = ("symbols", "letter", "next")
"""The latent variables that all examples of a task with fixed automata share."""


_DRAWN_AT_MOST = 256
"""How many examples are drawn for each that is asked for, before it is said that there are not so many."""


@checked
def sample_finite_dataset(
    task: Seq2SeqTask, n: int, tokenizer: Any, seed: int = 0, *, without: Prompts | None = None
) -> Prompts:
    """Draws `n` different examples `x:y`, each a prompt of its own without examples before it.

    Args:
        task: With fixed automata.
        n: How many.
        tokenizer: As for `Seq2SeqTask.sample`.
        seed: Which.
        without: Examples that are not drawn, such as those that a model learned from.

    Raises:
        ValueError: Automata are drawn anew for each prompt, so that examples cannot be combined; examples to leave out
            that are none of this task; or the task hardly has so many different examples.
    """
    if task.automata != "task":
        raise ValueError(
            "automata='prompt' draws new automata for each prompt, so prompts cannot share examples: "
            "give the task automata='task'"
        )
    alone = replace(task, n_examples=0)
    if without is not None:
        _check_examples(task, without, "without")
    taken = {*map(bytes, without.inputs.numpy())} if without is not None else set[bytes]()
    drawn = n
    while True:
        examples = alone.sample(drawn, tokenizer, seed)  # the first ones are the same, however many are drawn
        places = {bytes(ids): place for place, ids in reversed([*enumerate(examples.inputs.numpy())])}
        new = sorted(place for ids, place in places.items() if ids not in taken)[:n]
        if len(new) == n:
            return examples if drawn == n else examples[new]
        if drawn >= _DRAWN_AT_MOST * n:
            beside = f" beside the {len(without)} that are left out" if without is not None else ""
            raise ValueError(
                f"{len(new)} different examples among {drawn:,} that were drawn{beside}, and {n} are needed: "
                "take fewer, or a task with longer inputs or phrases"
            )
        drawn *= 4


def in_context(
    task: Seq2SeqTask, dataset: Prompts, test: Prompts | None = None, *, n: int = 1, seed: int = 0
) -> Prompts:
    """Returns prompts whose k examples are drawn from a finite dataset, without replacement within a prompt.

    Args:
        task: The task, with fixed automata, that `sample_finite_dataset` drew the dataset from; it has the k.
        dataset: The examples.
        test: The test examples, also from `sample_finite_dataset`; by default `n` different ones of the dataset. None
            is among the examples of its own prompt.
        n: The number of prompts, if there is no `test`.
        seed: Which examples.

    Raises:
        ValueError: The dataset is too small, or it or the test examples are not of this task, but for `ood`.
    """
    if n < 1:
        raise ValueError(f"n={n}: give how many prompts, at least 1")
    _check_examples(task, dataset, "dataset")
    own = torch.full((0,), -1)  # of each test example, its place in the dataset
    if test is not None:
        _check_examples(task, test, "test")
        places = {bytes(ids): place for place, ids in enumerate(dataset.inputs.numpy())}
        own = torch.tensor([places.get(bytes(ids), -1) for ids in test.inputs.numpy()])
    k, rng = task.n_examples, Rng(seed, "pool")
    needed = max(k + 1, n) if test is None else k + bool((own >= 0).any())
    if len(dataset) < needed:
        raise ValueError(
            f"a finite dataset of {len(dataset)} examples, but {needed} different ones are needed (k={k}, {n} prompts):"
            " draw a larger dataset, or take fewer examples or prompts"
        )
    if test is None:
        test_rows = rng.order("test", 1, len(dataset))[0, :n]
        # Drawn among one fewer, then shifted past the prompt's own: uniform among the others without a rejected draw.
        rows = rng.order("examples", n, len(dataset) - 1)[:, :k]
        rows, test = rows + (rows >= test_rows[:, None]), dataset[test_rows]  # skips the prompt's own test example
    else:
        order = rng.order("examples", len(test), len(dataset))
        rows = torch.stack([row[row != place][:k] for row, place in zip(order, own, strict=True)])
    aligned = list(task.aligned)
    layout = layout_of(task.style, task.x_len, task.phrase_len, k, test.task["bos"])
    latent = {name: test.latent[name] for name in SHARED}
    latent |= {
        name: torch.cat([dataset.latent[name][rows, 0], test.latent[name]], 1) for name in ("order", "phrases")
    }  # [prompt example ...]
    fixed, symbols = (torch.tensor(test.task[name]) for name in ("fixed", "symbols"))
    aligned_symbols = latent["order"][:, :, aligned]
    inputs = write(layout, latent, aligned_symbols, fixed, symbols, test.answer_tokens)
    targets, relations = targets_and_relations(layout, inputs, latent, aligned)
    references = {name: test.targets[name] for name in ("chance", "memoryless", "history") if name in test.targets}
    if references and test.correct is not None:
        correct = test.correct.view(len(test), task.x_len, task.phrase_len, -1)
        references["oracle"] = oracle_accuracy(aligned_symbols, latent["phrases"], correct).flatten().numpy()
    return replace(
        test,
        inputs=inputs,
        mask=torch.ones_like(inputs, dtype=torch.bool),
        token_kinds=layout.token_kinds.expand_as(inputs).clone(),
        example=layout.example.expand_as(inputs).clone(),
        targets=targets.assign(**references),
        relations=relations,
        latent=latent,
        token_strings={**dataset.token_strings, **test.token_strings},
        task={**test.task, "dataset": {"examples": len(dataset), "digest": dataset.digest, "k": k, "seed": seed}},
    )


def _check_examples(task: Seq2SeqTask, examples: Prompts, name: str) -> None:
    """Raises unless these are whole examples that `sample_finite_dataset` drew from a task, `ood` or not."""
    given, own = examples.task.get("config", {}), config_of(replace(task, n_examples=0))
    if unlike := [key for key, value in own.items() if key != "ood" and given.get(key) != value]:
        key = unlike[0]
        raise ValueError(
            f"{name}: {key} is {given.get(key)!r} there and {own[key]!r} in the task (n_examples is 0 of single "
            "examples): give what sample_finite_dataset drew from this task"
        )
    if len(examples.targets) != len(examples) * task.x_len * task.phrase_len or "corrupted" in examples.task:
        raise ValueError(
            f"{name}: some targets were left out, or it is corrupted: give what sample_finite_dataset drew"
        )
