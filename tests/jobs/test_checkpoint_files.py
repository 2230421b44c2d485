"""What a killed run leaves behind: started again, it ends as if it had not been killed."""

import errno
import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from forked import FORK
from refusals import refused
from safetensors.torch import load_file, save_file
from small_training import llama, loss, network, next_token, norms, quiet, same_weights, sample, tokens

from align_circuits.jobs import checkpoint_files
from align_circuits.training.loop import TrainConfig

STEPS = 300
EVERY = 3
CONFIG = TrainConfig(STEPS, log_every=50, checkpoint_every=EVERY)


def train_in_a_process(folder, steps, config, moment=None):
    """Trains in its own process and records each step that is begun."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background was told to ignore it
    record = os.open(folder / "steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def recorded(step, seed):
        os.write(record, f"{step}\n".encode())
        return sample(step, seed)

    if moment is not None:
        die_at(*moment)
    quiet(network(), recorded, loss, replace(config, steps=steps), out=folder / "run", metrics=norms)


def die_at(name, call):
    """Kills this process at the given call of a function that writes, after half of its data."""
    owner = checkpoint_files if name == "save_file" else os
    original, calls = getattr(owner, name), [0]

    def dying(*args, **keywords):
        calls[0] += 1
        if calls[0] < call:
            return original(*args, **keywords)
        if name == "save_file":
            Path(args[1]).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, dying)


def run_once(folder, config=CONFIG, moment=None, seconds=None, number=signal.SIGKILL, steps=STEPS):
    """Starts the run, ends it by a signal after some seconds of training where given; returns its exit code."""
    process = FORK.Process(target=train_in_a_process, args=(folder, steps, config, moment))
    before = len(begun_steps(folder))
    process.start()
    assert process.pid is not None
    if seconds is not None:
        while process.is_alive() and len(begun_steps(folder)) == before:
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(process.pid, number)
    process.join(60)
    process.kill()
    return process.exitcode


def begun_steps(folder):
    """The steps in the order in which they were begun, over all starts of the run."""
    record = folder / "steps"
    return [int(line) for line in record.read_text().splitlines()] if record.exists() else []


def assert_little_was_repeated(folder, most):
    """Every start goes on from a checkpoint at most so many steps before the last one that was begun."""
    steps = begun_steps(folder)
    jumps = [(before, after) for before, after in itertools.pairwise(steps) if after != before + 1]
    assert all(0 <= before - after < most for before, after in jumps), jumps


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run_once(folder) == 0
    return folder


def assert_ended_alike(folder, other):
    assert (folder / "run" / "log.csv").read_bytes() == (other / "run" / "log.csv").read_bytes()
    one, two = (load_file(run / "run" / "checkpoint.safetensors") for run in (folder, other))
    assert one.keys() == two.keys()
    assert {"model.0.weight", "optimizer.0.weight.exp_avg", "model.1.running_mean"} <= one.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    assert {path.name for path in (folder / "run").iterdir()} == {"log.csv", ".lock", "checkpoint.safetensors"}


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on_from_the_last_checkpoint(tmp_path, uninterrupted):
    generator = np.random.default_rng()
    for _ in range(3):
        code = run_once(tmp_path, seconds=generator.uniform(0, 0.03))
        assert code == -signal.SIGKILL, "it finished before the third kill: give it more steps"
    assert run_once(tmp_path) == 0
    assert_little_was_repeated(tmp_path, EVERY + 1)  # one more where the kill came while writing
    assert_ended_alike(tmp_path, uninterrupted)


def test_killed_while_writing_the_earlier_checkpoint_stands(tmp_path, uninterrupted):
    """While a checkpoint is written and before it gets its name, likewise the log; at the first, at a later one."""
    moments = [(name, call) for call in (1, 20) for name in ("save_file", "fsync", "replace")]
    for moment in moments:
        assert run_once(tmp_path, moment=moment) == -signal.SIGKILL, moment
    assert run_once(tmp_path) == 0
    assert_little_was_repeated(tmp_path, EVERY + 1)
    assert_ended_alike(tmp_path, uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_told_to_stop_it_goes_on_from_the_last_row(tmp_path, uninterrupted, number, code):
    """Without checkpoints of its own beside the log's rows, which change nothing."""
    config = replace(CONFIG, checkpoint_every=None)
    assert run_once(tmp_path, config, seconds=0.05, number=number) == code
    assert run_once(tmp_path, config) == 0
    assert_little_was_repeated(tmp_path, config.log_every + 1)
    assert_ended_alike(tmp_path, uninterrupted)


def recorded(begun):
    """A sampler that notes which steps begin."""
    return lambda step, seed: begun.append(step) or sample(step, seed)


def test_on_a_full_disk_the_earlier_checkpoint_stands(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        if len(begun) == 12:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path, metadata)

    begun, original, config = [], checkpoint_files.save_file, TrainConfig(20, log_every=4)
    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        quiet(network(), recorded(begun), loss, config, out=tmp_path / "full" / "run", metrics=norms)
    quiet(network(), recorded(begun), loss, config, out=tmp_path / "full" / "run", metrics=norms)
    assert begun == [*range(1, 13), *range(9, 21)]
    quiet(network(), sample, loss, config, out=tmp_path / "whole" / "run", metrics=norms)
    assert_ended_alike(tmp_path / "full", tmp_path / "whole")


# --- going on within one process


