"""Resize of one axis or two adjacent ones, every mode of ONNX: build-time tables have each output's inputs and their weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.ops.resize import make_resampling, resize_targets
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, ConstIntPointer, ConstPointer, Float32, Int32, Pointer, UInt32
from whet.tactics.cuda._device.kernel import (
    TYPE,
    GpuKernel,
    all_static,
    count_blocks,
    launch,
    list_float_types,
    make_packed_array,
    make_packed_table,
    make_stored_signature,
)
from whet.tactics.cuda._device.plain_layer import UnfusedTactic

_MOST_TAPS = 64  # along an axis


@dataclass(frozen=True)
class ResizeArguments(Arguments, kernel="resize.cu"):
    input: ConstPointer
    out: Pointer
    at_a: ConstIntPointer
    at_b: ConstIntPointer
    weight_a: ConstFloatPointer
    weight_b: ConstFloatPointer
    count: UInt32  # outputs, in groups of VEC
    in_a: UInt32  # inner in groups of VEC
    in_b: UInt32
    out_a: UInt32
    out_b: UInt32
    inner: UInt32
    taps_a: Int32
    taps_b: Int32
    beyond: Float32


@dataclass(frozen=True)
class Axis:
    """One resampled axis: source indices [out, taps] (-1 first: the output is outside) and weights [out, taps]."""

    axis: int
    places: np.ndarray
    weights: np.ndarray


@tactic
class Resize(UnfusedTactic):
    """Floating point, row-major or channels last; up to 64 taps along an axis (antialias)."""

    ops = ("Resize",)
    constants = "its region, scales or sizes are"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        forms = ("nhwc", "linear") if layer.needs(0).type.rank == 4 else ("linear",)
        kinds = list_float_types([layer.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        return [make_stored_signature(layer, {0: Operand(form, t)}, Operand(form, t)) for t in kinds for form in forms]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if max(prod(static_shape(t.shape)) for t in (layer.needs(0), layer.outputs[0])) >= 2**31:
            return "more than 2**31 elements"
        resampled = list_resampled_axes(layer)
        at = [a.axis for a in resampled]
        if len(at) > 2 or (len(at) == 2 and at[1] != at[0] + 1):
            return f"axes {at} are resampled; takes one, or two adjacent axes"
        if signature.outputs[0].format == "nhwc" and not set(at) <= {2, 3}:
            return "takes height and width of channels-last tensors"
        return next((f"{a.places.shape[1]} taps along axis {a.axis}" for a in resampled if a.places.shape[1] > _MOST_TAPS), None)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        reason = self.refuses(layer, signature, backend)
        if reason:
            raise PlanRefused(reason)
        x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
        resampled, last = list_resampled_axes(layer), signature.outputs[0].format == "nhwc"
        if last:
            x, y = tuple(x[i] for i in (0, 2, 3, 1)), tuple(y[i] for i in (0, 2, 3, 1))
        still = np.zeros((1, 1), np.int64), np.ones((1, 1))
        tables = [(a.places, a.weights) for a in resampled]
        at = resampled[0].axis - last if resampled else len(x)
        tables = [still] * (2 - len(tables)) + tables
        sides = [(1, 1)] * (2 - len(resampled)) + [(x[a.axis - last], y[a.axis - last]) for a in resampled]
        inner = prod(x[at + len(resampled) :])
        vec = 8 if inner % 8 == 0 else 1
        packed = tuple(
            pack(f"resize {kind} {_digest(table)}", table.size * 4, partial(table.astype, kind))
            for pair in tables
            for table, kind, pack in zip(pair, (np.int32, np.float32), (make_packed_table, make_packed_array), strict=True)
        )
        (in_a, out_a), (in_b, out_b) = sides
        count = prod(y) // vec
        taps = [places.shape[1] for places, _ in tables]
        beyond = float(layer.attrs["extrapolation_value"])
        kind = signature.outputs[0].dtype

        def make(args: Args) -> list:
            at_a, weight_a, at_b, weight_b = args.packed
            sizes = (count, in_a, in_b, out_a, out_b, inner // vec, taps[0], taps[1])
            arguments = ResizeArguments(args.inputs[0], args.outputs[0], at_a, at_b, weight_a, weight_b, *sizes, beyond=beyond)
            return [launch("resize", arguments, {"TYPE": TYPE[kind.name], "VEC": vec}, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation=f"resize {taps[0]}x{taps[1]} taps x{vec}", packed=packed)


def list_resampled_axes(layer: Layer) -> list[Axis]:
    """The axes that change, with their tables; in order of the axes."""
    how, x = make_resampling(layer), static_shape(layer.needs(0).shape)
    axes = [int(i) % len(x) for i in layer.attrs.get("axes") or range(len(x))]
    t = layer.input(1)
    roi = np.asarray(t.array(), np.float64) if t is not None and t.is_constant and t.array().size else None
    tables = []
    goal = resize_targets(layer)
    for i, axis in enumerate(axes):
        n, (out, scale) = x[axis], goal[axis]
        part = (float(roi[i]), float(roi[i + len(axes)])) if roi is not None else (0.0, 1.0)
        scale = out / n if scale is None else float(scale)
        if out == n and scale == 1 and how.coordinates != "tf_crop_and_resize":
            continue
        places, weights, outside = how.taps(n, out, scale, part)
        places = np.array(places, np.int64)
        weights = np.ones(places.shape) if weights is None else weights
        if outside is not None:
            places[outside, 0] = -1
        if out == n and not (places < 0).any() and np.array_equal(_make_matrix(places, weights, n), np.eye(n)):
            continue
        tables.append(Axis(axis, places, weights))
    return sorted(tables, key=lambda a: a.axis)


def _make_matrix(places: np.ndarray, weights: np.ndarray, n: int) -> np.ndarray:
    matrix = np.zeros((len(places), n))
    np.add.at(matrix, (np.arange(len(places))[:, None], places), weights)
    return matrix


def _digest(table: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(table).tobytes() + str(table.shape).encode()).hexdigest()[:24]
