"""Scatters: a launch copies the data, a second one writes the updates in their order, so that results do not depend on the timing of threads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whet.network import Layer, static_shape
from whet.ops.max_unpool import infer_sizes
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, compute_row_major_strides, emit_coordinates, emit_flat_index

_COMBINE = {"none": "b", "add": "a + b", "mul": "a * b", "max": "a != a || a > b ? a : b", "min": "a != a || a < b ? a : b"}


def _write(layer: Layer, to: str, update: str) -> str:
    combine = _COMBINE[layer.attrs.get("reduction", "none")]
    return f"const long long to = {to}; const Number a = got0(to), b = {update}; put0(to, {combine});"


def _emit_elements(layer: Layer) -> tuple[str, int]:
    """A thread per line of the updates along the axis: lines of the result are separate."""
    x, at = static_shape(layer.needs(0).shape), static_shape(layer.needs(1).shape)
    axis = layer.attrs["axis"] % len(x)
    lines = (*at[:axis], *at[axis + 1 :])
    places = emit_coordinates(lines)
    target, source = [*places[:axis], "k", *places[axis:]], [*places[:axis], "e", *places[axis:]]
    text = f"""
        for (int e = 0; e < {at[axis]}; ++e) {{
            const long long from = {emit_flat_index(source, at)}; long long k = at1(from); if (k < 0) k += {x[axis]};
            if (k < 0 || k >= {x[axis]}) continue;
            {_write(layer, emit_flat_index(target, x), "in2(from)")}
        }}
    """
    return text, prod(lines)


def _emit_nd(layer: Layer) -> tuple[str, int]:
    """A thread per element of the slices that indices select."""
    x, at = static_shape(layer.needs(0).shape), static_shape(layer.needs(1).shape)
    count, each = at[-1], prod(x[at[-1] :])
    strides = compute_row_major_strides(x)
    index = " ".join(
        f"{{ long long k = at1(e * {count} + {d}); if (k < 0) k += {x[d]}; if (k < 0 || k >= {x[d]}) outside = true; at += k * {strides[d]}; }}"
        for d in range(count)
    )
    text = f"""
        for (long long e = 0; e < {prod(at[:-1])}; ++e) {{
            long long at = i; bool outside = false; {index}
            if (outside) continue;
            {_write(layer, "at", f"in2(e * {each} + i)")}
        }}
    """
    return text, each


def _cache(layer: Layer) -> tuple[str, int]:
    """TensorScatter: an update of a cache from a position per batch item on."""
    x, u = static_shape(layer.needs(0).shape), static_shape(layer.needs(1).shape)
    axis, places = layer.attrs["axis"] % len(x), emit_coordinates(u)
    start = f"at2({places[0]})" if layer.input(2) is not None else "0"
    wrap = f"k = (k % {x[axis]} + {x[axis]}) % {x[axis]};" if layer.attrs["mode"] == "circular" else ""
    target = [*places[:axis], "k", *places[axis + 1 :]]
    return f"long long k = {start} + {places[axis]}; {wrap} if (k < 0 || k >= {x[axis]}) return; put0({emit_flat_index(target, x)}, in1(i));", prod(u)


def _emit_unpool(layer: Layer) -> str:
    """Indices are those of a flat result of the inferred size, which may be smaller than the result's own."""
    y, sizes = static_shape(layer.outputs[0].shape), infer_sizes(layer, static_shape(layer.needs(0).shape))
    return f"const long long to = at1(i); if (to >= 0 && to < {prod(sizes)}) put0({emit_flat_index(emit_coordinates(sizes, 'to'), y)}, in0(i));"


@tactic
class Scatters(PerValueTactic):
    """Row-major. Indices outside of the tensor are skipped."""

    ops = ("ScatterElements", "ScatterND", "TensorScatter", "MaxUnpool")

    def parameters(self, layer: Layer) -> tuple[int, ...]:
        return (2,) if layer.op == "MaxUnpool" else ()

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        size = prod(static_shape(layer.outputs[0].shape))
        if layer.op == "MaxUnpool":
            return [("put0(i, 0);", size), (_emit_unpool(layer), prod(static_shape(layer.needs(0).shape)))]
        write = {"ScatterElements": _emit_elements, "ScatterND": _emit_nd, "TensorScatter": _cache}[layer.op](layer)
        return [("put0(i, in0(i));", size), write]
