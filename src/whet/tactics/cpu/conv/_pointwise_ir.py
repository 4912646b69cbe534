"""1x1 convolution in blocks of 16 channels, as LLVM IR: a tile of pixels by blocks of output channels in registers, what follows it behind them."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import behind
from whet.tactics.cpu._llvm.ir import FENCE, PREFETCH, WIDE, fma, least, load, moved, opaque, prefetch, spread, store
from whet.tactics.cpu._llvm.ir import FLOATS as _F
from whet.tactics.cpu._llvm.silu import constants, declarations

TILES = ((3, 8), (2, 12), (4, 6), (1, 24), (5, 5))
"""(blocks of output channels, pixels) of a tile: 24 or 25 sums in registers, which leaves at least one of AVX-512's for each block and number."""
MOST = max(blocks for blocks, _ in TILES)
STEP = 4  # input channels of a turn of the inner loop
_WORDS = ("source", "weights", "target", "pixels", "blocks.in", "blocks.out", "taps", "tiles", "groups", "strip", "items", "share")
"""The context: addresses; pixels of an image; blocks of 16 channels in and out; input channels; tiles of an image, groups of output blocks;
tiles that all groups go through before the next are read; images * groups * tiles; how many of these a thread takes."""
_SECOND = ("second", "blocks.second")
"""Of two results: the address of the second one, and which of the blocks is its first."""
_BEGUN = ("begun", "places", "begun.plane")
"""Where sums begin at another image's: its address, for each pixel the place of its one there (i32, in floats), floats of a block of channels."""


def words(forked: bool, begun: bool) -> tuple[str, ...]:
    """Names of what a context holds, in order."""
    return (*_WORDS[:3], *(_SECOND if forked else ()), *(_BEGUN if begun else ()), *_WORDS[3:])


def _begun(blocks: int, pixels: int) -> str:
    """%b<block>.<pixel>, what the sums of an item begin at: the other image's pixels, wherever these lie."""
    lines = [
        "  %b.images = mul i64 %n, %begun.image",
        "  %b.blocks = mul i64 %y.block, %begun.plane",
        "  %b.o = add i64 %b.images, %b.blocks",
        "  %b0 = getelementptr float, float* %begun.base, i64 %b.o",
        *(moved(f"b{j}", "b0", "%begun.plane", j) for j in range(1, blocks)),
        "  %place = getelementptr i32, i32* %places.base, i64 %p0",
    ]
    for p in range(pixels):
        lines.append(f"  %k{p}.p = getelementptr i32, i32* %place, i64 {p}\n  %k{p}.i = load i32, i32* %k{p}.p\n  %k{p}.o = sext i32 %k{p}.i to i64")
        lines += [load(f"b{j}.{p}", f"b{j}", f"%k{p}.o") for j in range(blocks)]
    return "\n".join(lines)


def _forked(blocks: int, j: int) -> str:
    """%y<j>, the address of an item's block, in the first result or the second one."""
    return f"""
  %k{j} = add i64 %y.block, {j}
  %s{j} = icmp sge i64 %k{j}, %blocks.second
  %y{j}.base = select i1 %s{j}, float* %second.base, float* %y.base
  %y{j}.first = select i1 %s{j}, i64 %blocks.second, i64 0
  %y{j}.end = select i1 %s{j}, i64 %blocks.out, i64 %blocks.second
  %y{j}.blocks = sub i64 %y{j}.end, %y{j}.first
  %y{j}.images = mul i64 %n, %y{j}.blocks
  %y{j}.own = sub i64 %k{j}, %y{j}.first
  %y{j}.at = add i64 %y{j}.images, %y{j}.own
  %y{j}.o = mul i64 %y{j}.at, %plane
  %y{j}.plane = getelementptr float, float* %y{j}.base, i64 %y{j}.o
{moved(f"y{j}", f"y{j}.plane", "%p.at")}"""


