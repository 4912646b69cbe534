"""Convolutions of volumes become convolutions of images, which the machine's kernels compute on tensor cores.

A volume [N, C, D, H, W] is kept in one of two forms, and `Reshape` and `Transpose` between them move nothing if channels are stored last:

    planes  [N * D, C, H, W]  an image for each position along the depth
    lines   [N, C, D, H * W]  an image whose rows are the positions along the depth

A convolution along the depth alone reads lines. Another one reads planes: its positions along the depth are slices, or shifted copies with zeros
at the ends (Pads that also crop), that are concatenated as channels. Pools are one along the plane and one along the depth. Pointwise layers and
Concats between them keep the form that they read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from whet.network import Dim, Layer, Tensor, Weight, product
from whet.ops import get_op
from whet.ops._origin import express
from whet.ops._window import pool_of
from whet.ops.conv import get_window_attributes as conv_attributes
from whet.ops.conv_transpose import get_window_attributes as transpose_attributes
from whet.rewrite.constants import gather_padded, reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, Skip, network_pass

_TO_ROWS, _TO_IMAGE = (0, 2, 3, 1), (0, 3, 1, 2)
_FEW = 4  # channels of an image that kernels for the first layer of a network take


@network_pass(phase=Phase.FOLD, after=["fold_batch_norm", "fold_scale_shift", "fold_pads"])
def conv_3d_to_2d(g: Graph) -> list[Fired | Skip]:
    if g.channel_alignment == 1:
        return []  # kernels for any number of axes
    volumes = _Volumes(g)
    notes = [note for layer in g.layers if (note := volumes.convert(layer)) is not None]
    volumes.finish()
    return notes


@dataclass(frozen=True)
class _Images:
    """A volume as images; `lines` tells the form."""

    image: Tensor
    lines: bool


class _Volumes:
    """The volumes of a network that are kept as images, and the layers that made them."""

    def __init__(self, g: Graph):
        self.g = g
        self.images: dict[Tensor, _Images] = {}
        self.converted: list[Layer] = []
        self.rows: dict[tuple[Tensor, tuple[Dim, ...]], Tensor] = {}
        self.layer: Layer | None = None  # the one that is being converted

    def convert(self, layer: Layer) -> Fired | Skip | None:
        """Computes the layer's volume as images, if it can be and should be."""
        x = layer.input(0)
        starts = layer.op in ("Conv", "ConvTranspose")
        if x is None or x.type.rank != 5 or len(layer.outputs) != 1 or layer.regions or not (starts or any(t in self.images for t in layer.inputs)):
            return None
        make = _MAKERS.get(layer.op, _keep_form if get_op(layer.op).pointwise else None)
        if make is None:
            return None
        if not self.g.is_sized((*x.shape, *layer.output.shape)) or not all(isinstance(d, int) and d for t in (x, layer.output) for d in t.shape[1:]):
            return Skip("only the batch of a volume may vary", layer.name) if starts else None
        self.layer = layer
        start = len(self.g.net.layers)
        result = make(self, layer)
        if isinstance(result, str):
            return Skip(result, layer.name) if starts else None
        self.images[layer.output] = result
        self.converted.append(layer)
        self._place(start, layer)
        return Fired(f"{layer.op} of {x.type} -> {result.image.maker.op if result.image.maker is not None else ''} of images", layer.name)

    def finish(self) -> None:
        """Makes the volumes that other layers read, and removes the converted layers."""
        g, gone = self.g, set(self.converted)
        for layer in self.converted:
            y = layer.output
            if g.is_output(y) or any(r not in gone for r in g.readers(y)):
                self.layer, start, at = layer, len(g.net.layers), g.position(layer)
                volume = self._volume(y)
                self._place(start, layer)
                g.replace(y, volume, at, rename=True)
        g.remove(g.find_dead(self.converted))
        g.remove(reversed([x for x in g.net.layers if g.alive(x) and x not in gone and self._is_unused(x)]))

    def _is_unused(self, layer: Layer) -> bool:
        return layer.op in ("Reshape", "Transpose") and not layer.sources and not any(self.g.readers(t) or self.g.is_output(t) for t in layer.outputs)

    def _place(self, start: int, layer: Layer) -> None:
        at, added = self.g.position(layer), self.g.net.layers[start:]
        for i, x in enumerate(added):
            self.g.set_position(x, at - 1e-6 * (len(added) - i))

    # forms of a volume

    def add(self, op: str, *inputs: Tensor | None, **attrs: object) -> Tensor:
        """A layer that does the work of the one that is being converted."""
        assert self.layer is not None
        y: Tensor = self.g.add(op, *inputs, **{"name": self.layer.name, "sources": self.layer.sources, **attrs})
        return y

    def move(self, op: str, x: Tensor, **attrs: object) -> Tensor:
        """A Reshape, Transpose, Slice, Pad or Concat of values."""
        assert self.layer is not None
        y: Tensor = self.g.add(op, x, name=f"{self.layer.name}_{op.lower()}", sources=(), **attrs)
        return y

    def reshape(self, x: Tensor, shape: tuple[Dim, ...]) -> Tensor:
        return x if tuple(x.shape) == shape else self.move("Reshape", x, shape=shape)

    def rows_of(self, t: Tensor, shape: tuple[Dim, ...]) -> Tensor:
        """The values of a volume with channels last, in `shape`."""
        if (t, shape) not in self.rows:
            if t not in self.images:
                self.rows[t, shape] = self.reshape(self.move("Transpose", t, perm=(0, 2, 3, 4, 1)), shape)
            else:
                self.rows[t, shape] = self.reshape(self.move("Transpose", self.images[t].image, perm=_TO_ROWS), shape)
        return self.rows[t, shape]

    def as_images(self, t: Tensor, lines: bool) -> Tensor:
        """The volume `t` as images of a form."""
        known = self.images.get(t)
        if known is not None and known.lines == lines:
            return known.image
        return self.move("Transpose", self.rows_of(t, _compute_rows_shape(t, lines)), perm=_TO_IMAGE)

    def _volume(self, t: Tensor) -> Tensor:
        n, c, d, h, w = t.shape
        if (d, h, w) == (1, 1, 1):
            return self.move("Reshape", self.images[t].image, shape=tuple(t.shape))
        return self.move("Transpose", self.rows_of(t, (n, d, h, w, c)), perm=(0, 4, 1, 2, 3))

    def prefers_lines(self, t: Tensor) -> bool:
        return t in self.images and self.images[t].lines


