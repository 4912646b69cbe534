"""Group and instance normalization of images with channels last, with the following activation: the pixels of an image are shared by several blocks.

Two launches: the moments of each share, then the normalization.

Measured: benchmarks/results/h100/networks.json (PoolFormer).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import DType, Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import EpilogueStep, outer_input
from whet.tactics.cuda._device.arguments import (
    ActivationParameters,
    Arguments,
    ConstFloatPointer,
    ConstPointer,
    Float32,
    FloatPointer,
    Int32,
    Pointer,
)
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    TYPE,
    GpuKernel,
    all_static,
    compile_ahead,
    find_activation,
    launch,
    list_float_types,
    make_packed_array,
    make_stored_signature,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import NONE, Activation

_THREADS = 256
_BLOCKS = (1, 2, 4)  # blocks per multiprocessor
_LEAST_PIXELS = 4  # of a thread


@dataclass(frozen=True)
class GroupNormArguments(Arguments, kernel="group_norm.cu"):
    input: ConstPointer
    out: Pointer
    scale: ConstFloatPointer  # [channels]
    shift: ConstFloatPointer
    parts: FloatPointer  # [images][shares][groups][2]
    act: ActivationParameters
    pixels: Int32
    shares: Int32  # blocks of an image
    epsilon: Float32


@tactic
class GroupNorm(Tactic):
    """A multiple of 8 channels, up to 2048."""

    ops = ("GroupNormalization", "InstanceNormalization")
    composites = ("ActivatedNorm",)

    def why_not(self, layer: Layer) -> str | None:
        if layer.composite not in self.composites and (reason := super().why_not(layer)):
            return reason
        if layer.composite and layer.composite not in self.composites:
            return "takes an activation after the norm, nothing else"
        match = match_norm(layer)
        return match if isinstance(match, str) else None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        if reason := self.why_not(layer):
            return reason
        return _why_not_shape(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer) or layer.outputs[0].type.rank != 4:
            return []
        kinds = list_float_types([layer.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        return [make_stored_signature(layer, {0: Operand("nhwc", t)}, Operand("nhwc", t)) for t in kinds]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        n, _, h, w = static_shape(layer.outputs[0].shape)
        if reason := _why_not_shape(layer):
            return reason
        return f"{n} images of {h * w} pixels; takes 1 to 65535 images with at least one" if not 0 < n <= 65535 or not h * w else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        n, c, h, w = static_shape(layer.outputs[0].shape)
        match = match_norm(layer)
        if isinstance(match, str):
            return []
        most = max(1, h * w * (c // 8) // (_THREADS * _LEAST_PIXELS))
        shares = {max(1, min(each * backend.capabilities.multiprocessors // n, most)) for each in _BLOCKS}
        compile_ahead(backend, [emit_kernel_source("group_norm.cu", _make_constants(match, c, signature))])
        return [(("shares", s),) for s in sorted(shares)]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        match, shares = match_norm(layer), int(dict(config)["shares"])
        if isinstance(match, str):
            raise PlanRefused(match)
        norm, (_, low, high) = match
        n, c, *size = static_shape(layer.outputs[0].shape)
        pixels, constants = prod(size), _make_constants(match, c, signature)
        if not 1 <= shares <= pixels:
            raise PlanRefused(f"{shares} shares of {pixels} pixels")
        parameters = [layer.needs(i) for i in (outer_input(layer, t) for t in norm.inputs[1:3]) if i is not None]
        packed = [make_packed_array(f"{t.constant().digest}|f32", c * 4, partial(np.asarray, t.array(), np.float32)) for t in parameters]
        epsilon = float(norm.attrs["epsilon"])

        def make(args: Args) -> list:
            scale, shift = args.packed
            arguments = GroupNormArguments(args.inputs[0], args.outputs[0], scale, shift, args.scratch, (low, high), pixels, shares, epsilon)
            return [launch(entry, arguments, constants, (shares, n, 1), _THREADS, label=layer.name) for entry in ("moments", "normalize_groups")]

        scratch = n * shares * (c // constants["PER"]) * 8
        return GpuKernel(layer, signature, make, implementation=f"moments, then norm s{shares}", packed=packed, scratch=scratch)


def match_norm(layer: Layer) -> tuple[Layer, Activation] | str:
    """The norm of the layer and its activation (a clip without bounds if none), or the reason why the kernels do not compute it."""
    norm, activation = layer, NONE
    if layer.op == "Fused":
        norm, last = layer.regions["body"].layers
        places = {i: outer_input(layer, t) for i, t in enumerate(last.inputs) if i and t is not None}
        bounds = {f"input{i}": layer.needs(p).array() for i, p in places.items() if p is not None and layer.needs(p).is_constant}
        found = find_activation(EpilogueStep(last.op, {**last.attrs, **bounds}))
        if found is None or len(bounds) < len(places):
            return f"computes no {last.op} of this kind after the norm"
        activation = found
    where = [outer_input(layer, t) for t in norm.inputs]
    if where[0] != 0 or any(i is None or not layer.needs(i).is_constant for i in where[1:3]):
        return "its scale or bias is computed at run time"
    return norm, activation


def _why_not_shape(layer: Layer) -> str | None:
    """The reason why the kernels do not take the shape; sizes besides the channels may be symbols."""
    shape = layer.outputs[0].shape
    if len(shape) != 4:
        return f"takes images, not values of rank {len(shape)}"
    c = shape[1]
    return None if isinstance(c, int) and c % 8 == 0 and 0 < c <= 8 * _THREADS else f"{c} channels; takes a multiple of 8 up to {8 * _THREADS}"


def _make_constants(match: tuple[Layer, Activation], channels: int, signature: Signature) -> dict[str, int]:
    """The macros of an instance."""
    norm, activation = match
    per = channels // int(norm.attrs["num_groups"]) if norm.op == "GroupNormalization" else 1
    stored = TYPE[signature.outputs[0].dtype.name]
    return {"TYPE": stored, "V": channels // 8, "PER": per, "ACT": ACTIVATIONS[activation[0]], "THREADS": _THREADS}
