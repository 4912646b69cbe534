"""Propagates the batch axis of tensors through a network, using the ops' couples.

An op's couples declare which axes of its inputs and outputs correspond (ops/_base.py). If every layer maps an axis one to one from
the inputs to the outputs, entries along it are independent: the first sample's result does not depend on the second's. A Reshape may merge
the batch with other axes (windows of an image, rows of a sequence) and split it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._axes import RESHAPES
from whet.ops._base import get_op


class BatchAxis(NamedTuple):
    """The indices of a tensor's samples along one axis: sample s has the indices `(r * batch + s) * block + i`, for r < repeat and i < block.

    repeat = block = 1: the axis is the batch. block > 1: it was merged with later axes, as the windows of an image in a shape
    [batch * windows, ...]. repeat > 1: with earlier axes, as the rows of a sequence in [length * batch, width].
    """

    axis: int
    repeat: int = 1
    block: int = 1

    @property
    def is_batch(self) -> bool:
        """True if the axis has one entry per sample."""
        return self.repeat == self.block == 1

    @property
    def is_outermost(self) -> bool:
        """True if the samples lie one after another in the tensor's memory."""
        return self.axis == 0 and self.repeat == 1

    def count_entries(self, batch: int) -> int:
        """The size of the axis for a batch of this size."""
        return self.repeat * batch * self.block

    def list_indices(self, samples: Sequence[int] | np.ndarray, batch: int) -> np.ndarray:
        """The indices along the axis of these samples of a batch, in the order of a batch that consists of them."""
        starts = np.arange(self.repeat)[:, None] * batch + np.asarray(samples)
        return (starts.ravel()[:, None] * self.block + np.arange(self.block)).ravel()

    def take(self, a: np.ndarray, samples: Sequence[int] | np.ndarray, batch: int) -> np.ndarray:
        """These samples of an array of a batch."""
        return np.ascontiguousarray(np.take(a, self.list_indices(samples, batch), self.axis))


Axes = dict[Tensor, BatchAxis]
"""Batch axis by tensor, for tensors that have one."""


class NotPerImage(Exception):
    """A layer mixes samples, or its op does not declare them independent."""


def follow(layer: Layer, axes: Axes, batch: int) -> Axes:
    """Batch axes of a layer's outputs, and of further inputs with one entry per sample. Raises NotPerImage."""
    inputs, outputs = {t for t in layer.inputs if t is not None}, set(layer.outputs)
    if not any(t in axes for t in inputs):
        return {}
    if layer.op == "Shape":
        return {}  # sizes of the whole batch, updated by recut
    if layer.op == "Reformat":
        return {layer.outputs[0]: axes[layer.needs(0)]}
    if layer.op == "Fused":
        inner = dict(axes)
        for x in list_fused_layers(layer):
            inner |= follow(x, inner, batch)
        ends = zip(layer.outputs, list_fused_results(layer), strict=True)
        return {t: i for t, i in inner.items() if t in inputs and t not in axes} | {t: inner[b] for t, b in ends if b in inner}
    if layer.op in RESHAPES:
        return {layer.output: _reshape_axis(layer, axes[layer.needs(0)], batch)}
    if layer.op == "Gather" and (within := _gather_axis(layer, axes, batch)) is not None:
        return {layer.output: within}
    if layer.op == "GatherND" and _indexes_own_sample(layer, axes, batch):
        return {layer.output: BatchAxis(0)}
    couples = get_op(layer.op).couples
    if couples is None or layer.regions:
        raise NotPerImage(f"{layer.op} does not declare which axes are independent")
    coupled = couples(layer)

    def is_along(t: Tensor, axis: int) -> bool:
        return t in axes and axes[t].axis == axis

    if any(c.summed and (is_along(c.a, c.a_axis) or is_along(c.b, c.b_axis)) for c in coupled):
        raise NotPerImage(f"{layer.op} '{layer.name}' sums over samples")
    ties = [tie for c in coupled for tie in ((c.a, c.a_axis, c.b, c.b_axis, c), (c.b, c.b_axis, c.a, c.a_axis, c))]
    ties = [tie for tie in ties if tie[0] in inputs and tie[2] in outputs]
    made: Axes = {}
    for t, i, y, j, c in ties:
        if is_along(t, i):
            size = axes[t].count_entries(batch)
            whole = c.a_at == c.b_at == 0 and c.a_block == c.b_block == c.a_repeat == c.b_repeat == 1 and c.count in (None, size)
            to = axes[t]._replace(axis=j)
            if not whole or t.shape[i] != size or y.shape[j] != size or made.setdefault(y, to) != to:
                raise NotPerImage(f"{layer.op} '{layer.name}' regroups samples")
    if outputs - set(made) or any(t in axes and not any(u is t and is_along(t, i) for u, i, *_ in ties) for t in inputs):
        raise NotPerImage(f"{layer.op} '{layer.name}' mixes samples")
    others = [(t, i, made[y]) for t, i, y, j, _ in ties if t not in axes and made[y].axis == j]
    pairs = [pair for c in coupled for pair in ((c.a, c.a_axis, c.b, c.b_axis), (c.b, c.b_axis, c.a, c.a_axis))]
    others += [(u, j, axes[t]) for t, i, u, j in pairs if is_along(t, i) and u in inputs and u not in axes]  # initial states of a recurrent layer
    return made | {t: to._replace(axis=i) for t, i, to in others if t.shape[i] == to.count_entries(batch)}


