"""Batch normalization of concatenated images with the following activation in one launch, without a copy of the parts.

Measured: benchmarks/results/h200/networks.json (DenseNet-121).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Annotated

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, Pointer, UInt32, make_array_type
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import ACTIVATIONS, TYPE, GpuKernel, all_static, count_blocks, launch, list_float_types, make_stored_signature
from whet.tactics.cuda.norm.batch_norm import match_activation, pack_factors

_PARTS = (4, 8, 16, 32, 64)  # the kernel is compiled for each
_FAR = 2**31 - 1


@dataclass(frozen=True)
class ConcatNormArguments(Arguments, kernel="concat_norm.cu"):
    """Arguments of concat_norm.cu."""

    out: Pointer
    scale: ConstFloatPointer
    shift: ConstFloatPointer
    input: Annotated[Sequence[int], make_array_type("const u8*", 64)]
    start: Annotated[Sequence[int], make_array_type("int", 65)]  # groups of eight channels in front of each part; _FAR after the last
    count: UInt32  # groups of the result
    channels: UInt32  # groups of a pixel
    act: ActivationParameters


@tactic
class ConcatNorm(Tactic):
    """Layers of the pass fuse_concat_norm, channels last, all parts of a multiple of eight channels."""

    ops = ("*",)
    composites = ("ConcatNorm",)
    what = "batch normalizations of concatenated images"

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if any(n % 8 or not n for n in _list_channels(layer)):
            return "takes parts of a multiple of 8 channels"
        activation = match_activation(_make_norm_layer(layer))
        return activation if isinstance(activation, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        kinds = list_float_types([layer.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        return [make_stored_signature(layer, dict.fromkeys(_list_parts(layer), Operand("nhwc", t)), Operand("nhwc", t)) for t in kinds]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return "more than 2**31 elements" if prod(static_shape(layer.outputs[0].shape)) >= 2**31 else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        norm, parts = _make_norm_layer(layer), _list_parts(layer)
        activation = match_activation(norm)
        if isinstance(activation, str):
            raise PlanRefused(activation)
        (act, low, high), stored = activation, signature.outputs[0]
        shape, free = static_shape(layer.outputs[0].shape), _PARTS[-1] - len(parts)
        groups = [n // 8 for n in _list_channels(layer)]
        starts = (0, *accumulate(groups[:-1]), *(_FAR,) * (free + 1))
        constants = {"TYPE": TYPE[stored.dtype.name], "ACT": ACTIVATIONS[act], "PARTS": next(n for n in _PARTS if n >= len(parts))}
        count = prod(shape) // 8

        def make(args: Args) -> list:
            if not count:
                return []
            sources = (*(args.inputs[i] for i in parts), *(0,) * free)
            arguments = ConcatNormArguments(
                args.outputs[0], args.packed[0], args.packed[1], sources, starts, count=count, channels=sum(groups), act=(low, high)
            )
            return [launch("concat_norm", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation=f"affine of {len(parts)} parts", packed=pack_factors(norm))


def _list_parts(layer: Layer) -> list[int]:
    """The indices of the inputs that are concatenated, in order."""
    body = layer.regions["body"]
    place = {t: i for i, t in enumerate(body.inputs)}
    return [place[t] for t in body.layers[0].required_inputs()]


def _list_channels(layer: Layer) -> list[int]:
    """The channels of each part; 0 for an unknown number."""
    sizes = (layer.needs(i).shape[1] for i in _list_parts(layer))
    return [n if isinstance(n, int) else 0 for n in sizes]


def _make_norm_layer(layer: Layer) -> Layer:
    """The batch normalization with its epilogue as an unfused layer."""
    body = layer.regions["body"]
    return with_outer_inputs(body.layers[1], dict(zip(body.inputs, layer.inputs, strict=True)))
