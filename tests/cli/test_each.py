"""`each` runs a verb for several models, seeds and variants: numbers of single runs, jobs that resume, t intervals."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from legs import slow_but
from safetensors.torch import load_file, save_file

from align_circuits.cli import main
from align_circuits.cli.each_command import Each
from align_circuits.tables.tables import Table

SMALL = ["--n", "4", "--x-len", "3", "--n-examples", "3"]
TUNE = ["tune", "--model", "tiny", "--n", "4", "--x-len", "2", "--n-examples", "2", "--steps", "4", "--batch", "2"]
TUNE += ["--probe-every", "2", "--probe-prompts", "2", "--layers", "1", "--automata", "task", "--no-heads"]


@pytest.fixture(autouse=True)
def elsewhere(tiny, tmp_path, monkeypatch):
    """In a folder where "tiny" names the model."""
    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny)


@pytest.mark.parametrize("jobs", slow_but(["1"], ["1", "2"]))
def test_the_numbers_are_those_of_single_runs_with_any_number_of_processes(jobs, ran):
    wanted = ["each", "--models", "planted", "tiny", "--seeds", "3", "5", "--out", "runs"]
    printed = ran([*wanted, "--jobs", jobs, "--", "score", *SMALL])
    assert "== planted, seed 3: runs/planted_seed-3\n" in printed and "metric       best heads" in printed
    found: Any = Table.load("runs").frame
    for model in ("planted", "tiny"):
        assert main(["score", "--model", model, "--seed", "5", "--out", f"alone-{model}", *SMALL]) == 0
        alone = Table.load(f"alone-{model}").frame
        mine: Any = found[(found["model"] == model) & (found["seed"] == 5)]
        pd.testing.assert_frame_equal(mine[list(alone.columns)].reset_index(drop=True), alone)
    means: Any = Table.load("runs/over_seeds").frame
    assert means["n"].sum() == found["value"].notna().sum() and means["n"].max() == 2 and "seed" not in means
    assert "4 done, 0 running, 0 waiting, 0 failed" in ran(["status", "runs"])
    assert main(["collect", "runs", "--out", "rows"]) == 0
    assert len(pd.read_csv("rows/rows.csv")) == len(found)


def test_variants_are_columns():
    variants = ["--variants", "x-len=2", "x-len=3 style=pre-aligned"]
    verb = ["evaluate", "--model", "tiny", "--n", "4", "--n-examples", "2"]
    assert main(["each", *variants, "--out", "run", "--", *verb]) == 0
    assert set(Table.load("run").frame["variant"]) == {"x-len=2", "x-len=3 style=pre-aligned"}
    made = json.loads(Path("run/x-len-3-style-pre-aligned_seed-0/provenance.json").read_text())
    assert (made["settings"]["task"]["x_len"], made["settings"]["task"]["style"]) == (3, "pre-aligned")


def test_seeds_that_draw_nothing_are_told():
    Path("p.jsonl").write_text('{"text": "kAm", "answer": "B"}\n{"text": "kCm", "answer": "D"}\n')
    verb = ["evaluate", "--model", "tiny", "--prompts", "p.jsonl"]
    assert main(["each", "--seeds", "0", "1", "--out", "run", "--", *verb]) == 0
    assert "No intervals: all seeds gave the same numbers" in Path("run/report.html").read_text(encoding="utf-8")


def test_runs_whose_names_are_alike_have_folders_of_their_own():
    Path("a").mkdir()
    for place, answer in (("a/p.jsonl", "b"), ("a-p.jsonl", "c")):
        lines = [json.dumps({"text": text, "answer": answer}) for text in ("ab:", "cd:")]
        Path(place).write_text("\n".join(lines))
        assert main(["evaluate", "--model", "tiny", "--prompts", place, "--out", f"alone-{answer}"]) == 0
    variants = ["--variants", "prompts=a/p.jsonl", "prompts=a-p.jsonl"]
    assert main(["each", *variants, "--out", "run", "--", "evaluate", "--model", "tiny"]) == 0
    table = Table.load("run")
    for variant, answer in (("prompts=a/p.jsonl", "b"), ("prompts=a-p.jsonl", "c")):
        found: Any = table.where(variant=variant).frame["value"]
        alone: Any = Table.load(f"alone-{answer}").frame["value"]
        pd.testing.assert_series_equal(found, alone)


def test_a_command_given_again_after_another_one_in_its_folder_has_its_own_numbers():
    tables = []
    for n in ("4", "6", "4"):
        verb = ["evaluate", "--model", "tiny", "--x-len", "3", "--n-examples", "3", "--n", n]
        assert main(["each", "--out", "run", "--overwrite", "--", *verb]) == 0
        tables.append(Table.load("run").frame)
    pd.testing.assert_frame_equal(tables[0], tables[2])
    assert not tables[0]["n"].equals(tables[1]["n"])


def test_a_changed_file_is_seen_however_its_option_is_written():
    found = []
    for answers in ("ab", "ba"):
        Path("p.jsonl").write_text("\n".join(json.dumps({"text": f"k{each}m", "answer": each}) for each in answers))
        assert main(["each", "--out", "run", "--overwrite", "--", "evaluate", "--model=tiny", "--prompts=p.jsonl"]) == 0
        found.append(json.loads(Path("run/seed-0/provenance.json").read_text())["data"])
    assert found[0] != found[1]


def test_a_run_that_fails_is_named_and_the_others_are_kept(declined):
    command = ["each", "--models", "nowhere/at/all", "planted", "--out", "run", "--", "score", *SMALL]
    said = declined(command)
    assert "1 of 2 runs failed, the first (nowhere/at/all, seed 0) with" in said and "no folder" in said
    assert "the same command with --out run goes on" in said
    kept = Path("run/planted_seed-0/table.csv").stat().st_mtime_ns
    assert not Path("run/table.csv").exists()
    assert main([word if word != "nowhere/at/all" else "tiny" for word in command]) == 0
    assert Path("run/planted_seed-0/table.csv").stat().st_mtime_ns == kept
    assert len(Table.load("run").frame["model"].unique()) == 2


def test_a_run_whose_files_have_changed_is_another_run(tiny, declined):
    shutil.copytree(tiny, "model")
    command = ["each", "--models", "model", "missing", "--out", "run", "--", "score", *SMALL]
    assert main(command) == 2
    kept = Table.load("run/model_seed-0").frame
    weights = load_file("model/model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, "model/model.safetensors", {"format": "pt"})
    assert "1 of 2 runs failed" in declined(command)
    assert not Table.load("run/model_seed-0").frame.equals(kept)


def test_an_adapter_in_a_ring_whose_base_model_has_changed_is_another_run():
    each, found = Each(command=("score",), models=("adapter",)), []
    for name in ("adapter", "base"):
        Path(name).mkdir()
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "../base"}')
    Path("base/adapter_config.json").write_text('{"base_model_name_or_path": "../adapter"}')
    for weights in (b"one", b"other"):
        Path("base/model.safetensors").write_bytes(weights)
        found += [run["read"] for run in each.runs(Path("run"))]
    assert found[0] != found[1]


@pytest.mark.slow  # tests/jobs kills runs of jobs and trainings in the fast leg
def test_a_killed_tuning_goes_on_where_it_was():
    assert main(["each", "--seeds", "0", "1", "--out", "whole", "--", *TUNE]) == 0
    first = Path("killed/seed-0/table.csv")
    child = os.fork()  # one thread, so there is no lock that the child would wait for
    if child == 0:
        try:
            main(["each", "--seeds", "0", "1", "--out", "killed", "--", *TUNE])
        finally:
            os._exit(0)
    while not first.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not Path("killed/table.csv").exists()
    assert main(["each", "--seeds", "0", "1", "--out", "killed", "--", *TUNE]) == 0
    pd.testing.assert_frame_equal(Table.load("killed").frame, Table.load("whole").frame)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], 'no verb: give one behind "--"'),
        (["--", "pretrain"], "no verb 'pretrain' for several models or seeds: give one of score, evaluate"),
        (["--", "score", "--seed", "1"], "--seed behind the verb: each run has its own"),
        (["--models", "planted", "--", "score", "--model=planted"], "--model behind the verb"),
        (["--variants", "out=x", "--", "score"], "--out behind the verb"),
        (["--variants", "x-len", "--", "score"], "'x-len' is not NAME=VALUE, such as x-len=3"),
        (["--models", "planted", "planted", "--", "score"], "--models has 'planted' twice: give each once"),
        (["--seeds", "0", "1", "0", "--", "score"], "--seeds has 0 twice"),
        (["--variants", "x-len=3", "x-len=3", "--", "score"], "--variants has 'x-len=3' twice"),
        (["--jobs", "0", "--", "score"], "--jobs 0: give at least 1"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, message, declined):
    assert message in declined(["each", "--out", "run", *arguments])
    assert not Path("run").exists()


def test_a_wrong_option_of_the_verb_ends_before_anything_runs(capsys):
    with pytest.raises(SystemExit):
        main(["each", "--seeds", "0", "1", "--out", "run", "--", "score", "--n-exampels", "3"])
    assert "n-exampels" in capsys.readouterr().err
    assert not Path("run").exists()


def test_what_matters_most_is_that_of_the_verb():
    assert main(["each", "--seeds", "0", "1", "--out", "runs", "--", "ablate", *SMALL]) == 0
    for folder in ("runs/over_seeds", "runs/seed-0"):
        table = Table.load(folder)
        assert table.top("log_prob", 3).frame.equals(table.top("log_prob", 3, by="lowest").frame)
