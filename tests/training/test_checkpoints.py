"""What a killed run leaves behind: killed at any moment, it ends as if it had not been."""

import multiprocessing
import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from small_training import llama, loss, network, next_token, norms, quiet, same_weights, sample, tokens
from torch.optim.optimizer import register_optimizer_step_post_hook

from align_circuits.training import checkpoints
from align_circuits.training.loop import TrainConfig

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["align_circuits.training.loop", "hypothesis", "pytest", "transformers.models.llama"])

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
        ("save_file", 1),
        ("replace", 2),
        ("save_file", 2),
        ("append", 1),
        ("append", 2),
        declared_torn,
        ("pwritev", 1),
        declared_whole,
        ("pwritev", 2),
        ("pwrite", 3),
        ("pwritev", 9),
        ("sync", 1),
    ]
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
    def until_stop(step, seed):
        if step == stop:
            raise InterruptedError
        return tokens(step, seed)

    rest_lr = 1e-3 if optimizer == "muon" else None
    config = TrainConfig(20, optimizer=optimizer, rest_lr=rest_lr, momentum=0.9, precision="bf16", schedule="linear")
    stop, whole = None, llama()
    quiet(whole, until_stop, next_token, config)
    stop, broken = 8, llama()
    with pytest.raises(InterruptedError):
        quiet(broken, until_stop, next_token, config, out=tmp_path)
    stop = None
    run = quiet(llama(), until_stop, next_token, config, out=tmp_path)
    assert same_weights(run.model, whole)
    assert not same_weights(broken, whole)


def test_what_a_killed_life_left_unfinished_is_removed(tmp_path):
    for name in (".checkpoint-0.safetensors.0a1b2c3d.partial", ".tmpjdYe94"):  # ours, and that of safetensors
        (tmp_path / name).touch()
    checkpoints.Checkpoints(tmp_path, {}).close()
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


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


# --- folders of other runs


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": TrainConfig(6, lr=0.5)}, r"another run \(lr was 0.001, now 0.5\)"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"recipe": {"data": "b"}}, r"another run \(recipe.data was 'a', now 'b'\)"),
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
