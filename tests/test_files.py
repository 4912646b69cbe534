"""Files are written completely or not at all."""

import os

import pytest

from whet.files import replace_atomically


def test_the_old_file_is_kept_if_the_new_one_cannot_be_written(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write() -> None:
        with replace_atomically(target) as part:
            part.write_text("new, half")
            raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        write()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_it_takes_the_name_and_keeps_the_usual_permissions(tmp_path):
    (tmp_path / "usual").write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "b.txt")
    with replace_atomically(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert (tmp_path / "b.txt").read_text() == "new"
    assert (tmp_path / "b.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_device_is_written_to_and_not_replaced():
    with replace_atomically("/dev/null") as part:
        part.write_text("gone")
    assert os.path.exists("/dev/null")
    assert not os.path.isfile("/dev/null")
