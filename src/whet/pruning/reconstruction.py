"""Importance as reconstruction error: the increase of a layer's output error when a unit is removed and the remaining weights are refitted.

Each layer that contracts a unit's channels (Conv, Gemm, MatMul with constant weights) gives a quadratic: with H = x'x the Gram matrix of its
inputs, removing the rows S of its weights W and refitting the others costs W_S' ((H^-1)_SS)^-1 W_S (B. Hassibi and D. Stork, NIPS 1992).
Units are removed greedily. Errors are relative to the variance of the layer's output, or of the residual stream that the output is added to:
one unit for widths and branches of all layers. After the last products the variance is that within channels: differences between the means of
channels stay when units are removed, since a refit adapts biases. The logits of a detector's classes differ in their means by far more than they
vary, and relative to a variance over all elements a head without its inputs would lose nothing.

Weighted by the sensitivity of the outputs to each channel (the diagonal of the Gauss-Newton matrix), errors are estimates of the relative change
of the outputs: a layer that they hardly depend on, such as a head for rare objects, may lose more than a layer that all of them pass through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.pruning._least_squares import convert_conv_to_matrix, gather_conv_rows
from whet.pruning._sweep import Sweep
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch
from whet.pruning.sensitivity import Progress, compute_output_sensitivities

_ROWS, _PER_UNKNOWN = 8192, 4  # positions of a Gram matrix: at least the first, and this many for each unknown
_DAMPING = 1e-3  # relative to the mean diagonal of a Gram matrix, as the ridge of the recovery
_STEPS = 64  # removal steps of a group: larger groups lose several units per step
_LEAST = 1e-6  # of the mean sensitivity of a layer's channels (ties between channels without influence are broken by their errors); of a variance
_PRODUCTS = {"Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "DeformConv", "Attention", "LSTM", "GRU", "RNN"}
LARGE, _DENSE = 1024, 0.75  # unknowns of a matrix from which removed ones are taken out, once less than this share is left
MOST_UNKNOWNS = 4608  # unknowns of a layer above which only the energy of its inputs is used


@dataclass
class Reader:
    """A layer's quadratic: `w` [k, outputs] and the inverse `h` [k, k] of its damped Gram matrix; `rows` [units, block] are a unit's rows of `w`.

    `present` are the units whose rows the matrices hold.
    """

    w: np.ndarray
    h: np.ndarray
    rows: np.ndarray
    present: np.ndarray

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

    def shrink(self, left: np.ndarray) -> None:
        """Takes the rows of all units except `left` out of large matrices: an update takes time for each entry, also for those that are zero."""
        if len(self.h) < LARGE:
            return
        kept = np.ones(len(self.h), bool)
        kept[self.rows[np.setdiff1d(self.present, left)]] = False
        if kept.sum() < _DENSE * len(kept):
            self.w, self.h = self.w[kept], self.h[np.ix_(kept, kept)]
            self.rows, self.present = (np.cumsum(kept) - 1)[self.rows], left  # rows of removed units are not read again


def compute_reconstruction_scores(
    net: Network,
    channel_groups: Sequence[Group],
    blocks: Sequence[Branch],
    data: Mapping[str, np.ndarray],
    *,
    labels: np.ndarray | None = None,
    weighted: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """The marginal errors of the units of each group, float64 [size], and the relative error [1] without each branch.

    The sum of a group's n smallest scores is its error without these n units (marginal errors are made monotone by pooling). Readers without
    a constant matrix count the energy of a unit's values relative to their input. `weighted`: by the sensitivity of the outputs, or with `labels`
    of the cross-entropy. Raises PruneError for data without samples or with NaN, and with `weighted` for a network without gradients.
    """
    scale = _Sensitivities(compute_output_sensitivities(net, data, labels, seed=seed, progress=progress)) if weighted else _Variances(net, data)
    readers, energies = _measure(net, channel_groups, blocks, data, scale, seed, progress)
    scores = {}
    for g in channel_groups:
        scores[g.name] = _compute_marginal_errors(g.size, readers.get(g.name, []), energies.get(g.name, np.zeros(g.size)))
    return scores | {b.name: energies[b.name] for b in blocks}


def _compute_marginal_errors(size: int, readers: list[Reader], energy: np.ndarray) -> np.ndarray:
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
        for r in readers:
            r.shrink(left)
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


class _Variances:
    """Errors relative to the variance of a tensor: over all elements; of values that no later product reads, within channels."""

    errors = "errors"

    def __init__(self, net: Network, data: Mapping[str, np.ndarray]):
        sweep, self.of, axes = Sweep(net, data), {}, find_output_channel_axes(net)
        while sweep.done < len(net.layers):
            for t in sweep.step().outputs:
                if t.dtype.is_float and t in sweep.values and t.type.rank:
                    self.of[t] = compute_variance(sweep.value(t), axes.get(t))

    def gains(self, layer: Layer, users, count: int) -> np.ndarray | float:
        """The factor of each of the `count` output channels that makes the mean of their squared errors relative to a variance (compute_gain)."""
        gains, variance = compute_gain(layer, users, self.of)
        return gains / np.sqrt(variance * count)

    def energy(self, x: np.ndarray, sum_: Tensor) -> float:
        """The error of a sum without `x`."""
        return float(np.mean(np.square(x, dtype=np.float64))) / self.of[sum_]

    def units(self, x: np.ndarray, t: Tensor, axis: int) -> np.ndarray:
        """The error without each index of `axis`, for a reader without a constant matrix."""
        per = np.square(np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1), dtype=np.float64).sum(1)
        return per / max(float(per.sum()), 1e-30)


def find_output_channel_axes(net: Network) -> dict[Tensor, int]:
    """The axis of the channels of tensors that no later product reads.

    The values in front of other products keep the variance over all elements. Within channels is no better a unit for them: at 0.4 of its FLOPs
    ResNet-56 agreed with the whole network on a percent fewer images.
    """
    users = net.users()
    read: set[Tensor] = set()
    for layer in reversed(net.layers):
        if any(x.op in _PRODUCTS or read.intersection(x.outputs) for t in layer.outputs for x, _ in users.get(t, ())):
            read.update(layer.outputs)
    return {t: axis for t, axis in find_channel_axes(net).items() if t not in read}


def find_channel_axes(net: Network) -> dict[Tensor, int]:
    """The axis of the channels by tensor: that of the last convolution or product with a constant matrix on the way to it, followed through
    transposes and through layers that keep the rank and the number of channels."""
    axes: dict[Tensor, int] = {}
    for layer in net.layers:
        t = layer.outputs[0]
        if layer.op in ("Conv", "ConvTranspose"):
            axes[t] = 1
        elif layer.op in ("MatMul", "Gemm") and layer.needs(1).is_constant:
            axes[t] = t.type.rank - 1
        elif layer.op == "Transpose" and layer.inputs[0] in axes:
            axes[t] = list(layer.attrs["perm"]).index(axes[layer.needs(0)])
        else:
            known = ((axes[x], x) for x in layer.inputs if x is not None and x in axes)
            alike = [axis for axis, x in known if x.type.rank == t.type.rank and x.shape[axis] == t.shape[axis]]
            axes.update({t: alike[0]} if alike else {})
    return axes


def compute_variance(x: np.ndarray, axis: int | None) -> float:
    """The mean over the channels (indices of `axis`) of the variance within a channel; of all elements without an axis.

    At least a small part of the variance of all elements, for channels that are constant.
    """
    whole = float(np.var(x, dtype=np.float64))
    if axis is None:
        return max(whole, 1e-30)
    within = np.var(x, axis=tuple(i for i in range(x.ndim) if i != axis), dtype=np.float64)
    return max(float(within.mean()), _LEAST * whole, 1e-30)


class _Sensitivities:
    """Errors in units of the outputs' squared relative change."""

    errors = "weighted errors"

    def __init__(self, of: Mapping[Tensor, np.ndarray]):
        self.of = of

    def _per_index(self, t: Tensor, axis: int, count: int) -> np.ndarray:
        """The sensitivity to each index of an axis, summed over the other axes of one sample."""
        s = self.of.get(t)
        if s is None or axis == 0 or s.shape[axis - 1] != count:
            total = float(s.sum(dtype=np.float64)) if s is not None else 0.0
            return np.full(count, total / count)
        return s.sum(tuple(i for i in range(s.ndim) if i != axis - 1), dtype=np.float64)

    def gains(self, layer: Layer, users, count: int) -> np.ndarray | float:
        """The factor of each of the `count` output channels that turns their squared errors into the change of the outputs."""
        s = self._per_index(layer.output, 1 if layer.op == "Conv" else layer.output.type.rank - 1, count)
        return np.sqrt(np.maximum(s, max(_LEAST * float(s.mean()), 1e-30)))

    def energy(self, x: np.ndarray, sum_: Tensor) -> float:
        """The error of a sum from which `x`, with samples along axis 0, is removed."""
        s = self.of.get(sum_)
        if s is None or s.shape != x.shape[1:]:
            return float(np.mean(np.square(x, dtype=np.float64))) * (float(s.sum(dtype=np.float64)) if s is not None else 0.0)
        return float(np.sum(np.einsum("n...,n...->...", x, x, dtype=np.float64) * s)) / len(x)

    def units(self, x: np.ndarray, t: Tensor, axis: int) -> np.ndarray:
        """The error without each index of `axis`, for a reader without a constant matrix."""
        per = np.square(np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1), dtype=np.float64).mean(1)
        return per * self._per_index(t, axis, x.shape[axis])


