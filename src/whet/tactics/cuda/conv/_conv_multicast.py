"""Tiles of conv.cu for products of a few tiles of rows, whose blocks share the loads of their operands (CAST, CAST_N)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from whet.tactics.cuda.conv._conv_config import ConvConfig, estimate_us, with_once

_MOST_BLOCKS = 16  # of a cluster on Hopper
_SHARED = (112 * 1024, 224 * 1024)  # bytes that leave room for the next kernel's blocks beside a block, and those of a block alone
_CASTS = ((2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4))  # tiles of rows, of columns


def list_multicast_configs(m: int, k: int, steps: int, bk: int, multiprocessors: int) -> list[ConvConfig]:
    """Candidates for m rows of 16-bit floats, k columns and `steps` K steps of `bk` channels: one round of blocks, as many as multiprocessors allow, the
    most promising first.

    Without multicast the blocks of all row tiles read the same weights from the L2 cache, and those of all column tiles the same rows: its bandwidth
    limits small tiles.
    """
    configs = set()
    for wgs, (cast, cast_n), sk, limit in product((1, 2), _CASTS, (1, 2, 4), _SHARED):
        rows, each = -(-m // (64 * wgs)), -(-steps // sk)
        padded = -(-rows // cast) * cast
        if cast * cast_n * sk > _MOST_BLOCKS or sk > steps or padded * 3 > rows * 4:
            continue
        unit = max(16, 8 * cast)
        fitting = [n for n in range(unit, 129, unit) if (tiles := -(-k // n)) % cast_n == 0 and padded * tiles * sk <= multiprocessors]
        for bn in fitting[:2]:
            if sk > 1 and wgs * bn > 128:
                continue  # the parts would cost registers and time between the blocks
            base = ConvConfig(wgs, 1, bn, bk, 2, sk, direct=int(sk == 1), cast=cast, cast_n=cast_n)
            rings = [c for n in range(2, max(each, 2) + 1) if (c := replace(base, stages=n)).valid() and c.shared <= limit]
            if rings:
                configs.add(with_once(rings[-1], steps))
    return sorted(configs, key=lambda config: (estimate_us(config, m, k, steps, multiprocessors), config))
