"""Running the reference on a few items of a batch: the batch axis of each tensor, and layers computed on selected items.

If no layer mixes the items of a batch (ops/_images.py), a network can be verified on a few items, at the cost of those items only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import Dim, Layer, Network, Tensor, Weight
from whet.ops import (
    OPS,
    Axes,
    BatchAxis,
    NotPerImage,
    bind_layer,
    bind_symbols,
    follow,
    get_op,
    list_fused_layers,
    list_fused_results,
    run_layer,
    widen_attributes,
)

_INDEXED = ("Gather", "GatherND")
MAX_ITEMS = 3  # verified of a larger batch: the first, the last and one drawn by the seed


@dataclass(frozen=True)
class BatchItems:
    """Selected items (sorted indices `at`) of a batch of size `batch`."""

    batch: int
    at: tuple[int, ...]

    @staticmethod
    def of(batch: int, seed: int = 0, most: int = MAX_ITEMS) -> BatchItems:
        """The first, the last and others drawn by the seed, at most `most`."""
        inner = np.random.RandomState(seed).permutation(np.arange(1, max(batch - 1, 1)))[: max(most - 2, 0)]
        return BatchItems(batch, tuple(sorted({0, batch - 1, *(int(i) for i in inner)})))

    @property
    def all(self) -> BatchItems:
        """The whole batch."""
        return BatchItems(self.batch, tuple(range(self.batch)))

    def take(self, a: np.ndarray, axis: BatchAxis) -> np.ndarray:
        """The selected items of an array of the whole batch."""
        return axis.take(a, self.at, self.batch)


def get_common_batch(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The leading dimension shared by all inputs; 1 if they differ or an input has rank 1 or less."""
    sizes = {s[0] if len(s) > 1 else 1 for s in shapes.values()}
    return sizes.pop() if len(sizes) == 1 else 1


def run_on_items(layer: Layer, arrays: Sequence[np.ndarray | None], axes: Axes, items: BatchItems, widen: bool = True) -> list[np.ndarray]:
    """Outputs of one layer for selected items. `arrays` hold those items of inputs that have a batch axis, and all of the other inputs.

    `widen` keeps float64 inputs in float64. Raises NotPerImage if the layer mixes items.
    """
    layer = _fix_indices(layer, arrays, axes)
    followed = follow(layer, axes, items.batch)
    selected = [items.take(a, followed[t]) if a is not None and t in followed else a for t, a in zip(layer.inputs, arrays, strict=True)]
    if layer.op == "Shape":
        return [np.array(tuple(layer.needs(0).shape)[layer.attrs.get("start", 0) : layer.attrs.get("end")], np.int64)]
    if layer.op == "Reformat":
        (data,) = selected
        assert data is not None, "a Reformat has one input"
        return [data]
    if layer.op == "Fused":
        inner, values = dict(axes), {t: a for t, a in zip(layer.inputs, arrays, strict=True) if t is not None and a is not None}
        for x in list_fused_layers(layer):
            values.update(zip(x.outputs, run_on_items(x, [_get_array(t, values) for t in x.inputs], inner, items, widen), strict=True))
            inner |= {t: i for t, i in follow(x, inner, items.batch).items() if t in x.outputs}
        return [values[t] for t in list_fused_results(layer)]
    cut, selected = recut_layer(layer, selected, axes | followed, items)
    outs = run_layer(widen_attributes(cut) if widen else cut, selected)
    for t, a in zip(layer.outputs, outs, strict=True):
        to = followed.get(t)
        if list(a.shape) != [to.count_entries(len(items.at)) if to is not None and i == to.axis else d for i, d in enumerate(t.shape)]:
            raise NotPerImage(f"{layer.op} '{layer.name}' gives {list(a.shape)} for {len(items.at)} batch items")
    return outs


def _fix_indices(layer: Layer, arrays: Sequence[np.ndarray | None], axes: Axes) -> Layer:
    """A Gather with its indices as a constant if they are the same for all items, as `bind_layers` makes them: an item's entries must be known."""
    at = layer.input(1)
    if layer.op not in _INDEXED or at is None or at.is_constant or at in axes or (indices := arrays[1]) is None:
        return layer
    known = Tensor(at.name, at.type, weight=Weight(np.asarray(indices)))
    fixed = Layer(layer.op, layer.name, [layer.inputs[0], known, *layer.inputs[2:]], layer.attrs, layer.regions, layer.sources)
    fixed.outputs = layer.outputs
    return fixed


def bind_layers(net: Network, env: Mapping[str, Dim]) -> Iterator[tuple[Layer, Layer, dict[Tensor, Tensor]]]:
    """Each layer, the layer with its symbols replaced, and the tensors of the latter -> those of the former.

    Indices of Gathers that are computed from sizes alone are constants of the bound layer: the entries that each item takes must be known.
    """
    known: dict[Tensor, np.ndarray] = {}
    for layer in net.layers:
        bound = bind_layer(layer, env)
        at = bound.input(1)
        if layer.op == "Shape" and all(isinstance(d, int) for d in bound.needs(0).shape):
            known[layer.output] = np.array(bound.needs(0).shape[bound.attrs.get("start", 0) : bound.attrs.get("end")], np.int64)
        elif layer.op in _INDEXED and at is not None and layer.inputs[1] in known:
            at.weight = Weight(known[layer.needs(1)])
        elif any(t in known for t in layer.inputs) and all(t is None or t.is_constant or t in known for t in layer.inputs):
            if layer.op in OPS and OPS[layer.op].pure and not layer.regions:
                arrays = [None if t is None else known[t] if t in known else t.array() for t in layer.inputs]
                known.update(zip(layer.outputs, run_layer(bound, arrays), strict=True))
        yield layer, bound, _match_tensors(bound, layer)


