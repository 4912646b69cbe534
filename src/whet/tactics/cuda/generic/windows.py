"""Convolutions and pools with any number of spatial axes, types and groups, one value of the result per thread."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from whet.network import Layer, static_shape
from whet.ops._window import pool_of
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, emit_coordinates, emit_flat_index


def _emit_taps(x: tuple[int, ...], kernel: Sequence[int], places: Sequence[str], attrs: dict, inner: str) -> str:
    """Loops over the taps of a window that are inside the image around `inner`, which reads the element at `at` with tap `tap`.

    `places` are the coordinates of the result; `channel`, which `inner` may loop over, is not part of `at`."""
    r = len(kernel)
    strides, dilations, pads = (attrs.get(k) or d for k, d in (("strides", (1,) * r), ("dilations", (1,) * r), ("pads", (0,) * 2 * r)))
    at, tap = emit_flat_index(["0", "0", *(f"y{d}" for d in range(r))], x), emit_flat_index([f"k{d}" for d in range(r)], kernel)
    text = f"{{ const long long at = {at}, tap = {tap}; {inner} }}"
    for d in reversed(range(r)):
        where = f"const long long y{d} = {places[d]} * {strides[d]} - {pads[d]} + (long long)k{d} * {dilations[d]};"
        text = f"for (int k{d} = 0; k{d} < {kernel[d]}; ++k{d}) {{ {where} if (y{d} < 0 || y{d} >= {x[2 + d]}) continue; {text} }}"
    return text


def _emit_conv(layer: Layer) -> str:
    x, w, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    image, k, *places = emit_coordinates(y)
    each, filters = w[1], w[0] // int(layer.attrs.get("group", 1))
    plane, taps = prod(x[2:]), prod(w[2:])
    a, b, start = "in0(base + c * {p}ll + at)", "in1(weight + c * {t}ll + tap)", "0"
    if layer.op == "ConvInteger":
        a += " - zero" if layer.input(2) is not None else ""
        b += " - own" if layer.input(3) is not None else ""
    elif layer.input(2) is not None:
        start = f"in2({k})"
    zeros = ""
    if layer.op == "ConvInteger":
        zeros += "const Number zero = in2(0); " if layer.input(2) is not None else ""
        if layer.input(3) is not None:
            zeros += f"const Number own = in3({k if prod(static_shape(layer.needs(3).shape)) > 1 else 0}); "
    inner = f"for (int c = 0; c < {each}; ++c) sum += ({a.format(p=plane)}) * ({b.format(t=taps)});"
    return f"""
        const long long base = ({image} * {x[1]} + {k} / {filters} * {each}) * {plane}, weight = {k} * {each * taps}ll;
        {zeros} Number sum = {start};
        {_emit_taps(x, w[2:], places, layer.attrs, inner)}
        put0(i, sum);
    """


def _emit_conv_transpose(layer: Layer) -> str:
    """A thread per value of the result: the taps of which a stride reaches it."""
    x, w, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    a, r = layer.attrs, len(x) - 2
    strides, dilations, pads = a.get("strides") or (1,) * r, a.get("dilations") or (1,) * r, a.get("pads") or (0,) * 2 * r
    group, (image, k, *places) = int(a.get("group", 1)), emit_coordinates(y)
    each, plane, taps = x[1] // group, prod(x[2:]), prod(w[2:])
    at, tap = emit_flat_index([f"y{d}" for d in range(r)], x[2:]), emit_flat_index([f"k{d}" for d in range(r)], w[2:])
    text = f"for (int c = 0; c < {each}; ++c) sum += in0(base + c * {plane}ll + {at}) * in1(weight + c * {w[1] * taps}ll + {tap});"
    for d in reversed(range(r)):
        where = f"const long long u{d} = {places[d]} + {pads[d]} - (long long)k{d} * {dilations[d]}, y{d} = u{d} / {strides[d]};"
        outside = f"u{d} < 0 || u{d} % {strides[d]} || y{d} >= {x[2 + d]}"
        text = f"for (int k{d} = 0; k{d} < {w[2 + d]}; ++k{d}) {{ {where} if ({outside}) continue; {text} }}"
    start = f"in2({k})" if layer.input(2) is not None else "0"
    return f"""
        const long long g = {k} / {w[1]}, base = ({image} * {x[1]} + g * {each}) * {plane}, weight = (g * {each} * {w[1]} + {k} % {w[1]}) * {taps};
        Number sum = {start}; {text} put0(i, sum);
    """


def _pool(layer: Layer) -> str:
    x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    if layer.op == "GlobalLpPool":
        kernel, attrs = x[2:], {}
    else:
        kernel, attrs = pool_of(layer).kernel, layer.attrs
    image, channel, *places = emit_coordinates(y)
    start = f"const long long base = ({image} * {x[1]} + {channel}) * {prod(x[2:])};"
    if layer.op == "MaxPool":
        low = np.iinfo(layer.needs(0).dtype.numpy).min if layer.needs(0).dtype.kind in ("int", "uint") else None
        begin = f"Number best = {f'(Number)({low + 1}ll) - 1' if low is not None else '-(Number)(1. / 0.)'};"
        inner = "const Number v = in0(base + at); if (v > best || v != v) best = v;"
        return f"{start} {begin} {_emit_taps(x, kernel, places, attrs, inner)} put0(i, best);"
    p = layer.attrs["p"]
    inner = f"sum += {'v * v' if p == 2 else f'pow(fabs(v), (Number){p})'};"
    norm = {1: "sum", 2: "sqrt(sum)"}.get(p, f"pow(sum, (Number)(1. / {p}))")
    return f"{start} Number sum = 0; {_emit_taps(x, kernel, places, attrs, f'const Number v = in0(base + at); {inner}')} put0(i, {norm});"


def _emit_col2im(layer: Layer) -> str:
    """A thread per pixel: the columns that hold it."""
    x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    block, r, a = tuple(int(n) for n in layer.needs(2).array()), len(y) - 2, layer.attrs
    strides, dilations, pads = a.get("strides") or (1,) * r, a.get("dilations") or (1,) * r, a.get("pads") or (0,) * 2 * r
    counts = [(n + pads[d] + pads[r + d] - dilations[d] * (block[d] - 1) - 1) // strides[d] + 1 for d, n in enumerate(y[2:])]
    image, channel, *places = emit_coordinates(y)
    tap, column = emit_flat_index([f"k{d}" for d in range(r)], block), emit_flat_index([f"y{d}" for d in range(r)], counts)
    text = f"sum += in0((({image} * {y[1]} + {channel}) * {prod(block)} + {tap}) * {x[2]} + {column});"
    for d in reversed(range(r)):
        where = f"const long long u{d} = {places[d]} + {pads[d]} - (long long)k{d} * {dilations[d]}, y{d} = u{d} / {strides[d]};"
        outside = f"u{d} < 0 || u{d} % {strides[d]} || y{d} >= {counts[d]}"
        text = f"for (int k{d} = 0; k{d} < {block[d]}; ++k{d}) {{ {where} if ({outside}) continue; {text} }}"
    return f"Number sum = 0; {text} put0(i, sum);"


_BODIES = {
    "Conv": _emit_conv, "ConvInteger": _emit_conv, "ConvTranspose": _emit_conv_transpose, "LpPool": _pool, "GlobalLpPool": _pool, "MaxPool": _pool,
    "Col2Im": _emit_col2im,
}  # fmt: skip


@tactic
class Windows(PerValueTactic):
    """Row-major."""

    ops = tuple(_BODIES)

    def parameters(self, layer: Layer) -> tuple[int, ...]:
        return (1, 2) if layer.op == "Col2Im" else ()

    def why_no_code(self, layer: Layer) -> str | None:
        if layer.op in ("Conv", "ConvTranspose") and layer.needs(0).type.rank == 4 and layer.needs(1).is_constant:
            return "other kernels take two spatial axes"
        if layer.op == "MaxPool" and layer.needs(0).dtype.is_float:
            return "other kernels pool floats"
        return None

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        return [(_BODIES[layer.op](layer), prod(static_shape(layer.outputs[0].shape)))]
