"""GridSample: x [N, C, *spatial] sampled at the coordinates of a grid [N, *out, dims] in -1 to 1, last axis first (x, y, ...)."""

from itertools import product

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import Couple, op
from whet.ops._types import may_equal, require_one_float_type

MODES, PADDINGS = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")


def infer(layer):
    x, grid = layer.inputs
    require_one_float_type(layer, 1)
    r = x.type.rank - 2
    if r < 1 or grid.type.rank != r + 2 or not may_equal(grid.shape, (x.shape[0], *grid.shape[1:-1], r)):
        raise NetworkError(f"a grid {grid.type} does not match {x.type}")
    if layer.attrs["mode"] not in MODES or layer.attrs["padding_mode"] not in PADDINGS or (layer.attrs["mode"] == "cubic" and r != 2):
        raise NetworkError(f"mode is one of {MODES} (cubic in two dimensions), padding_mode of {PADDINGS}")
    return x.type.with_shape((*x.shape[:2], *grid.shape[1:-1]))


def map_into_axis(at, n, padding, aligned):
    """Coordinates mapped into the axis by border or reflection padding."""
    if padding == "border":
        return np.clip(at, 0, n - 1)
    low, high = (0, n - 1) if aligned else (-0.5, n - 0.5)
    if high == low:
        return np.zeros_like(at)
    at = np.abs(at - low) % (2 * (high - low))
    return np.clip(np.where(at > high - low, 2 * (high - low) - at, at) + low, 0, n - 1)


def compute_reference(layer, x, grid):
    a, r = layer.attrs, x.ndim - 2
    aligned = bool(a["align_corners"])
    sizes = x.shape[2:]
    at = [grid[..., r - 1 - i] for i in range(r)]
    at = [(g + 1) / 2 * (n - 1) if aligned else ((g + 1) * n - 1) / 2 for g, n in zip(at, sizes, strict=True)]
    if a["padding_mode"] != "zeros" and a["mode"] != "cubic":
        at = [map_into_axis(g, n, a["padding_mode"], aligned) for g, n in zip(at, sizes, strict=True)]
    taps = [_list_taps(g, a["mode"]) for g in at]  # per axis: [(indices, weights)]
    y = 0
    for chosen in product(*taps):
        index, weight, valid = [], 1, True
        for (places, wt), n in zip(chosen, sizes, strict=True):
            if a["padding_mode"] == "zeros":
                valid = valid & (places >= 0) & (places < n)
            else:
                places = map_into_axis(places, n, a["padding_mode"], aligned)
            index.append(np.clip(np.nan_to_num(places), 0, n - 1).astype(np.intp))
            weight = weight * wt
        batch = np.arange(x.shape[0]).reshape(-1, *(1,) * r)
        picked = np.moveaxis(x[(batch, slice(None), *index)], -1, 1)
        y = y + picked * np.where(valid, weight, 0)[:, None].astype(x.dtype)
    return y.astype(x.dtype)


def _list_taps(at, mode):
    if mode == "nearest":
        return [(np.rint(at), np.ones_like(at))]
    first = np.floor(at)
    t = at - first
    if mode == "linear":
        return [(first, 1 - t), (first + 1, t)]
    c = -0.75
    far = [((c * d - 5 * c) * d + 8 * c) * d - 4 * c for d in (t + 1, 2 - t)]
    near = [((c + 2) * d - (c + 3)) * d * d + 1 for d in (t, 1 - t)]
    return [(first - 1, far[0]), (first, near[0]), (first + 1, near[1]), (first + 2, far[1])]


def read(node, g):
    """Up to opset 19 the modes are named bilinear and bicubic."""
    names = {"bilinear": "linear", "bicubic": "cubic"}
    mode = node.attrs.get("mode", "linear")
    return node.add(g, "GridSample", *node.inputs, **{**node.attrs, "mode": names.get(mode, mode)})


op(
    "GridSample",
    infer,
    compute_reference,
    attrs={"mode": "linear", "padding_mode": "zeros", "align_corners": 0},
    couples=lambda layer: [
        Couple(layer.inputs[0], 0, layer.output, 0),
        Couple(layer.inputs[1], 0, layer.output, 0),
        Couple(layer.inputs[0], 1, layer.output, 1),
    ],
    onnx=read,
    samples=[
        (["f32[2,3,5,6]", "f32[2,4,7,2]"], {}),
        (["f32[1,3,5,6]", "f32[1,4,7,2]"], {"padding_mode": "border", "align_corners": 1}),
        (["f32[1,3,5,6]", "f32[1,4,7,2]"], {"padding_mode": "reflection", "mode": "nearest"}),
        (["f32[1,2,5,6]", "f32[1,4,3,2]"], {"mode": "cubic"}),
        (["f32[1,2,4,5,6]", "f32[1,2,3,4,3]"], {}),
    ],
)
