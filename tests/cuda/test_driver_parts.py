"""Parts of the CUDA backend that need no GPU: per-context caches, resources of a lost context, profiler ranges, comparison of outputs."""

import sys
from types import SimpleNamespace

import pytest

from whet.backends.cuda import driver, executor, nvtx
from whet.backends.cuda.compare import Difference
from whet.errors import BackendError


class Gpu:
    """The device interface that the caches use."""

    lost = ""


@pytest.fixture
def here(monkeypatch):
    """Sets the current GPU of this thread."""
    current = SimpleNamespace(device=None)
    monkeypatch.setattr(driver, "get_current_device", lambda: current.device)
    return current


def test_modules_are_loaded_per_context(here):
    calls = []

    @driver.per_device
    def load(name, *, shared=0):
        calls.append((name, shared))
        return object()

    here.device = first = Gpu()
    a = load("k", shared=1)
    assert load("k", shared=1) is a
    here.device = Gpu()
    assert load("k", shared=1) is not a
    here.device = first
    assert load("k", shared=1) is a
    assert calls == [("k", 1)] * 2


def test_resources_of_a_lost_context_are_not_freed(here):
    freed = []
    good, lost = SimpleNamespace(lost="", make_current=lambda: None), SimpleNamespace(lost="a kernel failed")
    for owner, handle in ((good, 1), (lost, 2), (None, 3)):
        driver.release(owner, freed.append, handle)
    assert freed == [1, 3]


def test_a_sticky_error_is_recognized_and_marks_its_device(here, monkeypatch):
    class Result:
        CUDA_SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
        CUDA_ERROR_OUT_OF_MEMORY = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")

    binding = SimpleNamespace(CUresult=Result, cuGetErrorString=lambda status: (0, b"words"))
    monkeypatch.setattr(driver, "load_driver", lambda: binding)
    here.device = SimpleNamespace(lost="")
    with pytest.raises(BackendError, match="out of memory") as e:
        driver.check_status((Result.CUDA_ERROR_OUT_OF_MEMORY,))
    assert not isinstance(e.value, driver.LostContext)
    assert here.device.lost == ""
    with pytest.raises(driver.LostContext, match=r"cannot be used again.*new process"):
        driver.check_status((SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS"),))
    assert "ILLEGAL_ADDRESS" in here.device.lost


def test_ranges_carry_the_users_names(monkeypatch):
    seen = []
    fake = SimpleNamespace(push_range=lambda label, domain: seen.append((label, domain)), pop_range=lambda domain: seen.append(domain))
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    nvtx.load_package.cache_clear()
    monkeypatch.delenv("WHET_NVTX", raising=False)
    assert not nvtx.is_enabled()
    monkeypatch.setenv("WHET_NVTX", "0")
    assert not nvtx.is_enabled()
    monkeypatch.setenv("WHET_NVTX", "1")
    assert nvtx.is_enabled()
    with nvtx.range_of("/layer1/conv1/Conv"):
        seen.append("inside")
    assert seen == [("/layer1/conv1/Conv", "whet"), "inside", "whet"]
    nvtx.load_package.cache_clear()
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(BackendError, match="pip install nvtx"):
        nvtx.is_enabled()
    nvtx.load_package.cache_clear()


def test_differences_are_relative_to_the_reference():
    assert Difference(0, 0, 5, 9, 0).relative == 0
    assert Difference(0.1, 0.3, 2, 10, 0).relative == 0.05
    assert Difference(0.1, 0.8, 2, 10, 0).relative == 0.08
    assert Difference(0.1, 0.1, 0, 0, 0).relative == 0.1
    assert Difference(0, 0, 5, 9, 1).relative == float("inf")


class CountedGraph:
    """A graph that notes its captures and replays, with the launches' addresses."""

    def __init__(self, launches, stream):
        self.launches, self.closed = list(launches), False
        self.captured.append(self.launches)

    def run(self, stream):
        assert not self.closed
        self.ran.append(self.launches)

    def close(self):
        self.closed = True


def test_callers_that_alternate_between_buffers_capture_one_graph_for_each(monkeypatch):
    CountedGraph.captured, CountedGraph.ran = [], []
    monkeypatch.setattr(executor, "Graph", CountedGraph)
    monkeypatch.setattr(executor, "Stream", lambda: SimpleNamespace(handle=None))
    monkeypatch.setattr(executor.nvtx, "is_enabled", lambda: False)

    def launches(inputs, outputs):
        return [SimpleNamespace(at=(*inputs, *outputs), on_host=False)]

    call, other = executor.GpuCall(launches, [1], [2]), executor.GpuCall(launches, [2], [3])
    engine = executor.GpuExecutable([call, other], SimpleNamespace(make_current=lambda: None))

    def run(output):
        other.set_address("output", 0, output)
        engine.refresh([other])
        engine.enqueue()
        assert [x.at for x in CountedGraph.ran[-1]] == [(1, 2), (2, output)]

    for output in (10, 11, 10, 11, 10):
        run(output)
    assert len(CountedGraph.captured) == 2
    for output in range(12, 12 + executor.MAX_GRAPHS):
        run(output)
    run(10)  # its graph was the oldest one and is closed
    assert len(CountedGraph.captured) == 2 + executor.MAX_GRAPHS + 1
    assert len(engine.graphs) == executor.MAX_GRAPHS
