"""Reductions over any axes by oneDNN. ReduceMax and ReduceMin are not taken: they start from the largest finite numbers, which is the result for
a row of infinities (a mask of everything), and their scalar loops lose values before a NaN.

For coverage: installations without the extra `jit`, which have no compiled kernels.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._axes import find_reduced_axes
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static, list_image_formats, list_runtime_tensors, list_storage_types

_ALGORITHMS = {
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "ReduceProd": "mul",
    "ReduceL2": "norm_sum",
}


@tactic
class OneDnnReduce(OneDnnTactic):
    version = 2
    ops = tuple(_ALGORITHMS)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if find_epilogue_steps(layer):
            return "takes single layers, not fused ones"
        if not find_reduced_axes(get_root_layer(layer)):
            return "there are no axes, or they are known only at run time"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        head = get_root_layer(layer)
        x = get_source_index(layer)
        rank = head.needs(0).type.rank
        same = layer.outputs[0].type.rank == rank
        formats = list_image_formats(rank) if same else ("linear",)
        return [
            Signature(tuple(Operand(f, d) if i == x else None for i in range(len(layer.inputs))), (Operand(f, d),))
            for d in list_storage_types([t for t in list_runtime_tensors(layer) if t.dtype.is_float], backend)
            for f in formats
        ]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        head = get_root_layer(layer)
        x, axes = get_source_index(layer), find_reduced_axes(head)
        assert x is not None
        assert axes
        stored = signature.needs(x)
        source = static_shape(layer.needs(x).shape)
        target = tuple(1 if i in axes else d for i, d in enumerate(source))
        if source == target:
            return "every reduced axis has one element"
        dtype, fmt = stored.dtype.name, stored.format
        layouts = dnn.describe(source, dtype, fmt), dnn.describe(target, dtype, fmt)
        first = dnn.reduction(_ALGORITHMS[head.op], *layouts, p=2.0)
        return Recipe(first, {"src": ("input", x), "dst": ("output", 0)})
