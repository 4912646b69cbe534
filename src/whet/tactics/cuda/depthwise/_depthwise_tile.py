"""Tiles of the depthwise kernel that works in shared memory (`depthwise_tile.cu`): which make sense, and their launch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from whet.backends.cuda import tensormap
from whet.backends.cuda.launch import Launch
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, Fields, Float32, Int32, Pointer, TensorMap
from whet.tactics.cuda._device.kernel import ACTIVATIONS, launch
from whet.tactics.cuda.conv._conv import ConvShape

MOST = 6  # candidates of a layer for each width of strip
_BYTES = {0: 4, 1: 2, 2: 2, 3: 1, 4: 1}  # of the types of vector.cuh


@dataclass(frozen=True)
class TileFields(Fields):
    """The result and the tiles of a launch, for depthwise_tile.cu and depthwise_dot.cu."""

    out: Pointer
    c: Int32
    p: Int32
    q: Int32
    pad_h: Int32
    pad_w: Int32
    groups: Int32  # tiles of one channel group
    tiles_h: Int32
    tiles_w: Int32
    tiles: Int32
    act: ActivationParameters
    per_step: Float32  # of integer results
    zero: Float32


@dataclass(frozen=True)
class DepthwiseTileArguments(Arguments, kernel="depthwise_tile.cu"):
    input: TensorMap
    weights: ConstFloatPointer
    bias: ConstFloatPointer
    tile: TileFields


@dataclass(frozen=True, order=True)
class Tile:
    """rg * th output rows, tw columns and cg channels; a thread computes th rows of `wide` pixels of `vec` channels."""

    th: int
    rg: int
    tw: int
    wide: int
    cg: int
    stages: int
    blocks: int
    vec: int = 4

    @property
    def threads(self) -> int:
        """Threads of a block, whole warps."""
        return -(-self.used // 32) * 32

    @property
    def used(self) -> int:
        """Threads that have something to do."""
        return self.cg // self.vec * (self.tw // self.wide) * self.rg

    def input(self, s: ConvShape) -> tuple[int, int]:
        """Rows and columns of the input under a tile."""
        return (self.rg * self.th - 1) * s.stride[0] + s.r, (self.tw - 1) * s.stride[1] + s.s

    def shared(self, s: ConvShape, size: int) -> int:
        """Bytes of shared memory; mirrors the kernel."""
        rows, columns = self.input(s)
        return 128 + self.stages * (-(-rows * columns * self.cg * size // 128) * 128) + 8 * self.stages

    def registers(self, s: ConvShape) -> int:
        """An estimate of the registers of a thread."""
        accumulators = -(-s.r // s.stride[0])
        return self.vec * (s.r * s.s + accumulators * self.wide + (self.wide - 1) * s.stride[1] + s.s) + 24


def refuses(s: ConvShape, size: int) -> str | None:
    """Why the kernel cannot take the shape with inputs of `size` bytes at all, or None."""
    most = 81 if size == 2 else 25  # their weights stay in registers: of two channels, of four
    return "takes no dilation" if s.dilation != (1, 1) else f"takes filters of up to {most} taps" if s.r * s.s > most else None


def count_thread_channels(s: ConvShape, size: int) -> int:
    """Four where their weights fit the registers, else two, of 16-bit floats."""
    return 2 if s.r * s.s > 25 and size == 2 else 4


def list_tiles(s: ConvShape, size: int, multiprocessors: int) -> list[Tile]:
    """Candidates, the most promising first; `size` is the bytes of an input element."""
    tiles: dict[Tile, float] = {}
    vec = count_thread_channels(s, size)
    for cg in (16, 24, 32, 48, 64, 72, 80, 96, 120, 128, 144, 192, 240):
        if s.c % cg or cg * size % 16 or (vec == 4 and cg < 32):
            continue
        for wide in (1, 2, 4, 7) if vec == 2 else (2, 4, 7):
            for parts in (1, 2, 4, 8):
                tw = -(-s.q // parts // wide) * wide
                for th in (1, 2, 4, 7, 14, 28) if vec == 2 else (2, 4, 7):
                    for rg in (1, 2, 4):
                        for stages in (1, 2):
                            best = _fit(s, Tile(th, rg, tw, wide, cg, stages, 1, vec), size)
                            if best is not None:
                                tiles[best] = (
                                    _estimate_cost(s, best, multiprocessors) if vec == 4 else _estimate_many_taps_us(s, best, multiprocessors)
                                )
    ranked = sorted(tiles, key=lambda t: (tiles[t], t))
    if vec == 2:  # of a strip's width and a tile's rows two, with one and two stages or the next best channels
        kinds: dict[tuple[int, int], list[Tile]] = {}
        for t in ranked:
            kinds.setdefault((t.wide, t.th), []).append(t)
        return sorted((t for same in kinds.values() for t in same[:2]), key=lambda t: (tiles[t], t))[: 2 * MOST]
    return [t for wide in (4, 2, 7) for t in [t for t in ranked if t.wide == wide][:MOST]]


def _fit(s: ConvShape, tile: Tile, size: int) -> Tile | None:
    """The tile with as many resident blocks as fit, or None for one that makes no sense."""
    rows, columns = tile.input(s)
    if not 32 <= tile.used <= 512 or tile.rg * tile.th >= s.p + tile.th or rows > 256 or columns > 256 or tile.tw >= s.q + tile.wide:
        return None
    registers = -(-tile.registers(s) // 8) * 8
    if registers > 232:
        return None
    held = 65536 // (registers * tile.threads)
    if tile.vec == 2:  # many registers: a quarter of a multiprocessor has only two or three warps
        held = 4 * (512 // registers) // (tile.threads // 32)
    blocks = min(227 * 1024 // (tile.shared(s, size) + 1024), held, 16)
    if blocks < 1 or blocks * tile.threads < 128:
        return None
    return replace(tile, blocks=blocks)


def _estimate_cost(s: ConvShape, tile: Tile, multiprocessors: int) -> float:
    """A rough order: input read twice at tile borders, idle threads, too few threads to hide latency, an uneven last wave."""
    rows, columns = tile.input(s)
    seams = rows * columns / (tile.rg * tile.th * tile.tw * s.stride[0] * s.stride[1])
    tiles_h, tiles_w = -(-s.p // (tile.rg * tile.th)), -(-s.q // tile.tw)
    idle = tile.threads / tile.used * tiles_h * tile.rg * tile.th * tiles_w * tile.tw / (s.p * s.q)
    tiles = s.n * tiles_h * tiles_w * (s.c // tile.cg)
    turns = tiles / (multiprocessors * tile.blocks)
    uneven = -(-tiles // (multiprocessors * tile.blocks)) / max(turns, 0.25)
    resident = tile.blocks * tile.threads
    again = (tile.th * s.stride[0] + s.r - s.stride[0]) / (tile.th * s.stride[0])  # rows that two threads read
    reads = ((tile.wide - 1) * s.stride[1] + s.s) / (tile.wide * s.stride[1])
    alone = {1: 1.3, 2: 1.05}.get(tile.blocks * tile.stages, 1.0)  # nothing is loaded while it computes
    return alone * (0.6 + 0.4 * seams) * (0.5 + 0.5 * idle) * (0.7 + 0.3 * uneven) * (1 + 120 / resident) * (0.8 + 0.1 * again * reads)


def _estimate_many_taps_us(s: ConvShape, tile: Tile, multiprocessors: int) -> float:
    """A rough time in us for filters of many taps, which are bound by multiplications: a multiprocessor issues four instructions a clock."""
    rows, columns = tile.input(s)
    own_rows, span = (tile.th - 1) * s.stride[0] + s.r, (tile.wide - 1) * s.stride[1] + s.s
    each = tile.th * tile.wide * tile.vec * s.r * s.s + own_rows * (3 * span + 40) + tile.th * tile.wide * 10
    tiles = s.n * -(-s.p // (tile.rg * tile.th)) * -(-s.q // tile.tw) * (s.c // tile.cg)
    resident = min(tile.blocks, -(-tiles // multiprocessors))
    warps = resident * tile.threads // 32
    busy = min(0.95, 0.25 + 0.075 * warps)  # of the clocks: few warps wait for their own results
    turns = -(-tiles // (multiprocessors * tile.blocks))
    compute = turns * warps * each / 4 / busy / 1700
    read = tiles * rows * columns * tile.cg * 2 / 3.5e6 * (1.0 if tile.stages * resident > 1 else 1.3)
    return 2 + s.r * s.s * warps / 1700 + max(compute, read) + 0.2 * min(compute, read)


def make_constants(s: ConvShape, tile: Tile, source: int, target: int, activation: str, fold: bool = False) -> dict[str, int]:
    """The macros of an instance."""
    names = {key.upper(): value for key, value in asdict(tile).items()}
    fixed = {"R": s.r, "S": s.s, "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1], "FROM": source, "TO": target}
    return {**names, **fixed, "ACT": ACTIVATIONS[activation], "FOLD": int(fold)}


def tile_launch(
    s: ConvShape,
    tile: Tile,
    constants: dict[str, int],
    addresses: tuple[int, int, int, int],
    bounds: tuple[float, float],
    scales8: tuple[float, float],
    multiprocessors: int,
    label: str,
) -> Launch:
    """The launch; `addresses` are input, weights, bias, output; `constants` are its macros; `scales8`: steps of a real number
    and the zero point of integer results."""
    size = _BYTES[constants["FROM"]]
    kind = {0: "f32", 1: "f16", 2: "bf16"}.get(constants["FROM"], "u8")
    x, weights, bias, out = addresses
    fields, grid = place_tiles(s, tile, out, bounds, scales8, multiprocessors)
    arguments = DepthwiseTileArguments(make_input_map(x, kind, s, tile, size), weights, bias, fields)
    return launch("depthwise_tile", arguments, constants, grid, tile.threads, shared=tile.shared(s, size), label=label)


def make_input_map(x: int, kind: str, s: ConvShape, tile: Tile, size: int) -> bytes:
    """The tensor map of the input of a tile; `size`: bytes of an element."""
    pixel, (rows, columns) = s.c * size, tile.input(s)
    return tensormap.make_tiled_map(x, kind, (s.c, s.w, s.h, s.n), (pixel, pixel * s.w, pixel * s.w * s.h), (tile.cg, columns, rows, 1), plain=True)


def place_tiles(
    s: ConvShape, tile: Tile, out: int, bounds: tuple[float, float], scales8: tuple[float, float], multiprocessors: int
) -> tuple[TileFields, tuple[int, int, int]]:
    """The fields of a launch, and its grid: the tiles of each channel group are distributed evenly to the blocks that run at once."""
    groups, tiles_h, tiles_w = s.c // tile.cg, -(-s.p // (tile.rg * tile.th)), -(-s.q // tile.tw)
    tiles = s.n * tiles_h * tiles_w
    each = -(-tiles // max(1, min(tiles, multiprocessors * tile.blocks // groups)))
    fields = TileFields(out, s.c, s.p, s.q, s.pad[0], s.pad[1], groups, tiles_h, tiles_w, tiles, bounds, *scales8)
    return fields, (groups * -(-tiles // each), 1, 1)
