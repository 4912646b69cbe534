"""The tuning space of the tensor-core convolution: tile, ring, split, and which of them make sense for a shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product

SHARED_LIMIT = 227 * 1024  # bytes a block may have on Hopper
REGISTERS = 65536
_REALLOCATED = 160  # registers of each of 384 threads that multiply; those of the loading warpgroup keep 32
_FULL = 0.6  # blocks per multiprocessor that fill a round
_MIDDLE_TILES = 0.5  # tiles of 128 x 128 per multiprocessor from which large tiles are candidates for fewer than 3000 pixels
_MIDDLE = 8  # of them


@dataclass(frozen=True, order=True)
class ConvConfig:
    """One instance of `conv.cu`, less activation, type and how the input is read."""

    wgs: int  # warpgroups that multiply
    mi: int  # 64-row tiles of each
    bn: int  # output channels of a tile
    bk: int = 64  # channels of a K step
    stages: int = 4
    sk: int = 1  # blocks that share K
    blocks: int = 1  # resident blocks a multiprocessor
    direct: int = 0  # 1: results go from registers to memory; for few tiles, which are bound by latency
    halo: int = 0  # slots for input tiles that hold the pixels of all filter taps; 0: each tap's pixels are loaded for themselves
    size: int = 2  # bytes of an input element
    outs: int = 1  # output tiles in flight
    hold: int = 0  # all K steps, if a block keeps the weights of its output channels; 0: they stream
    once: int = 0  # the K steps of a block that makes one tile and has a slot for each step; 0: slots are used again

    @property
    def bm(self) -> int:
        """Pixels of a tile."""
        return 64 * self.wgs * self.mi

    @property
    def row(self) -> int:
        """Bytes of a K step of one pixel."""
        return self.bk * self.size

    @property
    def reallocate(self) -> int:
        """Registers of a thread that multiplies, if the loading warp is one of a warpgroup that gives its own to the others; else 0.

        Four warps of one of the register files leave 128 for each thread, too few for the accumulators of three warpgroups and 192 channels.
        """
        staged = self.size == 2 and self.sk == 1 and not self.direct
        return _REALLOCATED if staged and self.wgs == 3 and self.registers > 128 else 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.wgs * 128 + (128 if self.reallocate else 32)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, alignment slack included; mirrors the layout in conv.cu."""
        return self.shared_with(self.bm * self.row)

    def shared_with(self, slot: int) -> int:
        """The same for input slots of `slot` bytes."""
        ring = (self.halo or self.stages) * slot + (self.hold or self.stages) * (-(-self.bn * self.row // 1024) * 1024)
        extra = self.bm * (self.bn + 8) * 4 if self.sk > 1 else 0 if self.direct else self.outs * self.bm * self.bn * self.size
        factors = self.wgs * self.bn * (4 if self.size == 2 else 16)
        return 1024 + ring + extra + factors + (self.stages + self.halo) * 16 + self.wgs * self.outs * 8 + 16

    @property
    def chains(self) -> int:
        """Sets of accumulators: a product waits for the one before on the same set, so small tiles that are not staged have several.

        Instances with a depthwise convolution in front or with two accumulators (`BETWEEN`) have one set whatever their tile.
        """
        staged = self.sk == 1 and not self.direct
        if not staged and self.mi * self.bn <= 32 and self.row >= 128:
            return 4
        return 2 if not staged and self.mi * self.bn <= 64 and self.row >= 64 else 1

    @property
    def registers(self) -> int:
        """An estimate of the registers a thread needs: accumulators and about 40 more."""
        direct, chains = self.sk > 1 or self.direct, self.chains
        if self.size == 1:
            return chains * self.mi * self.bn // 2 + (60 if direct else 40 + self.mi * self.bn // 16) + (self.mi * self.bn // 4 if self.direct else 0)
        return chains * self.mi * self.bn // 2 + (44 if direct else 38) + (self.bn // 4 + self.mi * self.bn // 4 if self.direct else 0)

    @property
    def register_limit(self) -> int:
        """Registers a thread may have: warps are allocated to four register files of 512 per lane, in units of eight."""
        if self.reallocate:
            return self.reallocate if self.blocks == 1 and not self.halo else 0
        warps = -(-self.threads // 32 * self.blocks // 4)
        return min(255, 512 // warps // 8 * 8)

    def valid(self) -> bool:
        """True if a Hopper multiprocessor can hold `blocks` of these."""
        if self.size == 1 and self.bn % 32:
            return False
        fits = self.blocks * (self.shared + 1024) <= SHARED_LIMIT + 1024
        return fits and self.registers <= self.register_limit and self.bm <= 256 and self.bm % self.sk == 0

    def constants(self, *, im2col: bool, act: int, bf16: bool, out_f32: bool = False, odd: bool = False) -> dict[str, int]:
        """The macros that make the instance."""
        names = {key.upper(): value for key, value in asdict(self).items() if key != "size"}
        names["CHAINS"] = self.chains
        if self.reallocate:
            names["REALLOCATE"] = self.reallocate
        return {**names, "IM2COL": int(im2col), "ACT": act, "BF16": int(bf16), "OUT_F32": int(out_f32), "ODD": int(odd), "IN8": 0, "TO": 1, "FOLD": 0}

    def __str__(self) -> str:
        return (
            f"{self.bm}x{self.bn}x{self.bk}_w{self.wgs}_s{self.stages}_k{self.sk}_b{self.blocks}"
            + "d" * self.direct
            + (f"h{self.halo}" if self.halo else "")
            + ("_8bit" if self.size == 1 else "")
            + (f"_o{self.outs}" if self.outs > 1 else "")
            + (f"_hold{self.hold}" if self.hold else "")
            + "_once" * (self.once > 0)
        )


MOST_ONCE = 16  # K steps: they are unrolled


def with_once(config: ConvConfig, steps: int, touched: int = 0) -> ConvConfig:
    """The configuration with a slot for each of a block's K steps, if it has as many slots; for blocks that compute one tile.

    `touched` are the input tiles of all taps that a block reads (halo).
    """
    each = steps // config.sk
    kind = config.size == 2 or not config.halo  # of 8 bits with input tiles of all taps descriptors would leave the uniform registers
    own = kind and config.hold == 0 and steps % config.sk == 0 and 0 < each <= min(config.stages, MOST_ONCE) and touched <= config.halo
    return replace(config, once=each) if own and (config.sk > 1 or config.direct) else config


def list_small_batch_configs(m: int, k: int, steps: int, bk: int, multiprocessors: int, size: int = 2) -> list[ConvConfig]:
    """Candidates for few pixels: small tiles, K split over a cluster, about one block per multiprocessor."""
    configs = set()
    for wgs in (1, 2):
        for bn in (16, 32, 48, 64, 80, 96, 128):
            if (bn > 32 // size and bn >= 2 * k) or bn * size % 32:
                continue
            for sk in (1, 2, 4, 8, 16):
                blocks = -(-m // (64 * wgs)) * -(-k // bn) * sk
                if bn in (48, 80, 96) and not _FULL * multiprocessors <= blocks <= multiprocessors:
                    continue  # odd widths are for shapes that fill one round of blocks with them
                if sk > max(steps, 1) or (sk > 1 and blocks > 2 * multiprocessors) or 64 * wgs // sk < 8 // wgs or blocks > 12 * multiprocessors:
                    continue
                if sk > 1 and wgs * bn > 128:
                    continue  # the parts would cost registers and time between the blocks
                if blocks * 6 < multiprocessors and 2 * sk <= min(steps, 16):
                    continue  # a larger split exists and keeps more multiprocessors busy
                each = -(-steps // sk)
                stages = next((s for s in (2, 4, 6, 8, 9) if s >= each), 8)
                config = ConvConfig(wgs, 1, bn, bk, stages, sk, direct=int(sk == 1), size=size)
                while stages > 2 and config.shared > 112 * 1024:  # leaves shared memory for the next layer's weights
                    stages -= 2
                    config = ConvConfig(wgs, 1, bn, bk, stages, sk, direct=int(sk == 1), size=size)
                one_turn = sk > 1 or blocks <= multiprocessors
                if config.valid():
                    configs.add(with_once(config, steps) if one_turn else config)
                long = next((c for n in (10, 8, 6, 4) if n < each and (c := replace(config, stages=n)).valid()), config)
                if one_turn and config.stages <= 4 < long.stages:  # about 80 KB in flight hide the latency of the L2 cache
                    configs.add(long)
                deep = replace(config, stages=each)  # uses the next layer's shared memory for a slot for each step
                if one_turn and config.stages < each <= MOST_ONCE and steps % sk == 0 and deep.valid():
                    configs.add(with_once(deep, steps))
    return sorted(configs)


LARGE_TILES = (
    *(
        (1, 1, 64),
        (2, 1, 64),
        (2, 2, 64),
        (3, 1, 64),
        (1, 2, 64),
        (1, 1, 32),
        (2, 1, 32),
        (1, 1, 128),
        (2, 1, 128),
        (3, 1, 128),
        (2, 2, 128),
        (1, 2, 128),
    ),
    *((2, 1, 192), (3, 1, 192), (2, 1, 256), (1, 1, 256)),
    *((2, 1, 48), (1, 1, 80), (2, 1, 80), (1, 1, 96), (2, 1, 96), (3, 1, 96), (2, 2, 96), (1, 1, 144), (2, 1, 144), (1, 1, 160), (2, 1, 160)),
)  # warpgroups, 64-row tiles of each, channels


@cache
def list_large_batch_configs(k: int, steps: int, bk: int, size: int = 2) -> tuple[ConvConfig, ...]:
    """Candidates for many pixels: large tiles, persistent blocks, as many of them as fit."""
    configs = set()
    for wgs, mi, bn in LARGE_TILES:
        if size == 1 and (wgs, mi, bn) == (1, 1, 32):
            continue  # not tried on 8 bits
        if (bn >= 2 * k and bn > 32) or (bn % 64 and bn > 32 and not -(-k // bn) * bn < -(-k // 64) * 64):
            continue  # odd widths are for channel counts that waste less with them
        ways = [(1, 0, 0)]
        if steps <= 4:  # few steps: bound by input and output bytes
            ways += [(2, 0, 0), (2, steps, 0), *([(3, steps, 0)] if size == 1 else [])]
        if steps <= 2 and mi == 1 and bn <= 96:
            ways += [(1, steps, 1)]
        most = 8 if (wgs, mi, bn) == (1, 1, 32) else 4  # of the smallest tiles many: a round of blocks that is nearly empty costs little
        for stages, blocks, (outs, hold, direct) in product((2, 3, 4, 6), range(1, most + 1), ways):
            if stages <= 4 or not hold:
                config = ConvConfig(wgs, mi, bn, bk, stages, 1, blocks, direct, size=size, outs=outs, hold=hold)
                more = replace(config, blocks=blocks + 1)
                if config.valid() and (not more.valid() or blocks == most) and not (stages > 3 and steps <= 2):
                    configs.add(config)
    return tuple(sorted(configs))


def estimate_us(config: ConvConfig, m: int, k: int, steps: int, multiprocessors: int) -> float:
    """A rough time in us of a convolution on an H200, which only orders candidates.

    A multiprocessor reads about 83 bytes/ns, all together about 8000; the tensor cores do 6 TFLOP/s each, less for tiles of few channels.
    """
    tiles = -(-m // config.bm) * -(-k // config.bn)
    each = -(-steps // config.sk)
    per_step_bytes = (config.bm + (0 if config.hold else config.bn)) * config.row
    resident = min(config.blocks, -(-tiles * config.sk // multiprocessors))
    turns = -(-tiles * config.sk // multiprocessors)
    share = max(per_step_bytes / 83, per_step_bytes * min(tiles * config.sk, multiprocessors) / 8000)
    mma = 2 * config.bm * config.bn * config.row / 12000 * max(1.0, 128 / config.bn / 1.5)
    step_ns = max(share, mma, 600 / config.stages / resident)
    if config.outs > 1 or (config.direct and config.hold):
        return _estimate_overlapped(config, turns, each, step_ns, resident)
    store_ns = config.bm * config.bn * (1 if config.direct else 1.25) * config.size / (30 * resident)
    ending = 300 if config.direct else 900 if config.sk == 1 else 900 + config.bm * config.bn * 4 / 25
    return (900 + turns * (each * step_ns + store_ns) + ending) / 1000


def _estimate_overlapped(config: ConvConfig, turns: int, each: int, step_ns: float, resident: int) -> float:
    """With two output tiles, storing one overlaps with computing the next."""
    store_ns = config.bm * config.bn * 1.25 * config.size / (30 * resident)
    return (900 + turns * max(each * step_ns, store_ns, 0.6 * (each * step_ns + store_ns)) + 900) / 1000


def pick_varied(configs: list[ConvConfig], most: int, each: int = 9) -> list[ConvConfig]:
    """The first `most` configurations, with at most `each` of a kind before any kind has more."""
    counts: dict[tuple, int] = {}
    first: list[ConvConfig] = []
    rest: list[ConvConfig] = []
    for c in configs:
        way = (c.direct, c.outs, c.hold > 0, c.halo > 0, c.sk > 1)
        counts[way] = counts.get(way, 0) + 1
        (first if counts[way] <= each else rest).append(c)
    return (first + rest)[:most]


def step_channels(c: int, size: int) -> int:
    """Channels of a K step: 128 bytes of a pixel, fewer if the pixel has fewer."""
    return (64 if c * size > 64 else 32 if c * size > 32 else 16) * 2 // size


def list_configs(m: int, k: int, c: int, taps: int, multiprocessors: int, size: int = 2) -> list[ConvConfig]:
    """Candidates for m pixels, k output and c input channels (of `size` bytes) of `taps` filter taps, the most promising first."""
    bk = step_channels(c, size)
    return list_configs_of_steps(m, k, taps * -(-c // bk), bk, multiprocessors, size)


def _pick_promising(configs: Sequence[ConvConfig], m: int, k: int, steps: int, multiprocessors: int) -> list[ConvConfig]:
    """The _MIDDLE most promising configurations, two of a tile at most: those with the most stages."""
    counts: Counter[tuple] = Counter()
    picked = []
    for c in sorted(configs, key=lambda c: (estimate_us(c, m, k, steps, multiprocessors), -c.stages, c)):
        tile = (c.wgs, c.mi, c.bn, c.outs, c.hold)
        counts[tile] += 1
        if counts[tile] <= 2:
            picked.append(c)
    return picked[:_MIDDLE]


def list_configs_of_steps(m: int, k: int, steps: int, bk: int, multiprocessors: int, size: int = 2) -> list[ConvConfig]:
    """Candidates for m pixels, k output channels and `steps` K steps of `bk` channels (of `size` bytes), the most promising first."""
    configs: set[ConvConfig] = set()
    if m <= 30000:
        configs.update(list_small_batch_configs(m, k, steps, bk, multiprocessors, size))
    large = list_large_batch_configs(k, steps, bk, size)
    if m >= 3000:
        configs.update(large)
    elif -(-m // 128) * -(-k // 128) >= _MIDDLE_TILES * multiprocessors:
        configs.update(_pick_promising(large, m, k, steps, multiprocessors))
    return sorted(configs, key=lambda config: (estimate_us(config, m, k, steps, multiprocessors), config))
