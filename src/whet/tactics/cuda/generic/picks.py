"""Ops that give each value from one value of an input at a computed index, or from a constant."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, clamp_index, emit_coordinates, emit_flat_index


def _get_shapes(layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)


def _gather_elements(layer: Layer) -> str:
    x, y = _get_shapes(layer)
    axis, places = layer.attrs["axis"] % len(x), emit_coordinates(y)
    places[axis] = clamp_index("at1(i)", x[axis])
    return f"put0(i, in0({emit_flat_index(places, x)}));"


def _gather_nd(layer: Layer) -> str:
    x, y = _get_shapes(layer)
    batch, index = layer.attrs["batch_dims"], static_shape(layer.needs(1).shape)
    count, places = index[-1], emit_coordinates(y)
    row = emit_flat_index(places[: len(index) - 1], index[:-1])
    found = [clamp_index(f"at1(row * {count} + {d})", x[batch + d]) for d in range(count)]
    return f"const long long row = {row}; put0(i, in0({emit_flat_index([*places[:batch], *found, *places[len(index) - 1 :]], x)}));"


def _tile(layer: Layer) -> str:
    x, y = _get_shapes(layer)
    return f"put0(i, in0({emit_flat_index([f'{p} % {n}' if n > 1 else '0' for p, n in zip(emit_coordinates(y), x, strict=True)], x)}));"


def _emit_trilu(layer: Layer) -> str:
    _, y = _get_shapes(layer)
    row, column = emit_coordinates(y)[-2:]
    given = layer.attrs.get("k", None if layer.input(1) is None else layer.needs(1).array())
    k = 0 if given is None else int(np.asarray(given).reshape(-1)[0])
    return f"put0(i, {column} - {row} {'>=' if layer.attrs['upper'] else '<='} {k}ll ? in0(i) : (Number)0);"


def _emit_eye_like(layer: Layer) -> str:
    row, column = emit_coordinates(_get_shapes(layer)[1])
    return f"put0(i, {column} - {row} == {layer.attrs['k']}ll);"


def _emit_one_hot(layer: Layer) -> str:
    index, y = _get_shapes(layer)
    axis, places = layer.attrs["axis"] % len(y), emit_coordinates(y)
    where = emit_flat_index([*places[:axis], *places[axis + 1 :]], index)
    return f"long long k = at0({where}); if (k < 0) k += {y[axis]}; put0(i, in2(k == {places[axis]} ? 1 : 0));"


def _reverse_sequence(layer: Layer) -> str:
    x, y = _get_shapes(layer)
    time, batch, places = layer.attrs["time_axis"] % len(x), layer.attrs["batch_axis"] % len(x), emit_coordinates(y)
    step, length = places[time], f"at1({places[batch]})"
    places[time] = clamp_index("from", x[time])
    return f"const long long n = {length}, t = {step}, from = t < n ? n - 1 - t : t; put0(i, in0({emit_flat_index(places, x)}));"


def _emit_depth_to_space(layer: Layer) -> str:
    x, (n, d, h, w) = _get_shapes(layer)
    b, (image, depth, row, column) = layer.attrs["blocksize"], emit_coordinates((n, d, h, w))
    block = f"({row} % {b} * {b} + {column} % {b})"
    channel = f"{block} * {d} + {depth}" if layer.attrs["mode"] == "DCR" else f"{depth} * {b * b} + {block}"
    return f"put0(i, in0({emit_flat_index([image, channel, f'{row} / {b}', f'{column} / {b}'], x)}));"


def _space_to_depth(layer: Layer) -> str:
    x, y = _get_shapes(layer)
    b, (image, channel, row, column) = layer.attrs["blocksize"], emit_coordinates(y)
    crd = layer.attrs["mode"] == "CRD"
    depth, block = (f"{channel} / {b * b}", f"{channel} % {b * b}") if crd else (f"{channel} % {x[1]}", f"{channel} / {x[1]}")
    return f"put0(i, in0({emit_flat_index([image, depth, f'{row} * {b} + ({block}) / {b}', f'{column} * {b} + ({block}) % {b}'], x)}));"


def _emit_constant_of_shape(layer: Layer) -> str:
    return f"put0(i, (Number){_format_literal(layer.attrs['value'])});"


def _emit_index_table(values: Any) -> str:
    return f"const long long values[] = {{{', '.join(f'{v}ll' for v in values)}}}; index0(i, values[i]);"


def _format_literal(value: Any) -> str:
    return f"{int(value)}ll" if isinstance(value, (bool, int)) else float(value).hex() if np.isfinite(value) else f"({value}) / 0."


_BODIES: dict[str, Callable[[Layer], str]] = {
    "GatherElements": _gather_elements, "GatherND": _gather_nd, "Tile": _tile, "Trilu": _emit_trilu,
    "EyeLike": _emit_eye_like, "OneHot": _emit_one_hot,
    "ReverseSequence": _reverse_sequence, "DepthToSpace": _emit_depth_to_space, "SpaceToDepth": _space_to_depth,
    "ConstantOfShape": _emit_constant_of_shape,
    "Range": lambda layer: "put0(i, in0(0) + (Number)i * in2(0));",
    "Shape": lambda layer: _emit_index_table(static_shape(layer.needs(0).shape)[slice(layer.attrs["start"], layer.attrs.get("end"))]),
    "Size": lambda layer: _emit_index_table([int(np.prod(static_shape(layer.needs(0).shape)))]),
}  # fmt: skip
_PARAMETERS = {"Trilu": (1,), "Tile": (1,), "OneHot": (1,), "ConstantOfShape": (0,)}


@tactic
class Picks(PerValueTactic):
    """Row-major; elements keep their values."""

    ops = tuple(_BODIES)

    def parameters(self, layer: Layer) -> tuple[int, ...]:
        return _PARAMETERS.get(layer.op, ())

    def launches(self, layer: Layer) -> list[tuple[str, int]]:
        return [(_BODIES[layer.op](layer), prod(static_shape(layer.outputs[0].shape)))]