# The first item, %from: of image %n the strip [%strip.at, %strip.end) of tiles, in it group %g's tile %tile; and what follows on an item: the strip's
# next tile, else its first one for the next group, else the next strip, else the next image. Divisions are slow, so only the first is found by them.
_FROM = f"""
  %of.image = mul i64 %tiles, %groups
  %n.from = udiv i64 %from, %of.image
  %in.image.from = urem i64 %from, %of.image
  %of.strip = mul i64 %strip, %groups
  %strips = udiv i64 %in.image.from, %of.strip
  %in.strip = urem i64 %in.image.from, %of.strip
  %strip.from = mul i64 %strips, %strip
  %full.from = add i64 %strip.from, %strip
{least("end.from", "%full.from", "%tiles")}
  %long.from = sub i64 %end.from, %strip.from
  %g.from = udiv i64 %in.strip, %long.from
  %in.group = urem i64 %in.strip, %long.from
  %tile.from = add i64 %strip.from, %in.group"""
_THEN = f"""
  %tile1 = add i64 %tile, 1
  %group.over = icmp eq i64 %tile1, %strip.end
  %group.more = zext i1 %group.over to i64
  %g1 = add i64 %g, %group.more
  %strip.over = icmp eq i64 %g1, %groups
  %g.then = select i1 %strip.over, i64 0, i64 %g1
  %strip1 = select i1 %strip.over, i64 %strip.end, i64 %strip.at
  %image.over = icmp eq i64 %strip1, %tiles
  %image.more = zext i1 %image.over to i64
  %n.then = add i64 %n, %image.more
  %strip.then = select i1 %image.over, i64 0, i64 %strip1
  %full.then = add i64 %strip.then, %strip
{least("end.then", "%full.then", "%tiles")}
  %tile.then = select i1 %group.over, i64 %strip.then, i64 %tile1"""


_BASES = """
  %begun.base = inttoptr i64 %begun to float*
  %places.base = inttoptr i64 %places to i32*
  %begun.image = mul i64 %blocks.out, %begun.plane"""
_NEXT_BLOCK = """
  %block.then = add i64 %block, 1
  %block.more = icmp slt i64 %block.then, %blocks.in
  %block.o = mul i64 %block.then, %plane
  %next.o = select i1 %block.more, i64 %block.o, i64 <ACROSS>
  %x.next = getelementptr float, float* %x, i64 %next.o"""
"""%x.next: the tile's pixels in the next block of channels, behind the last one the next tile's in the first."""


def turn(blocks: int, pixels: int) -> list[str]:
    """Lines that add STEP input channels to the sums %s<block>.<pixel>, from %x.now and %w.now; then they are called %a<STEP - 1>.<block>.<pixel>."""
    lines = []
    for u in range(STEP):
        lines += [load(f"w{u}.{j}", "w.now", (u * blocks + j) * WIDE) for j in range(blocks)]
        for p in range(pixels):
            lines.append(spread(f"x{u}.{p}", "x.now", p * WIDE + u))
            for j in range(blocks):
                lines.append(fma(f"a{u}.{j}.{p}", f"%x{u}.{p}", f"%w{u}.{j}", f"%s{j}.{p}" if u == 0 else f"%a{u - 1}.{j}.{p}"))
            lines.append(FENCE)
    return lines


