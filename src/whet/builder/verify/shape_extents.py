"""Checks at other input shapes, such as the minimum and maximum of a profile, against results that are verified already.

If only the batch differs and no layer mixes its items, item i of the other batch is item i modulo the verified batch, and every layer must give
the results that it gave for that item. No reference runs. Each layer reads the verified inputs, so that errors do not propagate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from whet.builder.batching.batch_items import BatchAxes
from whet.engine.plan import EnginePlan
from whet.network import Layer, Network, Tensor, evaluate
from whet.ops import BatchAxis, bind_symbols, list_fused_layers
from whet.runtime import BoundEngine
from whet.runtime.memory import read_bytes, write_bytes

Shapes = dict[str, tuple[int, ...]]


def list_other_shapes(plan: EnginePlan, verified: Mapping[str, tuple[int, ...]]) -> list[Shapes]:
    """The minimum, opt and maximum shapes of all profiles, without those in `verified`."""
    found: list[Shapes] = []
    for profile in plan.profiles:
        for which in range(3):
            shapes = {n: tuple(profile.shapes[n][which]) if n in profile.shapes else tuple(s) for n, s in verified.items()}
            if shapes != dict(verified) and shapes not in found:
                found.append(shapes)
    return found


def differ_in_batch(a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]]) -> bool:
    """True if two sets of shapes are equal but for the leading dimension."""
    return all(len(a[n]) == len(b[n]) > 0 and a[n][1:] == b[n][1:] for n in a)


def reads_sizes(net: Network, a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]]) -> bool:
    """True if a layer's values are sizes that differ between two sets of shapes, as those of the Shape of a batch."""
    pairs = [(t.name, t.type) for t in net.inputs]
    environments = [bind_symbols(pairs, shapes) for shapes in (a, b)]
    layers = (x for layer in net.layers for x in (list_fused_layers(layer) if layer.op == "Fused" else [layer]))
    read = [x.needs(0).shape for x in layers if x.op in ("Shape", "Size")]
    return any(len({evaluate(d, env) for env in environments}) > 1 for shape in read for d in shape)


def run_items_again(
    bound: BoundEngine, other: BoundEngine, data: Mapping[str, np.ndarray], axes: BatchAxes, batch: int, other_batch: int
) -> Iterator[tuple[int, Layer, list[tuple[np.ndarray, np.ndarray]]]]:
    """(index, layer, (outputs at the other batch, verified outputs of the same items) per output) layer by layer.

    `bound` has the verified batch, `other` is the same engine at another one. Layers with a separate constant for each item, and shape
    arithmetic, have no pairs.
    """
    items = np.arange(other_batch) % batch
    bound.feed(data)
    for i, layer in enumerate(bound.network.layers):
        axis = axes.parts[layer.name] | axes.axis
        same = layer.name not in axes.fixed
        for t in layer.inputs:
            if same and t is not None and not t.is_constant:
                same = copy_items(bound, other, t, axis.get(t.name), batch, items)
        bound.run_step(i)
        pairs = []
        if same:
            other.run_step(i)
            for t in layer.outputs:
                got, want = other.value(t.name), bound.value(t.name)
                want = axis[t.name].take(want, items, batch) if t.name in axis else want
                pairs.append((got, want if got.shape == want.shape else got))  # a shape that depends on the batch in another way: not compared
        yield i, layer, pairs


def copy_items(bound: BoundEngine, other: BoundEngine, t: Tensor, axis: BatchAxis | None, batch: int, items: np.ndarray) -> bool:
    """Copies the items of a tensor; returns False if its shape depends on the batch in another way."""
    (at, nbytes), (to, wanted) = bound.place(t.name), other.place(t.name)
    if axis is None:
        if nbytes != wanted:
            return False
        copy_bytes(bound, other, at, to, nbytes)
    elif axis.is_outermost:
        each = nbytes // batch
        for first in range(0, len(items), batch):
            copy_bytes(bound, other, at, to + first * each, min(batch, len(items) - first) * each)
    else:
        other.write_stored(t.name, axis.take(bound.value(t.name), items, batch))
    return True


def copy_bytes(bound: BoundEngine, other: BoundEngine, at: int, to: int, nbytes: int) -> None:
    if bound.arena.array is None:
        bound.backend.copy(other.arena, to, bound.arena, at, nbytes)
    else:
        write_bytes(bound.backend, other.arena, to, read_bytes(bound.backend, bound.arena, at, nbytes))
