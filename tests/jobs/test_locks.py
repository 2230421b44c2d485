"""Locks: one holder at a time, none after its end, and no file that nobody holds."""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from forked import FORK

from align_circuits.jobs import locks
from align_circuits.jobs.checkpoint_files import run_folder
from align_circuits.jobs.locks import claimed, is_claimed, locked, shared_folder, written_once


def hold(path: Path) -> None:
    with claimed(path) as mine:
        assert mine
        (path.parent / "held").touch()
        time.sleep(60)


def test_a_claim_is_held_once_and_ends_with_its_process(tmp_path):
    process = FORK.Process(target=hold, args=(tmp_path / "a",))
    process.start()
    limit = time.monotonic() + 60
    while not (tmp_path / "held").exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
    with claimed(tmp_path / "a") as mine:
        assert not mine and is_claimed(tmp_path / "a")
    assert not written_once(tmp_path / "a", Path.touch) and not (tmp_path / "a").exists()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not is_claimed(tmp_path / "a")
    with claimed(tmp_path / "a") as mine:
        assert mine
    assert [path.name for path in tmp_path.iterdir()] == ["held"]


@pytest.mark.parametrize(("change", "waits_for"), [("rename", FileNotFoundError), ("stay", bool)])
def test_who_waits_for_a_folder_gets_the_one_that_stands_there(tmp_path, change, waits_for):
    folder, found = tmp_path / "folder", []
    folder.mkdir()

    def wait() -> None:
        try:
            with locked(folder) as mine:
                found.append(type(mine))
        except FileNotFoundError as error:
            found.append(type(error))

    waiting = threading.Thread(target=wait)
    with locked(folder) as mine:
        assert mine
        with locked(folder, seconds=0.0) as again:
            assert not again
        waiting.start()
        time.sleep(0.2)
        assert not found
        if change == "rename":
            folder.rename(tmp_path / "elsewhere")
    waiting.join(10)
    assert found == [waits_for]


def test_a_folder_that_another_process_clears_away_is_made_anew(tmp_path, monkeypatch):
    folder, tries = tmp_path / "folder", []
    folder.mkdir()
    lock = locks.lock_descriptor

    def removed_meanwhile(handle: int, **options: bool) -> bool:
        tries.append(handle)
        if len(tries) == 1:
            folder.rmdir()
        return lock(handle, **options)

    monkeypatch.setattr(locks, "lock_descriptor", removed_meanwhile)
    with locked(folder, make=lambda path: path.mkdir(exist_ok=True)) as mine:
        assert mine and folder.is_dir() and len(tries) == 2


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def no_locks(*_: int, **__: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks, "lock_descriptor", no_locks)
    with pytest.raises(ValueError, match=r"is on a file system without locks \(No locks available\)"):
        shared_folder(tmp_path)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_lock_is_a_link_to_another_file(tmp_path, link):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = victim.stat().st_mtime_ns
    for lock in (tmp_path / ".lock", tmp_path / ".a.claim"):
        link(victim, lock)
    with pytest.raises(ValueError, match="is a link to another file"), run_folder(tmp_path):
        pass
    with pytest.raises(ValueError, match="is a link to another file"), claimed(tmp_path / "a"):
        pass
    assert victim.read_text() == "precious" and victim.stat().st_mtime_ns == before
    (tmp_path / ".b.claim").symlink_to(tmp_path / "new")  # to nothing
    with pytest.raises(ValueError, match="is a link to another file"), claimed(tmp_path / "b"):
        pass
    assert not (tmp_path / "new").exists()