def _compute_rows_shape(t: Tensor, lines: bool) -> tuple[Dim, ...]:
    n, c, d, h, w = t.shape
    return (n, d, product((h, w)), c) if lines else (product((n, d)), h, w, c)


def _convolve(v: _Volumes, layer: Layer) -> _Images | str:
    x, w, bias = layer.needs(0), layer.needs(1), layer.input(2)
    if w.weight is None or not w.dtype.is_float or (bias is not None and bias.weight is None):
        return "its weights are computed at run time or quantized"
    strides, dilations, pads = conv_attributes(layer)
    k, c, kd, kh, kw = w.weight.array.shape
    group, before, after = layer.attrs["group"], pads[0], pads[3]
    more = () if bias is None else (bias,)
    flat = (kh, kw) == strides[1:] == (1, 1) and not any(pads[i] for i in (1, 2, 4, 5))
    if flat and (kd > 1 or strides[0] > 1 or before or after or v.prefers_lines(x)):
        weights = v.g.constant(reshape_weight(w.weight, (k, c, kd, 1)), w.name)
        attrs = {"kernel_shape": (kd, 1), "strides": (strides[0], 1), "dilations": (dilations[0], 1), "pads": (before, 0, after, 0)}
        return _Images(v.add("Conv", v.as_images(x, True), weights, *more, group=group, **attrs), True)
    attrs = {"kernel_shape": (kh, kw), "strides": strides[1:], "dilations": dilations[1:], "pads": (pads[1], pads[2], pads[4], pads[5])}
    if kd == 1 and strides[0] == 1 and not before and not after:
        weights = v.g.constant(reshape_weight(w.weight, (k, c, kh, kw)), w.name)
        return _Images(v.add("Conv", v.as_images(x, False), weights, *more, group=group, **attrs), False)
    taps = _slice_taps(v, layer, kd, strides[0], dilations[0], before, after)
    n, depth = x.shape[0], layer.output.shape[2]
    images, height, width = product((n, depth)), x.shape[3], x.shape[4]
    if c == 1 and group > 1 and kd > 1:  # a sum of depthwise convolutions, for which there are kernels
        y: Tensor | None = None
        for i, tap in enumerate(taps):
            own = express("Slice", w.weight, starts=(i,), ends=(i + 1,), axes=(2,), steps=(1,))
            weights = v.g.constant(reshape_weight(own, (k, 1, kh, kw)), w.name)
            image = v.move("Transpose", v.reshape(tap, (images, height, width, group)), perm=_TO_IMAGE)
            part = v.add("Conv", image, weights, *(more if i == 0 else ()), group=group, **attrs)
            y = part if y is None else v.add("Add", part, y)
        assert y is not None
        return _Images(y, False)
    merged, channels = _merge_depth(w.weight), group * kd * c
    if group > 1 and kd > 1:  # the channels of a group stay together
        taps = [v.move("Reshape", t, shape=(images, height, width, group, c)) for t in taps]
    rows = taps[0] if kd == 1 else v.g.add("Concat", *taps, axis=4, name=f"{layer.name}_taps", sources=())
    rows = v.reshape(rows, (images, height, width, channels))
    whole = v.g.channel_alignment // 2
    if group == 1 and c < whole and channels > _FEW and channels % whole:  # of a picture: pad_channels cannot pad the taps of an input
        more_channels = -channels % whole
        rows = v.move("Pad", rows, mode="constant", pads=(0, 0, 0, 0, 0, 0, 0, more_channels))
        merged = gather_padded(merged, 1, np.array([*range(channels), *[-1] * more_channels]))
    weights = v.g.constant(merged, w.name)
    return _Images(v.add("Conv", v.move("Transpose", rows, perm=_TO_IMAGE), weights, *more, group=group, **attrs), False)


