"""How threads share a kernel's items: each has a range of its own, takes half of what is left of it at a time, and then steals from the others.

Equal shares make all threads wait for the slowest: a core that others use, or that a hypervisor slows for a while. Taking halves keeps the items that
one thread works on adjacent (it reads what it wrote in the layer before), and leaves little for the end, when a thread that has finished takes
half of what another one has left. How many items of each range are taken is a counter in memory, in a cache line of its own, that threads change
atomically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from whet.tactics.cpu._llvm.builder import INT32, INT64, Function, Module, Pointer, Value

_LINE = 8  # words of a cache line
PARTS = 64  # of a range: a thread takes no less than one of them

# In front of a context, in words of 64 bits: the line [-8, 0) with the number of threads, what parts are a multiple of, and the address of the
# function that gives a thread's index; before it a line for each thread, [-16, -8) for the first one: how many items of its range are taken.
_THREADS, _STEP, _THREAD_INDEX = -1, -2, -3


@contextmanager
def parallel_kernel(module: Module, name: str, words: Sequence[str], items: str) -> Iterator[tuple[Function, SimpleNamespace]]:
    """`void name(i64* context)`, which shares the context's number of `items` among threads, and the body of `range_function`, to be emitted.

    `words` name what the context holds, in order: `items` and "share" (items of a thread's range) are among them.
    """
    with range_function(module, name, words) as (part, values):
        yield part, values
    with module.function(name, ["i64*"], internal=False) as f:
        _steal(f, part, words.index(items), words.index("share"))


@contextmanager
def range_function(module: Module, name: str, words: Sequence[str]) -> Iterator[tuple[Function, SimpleNamespace]]:
    """`void name.part(i64* context, i64 begin, i64 end)`, which works on some items. Gives the context's words as values, with `begin` and `end`."""
    with module.function(f"{name}.part", ["i64*", "i64", "i64"]) as f:
        context, begin, end = f.arguments
        assert isinstance(context, Pointer)
        values = {word: context.load(k) for k, word in enumerate(words)}
        yield f, SimpleNamespace(**values, context=context, begin=begin, end=end)


def thread_index(f: Function, context: Pointer) -> Value:
    """The index of the running thread, as i64."""
    return f.call_address(context.load(_THREAD_INDEX), INT32).convert("sext", INT64)


def thread_count(context: Pointer) -> Value:
    return context.load(_THREADS)


def _steal(f: Function, part: Function, items_word: int, share_word: int) -> None:
    (context,) = f.arguments
    assert isinstance(context, Pointer)
    threads, items = thread_count(context), context.load(items_word)
    with f.when(threads < 2):
        f.call(part, context, 0, items)
        f.returns()
    step, share = context.load(_STEP), context.load(share_word)
    me = thread_index(f, context)
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


def team_ir(gomp_parallel: int) -> str:
    """IR of `void team(function, context, threads, 0)`: resets the counters, then runs `function(context)` on so many threads of libgomp."""
    module = Module()
    with module.function("team", ["i64", "i64", "i32", "i64"], internal=False) as f:
        function, word, threads, _ = f.arguments
        context = word.as_pointer(INT64)
        with f.loop(0, threads.convert("zext", INT64), at_least_once=True) as lines:
            context.store(0, lines.index * -_LINE - 2 * _LINE)
        f.call_address(f.value(gomp_parallel), None, function, word, threads, f.value(0, INT32))
    return str(module)


def context_of(words: Sequence[int], threads: int, step: int, thread_index: int) -> np.ndarray:
    """A context with its header, aligned to a cache line. Items are taken in multiples of `step`; `thread_index` is the address of the function that
    gives a thread's index."""
    front = _LINE * (threads + 1)
    memory = np.zeros(front + len(words) + _LINE, np.int64)
    start = front + -(memory.ctypes.data // memory.itemsize) % _LINE
    memory[start + _THREAD_INDEX : start] = thread_index, step, threads
    context = memory[start : start + len(words)]
    context[:] = words
    return context
