"""Winograd's minimal filtering F(m, 3): transforms of inputs, weights and results for a set of interpolation points, as matrices and as LLVM IR.

The points are 0, pairs +p and -p, and infinity. For m = 4 the pairs 3/4 and 3/2 instead of 1 and 2 have a quarter of the error, and their
coefficients are still exact in binary. Rows of a pair share their even and odd parts: 12 operations instead of 18 for six values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from whet.tactics.cpu._llvm.builder import Function, Value

TAPS = 3
PAIRS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.75, 1.5)}
"""The positive points by `m`, the number of results along an axis of a tile."""

Combination = tuple[tuple[int, float], ...]
"""A linear combination: (index, coefficient) of its terms."""


def count_tile_inputs(m: int) -> int:
    """Input values along an axis of a tile."""
    return m + TAPS - 1


@cache
def compute_matrices(m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(A, B, G) in float64: the results of a row are A ((G w) * (B x)), with A [m, n], B [n, n], G [n, 3] and n = m + 2."""
    from numpy.polynomial import polynomial  # not needed if compiled objects and packed weights are kept

    n, pairs = count_tile_inputs(m), PAIRS[m]
    points = [0.0, *(sign * p for p in pairs for sign in (1, -1))]
    a, b, g = np.zeros((m, n)), np.zeros((n, n)), np.zeros((n, TAPS))
    for k, p in enumerate(points):
        others = [q for q in points if q != p]
        row = polynomial.polyfromroots(others)
        b[k, : len(row)] = row
        g[k] = p ** np.arange(TAPS) / np.prod([p - q for q in others])
        a[:, k] = p ** np.arange(m)
    row = polynomial.polyfromroots(points)
    b[n - 1, : len(row)], g[n - 1, TAPS - 1], a[m - 1, n - 1] = row, 1.0, 1.0
    return a, b, g


def transform_weights(w: np.ndarray, m: int) -> np.ndarray:
    """[K, C, 3, 3] to [n * n, C, K], f32; computed in float64 and rounded once."""
    g = compute_matrices(m)[2]
    columns = np.ascontiguousarray(w.transpose(2, 3, 1, 0), np.float64).reshape(TAPS * TAPS, -1)
    return (np.kron(g, g) @ columns).astype(np.float32).reshape(-1, w.shape[1], w.shape[0])


def list_row_groups(m: int) -> list[tuple[int, int]]:
    """The rows of G two by two: those of zero and infinity, then those of each pair of points, which share their even and odd parts."""
    return [(0, count_tile_inputs(m) - 1), *((2 * k + 1, 2 * k + 2) for k in range(len(PAIRS[m])))]


def emit_weight_rows(f: Function, w: Sequence[Value], m: int, group: int) -> list[Value]:
    """Two rows of G w, for three vectors `w`: those of `list_row_groups(m)[group]`."""
    first, second = (compute_matrices(m)[2][row] for row in list_row_groups(m)[group])
    if group == 0:
        return [_combine(f, w, _list_terms(first)), _combine(f, w, _list_terms(second))]
    even, odd = _combine(f, w, _list_terms((first + second) / 2)), float((first - second)[1] / 2)
    return [_add_scaled(f, even, odd, w[1]), _add_scaled(f, even, -odd, w[1])]


def emit_weights(f: Function, w: Sequence[Value], m: int) -> list[Value]:
    """G w: three vectors to n."""
    (zero, infinity), *pairs = (emit_weight_rows(f, w, m, group) for group in range(len(list_row_groups(m))))
    return [zero, *(value for pair in pairs for value in pair), infinity]


def emit_input(f: Function, x: Sequence[Value], m: int) -> list[Value]:
    """B x: the transform of one row or column of n vectors."""
    b = compute_matrices(m)[1]
    result = [_combine(f, x, _list_terms(b[0]))]
    for k, p in enumerate(PAIRS[m]):
        plus, minus = b[2 * k + 1], b[2 * k + 2]
        even, odd = _combine(f, x, _list_terms((plus + minus) / 2)), _combine(f, x, _list_terms((plus - minus) / (2 * p)))
        result += [_add_scaled(f, even, p, odd), _add_scaled(f, even, -p, odd)]
    return [*result, _combine(f, x, _list_terms(b[-1]))]


def emit_output(f: Function, x: Sequence[Value], m: int) -> list[Value]:
    """A x: n vectors to m results."""
    pairs = [(x[2 * k + 1], x[2 * k + 2]) for k in range(len(PAIRS[m]))]
    sums, differences = [p + q for p, q in pairs], [p - q for p, q in pairs]
    result = []
    for r in range(m):
        terms = tuple((k, p**r) for k, p in enumerate(PAIRS[m]))
        value = _combine(f, differences if r % 2 else sums, terms)
        result.append(value + x[0] if r == 0 else value + x[-1] if r == m - 1 else value)
    return result


def _list_terms(row: np.ndarray) -> Combination:
    """The non-zero terms of a row, one with coefficient 1 first."""
    return tuple(sorted(((k, float(c)) for k, c in enumerate(row) if c), key=lambda t: t[1] != 1))


def _combine(f: Function, x: Sequence[Value], terms: Combination) -> Value:
    (first, scale), *rest = sorted(terms, key=lambda t: t[1] != 1)
    value = x[first] if scale == 1 else x[first] * f.value(scale, x[first].type)
    for k, c in rest:
        value = _add_scaled(f, value, c, x[k])
    return value


def _add_scaled(f: Function, value: Value, scale: float, x: Value) -> Value:
    """value + scale * x."""
    if scale == 1:
        return value + x
    return value - x if scale == -1 else f.fma(x, f.value(scale, x.type), value)
