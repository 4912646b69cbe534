"""Channels (axis 1) through a network: the channels that are zero for every input, and the channels of several tensors that form one unit.

Both analyses visit the layers once. A layer of an unknown kind locks the channels of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.ops import OPS, run_layer

POOLS = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")
BINARY = ("Add", "Div", "Max", "Min", "Mul", "Sub")


def count_channels(t: Tensor | None) -> int | None:
    """The number of channels of an activation; None for constants, integers, vectors and symbolic sizes."""
    if t is None or t.weight is not None or t.type.rank < 2 or not t.dtype.is_float or not isinstance(t.shape[1], int):
        return None
    return t.shape[1]


def is_depthwise(layer: Layer) -> bool:
    """True if a layer is a depthwise Conv with a channel multiplier of 1."""
    w = layer.inputs[1]
    return layer.op == "Conv" and w is not None and w.shape[1] == 1 and w.shape[0] == layer.attrs["group"] > 1


def has_constant_weights(layer: Layer) -> bool:
    """True if all inputs but the first are constant or absent."""
    return all(t is None or t.weight is not None for t in layer.inputs[1:])


def find_constant_matrix(layer: Layer) -> np.ndarray | None:
    """The constant second matrix of Gemm or MatMul on a matrix as [inputs, outputs]; None when there is none."""
    x, w = layer.inputs[0], layer.inputs[1]
    if x is None or w is None or w.weight is None or x.type.rank != 2 or w.type.rank != 2 or layer.attrs.get("transA"):
        return None
    return w.array().T if layer.attrs.get("transB") else w.array()


def is_per_channel(t: Tensor, x: Tensor) -> bool | None:
    """True when a constant has one value per channel of `x`, False when it is equal for all channels, None otherwise."""
    if t.type.rank > x.type.rank:
        return None
    axis = 1 - (x.type.rank - t.type.rank)
    if axis < 0 or t.shape[axis] == 1:
        return False
    return True if t.shape[axis] == x.shape[1] else None


_MOST_CHANNELS = 1 << 20  # flags are kept for every activation of a network


def find_zero_channels(net: Network) -> dict[Tensor, np.ndarray]:
    """For each activation with channels a bool [channels]: whether the channel is 0 for every (finite) input."""
    zero = {t: np.zeros(n, bool) for t in net.inputs if (n := count_channels(t)) is not None and n <= _MOST_CHANNELS}
    for layer in net.layers:
        for t in layer.outputs:
            n = count_channels(t)
            if n is not None and n <= _MOST_CHANNELS:
                zero[t] = np.zeros(n, bool)
        y = layer.outputs[0]
        if len(layer.outputs) == 1 and y in zero and not layer.regions:
            flags = _zero_outputs(layer, y, zero)
            if flags is not None and flags.shape == zero[y].shape:
                zero[y] = flags
    return zero


def _zero_outputs(layer: Layer, y: Tensor, zero: dict[Tensor, np.ndarray]) -> np.ndarray | None:
    """Flags of the output's channels, given those of the inputs; None when they are not known."""
    x = layer.inputs[0] if layer.inputs else None
    known = zero.get(x) if x is not None else None
    op = layer.op
    if op == "Conv" and has_constant_weights(layer):
        return _zero_conv(layer, known)
    if op in ("Gemm", "MatMul"):
        w = find_constant_matrix(layer)
        return None if w is None else _zero_product(layer, w, known)
    if op == "Concat" and layer.attrs["axis"] % y.type.rank == 1:
        flags = [zero.get(t) if t is not None else None for t in layer.inputs]
        parts = [p for p in flags if p is not None]
        return None if len(parts) < len(flags) else np.concatenate(parts)
    if op in BINARY and len(layer.inputs) == 2:
        return _zero_binary(layer, y, zero)
    if known is None or x is None:
        return None
    if op in POOLS:
        return known
    if op == "Flatten" and layer.attrs["axis"] in (1, 1 - x.type.rank):
        return np.repeat(known, y.shape[1] // len(known)) if isinstance(y.shape[1], int) else None
    if op == "BatchNormalization" and has_constant_weights(layer):
        return known & (_evaluate_on_zeros(layer, len(known)) == 0)
    if OPS[op].pointwise and y.type == x.type and has_constant_weights(layer):
        vectors = [is_per_channel(t, y) for t in layer.inputs[1:] if t is not None]
        return known & (_evaluate_on_zeros(layer, len(known)) == 0) if None not in vectors else None
    return None


def _evaluate_on_zeros(layer: Layer, n: int) -> np.ndarray:
    """The result [n] of a pointwise layer with constant parameters on zeros: 0 for channels that stay zero, else NaN."""
    x = layer.needs(0)
    tail = x.type.rank - 2
    arrays = [np.zeros((1, n, *(1,) * tail), x.dtype.numpy), *(None if t is None else t.array() for t in layer.inputs[1:])]
    result = run_layer(layer, arrays)[0]
    flat = np.moveaxis(result, 1, 0).reshape(n, -1)
    return np.where((flat == 0).all(1), 0.0, np.nan)


def _zero_conv(layer: Layer, known: np.ndarray | None) -> np.ndarray:
    w = layer.needs(1).array()
    bias = layer.input(2)
    used = w != 0
    if known is not None and is_depthwise(layer):
        used = used & ~known[:, None].reshape(-1, *(1,) * (w.ndim - 1))
    elif known is not None and layer.attrs["group"] == 1:
        used = used & ~known.reshape(1, -1, *(1,) * (w.ndim - 2))
    zero_filters = ~used.reshape(w.shape[0], -1).any(1)
    return zero_filters if bias is None else zero_filters & (bias.array() == 0)


def _zero_product(layer: Layer, w: np.ndarray, known: np.ndarray | None) -> np.ndarray:
    used = w != 0
    zero_filters = ~(used if known is None else used & ~known[:, None]).any(0)
    bias = layer.input(2)
    if bias is None or layer.attrs.get("beta", 1.0) == 0:
        return zero_filters
    if bias.weight is None:
        return np.zeros_like(zero_filters)
    added = np.atleast_2d(bias.array() != 0).any(0)  # per column: a Gemm's C may be a column itself
    return zero_filters & ~np.broadcast_to(added, zero_filters.shape)


def _zero_binary(layer: Layer, y: Tensor, zero: dict[Tensor, np.ndarray]) -> np.ndarray | None:
    a, b = (_find_operand_zeros(t, y, zero) for t in layer.inputs)
    if layer.op == "Mul":
        finite = all(t is None or t.weight is None or np.isfinite(t.array()).all() for t in layer.inputs)
        sides = [s for s in (a, b) if s is not None]
        return np.logical_or.reduce(sides) if sides and finite else None
    if layer.op == "Div":
        other = layer.inputs[1]
        return a if other is not None and other.weight is not None and other.array().all() else None
    return None if a is None or b is None else a & b


def _find_operand_zeros(t: Tensor | None, y: Tensor, zero: dict[Tensor, np.ndarray]) -> np.ndarray | None:
    n = int(y.shape[1])
    if t is None:
        return None
    if t.weight is not None:
        full = t.array().reshape((1,) * (y.type.rank - t.type.rank) + t.weight.array.shape) if t.type.rank <= y.type.rank else None
        return None if full is None else np.broadcast_to((np.moveaxis(full, 1, 0).reshape(full.shape[1], -1) == 0).all(1), (n,))
    known = zero.get(t)
    return None if known is None or t.type.rank != y.type.rank else np.broadcast_to(known, (n,)) if len(known) in (1, n) else None


class Units:
    """Channels as units (union-find): `join` merges two, `lock` marks those that must be kept."""

    def __init__(self) -> None:
        self._first: dict[Tensor, int] = {}
        self._up: list[int] = []
        self.locked: set[int] = set()

    def unit_ids(self, t: Tensor) -> range | None:
        """Ids of a tensor's channels; None where `count_channels` is None."""
        n = count_channels(t)
        if n is None:
            return None
        if t not in self._first:
            self._first[t] = len(self._up)
            self._up += range(len(self._up), len(self._up) + n)
        return range(self._first[t], self._first[t] + n)

    def root(self, i: int) -> int:
        while self._up[i] != i:
            self._up[i] = self._up[self._up[i]]
            i = self._up[i]
        return i

    def join(self, i: int, k: int) -> None:
        a, b = self.root(i), self.root(k)
        self._up[max(a, b)] = min(a, b)

    def lock(self, t: Tensor | None) -> None:
        ids = self.unit_ids(t) if t is not None else None
        self.locked.update(ids or ())

    def couple(self, net: Network) -> None:
        """Joins and locks the channels that the layers of `net` couple or need."""
        for t in (*net.inputs, *net.outputs):
            self.lock(t)
        for layer in net.layers:
            if layer.regions or len(layer.outputs) != 1 or not self._join_channels(layer, layer.outputs[0]):
                captured = [c for r in layer.regions.values() for c in r.captures()]
                for touched in (*layer.inputs, *layer.outputs, *captured):
                    self.lock(touched)

    def _join_channels(self, layer: Layer, y: Tensor) -> bool:
        """Joins the channels that a layer couples; False for a layer of an unknown kind."""
        x = layer.inputs[0] if layer.inputs else None
        op, ys = layer.op, self.unit_ids(y)
        if ys is None or x is None:
            return False
        xs = self.unit_ids(x)
        if op == "Conv" and has_constant_weights(layer):
            if is_depthwise(layer) and xs is not None:
                return self._join_pairs(xs, ys)
            return layer.attrs["group"] == 1
        if op in ("Gemm", "MatMul"):
            return find_constant_matrix(layer) is not None and _has_constant_bias(layer)
        if op == "Concat" and layer.attrs["axis"] % y.type.rank == 1:
            parts = [self.unit_ids(t) if t is not None else None for t in layer.inputs]
            flat = [i for p in parts if p is not None for i in p]
            return None not in parts and self._join_pairs(flat, ys)
        if op in BINARY and len(layer.inputs) == 2:
            return self._couple_binary(layer, y, ys)
        if xs is None:
            return False
        if op == "Flatten" and layer.attrs["axis"] in (1, 1 - x.type.rank):
            repeats = len(ys) // len(xs)
            return self._join_pairs([i for i in xs for _ in range(repeats)], ys)
        same = op in POOLS or op == "BatchNormalization" or (OPS[op].pointwise and y.type == x.type)
        fitting = has_constant_weights(layer) and (
            op == "BatchNormalization" or all(t is None or is_per_channel(t, y) is not None for t in layer.inputs[1:])
        )
        return same and fitting and self._join_pairs(xs, ys)

    def _couple_binary(self, layer: Layer, y: Tensor, ys: range) -> bool:
        for t in layer.inputs:
            if t is None:
                return False
            if t.weight is not None:
                if is_per_channel(t, y) is None:
                    return False
                continue
            ids = self.unit_ids(t)
            if ids is None or t.type.rank != y.type.rank or len(ids) != len(ys):
                return False
        return all(self._join_pairs(self.unit_ids(t) or (), ys) for t in layer.inputs if t is not None and t.weight is None)

    def _join_pairs(self, xs: Sequence[int], ys: Sequence[int]) -> bool:
        if len(xs) != len(ys):
            return False
        for i, k in zip(xs, ys, strict=True):
            self.join(i, k)
        return True


def _has_constant_bias(layer: Layer) -> bool:
    """True if a product's bias is a constant vector or scalar, or absent."""
    b = layer.input(2)
    return b is None or (b.weight is not None and (b.type.rank <= 1 or b.shape[:-1] == (1,) * (b.type.rank - 1)))
