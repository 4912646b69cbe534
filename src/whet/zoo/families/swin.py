"""Swin Transformer (Liu et al. 2021) under torchvision's names: attention within windows, shifted in every second block.

Windows are cut out by Reshape and Transpose, the shift is a Slice and Concat along each axis, the relative position bias is gathered from
its table in the graph, and the mask between shifted windows is a constant.
"""

import math

import numpy as np

from whet.errors import UsageError
from whet.zoo.layers import conv, gelu, gemm, layer_norm, linear
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter, make_normal_init

EPS = 1e-5
FAR = 2**31 - 1


def swin(g: GraphWriter, *, blocks: tuple[int, ...] = (2, 2, 6, 2), heads: tuple[int, ...] = (3, 6, 12, 24), hidden: int = 96,
         window: int = 7, num_classes: int = 1000, image: int = 224, decomposed_layer_norm: bool = False) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits); UsageError unless image / 32 is a multiple of `window`."""
    if image % (32 * window):
        raise UsageError(f"Swin's images are multiples of 32 * window = {32 * window} pixels, not {image}; give another image or window")
    x = g.input("input", (g.batch, 3, image, image))
    side, width = image // 4, hidden
    with g.scope("features"):
        with g.scope("0"):
            x = conv(g, x, "0", 3, hidden, 4, stride=4, bias=True, gain=1.0)
            x = layer_norm(g, g.op("Transpose", x, perm=[0, 2, 3, 1]), "2", hidden, eps=EPS, decomposed=decomposed_layer_norm)
        for stage, count in enumerate(blocks):
            if stage:
                with g.scope(str(2 * stage)):
                    x = _build_merging(g, x, width, decomposed_layer_norm)
                side, width = side // 2, 2 * width
            with g.scope(str(2 * stage + 1)):
                for i in range(count):
                    shift = window // 2 if i % 2 and side > window else 0
                    with g.scope(str(i)):
                        x = _build_block(g, x, width, heads[stage], side, window, shift, decomposed_layer_norm)
    x = layer_norm(g, x, "norm", width, eps=EPS, decomposed=decomposed_layer_norm)
    x = g.op("GlobalAveragePool", g.op("Transpose", x, perm=[0, 3, 1, 2]))
    g.output(gemm(g, g.op("Flatten", x, axis=1), "head", width, num_classes), "output", (g.batch, num_classes))


def _build_merging(g: GraphWriter, x: str, width: int, decomposed: bool) -> str:
    """x[N,H,W,C] -> [N,H/2,W/2,2C]: concatenates the four pixels of each 2x2, normalizes and projects."""
    def select_every_second(row: int, column: int) -> str:
        rows = g.op("Slice", x, g.const([row]), g.const([FAR]), g.const([1]), g.const([2]))
        return g.op("Slice", rows, g.const([column]), g.const([FAR]), g.const([2]), g.const([2]))

    x = g.op("Concat", *(select_every_second(r, c) for c in (0, 1) for r in (0, 1)), axis=3)
    x = layer_norm(g, x, "norm", 4 * width, eps=EPS, decomposed=decomposed)
    with g.scope("reduction"):
        return g.op("MatMul", x, g.anonymous_weight("MatMul", "weight", (4 * width, 2 * width), make_normal_init(math.sqrt(1 / (4 * width)))))


def _build_block(g: GraphWriter, x: str, width: int, heads: int, side: int, window: int, shift: int, decomposed: bool) -> str:
    y = layer_norm(g, x, "norm1", width, eps=EPS, decomposed=decomposed)
    with g.scope("attn"):
        y = _build_attention(g, y, width, heads, side, window, shift)
    x = g.op("Add", x, y)
    y = layer_norm(g, x, "norm2", width, eps=EPS, decomposed=decomposed)
    with g.scope("mlp"):
        y = linear(g, y, "0", width, 4 * width, std=math.sqrt(1 / width))
        with g.scope("1"):
            y = gelu(g, y)
        y = linear(g, y, "3", 4 * width, width, std=math.sqrt(0.5 / width) / 2)
    return g.op("Add", x, y)


def _build_attention(g: GraphWriter, x: str, width: int, heads: int, side: int, window: int, shift: int) -> str:
    """Attention within windows: x[N,side,side,width] -> the same shape."""
    count, tokens, size = side // window, window * window, width // heads
    if shift:
        x = _build_roll(g, x, shift)
    x = g.op("Reshape", x, g.const([-1, count, window, count, window, width]))
    x = g.op("Reshape", g.op("Transpose", x, perm=[0, 1, 3, 2, 4, 5]), g.const([-1, tokens, width]))
    qkv = linear(g, x, "qkv", width, 3 * width, std=math.sqrt(1 / width))
    qkv = g.op("Transpose", g.op("Reshape", qkv, g.const([-1, tokens, 3, heads, size])), perm=[2, 0, 3, 1, 4])
    query, key, value = (g.op("Gather", qkv, g.const(i), axis=0) for i in range(3))
    scores = g.op("MatMul", g.op("Mul", query, g.const(size**-0.5, "float32")), g.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = g.op("Add", scores, _build_position_bias(g, heads, window))
    if shift:
        scores = g.op("Reshape", scores, g.const([-1, count * count, heads, tokens, tokens]))
        scores = g.op("Add", scores, g.const(_compute_mask(side, window, shift), "float32"))
        scores = g.op("Reshape", scores, g.const([-1, heads, tokens, tokens]))
    y = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    y = linear(g, g.op("Reshape", y, g.const([-1, tokens, width])), "proj", width, width, std=math.sqrt(1 / width) / 2)
    y = g.op("Reshape", y, g.const([-1, count, count, window, window, width]))
    y = g.op("Reshape", g.op("Transpose", y, perm=[0, 1, 3, 2, 4, 5]), g.const([-1, side, side, width]))
    return _build_roll(g, y, -shift) if shift else y


def _build_roll(g: GraphWriter, x: str, shift: int) -> str:
    """x[N,H,W,C] rotated up and left by `shift` (down and right if negative)."""
    for axis in (1, 2):
        parts = [g.op("Slice", x, g.const([a]), g.const([b]), g.const([axis]), g.const([1])) for a, b in ((shift, FAR), (0, shift))]
        x = g.op("Concat", *parts, axis=axis)
    return x


def _build_position_bias(g: GraphWriter, heads: int, window: int) -> str:
    """The bias [1,heads,tokens,tokens], gathered from the table of relative positions."""
    tokens = window * window
    table = g.weight("relative_position_bias_table", ((2 * window - 1) ** 2, heads), make_normal_init(0.5))
    places = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    apart = places[:, :, None] - places[:, None, :] + window - 1
    index = g.table("relative_position_index", (apart[0] * (2 * window - 1) + apart[1]).reshape(-1))
    bias = g.op("Reshape", g.op("Gather", table, index, axis=0), g.const([tokens, tokens, heads]))
    return g.op("Unsqueeze", g.op("Transpose", bias, perm=[2, 0, 1]), g.const([0]))


def _compute_mask(side: int, window: int, shift: int) -> np.ndarray:
    """[1,windows,1,tokens,tokens]: -100 between pixels that the shift moved together from opposite edges."""
    region = np.zeros((side, side))
    edges = (slice(0, side - window), slice(side - window, side - shift), slice(side - shift, side))
    for i, rows in enumerate(edges):
        for j, columns in enumerate(edges):
            region[rows, columns] = 3 * i + j
    count = side // window
    cut = region.reshape(count, window, count, window).transpose(0, 2, 1, 3).reshape(count * count, window * window)
    return np.where(cut[:, None, :] != cut[:, :, None], -100.0, 0.0)[None, :, None]


register("swin_t", swin, about="transformer over shifted windows, tiny", parameters=28_288_354)
