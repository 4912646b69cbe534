"""Pooling that `pool` does not take: any channel count, one to three spatial axes, ceil mode. One thread per value.

For coverage: no other kernel computes these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.ops._window import pool_of
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Int32, Int64, Pointer, make_array_type
from whet.tactics.cuda._device.kernel import TYPE, GpuKernel, all_static, count_blocks, launch, list_float_types, make_stored_signature

_GLOBAL = ("GlobalAveragePool", "GlobalMaxPool")


@dataclass(frozen=True)
class PoolGenericArguments(Arguments, kernel="pool_generic.cu"):
    input: ConstPointer
    out: Pointer
    count: Int64
    channels: Int32
    in_size: Annotated[Sequence[int], make_array_type("int", 3)]
    out_size: Annotated[Sequence[int], make_array_type("int", 3)]
    kernel: Annotated[Sequence[int], make_array_type("int", 3)]
    stride: Annotated[Sequence[int], make_array_type("int", 3)]
    before: Annotated[Sequence[int], make_array_type("int", 3)]
    after: Annotated[Sequence[int], make_array_type("int", 3)]
    dilation: Annotated[Sequence[int], make_array_type("int", 3)]


@tactic
class PoolGeneric(Tactic):
    """MaxPool without indices, AveragePool and global pooling of floating point, row-major or channels last."""

    ops = ("MaxPool", "AveragePool", *_GLOBAL)
    fallback = True

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused" or len(layer.outputs) != 1:
            return "takes single layers and returns no indices"
        return None if 3 <= layer.needs(0).type.rank <= 5 else "takes one to three spatial axes"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        forms = ("nhwc", "linear") if layer.outputs[0].type.rank == 4 else ("linear",)
        kinds = list_float_types([layer.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        return [make_stored_signature(layer, {0: Operand(form, t)}, Operand(form, t)) for t in kinds for form in forms]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return "more than 2**31 elements" if prod(static_shape(layer.needs(0).shape)) >= 2**31 else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
        stored, largest = signature.outputs[0], layer.op in ("MaxPool", "GlobalMaxPool")
        rows = list_pool_axes(layer, x, y)
        constants = {
            "TYPE": TYPE[stored.dtype.name],
            "MAX": int(largest),
            "PADDED": int(bool(layer.attrs.get("count_include_pad"))),
            "LAST": int(stored.format == "nhwc"),
        }
        count = prod(y)

        def make(args: Args) -> list:
            arguments = PoolGenericArguments(args.inputs[0], args.outputs[0], count, x[1], *rows)
            return [launch("pool", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation="pool x1", rtol=0.0 if largest else None)


def list_pool_axes(layer: Layer, x: tuple[int, ...], y: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Input sizes, output sizes, kernel, strides, padding before and after, dilations: of three axes each, the missing ones first."""
    r = len(x) - 2
    if layer.op in _GLOBAL:
        one, none = (1,) * r, (0,) * r
        rows, fill = [x[2:], one, x[2:], one, none, none, one], (1, 1, 1, 1, 0, 0, 1)
    else:
        pool = pool_of(layer)
        rows, fill = [x[2:], y[2:], pool.kernel, pool.strides, pool.pads[:r], pool.pads[r:], pool.dilations], (1, 1, 1, 1, 0, 0, 1)
    return [(f,) * (3 - r) + tuple(row) for row, f in zip(rows, fill, strict=True)]
