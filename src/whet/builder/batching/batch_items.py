"""Single images of a batch through the reference: which axis of each tensor counts images, and layers computed on a few of them.

Where no layer mixes the images of a batch (ops/_images.py), a network can be judged image by image, at the cost of those images and not
of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.ops import Axes, NotPerImage, bind_layer, bind_symbols, follow, fused_layers, fused_results, get_op, run_layer, widened

MOST = 3  # images that are judged of a larger batch: the first, the last and one drawn by the seed


@dataclass(frozen=True)
class Images:
    """The images `at` (sorted) of a batch of `batch`."""

    batch: int
    at: tuple[int, ...]

    @staticmethod
    def of(batch: int, seed: int = 0, most: int = MOST) -> Images:
        """First, last and others between, the same for the same seed."""
        inner = np.random.RandomState(seed).permutation(np.arange(1, max(batch - 1, 1)))[: max(most - 2, 0)]
        return Images(batch, tuple(sorted({0, batch - 1, *(int(i) for i in inner)})))

    @property
    def all(self) -> Images:
        """The whole batch."""
        return Images(self.batch, tuple(range(self.batch)))

    def take(self, a: np.ndarray, axis: int) -> np.ndarray:
        """The images of an array of the whole batch."""
        return np.ascontiguousarray(np.take(a, self.at, axis))


def batch_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The leading dimension that all inputs share; 1 where there is none, or where something has no other axis."""
    found = {s[0] if len(s) > 1 else 1 for s in shapes.values()}
    return found.pop() if len(found) == 1 else 1


def on_images(layer: Layer, arrays: Sequence[np.ndarray | None], axes: Axes, images: Images, widen: bool = True) -> list[np.ndarray]:
    """Outputs of one layer for some images: `arrays` hold those images where an input has an image axis, all of it elsewhere.

    `widen` computes in float64 what comes as float64. Raises NotPerImage where the layer mixes images.
    """
    made = follow(layer, axes, images.batch)
    given = [images.take(a, made[t]) if a is not None and t in made else a for t, a in zip(layer.inputs, arrays, strict=True)]
    if layer.op == "Shape":
        return [np.array(tuple(layer.needs(0).shape)[layer.attrs.get("start", 0) : layer.attrs.get("end")], np.int64)]
    if layer.op == "Reformat":
        return [given[0]]  # type: ignore[list-item]
    if layer.op == "Fused":
        inner, values = dict(axes), {t: a for t, a in zip(layer.inputs, arrays, strict=True) if t is not None and a is not None}
        for x in fused_layers(layer):
            values.update(zip(x.outputs, on_images(x, [_value(t, values) for t in x.inputs], inner, images, widen), strict=True))
            inner |= {t: i for t, i in follow(x, inner, images.batch).items() if t in x.outputs}
        return [values[t] for t in fused_results(layer)]
    cut, given = _recut(layer, given, axes | made, images)
    outs = run_layer(widened(cut) if widen else cut, given)
    for t, a in zip(layer.outputs, outs, strict=True):
        if list(a.shape) != [len(images.at) if i == made.get(t) else d for i, d in enumerate(t.shape)]:
            raise NotPerImage(f"{layer.op} '{layer.name}' gives {list(a.shape)} for {len(images.at)} images")
    return outs


