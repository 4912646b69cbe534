"""Gates on integers, as in squeeze-and-excitation: each channel of each sample times a factor; integers in and out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Float32, Pointer, UInt32
from whet.tactics.cuda._device.kernel import FLOAT16_TYPES, GpuKernel, count_blocks, launch
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.quantized._quantized import INT8_TYPES, match_parts
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic


@dataclass(frozen=True)
class QMulArguments(Arguments, kernel="qmul.cu"):
    x: ConstPointer
    gate: ConstPointer
    out: Pointer
    count: UInt32  # groups of eight: in total, of an image, of a pixel
    image: UInt32
    channels: UInt32
    step: Float32  # result = (integer * step + shift) * factor + zero
    shift: Float32
    zero: Float32


@tactic
class QMul(QuantizedTactic):
    """Images channels last, a multiple of 8 channels; factors of any float type, [samples, channels, 1, 1]."""

    ops = ("Mul",)

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        if parts.stores is None or parts.stores.dtype.name not in INT8_TYPES or parts.steps or layer.outputs[0].type.rank != 4:
            return "gates integer images and stores integers"
        x, gate = _find_operand_indices(parts)
        if x is None or gate is None:
            return "takes one operand of integers and one of floats"
        image, number = parts.view.inputs[x], parts.view.inputs[gate]
        if image is None or number is None or image.is_constant or number.is_constant or image.shape != layer.outputs[0].shape:
            return "an operand is constant, or the integers broadcast"
        fits = tuple(number.shape) == (*image.shape[:2], 1, 1)
        return None if fits else f"factors of shape {list(number.shape)}; takes one for each channel of each sample"

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        x, gate = _find_operand_indices(parts)
        number = None if gate is None else layer.inputs[gate]
        if parts.stores is None or x is None or gate is None or number is None:
            return []
        signatures = []
        for real in (*FLOAT16_TYPES, number.dtype):
            stored = {x: Operand("nhwc", parts.reads[x].dtype), gate: Operand("nhwc", real)}
            signatures.append(Signature(tuple(stored.get(i) for i in range(len(layer.inputs))), (Operand("nhwc", parts.stores.dtype),)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        channels = layer.outputs[0].shape[1]
        if channels % 8:
            return f"{channels} channels; takes a multiple of 8"
        return "more than 2**34 values" if prod(static_shape(layer.outputs[0].shape)) >= 2**34 else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        if isinstance(parts, str) or parts.stores is None:
            raise PlanRefused(str(parts))
        x, gate = _find_operand_indices(parts)
        assert x is not None
        assert gate is not None
        reads, stores, kind = parts.reads[x], parts.stores, signature.needs(gate)
        n, c, h, w = static_shape(layer.outputs[0].shape)
        step = reads.number / stores.number
        constants = {"FROM": TYPES[reads.dtype.name], "TO": TYPES[stores.dtype.name], "GATE": TYPES[kind.dtype.name]}
        sizes = (n * h * w * c // 8, h * w * c // 8, c // 8)

        def make(args: Args) -> list:
            arguments = QMulArguments(
                args.inputs[x], args.inputs[gate], args.outputs[0], *sizes, step=step, shift=-reads.zero * step, zero=float(stores.zero)
            )
            return [launch("qmul", arguments, constants, (count_blocks(sizes[0], 1024), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation="qmul", rtol=0.0)


def _find_operand_indices(parts: Parts) -> tuple[int | None, int | None]:
    """Indices of the integers and the factors among the inputs."""
    both = [parts.place(t) for t in parts.head.inputs]
    whole = [i for i in both if i in parts.reads]
    return (whole[0], next(i for i in both if i != whole[0])) if len(whole) == 1 else (None, None)
