"""Kernels compiled by processes beside this one: the same code, the compiler's words; ones that die, cannot be started, have nothing to do."""

import subprocess
import sys
import time

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import compile as compiler
from whet.backends.cuda import compile_workers
from whet.backends.cuda.compile import FLAGS, compile_ahead, compile_cubin, compile_here
from whet.backends.cuda.compile_workers import Worker, Workers
from whet.errors import BackendError

try:
    compiler.nvrtc()
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.f; }'


def never(*_):
    pytest.fail("the process compiles")


@pytest.fixture
def worker():
    made = Worker(never)
    yield made
    made.end()


def test_a_process_gives_the_code_that_this_one_does_or_the_compilers_words(worker):
    want = compile_here(KERNEL, "twice.cu", "sm_90a", FLAGS)
    assert worker.compile(KERNEL, "twice.cu", "sm_90a", FLAGS) == want
    with pytest.raises(BackendError, match=r"(?s)twice\.cu does not compile for sm_90a.*no_such_name"):
        worker.compile(KERNEL.replace("2.f", "no_such_name"), "twice.cu", "sm_90a", FLAGS)
    assert worker.compile(KERNEL, "twice.cu", "sm_90a", FLAGS) == want, "an error is no end"


def test_a_process_that_dies_is_missed_by_nobody(worker):
    worker.compile(KERNEL, "twice.cu", "sm_90a", FLAGS)
    asked = []
    worker.otherwise = lambda *a: asked.append(a) or b"code"
    worker.process.kill()
    for _ in range(2):
        assert worker.compile(KERNEL, "twice.cu", "sm_90a", FLAGS) == b"code"
    assert asked == [(KERNEL, "twice.cu", "sm_90a", FLAGS)] * 2


def test_where_no_process_can_be_started_this_one_compiles(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert Worker(lambda *a: b"code").compile(KERNEL, "twice.cu", "sm_90a", FLAGS) == b"code"


def test_processes_end_when_nothing_is_asked_and_begin_again(monkeypatch):
    monkeypatch.setattr(compile_workers, "IDLE_S", 0.2)
    started, real = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    pool = Workers(1, never)
    for turn in (1, 2):
        futures = [pool.submit(lambda compiled, name: compiled(KERNEL, name, "sm_90a", FLAGS), f"{i}.cu") for i in range(2)]
        assert len({f.result(60) for f in futures}) == 1
        assert len(started) == turn, "one process for both"
        assert started[-1].wait(20) == 0
    pool.end()
    assert all(p.returncode == 0 for p in started)


def test_what_is_compiled_ahead_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CUDA_CACHE", str(tmp_path / "kernels"))
    kernel = KERNEL.replace("2.f", f"{time.time()}f")
    compile_ahead([kernel, "no kernel"])
    assert compile_cubin(kernel) == compile_here(kernel, "kernel.cu", "sm_90a", FLAGS)
    assert len(list((tmp_path / "kernels").iterdir())) == 1, "in the cache since"
    with pytest.raises(BackendError, match="does not compile"):
        compile_cubin("no kernel")
    compiler.workers().end()
