"""Checks that a kernel computes all batch items alike: each layer runs twice, the second time with the batch rotated.

The reference verifies a kernel on a few batch items. The others are correct too if an item's result does not depend on its index: after a
rotation by s, item i must give the same result at index i - s. A kernel that omits a tile, reads past its item or writes twice gives other
results at some indices; an error that is the same for all items is found by the reference. Whole batches are compared, in device memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.backends import Backend
from whet.builder.batching.batch_items import BatchAxes
from whet.network import F8E4M3, Tensor
from whet.ops import BatchAxis
from whet.runtime import BoundEngine
from whet.runtime.memory import read_bytes, write_bytes


def measure_rotation_differences(bound: BoundEngine, other: BoundEngine, data: Mapping[str, np.ndarray], axes: BatchAxes, batch: int, seed: int = 0):
    """(layer, error of its worst output, relative to the largest value) layer by layer; `other` is the same engine with separate memory.

    Layers with a separate constant for each batch item are skipped (`axes.fixed`). The rotated run reads each layer's actual inputs, rotated,
    so that errors do not propagate. 0 for bit-identical outputs.
    """
    shift = 1 + int(np.random.RandomState(seed).randint(0, batch - 1))
    bound.feed(data)
    for i, layer in enumerate(bound.network.layers):
        axis = axes.parts[layer.name] | axes.axis
        if layer.name not in axes.fixed:
            for t in layer.inputs:
                if t is not None and not t.is_constant:
                    _copy_rotated(bound, other, t, axis.get(t.name), shift, batch)
        bound.run_step(i)
        if layer.name not in axes.fixed:
            other.run_step(i)
            yield layer, max((_compute_difference(bound, other, t, axis.get(t.name), shift, batch) for t in layer.outputs), default=0.0)


def _split_rotation(bound: BoundEngine, name: str, shift: int, batch: int) -> list[tuple[int, int, int]]:
    """(source, target, bytes): arena offsets of the two contiguous parts of a rotated batch."""
    at, nbytes = bound.place(name)
    cut = nbytes // batch * shift
    return [(at + cut, at, nbytes - cut), (at, at + nbytes - cut, cut)]


def _copy_rotated(bound: BoundEngine, other: BoundEngine, t: Tensor, axis: BatchAxis | None, shift: int, batch: int) -> None:
    """Copies a tensor to the other arena, rotated along its batch axis."""
    if axis is None or axis.is_outermost:
        at, nbytes = bound.place(t.name)
        pieces = [(at, at, nbytes)] if axis is None else _split_rotation(bound, t.name, shift, batch)
        for start, to, n in pieces:
            _copy(bound, other, start, to, n)
        return
    other.write_stored(t.name, axis.take(bound.value(t.name), np.roll(np.arange(batch), -shift), batch))


def _copy(bound: BoundEngine, other: BoundEngine, start: int, to: int, nbytes: int) -> None:
    backend: Backend = bound.backend
    if bound.arena.array is None:
        backend.copy(other.arena, to, bound.arena, start, nbytes)
    else:
        write_bytes(backend, other.arena, to, read_bytes(backend, bound.arena, start, nbytes))


def _compute_difference(bound: BoundEngine, other: BoundEngine, t: Tensor, axis: BatchAxis | None, shift: int, batch: int) -> float:
    backend: Backend = bound.backend
    name = bound.shaped.operands[t.name].dtype.name
    outermost = axis is not None and axis.is_outermost
    if outermost and bound.arena.array is None and name in ("f32", "f16", "bf16", "i8", "u8"):
        parts = [
            backend.difference(other.arena, to, bound.arena, start, n, name) for start, to, n in _split_rotation(bound, t.name, shift, batch) if n
        ]
        largest = max(p.largest for p in parts)
        worst = max(p.worst for p in parts)
        return float("inf") if any(p.odd for p in parts) else worst / largest if largest else worst
    if outermost and bound.arena.array is None and name == F8E4M3.name:  # usually bit-identical, which is checked without a copy to the host
        spans = _split_rotation(bound, t.name, shift, batch)
        alike = (backend.difference(other.arena, to, bound.arena, start, n, "u8") for start, to, n in spans if n)
        if not any(p.worst for p in alike):
            return 0.0
    want, got = bound.value(t.name), other.value(t.name)
    want = want if axis is None else axis.take(want, np.roll(np.arange(batch), -shift), batch)
    if np.array_equal(want.view(np.uint8), got.view(np.uint8)):
        return 0.0
    if want.dtype.kind in "iub":
        return float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    return float(np.nanmax(np.abs(a - b), initial=0)) / (float(np.nanmax(np.abs(b), initial=0)) or 1.0)
