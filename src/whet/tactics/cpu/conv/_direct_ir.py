"""Convolution in blocks of 16 channels, as LLVM IR: a tile of pixels of a row by blocks of output channels in registers, what follows it behind them.

Taps of a row and some input channels are unrolled; input blocks and the window's rows are loops, whose bounds leave out what lies above and below the
image. The first and the last tile of a row have code of their own, without the taps that lie beside it.

While a row of taps is added, the pixels that the next one reads are asked for: the window's next row, else its first one in the next block of
channels, else that of the next tile. They lie in the second cache or behind it, and two rows apart nothing foresees them (64 to 128 channels at
160x160 in steps of two: 3.72 to 3.41 ms on a Cascade Lake; next to each other: 1 to 2 %).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import ADDED, behind, words
from whet.tactics.cpu._llvm.ir import FENCE, FLOATS, PREFETCH, WIDE, fma, least, load, moved, prefetch, spread, store
from whet.tactics.cpu._llvm.silu import constants, declarations

REGISTERS = 32  # AVX-512's
MOST = 5  # blocks of a tile
_APART = 3  # columns from one to the next: neighbours add to the same sums, each of which would wait for the one before (3x6x6: 10 %)
Taps = tuple[tuple[int, int], ...]
"""For each tap of a row from which and up to which pixel of a tile it lies within the image."""
_WORDS = (
    "source", "weights", "target", "height", "width", "rows", "columns", "channels", "made", "groups", "top", "side", "by.rows", "items", "share",
)  # fmt: skip
"""The context: addresses; sizes of the image and of the result; input channels, blocks of the result, groups of output blocks here; padding above and
beside; whether rows of one image follow each other with all groups (1) or groups with all rows (0); images * groups * rows; how many a thread takes.
An added image's address stands behind the target's."""


@dataclass(frozen=True)
class Form:
    """What is fixed in a kernel's code."""

    window: tuple[int, int]
    strides: tuple[int, int]
    blocks: int  # of 16 output channels, in registers together
    pixels: int  # of a tile
    unroll: int  # input channels of a turn of the inner loop, which it divides
    planes: bool  # the image lies plane by plane, not in blocks of 16 channels
    first: Taps
    last: Taps | None  # None: a row is one tile
    steps: tuple[str, ...]  # what follows: "Silu", "Relu", "Add" (of an image as large as the result); each once at most
    estimate: bool  # the CPU has AVX-512 (F and DQ)

    @property
    def step(self) -> int:
        """Input channels of a block."""
        return 1 if self.planes else WIDE

    @property
    def shared(self) -> bool:
        """Whether the weights of all taps of a row fit into registers: each number is then spread once for all its taps."""
        return self.blocks * (self.pixels + self.window[1]) < REGISTERS

    @property
    def ahead(self) -> int:
        """Pixels that a turn of the inner loop asks for, so that a block's turns ask for all that a tile reads of a row; 0: none. Of planes there are
        a few lines only; five blocks of sums leave no register for their address."""
        if self.planes or self.blocks == MOST:
            return 0
        return -(-((self.pixels - 1) * self.strides[1] + self.window[1]) * self.unroll // self.step)


def _turn(n: str, form: Form, taps: Taps) -> tuple[list[str], dict[tuple[int, int], str]]:
    """Lines that add a row of taps of `unroll` channels to the sums %n.s<block>.<pixel>, and what the sums are called then."""
    sums = {(j, p): f"%{n}.s{j}.{p}" for j in range(form.blocks) for p in range(form.pixels)}
    wide, across = form.window[1], form.strides[1]
    lines: list[str] = []

    def weights(u: int, s: int) -> None:
        lines.extend(load(f"{n}.w{u}.{s}.{j}", f"{n}.w", ((u * wide + s) * form.blocks + j) * WIDE) for j in range(form.blocks))

    def column(u: int, i: int, pairs: list[tuple[int, int]]) -> None:
        """The number of column `i` for (tap, pixel) pairs."""
        name = f"{n}.x{u}.{i}.{pairs[0][0]}"
        lines.append(spread(name, f"{n}.x", i * form.step + u))
        for s, p in pairs:
            for j in range(form.blocks):
                lines.append(fma(f"{n}.a{u}.{s}.{j}.{p}", f"%{name}", f"%{n}.w{u}.{s}.{j}", sums[j, p]))
                sums[j, p] = f"%{n}.a{u}.{s}.{j}.{p}"
        lines.append(FENCE)

    for u in range(form.unroll):
        if form.shared:
            for s in range(wide):
                weights(u, s)
            columns = (form.pixels - 1) * across + wide
            for i in [i for first in range(_APART) for i in range(first, columns, _APART)]:
                pairs = [(s, (i - s) // across) for s in range(wide) if (i - s) % across == 0 and (i - s) // across in range(*taps[s])]
                if pairs:
                    column(u, i, pairs)
        else:
            for s in range(wide):
                weights(u, s)
                for p in range(*taps[s]):
                    column(u, p * across + s, [(s, p)])
    return lines, sums


def _tile(n: str, form: Form, taps: Taps) -> tuple[str, dict[tuple[int, int], str]]:
    """From label `n` to a branch to `finish`: the sums of the tile at column %q, and what they are called."""
    lines, sums = _turn(n, form, taps)
    if form.ahead:
        asked = [prefetch(f"{n}.f{k}", f"{n}.f", k * WIDE) for k in range(form.ahead)]
        lines = [moved(f"{n}.f", f"{n}.next", f"%{n}.t", form.ahead * WIDE), *asked, FENCE, *lines]
    channel = form.window[1] * form.blocks * WIDE  # weights of an input channel and a row of taps

    def starts(name: str, before: str, came: str, back: str) -> str:
        begun = [(f"%{n}.{name}{j}.{p}", before.format(j=j, p=p), now) for (j, p), now in sums.items()]
        return "\n".join(f"  {new} = phi {FLOATS} [ {old}, %{came} ], [ {now}, %{back} ]" for new, old, now in begun)

    newline = "\n"
    text = f"""
{n}:
  br label %{n}.blocks
{n}.blocks:
  %{n}.b = phi i64 [ 0, %{n} ], [ %{n}.b1, %{n}.rows.done ]
{starts("sb", "%bias{j}", n, f"{n}.rows.done")}
{moved(f"{n}.x.block", "x", f"%{n}.b", "%plane")}
{moved(f"{n}.w.block", "w", f"%{n}.b", form.window[0] * form.step * channel)}
  %{n}.before = mul i64 %{n}.b, {form.step}
  %{n}.left = sub i64 %channels, %{n}.before
{least(f"{n}.some", f"%{n}.left", form.step)}
  %{n}.turns = udiv i64 %{n}.some, {form.unroll}
  br label %{n}.rows
{n}.rows:
  %{n}.r = phi i64 [ %first.row, %{n}.blocks ], [ %{n}.r1, %{n}.turns.done ]
{starts("sr", f"%{n}.sb{{j}}.{{p}}", f"{n}.blocks", f"{n}.turns.done")}
{moved(f"{n}.x.row", f"{n}.x.block", f"%{n}.r", "%line")}
{moved(f"{n}.w.row", f"{n}.w.block", f"%{n}.r", form.step * channel)}
{_next(n, form) if form.ahead else ""}
  br label %{n}.turn
{n}.turn:
  %{n}.t = phi i64 [ 0, %{n}.rows ], [ %{n}.t1, %{n}.turn ]
{starts("s", f"%{n}.sr{{j}}.{{p}}", f"{n}.rows", f"{n}.turn")}
{moved(f"{n}.x", f"{n}.x.row", f"%{n}.t", form.unroll)}
{moved(f"{n}.w", f"{n}.w.row", f"%{n}.t", form.unroll * channel)}
{newline.join(lines)}
  %{n}.t1 = add i64 %{n}.t, 1
  %{n}.t.more = icmp slt i64 %{n}.t1, %{n}.turns
  br i1 %{n}.t.more, label %{n}.turn, label %{n}.turns.done
{n}.turns.done:
  %{n}.r1 = add i64 %{n}.r, 1
  %{n}.r.more = icmp slt i64 %{n}.r1, %end.row
  br i1 %{n}.r.more, label %{n}.rows, label %{n}.rows.done
{n}.rows.done:
  %{n}.b1 = add i64 %{n}.b, 1
  %{n}.b.more = icmp slt i64 %{n}.b1, %blocks
  br i1 %{n}.b.more, label %{n}.blocks, label %finish"""
    return text, sums


def _next(n: str, form: Form) -> str:
    """%<n>.next, where the row of taps behind this one begins: the window's next row, else the next block's first, else the next tile's."""
    return f"""
  %{n}.r.then = add i64 %{n}.r, 1
  %{n}.b.then = add i64 %{n}.b, 1
  %{n}.in.window = icmp slt i64 %{n}.r.then, %end.row
  %{n}.in.image = icmp slt i64 %{n}.b.then, %blocks
  %{n}.b.else = select i1 %{n}.in.image, i64 %{n}.b.then, i64 0
  %{n}.r.next = select i1 %{n}.in.window, i64 %{n}.r.then, i64 %first.row
  %{n}.b.next = select i1 %{n}.in.window, i64 %{n}.b, i64 %{n}.b.else
  %{n}.here = or i1 %{n}.in.window, %{n}.in.image
  %{n}.across = select i1 %{n}.here, i64 0, i64 {form.pixels * form.strides[1]}
{moved(f"{n}.next.block", "x", f"%{n}.b.next", "%plane")}
{moved(f"{n}.next.row", f"{n}.next.block", f"%{n}.r.next", "%line")}
{moved(f"{n}.next", f"{n}.next.row", f"%{n}.across", form.step)}"""


def _finish(form: Form) -> list[str]:
    """Lines that take the sums %t<block>.<pixel> through what follows, and store them."""
    lines = []
    for j in range(form.blocks):
        lines.append(moved(f"y{j}", "y", "%out.plane", j))
        if "Add" in form.steps:
            lines.append(moved(f"z{j}", "z", "%out.plane", j))
        for p in range(form.pixels):
            text, value = behind(f"%t{j}.{p}", f"e{j}.{p}", form.steps, f"z{j}", p * WIDE, form.estimate)
            lines += [text, store(value, f"o{j}.{p}", f"y{j}", p * WIDE)]
    return lines


@cache
def direct_ir(form: Form) -> str:
    """`direct(context)` for one form.

    Weights lie in groups of `blocks` of 16 output channels: for each block of input channels, row of the window, input channel and tap of the row
    the group's output channels; behind them its biases. A row has at least `pixels` columns; its last tile begins so many before the end.
    """
    everywhere = ((0, form.pixels),) * form.window[1]
    kinds = {"first": form.first} | ({"inside": everywhere, "last": form.last} if form.last is not None else {})
    tiles = {n: _tile(n, form, taps) for n, taps in kinds.items()}
    joined = "\n".join(
        f"  %t{j}.{p} = phi {FLOATS} " + ", ".join(f"[ {sums[j, p]}, %{n}.rows.done ]" for n, (_, sums) in tiles.items())
        for j in range(form.blocks)
        for p in range(form.pixels)
    )
    which = "  br label %first"
    if form.last is not None:
        which = "  %is.first = icmp eq i64 %q, 0\n  br i1 %is.first, label %first, label %other\nother:\n  br i1 %is.last, label %last, label %inside"
    row = form.window[0] * form.step * form.window[1] * form.blocks * WIDE  # weights of an input block
    added = "Add" in form.steps
    newline = "\n"
    return f"""
{declarations(form.estimate)}
{PREFETCH}
{jit.opening("direct", words(_WORDS, form.steps), "items")}
{constants()}
  %x.base = inttoptr i64 %source to float*
  %w.base = inttoptr i64 %weights to float*
  %y.base = inttoptr i64 %target to float*
{f"  %z.base = inttoptr i64 %{ADDED} to float*" if added else ""}
  %line = mul i64 %width, {form.step}
  %plane = mul i64 %height, %line
  %begun = add i64 %channels, {form.step - 1}
  %blocks = udiv i64 %begun, {form.step}
  %in.image = mul i64 %blocks, %plane
  %out.line = mul i64 %columns, {WIDE}
  %out.plane = mul i64 %rows, %out.line
  %out.group = mul i64 %out.plane, {form.blocks}
  %out.image = mul i64 %out.plane, %made
  %w.taps = mul i64 %blocks, {row}
  %w.group = add i64 %w.taps, {form.blocks * WIDE}
  %latest = sub i64 %columns, {form.pixels}
  %rows.first = icmp ne i64 %by.rows, 0
  %inner = select i1 %rows.first, i64 %groups, i64 %rows
  %outer = select i1 %rows.first, i64 %rows, i64 %groups
  br label %next
next:
  %i = phi i64 [ %from, %start ], [ %i1, %row.done ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %row, label %over.all
row:
  %i.inner = urem i64 %i, %inner
  %i.rest = udiv i64 %i, %inner
  %i.outer = urem i64 %i.rest, %outer
  %n = udiv i64 %i.rest, %outer
  %p = select i1 %rows.first, i64 %i.outer, i64 %i.inner
  %g = select i1 %rows.first, i64 %i.inner, i64 %i.outer
  %down = mul i64 %p, {form.strides[0]}
  %iy = sub i64 %down, %top
  %above = sub i64 0, %iy
{least("first.row", "%above", 0, larger=True)}
  %below = sub i64 %height, %iy
{least("end.row", "%below", form.window[0])}
{moved("x.image", "x.base", "%n", "%in.image")}
{moved("x.row", "x.image", "%iy", "%line")}
{moved("w", "w.base", "%g", "%w.group")}
{newline.join([moved("w.bias", "w", "%w.taps"), *(load(f"bias{j}", "w.bias", j * WIDE) for j in range(form.blocks))])}
  %y.image = mul i64 %n, %out.image
  %y.group = mul i64 %g, %out.group
  %y.o = add i64 %y.image, %y.group
  %y.line = mul i64 %p, %out.line
  %y.at = add i64 %y.o, %y.line
  br label %tile
tile:
  %q = phi i64 [ 0, %row ], [ %q1, %finish ]
  %is.last = icmp eq i64 %q, %latest
  %across = mul i64 %q, {form.strides[1]}
  %ix = sub i64 %across, %side
{moved("x", "x.row", "%ix", form.step)}
{which}
{newline.join(text for text, _ in tiles.values())}
finish:
{joined}
  %q.o = mul i64 %q, {WIDE}
  %y.q = add i64 %y.at, %q.o
{moved("y", "y.base", "%y.q")}
{moved("z", "z.base", "%y.q") if added else ""}
{newline.join(_finish(form))}
  %q.next = add i64 %q, {form.pixels}
{least("q1", "%q.next", "%latest")}
  br i1 %is.last, label %row.done, label %tile
row.done:
  %i1 = add i64 %i, 1
  br label %next
over.all:
  ret void
}}
"""
