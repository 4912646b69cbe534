"""DeformConv: a convolution of x [N, C, H, W] with w [K, C/group, h, w] whose taps are shifted by offsets [N, offset_group * h * w * 2, oh, ow].

Inputs 3 and 4 are a bias [K] and a mask [N, offset_group * h * w, oh, ow] that scales the taps. Values beyond the image are zero.
"""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import needs_opset
from whet.ops._base import INTS, op
from whet.ops._types import may_equal, require_float_input, require_one_float_type
from whet.ops._window import check_window, compute_out_size


def _get_window_attributes(attrs):
    return tuple(attrs.get("strides") or (1, 1)), tuple(attrs.get("dilations") or (1, 1)), tuple(attrs.get("pads") or (0,) * 4)


def infer(layer):
    t, w, offset = require_float_input(layer), layer.needs(1), layer.needs(2)
    require_one_float_type(layer, 1, 2, *(i for i in (3, 4) if layer.input(i) is not None))
    if t.rank != 4 or w.type.rank != 4 or offset.type.rank != 4:
        raise NetworkError(f"takes tensors of rank 4, not {t}, {w.type}, {offset.type}")
    strides, dilations, pads = _get_window_attributes(layer.attrs)
    kernel, groups, group = w.shape[2:], layer.attrs["offset_group"], layer.attrs["group"]
    if group < 1 or groups < 1:
        raise NetworkError(f"group {group} and offset_group {groups} must be positive")
    check_window(kernel, t.shape, (*t.shape[:2], *(t.shape[2 + i] + pads[i] + pads[2 + i] for i in range(2))))
    out = [compute_out_size(t.shape[2 + i], kernel[i], strides[i], dilations[i], pads[i], pads[2 + i]) for i in range(2)]
    taps = kernel[0] * kernel[1] * groups
    if t.shape[1] != w.shape[1] * group or t.shape[1] % groups or w.shape[0] % group:
        raise NetworkError(f"{t} and weights {w.type} do not match in {group} groups and {groups} offset groups")
    mask = layer.input(4)
    if not may_equal(offset.shape, (t.shape[0], 2 * taps, *out)) or (mask is not None and not may_equal(mask.shape, (t.shape[0], taps, *out))):
        raise NetworkError(f"the offsets {offset.type} (and mask {mask and mask.type}) do not match {taps} taps and the output {out}")
    return t.with_shape((t.shape[0], w.shape[0], *out))


def compute_reference(layer, x, w, offset, bias=None, mask=None):
    strides, dilations, pads = _get_window_attributes(layer.attrs)
    (n, c, height, width), (k, _, kh, kw), group, groups = x.shape, w.shape, layer.attrs["group"], layer.attrs["offset_group"]
    oh, ow = offset.shape[2:]
    offset = offset.reshape(n, groups, kh, kw, 2, oh, ow)
    scale = None if mask is None else mask.reshape(n, groups, kh, kw, oh, ow)
    image = x.reshape(n, groups, c // groups, height, width)
    at = np.ix_(range(n), range(groups))
    rows, columns = np.arange(oh)[:, None] * strides[0] - pads[0], np.arange(ow) * strides[1] - pads[1]
    y = np.zeros((n, group, k // group, oh, ow), x.dtype)
    for i in range(kh):
        for j in range(kw):
            v = rows + i * dilations[0] + offset[:, :, i, j, 0]
            u = columns + j * dilations[1] + offset[:, :, i, j, 1]
            v0, u0 = np.floor(v), np.floor(u)
            tap = np.zeros((n, groups, oh, ow, c // groups), x.dtype)
            for a in (0, 1):
                for b in (0, 1):
                    vi, ui = (v0 + a).astype(np.int64), (u0 + b).astype(np.int64)
                    weight = (1 - np.abs(v - v0 - a)) * (1 - np.abs(u - u0 - b))
                    inside = (vi >= 0) & (vi < height) & (ui >= 0) & (ui < width)
                    index = (at[0][:, :, None, None], at[1][:, :, None, None], slice(None), np.clip(vi, 0, height - 1), np.clip(ui, 0, width - 1))
                    tap += np.where(inside[..., None], weight[..., None].astype(x.dtype) * image[index], x.dtype.type(0))
            if scale is not None:
                tap *= scale[:, :, i, j, ..., None]
            values = tap.transpose(0, 1, 4, 2, 3).reshape(n, group, c // group, oh, ow)
            y += np.einsum("ngchw,gkc->ngkhw", values, w[:, :, i, j].reshape(group, k // group, -1))
    y = y.reshape(n, k, oh, ow)
    return y if bias is None else y + bias[:, None, None]


def to_onnx(layer, w):
    needs_opset(layer, w, 19, "DeformConv")
    w.node("DeformConv", [w.name(t) for t in layer.inputs], [w.name(layer.output)], name=layer.name, **layer.attrs)


op(
    "DeformConv",
    infer,
    compute_reference,
    attrs={"group": 1, "offset_group": 1, "strides": INTS, "dilations": INTS, "pads": INTS, "kernel_shape": INTS},
    to_onnx=to_onnx,
    samples=[
        (["f32[1,2,5,6]", "const f32[3,2,2,3]", "f32[1,12,4,4]"], {}),
        (["f32[2,4,6,6]", "const f32[6,2,3,3]", "f32[2,36,3,3]", "const f32[6]", "f32[2,18,3,3]"],
         {"group": 2, "offset_group": 2, "strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[1,1,7,7]", "const f32[1,1,2,2]", "f32[1,8,5,5]"], {"dilations": (2, 2)}),
    ],
)  # fmt: skip
