"""Wrong arguments are refused by the public functions themselves, in a sentence that says what came and what to do."""

# pyright: reportArgumentType=false, reportCallIssue=false
# The arguments are wrong on purpose.

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import Parameter, isabstract, isfunction, signature
from pkgutil import iter_modules
from types import FunctionType

import numpy as np
import pandas as pd
import pytest
import torch
from jaxtyping import TypeCheckError
from wrong_inputs import World, outcome_of, wrong_calls

import align_circuits as ac
from align_circuits.checks import WrongArgument, described
from align_circuits.circuits.faithful import completeness, minimality
from align_circuits.circuits.pruning import prune_edges
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.attention import PatternProbe
from align_circuits.hooks.edits import Edit, _AtSite
from align_circuits.report import plots
from align_circuits.tables.intervals import weighted_mean


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.usefixtures("unchecked_shapes")
def test_two_hundred_wrong_inputs_end_at_the_door(world):
    outcomes = [outcome_of(*case) for case in wrong_calls(world, 200, seed=5)]
    below = [outcome for outcome in outcomes if outcome.kind in ("depths", "hang")]
    assert not below
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    assert len(refused) > 100
    assert [outcome for outcome in refused if len(outcome.message.split()) < 5] == []


def test_the_valid_calls_are_valid(world):
    for name, (function, arguments) in world.calls().items():
        if name not in ("Table.load", "tune"):
            assert function(**arguments) is not None, name


def test_every_public_function_checks_its_arguments(world):
    calls = {name: function for name, (function, _) in world.calls().items()}
    calls |= {name: function for name, function in vars(ac).items() if name in ac.__all__ and isfunction(function)}
    calls |= {"Relation.from_positions": ac.Relation.from_positions, "completeness": completeness}
    calls |= {"Prompts.from_jsonl": ac.Prompts.from_jsonl, "minimality": minimality, "prune_edges": prune_edges}
    for name, function in calls.items():
        # The arguments of Table.where are the keys of the table; "load of a folder" writes the folder first.
        if name != "Table.where" and not name.startswith("load of"):
            with pytest.raises(WrongArgument, match="; it takes "):
                function(no_such_argument=0)


ROOMS = ("prompts", "tables", "hooks", "tasks", "run", "heads", "circuits")


@pytest.fixture(scope="module")
def modules():
    """All modules of these rooms, most of which are imported only when they are needed."""
    rooms = [import_module(f"align_circuits.{room}") for room in ROOMS]
    return [import_module(f"{room.__name__}.{found.name}") for room in rooms for found in iter_modules(room.__path__)]


def of_these_rooms(modules, kind):
    things = [thing for module in modules for thing in vars(module).values() if isinstance(thing, kind)]
    return {thing for thing in things if [*thing.__module__.split("."), ""][1] in ROOMS}


@pytest.fixture(scope="module")
def dataclasses(modules):
    return {kind for kind in of_these_rooms(modules, type) if is_dataclass(kind)}


@pytest.fixture(scope="module")
def functions(modules):
    """All functions and methods, private ones too."""
    members = [member for kind in of_these_rooms(modules, type) for member in vars(kind).values()]
    members = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    return {*of_these_rooms(modules, FunctionType), *filter(isfunction, members)}


def test_dataclasses_are_frozen(dataclasses):
    assert len(dataclasses) > 30
    thawed = {kind.__name__ for kind in dataclasses if not vars(kind)["__dataclass_params__"].frozen}
    assert thawed == {"_Batch", "HeadSets", "Replay", "PatternProbe"}, "which live for one run"


def test_what_holds_arrays_or_functions_compares_by_identity(dataclasses):
    """Else `==` would ask whether an array is true, and a dictionary of prompts could not be made."""
    arrays = re.compile(r"jaxtyping|torch\.Tensor|DataFrame|tables\.Table|Prompts|HookedModel|Callable")
    for kind in dataclasses:
        holds = any(arrays.search(str(part.type)) for part in fields(kind)) or issubclass(kind, Edit)
        assert (kind.__eq__ is object.__eq__) is holds, kind


