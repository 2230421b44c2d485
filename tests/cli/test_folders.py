"""Folders of results: whole, never half replaced, and never at the cost of files that are not ours."""

import errno
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pandas as pd
import pytest
from refusals import refused

from align_circuits.cli import entry
from align_circuits.cli import folders as cli_folders
from align_circuits.cli.folders import results_folder
from align_circuits.jobs import folders
from align_circuits.jobs.files import replacing
from align_circuits.jobs.folders import finish_moves, replacing_in
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

OLD, NEW = ({"table.csv": text, "report.html": text, "provenance.json": text} for text in ("old", "new"))


def table(value: float) -> Table:
    return Table(
        pd.DataFrame({"metric": ["m"], "value": [value], "low": [0.0], "high": [1.0], "n": [1]}), Provenance("x")
    )


def write(folder: Path, contents: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name).write_text(text)


def read(folder: Path) -> dict[str, str]:
    """All files below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


class Killed(BaseException):
    """Stands for a signal that ends the process at once: nothing is cleaned up."""


@pytest.mark.parametrize("existed", [False, True])
def test_a_run_that_is_killed_at_any_rename_leaves_the_old_or_the_new_results(tmp_path, monkeypatch, existed):
    rename, cleaned = Path.rename, folders.shutil.rmtree
    outcomes = []
    for last in range(12):
        folder = tmp_path / str(last)
        if existed:
            write(folder, {**OLD, "values.safetensors": "old", "mine.txt": "mine"})
        left = last

        def until(path: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return rename(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", until)
            patched.setattr(folders.shutil, "rmtree", lambda *_, **__: None)
            try:
                with replacing_in(folder, going=("values.safetensors",)) as new:
                    write(new, NEW)
            except Killed:
                outcomes.append("killed")
            else:
                outcomes.append("finished")
        assert folders.shutil.rmtree is cleaned
        if (folder / "provenance.json").exists():  # complete, as it claims, before anything is repaired
            shown = {name: text for name, text in read(folder).items() if name in NEW}
            assert shown in (OLD, NEW)
        with replacing_in(folder):
            pass  # the next run, which writes nothing
        old = {**OLD, "values.safetensors": "old"} if existed else {}
        mine = {"mine.txt": "mine"} if existed else {}
        assert (read(folder) if folder.exists() else {}) in ({**old, **mine}, {**NEW, **mine})
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert outcomes[0] == "killed" and outcomes[-1] == "finished"


def test_a_table_whose_replacement_was_cut_off_is_read_whole(tmp_path, monkeypatch):
    table(1.0).save(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(folders, "_finish", lambda _: (_ for _ in ()).throw(Killed()))
        patched.setattr(folders.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            table(2.0).save(tmp_path)
    assert Table.load(tmp_path).frame["value"].tolist() == [2.0]
    assert sorted(read(tmp_path)) == ["provenance.json", "table.csv"]


def test_a_full_disk_ends_in_one_line_and_the_earlier_results_stay(tmp_path, monkeypatch, declined):
    @dataclass
    class Full:
        folder, overwrite, renews = tmp_path / "run", True, None

        def with_defaults(self, _):
            return self

        def __call__(self, results):
            write(results.new, {"table.csv": "half"})
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    write(tmp_path / "run", OLD)
    monkeypatch.setattr(entry, "verb_class", lambda _: Full)
    monkeypatch.setattr("tyro.cli", lambda *_, **__: Full())
    (line,) = declined(["score"]).splitlines()
    assert "earlier results are as they were: [Errno 28] No space left on device" in line
    assert read(tmp_path) == {f"run/{name}": text for name, text in OLD.items()}


def test_folders_of_others_are_refused_and_overwrite_takes_only_the_names_of_results(tmp_path):
    write(tmp_path, {"thesis.tex": "mine", "report.html": "mine"})
    message = r"no results of this program \(report.html, thesis.tex\): give another --out"
    refused(message, results_folder(tmp_path, Path("runs"), overwrite=False).__enter__)
    with results_folder(tmp_path, Path("runs"), overwrite=True) as results:
        write(results.new, NEW)
    assert read(tmp_path) == {**NEW, "thesis.tex": "mine"}

    (tmp_path / "table.csv").unlink()
    write(tmp_path / "heads", {"notes.txt": "mine"})
    before = read(tmp_path)
    for name, text in (("heads", "is a folder of other files"), ("thesis.tex", "results need a folder there")):
        with pytest.raises(ValueError, match=text), results_folder(tmp_path, Path("runs"), overwrite=True) as results:
            write(results.new / name, NEW)
        assert read(tmp_path) == before


def test_results_go_with_their_provenance_and_state_and_other_files_stay(tmp_path):
    ours = json.dumps({"verb": "reproduce", "settings": {"name": "a/b"}, "versions": {"align-circuits": "1"}})
    kept = {"mine.txt": "mine"}
    write(tmp_path, {"provenance.json": ours, "table.csv.xz": "old", **kept})
    write(tmp_path / "heads", {"provenance.json": "{}"})
    write(tmp_path / "training", {"log.csv": "state"})
    for renews in (None, {"verb": "reproduce", "name": "a/c"}, {"verb": "tune", "name": "a/b"}):
        with (
            pytest.raises(
                ValueError, match=r"holds the results of an earlier run \(reproduce a/b\): give another --out"
            ),
            results_folder(tmp_path, Path("runs"), overwrite=False, renews=renews),
        ):
            pass
    renews = {"verb": "reproduce", "name": "a/b"}
    with results_folder(tmp_path, Path("runs"), overwrite=False, renews=renews) as results:
        write(results.new, NEW)
    assert read(tmp_path) == {**NEW, **kept, "training/log.csv": "state"}
    (tmp_path / "provenance.json").unlink()  # a run that was stopped, with its state: it may go on
    with results_folder(tmp_path, Path("runs"), overwrite=False):
        pass


def test_a_link_that_leads_nowhere_is_refused_before_the_work(tmp_path, declined):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    message = "nowhere', which does not exist: make it, or write elsewhere"
    assert message in declined(["evaluate", "--n", "0", "--out", str(tmp_path / "link")])


def test_a_name_that_is_too_long_is_refused_in_a_line_and_the_longest_is_written(tmp_path, declined):
    long = "a" * 256
    for place in (long, f"{long}/run", "/".join(["deep"] * 1000), "not UTF-8: \udce9"):
        (line,) = declined(["score", "--n", "2", "--out", str(tmp_path / place)]).splitlines()
        assert "give a name of parts of at most 255 bytes" in line
    for name in ("ä" * 127, "a" * 255):
        table(1.0).save(tmp_path / name)
        assert Table.load(tmp_path / name).frame["value"].tolist() == [1.0]
        with replacing(tmp_path / name / name) as path:
            path.write_text("whole")
    refused("at most 255 bytes", table(1.0).save, tmp_path / long)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_numbered_folder_of_a_killed_run_is_given_again_and_that_of_a_live_one_is_not(tmp_path):
    runs = tmp_path / "runs"
    with results_folder(None, runs, overwrite=False) as live:
        (runs / "0002" / ".01234567.partial").mkdir(parents=True)  # what a killed run leaves
        with results_folder(None, runs, overwrite=False) as second:
            assert (live.folder.name, second.folder.name) == ("0001", "0002")
            write(second.new, NEW)
        write(live.new, OLD)
    assert read(runs / "0001") == OLD and read(runs / "0002") == NEW
    finish_moves(runs / "0001")
    assert sorted(path.name for path in runs.iterdir()) == ["0001", "0002", "latest"]
    (runs / "0001" / "latest").mkdir()
    refused("is a folder, where a link", results_folder(None, runs / "0001", overwrite=False).__enter__)


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("writable", [True, False])
def test_the_second_of_two_runs_with_one_folder_is_told_so_before_it_starts(tmp_path, monkeypatch, existed, writable):
    """By any name of the folder; where its parent cannot be written too, if the folder is there."""
    home = tmp_path / "home"
    out = home / "a" / "out"
    if existed:
        write(out, OLD | {"provenance.json": table(0.0).provenance.to_json()})
    before = read(home) if existed else {}
    (tmp_path / "link").symlink_to(out)
    if not writable:
        claimed = cli_folders.claimed
        refused = PermissionError(errno.EACCES, "no")

        def within_alone(path: Path) -> Any:
            if path == out:
                raise refused
            return claimed(path)

        monkeypatch.setattr(cli_folders, "claimed", within_alone)
    started = []
    with results_folder(out, tmp_path, overwrite=True) as first:
        if existed or writable:
            for name in (out, tmp_path / "link"):
                with (
                    pytest.raises(ValueError, match=r"another run is writing to .*give another --out"),
                    results_folder(name, tmp_path, overwrite=True),
                ):
                    started.append(name)
        write(first.new, NEW)
    assert not started and read(out) == NEW
    with pytest.raises(KeyboardInterrupt), results_folder(home / "b" / "out", tmp_path, overwrite=False):
        raise KeyboardInterrupt
    assert not (home / "b").exists() and {*before} <= {*read(home)}


def test_names_of_a_move_that_was_cut_off_stay_in_their_folder(tmp_path):
    """A hidden folder that someone else has made, or a link to one, takes no file of others away."""
    for name, folder in (("names", tmp_path / "out"), ("link", tmp_path / "linked")):
        complete = folder / ".01234567.complete" if name == "names" else tmp_path / "theirs"
        write(complete, {"table.csv": "x", ".going": "../precious"})
        (complete / ".old").mkdir()
        write(tmp_path, {"precious": name})
        folder.mkdir(exist_ok=True)
        if name == "link":
            (folder / ".01234567.complete").symlink_to(complete)
        finish_moves(folder)
        assert (tmp_path / "precious").read_text() == name
    assert (tmp_path / "theirs" / "table.csv").read_text() == "x"


@pytest.mark.parametrize(("existed", "moment"), [(False, 0), *((True, moment) for moment in range(4))])
def test_of_two_runs_whose_results_move_in_at_once_one_is_kept_whole(tmp_path, monkeypatch, existed, moment):
    """Whichever rename of the first the second comes before: it waits for a move that has begun."""
    folder, rename, renames, written, go = tmp_path / "out", Path.rename, iter(range(100)), Event(), Event()
    if existed:
        write(folder, OLD)

    def save() -> None:
        with replacing_in(folder) as new:
            write(new, dict.fromkeys(NEW, "second"))
            written.set()
            go.wait(5)

    second = Thread(target=save)

    def interrupted(path: Path, target: Path) -> Path:
        if current_thread() is main_thread() and next(renames) == moment:
            go.set()
            second.join(0.5)
        return rename(path, target)

    with replacing_in(folder) as new:
        second.start()
        assert written.wait(5)
        monkeypatch.setattr(Path, "rename", interrupted)
        write(new, NEW)
    second.join()
    assert read(folder) == dict.fromkeys(NEW, "second" if existed else "new")


def test_a_table_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    table(1.0).save(tmp_path)
    later, read_csv = [replace(table(2.0), provenance=Provenance("later"))], pd.read_csv

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if later:
            later.pop().save(tmp_path)  # the provenance has been read
        return read_csv(*args, **kwargs)

    monkeypatch.setattr(pd, "read_csv", replaced)
    kept = Table.load(tmp_path)
    assert (kept.provenance.verb, kept.frame["value"].item()) == ("later", 2.0)
