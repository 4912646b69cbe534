"""Shared by ops that move whole axes: coupled blocks of reshapes, axes as input or attribute, attributes of older opsets."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Dim, Layer, Network, Tensor, evaluate, find_symbols
from whet.ops._base import Couple, find_given_ints, get_op
from whet.ops._types import normalize_axis

RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")  # the same elements in the same order, with other axes


def find_given_axes(layer: Layer, rank: int, i: int = 1) -> tuple[int, ...] | None:
    """The axes (attribute `axes`, else input `i`) as sorted non-negative indices; None if not given."""
    got = find_given_ints(layer, "axes", i)
    if got is None:
        return None
    axes = sorted(normalize_axis(a, rank) for a in got)
    if len(set(axes)) != len(axes):
        raise NetworkError(f"{layer.op} '{layer.name}': axes {got} repeat an axis")
    return tuple(axes)


def map_axes(x: Tensor, y: Tensor, axes: dict[int, int]) -> list[Couple]:
    """Axis a of x tied to axis places[a] of y."""
    return [Couple(x, a, y, b) for a, b in axes.items()]


def convert_attributes_to_inputs(node, g: Network, names: Sequence[str], dtype=np.int64, first: int = 1) -> list[Tensor | None]:
    """The node's inputs, with the attributes `names` of an older opset as constants from input `first` on."""
    inputs = list(node.inputs) + [None] * (first - len(node.inputs))
    if len(inputs) > first or not any(n in node.attrs for n in names):
        return inputs
    for n in names:
        value = node.attrs.get(n)
        inputs.append(None if value is None else g.constant(np.array(value, dtype), f"{node.name}.{n}"))
    return inputs


def make_attribute_exporter(*names: str, first: int = 1):
    """`to_onnx` of an op whose attributes `names` are ONNX inputs from `first` on."""

    def to_onnx(layer: Layer, w) -> None:
        inputs = [w.name(t) for t in layer.inputs]
        defaults = get_op(layer.op).attrs
        attrs = {k: v for k, v in layer.attrs.items() if v != defaults[k]}
        for i, n in enumerate(names, first):
            if attrs.get(n) is not None:
                inputs += [""] * (i + 1 - len(inputs))
                inputs[i] = w.dims(attrs[n], f"{layer.name}.{n}")
            attrs.pop(n, None)
        w.node(layer.op, inputs, [w.name(t) for t in layer.outputs], name=layer.name, **attrs)

    return to_onnx


def needs_opset(layer: Layer, w, opset: int, subject: str) -> None:
    """For `to_onnx`: raises UnsupportedError if the target opset is older."""
    if w.opset < opset:
        raise UnsupportedError(f"{layer.op} '{layer.name}': {subject} is not available in opset {w.opset}; write opset {opset} or newer")


def block_couples(x: Tensor, y: Tensor, level: int | None = None) -> list[Couple]:
    """Couples of a reshape: dimensions form groups of equal product; within a group the outermost axes have equal blocks.

    With a `level`, an axis split into (or merged from) several axes is coupled to the one `level` positions before the innermost, or to
    the outermost if there are fewer. Where several axes become several others (batch, heads * width to batch * heads, width), level 0
    couples the innermost ones.
    """
    couples = []
    for xs, ys in group_axes(x.shape, y.shape):
        a, b = _find_outermost_axis(x.shape, xs), _find_outermost_axis(y.shape, ys)
        if a is None or b is None:
            continue
        if level is not None and (factor := _factor(x, y, xs, ys, level)) is not None:
            couples.append(factor)
            continue
        if level == 0 and (inner := _couple_innermost(x, y, xs, ys)) is not None:
            couples.append(inner)
            continue
        n, m = x.shape[a], y.shape[b]
        if n == m:
            couples.append(Couple(x, a, y, b))
        elif isinstance(n, int) and isinstance(m, int):
            units = gcd(n, m)
            if units > 1 and n and m:
                couples.append(Couple(x, a, y, b, a_block=n // units, b_block=m // units, count=units))
    return couples


def _factor(x: Tensor, y: Tensor, xs: Sequence[int], ys: Sequence[int], level: int) -> Couple | None:
    """Couple of one axis and its factor at `level`; None unless exactly one side is a single axis of known size."""
    ones = [[i for i in axes if t.shape[i] != 1] for t, axes in ((x, xs), (y, ys))]
    single = 0 if len(ones[0]) == 1 else 1
    (whole,), parts = (ones[0], ones[1]) if single == 0 else (ones[1], ones[0]) if len(ones[1]) == 1 else ((None,), [])
    t, many = (x, y) if single == 0 else (y, x)
    sizes = [many.shape[i] for i in parts]
    if whole is None or len(parts) < 2 or not all(isinstance(d, int) for d in (*sizes, t.shape[whole])):
        return None
    place = max(len(parts) - 1 - level, 0)
    repeat, block = int(np.prod(sizes[:place])), int(np.prod(sizes[place + 1 :]))
    return Couple(t, whole, many, parts[place], a_block=block, a_repeat=repeat, count=sizes[place])


def _couple_innermost(x: Tensor, y: Tensor, xs: Sequence[int], ys: Sequence[int]) -> Couple | None:
    """Couple of the last axes of two runs: entries are coupled by their index modulo the common divisor of both sizes."""
    a, b = ([i for i in axes if t.shape[i] != 1] for t, axes in ((x, xs), (y, ys)))
    if len(a) < 2 or len(b) < 2:
        return None
    n, m = x.shape[a[-1]], y.shape[b[-1]]
    units = gcd(n, m) if isinstance(n, int) and isinstance(m, int) else 0
    return Couple(x, a[-1], y, b[-1], a_repeat=n // units, b_repeat=m // units, count=units) if units > 1 else None


def group_axes(a: Sequence[Dim], b: Sequence[Dim]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of axes of `a` and `b` with equal products, from the front; an undecidable remainder is one run."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        xs: list[int] = []
        ys: list[int] = []
        p: Dim = 1
        q: Dim = 1
        while True:
            if xs and ys and p == q and (p != 1 or (i == len(a) and j == len(b))):
                break
            if not xs and not ys and i < len(a) and j < len(b):
                p, q = a[i], b[j]
                xs, ys, i, j = [i], [j], i + 1, j + 1
            elif i < len(a) and (j == len(b) or a[i] == 1 or _must_grow(p, q)):
                p, xs, i = p * a[i], [*xs, i], i + 1
            elif j < len(b):
                q, ys, j = q * b[j], [*ys, j], j + 1
            else:
                break
        runs.append((xs, ys))
    return runs


def _must_grow(p: Dim, q: Dim) -> bool:
    """True if p must grow to match q: it has fewer symbols, or is smaller with every symbol set to 1."""
    if isinstance(p, int) and isinstance(q, int):
        return p < q
    own_symbols, other_symbols = find_symbols(p), find_symbols(q)
    if own_symbols != other_symbols:
        return own_symbols < other_symbols
    ones = dict.fromkeys(own_symbols, 1)
    return evaluate(p, ones) < evaluate(q, ones)


def _find_outermost_axis(shape: Sequence[Dim], axes: Sequence[int]) -> int | None:
    return next((a for a in axes if shape[a] != 1), None)
