"""Files are written completely or not at all."""

import errno
import os
import tracemalloc

import pytest

from whet import zoo
from whet.files import read_bounded, replace_atomically


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


def test_the_longest_name_that_a_file_system_takes(tmp_path):
    target = tmp_path / ("ä" * 127)  # 254 bytes
    with replace_atomically(target) as part:
        part.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


def test_a_small_file_takes_little_memory_whatever_its_limit(tmp_path):
    """`read` allocates what it is asked for: 2 GB for a model of kilobytes, which a process with limited memory does not have."""
    (tmp_path / "small").write_bytes(b"content")
    tracemalloc.start()
    try:
        assert read_bounded(tmp_path / "small", 1 << 31) == b"content"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_pipes_are_read_to_their_end_and_limits_hold(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    assert len(read_bounded(tmp_path / "file", 100)) == 100
    with pytest.raises(OSError, match="more than 99 bytes"):
        read_bounded(tmp_path / "file", 99)
    out, into = os.pipe()
    os.write(into, b"x" * 60_000)
    os.close(into)
    assert read_bounded(f"/dev/fd/{out}", 60_000) == b"x" * 60_000
    os.close(out)
    with pytest.raises(OSError, match="null character"):
        read_bounded("a\0b", 10)


def test_a_model_with_separate_weights_is_kept_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    zoo.save("lenet5", path, external_above=1000)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(before) == {"m.onnx", "m.onnx.data"}
    zoo.save("lenet5", path, external_above=1000)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before

    def fill(model, file, **options):
        (file.parent / options["location"]).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onnx.save", fill)
    with pytest.raises(Exception, match="No space left"):
        zoo.save("lenet5", path, external_above=1000)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
