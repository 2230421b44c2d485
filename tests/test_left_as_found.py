"""Models and the process are after a verb as they were before it: after errors and interrupts, too."""

import asyncio
import inspect
import os
import signal
import threading
import warnings
from contextlib import suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from found import TASK, VERBS, WITHOUT_BLOCKS, changed, found, pair_of, with_a_callers_things

import align_circuits as ac
from align_circuits.circuits import faithful
from align_circuits.circuits.pruning import prune_edges
from align_circuits.heads import task_vector_effects
from align_circuits.hooks import left_as_found
from align_circuits.hooks.compat import bridges, model_state
from align_circuits.hooks.gradients import gradients_at
from align_circuits.hooks.probes import dry_run, firing
from align_circuits.models import parameters
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.papers.recall.models.attention_only import AttentionOnly, AttentionOnlyConfig
from align_circuits.run.edited_runs import run_edited
from align_circuits.run.forward_pass import forward

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # a caller's, below frozen weights


@pytest.fixture(scope="module")
def pair(char_tokenizer) -> ac.Pair:
    return pair_of(char_tokenizer)


@pytest.fixture(scope="module")
def make(random_hf_model, char_tokenizer):
    """Models by name: Hugging Face's under the fast engine or the reference, and one of TransformerLens's own kind."""

    def make(kind: str):
        if kind == "own":
            model = AttentionOnly(AttentionOnlyConfig(d_vocab=len(char_tokenizer), n_ctx=64))
            model.tokenizer = char_tokenizer
        else:
            model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
        return model, with_a_callers_things(model, hooks=kind != "fast")

    return make


@pytest.fixture(scope="module")
def models(make):
    return {kind: make(kind) for kind in ("fast", "reference", "own")}


@pytest.mark.parametrize("name", sorted({*VERBS} - {"localize"}))  # which calls others, and takes two seconds
def test_every_verb_leaves_the_model_and_the_process_as_they_were(models, pair, name):
    for kind, (model, calls) in models.items():
        if (kind == "own" and name not in WITHOUT_BLOCKS) or (kind == "reference" and name == "patch_sites"):
            continue
        before = found(model)
        calls.clear()
        VERBS[name](model, pair, ac.RunOptions())
        assert not changed(before, found(model)), kind
        assert calls or kind == "fast" or name == "fwd_hooks", "the caller's hooks fired meanwhile"


