"""Dequantize, convolution, matrix product, Add, gate or average pool, and quantize become one layer that reads and stores integers."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse
from whet.passes._graph import Graph
from whet.passes._quantize import WEIGHTED, dequantizer, quantized_members, unfit_activation

_POOLS = ("AveragePool", "GlobalAveragePool")
_CLIPS = ("Relu", "Clip")


@rule(
    "QuantizeLinear",
    phase=Phase.FUSE,
    after=["fuse_conv_activation", "fuse_gemm_activation", "fuse_gemm_scale", "fuse_matmul_bias", "fuse_silu"],
    level=0,
)
def fuse_quantized(g: Graph, layer: Layer) -> Tensor | Skip | None:
    value = layer.inputs[0]
    head = g.maker(value)
    if head is None or value is None:
        return None
    if anchored(head, WEIGHTED):
        return _weighted(g, layer, head, value)
    if head.op == "Add":
        return _plain(g, layer, "Add", [head], value)
    if head.op == "Mul":
        return _gate(g, layer, head, value)
    if head.op in _CLIPS and all(t is None or t.is_constant for t in head.inputs[1:]):
        inner = g.maker(head.inputs[0])
        if inner is not None and inner.op == "Add":
            if reason := g.shared(inner.output, head):
                return Skip(reason)
            return _plain(g, layer, "Add", [inner, head], value)
        return None
    if head.op in _POOLS:
        return _plain(g, layer, head.op, [head], value)
    return None


def _weighted(g: Graph, layer: Layer, head: Layer, value: Tensor) -> Tensor | Skip | None:
    found = quantized_members(g, head)
    if found is None:
        return None
    if isinstance(found, str):
        return Skip(found)
    if reason := unfit_activation(layer) or g.shared(value, layer):
        return Skip(reason)
    return fuse(g, anchored(head, WEIGHTED), *found, head, layer)


def _plain(g: Graph, layer: Layer, composite: str, members: list[Layer], value: Tensor) -> Tensor | Skip | None:
    """Add and pools: every input dequantized, then they, then the quantizing layer."""
    head = members[0]
    made = [dequantizer(g, t) for t in head.inputs]
    if not any(made):
        return None
    if not all(made):
        missing = next(t for t, m in zip(head.inputs, made, strict=True) if m is None)
        return Skip(f"%{missing.name if missing else '?'} is not quantized: put Q/DQ on it too")
    own = list(dict.fromkeys(m for m in made if m is not None))
    reason = next((r for m in own if (r := unfit_activation(m))), None) or unfit_activation(layer) or g.shared(value, layer)
    if composite == "Add" and any(t is not None and t.type != head.output.type for t in head.inputs):
        reason = reason or "its inputs broadcast"
    if reason:
        return Skip(reason)
    return fuse(g, composite, *own, *members, layer)


def _gate(g: Graph, layer: Layer, head: Layer, value: Tensor) -> Tensor | Skip | None:
    """Mul of a dequantized value by a factor in floating point that broadcasts over it, as squeeze-and-excitation has it."""
    pairs = [(dequantizer(g, a), b) for a, b in (head.inputs, head.inputs[::-1]) if a is not None and a.type == value.type]
    found = [m for m, other in pairs if m is not None and dequantizer(g, other) is None]
    if len(found) != 1:
        return None
    if reason := unfit_activation(found[0]) or unfit_activation(layer) or g.shared(value, layer):
        return Skip(reason)
    return fuse(g, "Mul", found[0], head, layer)
