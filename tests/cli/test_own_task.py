"""`--task file.py:Class`: the numbers of the same calls in Python, refusals in a line, runs that are repeated."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.cli import main
from align_circuits.cli.own_task import load_task
from align_circuits.tables.tables import Table

FOLLOW = """
import random
from dataclasses import replace

import align_circuits as ac


class Follow(ac.Task):
    roles = {"follower": "attends to the letter that followed its own before"}
    letters = "ABCDEFGHIJKL"

    def sample(self, n, tokenizer=None, seed=0):
        draw = random.Random(seed)
        rows = [draw.sample(self.letters, 4) for _ in range(n)]
        texts = ["".join(draw.sample([a + b, c + d], 2)) + a for a, b, c, d in rows]
        places = {"key": [b for _, b, _, _ in rows], "other": [d for _, _, _, d in rows]}
        prompts = ac.Prompts.from_texts(texts, tokenizer, answer=places["key"], positions=places)
        follower = ac.Relation.from_positions("END", "key", prompts=prompts, candidates=["key", "other"])
        return prompts.with_relations(follower=follower)

    def corrupt(self, prompts, *, seed=0):
        inputs, row = prompts.inputs.clone(), range(len(prompts))
        key, other = prompts.positions["key"], prompts.positions["other"]
        inputs[row, key], inputs[row, other] = prompts.inputs[row, other], prompts.inputs[row, key]
        return replace(prompts, inputs=inputs)


class WithLetters(Follow):
    def __init__(self, letters):
        self.letters = letters


class Unfinished(ac.Task):
    pass


first_half = WithLetters("ABCDEF")
not_a_task = 1
"""


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """The working directory holds follow_task.py, which no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = Path("follow_task.py")
    path.write_text(FOLLOW)
    yield path
    for name in ("follow_task", "empty"):
        sys.modules.pop(name, None)


def _edit(file: Path, old: str, new: str) -> None:
    """Changes the file as between two commands: the next one imports it anew."""
    file.write_text(file.read_text().replace(old, new) + "\n# as long as no other version\n")
    sys.modules.pop("follow_task", None)


@pytest.mark.parametrize("name", ["follow_task.py:Follow", "follow_task:Follow"])
def test_the_numbers_are_those_of_the_task_in_python_and_are_repeated(tiny, capsys, name, ran):
    assert main(["score", "--task", name, "--model", tiny, "--n", "6", "--out", "run"]) == 0
    model, table = ac.load(tiny), Table.load("run")
    scored = ("induction", "previous", "duplicate", "follower", "sink", "entropy", "follower_attention")
    expected = ac.score_heads(model, load_task(name).sample(6, model.tokenizer, seed=0), scored)
    pd.testing.assert_frame_equal(table.frame, expected.frame)
    assert "follower" in set(table.frame["metric"])
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert f"<dt>Task</dt><dd>{name}</dd>" in page and f"--task {name}" in page
    saved = json.loads(Path("run/provenance.json").read_text())["settings"]["own_task"]
    assert saved == (str(Path("follow_task.py").resolve()) + ":Follow" if ".py" in name else name)
    capsys.readouterr()
    assert main(["rerun", "run"]) == 2, "a folder runs no code"
    assert f"is run only if you name it: give --task {saved}" in capsys.readouterr().err
    printed = ran(["rerun", "run", "--task", saved])
    assert "same: all" in printed and "code of the task" not in printed


def test_a_repetition_says_that_the_code_of_the_task_has_changed(tiny, file, ran):
    wanted = ["patch", "--task", "follow_task.py:Follow", "--model", tiny, "--n", "6", "--out", "run"]
    assert main(wanted) == 0
    _edit(file, "prompts.inputs[row, other], prompts.inputs[row, key]", "prompts.inputs[row, other], 9")
    printed = ran(["rerun", "run", "--task", "follow_task.py:Follow"])
    assert "differs: " in printed and "changed since then: the code of the task" in printed


def test_a_task_without_a_role_in_its_prompts_is_tuned_without_heads(tiny, file, capsys):
    _edit(file, 'roles = {"follower"', 'roles = {"nothing"')
    tune = ["tune", "--task", "follow_task.py:Follow", "--model", tiny, "--n", "8", "--steps", "1", "--out", "run"]
    assert main(tune) == 2 and not Path("run").exists()
    assert "no row of nothing, so no head can be named: --no-heads" in capsys.readouterr().err
    assert main([*tune, "--no-heads"]) == 0
    assert "All heads after tuning" not in Path("run/report.html").read_text()