@pytest.fixture(autouse=True)
def interruptible():
    """What a shell starts in the background ignores interrupts, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("name", ["patch_heads", "evaluate", "attribute_heads"])
def test_an_interrupt_inside_of_a_verb_or_of_its_clean_up_leaves_nothing(make, pair, name, monkeypatch):
    model, _ = make("reference")
    before, handler = found(model), signal.getsignal(signal.SIGINT)
    for owner, method in (
        (type(model), "_remove_temporary_hook"),  # TransformerLens's clean-up
        (type(model), "check_hooks_to_add"),  # while it attaches hooks
        (torch.no_grad, "__exit__"),
        (type(model), "forward"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                VERBS[name](model, pair, ac.RunOptions())
        assert not changed(before, found(model)), method
        assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("run", [firing, lambda model: dry_run(model=model, names=["hook_embed"])])
def test_an_interrupt_inside_of_a_run_of_two_tokens_leaves_nothing(make, run, monkeypatch):
    model, _ = make("reference")
    before = found(model)
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "_remove_temporary_hook", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model)
    assert not changed(before, found(model))


def test_a_second_interrupt_waits_for_the_clean_up_and_an_error_moves_nothing(make, pair):
    model, _ = make("fast")
    before = found(model)

    def twice(*_):
        try:
            interrupt()
        finally:
            interrupt()  # held back until all is clean
            warnings.simplefilter("ignore")
            torch.rand(1)

    cases: Any = ((twice, KeyboardInterrupt), (lambda *_: 1 / 0, ZeroDivisionError))
    for own, error in cases:
        with pytest.raises(error):
            ac.patch_heads(model, ac.Pair(pair.clean, pair.corrupted, metric=own))
        assert not changed(before, found(model))


def test_an_interrupt_while_the_model_is_put_back_comes_right_after(make, pair, monkeypatch):
    model, _ = make("fast")
    before, handler, remembered = found(model), signal.getsignal(signal.SIGINT), left_as_found.model_state.remembered

    def and_interrupted(of: Any) -> Any:
        restore = remembered(of)
        return lambda **how: (interrupt(), restore(**how))

    monkeypatch.setattr(model_state, "remembered", and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        ac.evaluate(model, pair.clean)
    assert not changed(before, found(model)) and signal.getsignal(signal.SIGINT) is handler


def test_the_attention_function_what_may_have_a_gradient_and_its_gradient_are_put_back(make):
    model, _ = make("fast")
    frozen, free, *_ = model.original_model.parameters()
    frozen.requires_grad_(False)
    before, restore = found(model), left_as_found.model_state.remembered(model)
    model.original_model.config._attn_implementation = "sdpa"
    assert changed(before, found(model)) == ["attention"]
    frozen.requires_grad_(True)
    free.requires_grad_(False)
    frozen.grad, free.grad = torch.ones_like(frozen), torch.ones_like(free)
    restore(generator=False)
    assert not changed(before, found(model))


def test_of_several_hooks_at_one_point_only_the_added_go(make):
    model, _ = make("reference")
    point = model.hook_dict["blocks.0.hook_resid_pre"]
    for _ in range(2):
        point.add_hook(lambda activation, **_: activation)
    before, restore = found(model), left_as_found.model_state.remembered(model)
    point.add_hook(lambda activation, **_: activation)
    restore(generator=False)
    assert len(point.fwd_hooks) >= 2 and not changed(before, found(model))


def test_every_public_function_of_a_model_makes_the_promise():
    """Those that call each other hide it where one does not."""
    modules = [vars(module).values() for module in (faithful, task_vector_effects)]
    here = [each for each in chain(*modules) if getattr(each, "__module__", "").endswith(("faithful", "effects"))]
    functions = [*(getattr(ac, name) for name in ac.__all__), *here, prune_edges]
    functions += [dry_run, firing, forward, gradients_at, run_edited]  # of which they are made
    checked = 0
    for function in filter(inspect.isfunction, functions):
        if function.__name__.startswith("_") or [*inspect.signature(function).parameters][:1] != ["model"]:
            continue
        assert "@leaves_as_found\n" in inspect.getsource(function), function.__name__
        checked += 1
    assert checked > 15


def test_a_hook_that_removes_itself_does_not_come_back(make, pair):
    model, _ = make("fast")
    layer = model.original_model.model.layers[0].mlp
    handle = layer.register_forward_hook(lambda *_: handle.remove())
    ac.evaluate(model, pair.clean)
    assert handle.id not in layer._forward_hooks


def in_another_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_verbs_of_many_threads_on_one_model_return_what_each_returns_alone(make, pair):
    """On another model beside it, too, and by asyncio; afterwards all is as before."""
    models = [make("fast")[0], make("fast")[0]]
    mixed = [(model, verb) for verb in ("attribute_heads", "ablate_heads", "score_heads") for model in models]
    value = lambda model, verb: VERBS[verb](model, pair, ac.RunOptions()).frame["value"].to_numpy()  # noqa: E731
    alone, before = [value(*each) for each in mixed], [found(model) for model in models]

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(value, *each) for each in mixed * 3))

    for one, other in zip(asyncio.run(at_once()), alone * 3, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not any(changed(then, found(model)) for then, model in zip(before, models, strict=True))
    assert not left_as_found._taken


@pytest.mark.parametrize("shared", ["model", "module", "configuration", "nothing"])
def test_only_calls_on_models_that_share_something_wait_for_each_other(shared):
    one, other = (torch.nn.Sequential(torch.nn.LayerNorm(1)) for _ in range(2))
    if shared == "configuration":
        one.config = other.config = SimpleNamespace()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    other = {"model": one, "module": torch.nn.Sequential(one[0])}.get(shared, other)
    within, together = [], threading.Barrier(2)

    @left_as_found.leaves_as_found
    def inner(model: Any) -> None:
        within.append(model)
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # which two pass at once, or none

    @left_as_found.leaves_as_found
    def outer(model: Any) -> None:
        inner(model)  # never waits for its own thread

    threads = [threading.Thread(target=outer, args=(model,)) for model in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(within) == 2 and together.broken == (shared != "nothing") and not left_as_found._taken


def test_what_waits_for_another_thread_can_be_interrupted():
    model, entered, done = torch.nn.LayerNorm(1), threading.Event(), threading.Event()

    @left_as_found.leaves_as_found
    def holds(_: torch.nn.Module, first: bool) -> None:
        if first:
            entered.set()
            done.wait(20)

    thread = threading.Thread(target=holds, args=(model, True))
    thread.start()
    assert entered.wait(20)
    timer = threading.Timer(0.1, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        holds(model, False)
    done.set()
    thread.join(20)
    holds(model, False)
    assert not left_as_found._taken


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_does_not_wait_for_threads_of_its_parent():
    model, entered, done = torch.nn.LayerNorm(1), threading.Event(), threading.Event()
    verb = left_as_found.leaves_as_found(lambda _, then: then())
    thread = threading.Thread(target=verb, args=(model, lambda: (entered.set(), done.wait(20))))
    thread.start()
    assert entered.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits
        verb(model, lambda: None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join(20)


def test_what_ran_in_inference_mode_serves_where_gradients_are_needed(make, char_tokenizer):
    model, _ = make("fast")
    pair = pair_of(char_tokenizer)
    expected = ac.attribute_heads(model, pair).frame
    again = pair_of(char_tokenizer)
    before = found(model)
    with torch.inference_mode():
        for name in ("patch_heads", "score_heads", "evaluate", "ablate_heads"):
            VERBS[name](model, again, ac.RunOptions())
    assert not changed(before, found(model))
    assert ac.attribute_heads(model, again).frame.equals(expected)
    network = model.original_model
    network(again.clean.tokens[:1]).logits.sum().backward()
    assert next(network.parameters()).grad is not None


@pytest.mark.parametrize(("kind", "loaded"), [("llama", "inside"), ("gpt2", "outside"), ("gpt_neox", "from a folder")])
def test_models_of_inference_mode_have_edits_and_gradients(random_hf_model, char_tokenizer, tmp_path, kind, loaded):
    pair = pair_of(char_tokenizer)
    random_hf_model(kind).save_pretrained(tmp_path)
    with torch.inference_mode():
        source = tmp_path if loaded == "from a folder" else random_hf_model(kind)
        model = source if loaded == "outside" else ac.load(source)
    model = ac.load(model)
    expected = ac.load(random_hf_model(kind))
    for name in ("attribute_heads", "evaluate", "patch_edges"):
        one, other = (VERBS[name](each, pair, ac.RunOptions()).frame["value"] for each in (model, expected))
        np.testing.assert_allclose(one, other, atol=1e-5)
    weights = dict(model.original_model.named_parameters(remove_duplicate=False))
    assert not any(weight.is_inference() for weight in weights.values())
    assert kind != "gpt2" or model.W_E.data_ptr() == model.original_model.lm_head.weight.data_ptr(), "tied as before"


def test_a_model_of_ones_own_of_inference_mode_has_edits_but_no_gradients(pair):
    expected = planted_circuit(TASK)
    with torch.inference_mode():
        model = planted_circuit(TASK)
    edits = [ac.Ablate([(0, 1)], how="zero")]
    one, other = (ac.evaluate(each, pair.clean, edits=edits).frame["value"] for each in (model, expected))
    np.testing.assert_allclose(one, other, atol=1e-5)
    with pytest.raises(ValueError, match=r"the weights of this PlantedModel were made in torch.inference_mode"):
        ac.attribute_heads(model, pair)


@pytest.fixture
def handled():
    """What handlers of two signals did; each calls what stands in `then` first."""
    done: list[str] = []
    then: dict[int, Any] = {}

    def handler(number: int, _: Any) -> None:
        done.append(f"{number} begins")
        then.pop(number, lambda: None)()
        done.append(f"{number} ends")

    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield done, then
    for number, old in before.items():
        signal.signal(number, old)


def test_signals_are_handled_while_a_function_runs_one_at_a_time(handled):
    done, then = handled
    one, two = signal.SIGUSR1, signal.SIGUSR2

    @left_as_found.leaves_as_found
    def interrupted(_: torch.nn.Module) -> None:
        signal.raise_signal(one)
        done.append("runs on")
        signal.raise_signal(one)
        done.append("returns")

    interrupted(torch.nn.LayerNorm(1))
    assert done == [f"{one} begins", f"{one} ends", "runs on", f"{one} begins", f"{one} ends", "returns"]
    done.clear()
    then[one] = lambda: signal.raise_signal(two)
    interrupted(torch.nn.LayerNorm(1))
    assert done[:2] == [f"{one} begins", f"{one} ends"], "not disturbed by the other"
    assert done[-2:] == [f"{two} begins", f"{two} ends"], "whose turn is at the end"


def test_the_generator_is_put_back_after_an_error_alone():
    @left_as_found.leaves_as_found
    def draws(_: torch.nn.Module, error: type[Exception] | None) -> float:
        drawn = float(torch.rand(1))
        if error is not None:
            raise error
        return drawn

    state, model = torch.get_rng_state(), torch.nn.LayerNorm(1)
    with pytest.raises(ZeroDivisionError):
        draws(model, ZeroDivisionError)
    assert torch.equal(torch.get_rng_state(), state)
    assert draws(model, None) != draws(model, None), "a function that draws numbers draws new ones"
    torch.set_rng_state(state)


def test_what_stands_for_a_method_goes():
    @left_as_found.leaves_as_found
    def replaces(model: torch.nn.Module) -> None:
        model.forward = print
        model.training = False

    model = torch.nn.Sequential(torch.nn.LayerNorm(1))
    replaces(model)
    assert "forward" not in vars(model) and model.training is True
    before = vars(model)["forward"] = model.forward
    replaces(model)
    assert vars(model)["forward"] is before


def test_a_function_within_another_puts_nothing_back():
    """The outer one does, once."""
    model, seen = torch.nn.LayerNorm(1), []

    @left_as_found.leaves_as_found
    def inner(model: torch.nn.Module) -> None:
        model.training = False

    @left_as_found.leaves_as_found
    def outer(model: torch.nn.Module) -> None:
        inner(model)
        seen.append(model.training)

    outer(model=model)
    assert seen == [False] and model.training is True
    inner(model)
    assert model.training is True


def test_the_planted_circuit_is_left_as_it_was():
    model = planted_circuit(TASK, seed=0)
    before = found(model)
    ac.score_heads(model, TASK.sample(4, model.tokenizer, seed=0))
    assert not changed(before, found(model))
    assert left_as_found._watched.models == ()


@pytest.fixture
def users_signal():
    """What a handler of the signal of one's own heard, in order."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGUSR1, before)


