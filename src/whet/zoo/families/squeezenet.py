"""SqueezeNet 1.1 (Iandola et al. 2016), as in torchvision: fire modules that end in a Concat; no batch norm."""

from whet.zoo.layers import conv, max_pool, relu
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter

FIRES = {3: (64, 16, 64), 4: (128, 16, 64), 6: (128, 32, 128), 7: (256, 32, 128), 9: (256, 48, 192), 10: (384, 48, 192),
         11: (384, 64, 256), 12: (512, 64, 256)}          # index in features: (input, squeezed, expanded) channels


def squeezenet1_1(g: GraphWriter, *, num_classes: int = 1000, image: int = 224) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 3, image, image))
    with g.scope("features"):
        x = relu(g, conv(g, x, "0", 3, 64, 3, stride=2, bias=True, gain=1.0), "1")
        for index in range(2, 13):
            with g.scope(str(index)):
                x = _build_fire(g, x, *FIRES[index]) if index in FIRES else max_pool(g, x, 3, stride=2, ceil=True)
    with g.scope("classifier"):
        x = relu(g, conv(g, x, "1", 512, num_classes, 1, bias=True), "2")
        with g.scope("3"):
            x = g.op("GlobalAveragePool", x)
    g.output(g.op("Flatten", x, axis=1), "output", (g.batch, num_classes))


def _build_fire(g: GraphWriter, x: str, cin: int, squeezed: int, expanded: int) -> str:
    x = relu(g, conv(g, x, "squeeze", cin, squeezed, 1, bias=True), "squeeze_activation")
    one = relu(g, conv(g, x, "expand1x1", squeezed, expanded, 1, bias=True), "expand1x1_activation")
    three = relu(g, conv(g, x, "expand3x3", squeezed, expanded, 3, padding=1, bias=True), "expand3x3_activation")
    return g.op("Concat", one, three, axis=1)


register("squeezenet1_1", squeezenet1_1, about="fire modules, no batch norm, 1.2 M parameters", parameters=1_235_496)
