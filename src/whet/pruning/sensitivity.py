"""Sensitivity of the outputs to removing a unit, estimated on data: Taylor criteria (Molchanov et al. 2017 and 2019) without PyTorch.

Removing a unit is modelled as closing a gate on every edge where the unit ends: an edge into a layer that reads its values and does not pass
them on (the convolution that sums over its channel, the projection that sums over a head). With z the sum of value times gradient over those
edges, -z is the first-order change of the loss for one sample. Gates on edges count a unit once, however many layers hold its channels.

With labels the loss is cross-entropy on the first output. Without labels the outputs themselves are used: cotangents are random signs divided
by each output's norm, so that the mean of z^2 is the squared relative change of the outputs to first order (a Gauss-Newton approximation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import PruneError, UnsupportedError
from whet.network import Layer, Network, Tensor, substitute
from whet.ops import bind_layer, bind_symbols, run_network
from whet.pruning._data import check_data
from whet.pruning._least_squares import gather_conv_outputs, gather_conv_rows
from whet.pruning._vjp import backpropagate, needs_cotangent
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch

Progress = Callable[[int, int, str], None]
MOST_PASS_BYTES = 1 << 28  # of the values that a forward pass with several samples keeps for the backward pass


@dataclass(frozen=True)
class Gates:
    """`z` per sample: [samples, units] by group name, [samples, 1] by branch name. `energy` is the mean square value at the edges."""

    z: Mapping[str, np.ndarray]
    energy: Mapping[str, np.ndarray]
    labelled: bool = False

    def first(self, name: str) -> np.ndarray:
        """First-order Taylor: the mean over samples of |z|."""
        return np.abs(self.z[name]).mean(0)

    def second(self, name: str) -> np.ndarray:
        """Second order, with the empirical Fisher matrix for the curvature: |-mean z + mean z^2 / 2|; without labels z has no sign."""
        z = self.z[name]
        return np.abs(-z.mean(0) * self.labelled + 0.5 * (z**2).mean(0))


def compute_gates(
    net: Network,
    channel_groups: Sequence[Group],
    blocks: Sequence[Branch],
    data: Mapping[str, np.ndarray],
    labels: np.ndarray | None = None,
    *,
    batch: int = 16,
    seed: int = 0,
    backwards: bool = True,
    progress: Progress | None = None,
) -> Gates:
    """Runs a forward pass over `data` (inputs by name, samples along axis 0) and, if `backwards`, a backward pass.

    Raises PruneError if an op has no gradient (naming the op) or the labels do not match; ShapeError if the data do not match the inputs.
    """
    check_data(data, labels)
    edges = _collect_edges(net, channel_groups, blocks)
    count, size = len(next(iter(data.values()))), get_run_size(net, data, batch)
    rng = np.random.default_rng(seed)
    z: dict[str, list[np.ndarray]] = {}
    energy: dict[str, list[np.ndarray]] = {}
    for start in list_starts(net, count, size):
        chunk = {k: v[start : start + size] for k, v in data.items()}
        zs, squares = run_batch(net, edges, chunk, None if labels is None else labels[start : start + size], rng, backwards)
        for name, v in zs.items():
            z.setdefault(name, []).append(v)
        for name, v in squares.items():
            energy.setdefault(name, []).append(v)
        if progress is not None:
            progress(min(start + size, count), count, "importance")
    return Gates({k: np.concatenate(v) for k, v in z.items()}, {k: np.mean(v, 0) for k, v in energy.items()}, labels is not None)


def compute_mean_absolute_gradients(
    net: Network, layers: Mapping[str, Layer], data: Mapping[str, np.ndarray], labels: np.ndarray | None = None, *, batch: int = 16, seed: int = 0
) -> dict[str, np.ndarray]:
    """By layer (of `layers`): the mean over samples of the absolute gradient of each weight, float64 in the layout of the weights.

    Without a result for layers of stacked matrices, with transposed inputs, or whose input does not have the samples outermost. Raises as `gates`.
    """
    check_data(data, labels)
    count, size = len(next(iter(data.values()))), get_run_size(net, data, batch)
    rng = np.random.default_rng(seed)
    total: dict[str, np.ndarray] = {}
    done = 0
    for start in list_starts(net, count, size):
        chunk = {k: v[start : start + size] for k, v in data.items()}
        samples = len(next(iter(chunk.values())))
        run = _forward(net, chunk)

        def visit(layer: Layer, inputs: list, cotangents: list[np.ndarray], samples: int = samples) -> None:
            if layer.name in layers and (found := _compute_weight_gradients(layer, inputs, cotangents[0], samples)) is not None:
                total[layer.name] = total.get(layer.name, 0) + found

        run.backward(compute_seeds(net, run.outputs, None if labels is None else labels[start : start + size], rng), visit)
        done += samples
    return {name: g / max(done, 1) for name, g in total.items()}


def _compute_weight_gradients(layer: Layer, inputs: list, cotangent: np.ndarray, samples: int) -> np.ndarray | None:
    """The sum over samples of the absolute gradient of a layer's weights, or None."""
    x, w = inputs[0], inputs[1]
    if layer.op == "Conv":
        groups, places = layer.attrs["group"], int(np.prod((len(x), *cotangent.shape[2:])))
        if len(x) != samples:
            return None
        rows, targets = gather_conv_rows(layer, x, w, np.arange(places)), gather_conv_outputs(cotangent, groups, np.arange(places))
        read, wanted = (m.reshape(groups, samples, places // samples, -1) for m in (rows, targets))
        by_group = sum((np.abs(np.matmul(wanted[:, n].transpose(0, 2, 1), read[:, n])) for n in range(samples)), np.zeros(()))
        return by_group.reshape(w.shape)  # [groups, outputs, inputs] until here
    if w.ndim != 2 or layer.attrs.get("transA") or x.ndim < 2 or x.shape[0] % samples:
        return None
    a, b = x.reshape(samples, -1, x.shape[-1]).astype(np.float64), cotangent.reshape(samples, -1, cotangent.shape[-1]).astype(np.float64)
    total = sum((np.abs(a[n].T @ b[n]) for n in range(samples)), np.zeros(())) * abs(layer.attrs.get("alpha", 1.0))
    return total.T if layer.attrs.get("transB") else total


def compute_output_sensitivities(
    net: Network, data: Mapping[str, np.ndarray], labels: np.ndarray | None = None, *, samples: int = 32, batch: int = 8, seed: int = 0,
    progress: Progress | None = None,
) -> dict[Tensor, np.ndarray]:  # fmt: skip
    """By computed tensor with samples along axis 0: the mean over samples of its squared cotangent, float32 in the shape of one sample.

    Times the mean square of a small independent error of the element, it is the squared relative change of the outputs (without labels). At
    most `samples` samples are used. Raises as `gates`.
    """
    check_data(data, labels)
    count, size = len(next(iter(data.values()))), get_run_size(net, data, batch)
    starts = np.linspace(0, count - size, min(max(samples // size, 1), count // size)).astype(int)
    total: dict[Tensor, np.ndarray] = {}
    rng = np.random.default_rng(seed)
    for n, start in enumerate(starts):
        run = _forward(net, {k: v[start : start + size] for k, v in data.items()})

        def visit(layer: Layer, inputs: list, cotangents: list[np.ndarray]) -> None:
            for t, c in zip(layer.outputs, cotangents, strict=True):
                if t.dtype.is_float and c.ndim:
                    total[t] = total.get(t, 0) + np.einsum("n...,n...->...", c, c)

        run.backward(compute_seeds(net, run.outputs, None if labels is None else labels[start : start + size], rng), visit)
        if progress is not None:
            progress(n + 1, len(starts), "sensitivity of the outputs")
    return {t: np.asarray(v, np.float32) / (size * len(starts)) for t, v in total.items()}


def get_run_size(net: Network, data: Mapping[str, np.ndarray], batch: int) -> int:
    """Samples of one pass: the network's fixed batch, or at most `batch`, fewer where the values would take more than MOST_PASS_BYTES."""
    count, fixed = len(next(iter(data.values()))), _get_fixed_batch(net)
    if fixed is not None:
        return fixed
    size = min(batch, count)
    env = bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v[:size]) for k, v in data.items()})
    sizes = (substitute(t.type.nbytes, env) for layer in net.layers for t in layer.outputs)
    total = sum(n for n in sizes if isinstance(n, int))  # sizes that depend on data are unknown
    return max(1, min(size, MOST_PASS_BYTES * size // max(total, 1)))


def list_starts(net: Network, count: int, size: int) -> range:
    """The first samples of the passes; a network with a fixed batch leaves out an incomplete one."""
    return range(0, count - size + 1 if _get_fixed_batch(net) is not None else count, size)


def _get_fixed_batch(net: Network) -> int | None:
    """The size of axis 0 of the first input that has a number there."""
    return next((int(t.shape[0]) for t in net.inputs if t.type.rank and isinstance(t.shape[0], int)), None)


_Edge = tuple[str, int, np.ndarray]  # group or branch; axis, -1 for a whole branch; indices [units, elements per unit]


def _collect_edges(net: Network, channel_groups: Sequence[Group], blocks: Sequence[Branch]) -> dict[tuple[str, int], list[_Edge]]:
    """Gates by (layer name, input index)."""
    at: dict[Tensor, list[tuple[Group, int, np.ndarray]]] = {}
    for g in channel_groups:
        for (member, axis), indices in g.members.items():
            at.setdefault(member, []).append((g, axis, indices))
    edges: dict[tuple[str, int], list[_Edge]] = {}
    for layer in net.layers:
        passed_on = {g.name for t in layer.outputs for g, _, _ in at.get(t, ())}
        for i, t in enumerate(layer.inputs):
            if t is None or not needs_cotangent(layer, i):
                continue
            for g, axis, indices in at.get(t, ()):
                if g.name not in passed_on:
                    edges.setdefault((layer.name, i), []).append((g.name, axis, indices))
    for b in blocks:
        edges.setdefault((b.name, b.place), []).append((b.name, -1, np.zeros((1, 1), np.int64)))
    return edges


def run_batch(
    net: Network, edges: Mapping[tuple[str, int], list[_Edge]], data: Mapping[str, np.ndarray], labels, rng, backwards: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """z [samples, units] and mean squares [units] by gate, for one batch."""
    run = _forward(net, data)
    n = len(next(iter(data.values())))
    z: dict[str, np.ndarray] = {}
    energy: dict[str, np.ndarray] = {}
    for layer in net.layers:
        for i, t in enumerate(layer.inputs):
            for name, axis, indices in edges.get((layer.name, i), ()):
                a = run.value(t)
                assert a is not None
                energy[name] = energy.get(name, 0) + (sum_units(a * a, axis, indices, 1)[0] / a.shape[0] if axis >= 0 else np.mean(a * a)[None])
    if not backwards:
        return z, energy

    def close(layer: Layer, i: int, value: np.ndarray, cotangent: np.ndarray) -> None:
        for name, axis, indices in edges.get((layer.name, i), ()):
            z[name] = z.get(name, 0) + sum_units(value * cotangent, axis, indices, n)

    run.backward(compute_seeds(net, run.outputs, labels, rng), read=close)
    return z, energy


@dataclass(frozen=True)
class _Run:
    """The values of one forward pass."""

    net: Network
    values: Mapping[Tensor, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]  # of the symbols

    def value(self, t: Tensor | None) -> np.ndarray | None:
        return None if t is None else t.array() if t.weight is not None else self.values[t]

    def backward(
        self,
        g: dict[Tensor, np.ndarray],
        visit: Callable[[Layer, list, list[np.ndarray]], None] | None = None,
        read: Callable[[Layer, int, np.ndarray, np.ndarray], None] | None = None,
    ) -> None:
        """Propagates the cotangents `g` of the outputs. `visit` gets each layer with its inputs and the cotangents of its outputs, `read` each
        computed input of a layer with its cotangent."""
        for layer in reversed(self.net.layers):
            mine = [g.pop(t, None) for t in layer.outputs]
            if all(m is None for m in mine):
                continue
            outs = [self.values[t] for t in layer.outputs]
            full = [np.zeros_like(o) if m is None else m for m, o in zip(mine, outs, strict=True)]
            inputs = [self.value(t) for t in layer.inputs]
            if visit is not None:
                visit(layer, inputs, full)
            if not any(needs_cotangent(layer, i) for i in range(len(layer.inputs))):
                continue
            for i, c in enumerate(_backpropagate(layer, self.sizes, inputs, outs, full)):
                t, value = layer.inputs[i], inputs[i]
                if c is None or t is None or value is None:
                    continue
                if read is not None:
                    read(layer, i, value, c)
                g[t] = g[t] + c if t in g else c


def _forward(net: Network, data: Mapping[str, np.ndarray]) -> _Run:
    values: dict[Tensor, np.ndarray] = {}
    outputs = run_network(net, data, watch=values.__setitem__)
    values.update({t: np.asarray(data[t.name]) for t in net.inputs})
    return _Run(net, values, outputs, bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v) for k, v in data.items()}))


def _backpropagate(layer: Layer, env, inputs, outs, full):
    if layer.regions:
        raise PruneError(f"{layer.op} '{layer.name}' has subgraphs, whose gradient is not implemented: choose the importance l2 or activation")
    try:
        return backpropagate(bind_layer(layer, env) if env else layer, inputs, outs, full)
    except UnsupportedError as e:
        raise PruneError(f"{e}: choose the importance l2 or activation, or write your own (python:MODULE:FUNCTION)") from e


def sum_units(a: np.ndarray, axis: int, indices: np.ndarray, samples: int) -> np.ndarray:
    """Sums of `a` per sample (the outermost part of axis 0) and unit: float64 [samples, units]."""
    if axis < 0:
        return a.reshape(samples, -1).sum(1, dtype=np.float64)[:, None]
    if axis == 0 or a.shape[0] % samples:  # samples are not outermost: the sum is split evenly
        per = np.moveaxis(a, axis, 0).reshape(a.shape[axis], -1).sum(1, dtype=np.float64)
        return np.tile(per[indices].sum(1) / samples, (samples, 1))
    per = np.moveaxis(a, axis, 1)
    per = per.reshape(samples, a.shape[0] // samples, a.shape[axis], -1).sum((1, 3), dtype=np.float64)
    return per[:, indices].sum(2)


def compute_seeds(net: Network, outputs: Mapping[str, np.ndarray], labels: np.ndarray | None, rng: np.random.Generator) -> dict[Tensor, np.ndarray]:
    """Cotangents of the outputs."""
    if labels is None:
        seeds = {}
        for t in net.outputs:
            y = outputs[t.name]
            if t.dtype.is_float and t.maker is not None:
                size = np.sqrt(np.mean(np.square(y, dtype=np.float64)) * y[0].size) or 1.0
                seeds[t] = ((rng.integers(0, 2, y.shape) * 2 - 1) / size).astype(y.dtype)
        return seeds
    t = net.outputs[0]
    y = outputs[t.name]
    if y.ndim != 2 or np.min(labels) < 0 or np.max(labels) >= y.shape[1]:
        raise PruneError(f"labels need an output [samples, classes]; %{t.name} is {t.type}, labels range from {np.min(labels)} to {np.max(labels)}")
    rows = np.arange(len(y))
    if t.maker is not None and t.maker.op == "Softmax":
        g = np.zeros_like(y)
        g[rows, labels] = -1 / np.maximum(y[rows, labels], 1e-12)
        return {t: g}
    e = np.exp(y - y.max(1, keepdims=True))
    g = e / e.sum(1, keepdims=True)
    g[rows, labels] -= 1
    return {t: g.astype(y.dtype)}