@cache
def pointwise_ir(
    blocks: int, pixels: int, steps: tuple[str, ...], estimate: bool, ahead: bool = False, forked: bool = False, begun: bool = False
) -> str:
    """`pointwise(context)` for a tile of `blocks` of output channels by `pixels`, with "Silu", "Relu" or nothing behind it; `estimate`: the CPU has
    AVX-512 (F and DQ); while a block of channels is added, the next one of the same tile is fetched into the first cache, or, `ahead`, the same one
    of the next tile;
    `forked`: the last blocks are another result's; `begun`: sums begin at pixels of another image, not at the biases.

    Weights lie in groups of `blocks`: for each input channel and block its 16 output channels, then the biases. An image has at least `pixels`
    pixels: its last tile begins so many before the end, and computes some of them again.
    """
    sums = [(j, p) for j in range(blocks) for p in range(pixels)]
    first = [_begun(blocks, pixels)] if begun else [load(f"b{j}", "w.bias", j * WIDE) for j in range(blocks)]
    starts = [f"  %s{j}.{p} = phi {_F} [ %b{j}{f'.{p}' if begun else ''}, %item ], [ %a{STEP - 1}.{j}.{p}, %taps.next ]" for j, p in sums]
    inner = turn(blocks, pixels)
    if blocks < MOST:  # as many leave no register for the lines' addresses
        each = -(-pixels // (WIDE // STEP))  # lines of a turn, so that a block's turns fetch all
        fetched = [prefetch(f"f{k}", "ahead", ((pixels if ahead else 0) + k) * WIDE) for k in range(each)]
        next_block = "" if ahead else _NEXT_BLOCK.replace("<ACROSS>", str(pixels * WIDE))
        inner = [next_block, moved("ahead", "x.now" if ahead else "x.next", "%within", each * WIDE), *fetched, FENCE, *inner]
    ends = []
    for j in range(blocks):
        ends.append(_forked(blocks, j) if forked else moved(f"y{j}", "y", "%plane", j))
        for p in range(pixels):
            lines, result = behind(f"%a{STEP - 1}.{j}.{p}", f"e{j}.{p}", steps, "", 0, estimate)
            ends += [lines, store(result, f"o{j}.{p}", f"y{j}", p * WIDE)]
    newline = "\n"
    return f"""
{declarations(estimate)}
{PREFETCH}
{jit.opening("pointwise", words(forked, begun), "items")}
{constants()}
  %x.base = inttoptr i64 %source to float*
  %w.base = inttoptr i64 %weights to float*
  %y.base = inttoptr i64 %target to float*
{"  %second.base = inttoptr i64 %second to float*" if forked else ""}
{_BASES if begun else ""}
  %plane = mul i64 %pixels, {WIDE}
  %last = sub i64 %pixels, {pixels}
  %in.image = mul i64 %blocks.in, %plane
  %out.image = mul i64 %blocks.out, %plane
  %w.taps = mul i64 %taps, {blocks * WIDE}
  %w.group = add i64 %w.taps, {blocks * WIDE}
  %turns = udiv i64 %taps, {STEP}
{_FROM}
  br label %next
next:
  %i = phi i64 [ %from, %start ], [ %i1, %done ]
  %tile = phi i64 [ %tile.from, %start ], [ %tile.then, %done ]
  %g = phi i64 [ %g.from, %start ], [ %g.then, %done ]
  %n = phi i64 [ %n.from, %start ], [ %n.then, %done ]
  %strip.at = phi i64 [ %strip.from, %start ], [ %strip.then, %done ]
  %strip.end = phi i64 [ %end.from, %start ], [ %end.then, %done ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %item, label %over.all
item:
  %p.want = mul i64 %tile, {pixels}
{least("p0", "%p.want", "%last")}
  %p.at = mul i64 %p0, {WIDE}
  %x.image = mul i64 %n, %in.image
  %x.o = add i64 %x.image, %p.at
  %x = getelementptr float, float* %x.base, i64 %x.o
{moved("w", "w.base", "%g", "%w.group")}
  %w.bias = getelementptr float, float* %w, i64 %w.taps
  %y.image = mul i64 %n, %out.image
  %y.block = mul i64 %g, {blocks}
  %y.plane = mul i64 %y.block, %plane
  %y.o0 = add i64 %y.image, %y.plane
  %y.o = add i64 %y.o0, %p.at
  %y = getelementptr float, float* %y.base, i64 %y.o
{newline.join(first)}
  br label %taps.next
taps.next:
  %t = phi i64 [ 0, %item ], [ %t1, %taps.next ]
{newline.join(starts)}
{opaque("turn", "%t")}
  %block = udiv i64 %turn, {WIDE // STEP}
  %within = urem i64 %turn, {WIDE // STEP}
  %x.block = mul i64 %block, %plane
  %x.within = mul i64 %within, {STEP}
  %x.t = add i64 %x.block, %x.within
  {"%x.sum" if blocks == 1 else "%x.now"} = getelementptr float, float* %x, i64 %x.t
{opaque("x.now", "%x.sum", "float*") if blocks == 1 else ""}
{moved("w.now", "w", "%turn", STEP * blocks * WIDE)}
{newline.join(inner)}
  %t1 = add i64 %t, 1
  %t.more = icmp slt i64 %t1, %turns
  br i1 %t.more, label %taps.next, label %done
done:
{newline.join(ends)}
  %i1 = add i64 %i, 1
{_THEN}
  br label %next
over.all:
  ret void
}}
"""
