"""Which elements are zero once the weights of their unit are: only those may be left out of a sum.

A sum over channels, or a product of two computed tensors, keeps its value without a channel only where that channel of zeros adds zero.
Behind a sigmoid or an exponential it would not: a softmax written by hand, say, is one of all channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from whet.errors import WhetError
from whet.network import Layer, Network, Tensor
from whet.ops import Couple, get_op

Axis = tuple[Tensor, int]
Read = Sequence[tuple[Layer, Sequence[Couple]]]
_MANY = 4  # inputs of a pointwise op up to which every pattern of zeros is tried
_VALUES = np.array([-3, -1.5, -1, -0.25, 0.25, 1, 2, 5])  # what a pointwise op is tried with beside zeros


def sums_locked(net: Network, read: Read, base: Mapping[Axis, int], n: int) -> np.ndarray:
    """bool [n]: elements that a layer sums up although they are not zero when their unit's weights are.

    `read` are the layers in running order with their couples, `base` where the elements of an axis begin among the n.
    """
    locked = np.zeros(n, bool)
    data = _computed(net)
    doubtful = [c for _, couples in read for c in couples if c.summed and (c.a in data) == (c.b in data) and _known(c, base)]
    if not any(c.a in data or c.a is c.b for c in doubtful):
        return locked
    zero = _zeros(read, base, n)
    for c in doubtful:
        a, b = c.indexes()
        at_a, at_b = base[c.a, c.a_axis] + a, base[c.b, c.b_axis] + b
        if c.a in data:
            fine = zero[at_a].all(axis=1) | zero[at_b].all(axis=1)
        else:  # a norm of weights is one of all of them; a product of weights makes others
            fine = np.full(len(a), c.a is not c.b)
        locked[at_a[~fine]] = True
        locked[at_b[~fine]] = True
    return locked


def _computed(net: Network) -> set[Tensor]:
    """Tensors that depend on what the network is given."""
    found = set(net.inputs)
    for layer in net.layers:
        if layer.regions or not layer.inputs or any(t in found for t in layer.inputs if t is not None):
            found.update(layer.outputs)
    return found


def _known(c: Couple, base: Mapping[Axis, int]) -> bool:
    return (c.a, c.a_axis) in base and (c.b, c.b_axis) in base


def _zeros(read: Read, base: Mapping[Axis, int], n: int) -> np.ndarray:
    """bool [n]: elements that are zero when all float constants of their unit are."""
    zero = np.zeros(n, bool)
    for (t, axis), at in base.items():
        zero[at : at + t.shape[axis]] = t.is_constant and t.dtype.is_float
    for layer, couples in read:
        o = get_op(layer.op)
        for y in layer.outputs:
            for axis in range(y.type.rank):
                if (y, axis) not in base:
                    continue
                tied = _tied(y, axis, couples, base, zero)
                at = base[y, axis]
                if o.pointwise:
                    zero[at : at + y.shape[axis]] = _tried(layer, tied, y.shape[axis])
                elif o.zeros is not None:
                    zero[at : at + y.shape[axis]] = _all_zero(layer, tied, o.zeros, y.shape[axis])
    return zero


def _tied(y: Tensor, axis: int, couples: Iterable[Couple], base: Mapping[Axis, int], zero: np.ndarray) -> dict[Tensor, np.ndarray]:
    """For each tensor tied to this axis: int8 [size], 1 where its element is zero, 0 where not, -1 where none is tied."""
    found: dict[Tensor, np.ndarray] = {}
    for c in couples:
        if c.a is c.b or not _known(c, base):
            continue
        a, b = c.indexes()
        if c.b is y and c.b_axis == axis:
            t, i, places, own = c.a, c.a_axis, a, b
        elif c.a is y and c.a_axis == axis:
            t, i, places, own = c.b, c.b_axis, b, a
        else:
            continue
        state = found.setdefault(t, np.full(y.shape[axis], -1, np.int8))
        state[own] = zero[base[t, i] + places].all(axis=1)[:, None]
    return found


def _all_zero(layer: Layer, tied: Mapping[Tensor, np.ndarray], added: Sequence[int], size: int) -> np.ndarray:
    """bool [size]: where something is tied, all of it is zero, and what the layer adds is tied."""
    if not tied or any(layer.input(i) is not None and layer.input(i) not in tied for i in added):
        return np.zeros(size, bool)
    states = np.stack(list(tied.values()))
    return (states != 0).all(axis=0) & (states == 1).any(axis=0)


def _tried(layer: Layer, tied: Mapping[Tensor, np.ndarray], size: int) -> np.ndarray:
    """bool [size]: where a pointwise op gives zeros for the zeros that it is given, whatever stands in its other inputs."""
    rows = [tied.get(t, np.zeros(size, np.int8)) if t is not None else np.zeros(size, np.int8) for t in layer.inputs]
    states = np.stack(rows) == 1
    if len(rows) > _MANY:
        states[:] = states.all(axis=0)
    if states.all() or not states.any():  # mostly
        return np.full(size, bool(states.any()) and _gives_zero(layer, states[:, 0]))
    patterns, which = np.unique(states, axis=1, return_inverse=True)
    gives = [pattern.any() and _gives_zero(layer, pattern) for pattern in patterns.T]
    return np.array(gives, bool)[which.reshape(-1)]


def _gives_zero(layer: Layer, pattern: np.ndarray) -> bool:
    """Whether the op's output is zero with zeros in some inputs and numbers of both signs in the others (constants of one element as they are)."""
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
            got = get_op(layer.op).reference(layer, *arrays)
    except (WhetError, ValueError, TypeError, IndexError):  # it does not take a vector: nothing is known
        return False
    return bool(np.all(np.asarray(got, np.float64) == 0))
