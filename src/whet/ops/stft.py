"""STFT: Fourier transforms of windows of a signal x [N, length, 1 or 2] (or [N, length]): [N, frames, frequencies, 2].

Inputs: x, frame_step, window [frame_length] (optional), frame_length (optional, default the window's). `onesided` keeps half the frequencies.
"""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import needs_opset
from whet.ops._base import op
from whet.ops._frequency import check_components, check_length, convert_from_complex, convert_to_complex, count_bins, find_known_scalar
from whet.ops._types import require_float_input


def infer(layer):
    t = require_float_input(layer)
    if t.rank not in (2, 3):
        raise NetworkError(f"takes a signal [N, length, 1 or 2], not {t}")
    if t.rank == 3:
        check_components(layer)
    window, step = layer.input(2), find_known_scalar(layer, 1, "frame_step")
    length = find_known_scalar(layer, 3, "frame_length")
    if length is None:
        if window is None:
            raise NetworkError("needs a window or a frame_length")
        length = window.shape[0]
    if window is not None and (window.type.rank != 1 or window.dtype != t.dtype or window.shape[0] != length):
        raise NetworkError(f"the window is {window.type}, the frames have {length} values of {t.dtype}")
    check_length(length)
    if step is None:
        raise NetworkError("needs a frame_step")
    if (isinstance(step, int) and step <= 0) or (isinstance(t.shape[1], int) and isinstance(length, int) and length > t.shape[1]):
        raise NetworkError(f"frames of {length} values with step {step} do not fit a signal of {t.shape[1]}")
    if t.rank == 3 and t.shape[2] == 2 and layer.attrs["onesided"]:
        raise NetworkError("onesided is for real signals")
    return t.with_shape((t.shape[0], (t.shape[1] - length) // step + 1, count_bins(length, layer.attrs["onesided"]), 2))


def compute_reference(layer, x, step, window=None, length=None):
    step, size = int(np.reshape(step, ())), len(window) if length is None else int(np.reshape(length, ()))
    signal = convert_to_complex(x) if x.ndim == 3 else x
    frames = np.lib.stride_tricks.sliding_window_view(signal, size, axis=1)[:, ::step]
    z = np.fft.fft(frames if window is None else frames * window, axis=-1)
    return convert_from_complex(z[..., : size // 2 + 1] if layer.attrs["onesided"] else z, x.dtype)


def to_onnx(layer, w):
    needs_opset(layer, w, 17, "STFT")
    w.node("STFT", [w.name(t) for t in layer.inputs], [w.name(layer.output)], name=layer.name, onesided=layer.attrs["onesided"])


op(
    "STFT",
    infer,
    compute_reference,
    attrs={"onesided": 1},
    to_onnx=to_onnx,
    samples=[
        (["f32[2,128,1]", np.array(8), "const f32[16]"], {}),
        (["f32[2,128,1]", np.array(7), None, np.array(15)], {}),
        (["f32[1,40,2]", np.array(5), "const f32[16]", np.array(16)], {"onesided": 0}),
    ],
)
