"""QuantizeLinear and DequantizeLinear by oneDNN: a reorder, also to another format, or an elementwise kernel in the same format.

For coverage: installations without the extra `jit`, which have no compiled kernels.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import BF16, F32, Layer, format_fits
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import Recipe, TwoPrimitives, describe, is_static

_STORED = ("i8", "u8")
MAX_RANK = 5  # of oneDNN's fast elementwise kernels


@tactic
class OneDnnQuantize(TwoPrimitives):
    ops = ("QuantizeLinear", "DequantizeLinear")
    kinds = ("reorder", "binary")
    version = 2

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        integer, real = layer.outputs[0], layer.needs(0)
        if layer.op == "DequantizeLinear":
            integer, real = real, integer
        if layer.op == "Fused" or layer.needs(0).is_constant:
            return "takes single layers with an input computed at run time"
        if integer.dtype.name not in _STORED or real.dtype != F32:
            return f"converts between f32 and {', '.join(_STORED)}, not {real.dtype} and {integer.dtype}"
        if layer.attrs["block_size"]:
            return "takes no scales per block"
        if any(t is not None and not t.is_constant for t in layer.inputs[1:]):
            return "its scale is computed at run time"
        zeros = layer.input(2)
        if zeros is not None and np.any(zeros.array() != zeros.array().reshape(-1)[:1]):
            return "takes one zero point"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        rank = layer.outputs[0].type.rank
        reals = [F32, BF16] if "avx512_bf16" in backend.capabilities.features and dnn.has_isa("avx512_core_bf16") else [F32]
        formats = [f for f in ("nhwc", "linear") if format_fits(f, rank)]
        signatures = []
        for real in reals:
            for f in formats:
                for g in formats:
                    source, target = (real, layer.outputs[0].dtype) if layer.op == "QuantizeLinear" else (layer.needs(0).dtype, real)
                    signatures.append(Signature((Operand(f, source), *(None,) * (len(layer.inputs) - 1)), (Operand(g, target),)))
        return signatures

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        side, values, shift = get_scales(layer)
        x, stored = layer.needs(0), signature.needs(0)
        mask = 0 if values.size == 1 else 1 << (layer.attrs["axis"] % x.type.rank)
        attributes = dnn.Attributes(scales=((side, mask, values.size),), zero_points=((side, 0, 1),) if shift else ())
        first = dnn.reorder(describe(x, stored), describe(layer.outputs[0], signature.outputs[0]), attributes)
        recipe = Recipe(first, {"src": ("input", 0), "dst": ("output", 0)}, 0.0 if side == "dst" else None)
        recipe.constant(f"scale:{side}", f"scale|{values.tobytes().hex()}", lambda: values)
        if shift:
            recipe.constant(f"zero:{side}", f"zero|{shift}", lambda: np.array([shift], np.int32))
        return recipe

    def second_recipe(self, layer: Layer, signature: Signature) -> Recipe | str:
        return _make_binary(layer, signature)

    def select_implementations(self, names: list[str]) -> list[str]:
        return [n for n in names if n != "ref:any"]


def get_scales(layer: Layer) -> tuple[str, np.ndarray, int]:
    """The scaled side of the conversion, its scales, and the zero point."""
    scale, zero = layer.needs(1), layer.input(2)
    shift = 0 if zero is None or not zero.array().size else int(zero.array().reshape(-1)[0])
    return "dst" if layer.op == "QuantizeLinear" else "src", np.asarray(scale.array(), np.float32).reshape(-1), shift


def _make_binary(layer: Layer, signature: Signature) -> Recipe | str:
    """max(x, x), scaled and shifted: two and a half times as fast as the reorder from f32 to integers in the same format."""
    side, values, shift = get_scales(layer)
    x, stored, out = layer.needs(0), signature.needs(0), signature.outputs[0]
    if values.size != 1 or stored.format != out.format or x.type.rank > MAX_RANK:
        return "takes one scale, and the same format before and after"
    factor = float(values[0])
    line = (1.0 / factor, float(shift)) if side == "dst" else (factor, -shift * factor)
    source = describe(x, stored)
    first = dnn.binary("max", source, source, describe(layer.outputs[0], out), dnn.Attributes((dnn.Eltwise("linear", *line),)))
    return Recipe(first, {"src": ("input", 0), "src1": ("input", 0), "dst": ("output", 0)}, 0.0 if side == "dst" else None)
