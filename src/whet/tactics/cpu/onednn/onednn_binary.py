"""Add, Sub, Mul, Div, Max, Min with broadcasting by oneDNN, with the epilogue as post-ops; BatchNormalization as Mul and Add."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, outer_input, require_epilogue_steps
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import (
    OneDnnTactic,
    Recipe,
    describe,
    is_static,
    list_image_formats,
    list_runtime_tensors,
    list_storage_types,
    to_f32,
)
from whet.tactics.cpu.onednn._post_ops import Chain, is_readable_at_rank, make_f32_constant, match_post_ops, select_second_operands

_ALGORITHMS = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Max": "max", "Min": "min", "Sum": "add"}


@tactic
class OneDnnBinary(OneDnnTactic):
    ops = (*_ALGORITHMS, "BatchNormalization")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        if head.op == "BatchNormalization":
            if len(layer.outputs) != 1 or any(not layer.needs(i).is_constant for i in _outer_indices(layer, head)[1:]):
                return "its statistics are computed at run time"
        elif len(head.inputs) != 2:
            return f"takes two operands, not {len(head.inputs)}"
        elif any(t.dtype.name not in ("f32", "bf16") for t in head.inputs if t is not None):
            return f"computes floats, not {head.needs(0).dtype}"
        return "its fused operations do not form a chain" if find_epilogue_steps(layer) is None else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        steps = find_epilogue_steps(layer)
        if steps is None or self.why_not(layer) or not is_static(layer):
            return []
        head = get_root_layer(layer)
        outer, rank = _outer_indices(layer, head), layer.outputs[0].type.rank
        signatures = []
        for dtype in list_storage_types(list_runtime_tensors(layer), backend):
            for f in list_image_formats(rank):
                out = Operand(f, dtype)
                stored = select_second_operands(steps, layer, out)
                for i in outer[:1] if head.op == "BatchNormalization" else outer:
                    t = layer.needs(i)
                    if not t.is_constant:
                        stored[i] = out if t.type.rank == rank else Operand("linear", dtype)
                signatures.append(Signature(tuple(stored.get(i) for i in range(len(layer.inputs))), (out,)))
        return signatures

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        steps, head = require_epilogue_steps(layer), get_root_layer(layer)
        if head.op == "BatchNormalization":
            return _batch_norm(layer, head, signature)
        fused = match_post_ops(steps, layer, signature)
        if isinstance(fused, str):
            return fused
        outer = _outer_indices(layer, head)
        shape, target = static_shape(head.outputs[0].shape), signature.outputs[0]
        if head.op != "Div" and static_shape(layer.needs(outer[0]).shape) != shape:
            outer = outer[::-1]  # only the second operand broadcasts in fast kernels
            if head.op == "Sub":
                fused = _negate(fused)
        sides: list[dnn.MemoryDesc] = []
        for i in outer:
            got = _find_operand_layout(layer.inputs[i], signature.inputs[i], shape, target)
            if isinstance(got, str):
                return got
            sides.append(got)
        left, right = sides
        first = dnn.binary(_ALGORITHMS[head.op], left, right, describe(layer.outputs[0], target), fused.attributes)
        recipe = Recipe(first, {"dst": ("output", 0)})
        for name, i in zip(("src", "src1"), outer, strict=True):
            tensor = layer.needs(i)
            if tensor.is_constant:
                recipe.constant(name, *make_f32_constant(tensor))
            else:
                recipe.places[name] = ("input", i)
        fused.fill(recipe)
        return recipe


def _negate(fused: Chain) -> Chain:
    """The chain after a change of sign: a - b = -(b - a)."""
    chain = Chain([dnn.Eltwise("linear", -1.0, 0.0)])
    chain.extend(fused)
    return chain


def _outer_indices(layer: Layer, head: Layer) -> list[int]:
    index = [outer_input(layer, t) for t in head.inputs]
    return [i for i in index if i is not None]


def _find_operand_layout(tensor: Tensor | None, stored: Operand | None, shape: tuple[int, ...], target: Operand) -> dnn.MemoryDesc | str:
    """One operand's layout at the output's rank, or why it has none."""
    assert tensor is not None
    own = static_shape(tensor.shape)
    full = (1,) * (len(shape) - len(own)) + own
    if tensor.is_constant:
        return dnn.describe(full, "f32")
    assert stored is not None
    if not is_readable_at_rank(stored, own, full):
        return f"{list(own)} stored as {stored} cannot be aligned with {list(shape)}"
    if target.format.startswith("nChw") and full[1] != shape[1]:
        return f"in {target.format} the channels of {list(own)} are padded, so they do not broadcast to {shape[1]}"
    return describe(tensor, stored, full)


def _batch_norm(layer: Layer, head: Layer, signature: Signature) -> Recipe | str:
    """x * factor + shift, both one value per channel."""
    x, scale, bias, mean, variance = _outer_indices(layer, head)
    steps, shape, target = require_epilogue_steps(layer), static_shape(layer.outputs[0].shape), signature.outputs[0]
    fused = match_post_ops(steps, layer, signature)
    if isinstance(fused, str):
        return fused
    if fused.places or fused.constants:
        return "only activations are fused to a batch normalization"
    if target.format == "linear" and len(shape) > 2 and set(shape[2:]) == {1} and shape[0] > 1:
        return "oneDNN 3.2's kernel takes the shift of the wrong channel if height and width are 1 and the batch is not; nhwc has the same bytes"
    layout = describe(layer.outputs[0], target)
    vector = dnn.describe((1, shape[1], *(1,) * (len(shape) - 2)), "f32")
    first = dnn.binary("mul", layout, vector, layout, dnn.Attributes((dnn.Binary("add", vector), *fused.post_ops)))
    recipe = Recipe(first, {"src": ("input", x), "dst": ("output", 0)})
    tensors = [layer.needs(i) for i in (scale, bias, mean, variance)]
    key = "|".join(t.constant().digest for t in tensors) + f"|{head.attrs.get('epsilon', 1e-5)}"
    recipe.constant("src1", key + "|factor", _fold_parameters(head, tensors, 0))
    recipe.constant("post0", key + "|shift", _fold_parameters(head, tensors, 1))
    return recipe


def _fold_parameters(head: Layer, tensors: list[Tensor], which: int) -> Callable[[], np.ndarray]:
    """The function that computes factor (0) or shift (1), in double."""

    def make() -> np.ndarray:
        scale, bias, mean, variance = (to_f32(t).astype(np.float64) for t in tensors)
        factor = scale / np.sqrt(variance + head.attrs.get("epsilon", 1e-5))
        return (factor if which == 0 else bias - mean * factor).astype(np.float32)

    return make
