"""Tiles of conv.cu for a convolution: input tiles that hold the pixels of all filter taps, the limits, and the candidates in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from whet.backends.cuda.launch import MAX_SHARED
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.conv._conv_config import ConvConfig, estimate_us, list_configs, step_channels, with_once


@dataclass(frozen=True)
class Halo:
    """A tile of output rows of one image with all input pixels that its filter taps need; see HALO in conv.cu."""

    wide: int  # pixels from row to row
    rows: int  # output rows of a tile
    slot: int  # bytes of an input slot: those of a copy, and those that the last tap's shifted rows may read beyond it
    box: int  # bytes that a copy fills

    @staticmethod
    def of(shape: ConvShape, config: ConvConfig) -> Halo | str:
        """For a shape and a configuration, or why not."""
        if shape.stride != (1, 1) or shape.dilation != (1, 1) or shape.r * shape.s == 1:
            return "input tiles with all taps take filters of several taps, stride 1 and no dilation"
        wide = shape.q + shape.s - 1
        rows = min(shape.p, (config.bm - shape.q) // wide + 1) if config.bm >= shape.q else 0
        if rows < 1 or wide > 256 or rows + shape.r - 1 > 256:
            return f"a row of {shape.q} pixels does not fit a tile of {config.bm}"
        read = max((rows + shape.r - 1) * wide, config.bm + (shape.r - 1) * wide + shape.s - 1)
        return Halo(wide, rows, -(-read * config.row // 1024) * 1024, (rows + shape.r - 1) * wide * config.row)


def why_not_config(config: ConvConfig, shape: ConvShape) -> str | None:
    """Why a configuration cannot run a shape, or None."""
    if config.hold not in (0, shape.steps(config.bk)) or (config.hold and config.sk > 1):
        return f"holds the weights of {config.hold} steps of {shape.steps(config.bk)}"
    if config.once and not config.halo and with_once(config, shape.steps(config.bk)) != config:
        return f"has slots for {config.once} steps of {shape.steps(config.bk)}"
    if not config.halo:
        return None
    if config.once and with_once(config, steps := shape.steps(config.bk), _count_input_tiles(config, steps, shape.r * shape.s)) != config:
        return f"has slots for {config.once} steps of {steps}"
    halo = Halo.of(shape, config)
    if isinstance(halo, str):
        return halo
    need = config.shared_with(halo.slot)
    return f"needs {need} bytes of shared memory" if (need + 1024) * config.blocks > MAX_SHARED + 1024 else None


def list_conv_configs(shape: ConvShape, multiprocessors: int, size: int = 2) -> list[ConvConfig]:
    """All candidates for a shape (elements of `size` bytes), the most promising first: those with input tiles of all taps, then the rest."""
    configs = list_configs(shape.m, shape.k, shape.c, shape.r * shape.s, multiprocessors, size)
    with_taps = [(_estimate_halo_us(c, shape, multiprocessors), c) for c in _list_halo_configs(shape, multiprocessors, size)]
    both = sorted([*with_taps, *((estimate_us(c, shape.m, shape.k, shape.steps(c.bk), multiprocessors), c) for c in configs)])
    return [c for _, c in both]


def _list_halo_configs(shape: ConvShape, multiprocessors: int, size: int) -> list[ConvConfig]:
    """Candidates with input tiles: small ones that share K in a cluster, larger ones for many pixels."""
    if shape.r * shape.s == 1 or shape.stride != (1, 1) or shape.dilation != (1, 1):
        return []
    bk = step_channels(shape.c, size)
    configs: set[ConvConfig] = set()
    taps, steps = shape.r * shape.s, shape.steps(bk)
    for wgs, mi in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        for bn in (16, 32, 64, *([80] if shape.k % 80 == 0 else []), 128):
            if bn > 32 // size and bn >= 2 * shape.k:
                continue
            for sk in (1, 2, 4, 8, 16):
                base = ConvConfig(wgs, mi, bn, bk, 2, sk, 1, int(sk == 1), 1, size)
                halo = Halo.of(shape, base)
                if isinstance(halo, str) or sk > steps or (sk > 1 and (wgs * bn > 128 or mi > 1)):
                    continue
                blocks = shape.n * -(-shape.p // halo.rows) * -(-shape.k // bn) * sk
                if (sk > 1 and blocks > 2 * multiprocessors) or (blocks * 6 < multiprocessors and 2 * sk <= min(steps, 16)) or base.bm // sk < 4:
                    continue
                each = -(-steps // sk)
                slots = min(2, -(-each // taps) + (steps % sk != 0 or each % taps != 0))
                many = blocks > 2 * multiprocessors
                limit = MAX_SHARED if many else 112 * 1024
                for stages, resident, places in product((3, 4, 6, 9, 12), (1, 2, 3) if many else (1,), {slots, 2} if many else {slots}):
                    config = replace(base, stages=stages, halo=places, blocks=resident)
                    if stages <= max(each, 3):
                        keeps = [replace(config, hold=steps, stages=2)] if many else []
                        fitting = (c for c in (config, *keeps) if c.valid() and c.shared_with(halo.slot) <= limit)
                        configs.update(c for c in fitting if why_not_config(c, shape) is None)
    best: dict[ConvConfig, ConvConfig] = {}  # of equal tiles keep the deepest ring
    for c in sorted(configs):
        best[replace(c, stages=1)] = c
    return sorted(
        with_once(c, steps, _count_input_tiles(c, steps, taps)) if _computes_one_tile(c, shape, multiprocessors) else c for c in best.values()
    )


def _computes_one_tile(config: ConvConfig, shape: ConvShape, multiprocessors: int) -> bool:
    """True if a block computes one tile."""
    halo = Halo.of(shape, config)
    return config.sk > 1 or (isinstance(halo, Halo) and shape.n * -(-shape.p // halo.rows) * -(-shape.k // config.bn) <= multiprocessors)


def _count_input_tiles(config: ConvConfig, steps: int, taps: int) -> int:
    """Input tiles of all taps that a block reads at most."""
    each = steps // config.sk
    return max(((rank + 1) * each - 1) // taps - rank * each // taps + 1 for rank in range(config.sk)) if each else 0


def _estimate_halo_us(config: ConvConfig, shape: ConvShape, multiprocessors: int) -> float:
    """As estimate_us, for input tiles of all taps."""
    halo = Halo.of(shape, config)
    assert not isinstance(halo, str)
    steps, taps, row = shape.steps(config.bk), shape.r * shape.s, config.row
    tiles = shape.n * -(-shape.p // halo.rows) * -(-shape.k // config.bn)
    turns = -(-tiles * config.sk // multiprocessors)
    each = -(-steps // config.sk)
    taken = -(-each // taps) * halo.box + (0 if config.hold else 1) * max(0, each - (config.stages if turns == 1 else 0)) * config.bn * row
    busy = min(tiles * config.sk, multiprocessors)
    mma = each * 2 * config.bm * config.bn * row / 12000 * max(1.0, 128 / config.bn / 1.5)
    store = config.bm * config.bn * config.size / 30
    ending = 300 if config.sk == 1 else 900 + config.bm * config.bn * 4 / 25
    alone = 150 if config.halo > 1 or turns == 1 else 500  # with one slot a tile waits for its input
    return (900 + turns * (alone + max(taken / 83, taken * busy / 8000, mma) + store) + ending) / 1000