def test_signals_are_heard_while_open_and_else_afterwards(users_signal):
    signals, handler = left_as_found._Signals(), signal.getsignal(signal.SIGUSR1)
    signals.hold()
    signal.raise_signal(signal.SIGUSR1)
    assert not users_signal, "it waits"
    signals.open = True
    for count in (1, 2):
        signal.raise_signal(signal.SIGUSR1)
        assert len(users_signal) == count, "a handler that does not raise leaves it open"
    signals.open = False
    signals.release()
    assert len(users_signal) == 3 and signal.getsignal(signal.SIGUSR1) is handler


def test_after_a_handler_that_raises_signals_wait(users_signal):
    signals = left_as_found._Signals()
    signals.hold()
    signals.open = True
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not signals.open
    signal.raise_signal(signal.SIGUSR1)
    assert not users_signal
    signals.release()
    assert len(users_signal) == 1


def test_the_handler_of_interrupts_is_put_back_last(users_signal, monkeypatch):  # noqa: ARG001
    signals, put_back, put = left_as_found._Signals(), [], signal.signal
    signals.hold()
    monkeypatch.setattr(signal, "signal", lambda number, handler: put_back.append(number) or put(number, handler))
    signals.release()
    assert len(put_back) >= 2 and put_back[-1] == signal.SIGINT


