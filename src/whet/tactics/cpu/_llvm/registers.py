"""The vector registers of this CPU, as the f32 kernels of blocked images use them: their tiles of accumulators and the blocks of their format follow.

AVX-512 has 32 registers of 16 floats. AVX2 has 16 of 8 floats. NEON has 32 of 4 floats, used as 16 pairs, so that both have the same tiles. Two loads
and two products per cycle keep the multipliers of all three busy from 8 (AVX2, AVX-512) or 16 (NEON) accumulators on.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from whet.network import F32
from whet.tactics._base import Operand
from whet.tactics.cpu._llvm import jit

LINE = 16  # floats of a cache line


@dataclass(frozen=True)
class Registers:
    """`count` vectors of `lanes` floats. The blocked format has blocks of `lanes` channels."""

    lanes: int
    count: int

    @property
    def stored(self) -> Operand:
        """An f32 image in blocks of channels."""
        return Operand(f"nChw{self.lanes}c", F32)


AVX512, AVX2 = Registers(16, 32), Registers(8, 16)


def get_registers() -> Registers:
    """Those that kernels of this process use."""
    return AVX512 if jit.has("avx512f") else AVX2


def why_no_registers() -> str | None:
    """The reason why tiles of accumulators do not fit this CPU, or None."""
    if platform.machine().lower() in ("aarch64", "arm64") or jit.has("avx512f") or (jit.has("avx2") and jit.has("fma")):
        return None
    return "its accumulators need the registers of AVX2 and FMA, of AVX-512 or of NEON"
