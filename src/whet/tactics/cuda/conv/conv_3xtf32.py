"""Convolutions and products of f32 tensors on tensor cores, each value as two of TF32: three products, f32 accumulators. For `--noTF32`."""

from whet.tactics._base import tactic
from whet.tactics.cuda._device.kernel import RTOL
from whet.tactics.cuda.conv._tf32_tactic import F32Product


@tactic
class Conv3xTf32(F32Product):
    """Operands of 21 bits of mantissa; the product of both small parts (2**-20) is left out."""

    terms = 3
    math = "f32 by three"
    rtol = RTOL["f32"]