def _slice_taps(v: _Volumes, layer: Layer, kd: int, stride: int, dilation: int, before: int, after: int) -> list[Tensor]:
    """For each position of the kernel along the depth the part of the volume that it reads, [N, D', H, W, C]."""
    x = layer.needs(0)
    n, c, d, h, w = x.shape
    rows, depth = v.rows_of(x, (n, d, h, w, c)), layer.output.shape[2]
    assert isinstance(depth, int)
    assert isinstance(d, int)
    amounts = [(before - i * dilation, i * dilation - before + depth - d) for i in range(kd)]  # negative ones crop
    if stride == 1 and (before or after) and all(d + min(a, 0) + min(b, 0) > 0 for a, b in amounts):
        return [v.move("Pad", rows, mode="constant", pads=(0, a, 0, 0, 0, 0, b, 0, 0, 0)) if a or b else rows for a, b in amounts]
    if before or after:
        rows = v.move("Pad", rows, mode="constant", pads=(0, before, 0, 0, 0, 0, after, 0, 0, 0))
    bounds = [(i * dilation, i * dilation + (depth - 1) * stride + 1) for i in range(kd)]
    return [v.move("Slice", rows, starts=(a,), ends=(b,), axes=(1,), steps=(stride,)) for a, b in bounds]


def _merge_depth(w: Weight) -> Weight:
    """Weights [A, B, kd, kh, kw] as [A, kd * B, kh, kw]."""
    a, b, kd, kh, kw = w.array.shape
    return reshape_weight(express("Transpose", w, perm=(0, 2, 1, 3, 4)), (a, kd * b, kh, kw))


def _deconvolve(v: _Volumes, layer: Layer) -> _Images | str:
    x, w, bias = layer.needs(0), layer.needs(1), layer.input(2)
    if w.weight is None or not w.dtype.is_float or (bias is not None and bias.weight is None):
        return "its weights are computed at run time or quantized"
    strides, dilations, pads, extra = transpose_attributes(layer)
    _, k, kd, kh, kw = w.weight.array.shape
    if layer.attrs["group"] > 1:
        return "it has several groups"
    if kd != strides[0] or pads[0] or pads[3] or extra[0]:
        return "its windows overlap along the depth, or leave gaps or padding there"
    inputs = [v.as_images(x, False), v.g.constant(_merge_depth(w.weight), w.name)]
    if bias is not None and bias.weight is not None:
        inputs.append(bias if kd == 1 else v.g.constant(express("Concat", *[bias.weight] * kd, axis=0), bias.name))
    y = v.add(
        "ConvTranspose", *inputs, kernel_shape=(kh, kw), strides=strides[1:], dilations=dilations[1:], output_padding=extra[1:],
        pads=(pads[1], pads[2], pads[4], pads[5]),
    )  # fmt: skip
    if kd == 1:
        return _Images(y, False)
    images, _, height, width = y.shape
    parts = v.move("Reshape", v.move("Transpose", y, perm=_TO_ROWS), shape=(images, height, width, kd, k))
    rows = v.move("Reshape", v.move("Transpose", parts, perm=(0, 3, 1, 2, 4)), shape=_compute_rows_shape(layer.output, False))
    return _Images(v.move("Transpose", rows, perm=_TO_IMAGE), False)


