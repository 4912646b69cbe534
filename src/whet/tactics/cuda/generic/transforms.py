"""Fourier transforms by their definition, and determinants: a thread per value, or per matrix.

A transform of n values takes n multiply-adds for each of its results; angles are reduced in whole numbers, so that they stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, prod
from typing import Any

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, emit_coordinates, emit_flat_index

_MOST_ROWS = 16  # of a matrix, which a thread holds


def _find_scalar(layer: Layer, i: int) -> int | None:
    t = layer.input(i)
    return None if t is None else int(np.reshape(t.array(), ()))


def _emit_dft(layer: Layer) -> str:
    x, y, a = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape), layer.attrs
    given = _find_scalar(layer, 2)
    axis, places = (-2 if given is None else given) % len(x), emit_coordinates(y)
    folded = bool(a["inverse"] and a["onesided"])  # the upper half of the spectrum is the conjugate of the lower one
    length = _find_scalar(layer, 1) or (2 * (x[axis] - 1) if folded else x[axis])
    entries = min(x[axis], length // 2 + 1 if folded else length)
    base = [*places[:axis], "k", *places[axis + 1 : -1]]
    real = f"in0({emit_flat_index([*base, '0'], x)})"
    imaginary = f"in0({emit_flat_index([*base, '1'], x)})" if x[-1] == 2 else "(Number)0"
    sign = "" if a["inverse"] else "-"
    text = f"""
        Number re = 0, im = 0;
        for (int k = 0; k < {entries}; ++k) {{
            const Number angle = (Number){sign}{2 * pi / length!r} * (Number)((long long)k * {places[axis]} % {length});
            const Number c = cos(angle), s = sin(angle), p = {real}, q = {imaginary};
            {f"const Number twice = k == 0 || 2 * k == {length} ? 1 : 2; re += twice * (k == 0 || 2 * k == {length} ? p * c : p * c - q * s);"
             if folded else "re += p * c - q * s; im += p * s + q * c;"}
        }}
    """
    result = "re" if y[-1] == 1 else f"{places[-1]} == 0 ? re : im"
    return f"{text} put0(i, ({result}){f' / {length}' if a['inverse'] else ''});"


def _emit_stft(layer: Layer) -> str:
    x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    image, frame, frequency, part = emit_coordinates(y)
    step, size = _find_scalar(layer, 1), _find_scalar(layer, 3) or static_shape(layer.needs(2).shape)[0]
    components = x[2] if len(x) == 3 else 1
    at = f"(({image} * {x[1]} + {frame} * {step} + k) * {components})"
    imaginary = f"in0({at} + 1)" if components == 2 else "(Number)0"
    window = "in2(k)" if layer.input(2) is not None else "(Number)1"
    return f"""
        Number re = 0, im = 0;
        for (int k = 0; k < {size}; ++k) {{
            const Number angle = (Number)-{2 * pi / size!r} * (Number)((long long)k * {frequency} % {size});
            const Number c = cos(angle), s = sin(angle), w = {window}, p = in0({at}) * w, q = {imaginary} * w;
            re += p * c - q * s; im += p * s + q * c;
        }}
        put0(i, {part} == 0 ? re : im);
    """


def _emit_det(layer: Layer) -> str:
    """Elimination with row pivots, in f64."""
    n = static_shape(layer.needs(0).shape)[-1]
    return f"""
        double m[{n}][{n}], det = 1;
        for (int r = 0; r < {n}; ++r) for (int c = 0; c < {n}; ++c) m[r][c] = in0(i * {n * n} + r * {n} + c);
        for (int p = 0; p < {n}; ++p) {{
            int best = p;
            for (int r = p + 1; r < {n}; ++r) if (fabs(m[r][p]) > fabs(m[best][p])) best = r;
            if (best != p) {{
                det = -det;
                for (int c = p; c < {n}; ++c) {{ const double v = m[p][c]; m[p][c] = m[best][c]; m[best][c] = v; }}
            }}
            det *= m[p][p];
            if (m[p][p] == 0) break;
            for (int r = p + 1; r < {n}; ++r) {{
                const double f = m[r][p] / m[p][p];
                for (int c = p; c < {n}; ++c) m[r][c] -= f * m[p][c];
            }}
        }}
        put0(i, (Number)det);
    """


_BODIES: dict[str, Callable[[Layer], str]] = {"DFT": _emit_dft, "Det": _emit_det, "STFT": _emit_stft}
_PARAMETERS: dict[str, tuple[int, ...]] = {"DFT": (1, 2), "STFT": (1, 3)}


@tactic
class Transforms(PerValueTactic):
    """Row-major; results of many terms keep their type."""

    ops = tuple(_BODIES)

    def allows_16_bits(self, layer: Layer) -> bool:
        return False

    def parameters(self, layer: Layer) -> tuple[int, ...]:
        return _PARAMETERS.get(layer.op, ())

    def why_no_code(self, layer: Layer) -> str | None:
        rows: Any = layer.needs(0).shape[-1]
        return f"takes matrices of up to {_MOST_ROWS} rows" if layer.op == "Det" and not (isinstance(rows, int) and rows <= _MOST_ROWS) else None

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        return [(_BODIES[layer.op](layer), prod(static_shape(layer.outputs[0].shape)))]
