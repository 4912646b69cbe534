"""Work stealing between threads of a kernel: each item is processed once, in multiples of the step, and faster threads process more."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import INT32, Module
from whet.tactics.cpu._llvm.work_stealing import emit_thread_index, parallel_kernel

if jit.why_unavailable():
    pytest.skip(jit.why_unavailable() or "", allow_module_level=True)

WORDS = ("counts", "starts", "who", "work", "items", "share")


def counting_ir():
    """`count_items(context)` counts how often each item is processed, and by which thread; thread 1 spends `work` iterations per item."""
    module = Module()
    with parallel_kernel(module, "count_items", WORDS, "items") as (f, w):
        thread = emit_thread_index(f, w.context)
        counts, starts, who = (word.as_pointer(INT32) for word in (w.counts, w.starts, w.who))
        add_one(f, starts.at(w.begin))
        iterations = f.select(thread.equals(1), w.work, 1)
        with f.loop(w.begin, w.end) as items:
            add_one(f, counts.at(items.index))
            who.store(thread.convert("trunc", INT32), items.index)
            with f.loop(0, iterations, at_least_once=True):
                f.scheduling_barrier()
    return str(module)


def add_one(f, pointer):
    f.emit(INT32, f"atomicrmw add {pointer}, {f.value(1, INT32)} monotonic", pointer)


class Dealt:
    """A launch that records how often each item is processed, where chunks begin and by which thread; thread 1 spends `work` iterations per item."""

    def __init__(self, items: int, count: int, step: int = 1, work: int = 1):
        self.counts, self.starts, self.who = (np.zeros(items + 1, np.int32) for _ in range(3))
        share = -(-items // (count * step)) * step
        words = [self.counts.ctypes.data, self.starts.ctypes.data, self.who.ctypes.data, work, items, share]
        self.call = jit.ParallelCall(jit.load_function(counting_ir(), "count_items"), words, {0: ("input", 0)}, count, "counts", step=step)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [1, 3, 16])
def test_every_item_is_processed_once_in_multiples_of_the_step(count, step):
    for items in (1, 2, 5, 15, 16, 17, 63, 100, 1000):
        dealt = Dealt(items, count, step, work=50)
        for _ in range(20):
            dealt.call.run()
        assert (dealt.counts[:items] == 20).all()
        assert dealt.counts[items] == 0
        assert not np.flatnonzero(dealt.starts)[np.flatnonzero(dealt.starts) % step != 0].size


def test_one_of_two_competing_threads_gets_a_chunk():
    dealt = Dealt(64, 2, work=40)
    for _ in range(30_000):
        dealt.call.run()
    assert (dealt.counts[:64] == 30_000).all()


def test_a_slow_thread_leaves_its_items_to_the_others():
    dealt = Dealt(4000, 2, work=200_000)
    dealt.call.run()
    done = np.bincount(dealt.who[:4000], minlength=2)
    assert done[1] < 1700  # of its half, 2000; it processes half of that while the other does the rest
    assert done.sum() == 4000


def test_fewer_threads_than_requested_process_everything():
    """libgomp may have fewer threads to give; a static partition would leave the items of missing threads undone."""
    dealt = Dealt(100, 4)
    function, context = dealt.call.native[1:3]
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(function)(context)  # only the calling thread
    assert (dealt.counts[:100] == 1).all()


def test_operands_can_be_bound_to_other_buffers():
    dealt, other = Dealt(10, 2), np.zeros(11, np.int32)
    dealt.call.set_address("input", 0, other.ctypes.data)
    dealt.call.run()
    assert other.sum() == 10
    assert not dealt.counts.any()
