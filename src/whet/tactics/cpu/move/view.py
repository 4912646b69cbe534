"""Layers that change only a tensor's name or shape (Reshape, Squeeze, ..., some Reformats and Transposes): no launch if in place, else a copy.

A Transpose from channels last to row-major and its inverse leave the bytes as they are.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.formats import has_same_bytes
from whet.network.types import DTYPES, DType
from whet.tactics._base import Args, Config, Kernel, Operand, Signature, Stream, ViewKernel, count_operand_bytes, count_stored_bytes, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static, list_image_formats, list_storage_types


class InPlaceKernel:
    """Records no launch."""

    scratch, packed, rtol, deterministic, implementation = 0, (), 0.0, True, "in place, nothing to do"

    def __init__(self, layer: Layer, signature: Signature) -> None:
        self.inputs, self.outputs = count_stored_bytes(layer, signature)

    def enqueue(self, args: Args, stream: Stream) -> None:
        """Records nothing."""


class AliasKernel(InPlaceKernel, ViewKernel):
    """The result is the input's bytes, which later layers may read too."""

    shifts = (0,)


@tactic
class View(OneDnnTactic):
    ops = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Reformat", "Transpose")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if len(layer.outputs) != 1:
            return "has a second output"
        x, a = layer.inputs[0], layer.attrs
        if x is None or x.is_constant:
            return "its input is constant"
        if layer.op == "Reformat" and not (a["source_dtype"] == a["dtype"] and x.type.static and self._reformats(layer)):
            return "the bytes differ between these formats"
        return None

    def _reformats(self, layer: Layer) -> bool:
        return has_same_bytes(layer.attrs["source_format"], layer.attrs["format"], static_shape(layer.outputs[0].shape))

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        signatures = []
        for source, target in self._operands(layer, backend):
            inputs = (source, *(None,) * (len(layer.inputs) - 1))
            signatures.append(Signature(inputs, (target,), ((0, 0),)))
            if dnn.load_error() is None:  # oneDNN copies
                signatures.append(Signature(inputs, (target,)))
        return signatures

    def _operands(self, layer: Layer, backend: Backend) -> list[tuple[Operand, Operand]]:
        a, x, y = layer.attrs, layer.needs(0), layer.outputs[0]
        if layer.op == "Reformat":
            dtype = DTYPES[a["dtype"]]
            return [(Operand(a["source_format"], dtype), Operand(a["format"], dtype))]
        types: list[DType] = list_storage_types([x, y], backend) or [x.dtype]
        if layer.op in ("Identity", "Dropout"):
            pairs = [(f, f) for f in list_image_formats(x.type.rank)]
        elif layer.op == "Transpose":
            shape, formats = static_shape(x.shape), list_image_formats(x.type.rank)
            pairs = [(f, g) for f in formats for g in formats if has_same_bytes(f, g, shape, a["perm"])]
        else:  # with one value per channel several formats have the same bytes
            shape = static_shape(x.shape)
            pairs = [(f, "linear") for f in list_image_formats(len(shape)) if has_same_bytes(f, "linear", shape)]
        return [(Operand(f, d), Operand(g, d)) for d in types if d.bits >= 8 for f, g in pairs]

    def missing_library(self) -> str | None:
        return None

    def library_version(self) -> str:
        return super().library_version() if dnn.load_error() is None else ""

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        return [()]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return "strings are not stored in device memory" if signature.outputs[0].dtype.name == "string" else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Kernel:
        if signature.inplace:  # reformats are inserted after layers that share bytes are known
            return (InPlaceKernel if layer.op == "Reformat" else AliasKernel)(layer, signature)
        return self._plan(lambda: self.recipe(layer, signature, backend), layer, signature, (), backend)

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe:
        layout = dnn.describe((count_operand_bytes(layer.outputs[0], signature.outputs[0]),), "u8")
        return Recipe(dnn.reorder(layout, layout), {"src": ("input", 0), "dst": ("output", 0)}, rtol=0.0)
