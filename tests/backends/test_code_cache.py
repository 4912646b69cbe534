"""Compiled code on disk: written once, read afterwards, compiled again if the file is damaged or the folder belongs to another user."""

import contextlib
import ctypes
import dataclasses
import os

import pytest

from whet.backends import _code_cache
from whet.backends.cpu import machine_code
from whet.errors import BackendError
from whet.tactics.cpu._llvm import jit

JIT = pytest.mark.skipif(machine_code.why_no_compiler() is not None, reason=str(machine_code.why_no_compiler()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache for compiled objects."""
    monkeypatch.setenv("WHET_CPU_CACHE", str(tmp_path / "objects"))
    return tmp_path / "objects"


def run(name, number=7, compiled=None, sources="version 1"):
    """The number that a function stores. Each call is a new module to the process, with the key of its name and number in the folder; `compiled`
    receives the numbers of those that are compiled."""

    def make(name, number):
        if compiled is not None:
            compiled.append(number)
        return f"define void @{name}(i64* %a) {{\n  store i64 {number}, i64* %a\n  ret void\n}}\n"

    value = ctypes.c_int64(0)
    address = machine_code.load_function(dataclasses.replace(jit.generate_lazily(make, name, number), sources=sources), name)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(value))
    return value.value


@JIT
def test_code_is_compiled_once(folder):
    compiled = []
    assert run("seven", compiled=compiled) == 7
    (file,) = folder.iterdir()
    assert run("seven", compiled=compiled) == 7
    assert compiled == [7]
    assert list(folder.iterdir()) == [file]


@JIT
@pytest.mark.parametrize("damage", [lambda code: code[: len(code) // 2], lambda code: code[:-8] + b"\0\1\2\3\4\5\6\7", lambda code: b"x"])
def test_damaged_files_are_compiled_again(folder, damage):
    run("again")
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert run("again") == 7


@JIT
def test_folders_that_others_can_write_to_are_not_used(folder):
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    assert run("open") == 7
    assert not list(folder.iterdir())
    with pytest.raises(BackendError, match="WHET_CPU_CACHE"):
        _code_cache.cache_folder("WHET_CPU_CACHE", "objects")


@JIT
def test_text_is_generated_only_for_new_objects(folder):
    compiled = []
    assert [run("kept", n, compiled) for n in (1, 1, 2, 1)] == [1, 1, 2, 1]
    assert compiled == [1, 2]
    assert run("kept", 1, compiled, sources="version 2") == 1
    assert compiled == [1, 2, 1]
    for path in folder.glob("*.o"):
        path.write_bytes(b"damaged")
    assert run("kept", 2) == 2


def test_the_oldest_files_are_deleted(tmp_path):
    for k in range(6):
        path = tmp_path / f"{k}.o"
        path.write_bytes(b"code")
        os.utime(path, (k, k))
    _code_cache.limit_files(tmp_path, 6)
    assert len(list(tmp_path.iterdir())) == 6
    _code_cache.limit_files(tmp_path, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["4.o", "5.o"]


@pytest.mark.parametrize("most", [5, 6])
def test_files_that_another_process_deletes_meanwhile_do_not_count(tmp_path, monkeypatch, most):
    """One of seven files goes between the listing and the look at its time: the six others are limited as if it had never been there."""
    for k in range(7):
        path = tmp_path / f"{k}.o"
        path.write_bytes(b"code")
        os.utime(path, (k, k))
    scan = os.scandir

    @contextlib.contextmanager
    def scan_while_another_deletes(folder):
        with scan(folder) as entries:
            listed = list(entries)
        (tmp_path / "3.o").unlink()
        yield iter(listed)

    monkeypatch.setattr(os, "scandir", scan_while_another_deletes)
    _code_cache.limit_files(tmp_path, most)
    assert sorted(os.listdir(tmp_path)) == (["5.o", "6.o"] if most == 5 else ["0.o", "1.o", "2.o", "4.o", "5.o", "6.o"])
