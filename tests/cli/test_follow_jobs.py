"""`status` and `collect` read the folder of a run; `reproduce` refuses what is no cluster."""

from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from align_circuits.cli import main
from align_circuits.jobs.jobs import Job, run_jobs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "squares.py").write_text(
        "def square(*, x, seed):\n    if x == 3:\n        raise RuntimeError('not this one')\n"
        "    return [{'y': x**2}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    jobs = [Job("squares:square", {"x": x}) for x in (2, 3, 4)]
    run_jobs(jobs, tmp_path / "run" / "jobs", progress=False)
    run_jobs(jobs[:1], tmp_path / "run" / "jobs", progress=False)
    return tmp_path / "run"


def test_status_names_failures_and_writes_nothing(folder, capsys):
    assert main(["status", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "1 done, 0 running, 0 waiting, 0 failed" in printed
    assert (
        "2 done, 0 running, 0 waiting, 1 failed\n  failed: square(x=3, seed=0): RuntimeError: not this one" in printed
    )
    assert not (folder.parent / "runs").exists()


def test_collect_writes_each_row_once(folder, tmp_path):
    assert main(["collect", str(folder), "--out", str(tmp_path / "rows")]) == 0
    rows = pd.read_csv(tmp_path / "rows" / "rows.csv")
    assert list(rows.columns) == ["x", "seed", "y"]
    assert sorted(rows["y"]) == [4, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "nowhere"], "holds no run of jobs"),
        (["reproduce", "localize/ground-truth", "--on", "ray", "--out", "x"], "give 'dask://HOST:PORT' or 'slurm'"),
        (["reproduce", "localize/power", "--on", "slurm", "--jobs", "2", "--out", "x"], "give one of them"),
        (["patch", "--jobs", "0", "--out", "x"], "--jobs 0: give at least 1"),
        (["patch", "--slurm-gpus", "1", "--out", "x"], "are options of --on slurm"),
    ],
)
def test_what_cannot_be_followed_or_run_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of one worker, a thread: `test_jobs.py` and `test_clusters.py` have processes."""
    monkeypatch.setattr("align_circuits.cli.workers.connected", lambda *_, **__: ThreadPoolExecutor(1))
    return ["--on", "dask://here", "--jobs", "2"]


def test_a_sweep_of_two_workers_is_that_of_one_process(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("align_circuits.run.target_metrics.PROMPTS_A_PART", 3)
    sweep = ["ablate", "--style", "standard", "--n", "4", "--n-examples", "2"]
    assert main([*sweep, "--out", "shared", "--parts", "parts", *cluster]) == 0
    printed, said = capsys.readouterr()
    assert said == "progress: align-circuits status parts\n"
    assert main(["status", "parts"]) == 0
    progress = sorted(line.partition(": ")[2] for line in capsys.readouterr().out.splitlines())
    assert progress == [f"{parts} done, 0 running, 0 waiting, 0 failed" for parts in (1, 2)]  # the means, the sweep
    assert main(["collect", "parts", "--out", "rows"]) == 2
    assert "which only the verbs that began them can merge" in capsys.readouterr().err
    assert main([*sweep, "--out", "alone", "--parts", "of_one"]) == 0
    assert printed == capsys.readouterr().out.replace("alone", "shared")
    for name in ("table.csv", "values.safetensors", "provenance.json"):
        assert (tmp_path / "shared" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes().replace(
            b"alone", b"shared"
        ), name
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {
        path.name for path in (tmp_path / "alone").iterdir()
    }
    parts = {path.relative_to(tmp_path / "parts") for path in (tmp_path / "parts").rglob("*.safetensors")}
    assert parts == {path.relative_to(tmp_path / "of_one") for path in (tmp_path / "of_one").rglob("*.safetensors")}


def test_what_the_workers_of_a_sweep_refuse_is_said_in_a_line(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["patch", "--prompts", "no.jsonl", "--out", "x", *cluster]) == 2
    assert "2 of 2 jobs failed, finished parts are kept: " in (error := capsys.readouterr().err)
    assert "no.jsonl" in error and len(error.splitlines()) <= 3
    assert not (tmp_path / "x").exists()
