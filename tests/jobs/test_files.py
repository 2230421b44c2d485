"""Files are whole or absent."""

from pathlib import Path

import pytest
from refusals import refused

from align_circuits.jobs.files import inside, replacing, writable_folder


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    for text in ("first", "second"):
        with replacing(path) as temporary:
            temporary.write_text(text)
            assert temporary.parent == path.parent, "a rename is atomic only within a file system"
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    assert names(path.parent) == ["a.txt"]


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"), replacing(path) as temporary:
        temporary.write_text("ne")
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_is_made_and_left_empty(tmp_path):
    assert writable_folder(tmp_path / "new" / "out") == tmp_path / "new" / "out"
    assert names(tmp_path / "new" / "out") == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/out"):
        refused("cannot write results to", writable_folder, place)


@pytest.mark.parametrize("name", ["../outside", "link/a", "link", "/etc"])
def test_nothing_leads_out_of_a_folder(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "within").symlink_to(folder)
    refused("leads out of its folder, to", inside, folder, name)
    assert inside(folder, "within/a") == folder / "within/a"
    (tmp_path / "home").symlink_to(folder)
    assert inside(tmp_path / "home", "a") == tmp_path / "home/a", "the folder itself may be a link"
