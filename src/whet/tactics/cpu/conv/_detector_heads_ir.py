"""1x1 convolutions and the moves behind them, as LLVM IR: some pixels' channels into memory that stays in the cache, then rows made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from whet.tactics._moves_tree import Moves
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.ir import FLOATS as _F
from whet.tactics.cpu._llvm.ir import WIDE, least, load, moved, store
from whet.tactics.cpu._llvm.silu import declarations
from whet.tactics.cpu.conv._pointwise_ir import STEP, turn
from whet.tactics.cpu.move._moves_ir import moves_part, needed
from whet.tactics.cpu.move._moves_ir import words as moves_words

RUN = 4  # numbers of a run in its table: rows begin, pixels begin, pixels, rows of each
_NUMBER = 8  # bytes of a word


@dataclass(frozen=True)
class Level:
    """One convolution: which source of the moves it makes; pixels of an image, blocks of 16 channels in, its input channels, groups of output blocks,
    how many floats lie from pixel to pixel of what it makes; how many items there are, and pixels of one; its first run in their table, and how
    many there are."""

    source: int
    pixels: int
    blocks: int
    taps: int
    groups: int
    pitch: int
    items: int
    tile: int
    first_run: int
    runs: int


def words(levels: int) -> tuple[str, ...]:
    """The context of `heads`: addresses of the result, the moves' constants, the runs' table and the scratch; of each level those of its image and
    weights; how many items there are, and how many a thread takes."""
    each = (w for k in range(levels) for w in (f"image{k}", f"weights{k}"))
    return ("target", "numbers", "table", "scratch", *each, "items", "share")


def front(levels: int) -> int:
    """Bytes of what a thread keeps in front of its pixels: the context of the moves."""
    return -(-len(moves_words(levels)) * _NUMBER // 64) * 64


def thread_bytes(levels: Sequence[Level], pixels: int) -> int:
    """Bytes of scratch that a thread needs; `pixels` are those of a tile of registers, the first of which may lie before an item's own."""
    return front(len(levels)) + max((x.tile + pixels) * x.pitch for x in levels) * 4


def heads_ir(made: Moves, levels: Sequence[Level], blocks: int, pixels: int, estimate: bool) -> str:
    """`heads(context)`: items are tiles of pixels, those of level 0 first. Levels make the sources of `made`, whose numbers lie channels last with
    the levels' pitches. Tiles of registers have `blocks` of 16 channels by `pixels`; `estimate`: the CPU has AVX-512 (F and DQ). Raises Refused.
    """
    names, inner = words(len(levels)), moves_words(len(levels))
    mine = thread_bytes(levels, pixels)
    copies = "\n".join(
        f"  %my.{w} = getelementptr i64, i64* %my, i64 {inner.index(w)}\n  store i64 %{w}, i64* %my.{w}" for w in ("target", "numbers")
    )
    found, before = [], 0
    for k, level in enumerate(levels):
        found.append(_level(k, level, before, pixels, inner.index(f"source{level.source}"), k + 1 == len(levels)))
        before += level.items
    newline = "\n"
    return f"""
{declarations(estimate)}
{needed()}
{moves_part(made, estimate)}
{_convolve(blocks, pixels)}
{jit.opening("heads", names, "items")}
  %threads.p = getelementptr i64, i64* %context, i64 -1
  %threads = load i64, i64* %threads.p
  %several = icmp sgt i64 %threads, 1
  br i1 %several, label %ask, label %known
ask:
  %ask.p = getelementptr i64, i64* %context, i64 -3
  %ask.w = load i64, i64* %ask.p
  %ask.f = inttoptr i64 %ask.w to i32 ()*
  %own = call i32 %ask.f()
  %own.w = sext i32 %own to i64
  br label %known
known:
  %me = phi i64 [ 0, %start ], [ %own.w, %ask ]
  %my.o = mul i64 %me, {mine}
  %my.w = add i64 %scratch, %my.o
  %my = inttoptr i64 %my.w to i64*
{copies}
  %room.w = add i64 %my.w, {front(len(levels))}
  %room = inttoptr i64 %room.w to float*
  %runs = inttoptr i64 %table to i64*
  br label %next
next:
  %i = phi i64 [ %from, %known ], [ %i1, %done ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %level0, label %over.all
{newline.join(found)}
done:
  %i1 = add i64 %i, 1
  br label %next
over.all:
  ret void
}}
"""


