"""Error bounds of products with an epilogue: sum, activation, and rounding to the result's type.

A kernel adds products, applies an activation f and stores the result. With a sum that is off by d, relative to the largest sum L, the result
is off by at most

    d * L * max|f'| + a + r * max|f|        max|f'| and max|f| over [-L, L]

where `a` is the error of the kernel's approximation of f and `r` that of one rounding to the result's type. Relative to the largest result:

    d * g + a / max|f| + r                  g = L * max|f'| / max|f|, the gain of the activation

The gain of GELU is at most 1.29 (at L = 0.85), that of SiLU 1.28, that of ReLU 1. An activation with limits has a gain that grows with L without
a bound: a tactic, which does not know L, declares that of sums that do not reach the limits; verification, which does, allows the effect of
the sum's error on the actual results (builder/verify/sum_errors.py). Sums of 16-bit and f32 operands in f32 are off by less than 1e-5, so that
the declared bounds of these types (RTOL in cuda/_device/kernel.py) are those of rounding; sums of integers are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from whet.ops._erf import erf

ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "f8e4m3": 0.0}  # of one value; a step of e4m3 is subtracted from differences
LIMITED = 1.0  # the largest sum for which tactics declare the gain of an activation with limits
_LIMITED_KINDS = ("sigmoid", "tanh", "hardsigmoid")
_LARGEST = 64.0
FLOAT8_UNIT = 2.0**-13  # the last bit that the tensor cores keep of a sum of float8 products, relative to its largest term
TANH_APPROX = 2.0**-12 + 2.6e-5  # error of GELU and SiLU by the instruction `tanh.approx`, relative to the largest result (cuda/_device/common.cuh)


def bound_float8_sum(products: int) -> float:
    """The error of a sum of this many float8 products of random signs, relative to the largest sum; measured on the H200 for 4608 products in one
    chain: 2.9e-3 (one rounding of e4m3: 3e-2 of each value). Verification allows more where the products' signs and sizes do (`count_lost_units`)."""
    return 1e-3 + 8e-7 * products


def count_lost_units(products: int) -> float:
    """What Hopper's tensor cores lose of a sum of `products` e4m3 products of random signs, in units of FLOAT8_UNIT times the mean running sum;
    if more of them have one sign than the other, half of the difference is lost in addition.

    An instruction adds 32 products to the accumulator: it aligns them to the largest magnitude, keeps 13 bits below its leading one, and truncates
    the rest of each term towards zero (14 bits: DeepSeek-V3, arXiv 2412.19437, section 3.5.2; an accumulator with 13 bits of fraction:
    SageAttention2, arXiv 2411.10958). So each term loses half a unit on average, at most:
      - the accumulator, once per instruction: products / 64;
      - the products, whose losses have their signs: half of the difference of their numbers (a sum of 4608 positive products is 8e-2 too small);
      - and the fluctuation of losses that cancel: sqrt(products), 1.7 standard deviations.
    The mean running sum is (|s| + sqrt(sum p^2)) / 2 for products in random order: it grows towards the sum s, and is off that line by less than half
    of the root of the sum of squares, which also bounds the largest product.
    """
    return -(-products // 32) / 2 + products**0.5


def bound_result(sum_error: float, activation: tuple[str, float, float], stored: str, approximation: float = 0.0) -> float:
    """The error of a result of type `stored`, relative to the largest one, from that of the sum (relative to the largest sum).

    `activation` is a kind with its two parameters as in cuda/_device/source.py; `approximation` is the error of the kernel's function.
    """
    return sum_error * compute_gain(*activation) + approximation + ROUNDING.get(stored, 0.0)


@functools.lru_cache(maxsize=256)
def compute_gain(kind: str, first: float = 0.0, second: float = 0.0) -> float:
    """The largest factor between the relative error of a sum and that of the activation's result, over ranges [-L, L]; at least 1."""
    if kind == "clip":
        return 1.0  # of sums within its limits
    z = np.geomspace(1e-3, LIMITED if kind in _LIMITED_KINDS else _LARGEST, 4001)
    points = np.concatenate([-z[::-1], z])
    values = FUNCTIONS[kind](points, first, second)
    slope, size = (
        np.maximum.accumulate(np.maximum(a[len(z) :], a[: len(z)][::-1])) for a in (np.abs(np.gradient(values, points)), np.abs(values))
    )
    return float(max(1.0, np.max(slope * z / np.maximum(size, 1e-30))))


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * z))


def _gelu(z: np.ndarray) -> np.ndarray:
    return 0.5 * z * (1 + erf(z * 0.5**0.5))


FUNCTIONS: dict[str, Callable[[np.ndarray, float, float], np.ndarray]] = {  # as in cuda/_device/common.cuh
    "clip": lambda z, low, high: np.clip(z, low, high),
    "silu": lambda z, _a, _b: z * _sigmoid(z),
    "hardswish": lambda z, _a, _b: z * np.clip(z / 6 + 0.5, 0, 1),
    "gelu": lambda z, _a, _b: _gelu(z),
    "sigmoid": lambda z, _a, _b: _sigmoid(z),
    "tanh": lambda z, _a, _b: np.tanh(z),
    "leaky_relu": lambda z, slope, _b: np.where(z >= 0, z, slope * z),
    "hardsigmoid": lambda z, slope, offset: np.clip(slope * z + offset, 0, 1),
    "gelu_tanh": lambda z, _a, _b: 0.5 * z * (1 + np.tanh(0.79788456 * (z + 0.044715 * z**3))),
    "elu": lambda z, slope, _b: np.where(z >= 0, z, slope * np.expm1(np.minimum(z, 0))),
    "mish": lambda z, _a, _b: z * np.tanh(np.logaddexp(0, z)),
}
