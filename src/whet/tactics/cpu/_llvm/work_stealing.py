"""Work stealing: each thread has its own range of a kernel's items, takes half of the rest of the range at a time, and then steals from other ranges.

With equal static shares all threads wait for the slowest: a core with other load, or one slowed by the hypervisor. Taking halves keeps the items of
one thread adjacent (it reads values that it wrote in the layer before), and leaves small remainders for the end, when a finished thread takes half of
the rest of another range. The number of taken items of each range is an atomic counter in its own cache line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from whet.tactics.cpu._llvm.builder import INT32, INT64, Function, Module, Pointer, Value

_LINE = 8  # words of a cache line
PARTS = 64  # of a range: the minimum that a thread takes is one part

# Header before a context, in 64-bit words: the cache line [-8, 0) with the number of threads, the step that parts are multiples of, and the address
# of the function that returns a thread's index; before it one line per thread, [-16, -8) for the first, with the counter of taken items.
_THREADS, _STEP, _THREAD_INDEX = -1, -2, -3


@contextmanager
def parallel_kernel(module: Module, name: str, words: Sequence[str], items: str) -> Iterator[tuple[Function, SimpleNamespace]]:
    """`void name(i64* context)`, which shares the context's `items` among threads; the yielded `range_function` is to be emitted.

    `words` are the names of the context's words in order, including `items` and "share" (items of a thread's range).
    """
    with range_function(module, name, words) as (part, values):
        yield part, values
    share_items(module, name, part.name, words, items)


def share_items(module: Module, name: str, part: str, words: Sequence[str], items: str) -> None:
    """`void name(i64* context)`, which calls `void part(i64* context, i64 begin, i64 end)` for all of the context's `items`, shared among threads."""
    with module.function(name, ["i64*"], internal=False) as f:
        _steal(f, part, words.index(items), words.index("share"))


@contextmanager
def range_function(module: Module, name: str, words: Sequence[str]) -> Iterator[tuple[Function, SimpleNamespace]]:
    """`void name.part(i64* context, i64 begin, i64 end)`, for the items [begin, end). Yields the context's words, `begin` and `end` as values."""
    with module.function(f"{name}.part", ["i64*", "i64", "i64"]) as f:
        context, begin, end = f.arguments
        assert isinstance(context, Pointer)
        values = {word: context.load(k) for k, word in enumerate(words)}
        yield f, SimpleNamespace(**values, context=context, begin=begin, end=end)


def emit_thread_index(f: Function, context: Pointer) -> Value:
    """The index of the running thread, as i64."""
    return f.call_address(context.load(_THREAD_INDEX), INT32).convert("sext", INT64)


def emit_thread_count(context: Pointer) -> Value:
    return context.load(_THREADS)


def _steal(f: Function, part: str, items_word: int, share_word: int) -> None:
    (context,) = f.arguments
    assert isinstance(context, Pointer)
    threads, items = emit_thread_count(context), context.load(items_word)
    with f.when(threads < 2):
        f.call(part, context, 0, items)
        f.returns()
    step, share = context.load(_STEP), context.load(share_word)
    me = emit_thread_index(f, context)
    least = f.maximum(share // (step * PARTS), 1) * step
    with f.loop(0, threads) as victims:
        victim = (me + victims.index) % threads
        first = victim * share
        size = f.minimum(first + share, items) - first
        counter = context.at(victim * -_LINE - 2 * _LINE)
        with f.forever() as leave_unless:
            taken = f.atomic_load(counter)
            left = size - taken
            leave_unless(left > 0)
            half = (left >> 1) // step * step
            count = f.minimum(f.maximum(half, least), left)
            following = taken + count
            with f.when(f.compare_and_swap(counter, taken, following)):
                f.call(part, context, first + taken, first + following)


def emit_team_ir() -> str:
    """IR of `void team(function, context, threads, parallel)`: resets the counters, then runs `function(context)` on `threads` threads by
    GOMP_parallel, whose address is `parallel`."""
    module = Module()
    with module.function("team", ["i64", "i64", "i32", "i64"], internal=False) as f:
        function, word, threads, parallel = f.arguments
        context = word.as_pointer(INT64)
        with f.loop(0, threads.convert("zext", INT64), at_least_once=True) as lines:
            context.store(0, lines.index * -_LINE - 2 * _LINE)
        f.call_address(parallel, None, function, word, threads, f.value(0, INT32))
    return str(module)


def make_context(words: Sequence[int], threads: int, step: int, thread_index: int) -> np.ndarray:
    """A context with its header, aligned to a cache line. Items are taken in multiples of `step`; `thread_index` is the address of the function that
    returns a thread's index."""
    front = _LINE * (threads + 1)
    memory = np.zeros(front + len(words) + _LINE, np.int64)
    start = front + -(memory.ctypes.data // memory.itemsize) % _LINE
    memory[start + _THREAD_INDEX : start] = thread_index, step, threads
    context = memory[start : start + len(words)]
    context[:] = words
    return context
