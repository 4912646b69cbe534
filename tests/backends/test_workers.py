"""Parallel launch lists on the CPU: each worker is one thread, its launches run in order, and a kernel that fails is named."""

import ctypes
import re
import threading

import pytest
from test_cpu import Native, Python

from whet.backends import get_backend
from whet.backends.cpu import loop, machine_code, threads, workers
from whet.errors import BackendError

pytest.importorskip("llvmlite")


def test_every_worker_runs_its_launches_in_order_each_time():
    logs = [[] for _ in range(3)]
    call = get_backend("cpu").parallel_launch([[Native(log, (k, i, 0, 0)) for i in range(5)] for k, log in enumerate(logs)])
    stream = get_backend("cpu").stream()
    stream.record(call)
    executable = stream.finish()
    for _ in range(3):
        executable.run()
    assert logs == [[(k, i, 0, 0) for i in range(5)] * 3 for k in range(3)]


def test_workers_have_threads_of_their_own_and_their_kernels_one():
    seen = set()
    meet = threading.Barrier(2, timeout=60)  # passes only if two workers run at the same time

    class Ask(Native):
        def __init__(self):
            super().__init__(self)

        def append(self, _):
            seen.add((threading.get_ident(), threads.get_threads()))
            meet.wait()

    threads.set_threads(2)
    get_backend("cpu").parallel_launch([[Ask()], [Ask()]]).run()
    assert len(seen) == 2
    assert {count for _, count in seen} == {1}
    assert threads.get_threads() == 2  # of the calling thread
    get_backend("cpu")


def test_all_lists_run_with_fewer_threads(monkeypatch):
    """A program may not start threads from threads, or get fewer than requested."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int32)
    functions = {"omp_get_num_threads": kind(lambda: 1), "omp_get_thread_num": kind(lambda: 0)}
    real = threads.get_gomp_address

    def address(name):
        return ctypes.cast(functions[name], ctypes.c_void_p).value if name in functions else real(name)

    monkeypatch.setattr(threads, "get_gomp_address", address)
    log = []
    get_backend("cpu").parallel_launch([[Native(log, (k, 0, 0, 0))] for k in range(4)]).run()
    assert {words[0] for words in log} == {0, 1, 2, 3}


def test_a_kernel_that_fails_on_a_worker_is_named():
    class Broken(Native):
        implementation = "broken:kernel"

    log = []
    stream = get_backend("cpu").stream()
    stream.record(get_backend("cpu").parallel_launch([[Native(log)], [Native(log), Broken(log, status=3), Native(log)]]))
    with pytest.raises(BackendError, match="broken:kernel"):
        stream.finish().run()
    assert len(log) == 3  # its successor in the list did not run


def test_python_kernels_are_refused_by_name():
    assert "Python runs in Python" in workers.why_not_parallel([Native([]), Python([], "x")])
    with pytest.raises(BackendError, match="Python runs in Python"):
        get_backend("cpu").parallel_launch([[Python([], "x")]])


def test_without_a_compiler_there_are_no_workers(monkeypatch):
    monkeypatch.setattr(workers, "why_no_compiler", lambda: "llvmlite is not installed")
    assert workers.why_not_parallel([]) == "llvmlite is not installed"


@pytest.mark.parametrize("text", ["i32 ()*", "i64 (i64*, i64)*", "void (i64, i64, i32, i32)*", "void (i64*)*", "i64*"])
def test_the_code_has_opaque_pointers_for_newer_compilers(text):
    assert text in workers.IR
    assert machine_code.use_opaque_pointers(text) == "ptr"
    assert not re.search(r"\w\*|\)\*", machine_code.use_opaque_pointers(workers.IR + loop.IR))