def test_in_other_threads_no_handler_is_touched(users_signal):  # noqa: ARG001
    handler = signal.getsignal(signal.SIGUSR1)
    signals = left_as_found._Signals()
    in_another_thread(signals.hold)
    assert not signals._handlers and signal.getsignal(signal.SIGUSR1) is handler


def test_what_calls_itself_on_the_same_model_puts_it_back_once(monkeypatch):
    kept: list[Any] = []
    restored: list[bool] = []

    def remembered(model: Any) -> Any:
        kept.append(model)
        return lambda *, generator: restored.append(generator)

    monkeypatch.setattr(model_state, "remembered", remembered)

    @left_as_found.leaves_as_found
    def nested(model: Any, *more: Any) -> int:
        return 1 + nested(*more) if more else 1 // model

    one, other = 1, 2.5
    assert nested(one, one, other, one) == 4 and kept == [one, other] and restored == [False, False]
    with pytest.raises(ZeroDivisionError):
        nested(model=0)
    assert restored[2:] == [True], "after an error the generator is put back too"


def test_what_is_computed_once_lives_as_long_as_the_outermost_call(make):
    (model, _), (other, _), computed = make("fast"), make("fast"), []

    @left_as_found.leaves_as_found
    def inner(model: Any) -> int:
        return left_as_found.once_a_call(model, "key", lambda: computed.append(1) or len(computed))

    @left_as_found.leaves_as_found
    def outer(model: Any, beside: Any) -> list[int]:
        return [inner(model), inner(model), inner(beside), inner(model)]

    assert outer(model, other) == [1, 1, 2, 1]
    assert outer(model, model) == [3] * 4
    assert [inner(model), inner(model)] == [4, 5]
    assert left_as_found.once_a_call(model, "key", lambda: 6) == 6


