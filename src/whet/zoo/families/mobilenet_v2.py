"""MobileNetV2 (Sandler et al. 2018), as in torchvision: inverted residuals, depthwise convolutions, ReLU6 as Clip."""

from whet.zoo.layers import batch_norm, conv, gemm, relu6
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
BRANCH = 0.5                          # gamma at the end of a branch with a shortcut


def mobilenet_v2(g: GraphWriter, *, num_classes: int = 1000, image: int = 224) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 3, image, image))
    with g.scope("features"):
        with g.scope("0"):
            x = _build_conv_bn_relu6(g, x, 3, 32, 3, stride=2, gain=1.0)
        cin, index = 32, 1
        for expand, cout, repeats, first_stride in STAGES:
            for i in range(repeats):
                with g.scope(str(index)):
                    x = _build_inverted_residual(g, x, cin, cout, first_stride if i == 0 else 1, expand)
                cin, index = cout, index + 1
        with g.scope(str(index)):
            x = _build_conv_bn_relu6(g, x, cin, 1280, 1, gain=1.0)
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    with g.scope("classifier"):
        g.output(gemm(g, x, "1", 1280, num_classes), "output", (g.batch, num_classes))


def _build_conv_bn_relu6(g: GraphWriter, x: str, cin: int, cout: int, kernel: int, *, stride: int = 1, groups: int = 1,
                   gain: float = 2.0) -> str:
    x = conv(g, x, "0", cin, cout, kernel, stride=stride, padding=kernel // 2, groups=groups, gain=gain)
    return relu6(g, batch_norm(g, x, "1", cout), "2")


def _build_inverted_residual(g: GraphWriter, x: str, cin: int, cout: int, stride: int, expand: int) -> str:
    hidden, shortcut = cin * expand, stride == 1 and cin == cout
    with g.scope("conv"):
        y, n = x, 0
        if expand != 1:
            with g.scope("0"):        # the input of a block is linear, so gain 1 keeps its variance
                y = _build_conv_bn_relu6(g, y, cin, hidden, 1, gain=1.0)
            n = 1
        with g.scope(str(n)):
            y = _build_conv_bn_relu6(g, y, hidden, hidden, 3, stride=stride, groups=hidden)
        y = conv(g, y, str(n + 1), hidden, cout, 1)
        y = batch_norm(g, y, str(n + 2), cout, scale=BRANCH if shortcut else 1.0)
    return g.op("Add", x, y) if shortcut else y


register("mobilenet_v2", mobilenet_v2, about="inverted residuals with depthwise convolutions, width 1.0", parameters=3_504_872)
