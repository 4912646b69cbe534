"""QuantizeLinear and DequantizeLinear with one scale, of integers and float8, with a change of format."""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import RTOL, GpuKernel, all_static, launch
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.move.reformat import ReformatArguments, reformat_launch
from whet.tactics.cuda.quantized._quantized import BYTES, FLOAT8


@tactic
class Quantize(Tactic):
    """Between f32 (stored in 32 or 16 bits) and i8, u8 or e4m3."""

    ops = ("QuantizeLinear", "DequantizeLinear")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        x, y = layer.inputs[0], layer.outputs[0]
        if layer.op == "Fused" or x is None or x.is_constant:
            return "takes single layers with an input computed at run time"
        integer, real = (y, x) if layer.op == "QuantizeLinear" else (x, y)
        if integer.dtype.name not in BYTES or real.dtype != F32 or not layer.attrs.get("saturate", 1):
            return f"converts between f32 and 8-bit integers or e4m3 that saturate, not {real.dtype} and {integer.dtype}"
        if any(t is not None and not t.is_constant for t in layer.inputs[1:]):
            return "its scale is computed at run time"
        if any(t is not None and np.size(t.array()) != 1 for t in layer.inputs[1:]):
            return "has more than one scale"
        if integer.dtype.name == FLOAT8 and layer.input(2) is not None and np.any(np.asarray(layer.needs(2).array(), np.float32)):
            return "e4m3 has no zero point"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        forms = ("nhwc", "linear") if layer.outputs[0].type.rank == 4 else ("linear",)
        rest, signatures = (None,) * (len(layer.inputs) - 1), []
        for real in (F16, BF16, F32):
            for f in forms:
                for g in forms:
                    quantizes = layer.op == "QuantizeLinear"
                    source = Operand(f, real if quantizes else layer.needs(0).dtype)
                    signatures.append(Signature((source, *rest), (Operand(g, layer.outputs[0].dtype if quantizes else real),)))
        return signatures

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        source, target = signature.needs(0), signature.outputs[0]
        shape = static_shape(layer.outputs[0].shape)
        entry, constants, grid, rows, columns = reformat_launch(shape, source, target)
        quantizes = target.dtype.name not in RTOL
        constants |= {"AFFINE": 1 if quantizes else 2, "FROM": TYPES[source.dtype.name]}
        step = float(np.asarray(layer.needs(1).array(), np.float32).reshape(-1)[0])
        zero = layer.input(2)
        shift = 0.0 if zero is None else float(np.asarray(zero.array(), np.float32).reshape(-1)[0])

        def make(args: Args) -> list:
            arguments = ReformatArguments(args.inputs[0], args.outputs[0], prod(shape), rows, columns, 1.0 / step if quantizes else step, shift)
            return [launch(entry, arguments, constants, grid, 256)]

        return GpuKernel(layer, signature, make, implementation=f"{entry}", rtol=0.0 if quantizes else None)
