"""Convolutions in f16 and bf16 by cuDNN: the referee of whet's own, on by --tacticSources=+CUDNN."""

from whet.network.types import BF16, F16
from whet.tactics._base import tactic
from whet.tactics.cuda.library._cudnn_conv import LibraryConvolution


@tactic
class CudnnHalf(LibraryConvolution):
    """Channels last, accumulators in f32, any groups."""

    kinds = (F16, BF16)
    math = "half"
