"""Ops that are defined by other ops and have no kernel of their own on the CPU become those: their kernels and fusions compute them.

Hardmax, LRN, LpNormalization, LpPool, GlobalLpPool, MeanVarianceNormalization, ReduceLogSum and ReduceLogSumExp. A GPU has kernels for them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from whet.network import Layer, Tensor, product
from whet.ops._reduce import list_reduced_axes
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

Decompose = Callable[[Graph, Layer], "Tensor | Skip | None"]
_LARGEST_WINDOW = 1 << 20  # elements of a pooling's window


@rule(
    "GlobalLpPool", "Hardmax", "LRN", "LpNormalization", "LpPool", "MeanVarianceNormalization", "ReduceLogSum", "ReduceLogSumExp",
    phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"],
)  # fmt: skip
def decompose_ops(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.needs(0)
    if g.channel_alignment != 1 or x.dtype.name != "f32" or x.is_constant:
        return None
    return _DECOMPOSITIONS[layer.op](g, layer)


def _hardmax(g: Graph, layer: Layer) -> Tensor | Skip:
    x, axis = layer.needs(0), layer.attrs["axis"] % layer.output.type.rank
    depth = x.shape[axis]
    if not isinstance(depth, int):
        return Skip(f"its axis {axis} is dynamic: {x.type}")
    index = g.add("ArgMax", x, axis=axis, keepdims=0)
    count = _number(g, layer, "depth", depth, np.int64)
    return g.add("OneHot", index, count, g.constant(np.array([0, 1], np.float32), f"{layer.name}.values"), axis=axis)


def _lp_normalization(g: Graph, layer: Layer) -> Tensor:
    """Zeros are divided by infinity instead of 0."""
    x = layer.needs(0)
    norm = g.add("ReduceL1" if layer.attrs["p"] == 1 else "ReduceL2", x, axes=(layer.attrs["axis"] % x.type.rank,), keepdims=1)
    is_zero = g.add("Equal", norm, _number(g, layer, "zero", 0))
    return g.add("Div", x, g.add("Where", is_zero, _number(g, layer, "infinity", np.inf), norm))


def _mean_variance_normalization(g: Graph, layer: Layer) -> Tensor:
    x = layer.needs(0)
    axes = tuple(sorted(a % x.type.rank for a in layer.attrs["axes"]))
    centred = g.add("Sub", x, g.add("ReduceMean", x, axes=axes, keepdims=1))
    variance = g.add("ReduceMean", g.add("Mul", centred, centred), axes=axes, keepdims=1)
    return g.add("Div", centred, g.add("Add", g.add("Sqrt", variance), _number(g, layer, "epsilon", 1e-9)))


def _lrn(g: Graph, layer: Layer) -> Tensor | Skip:
    """The sums over channels are an average pool of [N, 1, C, pixels]."""
    x, a = layer.needs(0), layer.attrs
    if not g.is_sized(x.shape):
        return Skip("its shape depends on data")
    if a["size"] > _LARGEST_WINDOW:
        return Skip("its window is too large for a pooling")
    size, shape = a["size"], (x.shape[0], 1, x.shape[1], product(x.shape[2:]))
    squares = g.add("Reshape", g.add("Mul", x, x), shape=shape)
    pads = ((size - 1) // 2, 0, size // 2, 0)
    means = g.add("AveragePool", squares, kernel_shape=(size, 1), strides=(1, 1), pads=pads, count_include_pad=1)
    scaled = g.add("Mul", g.add("Reshape", means, shape=x.shape), _number(g, layer, "alpha", a["alpha"]))
    base = g.add("Add", scaled, _number(g, layer, "bias", a["bias"]))
    if a["beta"] == 0.75:  # two roots are faster than a power
        root = g.add("Sqrt", base)
        return g.add("Div", x, g.add("Mul", root, g.add("Sqrt", root)))
    return g.add("Div", x, g.add("Pow", base, _number(g, layer, "beta", a["beta"])))


def _lp_pool(g: Graph, layer: Layer) -> Tensor | Skip:
    x, a = layer.needs(0), dict(layer.attrs)
    if a.get("ceil_mode"):
        return Skip("windows that ceil_mode adds have fewer elements")
    p, size = a.pop("p"), prod(a["kernel_shape"])
    if size > _LARGEST_WINDOW:
        return Skip("its window is too large for another pooling")
    means = g.add("AveragePool", _raise_magnitudes(g, layer, x, p), **a, count_include_pad=1)
    return _take_root(g, layer, g.add("Mul", means, _number(g, layer, "size", size)), p)


def _global_lp_pool(g: Graph, layer: Layer) -> Tensor:
    x, p = layer.needs(0), layer.attrs["p"]
    axes = tuple(range(2, x.type.rank))
    if p <= 2:
        return g.add(f"ReduceL{p}", x, axes=axes, keepdims=1)
    return _take_root(g, layer, g.add("ReduceSum", _raise_magnitudes(g, layer, x, p), axes=axes, keepdims=1), p)


def _reduce_log_sum(g: Graph, layer: Layer) -> Tensor:
    return g.add("Log", g.add("ReduceSum", *layer.inputs, **layer.attrs))


def _reduce_log_sum_exp(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """The largest value is subtracted before and added afterwards, unless it is infinite."""
    x, axes = layer.needs(0), list_reduced_axes(layer)
    if not axes:
        return None
    if not g.is_sized(layer.output.shape):
        return Skip("its shape depends on data")
    top = g.add("ReduceMax", x, axes=axes, keepdims=1)
    top = g.add("Where", g.add("IsInf", top), _number(g, layer, "zero", 0), top)
    total = g.add("ReduceSum", g.add("Exp", g.add("Sub", x, top)), axes=axes, keepdims=1)
    y = g.add("Add", g.add("Log", total), top)
    return y if y.shape == layer.output.shape else g.add("Reshape", y, shape=layer.output.shape)


def _raise_magnitudes(g: Graph, layer: Layer, x: Tensor, p: int) -> Tensor:
    """|x|^p."""
    if p == 2:
        return g.add("Mul", x, x)
    size = g.add("Abs", x)
    return size if p == 1 else g.add("Pow", size, _number(g, layer, "p", p))


def _take_root(g: Graph, layer: Layer, x: Tensor, p: int) -> Tensor:
    if p == 2:
        return g.add("Sqrt", x)
    return x if p == 1 else g.add("Pow", x, _number(g, layer, "root", 1 / p))


def _number(g: Graph, layer: Layer, name: str, value: float, dtype: type = np.float32) -> Tensor:
    return g.constant(np.array(value, dtype), f"{layer.name}.{name}")


_DECOMPOSITIONS: dict[str, Decompose] = {
    "GlobalLpPool": _global_lp_pool, "Hardmax": _hardmax, "LRN": _lrn, "LpNormalization": _lp_normalization, "LpPool": _lp_pool,
    "MeanVarianceNormalization": _mean_variance_normalization, "ReduceLogSum": _reduce_log_sum, "ReduceLogSumExp": _reduce_log_sum_exp,
}  # fmt: skip
