"""The training loop: what it computes, and that a run killed at any moment ends as if it had not been."""

import math
import multiprocessing
import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits import checkpoints
from align_circuits.training import TrainConfig, learning_rate, train

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["align_circuits.training", "hypothesis", "pytest", "transformers.models.llama"])

quiet = partial(train, progress=False)


@pytest.fixture(autouse=True)
def one_thread():
    """Such small models only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def linear():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(8, 8)


def network(seed=0, width=16, momentum=0.1):
    """Dropout draws random numbers in the forward pass; the batch norm's running mean is a buffer that changes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [
            nn.Linear(8, width),
            nn.BatchNorm1d(width, momentum=momentum),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, 8),
        ]
    return nn.Sequential(*layers)


def sample(_step, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": [x.flip(1)]}


def loss(model, batch):
    return (model(batch["x"]) - batch["y"][0]).square().mean()


def norms(model, _step):
    assert not model.training and not torch.is_grad_enabled()
    return {"norm": model[0].weight.norm().item(), "mean": model[1].running_mean.sum().item()}


def same_weights(one, other):
    return all(torch.equal(one.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


# --- what it computes


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_it_computes_what_a_plain_loop_computes(optimizer):
    config = TrainConfig(
        steps=12,
        lr=0.05,
        optimizer=optimizer,
        momentum=0.9,
        weight_decay=0.1,
        clip=0.5,
        schedule="cosine",
        warmup=3,
        final=0.1,
    )
    batches = []

    def recorded(step, seed):
        batches.append(sample(step, seed))
        return batches[-1]

    model, plain = linear(), linear()
    run = quiet(model, recorded, loss, replace(config, log_every=1), seed=3)

    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    plain_optimizer = torch.optim.AdamW(groups) if optimizer == "adamw" else torch.optim.SGD(groups, momentum=0.9)
    losses, lengths = [], []
    for number, batch in enumerate(batches, start=1):
        for group in plain_optimizer.param_groups:
            group["lr"] = learning_rate(config, number)
        plain_optimizer.zero_grad()
        value = loss(plain, batch)
        value.backward()
        lengths.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        plain_optimizer.step()
        losses.append(value.item())
    assert len(batches) == 12
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    np.testing.assert_allclose(run.log["loss"][1:], losses, rtol=1e-5)
    np.testing.assert_allclose(run.log["grad_norm"][1:], lengths, rtol=1e-5)
    assert max(lengths) > 0.5, "clipping never acted"


def test_without_a_limit_nothing_is_clipped():
    models = [linear(), linear()]
    for model, clip in zip(models, (None, 1e9), strict=True):
        quiet(model, sample, loss, TrainConfig(steps=2, optimizer="sgd", clip=clip))
    assert same_weights(*models)


def test_it_learns_in_bf16_and_keeps_fp32_weights():
    model = linear()
    run = quiet(model, sample, loss, TrainConfig(steps=200, lr=0.02, precision="bf16", log_every=50))
    assert run.log["loss"].iloc[-1] < 0.3 * run.log["loss"].iloc[1]
    assert model.weight.dtype == torch.float32


def test_compiled_it_computes_the_same(monkeypatch):
    models, compiled, original = [network(), network()], [], torch.compile

    def eager(model):  # without a C++ compiler
        compiled.append(model)
        return original(model, backend="eager")

    monkeypatch.setattr(torch, "compile", eager)
    for model, compile in zip(models, (False, True), strict=True):
        quiet(model, sample, loss, TrainConfig(steps=3, compile=compile))
    assert compiled == models[1:]
    assert same_weights(*models)


def test_the_log_has_the_mean_loss_between_rows():
    every = quiet(network(), sample, loss, TrainConfig(steps=10, log_every=1)).log
    some = quiet(network(), sample, loss, TrainConfig(steps=10, log_every=4), metrics=norms).log
    assert list(some.columns) == ["step", "loss", "lr", "grad_norm", "norm", "mean"]
    assert list(some["step"]) == [0, 4, 8, 10]
    assert np.isnan(some["loss"].to_numpy()[0])
    means = [every["loss"][first:last].mean() for first, last in ((1, 5), (5, 9), (9, 11))]
    np.testing.assert_allclose(some["loss"][1:], means, rtol=1e-6)


def test_a_batch_is_a_function_of_seed_and_step():
    drawn = []

    def recorded(step, seed):
        drawn.append((step, seed))
        return sample(step, seed)

    for seed in (0, 1, 0):
        quiet(network(), recorded, loss, TrainConfig(steps=5), seed=seed)
    assert drawn[:5] == drawn[10:]
    assert len({seed for _, seed in drawn}) == 10


def test_training_mode_and_frozen_parameters_stay():
    model = network().eval()
    first = model[0].requires_grad_(False)
    before = first.state_dict()["weight"].clone()
    quiet(model, sample, loss, TrainConfig(steps=3))
    assert not model.training
    assert torch.equal(before, first.state_dict()["weight"])


@given(
    steps=st.integers(1, 40), warmup=st.integers(0, 40), decay=st.none() | st.integers(0, 40), final=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_every_schedule_rises_stays_and_falls(steps, warmup, decay, final, schedule):
    try:
        config = TrainConfig(steps, lr=2.0, schedule=schedule, warmup=warmup, decay=decay, final=final)
    except ValueError:
        assert warmup + (decay or 0) > steps
        return
    rates = np.array([learning_rate(config, step) for step in range(1, steps + 1)])
    assert (rates > 0).all() and (rates <= 2.0).all()
    assert (np.diff(rates[:warmup]) > 0).all()
    assert (np.diff(rates[warmup:]) <= 1e-12).all()
    assert rates[max(warmup, 1) - 1] == 2.0 or schedule != "constant"
    if schedule != "constant" and config.decay_steps:
        assert learning_rate(config, steps + 1) == pytest.approx(2.0 * final)


# --- killed, and started again

STEPS = 500


def life(folder, steps, config, moment=None):
    """One life of a run, in its own process: notes each step that is begun (b) and each update that is made (u)."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background was told to ignore it
    notes = os.open(Path(folder) / "notes", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    at = [0]

    def noting(line):
        os.write(notes, line.encode())

    def noted(step, seed):
        at[0] = step
        noting(f"b {step}\n")
        return sample(step, seed)

    register_optimizer_step_post_hook(lambda *_: noting(f"u {at[0]}\n"))
    if moment is not None:
        die_at(*moment)
    quiet(network(), noted, loss, replace(config, steps=steps), out=Path(folder) / "run", metrics=norms)


def die_at(name, call):
    """Kills this process at the given call of a function that writes, after half of its data."""
    owner = {
        "pwrite": os,
        "pwritev": os,
        "save_file": checkpoints,
        "replace": os,
        "append": checkpoints.Log,
        "sync": checkpoints.Checkpoints,
    }[name]
    original, calls = getattr(owner, name), [0]

    def dying(*args, **keywords):
        calls[0] += 1
        if calls[0] < call:
            return original(*args, **keywords)
        if name in ("pwrite", "pwritev"):
            original(args[0], args[1][: len(args[1]) // 2], args[2])
        elif name == "save_file":
            Path(args[1]).write_bytes(b"half")
        elif name == "append":
            with args[0]._path.open("a") as file:
                file.write(f"{args[1]},0.1")
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, dying)


def live(folder, config, moment=None, seconds=None, number=signal.SIGKILL, steps=STEPS):
    """Runs one life, ended by a signal after some seconds of training where given; returns its exit code."""
    process = FORK.Process(target=life, args=(str(folder), steps, config, moment))
    notes = Path(folder) / "notes"
    before = notes.stat().st_size if notes.exists() else 0
    process.start()
    assert process.pid is not None
    if seconds is not None:
        while process.is_alive() and (not notes.exists() or notes.stat().st_size == before):
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(process.pid, number)
    process.join(60)
    process.kill()
    return process.exitcode


def noted(folder, kind):
    return [int(line[2:]) for line in (folder / "notes").read_text().splitlines() if line.startswith(kind)]


def began(folder):
    """The steps in the order in which they were begun, and where in it each life after the first starts."""
    steps = noted(folder, "b")
    return steps, [later for later in range(1, len(steps)) if steps[later] != steps[later - 1] + 1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert live(folder, TrainConfig(STEPS, log_every=50)) == 0
    return folder


def states(folder):
    return [checkpoints.load_file(path) for path in (folder / "run").glob("checkpoint-*.safetensors")]


def assert_ended_alike(folder, other):
    assert (folder / "run" / "log.csv").read_bytes() == (other / "run" / "log.csv").read_bytes()
    one, two = (max(states(run), key=lambda state: int(state["step"])) for run in (folder, other))
    assert one.keys() == two.keys() and "optimizer.0.weight.exp_avg" in one and "model.1.running_mean" in one
    for name in one:
        assert torch.equal(one[name], two[name]), name
    leftovers = {path.name for path in (folder / "run").iterdir()}
    assert leftovers == {"log.csv", ".lock", "checkpoint-0.safetensors", "checkpoint-1.safetensors"}


def test_killed_at_random_moments_no_finished_step_is_done_again(tmp_path, uninterrupted, capsys):
    generator = np.random.default_rng()
    config = TrainConfig(STEPS, log_every=50)
    for _ in range(10):
        code = live(tmp_path, config, seconds=generator.uniform(0, 0.03))
        assert code == -signal.SIGKILL, "it finished before the tenth kill: give it more steps"
        kept = [int(state["step"]) for state in states(tmp_path)]
        assert noted(tmp_path, "b")[-1] - max(kept, default=0) <= 1, "more than the step under way is lost"
    assert live(tmp_path, config) == 0
    steps, restarts = began(tmp_path)
    assert all(steps[at] == steps[at - 1] for at in restarts), "a life began before the step under way"
    begun_twice, updated_twice = (len(noted(tmp_path, kind)) - STEPS for kind in "bu")
    assert begun_twice == len(restarts) <= 10
    assert updated_twice <= begun_twice
    assert_ended_alike(tmp_path, uninterrupted)
    with capsys.disabled():
        sys.stdout.write(
            f"\n10 kills: {begun_twice} steps begun twice, {updated_twice} of them updated twice, 0 kept twice\n"
        )


def test_killed_while_writing_the_checkpoint_before_stands(tmp_path, uninterrupted):
    """While either file is made, while a row is added, and at the first, a middle and the last write over a file."""
    config = TrainConfig(STEPS, log_every=50)
    declared_torn, declared_whole = ("pwrite", 1), ("pwrite", 2)
    moments = [
        ("save_file", 1), ("replace", 2), ("save_file", 2), ("append", 1), ("append", 2),
        declared_torn, ("pwritev", 1), declared_whole, ("pwritev", 2), ("pwrite", 3), ("pwritev", 9), ("sync", 1),
    ]  # fmt: skip
    for moment in moments:
        assert live(tmp_path, config, moment) == -signal.SIGKILL, moment
    assert live(tmp_path, config) == 0
    steps, restarts = began(tmp_path)
    assert all(steps[at] == steps[at - 1] for at in restarts)
    assert len(noted(tmp_path, "u")) - STEPS <= len(moments)
    assert_ended_alike(tmp_path, uninterrupted)


def test_a_checkpoint_of_any_size_is_written_whole(tmp_path, monkeypatch):
    """More tensors than one call takes, of all widths, scalars and empty ones, by calls that write only a part."""

    def in_parts(file, pieces, offset):
        assert len(pieces) <= 1024
        return os.pwrite(file, b"".join(pieces)[:777], offset)

    monkeypatch.setattr(os, "pwritev", in_parts)
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.int64]

    def tensors(step):
        shapes = {f"{i}": [(2, 3), (), (0, 4), (5,)][i % 4] for i in range(1500)}
        return {
            name: torch.full(shape, step + int(name) % 7).to(dtypes[int(name) % 5]) for name, shape in shapes.items()
        }

    with closing(checkpoints.Checkpoints(tmp_path, {})) as kept:
        for step in (1, 2, 3, 4):
            kept.save(step, tensors(step))
    with closing(checkpoints.Checkpoints(tmp_path, {})) as kept:
        assert kept.step == 4
        there = kept.load()
    assert int(there.pop("step")) == 4
    assert there.keys() == tensors(4).keys()
    assert all(
        torch.equal(there[name], tensor) and there[name].dtype == tensor.dtype for name, tensor in tensors(4).items()
    )


def test_with_rare_checkpoints_no_more_than_those_between_are_done_again(tmp_path, uninterrupted):
    config = TrainConfig(STEPS, log_every=50, checkpoint_every=7)
    for seconds in (0.02, 0.03, 0.04):
        assert live(tmp_path, config, seconds=seconds) == -signal.SIGKILL
    assert live(tmp_path, config) == 0
    steps, restarts = began(tmp_path)
    assert all(steps[at - 1] - steps[at] <= 6 for at in restarts)
    assert_ended_alike(tmp_path, uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_asked_to_stop_nothing_is_done_again(tmp_path, uninterrupted, number, code):
    config = TrainConfig(STEPS, log_every=50, checkpoint_every=1000)
    assert live(tmp_path, config, seconds=0.05, number=number) == code
    assert live(tmp_path, config) == 0
    assert noted(tmp_path, "b") == noted(tmp_path, "u") == list(range(1, STEPS + 1))
    assert_ended_alike(tmp_path, uninterrupted)


# --- going on within one process


def failing(at):
    def sample_until(step, seed):
        if step == at:
            raise InterruptedError
        return sample(step, seed)

    return sample_until


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_llama_with_tied_embeddings_goes_on_to_the_bit(tmp_path, optimizer):
    def llama():
        shape = LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            attention_dropout=0.1, tie_word_embeddings=True,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return LlamaForCausalLM(shape)

    def tokens(step, seed):
        if step == stop:
            raise InterruptedError
        return torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(seed))

    def next_token(model, ids):
        return nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    rest_lr = 1e-3 if optimizer == "muon" else None
    config = TrainConfig(20, optimizer=optimizer, rest_lr=rest_lr, momentum=0.9, precision="bf16", schedule="linear")
    stop, whole = None, llama()
    quiet(whole, tokens, next_token, config)
    stop, broken = 8, llama()
    with pytest.raises(InterruptedError):
        quiet(broken, tokens, next_token, config, out=tmp_path)
    stop = None
    run = quiet(llama(), tokens, next_token, config, out=tmp_path)
    assert same_weights(run.model, whole)
    assert not same_weights(broken, whole)


def test_a_finished_run_returns_at_once(tmp_path):
    first = quiet(network(), sample, loss, TrainConfig(10), out=tmp_path, metrics=norms)
    again = quiet(network(), failing(at=1), loss, TrainConfig(10), out=tmp_path, metrics=norms)
    assert again.folder == tmp_path
    assert same_weights(first.model, again.model)
    pd.testing.assert_frame_equal(first.log, again.log)


def test_a_row_that_was_due_is_written_by_the_run_that_goes_on(tmp_path):
    def failing_metrics(model, step):
        if step == 4:
            raise InterruptedError
        return norms(model, step)

    config = TrainConfig(8, log_every=4)
    with pytest.raises(InterruptedError):
        quiet(network(), sample, loss, config, out=tmp_path / "broken", metrics=failing_metrics)
    begun = []

    def recorded(step, seed):
        begun.append(step)
        return sample(step, seed)

    quiet(network(), recorded, loss, config, out=tmp_path / "broken", metrics=norms)
    quiet(network(), sample, loss, config, out=tmp_path / "whole", metrics=norms)
    assert begun == [5, 6, 7, 8]
    assert (tmp_path / "broken" / "log.csv").read_bytes() == (tmp_path / "whole" / "log.csv").read_bytes()


# --- refusals


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_by_name(tmp_path, value):
    def broken(model, batch):
        return loss(model, batch) * (value if batch["step"] == 6 else 1.0)

    model = network(momentum=0.0)
    with pytest.raises(FloatingPointError, match=r"step 6: the loss is (nan|inf).*as step 5 left it"):
        quiet(model, lambda step, seed: sample(step, seed) | {"step": step}, broken, TrainConfig(10), out=tmp_path)
    five = network(momentum=0.0)
    quiet(five, sample, loss, TrainConfig(5))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), five.parameters(), strict=True))
    assert not any(path.name.endswith(".partial") for path in tmp_path.iterdir())
    finite = quiet(network(momentum=0.0), sample, loss, TrainConfig(10), out=tmp_path)
    assert finite.log["step"].iloc[-1] == 10


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": TrainConfig(6, lr=0.5)}, r"another run \(lr was 0.001, now 0.5\)"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"recipe": {"data": "b"}}, "recipe was {'data': 'a'}, now {'data': 'b'}"),
        ({"model": network(width=8)}, "model was '.* parameters"),
    ],
)
def test_another_run_in_the_folder_is_refused(tmp_path, changed, message):
    given_first = {"model": network(), "config": TrainConfig(6), "seed": 0, "recipe": {"data": "a"}}
    quiet(sample=sample, loss=loss, out=tmp_path, **given_first)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=message):
        quiet(sample=sample, loss=loss, out=tmp_path, **given_first | changed)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_another_frozen_part_is_refused(tmp_path):
    for seed in (0, 1):
        model = network(seed)
        model[0].requires_grad_(False)
        if seed == 0:
            quiet(model, sample, loss, TrainConfig(3), out=tmp_path)
        else:
            with pytest.raises(ValueError, match="holds another run"):
                quiet(model, sample, loss, TrainConfig(3), out=tmp_path)


def test_a_folder_in_use_is_refused_and_given_back(tmp_path):
    def nested(_model, _step):
        with pytest.raises(ValueError, match="another process is training"):
            quiet(network(), sample, loss, TrainConfig(2), out=tmp_path)
        return {"fine": 1}

    quiet(network(), sample, loss, TrainConfig(2), out=tmp_path, metrics=nested)
    quiet(network(), sample, loss, TrainConfig(2), out=tmp_path, metrics=nested)


def test_other_files_are_no_checkpoints(tmp_path):
    (tmp_path / "checkpoint-0.safetensors").write_text("something else")
    with pytest.raises(ValueError, match="no checkpoint of a training"):
        quiet(network(), sample, loss, TrainConfig(2), out=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write results"):
        quiet(network(), sample, loss, TrainConfig(2), out=tmp_path / "file")


def test_metrics_keep_their_columns():
    with pytest.raises(ValueError, match="keep to the first"):
        quiet(network(), sample, loss, TrainConfig(2, log_every=1), metrics=lambda _, step: {f"at_{step}": 1.0})


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        quiet(network().requires_grad_(False), sample, loss, TrainConfig(2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps=0: give at least 1"),
        ({"steps": 5, "log_every": 0}, "log_every=0"),
        ({"steps": 5, "checkpoint_every": 0}, "checkpoint_every=0"),
        ({"steps": 5, "warmup": 6}, "do not fit into steps=5"),
        ({"steps": 5, "warmup": 3, "decay": 3}, "warmup=3 and decay=3 do not fit"),
        ({"steps": 5, "final": 1.5}, "final=1.5: give a fraction"),
        ({"steps": 5, "optimizer": "muon"}, "rest_lr=None, optimizer='muon': Muon needs rest_lr"),
        ({"steps": 5, "rest_lr": 0.1}, "no other has it"),
        ({"steps": 5, "lr": 0.0}, "must be above 0"),
        ({"steps": 5, "clip": 0.0}, "clip=None does not clip"),
    ],
)
def test_bad_configs_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**wrong)
