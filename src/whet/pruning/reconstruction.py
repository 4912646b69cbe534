"""Importance as reconstruction error: the increase of a layer's output error when a unit is removed and the remaining weights are refitted.

Each layer that contracts a unit's channels (Conv, Gemm, MatMul with constant weights) gives a quadratic: with H = x'x the Gram matrix of its
inputs, removing the rows S of its weights W and refitting the others costs W_S' ((H^-1)_SS)^-1 W_S (B. Hassibi and D. Stork, NIPS 1992).
Units are removed greedily. Errors are relative to the variance of the layer's output, or of the residual stream that the output is added to:
one unit for widths and branches of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.pruning._least_squares import conv_matrix, conv_rows
from whet.pruning._sweep import Sweep
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch
from whet.pruning.sensitivity import Progress

_ROWS, _PER_UNKNOWN = 8192, 4  # positions of a Gram matrix: at least the first, and this many for each unknown
_DAMPING = 1e-3  # relative to the mean diagonal of a Gram matrix, as the ridge of the recovery
_STEPS = 64  # removal steps of a group: larger groups lose several units per step
_WIDEST = 4608  # unknowns of a layer above which only the energy of its inputs is used


@dataclass
class _Reader:
    """A layer's quadratic: `w` [k, outputs] and the inverse `h` [k, k] of its damped Gram matrix; `rows` [units, block] are a unit's rows of `w`."""

    w: np.ndarray
    h: np.ndarray
    rows: np.ndarray

    def errors(self, units: np.ndarray) -> np.ndarray:
        """Increase of the relative error if one of `units` is removed: float64 [units]."""
        at = self.rows[units]
        blocks = self.h[at[:, :, None], at[:, None, :]]
        w = self.w[at]
        return np.einsum("ubo,ubo->u", w, np.linalg.solve(blocks, w))

    def remove(self, units: np.ndarray) -> float:
        """Removes `units`, refits the other weights and returns the increase of the relative error."""
        at = self.rows[units].reshape(-1)
        across, w = self.h[:, at], self.w[at]
        solved = np.linalg.solve(self.h[np.ix_(at, at)], np.concatenate([w, across.T], axis=1))
        refit, down = solved[:, : w.shape[1]], solved[:, w.shape[1] :]
        self.w -= across @ refit
        self.h -= across @ down
        self.w[at] = 0
        self.h[at], self.h[:, at] = 0, 0
        self.h[at, at] = 1
        return float(np.sum(w * refit))


def reconstruction_scores(
    net: Network,
    channel_groups: Sequence[Group],
    blocks: Sequence[Branch],
    data: Mapping[str, np.ndarray],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """The marginal errors of the units of each group, float64 [size], and the relative error [1] without each branch.

    The sum of a group's n smallest scores is its error without these n units (marginal errors are made monotone by pooling). Readers without
    a constant matrix count the energy of a unit's values relative to their input. Raises PruneError for data without samples or with NaN.
    """
    readers, energies = _measure(net, channel_groups, blocks, data, seed, progress)
    scores = {}
    for g in channel_groups:
        scores[g.name] = _marginal(g.size, readers.get(g.name, []), energies.get(g.name, np.zeros(g.size)))
    return scores | {b.name: energies[b.name] for b in blocks}


def _marginal(size: int, readers: list[_Reader], energy: np.ndarray) -> np.ndarray:
    """Marginal error of each unit, ascending in the order of removal."""
    left, order, rises = np.arange(size), [], []
    step = -(-size // _STEPS)
    while len(left):
        error = energy[left] + sum(r.errors(left) for r in readers)
        gone = left[np.argsort(error, kind="stable")[:step]]
        rise = float(energy[gone].sum()) + sum(r.remove(gone) for r in readers)
        order.append(gone)
        rises.append((rise / len(gone), len(gone)))
        left = np.setdiff1d(left, gone)
    scores = np.zeros(size)
    level = _fit_nondecreasing(rises)
    for n, (gone, value) in enumerate(zip(order, level, strict=True)):
        scores[gone] = value * (1 + 1e-9 * n) + 1e-15 * n  # ties keep the order of removal
    return scores


def _fit_nondecreasing(rises: Sequence[tuple[float, int]]) -> list[float]:
    """The non-decreasing values nearest to the (value, weight) pairs: pool adjacent violators."""
    pools: list[list[float]] = []  # value, weight, number of pairs
    for value, weight in rises:
        pools.append([max(value, 0.0), weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            v, w, n = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + v * w) / (last[1] + w)
            last[1] += w
            last[2] += n
    return [v for v, _, n in pools for _ in range(int(n))]


def _measure(
    net: Network, channel_groups: Sequence[Group], blocks: Sequence[Branch], data: Mapping[str, np.ndarray], seed: int, progress: Progress | None
) -> tuple[dict[str, list[_Reader]], dict[str, np.ndarray]]:
    """Quadratics of the readers by group, and relative energies of other readers by group and of branches."""
    at: dict[Tensor, list[tuple[Group, int, np.ndarray]]] = {}
    for g in channel_groups:
        for (t, axis), indices in g.members.items():
            at.setdefault(t, []).append((g, axis, indices))
    ends: dict[str, list[Branch]] = {}
    for b in blocks:
        ends.setdefault(b.name, []).append(b)
    users, scale = net.users(), _variances(net, data)
    sweep, rng = Sweep(net, data), np.random.default_rng(seed)
    quadratics: dict[str, list[_Reader]] = {}
    energies: dict[str, np.ndarray] = {}
    for n, layer in enumerate(net.layers):
        passed_on = {g.name for t in layer.outputs for g, _, _ in at.get(t, ())}
        shared: tuple[np.ndarray, np.ndarray] | None = None
        for i, read in enumerate(layer.inputs):
            if read is None or read.is_constant or not read.dtype.is_float:
                continue
            for g, axis, indices in at.get(read, ()):
                if g.name in passed_on:
                    continue
                if i == 0 and _contracts(layer, axis):
                    shared = shared if shared is not None else _quadratic(layer, sweep.value(read), users, scale, rng)
                    w, h = shared
                    rows = indices
                    if layer.op == "Conv":
                        k = int(np.prod(layer.needs(1).shape[2:]))
                        rows = (indices[:, :, None] * k + np.arange(k)).reshape(g.size, -1)
                    quadratics.setdefault(g.name, []).append(_Reader(w.copy(), h.copy(), rows))
                else:
                    x = sweep.value(read)
                    per = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
                    squares = np.square(per, dtype=np.float64).sum(1)
                    energies[g.name] = energies.get(g.name, 0) + squares[indices].sum(1) / max(float(squares.sum()), 1e-30)
        for b in ends.get(layer.name, ()):
            x = sweep.value(layer.needs(b.place))
            energies[b.name] = np.array([float(np.mean(np.square(x, dtype=np.float64))) / scale[layer.output]])
        sweep.step()
        if progress is not None:
            progress(n + 1, len(net.layers), f"errors of {layer.name}")
    return quadratics, energies


def _variances(net: Network, data: Mapping[str, np.ndarray]) -> dict[Tensor, float]:
    """The variance of every floating-point tensor over samples and positions, summed per channel and divided by their number."""
    sweep, seen = Sweep(net, data), {}
    while sweep.done < len(net.layers):
        for t in sweep.step().outputs:
            if t.dtype.is_float and t in sweep.values and t.type.rank:
                seen[t] = max(float(np.var(sweep.value(t), dtype=np.float64)), 1e-30)
    return seen


def _contracts(layer: Layer, axis: int) -> bool:
    """True if the layer multiplies this axis of its first input by a constant matrix of a manageable size."""
    w = layer.input(1)
    if w is None or not w.is_constant:
        return False
    if layer.op == "Conv":
        return axis == 1 and layer.attrs["group"] == 1 and int(np.prod(w.shape[1:])) <= _WIDEST
    last = layer.needs(0).type.rank - 1
    plain = layer.op == "MatMul" or (layer.op == "Gemm" and not layer.attrs["transA"])
    return plain and w.type.rank == 2 and axis == last and layer.needs(0).shape[last] <= _WIDEST


def _quadratic(layer: Layer, x: np.ndarray, users, scale: Mapping[Tensor, float], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Weights [k, outputs] in relative units, and the inverse of the damped Gram matrix of the centred inputs, divided by the rows."""
    w = layer.needs(1).array()
    if layer.op == "Conv":
        count = x.shape[0] * int(np.prod([d for d in _output_size(layer, x)]))
        k = int(np.prod(w.shape[1:]))
        rows = conv_rows(layer, x, w, _positions(count, k, rng))[0]
        matrix = conv_matrix(w, 1)[0]
    else:
        flat = x.reshape(-1, x.shape[-1])
        rows = flat[_positions(len(flat), x.shape[-1], rng)].astype(np.float64)
        matrix = (w.T if layer.attrs.get("transB") else w).astype(np.float64)
    rows = rows - rows.mean(0)
    gram = rows.T @ rows / len(rows)
    gram[np.diag_indices(len(gram))] += max(_DAMPING * float(np.trace(gram)) / len(gram), 1e-12)
    gains, size = _gain_of_sum(layer, users, scale)
    matrix = matrix * gains / np.sqrt(size * matrix.shape[1])
    return matrix, np.linalg.inv(gram)


