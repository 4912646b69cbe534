"""Experimental ops of ONNX 1.0 to 1.4, which exporters of that time wrote (CoreML's converter for Windows ML above all) and ONNX Runtime computes.

Affine, Crop, ImageScaler, ParametricSoftplus, Scale and ScaledTanh have no definition in newer standards: read as other ops.
"""

from __future__ import annotations

import numpy as np

from whet.ops._ort import add_scalar, make_adder
from whet.ops._refused import read_as_others


def read_image_scaler(node, g):
    """y = scale x + bias, with one bias per channel of [N,C,H,W]."""
    (x,) = node.inputs
    bias = np.asarray(node.attrs.get("bias", ()), x.dtype.numpy)
    if x.type.rank != 4 or bias.size not in (0, 1, x.shape[1]):
        raise node.unsupported(f"it takes [N,C,H,W] with one bias per channel, not {x.type} with {bias.size} biases")
    scaled = make_adder(node, g)("Mul", x, add_scalar(node, g, node.attrs.get("scale", 1.0), x, "scale"))
    return node.add(g, "Add", scaled, g.constant(bias.reshape(-1, 1, 1) if bias.size else np.zeros((), bias.dtype), f"{node.name}.bias"))


def read_crop(node, g):
    """[N,C,H,W] without `border` (left, top, right, bottom); with `scale` (height, width) from left and top on."""
    (x,) = node.inputs
    border, size = (tuple(node.attrs.get(k, ())) for k in ("border", "scale"))
    if x.type.rank != 4 or len(border) != 4 or len(size) not in (0, 2):
        raise node.unsupported(f"it takes [N,C,H,W], a border of four sizes and a scale of none or two, not {x.type}, {border} and {size}")
    left, top, right, bottom = border
    ends = (top + size[0], left + size[1]) if size else (x.shape[2] - bottom, x.shape[3] - right)
    return node.add(g, "Slice", x, starts=(top, left), ends=ends, axes=(2, 3))


def _read_scaled(op: str | None, alpha: float, beta: float):
    """Reader of alpha f(beta x) with these defaults; without `op` of alpha x + beta."""

    def read(node, g):
        (x,), add = node.inputs, make_adder(node, g)
        a, b = (add_scalar(node, g, node.attrs.get(k, default), x, k) for k, default in (("alpha", alpha), ("beta", beta)))
        return node.add(g, "Add", add("Mul", x, a), b) if op is None else node.add(g, "Mul", add(op, add("Mul", x, b)), a)

    return read


def read_scale(node, g):
    return node.add(g, "Mul", node.inputs[0], add_scalar(node, g, node.attrs.get("scale", 1.0), node.inputs[0], "scale"))


for _name, _read, _instead in (
    ("ImageScaler", read_image_scaler, "Mul and Add"),
    ("Crop", read_crop, "Slice"),
    ("Affine", _read_scaled(None, 1.0, 0.0), "Mul and Add"),
    ("ParametricSoftplus", _read_scaled("Softplus", 1.0, 1.0), "Mul and Softplus"),
    ("ScaledTanh", _read_scaled("Tanh", 1.0, 1.0), "Mul and Tanh"),
    ("Scale", read_scale, "Mul"),
):
    read_as_others(_name, _read, _instead)
