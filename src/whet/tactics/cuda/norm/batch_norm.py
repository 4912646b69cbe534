"""BatchNormalization that cannot be folded into a convolution (DenseNet's precede theirs), with the following activation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, outer_input
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    TYPE,
    GpuKernel,
    all_static,
    count_blocks,
    find_activation,
    launch,
    list_float_types,
    make_packed_array,
    make_stored_signature,
)
from whet.tactics.cuda.conv._conv import NONE, Activation


@dataclass(frozen=True)
class AffineArguments(Arguments, kernel="affine.cu"):
    input: ConstPointer
    out: Pointer
    scale: ConstFloatPointer
    shift: ConstFloatPointer
    count: Int64  # values, in groups of VEC
    channels: Int32  # LAST: channels in groups of eight; else values of a channel's plane, in groups of VEC
    inner: Int32
    act: ActivationParameters


@tactic
class BatchNorm(Tactic):
    """A factor and a shift a channel; channels last or row-major."""

    ops = ("BatchNormalization",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        where = [outer_input(layer, t) for t in get_root_layer(layer).inputs[1:5]]
        if any(i is None or not layer.needs(i).is_constant for i in where):
            return "its statistics are computed at run time"
        activation = match_activation(layer)
        return activation if isinstance(activation, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        head = get_root_layer(layer)
        x = get_source_index(layer)
        forms = ["linear"]
        if layer.outputs[0].type.rank == 4 and static_shape(layer.outputs[0].shape)[1] % 8 == 0:
            forms.insert(0, "nhwc")
        kinds = list_float_types([head.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        return [make_stored_signature(layer, {x: Operand(form, t)}, Operand(form, t)) for t in kinds for form in forms]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return "more than 2**31 elements" if prod(static_shape(layer.outputs[0].shape)) >= 2**31 else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        activation = match_activation(layer)
        if isinstance(activation, str):
            raise PlanRefused(activation)
        (act, low, high), x = activation, get_source_index(layer)
        shape, stored = static_shape(layer.outputs[0].shape), signature.outputs[0]
        channels, count, packed = shape[1], prod(shape), pack_factors(layer)
        last, plane = stored.format == "nhwc", prod(shape[2:])
        vec = 8 if last or plane % 8 == 0 else 1
        constants = {"TYPE": TYPE[stored.dtype.name], "ACT": ACTIVATIONS[act], "LAST": int(last), "VEC": vec}
        sizes = (count // vec, channels // 8 if last else channels, 1 if last else plane // vec)

        def make(args: Args) -> list:
            arguments = AffineArguments(args.inputs[x], args.outputs[0], args.packed[0], args.packed[1], *sizes, act=(low, high))
            return [launch("affine", arguments, constants, (count_blocks(sizes[0], 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation=f"affine x{vec}", packed=packed)


def pack_factors(layer: Layer) -> tuple[Packed, Packed]:
    """The factors and shifts of the channels of a batch normalization with its epilogue, f32."""
    head = get_root_layer(layer)
    places = (outer_input(layer, t) for t in head.inputs[1:5])
    statistics = [layer.needs(i) for i in places if i is not None]
    epsilon = float(head.attrs["epsilon"])

    def compute_factor(which: int) -> np.ndarray:
        s, b, m, v = (np.asarray(t.array(), np.float64) for t in statistics)
        factor = s / np.sqrt(v + epsilon)
        return (factor, b - m * factor)[which].astype(np.float32)

    key, nbytes = "+".join(t.constant().digest for t in statistics) + f"|affine {epsilon}", statistics[0].constant().array.size * 4
    return make_packed_array(f"{key} 0", nbytes, partial(compute_factor, 0)), make_packed_array(f"{key} 1", nbytes, partial(compute_factor, 1))


def match_activation(layer: Layer) -> Activation | str:
    """The activation after it (a clip without bounds if none), or the reason why the kernel cannot compute the epilogue."""
    steps = find_epilogue_steps(layer)
    if steps is None:
        return "its fused operations do not form a chain"
    if not steps:
        return NONE
    activation = find_activation(steps[0]) if len(steps) == 1 and steps[0].other is None else None
    return f"takes one activation after it, not {' and '.join(p.op for p in steps)}" if activation is None else activation
