"""Reformat (another memory format or storage type) and Transpose by oneDNN's reorder."""

from __future__ import annotations

from whet.backends import Backend
from whet.network import FORMATS, Layer, format_fits, static_shape
from whet.network.types import DTYPES
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static, list_runtime_tensors, list_storage_types

_TYPES = ("f32", "bf16", "f16", "i32", "i8", "u8")


@tactic
class OneDnnReformat(OneDnnTactic):
    ops = ("Reformat", "Transpose")

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        a, rank = layer.attrs, layer.outputs[0].type.rank
        if layer.op == "Transpose":
            types = list_storage_types(list_runtime_tensors(layer), backend) or [layer.outputs[0].dtype]
            return [Signature((Operand("linear", d),), (Operand("linear", d),)) for d in types if d.name in _TYPES]
        if any(f not in FORMATS or not format_fits(f, rank) for f in (a["source_format"], a["format"])):
            return []
        if any(a[n] not in _TYPES for n in ("source_dtype", "dtype")):
            return []
        return [Signature((Operand(a["source_format"], DTYPES[a["source_dtype"]]),), (Operand(a["format"], DTYPES[a["dtype"]]),))]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        source, target = signature.needs(0), signature.outputs[0]
        shape = static_shape(layer.outputs[0].shape)
        if len(shape) > 12:
            return f"oneDNN moves tensors of rank up to 12, not {len(shape)}"
        if layer.op == "Transpose":
            own = static_shape(layer.needs(0).shape)
            perm = layer.attrs.get("perm") or tuple(range(len(own)))[::-1]
            strides = dnn.compute_row_major_strides(own)
            src = dnn.describe(shape, source.dtype.name, strides=[strides[p] for p in perm])
        else:
            src = describe(layer.outputs[0], source)
        first = dnn.reorder(src, describe(layer.outputs[0], target))
        # f32 to bf16 rounds to nearest even like NumPy; integers saturate, in NumPy they wrap
        exact = source.dtype == target.dtype or target.dtype.name == "f32"
        return Recipe(first, {"src": ("input", 0), "dst": ("output", 0)}, rtol=0.0 if exact else 2**-8)
