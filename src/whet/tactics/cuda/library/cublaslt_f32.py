"""Convolutions and products in full f32 by cuBLASLt, if it is installed."""

from whet.network.types import F32
from whet.tactics._base import tactic
from whet.tactics.cuda.library._library_gemm import LibraryProduct


@tactic
class CublasltF32(LibraryProduct):
    """Sums and products in f32."""

    kinds = (F32,)
