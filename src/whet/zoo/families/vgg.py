"""VGG-16 (Simonyan and Zisserman 2014), as in torchvision: 3x3 convolutions with biases, and three large linear layers."""

from whet.zoo.layers import conv, gemm, max_pool, relu
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter

STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))  # output channels in units of `width`; a 2x2 maximum follows each stage


def vgg16(g: GraphWriter, *, num_classes: int = 1000, image: int = 224, width: int = 64, hidden: int = 4096) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits); `image` is a multiple of 32."""
    x, channels, index = g.input("input", (g.batch, 3, image, image)), 3, 0
    with g.scope("features"):
        for stage in STAGES:
            for factor in stage:
                x = relu(g, conv(g, x, str(index), channels, factor * width, 3, padding=1, bias=True), str(index + 1))
                channels, index = factor * width, index + 2
            with g.scope(str(index)):
                x = max_pool(g, x, 2, stride=2)
            index += 1
    features = channels * (image // 32) ** 2
    x = g.op("Flatten", x, axis=1)
    with g.scope("classifier"):
        x = relu(g, gemm(g, x, "0", features, hidden), "1")
        x = relu(g, gemm(g, x, "3", hidden, hidden, gain=2.0), "4")
        x = gemm(g, x, "6", hidden, num_classes, gain=2.0)
    g.output(x, "output", (g.batch, num_classes))


register("vgg16", vgg16, about="thirteen 3x3 convolutions and three linear layers, 138 M parameters", parameters=138_357_544)
