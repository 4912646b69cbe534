"""EfficientNet-B0 (Tan and Le 2019), as in torchvision: MBConv blocks with SiLU and squeeze and excitation."""

from whet.zoo.layers import SILU_GAIN, batch_norm, conv, flatten_head, gemm, silu, squeeze_excite
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter

# expansion, kernel, first stride, output channels, repeats
STAGES = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
          (6, 3, 1, 320, 1))
BRANCH = 0.5


def efficientnet_b0(g: GraphWriter, *, num_classes: int = 1000, image: int = 224) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 3, image, image))
    with g.scope("features"):
        with g.scope("0"):
            x = _build_conv_bn(g, x, 3, 32, 3, stride=2, gain=1.0)
        cin = 32
        for stage, (expand, kernel, stride, cout, repeats) in enumerate(STAGES):
            with g.scope(str(stage + 1)):
                for i in range(repeats):
                    with g.scope(str(i)):
                        x = _build_mbconv(g, x, cin, cout, expand, kernel, stride if i == 0 else 1)
                    cin = cout
        with g.scope("8"):
            x = _build_conv_bn(g, x, cin, 1280, 1, gain=1.0)
    x = flatten_head(g, x)
    with g.scope("classifier"):
        g.output(gemm(g, x, "1", 1280, num_classes), "output", (g.batch, num_classes))


def _build_conv_bn(g: GraphWriter, x: str, cin: int, cout: int, kernel: int, *, stride: int = 1, groups: int = 1, act: bool = True,
             gain: float, scale: float = 1.0) -> str:
    x = conv(g, x, "0", cin, cout, kernel, stride=stride, padding=kernel // 2, groups=groups, gain=gain)
    x = batch_norm(g, x, "1", cout, scale=scale)
    return silu(g, x, "2") if act else x


def _build_mbconv(g: GraphWriter, x: str, cin: int, cout: int, expand: int, kernel: int, stride: int) -> str:
    hidden, shortcut, y, n = cin * expand, stride == 1 and cin == cout, x, 0
    with g.scope("block"):
        if expand != 1:
            with g.scope("0"):
                y = _build_conv_bn(g, y, cin, hidden, 1, gain=1.0)
            n = 1
        with g.scope(str(n)):
            y = _build_conv_bn(g, y, hidden, hidden, kernel, stride=stride, groups=hidden, gain=SILU_GAIN)
        with g.scope(str(n + 1)):
            y = squeeze_excite(g, y, hidden, max(1, cin // 4), hard=False)
        with g.scope(str(n + 2)):     # the excitation multiplies by about 0.5; the larger gain compensates
            y = _build_conv_bn(g, y, hidden, cout, 1, act=False, gain=7.0, scale=BRANCH if shortcut else 1.0)
    return g.op("Add", y, x) if shortcut else y


register("efficientnet_b0", efficientnet_b0, about="MBConv blocks with SiLU and squeeze-excitation", parameters=5_288_548)
