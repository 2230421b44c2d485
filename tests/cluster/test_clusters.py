"""Jobs on a Dask cluster and through submitit; `make cluster` has the long versions."""

import sys
import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import submitit
from cluster.kills import sweep

from align_circuits.jobs.executors import SubmittedExecutor, connected
from align_circuits.jobs.jobs import Job, run_jobs


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_sweep_on_dask_survives_the_deaths_of_workers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    sweep(kills=3, number=12, seconds=0.1, seed=1, folder=tmp_path)


@pytest.fixture
def powers(tmp_path, monkeypatch):
    (tmp_path / "powers.py").write_text(
        "def square(*, x, seed):\n    if x == 3:\n        raise RuntimeError('no')\n    return [{'y': x**2}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return [Job("powers:square", {"x": x}) for x in (2, 3)]


def test_jobs_through_submitit_come_back(powers, tmp_path):
    submitter = submitit.LocalExecutor(tmp_path / "submitted")
    with SubmittedExecutor(submitter, seconds=0.05) as executor:
        results = run_jobs(powers, tmp_path / "results", executor=executor, progress=False)
    assert results.frame["y"].tolist() == [4]
    assert [failure.job.config["x"] for failure in results.failures] == [3]
    assert "RuntimeError: no" in results.failures[0].error


class Submitted:
    """A submitit executor whose jobs never end by themselves."""

    def __init__(self):
        self.arrays, self.cancelled, self.lock = [], 0, threading.Lock()

    def batch(self):
        self.arrays.append(0)
        return self.lock

    def submit(self, _):
        self.arrays[-1] += 1
        return self

    def done(self):
        return False

    def cancel(self, check):
        assert not check
        self.cancelled += 1


def test_calls_are_submitted_as_one_array_and_cancelled_with_their_futures():
    submitter = Submitted()
    executor = SubmittedExecutor(submitter, seconds=0.05)
    futures = [executor.submit(abs, x) for x in range(5)]
    while sum(submitter.arrays) < 5:
        pass
    assert all(future.cancel() for future in futures[:2])
    executor.shutdown(cancel_futures=True)
    assert max(submitter.arrays) >= 4  # the thread may wake between two calls
    assert submitter.cancelled == 5 and all(future.cancelled() for future in futures)


@pytest.mark.parametrize(
    ("on", "settings", "message"),
    [
        ("ray", {}, "give 'dask://HOST:PORT' or 'slurm'"),
        ("slurm", {"array": 0}, "array=0: give at least"),
        ("dask://127.0.0.1:1", {}, "no Dask scheduler answers at '127.0.0.1:1'"),
    ],
)
def test_what_is_no_cluster_is_refused(on, settings, message, tmp_path, monkeypatch):
    monkeypatch.setattr("align_circuits.jobs.executors.SECONDS_TO_ANSWER", 0.5)
    with pytest.raises(ValueError, match=message), connected(on, tmp_path, **settings):
        pass


def test_a_scheduler_without_workers_is_told(tmp_path, monkeypatch):
    @contextmanager
    def client(_: str):
        yield SimpleNamespace(scheduler_info=lambda: {"workers": workers}, get_executor=lambda **_: "executor")

    monkeypatch.setattr("align_circuits.jobs.executors._dask_client", client)
    workers: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="at here:1 has no workers yet"), connected("dask://here:1", tmp_path):
        pass
    workers["tcp://here:2"] = {}
    with warnings.catch_warnings(action="error"), connected("dask://here:1", tmp_path) as executor:
        assert executor == "executor"


@pytest.mark.parametrize(
    ("on", "module", "message"),
    [
        ("dask://127.0.0.1:1", "distributed", r"Dask needs distributed: pip install 'align-circuits\[dask\]'"),
        ("slurm", "submitit", r"Slurm needs submitit: pip install 'align-circuits\[slurm\]'"),
    ],
)
def test_what_is_not_installed_is_named(on, module, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message), connected(on, tmp_path):
        pass