def network_on_images(
    net: Network,
    inputs: Mapping[str, np.ndarray],
    images: Images,
    *,
    widen: bool = False,
    read: Callable[[Layer, Tensor, np.ndarray], np.ndarray] = lambda layer, t, a: a,
    made: Callable[[Layer, int, np.ndarray], np.ndarray] = lambda layer, i, a: a,
) -> dict[str, np.ndarray]:
    """Outputs of a network for some images of whole inputs, by the reference; in float64 with `widen`.

    `read` and `made` see what a layer reads and makes: an emulation rounds there. Raises NotPerImage.
    """
    env = bind_symbols([(t.name, t.type) for t in net.inputs], {k: np.shape(v) for k, v in inputs.items()})

    def prepared(a: np.ndarray) -> np.ndarray:
        return a.astype(np.float64) if widen and (a.dtype.kind == "f" or a.dtype.name == "bfloat16") else a

    axes: Axes = {t: 0 for t in net.inputs}
    values: dict[Tensor, np.ndarray] = {t: prepared(images.take(np.asarray(inputs[t.name]), 0)) for t in net.inputs}
    for layer in net.layers:
        bound = bind_layer(layer, env)
        twins = {b: t for t, b in zip((*layer.inputs, *layer.outputs), (*bound.inputs, *bound.outputs), strict=True) if b is not None}
        here: Axes = {b: axes[t] for b, t in twins.items() if t in axes}
        arrays = [
            None if t is None else read(layer, t, values[t]) if t in values else prepared(read(layer, t, t.array())) for t in layer.inputs
        ]
        outs = on_images(bound, arrays, here, images, widen)
        for b, i in follow(bound, here, images.batch).items():
            if twins[b] in layer.outputs:
                axes[twins[b]] = i  # type: ignore[index]
        for i, (t, a) in enumerate(zip(layer.outputs, outs, strict=True)):
            values[t] = made(layer, i, a)
    found = {}
    for t in net.outputs:
        found[t.name] = values[t] if t in values else t.array()
    return found


@dataclass(frozen=True)
class Places:
    """The image axis of each tensor of a network by name; and layer by layer, of other inputs that hold a part for each image."""

    axis: dict[str, int]
    parts: dict[str, dict[str, int]]
    fixed: frozenset[str]  # layers where such a part is a constant: there an image's result does depend on its place


NOWHERE = Places({}, {}, frozenset())


def image_places(net: Network, shapes: Mapping[str, tuple[int, ...]], batch: int) -> Places:
    """Where images stand in a network at these input shapes. Raises NotPerImage where a layer mixes them."""
    env = bind_symbols([(t.name, t.type) for t in net.inputs], shapes)
    axes: Axes = {t: 0 for t in net.inputs}
    parts: dict[str, dict[str, int]] = {}
    fixed = set()
    for layer in net.layers:
        bound = bind_layer(layer, env)
        twins = {b: t for t, b in zip((*layer.inputs, *layer.outputs), (*bound.inputs, *bound.outputs), strict=True) if b is not None}
        found = follow(bound, {b: axes[t] for b, t in twins.items() if t in axes}, batch)
        axes |= {twins[b]: i for b, i in found.items() if twins[b] in layer.outputs}  # type: ignore[misc]
        parts[layer.name] = {b.name: i for b, i in found.items() if b in bound.inputs}
        if any(b.is_constant for b in found):
            fixed.add(layer.name)
    if any(t not in axes for t in net.outputs if not t.is_constant):
        raise NotPerImage("an output is one for all images")
    return Places({t.name: i for t, i in axes.items()}, parts, frozenset(fixed))


def _value(t: Tensor | None, values: Mapping[Tensor, np.ndarray | None]) -> np.ndarray | None:
    return None if t is None else values[t] if t in values else t.array()


def _recut(layer: Layer, arrays: list[np.ndarray | None], axes: Axes, images: Images) -> tuple[Layer, list[np.ndarray | None]]:
    """The layer and its inputs for fewer images, as its op recuts them (Reshape's target, Resize's sizes)."""
    recut = get_op(layer.op).recut
    kept = {(t, axes[t]): np.asarray(images.at) for t in (*layer.inputs, *layer.outputs) if t is not None and t in axes}
    changes = recut(layer, kept) if recut is not None and kept else {}
    if not changes:
        return layer, arrays
    attrs = layer.attrs | {k: v for k, v in changes.items() if isinstance(k, str)}
    made = Layer(layer.op, layer.name, layer.inputs, {k: v for k, v in attrs.items() if v is not None}, layer.regions, layer.sources)
    made.outputs = layer.outputs
    arrays = list(arrays) + [None] * (1 + max((k for k in changes if isinstance(k, int)), default=-1) - len(arrays))
    for k, v in changes.items():
        if isinstance(k, int):
            arrays[k] = v
    return made, arrays