def _measure(
    net: Network, channel_groups: Sequence[Group], blocks: Sequence[Branch], data: Mapping[str, np.ndarray], scale: _Variances | _Sensitivities,
    seed: int, progress: Progress | None,
) -> tuple[dict[str, list[Reader]], dict[str, np.ndarray]]:  # fmt: skip
    """Quadratics of the readers by group, and relative energies of other readers by group and of branches."""
    at: dict[Tensor, list[tuple[Group, int, np.ndarray]]] = {}
    for g in channel_groups:
        for (t, axis), indices in g.members.items():
            at.setdefault(t, []).append((g, axis, indices))
    ends: dict[str, list[Branch]] = {}
    for b in blocks:
        ends.setdefault(b.name, []).append(b)
    users = net.users()
    sweep, rng = Sweep(net, data), np.random.default_rng(seed)
    quadratics: dict[str, list[Reader]] = {}
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
                if i == 0 and is_contracted(layer, axis):
                    shared = shared if shared is not None else _compute_quadratic(layer, sweep.value(read), users, scale, rng)
                    w, h = shared
                    rows = indices
                    if layer.op == "Conv":
                        k = int(np.prod(layer.needs(1).shape[2:]))
                        rows = (indices[:, :, None] * k + np.arange(k)).reshape(g.size, -1)
                    quadratics.setdefault(g.name, []).append(Reader(w.copy(), h.copy(), rows, np.arange(g.size)))
                else:
                    energies[g.name] = energies.get(g.name, 0) + scale.units(sweep.value(read), read, axis)[indices].sum(1)
        for b in ends.get(layer.name, ()):
            energies[b.name] = np.array([scale.energy(sweep.value(layer.needs(b.place)), layer.output)])
        sweep.step()
        if progress is not None:
            progress(n + 1, len(net.layers), f"{scale.errors} of {layer.name}")
    return quadratics, energies


