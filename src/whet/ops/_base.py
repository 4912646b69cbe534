"""What an op is: meaning and nothing about speed. One op, one file in this folder; `op(...)` registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Dim, Layer, Tensor, TensorType
from whet.registry import nearest

REQUIRED = object()  # default of an attribute that must be given

Infer = Callable[[Layer], "TensorType | Sequence[TensorType]"]
Reference = Callable[..., "np.ndarray | Sequence[np.ndarray]"]


@dataclass(frozen=True)
class Couple:
    """Axes cut together: unit i is `a[a_at + i*a_block :][:a_block]` along `a_axis` and the same of `b`, for i < count.

    `count` None means all units. Concat ties its input to a range of its output (`b_at`), Flatten ties a channel to H*W
    features (`b_block`). An axis that no couple of a reading or making layer names may not be cut there.
    """

    a: Tensor
    a_axis: int
    b: Tensor
    b_axis: int
    a_at: int = 0
    b_at: int = 0
    a_block: int = 1
    b_block: int = 1
    count: int | None = None


@dataclass(frozen=True)
class Sample:
    """Inputs and attributes that an op is tested with, by every tactic too.

    An input is "f32[2,8]" (normal numbers), "const f32[4,3]" (the same, as a constant), "extreme f32[2,8]" (with NaN, infinities,
    zeros of both signs, denormals, largest values), "positive f32[8]", a NumPy array (constant), or None (absent).
    `regions` builds what If/Loop/Fused hold.
    """

    inputs: Sequence[str | np.ndarray | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    regions: Callable[[], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Op:
    """An op: `infer(layer) -> type(s)`, `reference(layer, *arrays) -> array(s)`, samples, attributes with defaults.

    `shape_value(layer) -> [tuple of dims | None per output]` folds small integer tensors symbolically.
    `couples(layer) -> [Couple]` says which axes are cut together (default: nothing may be cut).
    `onnx` reads a node of the ONNX op(s) `onnx_ops` (see frontends/onnx.py); None: inputs and attributes are taken as they are.
    `to_onnx` writes one when that is not one node with the same attributes.
    `pointwise` marks an op that computes each element from the elements at the same (broadcast) place.
    """

    name: str
    infer: Infer
    reference: Reference
    samples: tuple[Sample, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    couples: Callable[[Layer], list[Couple]] | None = None
    shape_value: Callable[[Layer], Sequence[tuple[Dim, ...] | None]] | None = None
    onnx: Callable[..., Any] | None = None
    onnx_ops: tuple[str, ...] = ()
    to_onnx: Callable[..., Any] | None = None
    pointwise: bool = False
    pure: bool = True


OPS: dict[str, Op] = {}


def op(name: str, infer: Infer, reference: Reference, *, samples=(), onnx_ops: Sequence[str] | None = None, **rest: Any) -> Op:
    """Registers an op. A second owner of a name is refused. Samples may be (inputs, attrs) pairs."""
    if name in OPS:
        raise NetworkError(f"op {name} has two owners")
    made = tuple(s if isinstance(s, Sample) else Sample(*s) for s in samples)
    o = OPS[name] = Op(name, infer, reference, made, onnx_ops=tuple(onnx_ops if onnx_ops is not None else (name,)), **rest)
    return o


def get_op(name: str) -> Op:
    """The op called `name`. Raises UnsupportedError with the nearest name."""
    if name not in OPS:
        raise UnsupportedError(f"there is no op {name}.{nearest(name, OPS)} To add it, write src/whet/ops/<name>.py.")
    return OPS[name]


def infer_layer(layer: Layer) -> tuple[list[TensorType], list[tuple[Dim, ...] | None]]:
    """Output types and known shape values of a layer; fills in default attributes.

    Raises UnsupportedError for an unknown op, NetworkError (naming the layer) when inputs or attributes do not fit.
    """
    o = get_op(layer.op)
    for key, default in o.attrs.items():
        if key not in layer.attrs:
            if default is REQUIRED:
                raise NetworkError(f"{layer.op} '{layer.name}' needs the attribute {key}")
            if default is not None:
                layer.attrs[key] = default
    try:
        got = o.infer(layer)
    except (IndexError, AttributeError, TypeError, KeyError) as e:
        raise NetworkError(f"{layer.op} '{layer.name}' cannot take {[str(t and t.type) for t in layer.inputs]} {layer.attrs}: {e}") from e
    types = [got] if isinstance(got, TensorType) else list(got)
    values: list[tuple[Dim, ...] | None] = [None] * len(types)
    if o.shape_value is not None:
        values = [v if v is None or len(v) <= 64 else None for v in o.shape_value(layer)]
    return types, values


# Helpers that many infer functions share.


def same_as_input(layer: Layer) -> TensorType:
    """The type of input 0."""
    return layer.inputs[0].type  # type: ignore[union-attr]


def broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...]:
    """NumPy broadcasting of two shapes with symbols. Raises NetworkError."""
    n = max(len(a), len(b))
    pa, pb = (1,) * (n - len(a)) + tuple(a), (1,) * (n - len(b)) + tuple(b)
    out: list[Dim] = []
    for x, y in zip(pa, pb, strict=True):
        if x == y or y == 1:
            out.append(x)
        elif x == 1:
            out.append(y)
        elif isinstance(x, int) and isinstance(y, int):
            raise NetworkError(f"shapes {list(map(str, a))} and {list(map(str, b))} do not broadcast")
        else:
            out.append(y if isinstance(x, int) is False and isinstance(y, int) else x)
    return tuple(out)


def axis_of(axis: int, rank: int, what: str = "axis") -> int:
    """`axis` counted from the front. Raises NetworkError when it is out of range."""
    if not -rank <= axis < rank:
        raise NetworkError(f"{what} {axis} is not one of a tensor of rank {rank}")
    return axis % rank


def known_ints(layer: Layer, i: int, what: str) -> tuple[Dim, ...]:
    """Input `i`'s values as dims. Raises UnsupportedError when they are known only at run time."""
    t = layer.input(i)
    if t is None or t.shape_value is None:
        raise UnsupportedError(
            f"{layer.op} '{layer.name}': its {what} is computed from data at run time; whet needs it known from constants and shapes"
        )
    return t.shape_value


def same_axes(x: Tensor, y: Tensor) -> list[Couple]:
    """Every axis of x tied to the same axis of y (pointwise ops of equal shapes)."""
    return [Couple(x, i, y, i) for i in range(x.type.rank)]
