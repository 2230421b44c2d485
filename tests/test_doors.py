"""Wrong arguments are refused by the public functions themselves, in a sentence that says what came and what to do."""

# pyright: reportArgumentType=false, reportCallIssue=false
# The arguments are wrong on purpose.

import importlib
import pkgutil
from dataclasses import is_dataclass
from inspect import Parameter, isfunction, signature
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from wrong_inputs import World, outcome_of, wrong_calls

import align_circuits as ac
from align_circuits.checks import WrongArgument, described
from align_circuits.circuits.faithful import completeness, minimality


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.usefixtures("unchecked_shapes")
def test_two_hundred_wrong_inputs_end_at_the_door(world):
    outcomes = [outcome_of(*case) for case in wrong_calls(world, 200, seed=5)]
    below = [outcome for outcome in outcomes if outcome.kind in ("depths", "hang")]
    assert not below
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    assert len(refused) > 150
    assert [outcome for outcome in refused if len(outcome.message.split()) < 5] == []


def test_the_valid_calls_are_valid(world):
    for name, (function, arguments) in world.calls().items():
        if name not in ("Table.load", "tune"):
            assert function(**arguments) is not None, name


def test_every_public_function_checks_its_arguments(world):
    calls = {name: function for name, (function, _) in world.calls().items()}
    calls |= {name: function for name, function in vars(ac).items() if name in ac.__all__ and isfunction(function)}
    calls |= {"Relation.from_positions": ac.Relation.from_positions, "completeness": completeness}
    for name, function in {**calls, "minimality": minimality}.items():
        # The arguments of Table.where are the keys of the table; "load of a folder" writes the folder first.
        if name != "Table.where" and not name.startswith("load of"):
            with pytest.raises(WrongArgument, match="; it takes "):
                function(no_such_argument=0)


ROOMS = ("prompts", "tables", "hooks", "tasks", "run", "heads", "circuits")


@pytest.fixture(scope="module")
def classes_and_functions() -> tuple[set[type], set[FunctionType]]:
    """All that these rooms define, methods among the functions."""
    modules = []
    for room in ROOMS:
        package = importlib.import_module(f"align_circuits.{room}")
        found = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        modules += [package, *(importlib.import_module(module.name) for module in found)]
    names = {module.__name__ for module in modules}
    things = [thing for module in modules for thing in vars(module).values()]
    classes = {thing for thing in things if isinstance(thing, type) and thing.__module__ in names}
    things += [getattr(method, "__func__", method) for kind in classes for method in vars(kind).values()]
    return classes, {thing for thing in things if isfunction(thing) and thing.__module__ in names}


def test_dataclasses_are_frozen(classes_and_functions):
    kinds: set[Any] = {kind for kind in classes_and_functions[0] if is_dataclass(kind)}
    assert len(kinds) > 30
    thawed = {kind.__name__ for kind in kinds if not vars(kind)["__dataclass_params__"].frozen}
    assert thawed == {"_Batch", "Replay", "PatternProbe"}, "which live for one run"


def test_every_argument_may_be_given_by_name(classes_and_functions):
    functions = classes_and_functions[1]
    assert len(functions) > 300
    for function in functions:
        kinds = {parameter.kind for parameter in signature(function).parameters.values()}
        assert Parameter.POSITIONAL_ONLY not in kinds, function


CASES = [
    (
        lambda w: ac.score_heads(w.network, w.clean),
        "is a LlamaForCausalLM, not a model; load it with align_circuits.load",
    ),
    (
        lambda w: ac.score_heads(w.model, w.clean, "induction"),
        r"is the text 'induction', not .*; give a list, \['induction'\]",
    ),
    (lambda w: ac.score_heads(w.model, [[1, 2]]), "prompts is a list of 1 .*, not Prompts; make them with a task"),
    (
        lambda w: ac.score_heads(w.model, torch.zeros(2, 3)),
        r"a Tensor of shape \(2, 3\) and torch.float32, not Prompts",
    ),
    (
        lambda w: ac.patch_heads(w.model, w.clean),
        r"pair is a Prompts, not Pair; make one with Pair\(clean, corrupted\)",
    ),
    (lambda w: ac.localize(w.model, "induction"), "task is the text 'induction'.*give a task such as Seq2SeqTask"),
    (
        lambda w: ac.evaluate(w.model, w.clean, options="fast"),
        r"options is .*; give RunOptions\(engine=\.\.\., batch_size",
    ),
    (lambda w: ac.patch_heads(w.model, w.pair, heads=5), "heads is 5, not a list"),
    (lambda w: w.task.sample(True, w.tokenizer), "n is True, not an int"),
    (lambda w: w.task.sample(2, "gpt2"), "tokenizer is the text 'gpt2', not Tokenizer or None; give model.tokenizer"),
    (lambda _: ac.RunOptions(batch="auto"), "RunOptions: got an unexpected keyword argument 'batch'; it takes engine"),
    (lambda w: ac.Seq2SeqTask(n_examples=10**6).sample(9, w.tokenizer), "9 prompts of 1,000,000 examples are .* GB"),
    (lambda w: ac.patch_edges(w.model, w.pair, edges=[("L0H1", "L1H1.k")]), "L1KV0.k"),
    (lambda w: ac.patch_edges(w.model, w.pair, edges=["L0H1"]), r"edges\[0\] is the text 'L0H1', not a tuple"),
    (lambda _: ac.load("a" * 300), "is no name of a folder"),
    (lambda _: ac.Seq2SeqTask(edge_range=["L0H0", 3]), r"edge_range is a list of 2 .*, not a tuple \(an int, an int\)"),
    (lambda w: w.table.where(layer=[[]]), "layer is a list of 0: give a value of that column"),
    (lambda w: w.table.where(layer=torch.zeros(3)), r"layer is a Tensor of shape \(3,\) and .*: give a value of that"),
    (
        lambda w: ac.attribute_heads(w.model, w.pair, sites=()),
        "no site to attribute to: give at least one, such as 'z'",
    ),
]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_came_what_is_allowed_and_what_to_do(world, case):
    call, message = CASES[case]
    with pytest.raises((TypeError, ValueError, KeyError), match=message):
        call(world)


def test_numbers_of_arrays_and_tables_are_numbers(world):
    row = pd.DataFrame({"n": [2]}).iloc[0]
    assert (
        len(world.task.sample(np.int64(2), world.tokenizer)) == len(world.task.sample(row["n"], world.tokenizer)) == 2
    )
    assert len(world.table.top("lookup", np.int32(1))) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (2.5, "2.5"),
        ("a" * 50, f"the text {'a' * 40!r}..."),
        ([], "a list of 0"),
        ([1, 2], "a list of 2 (1, ...)"),
        (np.zeros((2, 3)), "a ndarray of shape (2, 3) and float64"),
        (object(), "an object"),
    ],
)
def test_values_are_described(value, words):
    assert described(value) == words