def test_weights_are_read_once_a_call_and_anew_in_the_next(make, pair, monkeypatch):
    model, _ = make("fast")
    read, hashed = [], parameters._hash
    monkeypatch.setattr(parameters, "_hash", lambda parameters: read.append(1) or hashed(parameters))
    first = ac.localize(model, TASK, 8, n_controls=1).table.provenance.model
    assert len(read) == 1
    next(bridges.wrapped(model).parameters()).data[0, 0] += 1  # leaves no trace but the number itself
    assert ac.ablate_heads(model, pair.clean).provenance.model["weights"] != first["weights"]
    assert len(read) == 2


@pytest.mark.parametrize("allowed", [True, False])
def test_a_caller_says_whether_backward_passes_may_run_in_threads(char_tokenizer, make, allowed):
    model, seen = make("fast")[0], []
    model.add_hook("unembed.hook_in", lambda *_, **__: seen.append(torch._C._is_multithreading_enabled()))
    with torch.autograd.set_multithreading_enabled(allowed):
        ac.evaluate(model, pair_of(char_tokenizer).clean, options=ac.RunOptions(engine="reference"))
    assert set(seen) == {allowed}


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_callers_modes_change_no_number(char_tokenizer, make, mode, engine):
    model, _ = make("fast")
    pair, options = pair_of(char_tokenizer), ac.RunOptions(engine=engine)
    verbs = {name: VERBS[name] for name in ("patch_heads", "attribute_heads", "score_heads", "evaluate")}
    expected = {name: verb(model, pair, options).frame for name, verb in verbs.items()}
    with mode():
        inside = {name: verb(model, pair, options).frame for name, verb in verbs.items()}
        assert torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu")
    for name, frame in expected.items():
        np.testing.assert_allclose(inside[name]["value"], frame["value"], atol=1e-5, err_msg=name)