def _level(k: int, x: Level, before: int, pixels: int, word: int, last: bool) -> str:
    """An item of level k, if it is one of its; jumps to %done or to the next level. `word` of the moves' context says where the level's image lies:
    so far before the scratch that each pixel is found there at its place."""
    tiles = -(-x.pixels // x.tile)
    mine = f"  br label %item{k}" if last else f"  %is{k} = icmp slt i64 %i, {before + x.items}\n  br i1 %is{k}, label %item{k}, label %level{k + 1}"
    return f"""level{k}:
{mine}
item{k}:
  %j{k} = sub i64 %i, {before}
  %n{k} = udiv i64 %j{k}, {tiles}
  %t{k} = urem i64 %j{k}, {tiles}
  %a{k} = mul i64 %t{k}, {x.tile}
  %b.want{k} = add i64 %a{k}, {x.tile}
{least(f"b{k}", f"%b.want{k}", x.pixels)}
  %count{k} = sub i64 %b{k}, %a{k}
  %x.all{k} = inttoptr i64 %image{k} to float*
  %w{k} = inttoptr i64 %weights{k} to float*
{moved(f"x.image{k}", f"x.all{k}", f"%n{k}", x.blocks * x.pixels * WIDE)}
{moved(f"x{k}", f"x.image{k}", f"%a{k}", WIDE)}
{moved(f"y{k}", "room", pixels, x.pitch)}
  call void @convolve(float* %x{k}, float* %w{k}, float* %y{k}, i64 {x.pixels * WIDE}, i64 {x.taps}, i64 {x.groups}, i64 {x.pitch}, i64 %count{k})
  %n.pixels{k} = mul i64 %n{k}, {x.pixels}
  %q{k} = add i64 %n.pixels{k}, %a{k}
  %q.end{k} = add i64 %q{k}, %count{k}
  %back{k} = mul i64 %q{k}, {-x.pitch * 4}
  %y.w{k} = ptrtoint float* %y{k} to i64
  %base{k} = add i64 %y.w{k}, %back{k}
  %base.p{k} = getelementptr i64, i64* %my, i64 {word}
  store i64 %base{k}, i64* %base.p{k}
  br label %run{k}
run{k}:
  %r{k} = phi i64 [ {x.first_run}, %item{k} ], [ %r1{k}, %ran{k} ]
  %r.o{k} = mul i64 %r{k}, {RUN}
  %row.p{k} = getelementptr i64, i64* %runs, i64 %r.o{k}
  %pixel.p{k} = getelementptr i64, i64* %row.p{k}, i64 1
  %many.p{k} = getelementptr i64, i64* %row.p{k}, i64 2
  %each.p{k} = getelementptr i64, i64* %row.p{k}, i64 3
  %row{k} = load i64, i64* %row.p{k}
  %pixel{k} = load i64, i64* %pixel.p{k}
  %many{k} = load i64, i64* %many.p{k}
  %each{k} = load i64, i64* %each.p{k}
  %upto{k} = add i64 %pixel{k}, %many{k}
{least(f"low{k}", f"%q{k}", f"%pixel{k}", larger=True)}
{least(f"high{k}", f"%q.end{k}", f"%upto{k}")}
  %some{k} = icmp slt i64 %low{k}, %high{k}
  br i1 %some{k}, label %rows{k}, label %ran{k}
rows{k}:
  %low.in{k} = sub i64 %low{k}, %pixel{k}
  %high.in{k} = sub i64 %high{k}, %pixel{k}
  %low.r{k} = mul i64 %low.in{k}, %each{k}
  %high.r{k} = mul i64 %high.in{k}, %each{k}
  %row.from{k} = add i64 %row{k}, %low.r{k}
  %row.to{k} = add i64 %row{k}, %high.r{k}
  call void @moves.part(i64* %my, i64 %row.from{k}, i64 %row.to{k})
  br label %ran{k}
ran{k}:
  %r1{k} = add i64 %r{k}, 1
  %runs.left{k} = icmp slt i64 %r1{k}, {x.first_run + x.runs}
  br i1 %runs.left{k}, label %run{k}, label %done
"""


@cache
def _convolve(blocks: int, pixels: int) -> str:
    """`convolve`: `count` pixels of an image in blocks, from %x on, to rows of all output channels, `pitch` floats apart, from %y on.

    The last tile of registers ends where the pixels do, and begins before them if there are fewer. Weights lie in groups of `blocks`: for each input
    channel and block its 16 output channels, then the biases (pointwise.packed).
    """
    sums = [(j, p) for j in range(blocks) for p in range(pixels)]
    bias = [load(f"b{j}", "w.bias", j * WIDE) for j in range(blocks)]
    starts = [f"  %s{j}.{p} = phi {_F} [ %b{j}, %begin ], [ %a{STEP - 1}.{j}.{p}, %taps.next ]" for j, p in sums]
    inner = turn(blocks, pixels)
    ends = []
    for p in range(pixels):
        ends.append(moved(f"y{p}", "y.tile", p, "%pitch"))
        ends += [store(f"%a{STEP - 1}.{j}.{p}", f"o{j}.{p}", f"y{p}", j * WIDE) for j in range(blocks)]
    newline = "\n"
    return f"""
define internal void @convolve(float* %x, float* %w.all, float* %y, i64 %plane, i64 %taps, i64 %groups, i64 %pitch, i64 %count) noinline {{
start:
  %last = sub i64 %count, {pixels}
  %w.taps = mul i64 %taps, {blocks * WIDE}
  %w.group = add i64 %w.taps, {blocks * WIDE}
  %turns = udiv i64 %taps, {STEP}
  br label %group
group:
  %g = phi i64 [ 0, %start ], [ %g1, %group.done ]
{moved("w", "w.all", "%g", "%w.group")}
  %w.bias = getelementptr float, float* %w, i64 %w.taps
{moved("y.group", "y", "%g", blocks * WIDE)}
{newline.join(bias)}
  br label %tile
tile:
  %p.want = phi i64 [ 0, %group ], [ %p.next, %tile.done ]
{least("p0", "%p.want", "%last")}
{moved("x.tile", "x", "%p0", WIDE)}
{moved("y.tile", "y.group", "%p0", "%pitch")}
  br label %begin
begin:
  br label %taps.next
taps.next:
  %t = phi i64 [ 0, %begin ], [ %t1, %taps.next ]
{newline.join(starts)}
  %block = udiv i64 %t, {WIDE // STEP}
  %within = urem i64 %t, {WIDE // STEP}
  %x.block = mul i64 %block, %plane
  %x.within = mul i64 %within, {STEP}
  %x.t = add i64 %x.block, %x.within
  %x.now = getelementptr float, float* %x.tile, i64 %x.t
{moved("w.now", "w", "%t", STEP * blocks * WIDE)}
{newline.join(inner)}
  %t1 = add i64 %t, 1
  %t.more = icmp slt i64 %t1, %turns
  br i1 %t.more, label %taps.next, label %tile.done
tile.done:
{newline.join(ends)}
  %p.next = add i64 %p.want, {pixels}
  %p.more = icmp slt i64 %p.next, %count
  br i1 %p.more, label %tile, label %group.done
group.done:
  %g1 = add i64 %g, 1
  %g.more = icmp slt i64 %g1, %groups
  br i1 %g.more, label %group, label %over
over:
  ret void
}}"""
