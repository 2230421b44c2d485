"""Jobs: each runs once, whatever happens to it or to the others."""

import json
import os
import re
import signal
import sys
import textwrap
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from forked import FORK
from refusals import refused

from align_circuits.jobs import locks
from align_circuits.jobs.code_versions import code_version
from align_circuits.jobs.executors import ProcessExecutor
from align_circuits.jobs.jobs import Job, collect_rows, read_progress, run_jobs
from align_circuits.jobs.locks import claimed

NUMBER = count()


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A package of its own, under a new name in each test; its `square` notes each call and can be made to fail."""
    package = tmp_path / f"package_{next(NUMBER)}_{os.getpid()}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "power.py").write_text("def power(x):\n    return x**2\n")
    (package / "unused.py").write_text("x = 1\n")
    (package / "functions.py").write_text(
        textwrap.dedent(f"""
            import os, time
            from pathlib import Path
            from . import power

            def square(*, x, seed, trouble=None):
                "Text."
                for name, text in {{"calls": x, "pids": os.getpid()}}.items():
                    with (Path({str(tmp_path)!r}) / name).open("a") as file:
                        file.write(f"{{text}}\\n")
                if trouble == "raise":
                    raise RuntimeError("x is not to be squared")
                if trouble == "die":
                    os.kill(os.getpid(), 9)
                if trouble == "wait":
                    time.sleep(60)
                if trouble == "array":
                    return [{{"y": object()}}]
                return [{{"y": power.power(x), "part": part}} for part in ("a", "b")]
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    return package


def jobs_of(code, *xs, **config):
    return [Job(f"{code.name}.functions:square", {"x": x, **config}) for x in xs]


def run(jobs, folder, processes=1):
    return run_jobs(jobs, folder, processes=processes, progress=False)


def calls(tmp_path):
    return (tmp_path / "calls").read_text().split()


def test_results_come_in_the_order_of_the_cells_and_once(code, tmp_path):
    jobs = jobs_of(code, 3, 1, 2)
    results = run([*jobs, jobs[0]], tmp_path / "results")
    assert list(results.frame.columns) == ["x", "seed", "y", "part"]
    assert list(results.frame["y"]) == [9, 9, 1, 1, 4, 4]
    assert results.failures == ()
    assert results.all_rows() is results.frame
    again = run(jobs, tmp_path / "results")
    pd.testing.assert_frame_equal(again.frame, results.frame)
    assert calls(tmp_path) == ["3", "1", "2"]


def test_another_config_or_seed_is_another_cell(code, tmp_path):
    job, *_ = jobs_of(code, 2)
    run([job], tmp_path / "results")
    others = [
        Job(job.function, {"x": 3}),
        Job(job.function, {"x": 2, "trouble": None}),
        Job(job.function, {"x": 2}, seed=1),
    ]
    run(others, tmp_path / "results")
    assert calls(tmp_path) == ["2", "3", "2", "2"]
    assert run([Job(job.function, {"trouble": None, "x": 2})], tmp_path / "results").frame["y"].tolist() == [4, 4]
    assert len(calls(tmp_path)) == 4


def test_floats_survive_to_the_bit(tmp_path, code):
    (code / "noise.py").write_text(
        "import numpy as np, pandas as pd\n\n\ndef noise(*, seed):\n"
        "    return pd.DataFrame({'x': np.random.default_rng(seed).normal(size=100), 'n': range(100)})\n"
    )
    for _ in range(2):
        frame = run([Job(f"{code.name}.noise:noise", {}, seed=5)], tmp_path / "results").frame
        assert frame["x"].tolist() == np.random.default_rng(5).normal(size=100).tolist()
        assert frame["n"].tolist() == list(range(100))


def test_a_failing_cell_is_reported_and_the_others_go_on(code, tmp_path):
    troubled = [*jobs_of(code, 2, trouble="raise"), *jobs_of(code, 3, trouble="array")]
    jobs = [*jobs_of(code, 1), *troubled, *jobs_of(code, 4)]
    for done in (4, 6):  # a failed job is tried again, a finished one is not
        results = run(jobs, tmp_path / "results")
        assert results.frame["x"].tolist() == [1, 1, 4, 4]
        assert [failure.job for failure in results.failures] == troubled
        assert "RuntimeError: x is not to be squared" in results.failures[0].error
        assert "not JSON serializable" in results.failures[1].error
        says = r"2 of 4 jobs failed, the first with \{.*'raise'.*\}: RuntimeError: x is not .*\nFinished jobs are kept"
        refused(says, results.all_rows)
        assert len(calls(tmp_path)) == done
    reports = [path.read_text() for path in (tmp_path / "results").glob("*.error")]
    assert len(reports) == 2
    assert any('"x": 2' in report and "not to be squared" in report for report in reports)


