"""Pooling by oneDNN: windows, and whole images (GlobalAveragePool, GlobalMaxPool, ReduceMean over all spatial axes)."""

from __future__ import annotations

from collections.abc import Sequence

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, require_epilogue_steps
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._axes import find_reduced_axes
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static, list_image_formats, list_runtime_tensors, list_storage_types
from whet.tactics.cpu.onednn._post_ops import match_post_ops, select_second_operands

_WHOLE = {"GlobalAveragePool": "avg_exclude_padding", "GlobalMaxPool": "max", "ReduceMean": "avg_exclude_padding"}


@tactic
class OneDnnPool(OneDnnTactic):
    ops = ("MaxPool", "AveragePool", *_WHOLE)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        if len(layer.outputs) != 1:
            return "oneDNN's pooling for inference has no indices output"
        if find_epilogue_steps(layer) is None:
            return "its fused operations do not form a chain"
        rank = head.needs(0).type.rank
        if not 3 <= rank <= 5:
            return f"pools images of 1 to 3 spatial axes, not rank {rank}"
        if head.op.startswith("Reduce") and find_reduced_axes(head) != tuple(range(2, rank)):
            return "takes reductions of all spatial axes"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        steps = find_epilogue_steps(layer)
        if steps is None or self.why_not(layer) or not is_static(layer):
            return []
        head = get_root_layer(layer)
        x = get_source_index(layer)
        shape = static_shape(head.needs(0).shape)
        pairs = [(f, f) for f in list_image_formats(len(shape))]
        if head.op in _WHOLE:
            kept = layer.outputs[0].type.rank == len(shape)
            # With one value per channel, nhwc and full blocks of channels have the same bytes as row-major.
            flat = [(f, "linear") for f, _ in pairs if f == "nhwc" or (f.startswith("nChw") and shape[1] % 16 == 0)]
            pairs = [*flat, *(pairs if kept else [("linear", "linear")])]
        signatures = []
        own = layer.needs(x).dtype if x is not None else None
        integers = [own] if own is not None and own.name in ("i8", "u8") and head.op == "MaxPool" and layer is head else []
        for dtype in integers or list_storage_types(list_runtime_tensors(layer), backend):
            for source, target in pairs:
                out = Operand(target, dtype)
                others = select_second_operands(steps, layer, out)
                signatures.append(
                    Signature(tuple(Operand(source, dtype) if i == x else others.get(i) for i in range(len(layer.inputs))), (out,))
                )
        return signatures

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        steps, head = require_epilogue_steps(layer), get_root_layer(layer)
        x = get_source_index(layer)
        stored = signature.needs(x)
        source = static_shape(layer.needs(x).shape)
        fused = match_post_ops(steps, layer, signature)
        if isinstance(fused, str):
            return fused
        dtype = stored.dtype.name
        if head.op in _WHOLE:
            target, r = (*source[:2], *(1,) * (len(source) - 2)), len(source) - 2
            alg, kernel, strides, dilations, pads = _WHOLE[head.op], source[2:], (1,) * r, (1,) * r, ((0,) * r, (0,) * r)
            fmt = stored.format  # the output has the same bytes in the input's format
        else:
            target, fmt = static_shape(layer.outputs[0].shape), signature.outputs[0].format
            kernel, strides, dilations, pads, grown = fit_window(head, source[2:], target[2:])
            alg = "max" if head.op == "MaxPool" else "avg_include_padding" if head.attrs.get("count_include_pad") else "avg_exclude_padding"
            if grown and alg == "avg_include_padding":
                return "ceil_mode adds padding that oneDNN would count in the average"
        layout = dnn.describe(source, dtype, stored.format)
        first = dnn.pooling(alg, layout, dnn.describe(target, dtype, fmt), kernel, strides, dilations, pads, fused.attributes)
        exact = alg == "max" and not steps
        recipe = Recipe(first, {"src": ("input", x), "dst": ("output", 0)}, rtol=0.0 if exact else None)
        fused.fill(recipe)
        return recipe


def fit_window(
    head: Layer, source: Sequence[int], target: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]], bool]:
    """Kernel, strides, dilations, pads that fit the shapes, and whether the end pads were increased (ceil_mode)."""
    a, r = head.attrs, len(source)
    kernel = tuple(a["kernel_shape"])
    strides, dilations = tuple(a.get("strides") or (1,) * r), tuple(a.get("dilations") or (1,) * r)
    pads = tuple(a.get("pads") or (0,) * 2 * r)
    fitting = tuple(
        (t - 1) * s + (k - 1) * d + 1 - n - p for t, s, k, d, n, p in zip(target, strides, kernel, dilations, source, pads, strict=False)
    )
    ends = tuple(max(e, 0) for e in fitting)
    return kernel, strides, dilations, (pads[:r], ends), any(e > p for e, p in zip(ends, pads[r:], strict=True))
