"""DFT: discrete Fourier transform of x [..., 1 or 2] along `axis` (input 2), of length `dft_length` (input 1; default: the axis's own).

`onesided` keeps the first half of the frequencies of a real signal; with `inverse` the input holds these, and the output is real.
"""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import needs_opset
from whet.ops._base import find_known_values, op
from whet.ops._frequency import check_components, check_length, convert_from_complex, convert_to_complex, count_bins, find_known_scalar
from whet.ops._types import normalize_axis, require_float_input


def _get_length(layer, axis):
    given = find_known_scalar(layer, 1, "dft_length")
    if given is not None:
        return given
    n = layer.inputs[0].shape[axis]
    return 2 * (n - 1) if layer.attrs["inverse"] and layer.attrs["onesided"] else n


def _get_axis(layer):
    known = find_known_scalar(layer, 2, "axis")
    return normalize_axis(-2 if known is None else known, layer.inputs[0].type.rank)


def infer(layer):
    t = require_float_input(layer)
    if t.rank < 2:
        raise NetworkError(f"takes [..., length, 1 or 2], not {t}")
    check_components(layer)
    axis = _get_axis(layer)
    if axis == t.rank - 1:
        raise NetworkError("its axis is the one of the real and imaginary parts")
    length, shape = _get_length(layer, axis), list(t.shape)
    check_length(length)
    check_length(t.shape[axis])
    real = layer.attrs["inverse"] and layer.attrs["onesided"]
    shape[axis] = length if layer.attrs["inverse"] else count_bins(length, layer.attrs["onesided"])
    shape[-1] = 1 if real else 2
    return t.with_shape(shape)


def compute_reference(layer, x, length=None, axis=None):
    inverse, onesided = layer.attrs["inverse"], layer.attrs["onesided"]
    at = (-2 if axis is None else int(np.reshape(axis, ()))) % x.ndim
    n = x.shape[at] if length is None else int(np.reshape(length, ()))
    if inverse and onesided:
        n = 2 * (x.shape[at] - 1) if length is None else n
        return np.fft.irfft(convert_to_complex(x), n, at)[..., None].astype(x.dtype)
    z = (np.fft.ifft if inverse else np.fft.fft)(convert_to_complex(x), n, at)
    if onesided:
        z = np.take(z, np.arange(n // 2 + 1), at)
    return convert_from_complex(z, x.dtype)


def read(node, g):
    """`axis` was an attribute, 1 by default, before opset 20."""
    inputs = [*node.inputs, None, None][:3]
    attrs = {k: v for k, v in node.attrs.items() if k != "axis"}
    if node.opset < 20:
        inputs[2] = g.constant(np.array(node.attrs.get("axis", 1), np.int64), f"{node.name}.axis")
    return node.add(g, "DFT", *inputs, **attrs)


def to_onnx(layer, w):
    needs_opset(layer, w, 17, "DFT")
    attrs = {k: v for k, v in layer.attrs.items() if v}
    inputs = [w.name(t) for t in layer.inputs]
    if w.opset < 20:
        attrs["axis"] = find_known_values(layer.input(2))[0] if layer.input(2) is not None else -2
        inputs = inputs[:2]
    w.node("DFT", inputs, [w.name(layer.output)], name=layer.name, **attrs)


op(
    "DFT",
    infer,
    compute_reference,
    attrs={"inverse": 0, "onesided": 0},
    onnx=read,
    to_onnx=to_onnx,
    samples=[
        (["f32[2,10,1]", None, np.array(1)], {}),
        (["f32[2,10,2]", None, np.array(1)], {}),
        (["f32[2,9,1]", None, np.array(1)], {"onesided": 1}),
        (["f32[2,10,4,2]", np.array(6), np.array(1)], {"inverse": 1}),
        (["f32[2,3,10,1]", np.array(16), np.array(2)], {"onesided": 1}),
    ],
)