def failing(at, of=sample):
    """A sampler that fails at a step."""

    def sample_until(step, seed):
        if step == at:
            raise InterruptedError
        return of(step, seed)

    return sample_until


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "muon-fp32"])
def test_a_llama_with_tied_embeddings_goes_on_to_the_bit(tmp_path, optimizer):
    rest_lr = 1e-3 if optimizer.startswith("muon") else None
    config = TrainConfig(
        20, optimizer=optimizer, rest_lr=rest_lr, momentum=0.9, precision="bf16", schedule="linear", checkpoint_every=5
    )
    whole, broken = llama(), llama()
    quiet(whole, tokens, next_token, config)
    with pytest.raises(InterruptedError):
        quiet(broken, failing(8, tokens), next_token, config, out=tmp_path)
    assert same_weights(quiet(llama(), tokens, next_token, config, out=tmp_path).model, whole)
    assert not same_weights(broken, whole)


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path):
    for name in (".checkpoint.safetensors.0a1b2c3d.partial", ".tmpjdYe94"):  # ours, and that of safetensors
        (tmp_path / name).touch()
    with checkpoint_files.run_folder(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_a_finished_run_returns_at_once(tmp_path):
    first = quiet(network(), sample, loss, TrainConfig(10), out=tmp_path, metrics=norms)
    again = quiet(network(), failing(at=1), loss, TrainConfig(10), out=tmp_path, metrics=norms)
    assert again.folder == tmp_path
    assert same_weights(first.model, again.model)
    pd.testing.assert_frame_equal(first.log, again.log)


def test_metrics_that_failed_are_taken_again(tmp_path):
    def failing_metrics(model, step):
        if step == 4:
            raise InterruptedError
        return norms(model, step)

    config = TrainConfig(8, log_every=4, checkpoint_every=3)
    with pytest.raises(InterruptedError):
        quiet(network(), sample, loss, config, out=tmp_path / "broken", metrics=failing_metrics)
    begun = []
    quiet(network(), recorded(begun), loss, config, out=tmp_path / "broken", metrics=norms)
    quiet(network(), sample, loss, config, out=tmp_path / "whole", metrics=norms)
    assert begun == [4, 5, 6, 7, 8]
    assert (tmp_path / "broken" / "log.csv").read_bytes() == (tmp_path / "whole" / "log.csv").read_bytes()


# --- folders of other runs


def scaled(model):
    """A model with a setting beside its weights."""
    model[0].scale = 2.0
    return model


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": TrainConfig(6, lr=0.5)}, r"another run \(lr was 0.001, now 0.5\)"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"recipe": {"data": "b"}}, r"another run \(recipe.data was 'a', now 'b'\)"),
        ({"model": network(width=8)}, "model was '.* parameters"),
        ({"model": scaled(network())}, "model was '.* parameters"),
    ],
)
def test_another_run_in_the_folder_is_refused(tmp_path, changed, message):
    given_first = {"model": network(), "config": TrainConfig(6), "seed": 0, "recipe": {"data": "a"}}
    quiet(sample=sample, loss=loss, out=tmp_path, **given_first)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused(message, quiet, sample=sample, loss=loss, out=tmp_path, **given_first | changed)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_another_frozen_part_is_refused(tmp_path):
    for seed in (0, 1):
        model = network(seed)
        model[0].requires_grad_(False)
        if seed == 0:
            quiet(model, sample, loss, TrainConfig(3), out=tmp_path)
        else:
            refused("holds another run", quiet, model, sample, loss, TrainConfig(3), out=tmp_path)


def test_a_model_of_other_code_is_refused_and_told_so(tmp_path):
    def of_code(factor):
        class Scaled(torch.nn.Sequential):
            def forward(self, input):
                return factor * super().forward(input)

        return Scaled(*network())

    quiet(of_code(1), sample, loss, TrainConfig(3), out=tmp_path)
    refused(r"run \(code of the model .* has changed\)", quiet, of_code(2), sample, loss, TrainConfig(3), out=tmp_path)


def test_a_folder_that_is_soon_free_is_waited_for(tmp_path):
    def opened():
        with checkpoint_files.run_folder(tmp_path) as folder:
            return folder

    with ThreadPoolExecutor() as pool:
        with checkpoint_files.run_folder(tmp_path):
            waiting = pool.submit(opened)
            time.sleep(0.2)
            assert not waiting.done()
        assert waiting.result(timeout=4) == tmp_path


def test_a_folder_in_use_is_refused_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PATIENCE_S", 0.1)

    def nested(_model, _step):
        refused("another process is training", quiet, network(), sample, loss, TrainConfig(2), out=tmp_path)
        return {"fine": 1}

    quiet(network(), sample, loss, TrainConfig(2), out=tmp_path, metrics=nested)
    quiet(network(), sample, loss, TrainConfig(2), out=tmp_path, metrics=nested)


@pytest.mark.parametrize("content", ["another file", "half"])
def test_a_broken_checkpoint_is_refused(tmp_path, content):
    quiet(network(), sample, loss, TrainConfig(2), out=tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "half" else content.encode())
    with pytest.raises(ValueError, match=r"checkpoint.safetensors' is broken or no checkpoint .*: delete it"):
        quiet(network(), sample, loss, TrainConfig(2), out=tmp_path)
    for header in (None, {"settings": "{", "progress": "{}"}, {"settings": "[]", "progress": "[]"}):
        save_file({"a": torch.zeros(2)}, path, header)
        refused("no checkpoint", quiet, network(), sample, loss, TrainConfig(2), out=tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refused("cannot write results", quiet, network(), sample, loss, TrainConfig(2), out=tmp_path / "file")