def test_each_runs_anew_once_the_code_of_the_task_has_changed(tiny, file):
    wanted = ["each", "--out", "run", "--overwrite", "--", "evaluate", "--task", "follow_task.py:Follow"]
    wanted += ["--model", tiny, "--n", "6"]
    digests = []
    for old, new in (("", ""), ("ABCDEFGHIJKL", "MNOPQR")):
        if old:
            _edit(file, old, new)
        assert main(wanted) == 0
        assert main(wanted) == 0, "from what is kept"
        folder = Path("run/seed-0")
        digests.append(json.loads((folder / "provenance.json").read_text())["data"]["digest"])
        assert len(list(Path("run/jobs").glob("run_once*.json"))) == len(digests)
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "follow_task"], "give package.module:name or path/file.py:name"),
        (
            ["--task", "follow_task.py"],
            "name one of its tasks, as follow_task.py:Name; it has Follow, WithLetters, Unf",
        ),
        (["--task", "no_such_file.py"], "there is no file no_such_file.py"),
        (["--task", "no_such_module:Follow"], "no module 'no_such_module' can be imported; run it from the folder"),
        (["--task", "no_such_file.py:Follow"], "there is no file no_such_file.py"),
        (["--task", "follow_task.py:Folow"], "has no Folow; it has Follow, WithLetters, Unfinished, first_half"),
        (["--task", "follow_task.py:not_a_task"], "has not_a_task, which is no Task; it has Follow"),
        (["--task", "empty.py:Follow"], "has no Follow; write one, a subclass of align_circuits.Task"),
        (["--task", "follow_task.py:Unfinished"], "Unfinished does not define sample"),
        (["--task", "short.py:Short"], "Short.sample takes n: write sample(self, n, tokenizer=None, seed=0)"),
        (["--task", "follow_task.py:WithLetters"], "write `task = WithLetters(...)` in follow_task.py"),
        (["--task", "broken.py:Follow"], "importing it raised SyntaxError: '(' was never closed (broken.py, line 1)"),
        (["--task", "raises.py:Follow"], "importing it raised ZeroDivisionError: division by zero .*raises.py, line 2"),
        (["--task", "needs.py:Follow"], "importing it raised ModuleNotFoundError: No module named 'no_such_library'"),
        (["--task", "random.py:Follow"], "Python already has a module 'random', .*: rename random.py"),
        (["--task", "follow_task.py:Follow", "--x-len", "3"], "--x-len is an option of the translation task"),
        (["--task", "follow_task.py:Follow", "--prompts", "p.jsonl"], "--prompts and --task: give one of them"),
        (["--task", "follow_task.py:Follow", "--model", "planted"], "--task needs --model, such as smollm2"),
    ],
)
def test_what_is_no_task_is_refused_in_a_line(options, message, declined):
    files = {"empty": "", "broken": "x = (", "raises": "\n1 / 0", "needs": "import no_such_library", "random": FOLLOW}
    files["short"] = "import align_circuits as ac\nclass Short(ac.Task):\n    def sample(self, n):\n        return None"
    for name, code in files.items():
        Path(f"{name}.py").write_text(code)
    Path("p.jsonl").write_text('{"text": "AB", "answer": "C"}')
    said = declined(["score", "--model", "toy-llama", *options])
    assert re.search(message if ".*" in message else re.escape(message), said) and said.count("\n") == 1
    assert not Path("runs").exists() or not [*Path("runs").rglob("table.csv")]


def test_a_name_may_lead_to_an_object_and_to_a_task_of_the_package():
    assert load_task("follow_task.py:first_half").letters == "ABCDEF"  # pyright: ignore[reportAttributeAccessIssue]
    assert load_task("align_circuits:RepeatedTokensTask") == ac.RepeatedTokensTask()


def test_a_run_without_a_task_of_its_own_takes_none(capsys):
    assert main(["score", "--n", "4", "--x-len", "3", "--n-examples", "2", "--out", "run"]) == 0
    assert main(["rerun", "run", "--task", "follow_task.py:Follow"]) == 2
    assert "the run was not made with --task; leave it out" in capsys.readouterr().err


@pytest.mark.slow
def test_all_verbs_take_a_task(tiny):
    model, task = ac.load(tiny), load_task("follow_task.py:Follow")
    prompts = task.sample(8, model.tokenizer, seed=0)
    own = ["--task", "follow_task.py:Follow", "--model", tiny, "--n", "8"]
    expected: dict[str, Any] = {
        "evaluate": ac.evaluate(model, prompts),
        "ablate": ac.ablate_heads(model, prompts, metrics=("log_prob", "accuracy")),
        "patch": ac.patch_heads(model, ac.Pair(*task.pairs(prompts))),
        "attribute": ac.attribute_heads(model, ac.Pair(*task.pairs(prompts), metric="log_prob")),
        "localize": ac.localize(model, task, 8, n_controls=1).table,
    }
    for verb, table in expected.items():
        asked = ["--n-controls", "1"] if verb == "localize" else []
        assert main([verb, *own, *asked, "--out", verb]) == 0
        np.testing.assert_array_equal(Table.load(verb).frame["value"], table.frame["value"])
    assert main(["patch", *own, "--jobs", "2", "--out", "shared"]) == 0, "also in other processes"
    np.testing.assert_array_equal(Table.load("shared").frame["value"], expected["patch"].frame["value"])


@pytest.mark.slow
def test_tune_takes_a_task(tiny, capsys, ran):
    config = ["--steps", "2", "--batch", "2", "--probe-prompts", "2", "--layers", "1", "--n", "8"]
    wanted = ["tune", "--task", "follow_task.py:Follow", "--model", tiny, *config]
    assert "A token is correct in" in ran([*wanted, "--out", "run"])
    assert "follower" in Path("run/report.html").read_text() and Path("run/heads/report.html").is_file()
    assert "same: all" in ran(["rerun", "run", "--task", "follow_task.py:Follow"])
    assert main([*wanted, "--method", "standard", "--out", "other"]) == 2
    assert "--method standard is for the translation task" in capsys.readouterr().err
