"""How threads share a kernel's items: each item once, in multiples of the step, and whoever is fast does more of them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from whet.backends.cpu import threads
from whet.tactics.cpu._llvm import jit

if jit.available():
    pytest.skip(jit.available() or "", allow_module_level=True)

WORDS = ("counts", "starts", "who", "work", "items", "share", "ask")
IR = f"""
{jit.opening("count_items", WORDS, "items")}
  %f = inttoptr i64 %ask to i32 ()*
  %me = call i32 %f()
  %counts.i = inttoptr i64 %counts to i32*
  %starts.i = inttoptr i64 %starts to i32*
  %who.i = inttoptr i64 %who to i32*
  %begun = getelementptr i32, i32* %starts.i, i64 %from
  %old.starts = atomicrmw add i32* %begun, i32 1 monotonic
  %slow = icmp eq i32 %me, 1
  %turns = select i1 %slow, i64 %work, i64 1
  br label %next
next:
  %i = phi i64 [ %from, %start ], [ %i1, %done ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %item, label %over
item:
  %at = getelementptr i32, i32* %counts.i, i64 %i
  %old = atomicrmw add i32* %at, i32 1 monotonic
  %mine = getelementptr i32, i32* %who.i, i64 %i
  store i32 %me, i32* %mine
  br label %turn
turn:
  %t = phi i64 [ 0, %item ], [ %t1, %turn ]
  call void asm sideeffect "", "~{{memory}}"()
  %t1 = add i64 %t, 1
  %again = icmp slt i64 %t1, %turns
  br i1 %again, label %turn, label %done
done:
  %i1 = add i64 %i, 1
  br label %next
over:
  ret void
}}
"""


class Dealt:
    """A launch that counts how often each item is worked on, where chunks begin and by whom it was done; thread 1 takes `work` turns for an item."""

    def __init__(self, items: int, count: int, step: int = 1, work: int = 1):
        self.counts, self.starts, self.who = (np.zeros(items + 1, np.int32) for _ in range(3))
        share = -(-items // (count * step)) * step
        ask = threads.address("omp_get_thread_num")
        words = [self.counts.ctypes.data, self.starts.ctypes.data, self.who.ctypes.data, work, items, share, ask]
        self.call = jit.ParallelCall(jit.address(IR, "count_items"), words, {0: ("input", 0)}, count, "counts", step=step)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [1, 3, 16])
def test_every_item_is_dealt_once_in_multiples_of_the_step(count, step):
    for items in (1, 2, 5, 15, 16, 17, 63, 100, 1000):
        dealt = Dealt(items, count, step, work=50)
        for _ in range(20):
            dealt.call.run()
        assert (dealt.counts[:items] == 20).all()
        assert dealt.counts[items] == 0
        assert not np.flatnonzero(dealt.starts)[np.flatnonzero(dealt.starts) % step != 0].size


def test_what_two_threads_reach_for_at_once_one_gets():
    dealt = Dealt(64, 2, work=40)
    for _ in range(30_000):
        dealt.call.run()
    assert (dealt.counts[:64] == 30_000).all()


def test_a_slow_thread_leaves_its_items_to_the_others():
    dealt = Dealt(4000, 2, work=200_000)
    dealt.call.run()
    done = np.bincount(dealt.who[:4000], minlength=2)
    assert done[1] < 1700  # of a share of 2000; it takes half of that, and meanwhile the other does the rest
    assert done.sum() == 4000


def test_fewer_threads_than_were_asked_for_do_everything():
    """libgomp may have no more to give; shares dealt once for all would leave the others' items undone."""
    dealt = Dealt(100, 4)
    function, context = dealt.call.native[1:3]
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(function)(context)  # the calling thread alone
    assert (dealt.counts[:100] == 1).all()


def test_operands_are_pointed_anew():
    dealt, other = Dealt(10, 2), np.zeros(11, np.int32)
    dealt.call.point("input", 0, other.ctypes.data)
    dealt.call.run()
    assert other.sum() == 10
    assert not dealt.counts.any()
