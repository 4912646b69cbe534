"""Finds elements that are zero if their unit's weights are zero: only these can be removed from a sum.

A sum over channels, or a product of two computed tensors, is unchanged by removing a channel only if that channel contributes zero. After a
sigmoid or an exponential it does not: a softmax built from single ops, for example, depends on all channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from whet.errors import WhetError
from whet.network import Layer, Network, Tensor
from whet.ops import Couple, get_op

Axis = tuple[Tensor, int]
Read = Sequence[tuple[Layer, Sequence[Couple]]]
_MANY = 4  # most inputs of a pointwise op for which every pattern of zeros is evaluated
_VALUES = np.array([-3, -1.5, -1, -0.25, 0.25, 1, 2, 5])  # non-zero test values for pointwise ops


def find_locked_sums(net: Network, read: Read, base: Mapping[Axis, int], n: int) -> np.ndarray:
    """bool [n]: elements that a layer sums although they are not zero when their unit's weights are zero.

    `read` are the layers in execution order with their couples, `base` the offset of each axis' elements among the n.
    """
    locked = np.zeros(n, bool)
    data = _find_computed_tensors(net)
    doubtful = [c for _, couples in read for c in couples if c.summed and (c.a in data) == (c.b in data) and _is_known(c, base)]
    if not any(c.a in data or c.a is c.b for c in doubtful):
        return locked
    zero = _find_zeros(read, base, n)
    for c in doubtful:
        a, b = c.indexes()
        at_a, at_b = base[c.a, c.a_axis] + a, base[c.b, c.b_axis] + b
        if c.a in data:
            fine = zero[at_a].all(axis=1) | zero[at_b].all(axis=1)
        else:  # a norm of weights depends on all of them; a product of weights yields new weights
            fine = np.full(len(a), c.a is not c.b)
        locked[at_a[~fine]] = True
        locked[at_b[~fine]] = True
    return locked


def _find_computed_tensors(net: Network) -> set[Tensor]:
    """Tensors that depend on the network's inputs."""
    computed = set(net.inputs)
    for layer in net.layers:
        if layer.regions or not layer.inputs or any(t in computed for t in layer.inputs if t is not None):
            computed.update(layer.outputs)
    return computed


def _is_known(c: Couple, base: Mapping[Axis, int]) -> bool:
    return (c.a, c.a_axis) in base and (c.b, c.b_axis) in base


def _find_zeros(read: Read, base: Mapping[Axis, int], n: int) -> np.ndarray:
    """bool [n]: elements that are zero if all float constants of their unit are zero."""
    zero = np.zeros(n, bool)
    for (t, axis), at in base.items():
        zero[at : at + t.shape[axis]] = t.is_constant and t.dtype.is_float
    for layer, couples in read:
        o = get_op(layer.op)
        for y in layer.outputs:
            for axis in range(y.type.rank):
                if (y, axis) not in base:
                    continue
                tied = _find_coupled_zeros(y, axis, couples, base, zero)
                at = base[y, axis]
                if o.pointwise:
                    zero[at : at + y.shape[axis]] = _evaluate_on_zeros(layer, tied, y.shape[axis])
                elif o.zeros is not None:
                    zero[at : at + y.shape[axis]] = _all_zero(layer, tied, o.zeros, y.shape[axis])
    return zero


def _find_coupled_zeros(y: Tensor, axis: int, couples: Iterable[Couple], base: Mapping[Axis, int], zero: np.ndarray) -> dict[Tensor, np.ndarray]:
    """Per tensor coupled to this axis: int8 [size]; 1: the coupled element is zero, 0: it is not, -1: no element is coupled."""
    states: dict[Tensor, np.ndarray] = {}
    for c in couples:
        if c.a is c.b or not _is_known(c, base):
            continue
        a, b = c.indexes()
        if c.b is y and c.b_axis == axis:
            t, i, other, own = c.a, c.a_axis, a, b
        elif c.a is y and c.a_axis == axis:
            t, i, other, own = c.b, c.b_axis, b, a
        else:
            continue
        state = states.setdefault(t, np.full(y.shape[axis], -1, np.int8))
        state[own] = zero[base[t, i] + other].all(axis=1)[:, None]
    return states


def _all_zero(layer: Layer, tied: Mapping[Tensor, np.ndarray], added: Sequence[int], size: int) -> np.ndarray:
    """bool [size]: True if all coupled elements are zero, there is at least one, and every added input is coupled."""
    if not tied or any(layer.input(i) is not None and layer.input(i) not in tied for i in added):
        return np.zeros(size, bool)
    states = np.stack(list(tied.values()))
    return (states != 0).all(axis=0) & (states == 1).any(axis=0)


def _evaluate_on_zeros(layer: Layer, tied: Mapping[Tensor, np.ndarray], size: int) -> np.ndarray:
    """bool [size]: True if a pointwise op maps the zeros in its inputs to zero, for all values of its other inputs."""
    rows = [tied.get(t, np.zeros(size, np.int8)) if t is not None else np.zeros(size, np.int8) for t in layer.inputs]
    states = np.stack(rows) == 1
    if len(rows) > _MANY:
        states[:] = states.all(axis=0)
    if states.all() or not states.any():  # the common case
        return np.full(size, bool(states.any()) and _gives_zero(layer, states[:, 0]))
    patterns, inverse = np.unique(states, axis=1, return_inverse=True)
    results = [pattern.any() and _gives_zero(layer, pattern) for pattern in patterns.T]
    return np.array(results, bool)[inverse.reshape(-1)]


def _gives_zero(layer: Layer, pattern: np.ndarray) -> bool:
    """True if the op's output is zero with zeros in some inputs and values of both signs in the others (scalar constants keep their value)."""
    arrays: list[np.ndarray | None] = []
    for t, zero in zip(layer.inputs, pattern, strict=True):
        if t is None:
            arrays.append(None)
        elif zero:
            arrays.append(np.zeros(len(_VALUES), t.dtype.numpy))
        elif t.is_constant and t.array().size == 1:
            arrays.append(t.array().reshape(()))
        else:
            arrays.append((_VALUES if t.dtype.is_float or t.dtype.kind == "int" else np.abs(_VALUES) > 1).astype(t.dtype.numpy))
    try:
        with np.errstate(all="ignore"):
            y = get_op(layer.op).reference(layer, *arrays)
    except (WhetError, ValueError, TypeError, IndexError):  # the op does not accept vectors: unknown
        return False
    return bool(np.all(np.asarray(y, np.float64) == 0))
