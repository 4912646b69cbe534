"""Vision Transformer B/16 (Dosovitskiy et al. 2020) under torchvision's names; attention decomposed as by the exporter."""

import math

from whet.zoo.layers import conv, gelu, gemm, layer_norm, linear
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter, make_normal_init

EPS = 1e-6


def vit(g: GraphWriter, *, layers: int = 12, hidden: int = 768, heads: int = 12, patch: int = 16, image: int = 224,
        num_classes: int = 1000, decomposed_layer_norm: bool = False) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 3, image, image))
    tokens = (image // patch) ** 2
    batch = g.batch_of(x)
    x = conv(g, x, "conv_proj", 3, hidden, patch, stride=patch, bias=True, gain=0.5)
    x = g.op("Transpose", g.op("Reshape", x, g.shape(batch, hidden, tokens)), perm=[0, 2, 1])
    x = g.op("Concat", _build_class_token(g, batch, hidden), x, axis=1)
    with g.scope("encoder"):
        x = g.op("Add", x, g.weight("pos_embedding", (1, tokens + 1, hidden), make_normal_init(0.2)))
        with g.scope("layers"):
            for i in range(layers):
                with g.scope(f"encoder_layer_{i}"):
                    x = _build_layer(g, x, hidden, heads, tokens + 1, decomposed_layer_norm)
        x = layer_norm(g, x, "ln", hidden, eps=EPS, decomposed=decomposed_layer_norm)
    x = g.op("Gather", x, g.const(0), axis=1)
    with g.scope("heads"):
        g.output(gemm(g, x, "head", hidden, num_classes), "output", (g.batch, num_classes))


def _build_class_token(g: GraphWriter, batch: int | str, hidden: int) -> str:
    """The class token repeated over the batch, with the chain by which `expand(n, -1, -1)` exports."""
    token = g.weight("class_token", (1, 1, hidden), make_normal_init(0.5))
    if isinstance(batch, int):
        return g.op("Expand", token, g.const([batch, 1, hidden]))
    wanted = g.op("Reshape", g.shape(batch, -1, -1), g.const([-1]))
    ones = _build_ones(g, g.op("Shape", wanted))
    kept = g.op("Equal", wanted, g.op("Mul", ones, g.const(-1)))
    return g.op("Expand", token, g.op("Where", kept, ones, wanted))


def _build_ones(g: GraphWriter, shape: str) -> str:
    from onnx import TensorProto, helper

    return g.op("ConstantOfShape", shape, value=helper.make_tensor("value", TensorProto.INT64, [1], [1]))


def _build_layer(g: GraphWriter, x: str, hidden: int, heads: int, tokens: int, decomposed: bool) -> str:
    y = layer_norm(g, x, "ln_1", hidden, eps=EPS, decomposed=decomposed)
    with g.scope("self_attention"):
        y = _build_attention(g, y, hidden, heads, tokens)
    x = g.op("Add", y, x)
    y = layer_norm(g, x, "ln_2", hidden, eps=EPS, decomposed=decomposed)
    with g.scope("mlp"):
        y = linear(g, y, "0", hidden, 4 * hidden, std=math.sqrt(1 / hidden))
        with g.scope("1"):
            y = gelu(g, y)
        y = linear(g, y, "3", 4 * hidden, hidden, std=math.sqrt(0.5 / hidden) / 2)
    return g.op("Add", x, y)


def _build_attention(g: GraphWriter, x: str, hidden: int, heads: int, tokens: int) -> str:
    """x[N,tokens,hidden] -> the same shape: q, k, v from one projection; q and k are each scaled by the square root of the scale."""
    size = hidden // heads
    batch = g.batch_of(x)
    bias = g.weight("in_proj_bias", (3 * hidden,), make_normal_init(0.02))
    weight = g.anonymous_weight("MatMul", "in_proj_weight", (hidden, 3 * hidden), make_normal_init(math.sqrt(1 / hidden)))
    qkv = g.op("Reshape", g.op("Add", g.op("MatMul", x, weight), bias), g.shape(batch, tokens, 3, heads, size))
    qkv = g.op("Transpose", qkv, perm=[2, 0, 3, 1, 4])
    query, key, value = (g.op("Gather", qkv, g.const(i), axis=0) for i in range(3))
    scale = g.const(size ** -0.25, "float32")
    scores = g.op("MatMul", g.op("Mul", query, scale), g.op("Mul", g.op("Transpose", key, perm=[0, 1, 3, 2]), scale))
    context = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
    context = g.op("Reshape", g.op("Transpose", context, perm=[0, 2, 1, 3]), g.shape(batch, tokens, hidden))
    return linear(g, context, "out_proj", hidden, hidden, std=math.sqrt(1 / hidden) / 2)


register("vit_b_16", vit, about="vision transformer, base, patches of 16x16", parameters=86_567_656)
