"""The tuning space of the tensor-core convolution: tile, ring, split, and which of them make sense for a shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass

SHARED_LIMIT = 227 * 1024  # bytes a block may have on Hopper
REGISTERS = 65536


@dataclass(frozen=True, order=True)
class ConvConfig:
    """One instance of `_kernels/conv.cu`, less activation, type and how the input is read."""

    wgs: int  # warpgroups that multiply
    mi: int  # 64-row tiles of each
    bn: int  # output channels of a tile
    bk: int = 64  # channels of a K step
    stages: int = 4
    sk: int = 1  # blocks that share K
    blocks: int = 1  # resident blocks a multiprocessor

    @property
    def bm(self) -> int:
        """Pixels of a tile."""
        return 64 * self.wgs * self.mi

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.wgs * 128 + 64

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, alignment slack included; mirrors the layout in conv.cu."""
        row = self.bk * 2
        ring = self.stages * (self.bm * row + -(-self.bn * row // 1024) * 1024)
        extra = self.sk * (self.bm // self.sk) * (self.bn + 8) * 4 if self.sk > 1 else self.bm * self.bn * 2
        return 1024 + ring + extra + self.wgs * self.bn * 4 + self.stages * 16 + 16

    @property
    def registers(self) -> int:
        """An estimate of the registers a thread needs: accumulators and about 40 more."""
        return self.mi * self.bn // 2 + 40

    def valid(self) -> bool:
        """Whether a Hopper multiprocessor can hold `blocks` of these."""
        fits = self.blocks * (self.shared + 1024) <= SHARED_LIMIT + 1024
        return fits and self.registers <= 255 and self.registers * self.threads * self.blocks <= REGISTERS and self.bm <= 256 and self.bm % self.sk == 0

    def constants(self, *, im2col: bool, act: int, bf16: bool) -> dict[str, int]:
        """The macros that make the instance."""
        names = {key.upper(): value for key, value in asdict(self).items()}
        return {**names, "IM2COL": int(im2col), "ACT": act, "BF16": int(bf16)}

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk}_w{self.wgs}_s{self.stages}_k{self.sk}_b{self.blocks}"


def _blocks(config: ConvConfig) -> int:
    """How many such blocks a multiprocessor holds, by shared memory and registers, at most 4."""
    by_memory = SHARED_LIMIT // (config.shared + 1024)
    by_registers = REGISTERS // (config.registers * config.threads)
    return max(1, min(4, by_memory, by_registers))
