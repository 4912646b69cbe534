"""DenseNet-121 (Huang et al. 2016), as in torchvision: batch norm and ReLU before each convolution, all features concatenated."""

from whet.zoo.layers import batch_norm, conv, gemm, max_pool, relu
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter

GROWTH, BOTTLENECK = 32, 128


def densenet121(g: GraphWriter, *, blocks: tuple[int, ...] = (6, 12, 24, 16), num_classes: int = 1000, image: int = 224) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 3, image, image))
    with g.scope("features"):
        x = relu(g, batch_norm(g, conv(g, x, "conv0", 3, 64, 7, stride=2, padding=3, gain=1.0), "norm0", 64), "relu0")
        with g.scope("pool0"):
            x = max_pool(g, x, 3, stride=2, padding=1)
        channels = 64
        for b, layers in enumerate(blocks):
            with g.scope(f"denseblock{b + 1}"):
                x = _build_dense_block(g, x, channels, layers)
            channels += layers * GROWTH
            if b < len(blocks) - 1:
                with g.scope(f"transition{b + 1}"):
                    x = relu(g, batch_norm(g, x, "norm", channels))
                    x = conv(g, x, "conv", channels, channels // 2, 1)
                    with g.scope("pool"):
                        x = g.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 0, 0], ceil_mode=0)
                channels //= 2
        x = batch_norm(g, x, "norm5", channels)
    x = g.op("Flatten", g.op("GlobalAveragePool", g.op("Relu", x)), axis=1)
    g.output(gemm(g, x, "classifier", channels, num_classes), "output", (g.batch, num_classes))


def _build_dense_block(g: GraphWriter, x: str, channels: int, layers: int) -> str:
    features = [x]
    for i in range(layers):
        width = channels + i * GROWTH
        with g.scope(f"denselayer{i + 1}"):
            y = g.op("Concat", *features, axis=1) if i else x
            y = conv(g, relu(g, batch_norm(g, y, "norm1", width), "relu1"), "conv1", width, BOTTLENECK, 1)
            y = conv(g, relu(g, batch_norm(g, y, "norm2", BOTTLENECK), "relu2"), "conv2", BOTTLENECK, GROWTH, 3, padding=1)
        features.append(y)
    return g.op("Concat", *features, axis=1)


register("densenet121", densenet121, about="every layer of a block reads all before it, by Concat", parameters=7_978_856)
