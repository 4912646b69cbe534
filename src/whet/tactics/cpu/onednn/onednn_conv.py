"""Conv and ConvTranspose by oneDNN, with bias, activations, residual sums and scalings fused as post-ops."""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import (
    EpilogueStep,
    find_epilogue_steps,
    get_operand_indices,
    get_root_layer,
    get_source_index,
    outer_input,
    require_epilogue_steps,
)
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
from whet.tactics.cpu.onednn._post_ops import list_residuals, match_post_ops, select_second_operands


@tactic
class OneDnnConv(OneDnnTactic):
    ops = ("Conv", "ConvTranspose")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if reason := self.refuses_weights(layer, list_weights(layer, get_root_layer(layer))):
            return reason
        if find_epilogue_steps(layer) is None:
            return "its fused operations do not form a chain"
        return None

    def refuses_weights(self, layer: Layer, weights: list[int | None]) -> str | None:
        """Reason why it does not take these inputs as weights and bias."""
        if any(i is None or not layer.needs(i).is_constant for i in weights):
            return "the weights are computed at run time; oneDNN's fast kernels need them packed in advance"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        steps = find_epilogue_steps(layer)
        if steps is None or self.why_not(layer) or not is_static(layer):
            return []
        head = get_root_layer(layer)
        x = get_source_index(layer)
        formats = [f for f in list_image_formats(head.needs(0).type.rank) if f != "linear"]
        pairs = [(f, f) for f in formats]
        if head.needs(0).shape[1] in (1, 2, 3, 4) and head.op == "Conv":
            pairs = [("linear", f) for f in formats] + pairs  # planar images: the kernels of first layers read them
        signatures = []
        for dtype in list_storage_types(list_runtime_tensors(layer), backend):
            for source, target in pairs:
                signatures += _list_signatures(layer, steps, x, Operand(source, dtype), Operand(target, dtype))
        return signatures

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        steps = require_epilogue_steps(layer)
        head = get_root_layer(layer)
        x, w, b = get_operand_indices(layer)
        source, weights = layer.needs(x), layer.needs(w)
        fused = match_post_ops(steps, layer, signature)
        if isinstance(fused, str):
            return fused
        stored, target = signature.needs(x), signature.outputs[0]
        transposed = head.op == "ConvTranspose"
        shape = get_grouped_shape(static_shape(weights.shape), head.attrs["group"], transposed)
        strides, dilations, pads = get_conv_geometry(head, static_shape(source.shape), static_shape(layer.outputs[0].shape), shape)
        first = dnn.convolution(
            describe(source, stored),
            dnn.describe(shape, stored.dtype.name, "any"),
            None if b is None else dnn.describe(static_shape(layer.needs(b).shape), "f32"),
            describe(layer.outputs[0], target),
            strides,
            dilations,
            pads,
            fused.attributes,
            transposed=transposed,
        )
        work = prod(static_shape((source if transposed else layer.outputs[0]).shape)) * prod(static_shape(weights.shape)[1:])
        recipe = Recipe(first, {"src": ("input", x), "dst": ("output", 0)}, work=work)
        recipe.few_channels = any(d % 16 for d in (source.shape[1], layer.outputs[0].shape[1]))
        fused.fill(recipe)
        if weights.is_constant:
            key = f"{_digest(weights)}|{head.op} {head.attrs['group']}"
            recipe.constant("weights", key, lambda: _to_row_major(to_f32(weights), shape, transposed), dnn.describe(shape, "f32"))
        if b is not None and not layer.needs(b).is_constant:
            recipe.places["bias"] = ("input", b)
        elif b is not None:
            bias = layer.needs(b)
            recipe.constant("bias", f"{_digest(bias)}|f32", lambda: to_f32(bias))
        return recipe


def _list_signatures(layer: Layer, steps: list[EpilogueStep], x: int, source: Operand, target: Operand) -> list[Signature]:
    """One signature, preceded by one for each residual that can be added in place, which moves least memory."""
    others = select_second_operands(steps, layer, target)
    if x in others and source != target:
        return []
    inputs = tuple(source if i == x else others.get(i) for i in range(len(layer.inputs)))
    inplace = [Signature(inputs, (target,), ((i, 0),)) for i in list_residuals(steps, layer) if i != x]
    return [*inplace, Signature(inputs, (target,))]


def list_weights(layer: Layer, head: Layer) -> list[int | None]:
    """Indices of the layer's inputs that are the convolution's weights and bias; None for values computed inside."""
    return [outer_input(layer, t) for t in head.inputs[1:3] if t is not None]


def _digest(tensor: Tensor) -> str:
    return tensor.constant().digest


def get_grouped_shape(shape: tuple[int, ...], group: int, transposed: bool) -> tuple[int, ...]:
    """oneDNN's weight shape: ([G,] out, in, ...) also for transposed convolutions, where ONNX has (in, out / G, ...)."""
    if transposed:
        shape = (shape[1] * group, shape[0] // group, *shape[2:])
    return shape if group == 1 else (group, shape[0] // group, *shape[1:])


def _to_row_major(w: np.ndarray, shape: tuple[int, ...], transposed: bool) -> np.ndarray:
    """The weights as a row-major array of `get_grouped_shape`."""
    if not transposed:
        return w.reshape(shape)
    group = shape[0] if len(shape) > w.ndim else 1
    return w.reshape(group, w.shape[0] // group, *w.shape[1:]).swapaxes(1, 2).reshape(shape)


def get_conv_geometry(
    head: Layer, source: tuple[int, ...], target: tuple[int, ...], weights: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Strides, dilations and pads. End pads are adapted to the shapes; a convolution may leave a remainder of its input unread."""
    r, a = len(source) - 2, head.attrs
    strides, dilations = tuple(a.get("strides") or (1,) * r), tuple(a.get("dilations") or (1,) * r)
    begins = tuple((a.get("pads") or (0,) * 2 * r)[:r])
    large, small = (target[2:], source[2:]) if head.op == "ConvTranspose" else (source[2:], target[2:])
    ends = tuple(
        (s - 1) * step + (k - 1) * d + 1 - n - before
        for n, s, step, d, k, before in zip(large, small, strides, dilations, weights[-r:], begins, strict=True)
    )
    return strides, dilations, (begins, ends if head.op == "ConvTranspose" else tuple(max(e, 0) for e in ends))
