"""Base class of the tactics with 2:4 kernels for AVX2 or AVX-512, and the tiles with accumulators that fit the registers."""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Config, PlanRefused, Signature
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import CompiledTactic

_TILES = {8: ((4, 2), (2, 4)), 16: ((4, 4), (2, 8))}  # by lanes: (vectors of channels, rows)
_ONE_ROW = ((4, 1), (2, 1))


class TwoFourTactic(CompiledTactic):
    """Its kernels need AVX2 and FMA."""

    def unavailable(self) -> str | None:
        return jit.why_unavailable() or (None if jit.has("avx2") and jit.has("fma") else "needs AVX2 and FMA")

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()


def list_tile_configs(rows: int, channels: int, lanes: int) -> list[Config]:
    """The tiles that a product of so many rows and channels may use."""
    tiles = _ONE_ROW if rows == 1 else _TILES[lanes]
    return [(("blocks", blocks), ("rows", n)) for blocks, n in tiles if blocks == 2 or blocks * lanes <= channels]


def tile_of(config: Config, lanes: int) -> tuple[int, int]:
    """(vectors of channels, rows) of a config. Raises PlanRefused for a tile that does not fit the registers."""
    sizes = {name: int(value) for name, value in config}
    tile = sizes["blocks"], sizes["rows"]
    if tile not in (*_ONE_ROW, *_TILES[lanes]):
        raise PlanRefused(f"a tile of {tile[0]} vectors by {tile[1]} rows does not fit the registers")
    return tile