def _reshape_axis(layer: Layer, axis: BatchAxis, batch: int) -> BatchAxis:
    """The batch axis after a reshape, which keeps the order of the elements."""
    before, after = layer.needs(0).shape, layer.output.shape
    if before[axis.axis] != axis.count_entries(batch):
        raise NotPerImage(f"{layer.op} '{layer.name}' regroups samples")
    repeat, block = prod(before[: axis.axis]) * axis.repeat, prod(before[axis.axis + 1 :]) * axis.block
    for i, size in enumerate(after):
        outer, inner = prod(after[:i]), prod(after[i + 1 :])
        if outer and inner and repeat % outer == 0 == block % inner and size == repeat // outer * batch * (block // inner):
            return BatchAxis(i, repeat // outer, block // inner)
    raise NotPerImage(f"{layer.op} '{layer.name}' regroups samples")


def _gather_axis(layer: Layer, axes: Axes, batch: int) -> BatchAxis | None:
    """The batch axis of a Gather along the axis of the batch, if it takes the same entries of each sample, in the samples' order; else None."""
    x, at = layer.needs(0), layer.needs(1)
    axis = axes.get(x)
    if axis is None or layer.attrs["axis"] % x.type.rank != axis.axis or not at.is_constant or not at.type.rank:
        return None
    index, per_run = at.array() % max(axis.count_entries(batch), 1), axis.repeat * batch
    if not index.size or len(index) % per_run:
        return None
    to = BatchAxis(axis.axis, axis.repeat, len(index) // per_run)
    run, place = np.divmod(index.reshape(axis.repeat, batch, -1), axis.block)
    of_sample = run == np.arange(per_run).reshape(axis.repeat, batch, 1)
    return to if of_sample.all() and (place == place[:, :1]).all() else None


def _indexes_own_sample(layer: Layer, axes: Axes, batch: int) -> bool:
    """True if the results of a GatherND for a sample, at its index along the first axis, come from this sample."""
    x, at = layer.needs(0), layer.needs(1)
    if axes.get(x) != BatchAxis(0) or not at.is_constant or layer.attrs["batch_dims"] or at.type.rank < 2 or at.shape[0] != batch:
        return False
    first = at.array()[..., 0]
    return bool((first == np.arange(batch).reshape(-1, *[1] * (first.ndim - 1))).all())


def list_fused_layers(layer: Layer) -> list[Layer]:
    """The layers of a fused body, with the fused layer's inputs substituted."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    layers = []
    for x in body.layers:
        copy = Layer(x.op, x.name, [outer.get(t, t) if t is not None else None for t in x.inputs], x.attrs, x.regions, x.sources)
        copy.outputs = x.outputs
        layers.append(copy)
    return layers


def list_fused_results(layer: Layer) -> list[Tensor]:
    """The tensors that produce a fused body's outputs."""
    body = layer.regions["body"]
    outer = {b: t for b, t in zip(body.inputs, layer.inputs, strict=True) if t is not None}
    return [outer.get(t, t) for t in body.outputs]
