"""Rows divided by their Euclidean norms, times a factor per row: each row is read once and kept in registers (normalize.cu).

Not measured yet: written after the last rows of cosine attention (Swin V2, XCiT).
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Tactic, tactic
from whet.tactics._fused import outer_input
from whet.tactics.cuda._device.kernel import TYPE, GpuKernel, all_static, launch, list_float_types, make_packed_array, make_stored_signature
from whet.tactics.cuda._device.quantized_store import PLAIN_RESULT
from whet.tactics.cuda.norm.normalize import NormalizeArguments, divide_rows


@tactic
class UnitRows(Tactic):
    """Layers of fuse_unit_rows, row-major."""

    ops = ("*",)
    composites = ("UnitRows",)
    what = "rows divided by their norms"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        kinds = list_float_types([layer.inputs[0], layer.outputs[0]], (F16, BF16, F32))
        return [make_stored_signature(layer, {0: Operand("linear", t)}, Operand("linear", t)) for t in kinds]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        shape = static_shape(layer.outputs[0].shape)
        return "more than 2**31 rows or elements of a row" if prod(shape) >= 2**31 else "it is empty" if not prod(shape) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        shape = static_shape(layer.outputs[0].shape)
        length, rows = shape[-1], prod(shape[:-1])
        threads, kept, blocks, block = divide_rows(length, rows, backend)
        constants = {"TYPE": TYPE[signature.outputs[0].dtype.name], "OP": 4, "T": threads, "ITEMS": kept, "WIDE": int(length % 8 == 0), "EARLY": 0}
        constants |= PLAIN_RESULT.constants
        least, factor = _find_constants(layer)
        packed: list[Packed] = []
        if factor is not None:
            key = f"{factor.constant().digest}|factor of rows {shape}"
            packed.append(make_packed_array(key, rows * 4, partial(_spread_factor, factor, shape)))

        def make(args: Args) -> list:
            scale = args.packed[0] if args.packed else 0
            arguments = NormalizeArguments(
                args.inputs[0], args.outputs[0], scale, 0, rows=rows, length=length, per=length, groups=rows, epsilon=least
            )
            return [launch("normalize", arguments, constants, (blocks, 1, 1), block, label=layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"rows x{threads}", packed=packed)


def _find_constants(layer: Layer) -> tuple[float, Tensor | None]:
    """The least norm, 0 if there is no limit, and the constant that multiplies the rows."""
    least, factor = 0.0, None
    for step in layer.regions["body"].layers:
        if step.op not in ("Clip", "Max", "Mul"):
            continue
        (where,) = (outer_input(layer, t) for t in step.inputs if t is not None and t.maker is None)
        assert where is not None
        if step.op == "Mul":
            factor = layer.needs(where)
        else:
            least = float(layer.needs(where).array().reshape(-1)[0])
    return least, factor


def _spread_factor(factor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """The factor of each row."""
    values = np.asarray(factor.array(), np.float32)
    return np.ascontiguousarray(np.broadcast_to(values[..., 0] if values.ndim else values, shape[:-1]))
