"""Max pooling in blocks of 16 channels, as LLVM IR: a plane along its rows, and what that gives along its columns.

The largest number of a window is that of its rows' largest ones, so k x k numbers are 2 k. A place beside the image is read as the image's edge,
which lies in the same window as long as padding is smaller than the window: it changes nothing, and every place of the result is computed alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.ir import FLOATS, WIDE, least, load, moved, store, vector

WORDS = ("source", "target", "scratch", "height", "width", "rows", "columns", "planes", "share")
"""The context: addresses; sizes of the image and of the result; images * blocks of 16 channels; how many of these a thread takes."""
_LOWEST = vector([float(np.finfo(np.float32).min)] * WIDE)


@dataclass(frozen=True)
class Axis:
    """How windows lie along rows or columns."""

    window: int
    stride: int
    pad: int  # before the first


@cache
def pool_ir(down: Axis, across: Axis) -> str:
    """`pool(context)`. A NaN loses against a number, and the lowest finite number stands where there is none (_declared.KERNELS)."""
    return f"""
{_along("across", across)}
{_along("down", down)}
{jit.opening("pool", WORDS, "planes")}
  %source.f = inttoptr i64 %source to float*
  %target.f = inttoptr i64 %target to float*
  %scratch.f = inttoptr i64 %scratch to float*
  %in.line = mul i64 %width, {WIDE}
  %in.plane = mul i64 %height, %in.line
  %line = mul i64 %columns, {WIDE}
  %between = mul i64 %height, %line
  %plane = mul i64 %rows, %line
  %last.column = sub i64 %width, 1
  %last.row = sub i64 %height, 1
  br label %next
next:
  %i = phi i64 [ %from, %start ], [ %i1, %one ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %one, label %over
one:
{moved("x", "source.f", "%i", "%in.plane")}
{moved("between.p", "scratch.f", "%i", "%between")}
{moved("y", "target.f", "%i", "%plane")}
  call void @across(float* %x, float* %between.p, i64 %columns, i64 %height, i64 {WIDE}, i64 %in.line, i64 {WIDE}, i64 %line, i64 %last.column)
  call void @down(float* %between.p, float* %y, i64 %rows, i64 %columns, i64 %line, i64 {WIDE}, i64 %line, i64 {WIDE}, i64 %last.row)
  %i1 = add i64 %i, 1
  br label %next
over:
  ret void
}}
"""


def _along(name: str, axis: Axis) -> str:
    """`name`: `count` places along an axis, each for `lines` of the other one. Neighbours lie `x.step` and `y.step` floats apart along the axis,
    `x.line` and `y.line` along the other; `last` is the last place of what is read."""
    places, reads, at = [], [], _LOWEST
    for k in range(axis.window):
        places += [
            f"  %want{k} = add i64 %begin, {k}",
            least(f"low{k}", f"%want{k}", 0, larger=True),
            least(f"place{k}", f"%low{k}", "%last"),
            moved(f"p{k}", "x", f"%place{k}", "%x.step"),
        ]
        reads += [
            load(f"v{k}", f"p{k}", "%x.at"),
            f"  %more{k} = fcmp ogt {FLOATS} %v{k}, {at}",
            f"  %m{k} = select <{WIDE} x i1> %more{k}, {FLOATS} %v{k}, {FLOATS} {at}",
        ]
        at = f"%m{k}"
    newline = "\n"
    return f"""
define internal void @{name}(float* %x, float* %y, i64 %count, i64 %lines, i64 %x.step, i64 %x.line, i64 %y.step, i64 %y.line, i64 %last) noinline {{
start:
  br label %each
each:
  %i = phi i64 [ 0, %start ], [ %i1, %done ]
  %first = mul i64 %i, {axis.stride}
  %begin = sub i64 %first, {axis.pad}
{newline.join(places)}
{moved("y.i", "y", "%i", "%y.step")}
  br label %line
line:
  %j = phi i64 [ 0, %each ], [ %j1, %line ]
  %x.at = mul i64 %j, %x.line
  %y.at = mul i64 %j, %y.line
{newline.join(reads)}
{store(at, "o", "y.i", "%y.at")}
  %j1 = add i64 %j, 1
  %j.more = icmp slt i64 %j1, %lines
  br i1 %j.more, label %line, label %done
done:
  %i1 = add i64 %i, 1
  %i.more = icmp slt i64 %i1, %count
  br i1 %i.more, label %each, label %over
over:
  ret void
}}"""