def test_a_cell_that_kills_its_process_takes_no_other_along(code, tmp_path):
    troubled = [*jobs_of(code, 2, trouble="die"), *jobs_of(code, 3, trouble="raise")]
    jobs = [*jobs_of(code, 1), *troubled, *jobs_of(code, 4, 5)]
    results = run(jobs, tmp_path / "results", processes=2)
    assert results.frame["x"].tolist() == [1, 1, 4, 4, 5, 5]
    errors = {failure.job.config["x"]: failure.error for failure in results.failures}
    assert errors.keys() == {2, 3}
    assert "exit code -9" in errors[2] and "not to be squared" in errors[3]
    assert sorted(calls(tmp_path)) == ["1", "2", "3", "4", "5"]


def test_a_cell_that_succeeds_later_loses_its_error(code, tmp_path, monkeypatch):
    (code / "late.py").write_text(
        "import os\n\n\ndef late(*, seed):\n    if 'READY' not in os.environ:\n"
        "        raise OSError('not yet')\n    return [{'y': 1}]\n"
    )
    job = Job(f"{code.name}.late:late", {})
    assert "not yet" in run([job], tmp_path / "results").failures[0].error
    monkeypatch.setenv("READY", "1")
    assert run([job], tmp_path / "results").frame["y"].tolist() == [1]
    assert [path.suffix for path in (tmp_path / "results").glob("[!.]*")] == [".json"]


@pytest.mark.parametrize(
    "spoil", [lambda text: text[:20], lambda _: "[]", lambda _: '{"rows": 1}', lambda _: "[" * 10**5]
)
def test_a_broken_file_is_named_with_the_remedy(code, tmp_path, spoil):
    run(jobs_of(code, 1), tmp_path / "out")
    for file in (next((tmp_path / "out").glob("*.json")), next((tmp_path / "out").glob(".plan-*.json"))):
        file.write_text(spoil(file.read_text()))
        refused(rf"{re.escape(file.name)}' is broken \(.*\): remove it, and give", collect_rows, tmp_path / "out")


def run_in_a_process(path, jobs, folder, processes):
    sys.path.insert(0, path)
    run(jobs, folder, processes)


@pytest.mark.parametrize(("processes", "done"), [(1, {1, 2}), (2, {1, 2, 4})])
def test_a_killed_run_goes_on_with_the_unfinished_jobs(code, tmp_path, processes, done):
    jobs = [*jobs_of(code, 1, 2), *jobs_of(code, 3, trouble="wait"), *jobs_of(code, 4)]
    process = FORK.Process(target=run_in_a_process, args=(str(tmp_path), jobs, tmp_path / "results", processes))
    process.start()

    def finished():
        return {json.loads(path.read_text())["config"]["x"] for path in (tmp_path / "results").glob("[!.]*.json")}

    limit = time.monotonic() + 60
    while time.monotonic() < limit and not (finished() == done and "3" in calls(tmp_path)):
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert finished() == done
    pids = set((tmp_path / "pids").read_text().split())
    while time.monotonic() < limit and any(map(alive, pids)):
        time.sleep(0.02)
    assert not any(map(alive, pids)), "a worker outlived the run"

    assert run([jobs[0], jobs[1], jobs[3]], tmp_path / "results").frame["y"].tolist() == [1, 1, 4, 4, 16, 16]
    assert sorted(calls(tmp_path)) == ["1", "2", "3", "4"], "a finished job was run again"


