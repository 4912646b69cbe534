"""Error of an output against its reference: floats by two norms, e4m3 values in steps, integers exactly except for rounding ties."""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np

from whet.network import F8E4M3, DType

_FEW_TIES = 8  # integers that may always differ by one
_TIES = 0.25  # share of the integers, other than zeros and saturated ones, that may differ by one; another rounding mode changes half of them
_SATURATED = 4.0  # times the largest e4m3 value: assumed unsaturated magnitude of a saturated result
_BLOCK = 1 << 13  # values that are compared at once: their temporary arrays stay in the cache, and a BLAS uses one thread for so few
_FLOAT8_SHARE = 0.025  # noise-to-signal ratio of e4m3 values allowed for a few rounding ties; rounding alone has 0.027


def compare_output(got: np.ndarray, ref: np.ndarray, dtype: DType, rtol: float = 0.0, largest: float = 0.0) -> tuple[float, str]:
    """The error of an output, and a description of errors without a magnitude. 0 for a correct output.

    `rtol` is the relative error that the tactic allows itself before it rounds to 8 bits; float errors are relative to `largest` if the reference
    has no larger value.
    """
    if got.shape != ref.shape:
        return np.inf, f"shape {list(got.shape)} instead of {list(ref.shape)}"
    if not dtype.is_float:
        off = np.abs(got.astype(np.float64) - ref.astype(np.float64))
        worst = float(off.max(initial=0.0))
        if dtype.bits <= 16 and dtype.kind in ("int", "uint") and worst <= 1:
            half = 2 ** (max(dtype.bits, 8) - 1)
            middle, reach = half - 0.5 if dtype.kind == "uint" else -0.5, half - 1  # |value - middle| < reach: not saturated
            inside = (ref != 0) & (np.abs(ref.astype(np.float64) - middle) < reach)
            ties, others = int((off > 0).sum()), int(((off > 0) | inside).sum())
            own = 2 * 127 * rtol * 2 if dtype.bits <= 8 else 0.0  # 16 bits are finer than most tactics' bounds: all could differ
            if dtype.bits < 8 or ties <= _FEW_TIES or ties <= (_TIES + own) * others:
                return 0.0, ""
            return worst, f"{ties} of {others} integers differ by one, too many for rounding ties"
        return (worst, f"{int((off > 0).sum())} of {off.size} integers differ") if worst else (0.0, "")
    return compute_float8_error(got, ref) if dtype == F8E4M3 else compute_relative_error(got, ref, largest)


def compute_float8_error(got: np.ndarray, ref: np.ndarray) -> tuple[float, str]:
    """The error of e4m3 values: max|e|/max|ref| after subtracting one e4m3 step, since a value near a rounding tie may become either neighbor.
    Ties must be rare: the error is infinite if ||e||/||ref|| is as large as that of a rounding, or if NaN are at other indices."""
    a, b = np.asarray(got).astype(np.float64).reshape(-1), np.asarray(ref).astype(np.float64).reshape(-1)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return np.inf, "NaN in other places than the reference"
    a, b = a[~np.isnan(a)], np.clip(b[~np.isnan(b)], -448, 448)
    e, largest = np.abs(a - b), float(np.abs(b).max(initial=0.0))
    if largest == 448:  # the unsaturated value may be larger, and its allowed error with it
        largest *= _SATURATED
    if not e.any():
        return 0.0, ""
    if largest == 0:
        return float(e.max()), f"up to {e.max():.2g} where all is zero"
    share = float(np.linalg.norm(e) / np.linalg.norm(b))
    if share > _FLOAT8_SHARE:
        return np.inf, f"{(e > 0).mean():.1%} of the numbers differ, ||e||/||ref|| is {share:.2g}"
    step = np.exp2(np.clip(np.floor(np.log2(np.maximum(np.maximum(np.abs(a), np.abs(b)), 2.0**-6))), -6, 8) - 3)
    return float(np.maximum(e - step, 0).max()) / largest, ""


def compute_relative_error(got: np.ndarray, ref: np.ndarray, least: float = 0.0) -> tuple[float, str]:
    """The larger of ||e||/||ref|| and max|e|/max|ref| over finite values; infinite if NaN or infinities are at other indices.

    With `least`, the reference counts as scaled up to a largest value of at least `least` (its norm by the same factor).
    """
    limit = float(ml_dtypes.finfo(got.dtype if got.dtype.itemsize <= 4 else np.float32).max)
    if not got.size:
        return 0.0, ""
    b = np.asarray(ref, np.float64).reshape(-1)
    sizes = _measure_in_blocks(got.reshape(-1), b, limit)
    if sizes is None:  # NaN, infinities or an overflow are somewhere
        a = got.astype(np.float64).reshape(-1)
        if got.dtype != np.float64:
            with np.errstate(over="ignore"):
                b = np.where(np.isinf(b.astype(got.dtype)), np.copysign(np.inf, b), b)  # values that overflow in the output's type
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return np.inf, "NaN or infinite values in other places than the reference"
        if not finite.any():
            return 0.0, ""
        sizes = _measure_in_blocks(a[finite], b[finite], np.inf)
        if sizes is None:  # a difference overflows
            return np.inf, ""
    top, largest, error, norm = sizes
    if top == 0:
        return 0.0, ""
    if largest < least:
        return top / least, ""
    if largest == 0:
        return top, f"up to {top:.2g} where all is zero"
    return max(error / norm if norm else np.inf if error else 0.0, top / largest), ""


def _measure_in_blocks(got: np.ndarray, ref: np.ndarray, limit: float) -> tuple[float, float, float, float] | None:
    """(max|e|, max|ref|, ||e||, ||ref||) of flat arrays, in blocks that stay in the cache; None if a difference is not finite or |ref| exceeds the
    limit."""
    top = largest = error = norm = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, got.size, _BLOCK):
            b = ref[start : start + _BLOCK]
            e = got[start : start + _BLOCK].astype(np.float64)
            e -= b
            error, norm = error + float(np.dot(e, e)), norm + float(np.dot(b, b))
            worst, size = float(np.abs(e, out=e).max()), float(np.abs(b).max())
            if not (np.isfinite(worst) and size <= limit):
                return None
            top, largest = max(top, worst), max(largest, size)
    return top, largest, error**0.5, norm**0.5


def find_worst_error(got: Iterable[np.ndarray], want: Iterable[np.ndarray]) -> float:
    """The largest of the outputs' errors."""
    return max((compute_output_error(a, b) for a, b in zip(got, want, strict=True)), default=0.0)


def compute_output_error(got: np.ndarray, ref: np.ndarray) -> float:
    """The error of a network's output: compute_relative_error for floats, else the share of differing values."""
    if not (got.dtype.kind == "f" or got.dtype.name == "bfloat16"):
        return 0.0 if np.array_equal(got, ref) else float(np.mean(got != ref))
    return compute_relative_error(got, ref)[0]
