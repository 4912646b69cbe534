"""Expected values: one layer in float64 from its actual inputs, the network in its own types, rounded at the engine's points."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.builder.batching.batch_items import NO_BATCH_AXES, BatchAxes, BatchItems, run_network_on_items, run_on_items
from whet.builder.verify.overflows import Overflow, find_overflow, round_within_range
from whet.engine.plan import Choice, EnginePlan
from whet.network import BF16, F16, DType, Layer, Tensor
from whet.ops import bind_layer, bind_symbols, run_layer, run_regions, widen_attributes

_PRODUCTS = ("Conv", "ConvTranspose", "Fused", "Gemm", "MatMul")  # ops with operands that a tactic may round


def compute_reference_outputs(
    layer: Layer, choice: Choice, ins: list, images: BatchItems | None = None, axes: BatchAxes = NO_BATCH_AXES
) -> list[np.ndarray]:  # fmt: skip
    """The layer's outputs in float64 from inputs as stored; weights are rounded if the layer computes in a smaller type."""
    small = find_smaller_type(layer, choice)
    arrays = []
    for t, a in zip(layer.inputs, ins, strict=True):
        if a is not None and t is not None and t.dtype.is_float:
            if t.is_constant and small is not None and a.ndim >= 2:
                a = a.astype(small.numpy)
            a = a.astype(np.float64)
        arrays.append(a)
    if layer.op == "Reformat":
        return arrays
    if images is not None:
        return run_on_items(layer, arrays, {t: axes.axis[t.name] for t in layer.inputs if t is not None and t.name in axes.axis}, images)
    if layer.regions:
        return run_regions(layer, arrays, widen=True)
    return run_layer(widen_attributes(layer), arrays)


def find_smaller_type(layer: Layer, choice: Choice) -> DType | None:
    """The smaller type that the layer's first float operand is stored in, or None if it is not smaller."""
    for t, o in zip(layer.inputs, choice.inputs, strict=True):
        if t is not None and o is not None and t.dtype.is_float:
            return {F16.name: F16, BF16.name: BF16}.get(o[1]) if o[1] != t.dtype.name else None
    return None


def computes_tf32(choice: Choice) -> bool:
    """True if the tactic's config rounds f32 operands to TF32."""
    return ("math", "tf32") in choice.config


def list_multiplied_inputs(layer: Layer) -> list[Tensor | None]:
    """The layer's inputs that are operands of its convolutions and matrix products, directly or through a Concat."""
    if layer.op != "Fused":
        return list(layer.inputs[:2])
    body = layer.regions["body"]
    wanted = {t for part in body.layers if part.op in _PRODUCTS for t in list_multiplied_inputs(part)}
    for part in reversed(body.layers):
        if part.op == "Concat" and part.outputs[0] in wanted:
            wanted.update(part.inputs)
    return [outer for inner, outer in zip(body.inputs, layer.inputs, strict=True) if inner in wanted]


def round_to_tf32(a: np.ndarray) -> np.ndarray:
    """f32 values rounded to a 10-bit mantissa, to nearest."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    return np.where(np.isfinite(a), ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32), a).astype(a.dtype)


def emulate(
    plan: EnginePlan, inputs: Mapping[str, np.ndarray], images: BatchItems | None = None, overflows: list[Overflow] | None = None
) -> dict[str, np.ndarray]:
    """The engine's network by the reference in the tensors' own types, rounded to the storage types of the engine.

    Values beyond the range of a storage type are not rounded, so that an emulation does not excuse an engine that overflows: they are
    appended to `overflows`.
    """
    net = plan.network

    def round_to(dtype: DType, layer: Layer, t: Tensor, a: np.ndarray) -> np.ndarray:
        if overflows is not None and (overflow := find_overflow(layer.name, t, a, dtype)) is not None:
            overflows.append(overflow)
        return round_within_range(a, dtype).astype(t.dtype.numpy)

    def read(layer: Layer, t: Tensor, a: np.ndarray) -> np.ndarray:
        choice = plan.choices[layer.name]
        if computes_tf32(choice) and t in list_multiplied_inputs(layer):
            return round_to_tf32(a)
        small = find_smaller_type(layer, choice) if t.is_constant else None
        return round_to(small, layer, t, a) if small is not None and a.ndim >= 2 and t.dtype.is_float else a

    def round_as_stored(layer: Layer, i: int, a: np.ndarray) -> np.ndarray:
        stored = {F16.name: F16, BF16.name: BF16}.get(plan.choices[layer.name].outputs[i][1])
        t = layer.outputs[i]
        return a if stored in (None, t.dtype) or not t.dtype.is_float else round_to(stored, layer, t, a)

    if images is not None:
        return run_network_on_items(net, inputs, images, read=read, write=round_as_stored)
    env = bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v) for k, v in inputs.items()})
    values = {t: np.asarray(inputs[t.name]) for t in net.inputs}
    for layer in net.layers:
        arrays = [None if t is None else read(layer, t, t.array() if t.is_constant else values[t]) for t in layer.inputs]
        bound = bind_layer(layer, env)
        outs = run_regions(bound, arrays) if layer.regions else run_layer(bound, arrays)
        for i, (t, a) in enumerate(zip(layer.outputs, outs, strict=True)):
            values[t] = round_as_stored(layer, i, a)
    return {t.name: values[t] if t in values else t.array() for t in net.outputs}