def _output_size(layer: Layer, x: np.ndarray) -> Sequence[int]:
    from whet.ops.conv import attributes

    strides, dilations, pads = attributes(layer)
    kernel = layer.needs(1).shape[2:]
    r = len(kernel)
    return [(x.shape[2 + i] + pads[i] + pads[r + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(r)]


def _positions(count: int, unknowns: int, rng: np.random.Generator) -> np.ndarray:
    limit = max(_ROWS, _PER_UNKNOWN * unknowns)
    return np.arange(count) if count <= limit else np.sort(rng.choice(count, limit, replace=False))


def _gain_of_sum(layer: Layer, users, scale: Mapping[Tensor, float]) -> tuple[np.ndarray | float, float]:
    """Gain per output channel and the reference variance: those of the Add with another computed tensor that the output reaches through batch
    norms and constant additions, else those of the output itself."""
    t, gains = layer.output, np.ones(1)
    while len(users.get(t, ())) == 1:
        (reader, i) = users[t][0]
        if reader.op == "BatchNormalization" and i == 0 and all(p is not None and p.is_constant for p in reader.inputs[1:5]):
            gamma, variance = reader.needs(1).array(), reader.needs(4).array()
            gains = gains * np.abs(gamma) / np.sqrt(variance + reader.attrs["epsilon"])
            t = reader.output
        elif reader.op == "Add" and reader.needs(1 - i).is_constant:
            t = reader.output
        elif reader.op == "Add":
            return gains, scale[reader.output]
        else:
            break
    return gains, scale[t]
