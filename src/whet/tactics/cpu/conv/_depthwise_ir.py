"""Depthwise convolution with SiLU behind it, in blocks of 16 channels, as LLVM IR: a few pixels of a row in registers, taps from the first cache."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.ir import FLOATS as _F
from whet.tactics.cpu._llvm.ir import WIDE, fma, least, load, store
from whet.tactics.cpu._llvm.silu import constants, declarations, silu

TILES = (12, 8, 4)
"""Pixels of a row that are summed together."""
_WORDS = (
    "source", "weights", "target", "height", "width", "rows", "columns", "blocks", "top", "side", "left", "right", "items", "share",
)  # fmt: skip
"""The context: addresses; sizes of the image and of the result; blocks of 16 channels; padding above and beside; the columns of the result from which
and up to which no tap lies beside the image; images * blocks * rows; how many of these a thread takes."""


@cache
def depthwise_ir(window: int, stride: int, pixels: int, estimate: bool) -> str:
    """`depthwise(context)` for `window` x `window` taps and one stride; `pixels`: of a tile; `estimate`: the CPU has AVX-512 (F and DQ).

    A block's weights are its taps, row by row, then its biases, 16 channels each. The columns between `left` and `right` (at least `pixels`) go by
    tiles, the last of which begins so many before the end; those beside them one by one, over the taps that lie within the image.
    """
    newline = "\n"
    starts = newline.join(f"  %s{j} = phi {_F} [ %bias, %tile ], [ %a{window - 1}.{j}, %tile.taps ]" for j in range(pixels))
    inner = []
    for t in range(window):
        inner.append(load(f"w{t}", "w.row", t * WIDE))
        for j in range(pixels):
            inner.append(load(f"x{t}.{j}", "x.row", (j * stride + t) * WIDE))
            before = f"%s{j}" if t == 0 else f"%a{t - 1}.{j}"
            inner.append(fma(f"a{t}.{j}", f"%x{t}.{j}", f"%w{t}", before))
    ends = []
    for j in range(pixels):
        lines, result = silu(f"a{window - 1}.{j}", f"e{j}", estimate)
        ends += [lines, store(result, f"o{j}", "y.tile", j * WIDE)]
    edge, edge_result = silu("g.sum", "ge", estimate)
    return f"""
{declarations(estimate)}
{jit.opening("depthwise", _WORDS, "items")}
{constants()}
  %x.base = inttoptr i64 %source to float*
  %w.base = inttoptr i64 %weights to float*
  %y.base = inttoptr i64 %target to float*
  %line = mul i64 %width, {WIDE}
  %plane = mul i64 %height, %line
  %out.line = mul i64 %columns, {WIDE}
  %latest = sub i64 %right, {pixels}
  %behind = sub i64 %columns, %right
  %edges = add i64 %left, %behind
  br label %next
next:
  %i = phi i64 [ %from, %start ], [ %i1, %edges.done ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %row, label %over.all
row:
  %p = urem i64 %i, %rows
  %n = udiv i64 %i, %rows
  %block = urem i64 %n, %blocks
  %x.o = mul i64 %n, %plane
  %x = getelementptr float, float* %x.base, i64 %x.o
  %w.o = mul i64 %block, {(window * window + 1) * WIDE}
  %w = getelementptr float, float* %w.base, i64 %w.o
{load("bias", "w", window * window * WIDE)}
  %y.o = mul i64 %i, %out.line
  %y = getelementptr float, float* %y.base, i64 %y.o
  %down = mul i64 %p, {stride}
  %iy = sub i64 %down, %top
  %above = sub i64 0, %iy
{least("first.row", "%above", 0, larger=True)}
  %below = sub i64 %height, %iy
{least("end.row", "%below", window)}
  br label %tiles
tiles:
  %q = phi i64 [ %left, %row ], [ %q1, %tile.done ]
  %q.more = icmp slt i64 %q, %right
  br i1 %q.more, label %tile, label %edges.next
tile:
{least("q0", "%q", "%latest")}
  %across = mul i64 %q0, {stride}
  %ix = sub i64 %across, %side
  %ix.o = mul i64 %ix, {WIDE}
  %x.tile = getelementptr float, float* %x, i64 %ix.o
  %q.o = mul i64 %q0, {WIDE}
  %y.tile = getelementptr float, float* %y, i64 %q.o
  br label %tile.taps
tile.taps:
  %r = phi i64 [ %first.row, %tile ], [ %r1, %tile.taps ]
{starts}
  %at.row = add i64 %iy, %r
  %at.o = mul i64 %at.row, %line
  %x.row = getelementptr float, float* %x.tile, i64 %at.o
  %w.at = mul i64 %r, {window * WIDE}
  %w.row = getelementptr float, float* %w, i64 %w.at
{newline.join(inner)}
  %r1 = add i64 %r, 1
  %r.more = icmp slt i64 %r1, %end.row
  br i1 %r.more, label %tile.taps, label %tile.done
tile.done:
{newline.join(ends)}
  %q1 = add i64 %q, {pixels}
  br label %tiles
edges.next:
  %g = phi i64 [ 0, %tiles ], [ %g1, %edge.done ]
  %g.more = icmp slt i64 %g, %edges
  br i1 %g.more, label %edge, label %edges.done
edge:
  %g.left = icmp slt i64 %g, %left
  %g.far0 = sub i64 %g, %left
  %g.far = add i64 %g.far0, %right
  %gq = select i1 %g.left, i64 %g, i64 %g.far
  %g.across = mul i64 %gq, {stride}
  %gx = sub i64 %g.across, %side
  %g.beside = sub i64 0, %gx
{least("first.tap", "%g.beside", 0, larger=True)}
  %g.rest = sub i64 %width, %gx
{least("end.tap", "%g.rest", window)}
  br label %edge.rows
edge.rows:
  %v = phi i64 [ %first.row, %edge ], [ %v1, %edge.row.done ]
  %g.row = phi {_F} [ %bias, %edge ], [ %g.sum, %edge.row.done ]
  %v.row = add i64 %iy, %v
  %v.o = mul i64 %v.row, %line
  %v.w = mul i64 %v, {window}
  br label %edge.taps
edge.taps:
  %u = phi i64 [ %first.tap, %edge.rows ], [ %u1, %edge.taps ]
  %g.now = phi {_F} [ %g.row, %edge.rows ], [ %g.sum, %edge.taps ]
  %u.x = add i64 %gx, %u
  %u.xo = mul i64 %u.x, {WIDE}
  %u.o = add i64 %v.o, %u.xo
{load("ux", "x", "%u.o")}
  %u.w = add i64 %v.w, %u
  %u.wo = mul i64 %u.w, {WIDE}
{load("uw", "w", "%u.wo")}
{fma("g.sum", "%ux", "%uw", "%g.now")}
  %u1 = add i64 %u, 1
  %u.more = icmp slt i64 %u1, %end.tap
  br i1 %u.more, label %edge.taps, label %edge.row.done
edge.row.done:
  %v1 = add i64 %v, 1
  %v.more = icmp slt i64 %v1, %end.row
  br i1 %v.more, label %edge.rows, label %edge.done
edge.done:
{edge}
  %gq.o = mul i64 %gq, {WIDE}
{store(edge_result, "go", "y", "%gq.o")}
  %g1 = add i64 %g, 1
  br label %edges.next
edges.done:
  %i1 = add i64 %i, 1
  br label %next
over.all:
  ret void
}}
"""