def test_edits_of_every_kind_show_themselves_alike(dataclasses):
    kinds = [kind for kind in dataclasses if issubclass(kind, Edit)]
    assert len(kinds) > 6
    assert all(kind.__repr__ is Edit.__repr__ for kind in kinds)


def test_a_kind_of_edit_says_what_it_changes(dataclasses):
    """And a kind of edit at a site what it puts there: else it is no edit, but what several have in common."""
    for kind in dataclasses:
        if issubclass(kind, Edit):
            own = {name for base in kind.__mro__ for name in vars(base) if base not in (Edit, _AtSite, object)}
            assert isabstract(kind) is not bool(own & {"changes", "replacement"}), kind


def test_every_argument_may_be_given_by_name(functions):
    assert len(functions) > 500
    for function in functions:
        # A method with names of one's own leaves them all, `self` too.
        kinds = {parameter.kind for name, parameter in signature(function).parameters.items() if name != "self"}
        assert Parameter.POSITIONAL_ONLY not in kinds, function


def test_every_seed_is_0_by_default(functions):
    seeds = [parts["seed"].default for function in functions if "seed" in (parts := signature(function).parameters)]
    assert {seed for seed in seeds if seed is not Parameter.empty} == {0}


def test_shapes_of_arguments_and_fields_are_checked_in_tests():
    with pytest.raises(TypeCheckError, match="row prompt"):
        weighted_mean(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(TypeCheckError, match="'row'"):
        PatternProbe(torch.tensor([0]), torch.tensor([1, 2]), print)


def test_thresholds_are_shares_or_small_losses():
    assert all(0 < threshold < 1 for threshold in vars(Thresholds()).values())


def test_as_many_controls_are_drawn_as_a_verdict_asks_for():
    """Of n control sets the smallest p-value is 1 / (n + 1); it lies below the threshold."""
    assert 1 / (signature(ac.localize).parameters["n_controls"].default + 1) < Thresholds().alpha


CASES = [
    (lambda w: ac.score_heads(w.network, w.clean), "is a LlamaForCausalLM, not a model; load it with align_circuits.l"),
    (
        lambda w: ac.score_heads(w.model, w.clean, metric="lookup"),
        r"argument 'metric', did you mean metrics=\?; it takes",
    ),
    (lambda w: ac.Pair(w.clean, w.clean, metrics="kl"), r"argument 'metrics', did you mean metric=\?; it takes"),
    (lambda w: ac.Pair(w.clean, w.clean, metric=["kl"]), r"metric is a list of 1 .*, not .*; give it alone, 'kl'"),
    (
        lambda w: ac.patch_heads(w.model, w.pair, metrics="kl"),
        r"argument 'metrics', since it belongs to the pair: Pair\(clean, corrupted, metric=\.\.\.\); it takes",
    ),
    (lambda w: plots.head_maps(w.table, metric="lookup"), r"did you mean panels=\?"),
    (lambda w: w.table.top("lookup", n="10"), "n is the text '10', not an int; give the number, 10"),
    (lambda w: w.table.top("lookup", n="ten"), "n is the text 'ten', not an int$"),
    (lambda w: ac.patch_heads(w.model, w.pair, heads="L0H1"), r"not a list of heads or None; give a list, \['L0H1'\]"),
    (lambda w: ac.patch_heads(w.model, w.pair, heads=(0, 1)), r"is one head: give a list of heads, \[\(0, 1\)\]"),
    (
        lambda w: ac.patch_heads(w.model, w.pair, positions={"IO": 3}),
        r"positions\['IO'\] is 3, not a tensor \[prompt pos\]; give a mask, prompts\.mask_of\(name\)",
    ),
    (
        lambda w: ac.patch_heads(w.model, w.pair, positions=[3]),
        r"positions\[0\] is 3, not a text; name it when the prompts are made, positions=\{'P': 3\}, and give ",
    ),
    (
        lambda w: ac.patch_heads(w.model, w.clean, w.clean),
        r"too many positional .* are one argument: make one with Pair\(clean, corrupted\); it takes model, pair, ",
    ),
    (
        lambda w: ac.attribute_edges(w.model, clean=w.clean, corrupted=w.clean),
        r"are one argument: make one with Pair\(clean, corrupted\); it takes model, pair, ",
    ),
    (
        lambda w: ac.Relation.from_positions("END", ["IO", "S1"], prompts=w.clean),
        r"keys\[0\] is a list .*; give the names one by one: from_positions\(query, 'IO', 'S1'\)",
    ),
    (
        lambda w: ac.ablate_heads(w.model, w.clean).normalized(),
        "effects of 'ablate_heads' have no scale from corrupted to clean prompts, .* call patch_heads",
    ),
    (lambda w: ac.ablation_baseline(w.model, w.clean[:0]), "no prompts to average over"),
    (lambda w: w.task.corrupt(w.task.sample(2, w.tokenizer)[:0]), "no prompts to corrupt"),
    (lambda w: ac.score_heads(w.model, [[1, 2]]), "prompts is a list of 1 .*, not Prompts; make them with a task"),
    (lambda w: ac.score_heads(w.model, torch.zeros(2, 3)), r"a Tensor of shape \(2, 3\) and .*float32, not Prompts"),
    (lambda w: ac.patch_heads(w.model, w.clean), r"pair is a Prompts, not Pair; make one with Pair\(clean, corrup"),
    (lambda w: ac.localize(w.model, "induction"), "task is the text 'induction'.*give a task such as Seq2SeqTask"),
    (lambda w: ac.evaluate(w.model, w.clean, options="fast"), r"options is .*; give RunOptions\(engine=\.\.\., batch_"),
    (lambda w: ac.patch_heads(w.model, w.pair, heads=5), "heads is 5, not a list"),
    (lambda w: w.task.sample(True, w.tokenizer), "n is True, not an int"),
    (lambda w: w.task.sample(2, "gpt2"), "tokenizer is the text 'gpt2', not Tokenizer or None; give model.tokenizer"),
    (lambda _: ac.RunOptions(batch="auto"), "RunOptions: got an unexpected keyword argument 'batch'; it takes engine"),
    (lambda w: ac.Seq2SeqTask(n_examples=10**6).sample(9, w.tokenizer), "9 prompts of 1,000,000 examples are .* GB"),
    (lambda w: ac.patch_edges(w.model, w.pair, edges=[("L0H1", "L1H1.k")]), "L1KV0.k"),
    (lambda w: ac.patch_edges(w.model, w.pair, edges=["L0H1"]), r"edges\[0\] is the text 'L0H1', not a tuple"),
    (lambda _: ac.load("a" * 300), "is not a folder, a file or a name"),
    (lambda _: ac.Table.load("\ud800"), "is not a folder: give one that Table.save wrote"),
    (lambda w: ac.emergence_step(w.table, "lookup"), "has no column 'step': give what a training measured"),
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


def test_one_metric_needs_no_list(world):
    for alone, several in (
        (ac.score_heads(world.model, world.clean, "lookup"), ac.score_heads(world.model, world.clean, ["lookup"])),
        (
            ac.evaluate(world.model, world.clean, metrics="logit"),
            ac.evaluate(world.model, world.clean, metrics=["logit"]),
        ),
        (
            ac.ablate_heads(world.model, world.clean, heads=["L0H0"], metrics="logit"),
            ac.ablate_heads(world.model, world.clean, heads=["L0H0"], metrics=["logit"]),
        ),
    ):
        pd.testing.assert_frame_equal(alone.frame, several.frame)
    assert plots.top_heads(world.table, "lookup") == plots.top_heads(world.table, ["lookup"])
    assert plots.head_maps(world.table, "lookup") == plots.head_maps(world.table, ["lookup"])


def test_numbers_of_arrays_and_tables_are_numbers(world):
    for two in (np.int64(2), pd.DataFrame({"n": [2]}).iloc[0]["n"]):
        assert len(world.task.sample(two, world.tokenizer)) == 2
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
