"""Quantized Add: two operands of integers (or e4m3) with different scales, an activation, a result of integers (or e4m3).

For coverage: a sum of two branches that no convolution can add in its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstPointer, Float32, Int64, Pointer
from whet.tactics.cuda._device.kernel import ACTIVATIONS, GpuKernel, count_blocks, launch
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.quantized._quantized import match_parts, match_quantized_epilogue
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic


@dataclass(frozen=True)
class QAddArguments(Arguments, kernel="qadd.cu"):
    a: ConstPointer
    b: ConstPointer
    out: Pointer
    count: Int64
    step_a: Float32  # shift: minus the zero points
    step_b: Float32
    shift: Float32
    act: ActivationParameters
    per_step: Float32
    zero: Float32


@tactic
class QAdd(QuantizedTactic):
    """Operands of the result's shape, row-major or channels last."""

    ops = ("Add",)
    float8 = True

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        if parts.stores is None or any(parts.place(t) not in parts.reads for t in parts.head.inputs):
            return "adds integers and stores integers"
        if any(t is None or t.is_constant or t.shape != layer.outputs[0].shape for t in (parts.view.inputs[i] for i in parts.reads)):
            return "a summand is constant, or broadcasts"
        epilogue = match_quantized_epilogue(parts)
        if isinstance(epilogue, str):
            return epilogue
        return "takes at most an activation after the sum" if epilogue.residual is not None or epilogue.biases else None

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        if parts.stores is None:
            return []
        signatures = []
        for f in ("nhwc", "linear") if layer.outputs[0].type.rank == 4 else ("linear",):
            ins = tuple(Operand(f, parts.reads[i].dtype) if i in parts.reads else None for i in range(len(layer.inputs)))
            signatures.append(Signature(ins, (Operand(f, parts.stores.dtype),)))
        return signatures

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        epilogue = parts if isinstance(parts, str) else match_quantized_epilogue(parts)
        if isinstance(parts, str) or isinstance(epilogue, str) or parts.stores is None:
            raise PlanRefused(str(epilogue))
        i, j = (place for t in parts.head.inputs if (place := parts.place(t)) is not None)
        a, b, stores = parts.reads[i], parts.reads[j], parts.stores
        kind, low, high = epilogue.post_ops.activation
        constants = {"A": TYPES[a.dtype.name], "B": TYPES[b.dtype.name], "TO": TYPES[stores.dtype.name], "ACT": ACTIVATIONS[kind]}
        count = prod(static_shape(layer.outputs[0].shape))
        shift = -a.zero * a.number - b.zero * b.number

        def make(args: Args) -> list:
            arguments = QAddArguments(
                a=args.inputs[i],
                b=args.inputs[j],
                out=args.outputs[0],
                count=count,
                step_a=a.number,
                step_b=b.number,
                shift=shift,
                act=(low, high),
                per_step=1 / stores.number,
                zero=stores.zero,
            )
            return [launch("qadd", arguments, constants, (count_blocks(count, 2048), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation="qadd", rtol=0.0)