def _pool(v: _Volumes, layer: Layer) -> _Images | str:
    """A pool along the plane, then one along the depth: maxima and means, also over the values inside the padding alone, are separable."""
    x, pool = layer.needs(0), pool_of(layer)
    n, c, d, _, _ = x.shape
    h, w = layer.output.shape[3:]
    shared = {"ceil_mode": layer.attrs["ceil_mode"]}
    if layer.op == "AveragePool":
        shared["count_include_pad"] = layer.attrs["count_include_pad"]
    kernel, strides, dilations, pads = pool.kernel, pool.strides, pool.dilations, pool.pads
    plane = _Images(v.as_images(x, False), False)
    if kernel[1:] != (1, 1) or strides[1:] != (1, 1) or any(pads[i] for i in (1, 2, 4, 5)):
        at_plane = {"kernel_shape": kernel[1:], "strides": strides[1:], "dilations": dilations[1:], "pads": (pads[1], pads[2], pads[4], pads[5])}
        plane = _Images(v.add(layer.op, plane.image, **at_plane, **shared), False)
    if kernel[0] == strides[0] == 1 and not pads[0] and not pads[3]:
        return plane
    rows = v.reshape(v.move("Transpose", plane.image, perm=_TO_ROWS), (n, d, product((h, w)), c))
    at_depth = {"kernel_shape": (kernel[0], 1), "strides": (strides[0], 1), "dilations": (dilations[0], 1), "pads": (pads[0], 0, pads[3], 0)}
    return _Images(v.add(layer.op, v.move("Transpose", rows, perm=_TO_IMAGE), **at_depth, **shared), True)


def _as_lines(v: _Volumes, layer: Layer) -> _Images | str:
    """Layers that reduce over all positions of a volume."""
    return _Images(v.add(layer.op, v.as_images(layer.needs(0), True), *layer.inputs[1:], **layer.attrs), True)


def _keep_form(v: _Volumes, layer: Layer) -> _Images | str:
    """A layer that computes each position alone, in the form of the input that was computed last."""
    variable = [t for t in layer.inputs if t is not None and not t.is_constant]
    joins = layer.op == "Concat"
    if joins and layer.attrs["axis"] not in (1, -4):
        return "it concatenates along another axis than the channels"
    if not joins and any(tuple(t.shape) != tuple(layer.output.shape) for t in variable):
        return "it broadcasts one volume to another"
    if joins and len(variable) < len(layer.inputs):
        return "it has a constant input"
    last = max((t for t in variable if t in v.images), key=lambda t: v.g.position(t.maker) if t.maker is not None else -1.0)
    lines = v.images[last].lines
    inputs: list[Tensor | None] = []
    for t in layer.inputs:
        if t is None or not t.is_constant:
            inputs.append(None if t is None else v.as_images(t, lines))
            continue
        weight, c = t.constant(), layer.output.shape[1]
        shape = (1,) * (5 - t.type.rank) + weight.array.shape
        if weight.array.size == 1:
            inputs.append(t if t.type.rank <= 1 else v.g.constant(reshape_weight(weight, ()), t.name))
        elif shape == (1, c, 1, 1, 1) or (layer.op == "BatchNormalization" and t.type.rank == 1):
            inputs.append(t if t.type.rank == 1 else v.g.constant(reshape_weight(weight, (weight.array.size, 1, 1)), t.name))
        else:
            return f"%{t.name}: {t.type} is not one value for each channel"
    attrs = {**layer.attrs, "axis": 1} if joins else layer.attrs
    return _Images(v.add(layer.op, *inputs, **attrs), lines)


_MAKERS: dict[str, Callable[[_Volumes, Layer], _Images | str]] = {
    "AveragePool": _pool,
    "BatchNormalization": _keep_form,
    "Concat": _keep_form,
    "Conv": _convolve,
    "ConvTranspose": _deconvolve,
    "GlobalAveragePool": _as_lines,
    "GlobalMaxPool": _as_lines,
    "GroupNormalization": _as_lines,
    "InstanceNormalization": _as_lines,
    "MaxPool": _pool,
}