def _match_tensors(bound: Layer, layer: Layer) -> dict[Tensor, Tensor]:
    """The tensors of a bound layer -> those of the layer it was bound from."""
    pairs = zip((*bound.inputs, *bound.outputs), (*layer.inputs, *layer.outputs), strict=True)
    return {b: t for b, t in pairs if b is not None and t is not None}


def run_network_on_items(
    net: Network,
    inputs: Mapping[str, np.ndarray],
    items: BatchItems,
    *,
    widen: bool = False,
    read: Callable[[Layer, Tensor, np.ndarray], np.ndarray] = lambda layer, t, a: a,
    write: Callable[[Layer, int, np.ndarray], np.ndarray] = lambda layer, i, a: a,
) -> dict[str, np.ndarray]:
    """Outputs of a network for selected items of whole inputs, by the reference; in float64 with `widen`.

    `read` and `write` may replace the values that a layer reads and writes, for example by rounded ones. Raises NotPerImage.
    """
    env = bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v) for k, v in inputs.items()})

    def convert(a: np.ndarray) -> np.ndarray:
        return a.astype(np.float64) if widen and (a.dtype.kind == "f" or a.dtype.name == "bfloat16") else a

    axes: Axes = {t: BatchAxis(0) for t in net.inputs}
    values: dict[Tensor, np.ndarray] = {t: convert(items.take(np.asarray(inputs[t.name]), BatchAxis(0))) for t in net.inputs}
    for layer, bound, twins in bind_layers(net, env):
        here: Axes = {b: axes[t] for b, t in twins.items() if t in axes}
        arrays = [None if t is None else read(layer, t, values[t]) if t in values else convert(read(layer, t, t.array())) for t in layer.inputs]
        outs = run_on_items(bound, arrays, here, items, widen)
        for b, axis in follow(bound, here, items.batch).items():
            if twins[b] in layer.outputs:
                axes[twins[b]] = axis
        for i, (t, a) in enumerate(zip(layer.outputs, outs, strict=True)):
            values[t] = write(layer, i, a)
    return {t.name: values[t] if t in values else t.array() for t in net.outputs}


@dataclass(frozen=True)
class BatchAxes:
    """`axis`: the batch axis of each tensor by name. `parts`: by layer, the batch axis of other inputs that hold a part for each item."""

    axis: dict[str, BatchAxis]
    parts: dict[str, dict[str, BatchAxis]]
    fixed: frozenset[str]  # layers in which such a part is constant: an item's result depends on its index


NO_BATCH_AXES = BatchAxes({}, {}, frozenset())


def find_batch_axes(net: Network, shapes: Mapping[str, tuple[int, ...]], batch: int) -> BatchAxes:
    """The batch axes of a network at these input shapes. Raises NotPerImage if a layer mixes items."""
    env = bind_symbols([(t.name, t.type) for t in net.inputs], shapes)
    axes: Axes = {t: BatchAxis(0) for t in net.inputs}
    parts: dict[str, dict[str, BatchAxis]] = {}
    fixed = set()
    for layer, bound, twins in bind_layers(net, env):
        found = follow(bound, {b: axes[t] for b, t in twins.items() if t in axes}, batch)
        axes |= {twins[b]: i for b, i in found.items() if twins[b] in layer.outputs}
        parts[layer.name] = {b.name: i for b, i in found.items() if b in bound.inputs}
        if any(b.is_constant for b in found):
            fixed.add(layer.name)
    if any(t not in axes for t in net.outputs if not t.is_constant):
        raise NotPerImage("an output is shared by all batch items")
    return BatchAxes({t.name: i for t, i in axes.items()}, parts, frozenset(fixed))


def _get_array(t: Tensor | None, values: Mapping[Tensor, np.ndarray | None]) -> np.ndarray | None:
    return None if t is None else values[t] if t in values else t.array()


def recut_layer(layer: Layer, arrays: list[np.ndarray | None], axes: Axes, items: BatchItems) -> tuple[Layer, list[np.ndarray | None]]:
    """The layer and its inputs for fewer items, with shape operands adapted by its op (Reshape's target, Resize's sizes)."""
    recut = get_op(layer.op).recut
    tensors = [t for t in (*layer.inputs, *layer.outputs) if t is not None and t in axes]
    kept = {(t, axes[t].axis): axes[t].list_indices(items.at, items.batch) for t in tensors}
    changes = recut(layer, kept) if recut is not None and kept else {}
    if not changes:
        return layer, arrays
    attrs = layer.attrs | {k: v for k, v in changes.items() if isinstance(k, str)}
    cut = Layer(layer.op, layer.name, layer.inputs, {k: v for k, v in attrs.items() if v is not None}, layer.regions, layer.sources)
    cut.outputs = layer.outputs
    arrays = list(arrays) + [None] * (1 + max((k for k in changes if isinstance(k, int)), default=-1) - len(arrays))
    for k, v in changes.items():
        if isinstance(k, int):
            arrays[k] = v
    return cut, arrays
