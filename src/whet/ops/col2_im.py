"""Col2Im: adds the columns x [N, C * product(block), L] into images [N, C, *image]; the transpose of taking a window's values apart (im2col).

Inputs 1 and 2 are the image's and the block's sizes.
"""

from itertools import product
from math import prod

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import INTS, op, require_known_ints, to_ints
from whet.ops._types import require_numeric_input
from whet.ops._window import check_window, compute_out_size


def _get_window_attributes(attrs, r):
    return tuple(attrs.get("strides") or (1,) * r), tuple(attrs.get("dilations") or (1,) * r), tuple(attrs.get("pads") or (0,) * 2 * r)


def infer(layer):
    t = require_numeric_input(layer) or layer.inputs[0].type
    image, block = require_known_ints(layer, 1, "image_shape"), require_known_ints(layer, 2, "block_shape")
    if not all(isinstance(n, int) for n in (*image, *block)):
        raise NetworkError("sizes of the image and of the block must be known numbers, not symbols")
    r = len(image)
    strides, dilations, pads = _get_window_attributes(layer.attrs, r)
    if t.rank != 3 or len(block) != r or len(strides) != r or len(dilations) != r or len(pads) != 2 * r:
        raise NetworkError(f"columns {t}, an image of {image}, blocks of {block}, strides {strides}, pads {pads} do not match")
    check_window(block, image, [n + pads[i] + pads[r + i] for i, n in enumerate(image)])
    counts = [compute_out_size(n, k, s, d, pads[i], pads[r + i]) for i, (n, k, s, d) in enumerate(zip(image, block, strides, dilations, strict=True))]
    if isinstance(t.shape[2], int) and all(isinstance(n, int) for n in counts) and prod(counts) != t.shape[2]:
        raise NetworkError(f"{t} has {t.shape[2]} columns, an image of {image} has {prod(counts)} blocks")
    if isinstance(t.shape[1], int) and t.shape[1] % prod(block):
        raise NetworkError(f"{t.shape[1]} values per column are no multiple of the block's {prod(block)}")
    return t.with_shape((t.shape[0], t.shape[1] // prod(block), *image))


def compute_reference(layer, x, image, block):
    image, block = to_ints(image), to_ints(block)
    r = len(image)
    strides, dilations, pads = _get_window_attributes(layer.attrs, r)
    counts = [compute_out_size(n, k, s, d, pads[i], pads[r + i]) for i, (n, k, s, d) in enumerate(zip(image, block, strides, dilations, strict=True))]
    columns = x.reshape(x.shape[0], -1, *block, *counts)
    y = np.zeros((x.shape[0], columns.shape[1], *(n + pads[i] + pads[r + i] for i, n in enumerate(image))), x.dtype)
    for at in product(*map(range, block)):
        where = tuple(slice(a * d, a * d + (n - 1) * s + 1, s) for a, d, n, s in zip(at, dilations, counts, strides, strict=True))
        y[(slice(None), slice(None), *where)] += columns[(slice(None), slice(None), *at)]
    return y[(slice(None), slice(None), *(slice(pads[i], pads[i] + n) for i, n in enumerate(image)))]


op(
    "Col2Im",
    infer,
    compute_reference,
    attrs={"strides": INTS, "dilations": INTS, "pads": INTS},
    samples=[
        (["f32[1,5,5]", np.array([5, 5]), np.array([1, 5])], {}),
        (["f32[2,27,16]", np.array([6, 6]), np.array([3, 3])], {}),
        (["f32[1,8,9]", np.array([6, 5]), np.array([2, 2])], {"strides": (2, 2), "pads": (0, 0, 0, 1)}),
        (["f32[1,4,9]", np.array([5, 5]), np.array([2, 2])], {"dilations": (2, 2)}),
    ],
)
