"""How threads share a kernel's items: each has a run of its own, which it works off by halves of what is left, and then helps the others.

Equal shares make all threads wait for the slowest: a core that others use, or that a hypervisor slows for a while. Halves keep what a thread
works on together (it reads what it wrote in the layer before), and leave little for the end, when whoever is done takes half of what another
has left. How far each run is taken is a number in memory that threads change atomically, in a cache line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LINE = 8  # words of a cache line
_PARTS = 64  # of a run: less is not taken at once

# In front of a context, in words of 64 bits: the line [-8, 0) with the threads (-1), what chunks are a multiple of (-2) and the address of the
# function that gives a thread's number (-3); before it a line for each thread, [-16, -8) for the first: how many items of its run are taken.
_DEAL = """
define void @<NAME>(i64* %context) {
start:
  %threads.p = getelementptr i64, i64* %context, i64 -1
  %threads = load i64, i64* %threads.p
  %whole.p = getelementptr i64, i64* %context, i64 <WHOLE>
  %whole = load i64, i64* %whole.p
  %several = icmp sgt i64 %threads, 1
  br i1 %several, label %deal, label %alone
alone:
  call void @<NAME>.part(i64* %context, i64 0, i64 %whole)
  ret void
deal:
  %step.p = getelementptr i64, i64* %context, i64 -2
  %step = load i64, i64* %step.p
  %share.p = getelementptr i64, i64* %context, i64 <SHARE>
  %share = load i64, i64* %share.p
  %ask.p = getelementptr i64, i64* %context, i64 -3
  %ask = load i64, i64* %ask.p
  %f = inttoptr i64 %ask to i32 ()*
  %own = call i32 %f()
  %me = sext i32 %own to i64
  %parts = mul i64 %step, <PARTS>
  %share.steps = udiv i64 %share, %parts
  %share.some = icmp ugt i64 %share.steps, 1
  %least.steps = select i1 %share.some, i64 %share.steps, i64 1
  %least = mul i64 %least.steps, %step
  br label %run
run:
  %v = phi i64 [ 0, %deal ], [ %v1, %empty ]
  %more = icmp slt i64 %v, %threads
  br i1 %more, label %open, label %over
open:
  %turned = add i64 %me, %v
  %whose = urem i64 %turned, %threads
  %first = mul i64 %whose, %share
  %upto = add i64 %first, %share
  %late = icmp sgt i64 %upto, %whole
  %last = select i1 %late, i64 %whole, i64 %upto
  %size = sub i64 %last, %first
  %back = mul i64 %whose, -8
  %place = sub i64 %back, 16
  %taken.p = getelementptr i64, i64* %context, i64 %place
  br label %look
look:
  %taken = load atomic i64, i64* %taken.p monotonic, align 8
  %left = sub i64 %size, %taken
  %some = icmp sgt i64 %left, 0
  br i1 %some, label %take, label %empty
take:
  %half = lshr i64 %left, 1
  %steps = udiv i64 %half, %step
  %even = mul i64 %steps, %step
  %little = icmp slt i64 %even, %least
  %wanted = select i1 %little, i64 %least, i64 %even
  %scarce = icmp sgt i64 %wanted, %left
  %count = select i1 %scarce, i64 %left, i64 %wanted
  %then = add i64 %taken, %count
  %got = cmpxchg i64* %taken.p, i64 %taken, i64 %then monotonic monotonic
  %mine = extractvalue { i64, i1 } %got, 1
  br i1 %mine, label %work, label %look
work:
  %a = add i64 %first, %taken
  %b = add i64 %first, %then
  call void @<NAME>.part(i64* %context, i64 %a, i64 %b)
  br label %look
empty:
  %v1 = add i64 %v, 1
  br label %run
over:
  ret void
}
"""

_TEAM = """
define void @team(i64 %function, i64 %word, i32 %threads, i64 %flags) {
start:
  %context = inttoptr i64 %word to i64*
  %count = zext i32 %threads to i64
  br label %line
line:
  %k = phi i64 [ 0, %start ], [ %k1, %line ]
  %back = mul i64 %k, -8
  %place = sub i64 %back, 16
  %taken = getelementptr i64, i64* %context, i64 %place
  store i64 0, i64* %taken
  %k1 = add i64 %k, 1
  %more = icmp slt i64 %k1, %count
  br i1 %more, label %line, label %fork
fork:
  %gomp = inttoptr i64 <GOMP> to void (i64, i64, i32, i32)*
  call void %gomp(i64 %function, i64 %word, i32 %threads, i32 0)
  ret void
}
"""


def dealt(name: str, words: Sequence[str], whole: str) -> str:
    """IR of `void name(i64* context)`: calls `name.part(context, from, end)` for what its thread takes of `whole` items.

    `words` name what the context holds, in order: `whole` and `share` (items of a thread's run) are among them.
    """
    ir = _DEAL.replace("<NAME>", name).replace("<PARTS>", str(_PARTS))
    return ir.replace("<WHOLE>", str(words.index(whole))).replace("<SHARE>", str(words.index("share")))


def team_ir(gomp_parallel: int) -> str:
    """IR of `void team(function, context, threads, 0)`: nothing is taken, then `function(context)` on so many threads by libgomp's function."""
    return _TEAM.replace("<GOMP>", str(gomp_parallel))


def context_of(words: Sequence[int], threads: int, step: int, ask: int) -> np.ndarray:
    """A context with what stands in front of it; it begins at a multiple of a cache line. Items are taken in multiples of `step`; `ask` is the
    address of the function that gives a thread's number."""
    front = _LINE * (threads + 1)
    memory = np.zeros(front + len(words) + _LINE, np.int64)
    start = front + -(memory.ctypes.data // memory.itemsize) % _LINE
    memory[start - 3 : start] = ask, step, threads
    context = memory[start : start + len(words)]
    context[:] = words
    return context
