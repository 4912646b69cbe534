"""Elementwise layers in a row become one, so that the values go through memory once: a head, then activations and arithmetic.

What follows the head is what backends do in passing: activations with constant parameters, arithmetic with a constant (one
number, or one a channel), and with a value of the same shape; behind a batch norm only activations. PRelu only with one slope.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import ACTIVATIONS, fuse, obstacle
from whet.passes._graph import Graph

LONGEST = 8  # steps behind the head
ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Sub")
_COMMUTES = ("Add", "Max", "Min", "Mul")
UNARY = ("Abs", "Exp", "Log", "Neg", "Sqrt")
HEADS = (*ARITHMETIC, *(a for a in ACTIVATIONS if a != "PRelu"), *UNARY, "BatchNormalization")


@rule(*ARITHMETIC, *ACTIVATIONS, *UNARY, phase=Phase.FINAL, after=["recognize_swish"])
def fuse_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if len(layer.inputs) > 2 and layer.op in ARITHMETIC:
        return None
    skip: Skip | None = None
    for i, x in enumerate(layer.inputs[:2] if layer.op in _COMMUTES else layer.inputs[:1]):
        head = g.maker(x)
        if head is None or x is None or (head.composite or head.op) not in HEADS or not _is_elementwise(head):
            continue
        reason = _unfit(layer, x, i) or obstacle(g, head, x, layer)
        if reason is None and (head.composite or head.op) == "BatchNormalization" and not _takes_no_vector(layer):
            reason = f"'{head.name}' is a batch norm, which takes activations only"
        if reason is None and head.op == "Fused" and len(head.regions["body"].layers) > LONGEST:
            reason = f"'{head.name}' has {LONGEST} steps already"
        if reason is None:
            return fuse(g, head.composite or head.op, head, layer)
        skip = skip or Skip(reason)
    return skip


def _is_elementwise(head: Layer) -> bool:
    """Whether a head computes elements of one shape, with constant parameters."""
    op = head.composite or head.op
    own = head.regions["body"].layers[0] if head.op == "Fused" else head
    if op in ARITHMETIC:
        return len(own.inputs) == 2
    if op in ACTIVATIONS or op == "BatchNormalization":
        constants = head.inputs[1:] if head.op != "Fused" else ()
        return all(t is None or t.is_constant for t in constants)
    return True


def _takes_no_vector(layer: Layer) -> bool:
    numbers = all(t is None or (t.weight is not None and t.weight.array.size == 1) for t in layer.inputs[1:])
    return layer.op not in ARITHMETIC and numbers


def _unfit(layer: Layer, x: Tensor, place: int) -> str | None:
    """Why the layer cannot be a step behind a head that makes `x`, its input `place`."""
    if layer.output.type != x.type:
        return f"%{x.name}: {x.type} broadcasts to {layer.output.type}"
    for i, t in enumerate(layer.inputs):
        if i == place or t is None:
            continue
        if t is x:
            return f"%{x.name} is both operands"
        if t.is_constant:
            if layer.op == "PRelu" and t.weight is not None and t.weight.array.size != 1:
                return f"the slopes %{t.name}: {t.type} are more than one"
            if not _number_or_channel(t, x):
                return f"the constant %{t.name}: {t.type} is neither one number nor one a channel"
        elif layer.op not in ARITHMETIC:
            return f"%{t.name}, a parameter of {layer.op}, is computed at run time"
        elif t.type != x.type:
            return f"%{t.name}: {t.type} broadcasts to {x.type}"
    return None


def _number_or_channel(t: Tensor, x: Tensor) -> bool:
    shape = (1,) * (x.type.rank - t.type.rank) + tuple(t.shape)
    wide = [i for i, d in enumerate(shape) if d != 1]
    return not wide or (len(wide) == 1 and wide[0] in (1, x.type.rank - 1))
