"""Eviction of memory from the caches, and loading into them: the contents are unchanged, and evicted memory is slower to read."""

from time import perf_counter

import numpy as np
import pytest

from whet.backends import get_backend
from whet.backends.cpu import caches

EVICTS = pytest.mark.skipif(not caches.can_evict(), reason="no clflushopt on this CPU, or no llvmlite")


def seconds(array: np.ndarray) -> float:
    start = perf_counter()
    array.max()
    return perf_counter() - start


@EVICTS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_evicted_memory_is_the_same_and_slower_to_read(threads):
    """A quarter MiB: the L1 cache would hold 64 kB of it, the L2 cache all of it."""
    machine, numbers = get_backend("cpu", threads=threads), np.arange(1 << 15)
    hot = min(seconds(numbers) for _ in range(50))
    cold = []
    for _ in range(50):
        assert machine.evict([(numbers.ctypes.data, numbers.nbytes)])
        cold.append(seconds(numbers))
    assert min(cold) > 1.5 * hot
    assert (numbers == np.arange(1 << 15)).all()


@EVICTS
def test_all_cache_lines_of_the_bytes_are_evicted():
    """Ranges that start and end inside cache lines, of one byte, empty; adjacent bytes are written meanwhile and keep their values."""
    machine, raw = get_backend("cpu", threads=2), np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    before, at = raw.copy(), raw.ctypes.data
    for first, count in [(0, 1), (63, 2), (1, 64), (5, 40_000), (64, 1 << 14), (17, 0)]:
        raw[first] ^= 255
        assert machine.evict([(at + first, count), (at, 3)])
        assert raw[first] == before[first] ^ 255
        raw[first] ^= 255
    assert (raw == before).all()


@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (64, 65), (3, 1 << 16)])
@pytest.mark.parametrize("compiled", [True, False])
def test_arrays_of_all_sizes_are_read(shape, compiled, monkeypatch):
    """Without a compiler too, by the calling thread."""
    if not compiled:
        monkeypatch.setattr(caches, "why_no_compiler", lambda: "no llvmlite")
        assert not caches.can_evict()
    get_backend("cpu", threads=3).warm(np.ones(shape, np.float32))


def test_an_old_cpu_reports_that_it_cannot_evict(monkeypatch):
    """Then the timer walks over other memory (measure/timing.py)."""
    monkeypatch.setattr(caches, "list_cpu_flags", lambda: frozenset({"avx2", "clflush"}))
    assert get_backend("cpu", threads=1).evict([(0, 64)]) is False
