"""Convolutions in full f32 by cuDNN, on by --tacticSources=+CUDNN."""

from whet.network.types import F32
from whet.tactics._base import tactic
from whet.tactics.cuda.library._cudnn_conv import LibraryConvolution


@tactic
class CudnnF32(LibraryConvolution):
    """Products and accumulators in f32: no engine that uses tensor cores. Some take channels first only."""

    kinds = (F32,)
    formats = ("nhwc", "linear")
