"""ConvNeXt (Liu et al. 2022), as in torchvision: depthwise 7x7, layer norm over channels, a pointwise MLP, a learned scale per channel."""

import math

from whet.zoo.layers import conv, gelu, gemm, layer_norm, linear
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter, make_normal_init

EPS = 1e-6


def convnext(g: GraphWriter, *, blocks: tuple[int, ...] = (3, 3, 9, 3), widths: tuple[int, ...] = (96, 192, 384, 768),
             num_classes: int = 1000, image: int = 224, decomposed_layer_norm: bool = False) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 3, image, image))
    with g.scope("features"):
        with g.scope("0"):
            x = conv(g, x, "0", 3, widths[0], 4, stride=4, bias=True, gain=1.0)
            x = _build_norm_2d(g, x, "1", widths[0], decomposed_layer_norm)
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            if stage:
                with g.scope(str(2 * stage)):
                    x = _build_norm_2d(g, x, "0", widths[stage - 1], decomposed_layer_norm)
                    x = conv(g, x, "1", widths[stage - 1], width, 2, stride=2, bias=True, gain=1.0)
            with g.scope(str(2 * stage + 1)):
                for i in range(count):
                    with g.scope(str(i)):
                        x = _build_block(g, x, width, decomposed_layer_norm)
    with g.scope("avgpool"):
        x = g.op("GlobalAveragePool", x)
    with g.scope("classifier"):
        x = g.op("Flatten", _build_norm_2d(g, x, "0", widths[-1], decomposed_layer_norm), axis=1)
        g.output(gemm(g, x, "2", widths[-1], num_classes), "output", (g.batch, num_classes))


def _build_norm_2d(g: GraphWriter, x: str, name: str, width: int, decomposed: bool) -> str:
    """Layer norm over the channels of x[N,C,H,W], by transposing to channels last and back."""
    y = layer_norm(g, g.op("Transpose", x, perm=[0, 2, 3, 1]), name, width, eps=EPS, decomposed=decomposed)
    return g.op("Transpose", y, perm=[0, 3, 1, 2])


def _build_block(g: GraphWriter, x: str, width: int, decomposed: bool) -> str:
    scale = g.weight("layer_scale", (width, 1, 1), make_normal_init(0.05, 0.3))    # 1e-6 before training, near this after it
    with g.scope("block"):
        y = conv(g, x, "0", width, width, 7, padding=3, groups=width, bias=True, gain=1.0)
        y = layer_norm(g, g.op("Transpose", y, perm=[0, 2, 3, 1]), "2", width, eps=EPS, decomposed=decomposed)
        y = linear(g, y, "3", width, 4 * width, std=math.sqrt(1 / width))
        with g.scope("4"):
            y = gelu(g, y)
        y = linear(g, y, "5", 4 * width, width, std=math.sqrt(0.5 / width))
        y = g.op("Transpose", y, perm=[0, 3, 1, 2])
    return g.op("Add", g.op("Mul", scale, y), x)


register("convnext_tiny", convnext, about="convolutions with a transformer's layout, tiny", parameters=28_589_128)
