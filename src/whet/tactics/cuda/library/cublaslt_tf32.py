"""Convolutions and products of f32 tensors on tensor cores in TF32 by cuBLASLt; `--noTF32` forbids it."""

from whet.network.types import F32
from whet.tactics._base import tactic
from whet.tactics.cuda.library._library_gemm import LibraryProduct


@tactic
class CublasltTf32(LibraryProduct):
    """Operands rounded to 10 bits of mantissa, accumulators in f32."""

    kinds = (F32,)
    math = "tf32"