def alive(pid):
    """Whether a process still runs; one that ended may wait as a zombie for whoever adopted it."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_result_that_was_being_written_is_not_taken_for_one(code, tmp_path, monkeypatch):
    job, *_ = jobs_of(code, 2)

    replace = os.replace

    def killed(source, target):
        if "square-" in str(target):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            run([job], tmp_path / "results")
    assert [path.suffix for path in (tmp_path / "results").glob(".square-*.json.*.partial")] == [".partial"]
    assert run([job], tmp_path / "results").frame["y"].tolist() == [4, 4]
    assert not list((tmp_path / "results").glob(".*.partial"))


def test_the_version_changes_with_the_code_and_not_with_comments(code):
    (job,) = jobs_of(code, 2)
    version = code_version(job.function)
    functions, power = code / "functions.py", code / "power.py"

    functions.write_text("# A comment.\n" + functions.read_text().replace("Text.", "Another text."))
    power.write_text("def power(x):\n    'With a docstring.'\n\n    return x ** 2\n")
    (code / "unused.py").write_text("x = 2\n")
    assert code_version(job.function) == version

    power.write_text("def power(x):\n    return x**3\n")
    changed = code_version(job.function)
    assert changed != version, "a module that the function's module imports"
    functions.write_text(functions.read_text().replace('("a", "b")', '("a",)'))
    assert code_version(job.function) not in (version, changed), "the function itself"


def test_old_results_are_not_taken_for_those_of_new_code_and_go_once_these_are_there(code, tmp_path):
    job, failing = (*jobs_of(code, 2), *jobs_of(code, 3, trouble="raise"))
    (code / "other.py").write_text("def rows(x):\n    return [{'x': x}]\n")
    run([job, Job(f"{code.name}.other:rows", {"x": 2}, seed=None)], tmp_path / "results")
    (abandoned,) = (tmp_path / "results").glob("square-*.json")
    abandoned.with_name(f".{abandoned.name}.01234567.partial").touch()
    (code / "power.py").write_text("def power(x):\n    return x**2 + 0\n")
    run([job, failing], tmp_path / "results")
    assert len(list((tmp_path / "results").glob("[!.]*.json"))) == 3, "removed although the round is not finished"
    run([job], tmp_path / "results")
    assert calls(tmp_path) == ["2", "2", "3"]
    left = sorted(path.name.partition("-")[0] for path in (tmp_path / "results").glob("[!.]*"))
    assert left == ["rows", "square", "square"], "one of another function, the new one, and the error of a failed job"
    assert not abandoned.exists()


def test_the_version_sees_this_package(code):
    (code / "probe.py").write_text(
        "from align_circuits.tables.tables import Table\ndef probe(*, seed):\n    return []\n"
    )
    plain = code / "plain.py"
    plain.write_text("def probe(*, seed):\n    return []\n")
    assert code_version(f"{code.name}.probe:probe") != code_version(f"{code.name}.plain:probe")
    assert code_version("align_circuits.tables.intervals:proportion") != code_version(
        "align_circuits.prompts.relations:induction"
    )


@pytest.mark.parametrize("function", ["square", "module:", ":square", "__main__:square"])
def test_functions_without_an_address_are_refused(function):
    refused("give 'module:name'", Job, function, {})


@pytest.mark.parametrize("function", ["no_such_module:square", "align_circuits.jobs.jobs:no_such_function"])
def test_functions_that_are_not_there_are_refused_before_any_work(function, code, tmp_path):
    refused("cannot be imported", run, [*jobs_of(code, 1), Job(function, {})], tmp_path / "results")
    assert not (tmp_path / "calls").exists()


def test_other_bad_arguments_are_refused(code, tmp_path):
    refused("is not JSON", Job, "module:function", {"x": object()})
    refused("processes=0: give at least 1", run, jobs_of(code, 1), tmp_path / "results", processes=0)
    (tmp_path / "file").touch()
    refused("cannot write results", run, jobs_of(code, 1), tmp_path / "file")


def test_a_job_that_chooses_its_threads_leaves_those_of_the_process(code, tmp_path):
    before = torch.get_num_threads()
    (code / "threads.py").write_text(
        "import torch\n\n\ndef threads(*, seed):\n    torch.set_num_threads(3)\n"
        "    return [{'threads': torch.get_num_threads()}]\n"
    )
    assert run([Job(f"{code.name}.threads:threads", {})], tmp_path / "results").frame["threads"].tolist() == [3]
    assert torch.get_num_threads() == before


def test_no_jobs_give_no_rows(tmp_path):
    assert run([], tmp_path, processes=3).frame.empty


def race(path, name, folders, barrier):
    sys.path.insert(0, path)
    locks.PATIENCE = 0.005
    for number, folder in enumerate(folders):
        barrier.wait(60)
        run([Job(f"{name}.functions:square", {"x": x, "trouble": str(number)}) for x in range(6)], folder)


def test_two_runs_on_one_folder_never_repeat_a_job(code, tmp_path):
    """Twenty races; both runs return only when every job is done."""
    folders = [tmp_path / f"results_{number}" for number in range(20)]
    barrier = FORK.Barrier(2)
    runs = [FORK.Process(target=race, args=(str(tmp_path), code.name, folders, barrier)) for _ in range(2)]
    for process in runs:
        process.start()
    for process in runs:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(calls(tmp_path)) == sorted(str(x) for x in range(6) for _ in folders)
    assert len(set((tmp_path / "pids").read_text().split())) == 2, "both took part"
    assert not [path for folder in folders for path in folder.glob(".*.claim")]


def test_a_job_of_another_run_is_waited_for(code, tmp_path, monkeypatch):
    (job,) = jobs_of(code, 2)
    run([job], tmp_path / "results")
    (result,) = (tmp_path / "results").glob("square-*.json")
    kept = result.read_text()
    result.unlink()

    def other_run_finishes(_):
        result.write_text(kept.replace("4", "5"))
        claim.__exit__(None, None, None)

    claim = claimed(result)
    assert claim.__enter__()
    monkeypatch.setattr(locks.time, "sleep", other_run_finishes)
    assert run([job], tmp_path / "results").frame["y"].tolist() == [5, 5], "what the other run wrote"


def test_any_executor_gives_the_same_frame(code, tmp_path):
    jobs = jobs_of(code, 3, 1, 2)
    with ThreadPoolExecutor(2) as executor:
        results = run_jobs(jobs, tmp_path / "threads", executor=executor, progress=False)
    pd.testing.assert_frame_equal(results.frame, run(jobs, tmp_path / "results").frame)
    refused("processes=2 beside an executor", run_jobs, jobs, tmp_path / "results", executor=executor, processes=2)


def test_a_job_that_its_executor_loses_fails_alone(code, tmp_path):
    class Losing(Executor):
        def submit(self, fn, /, *args, **kwargs):
            future = Future()
            if args[1].config["x"] == 2:
                future.set_exception(ConnectionError("no worker"))
            else:
                future.set_result(fn(*args, **kwargs))
            return future

    results = run_jobs(jobs_of(code, 1, 2, 3), tmp_path / "results", executor=Losing(), progress=False)
    assert results.frame["x"].tolist() == [1, 1, 3, 3]
    assert results.failures[0].error == "its executor lost it: ConnectionError: no worker\n"
    assert str(results.failures[0]) == "square(x=2, seed=0): its executor lost it: ConnectionError: no worker"


@pytest.mark.slow
def test_a_job_that_takes_too_long_fails_alone(code, tmp_path):
    executor = ProcessExecutor(1, seconds=2.0)
    executor.submit(abs, 1).exception()  # the process starts, which takes longer
    jobs = [*jobs_of(code, 1, trouble="wait"), *jobs_of(code, 2)]
    results = run_jobs(jobs, tmp_path / "results", executor=executor, progress=False)
    executor.shutdown(cancel_futures=True)
    assert results.failures[0].error == "it took longer than its executor allows\n"
    assert results.frame["x"].tolist() == [2, 2]


def test_a_worker_with_other_code_fails_its_jobs(code, tmp_path, monkeypatch):
    class Changing(Executor):
        def submit(self, fn, /, *args, **kwargs):
            monkeypatch.setattr("align_circuits.jobs.jobs._VERSIONS", {})  # it is no worker, but this process
            (code / "power.py").write_text("def power(x):\n    return x**3\n")
            future = Future()
            future.set_result(fn(*args, **kwargs))
            return future

    results = run_jobs(jobs_of(code, 2), tmp_path / "results", executor=Changing(), progress=False)
    assert "is not that of the process which submits it: give both the same code" in results.failures[0].error
    assert results.frame.empty and not (tmp_path / "calls").exists()


def test_each_process_sees_one_device_and_its_share_of_the_cores(code, tmp_path, monkeypatch):
    (code / "devices.py").write_text(
        "import os, time, torch\n\n\ndef devices(*, seed):\n    time.sleep(0.3)\n    return [{'pid': os.getpid(), "
        "'device': os.environ['CUDA_VISIBLE_DEVICES'], 'threads': torch.get_num_threads()}]\n"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    frame = run([Job(f"{code.name}.devices:devices", {}, seed) for seed in range(6)], tmp_path / "results", 2).frame
    devices = frame.groupby("pid")["device"].unique()
    assert sorted(device for (device,) in devices) == ["3", "5"]
    assert set(frame["threads"]) == {3}


def test_progress_is_read_from_the_folder(code, tmp_path):
    jobs = [*jobs_of(code, 1), *jobs_of(code, 2, trouble="raise"), *jobs_of(code, 3, 4)]
    run(jobs, tmp_path / "results")
    paths = {json.loads(path.read_text())["config"]["x"]: path for path in (tmp_path / "results").glob("square-*.json")}
    paths[3].unlink()
    paths[4].unlink()
    with claimed(paths[3]):
        (progress,) = read_progress(tmp_path / "results")
    assert (progress.done, progress.running, progress.waiting) == (1, 1, 1)
    assert [failure.job for failure in progress.failures] == [jobs[1]]
    elapsed = time.time() - progress.started
    assert progress.seconds_left is not None and 0 < progress.seconds_left <= 2 * elapsed
    (progress,) = read_progress(tmp_path / "results")
    assert (progress.running, progress.waiting, progress.seconds_left) == (0, 2, None)
    assert collect_rows(tmp_path / "results")["y"].tolist() == [1, 1]
    refused("holds no run of jobs", read_progress, tmp_path)


@pytest.mark.parametrize("name", ["../precious.json", "/etc/passwd"])
def test_the_names_of_a_plan_stay_in_its_folder(tmp_path, name):
    (tmp_path / "jobs").mkdir()
    plan = {"started": 0.0, "jobs": {name: {"function": "a:b", "config": {}, "seed": 0}}}
    (tmp_path / "jobs" / ".plan-0.json").write_text(json.dumps(plan))
    for read in (read_progress, collect_rows):
        refused("leads out of its folder", read, tmp_path / "jobs")
