"""Successive elementwise layers become one, so that the values are read and written once: a root and up to eight steps after it.

A step is what backends compute in an epilogue: an activation with constant parameters, arithmetic with a constant (a scalar, or a value per
channel) or with a value of the same shape. After a batch norm only activations are fused; PRelu needs one slope.
"""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.network import Layer, Tensor
from whet.rewrite.fusing import ACTIVATIONS, find_fusion_obstacle, fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

_MAX_STEPS = 8
ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Sub")
_COMMUTATIVE = ("Add", "Max", "Min", "Mul")
_UNARY = ("Abs", "Exp", "Log", "Neg", "Sqrt")
_ROOTS = (*ARITHMETIC, *(a for a in ACTIVATIONS if a != "PRelu"), *_UNARY, "BatchNormalization")

POINTWISE = register_composite(*_ROOTS, title="elementwise operations")


@POINTWISE.matcher(*ARITHMETIC, *ACTIVATIONS, *_UNARY, after=["recognize_swish"])
def fuse_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Successive elementwise layers become one, so that the values are read and written once."""
    if len(layer.inputs) > 2 and layer.op in ARITHMETIC:
        return None
    skip: Skip | None = None
    for i, x in enumerate(layer.inputs[:2] if layer.op in _COMMUTATIVE else layer.inputs[:1]):
        head = g.maker(x)
        if head is None or x is None:
            continue
        root = head.composite or head.op
        if root not in _ROOTS or not _is_elementwise(head):
            continue
        reason = _why_not_step(layer, x, i) or find_fusion_obstacle(g, x, layer)
        if reason is None and root == "BatchNormalization" and not _is_scalar_activation(layer):
            reason = f"'{head.name}' is a batch norm, which takes activations only"
        if reason is None and head.op == "Fused" and len(head.regions["body"].layers) > _MAX_STEPS:
            reason = f"'{head.name}' has {_MAX_STEPS} steps already"
        if reason is None:
            return fuse_flat(g, root, head, layer)
        skip = skip or Skip(reason)
    return skip


def _is_elementwise(head: Layer) -> bool:
    """True if a layer computes elements of one shape, with constant parameters."""
    op = head.composite or head.op
    root = head.regions["body"].layers[0] if head.op == "Fused" else head
    if op in ARITHMETIC:
        return len(root.inputs) == 2
    if op in ACTIVATIONS or op == "BatchNormalization":
        parameters = head.inputs[1:] if head.op != "Fused" else ()
        return all(t is None or t.is_constant for t in parameters)
    return True


def _is_scalar_activation(layer: Layer) -> bool:
    """True if a layer is a unary operation with at most scalar parameters."""
    is_scalar = all(t is None or (t.weight is not None and t.weight.array.size == 1) for t in layer.inputs[1:])
    return layer.op not in ARITHMETIC and is_scalar


def _why_not_step(layer: Layer, x: Tensor, index: int) -> str | None:
    """Why the layer cannot be a step after the producer of `x`, its input `index`."""
    if layer.output.type != x.type:
        return f"%{x.name}: {x.type} broadcasts to {layer.output.type}"
    for i, t in enumerate(layer.inputs):
        if i == index or t is None:
            continue
        if t is x:
            return f"%{x.name} is both operands"
        if t.is_constant:
            if layer.op == "PRelu" and t.weight is not None and t.weight.array.size != 1:
                return f"the slopes %{t.name}: {t.type} are more than one"
            if not _is_scalar_or_per_channel(t, x):
                return f"the constant %{t.name}: {t.type} is neither a scalar nor a value per channel"
        elif layer.op not in ARITHMETIC:
            return f"%{t.name}, a parameter of {layer.op}, is computed at run time"
        elif t.type != x.type:
            return f"%{t.name}: {t.type} broadcasts to {x.type}"
    return None


def _is_scalar_or_per_channel(t: Tensor, x: Tensor) -> bool:
    shape = (1,) * (x.type.rank - t.type.rank) + tuple(t.shape)
    axes = [i for i, d in enumerate(shape) if d != 1]
    return not axes or (len(axes) == 1 and axes[0] in (1, x.type.rank - 1))