def is_contracted(layer: Layer, axis: int) -> bool:
    """True if the layer multiplies this axis of its first input by a constant matrix of a manageable size."""
    w = layer.input(1)
    if w is None or not w.is_constant:
        return False
    if layer.op == "Conv":
        return axis == 1 and layer.attrs["group"] == 1 and int(np.prod(w.shape[1:])) <= MOST_UNKNOWNS
    last = layer.needs(0).type.rank - 1
    plain = layer.op == "MatMul" or (layer.op == "Gemm" and not layer.attrs["transA"])
    return plain and w.type.rank == 2 and axis == last and layer.needs(0).shape[last] <= MOST_UNKNOWNS


def _compute_quadratic(
    layer: Layer, x: np.ndarray, users, scale: _Variances | _Sensitivities, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [k, outputs] in relative units, and the inverse of the damped Gram matrix of the centred inputs, divided by the rows."""
    w = layer.needs(1).array()
    if layer.op == "Conv":
        count = x.shape[0] * int(np.prod([d for d in compute_output_size(layer, x)]))
        k = int(np.prod(w.shape[1:]))
        rows = gather_conv_rows(layer, x, w, draw_positions(count, k, rng))[0]
        matrix = convert_conv_to_matrix(w, 1)[0]
    else:
        flat = x.reshape(-1, x.shape[-1])
        rows = flat[draw_positions(len(flat), x.shape[-1], rng)].astype(np.float64)
        matrix = (w.T if layer.attrs.get("transB") else w).astype(np.float64)
    rows = rows - rows.mean(0)
    gram = rows.T @ rows / len(rows)
    gram[np.diag_indices(len(gram))] += max(_DAMPING * float(np.trace(gram)) / len(gram), 1e-12)
    return matrix * scale.gains(layer, users, matrix.shape[1]), np.linalg.inv(gram)


def compute_output_size(layer: Layer, x: np.ndarray) -> Sequence[int]:
    """The spatial sizes of a convolution's output for an input of this shape."""
    from whet.ops.conv import get_window_attributes

    strides, dilations, pads = get_window_attributes(layer)
    kernel = layer.needs(1).shape[2:]
    r = len(kernel)
    return [(x.shape[2 + i] + pads[i] + pads[r + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(r)]


def draw_positions(count: int, unknowns: int, rng: np.random.Generator) -> np.ndarray:
    """The rows that a least-squares problem takes: all, or a random part that determines its unknowns well."""
    limit = max(_ROWS, _PER_UNKNOWN * unknowns)
    return np.arange(count) if count <= limit else np.sort(rng.choice(count, limit, replace=False))


def compute_gain(layer: Layer, users, scale: Mapping[Tensor, float]) -> tuple[np.ndarray | float, float]:
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
