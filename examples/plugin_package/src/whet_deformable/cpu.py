"""Kernels for CPUs: one in NumPy (sampled taps times weights), one in LLVM IR (threads share the pixels of the output)."""

from types import SimpleNamespace

import numpy as np

from whet.network import Layer, static_shape
from whet.plugins.llvm_tactic import FLOAT, INT64, Function, Value
from whet_deformable.meaning import sampled


def as_matmul(layer: Layer, x: np.ndarray, w: np.ndarray, offset: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """All taps at once, then one matrix product."""
    taps = sampled(layer, x, w.shape[2:], offset)
    n, channels, count, oh, ow = taps.shape
    y = (w.reshape(len(w), -1) @ taps.reshape(n, channels * count, oh * ow)).reshape(n, len(w), oh, ow)
    return y if bias is None else y + bias[:, None, None]


def words(layer: Layer) -> dict[str, int]:
    """The kernel's integers; `pixels` are its items."""
    (n, channels, height, width), (filters, _, kh, kw) = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1)))
    _, _, oh, ow = static_shape(layer.output.shape)
    (sv, su), (pv, pu) = layer.attrs["strides"], layer.attrs["pads"]
    return {
        "pixels": n * oh * ow, "channels": channels, "height": height, "width": width, "filters": filters, "kh": kh, "kw": kw, "oh": oh, "ow": ow,
        "sv": sv, "su": su, "pv": pv, "pu": pu,
    }  # fmt: skip


def emit_pixels(f: Function, w: SimpleNamespace, layer: Layer) -> None:
    """All filters of the pixels `begin` to `end`: each tap is interpolated once and added to every filter."""
    x, weights, offset, y = (a.as_pointer(FLOAT) for a in (w.input0, w.input1, w.input2, w.output0))
    has_bias = layer.input(3) is not None
    area, image, taps = w.oh * w.ow, w.height * w.width, w.kh * w.kw
    with f.loop(w.begin, w.end) as pixels:
        sample, pixel = pixels.index // area, pixels.index % area
        out = y.at(sample * w.filters * area + pixel)
        with f.loop(0, w.filters) as k:
            out.store(w.input3.as_pointer(FLOAT).load(k.index) if has_bias else f.value(0.0, FLOAT), k.index * area)
        with f.loop(0, taps) as t:
            shift = offset.at((sample * taps + t.index) * 2 * area + pixel)
            v = _position(f, shift.load(0), pixel // w.ow * w.sv + t.index // w.kw - w.pv, w.height)
            u = _position(f, shift.load(area), pixel % w.ow * w.su + t.index % w.kw - w.pu, w.width)
            corners = [_corner(f, v, u, a, b, w.height, w.width) for a in (0, 1) for b in (0, 1)]
            with f.loop(0, w.channels) as c:
                channel = x.at((sample * w.channels + c.index) * image)
                value = f.value(0.0, FLOAT)
                for index, weight in corners:
                    value = f.fma(channel.load(index), weight, value)
                column = weights.at(c.index * taps + t.index)
                with f.loop(0, w.filters) as k:
                    row = column.load(k.index * w.channels * taps)
                    out.store(f.fma(row, value, out.load(k.index * area)), k.index * area)


def _position(f: Function, shift: Value, at: Value, size: Value) -> Value:
    """`at + shift`, or a position outside of the image for NaN and far positions, so that it converts to an integer."""
    position = at.convert("sitofp", FLOAT) + shift
    return f.minimum(f.maximum(position, -2.0), size.convert("sitofp", FLOAT) + 2.0)


def _corner(f: Function, v: Value, u: Value, a: int, b: int, height: Value, width: Value) -> tuple[Value, Value]:
    """Index and weight of one of the four pixels around a position; outside of the image pixel 0 with weight 0."""
    v0, u0 = f.math("floor", v), f.math("floor", u)
    row, column = v0.convert("fptosi", INT64) + a, u0.convert("fptosi", INT64) + b
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    weight = (v - v0 if a else 1 - (v - v0)) * (u - u0 if b else 1 - (u - u0))
    return f.select(inside, row * width + column, 0), f.select(inside, weight, f.value(0.0, FLOAT))
