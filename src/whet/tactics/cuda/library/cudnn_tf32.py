"""Convolutions of f32 tensors on tensor cores in TF32 by cuDNN, on by --tacticSources=+CUDNN; `--noTF32` forbids it."""

from whet.network.types import F32
from whet.tactics._base import tactic
from whet.tactics.cuda.library._cudnn_conv import LibraryConvolution


@tactic
class CudnnTf32(LibraryConvolution):
    """Operands rounded to 10 bits of mantissa, accumulators in f32."""

    kinds = (F32,)
    math = "tf32"
