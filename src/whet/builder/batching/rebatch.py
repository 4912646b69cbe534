"""A network with a fixed batch for another number of items: calibration and accuracy take samples of any batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from whet.builder.batching.batch_items import BatchItems, bind_layers, get_common_batch, recut_layer
from whet.errors import CalibrationError, NetworkError
from whet.network import Network, Tensor, TensorType
from whet.ops import Axes, BatchAxis, NotPerImage, follow


def match_batch(net: Network, samples: Iterable[Mapping[str, np.ndarray]]) -> Network:
    """`net`, or if its fixed batch is not that of the first sample, a network for that batch. Raises CalibrationError if there is none."""
    given = {t.name: t.shape for t in net.inputs}
    first = next(iter(samples), None)
    if first is None or any(not isinstance(d, int) for shape in given.values() for d in shape) or not given.keys() <= first.keys():
        return net
    wanted = {name: tuple(np.shape(first[name])) for name in given}
    batch, other = get_common_batch(given), get_common_batch(wanted)
    if wanted == given or any(w != (other, *s[1:]) for w, s in zip(wanted.values(), given.values(), strict=True)):
        return net  # what differs is reported where the sample is run
    try:
        return rebatch(net, batch, other)
    except (NotPerImage, NetworkError) as reason:
        raise CalibrationError(
            f"the samples have {other} items, the network takes {batch} and cannot be changed to take {other}: {reason}. Give samples of {batch}."
        ) from reason


def rebatch(net: Network, batch: int, other: int) -> Network:
    """`net`, whose inputs have `batch` items along axis 0, for `other` items; layers and tensors keep their names. Constants with a part for each
    item keep those of the first items, repeated as needed. Raises NotPerImage if a layer mixes items."""
    items = BatchItems(batch, tuple(i % batch for i in range(other)))
    made = Network(net.name)
    new: dict[Tensor, Tensor] = {t: made.add_input(t.name, TensorType(t.dtype, (other, *t.shape[1:]))) for t in net.inputs}
    axes: Axes = {t: BatchAxis(0) for t in net.inputs}

    def copy_constant(t: Tensor) -> Tensor:
        if t not in new:
            assert t.weight is not None, f"{t.name} is neither computed nor constant"
            new[t] = made.constant(t.weight, t.name)
        return new[t]

    for layer, bound, twins in bind_layers(net, {}):
        here: Axes = {b: axes[t] for b, t in twins.items() if t in axes}
        followed = follow(bound, here, batch)
        arrays: list[np.ndarray | None] = [
            items.take(t.array(), followed[b]) if t is not None and t.is_constant and b in followed else None
            for t, b in zip(layer.inputs, bound.inputs, strict=True)
        ]
        cut, arrays = recut_layer(bound, arrays, here | followed, items)
        inputs: list[Tensor | None] = []
        for i, a in enumerate(arrays):
            t, b = (layer.inputs[i], bound.inputs[i]) if i < len(layer.inputs) else (None, None)
            if a is not None:
                inputs.append(made.constant(a, t.name if t is not None else f"{layer.name}_shape"))
            elif t is not None and b in followed and t not in axes:  # computed, but not from the inputs, with a part for each item
                at = made.constant(followed[b].list_indices(items.at, batch).astype(np.int64), f"{t.name}_items")
                inputs.append(made.add("Gather", copy_constant(t), at, axis=followed[b].axis, name=f"{t.name}_of_items"))
            else:
                inputs.append(None if t is None else copy_constant(t))
        copied = made.add_layer(layer.op, inputs, cut.attrs, name=layer.name, outputs=[t.name for t in layer.outputs], sources=layer.sources)
        for b, axis in followed.items():
            if twins[b] in layer.outputs:
                axes[twins[b]] = axis
        for t, c in zip(layer.outputs, copied.outputs, strict=True):
            expected = tuple(axes[t].count_entries(other) if t in axes and i == axes[t].axis else d for i, d in enumerate(t.shape))
            if c.shape != expected:
                raise NotPerImage(f"{layer.op} '{layer.name}' gives {list(c.shape)} for {other} items")
            new[t] = c
    for t in net.outputs:
        made.mark_output(copy_constant(t))
    return made
