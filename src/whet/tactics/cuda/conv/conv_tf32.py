"""Convolutions and products of f32 tensors on tensor cores in TF32, both operands rounded to nearest; `--noTF32` forbids it."""

from whet.tactics._base import tactic
from whet.tactics.cuda.conv._tf32_tactic import F32Product


@tactic
class ConvTf32(F32Product):
    """Operands of 10 bits of mantissa: 2**-11 each at most, in accumulators of the tensor cores' f32."""

    terms = 1
    math = "tf32"
    rtol = 2e-3
