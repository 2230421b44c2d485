"""`status` and `collect` read the folder of a run; `reproduce` refuses what is no cluster."""

import json
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from align_circuits.cli import main
from align_circuits.jobs.files import replacing
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


def test_status_names_failures_and_writes_nothing(folder, ran):
    printed = ran(["status", str(folder)])
    assert "1 done, 0 running, 0 waiting, 0 failed" in printed
    failed = "1 failed\n  failed: square(x=3, seed=0): RuntimeError: not this one"
    assert f"2 done, 0 running, 0 waiting, {failed}" in printed
    assert not (folder.parent / "runs").exists()
    next((folder / "jobs").glob("*.error")).write_bytes(b"\xff\xfe broken")
    assert "failed: square(x=3, seed=0): \ufffd\ufffd broken" in ran(["status", str(folder)])


def test_collect_writes_each_row_once(folder, tmp_path):
    assert main(["collect", str(folder), "--out", str(tmp_path / "rows")]) == 0
    rows = pd.read_csv(tmp_path / "rows" / "rows.csv")
    assert list(rows.columns) == ["x", "seed", "y"]
    assert sorted(rows["y"]) == [4, 16]


def test_a_folder_without_jobs_has_no_status(declined):
    assert "holds no run of jobs" in declined(["status", "nowhere"])
    assert "(File name too long)" in declined(["status", "x" * 5000])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"started": 1e300}, "run' has begun at no time (1e+300): remove .plan*.json there"),
        ({"job": {"function": "m:f", "config": 3}}, "run' lists what is no job (config=3 is not JSON"),
        ({"name": "x" * 300}, "run' lists what is no job ("),
        ({"rows": [1, 2]}, "a.json' is broken (a row is no object): remove it"),
    ],
)
def test_a_broken_file_of_jobs_is_named(edit, message, tmp_path, declined):
    job = {"function": "m:f", "config": {}, "seed": 0, **edit.get("job", {})}
    plan = {"started": edit.get("started", 0), "jobs": {edit.get("name", "a.json"): job}}
    for name, content in ((".plan-0", plan), ("a", {"rows": edit.get("rows", [])})):
        with replacing(tmp_path / "run" / f"{name}.json") as path:
            path.write_text(json.dumps(content))
    assert message in declined(["collect", str(tmp_path / "run"), "--out", str(tmp_path / "rows")])


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of one worker, a thread: `test_jobs.py` and `test_clusters.py` have processes."""
    monkeypatch.setattr("align_circuits.cli.workers.connected", lambda *_, **__: ThreadPoolExecutor(1))
    return ["--on", "dask://here", "--jobs", "2"]


def test_a_sweep_of_two_workers_is_that_of_one_process(cluster, tmp_path, monkeypatch, capsys, ran, declined):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("align_circuits.run.target_metrics.PROMPTS_A_PART", 3)
    sweep = ["ablate", "--style", "standard", "--n", "4", "--n-examples", "2"]
    assert main([*sweep, "--out", "shared", "--parts", "parts", *cluster]) == 0
    printed, said = capsys.readouterr()
    assert said == "progress: align-circuits status parts\n"
    progress = sorted(line.partition(": ")[2] for line in ran(["status", "parts"]).splitlines())
    assert progress == [f"{parts} done, 0 running, 0 waiting, 0 failed" for parts in (1, 2)]  # the means, the sweep
    assert "which only the verbs that began them can merge" in declined(["collect", "parts", "--out", "rows"])
    assert printed == ran([*sweep, "--out", "alone", "--parts", "of_one"]).replace("alone", "shared")
    for name in ("table.csv", "values.safetensors", "provenance.json"):
        assert (tmp_path / "shared" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes().replace(
            b"alone", b"shared"
        ), name
    for one, other, files in (("shared", "alone", "*"), ("parts", "of_one", "**/*.safetensors")):
        found = [{path.relative_to(tmp_path / name) for path in (tmp_path / name).glob(files)} for name in (one, other)]
        assert found[0] == found[1]


def test_what_the_workers_of_a_sweep_refuse_is_said_in_a_line(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["patch", "--model", "toy-llama", "--prompts", "no.jsonl", "--out", "x", *cluster]) == 2
    assert "2 of 2 jobs failed, finished parts are kept: " in (error := capsys.readouterr().err)
    assert "no.jsonl" in error and len(error.splitlines()) <= 3
    assert not (tmp_path / "x").exists()
