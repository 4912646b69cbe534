"""MobileNetV3-Large (Howard et al. 2019), as in torchvision: hard swish, squeeze and excitation with a hard sigmoid."""

from whet.zoo.layers import batch_norm, conv, flatten_head, gemm, hard_swish, relu, squeeze_excite
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter

# kernel, expanded channels, output channels, squeeze and excitation, hard swish, stride
BLOCKS = ((3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1), (5, 72, 40, True, False, 2),
          (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1), (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1),
          (3, 184, 80, False, True, 1), (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
          (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1))
EPS, BRANCH = 1e-3, 0.5


def mobilenet_v3_large(g: GraphWriter, *, num_classes: int = 1000, image: int = 224) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits)."""
    x = g.input("input", (g.batch, 3, image, image))
    with g.scope("features"):
        with g.scope("0"):
            x = _build_conv_bn(g, x, 3, 16, 3, stride=2, swish=True, gain=1.0)
        cin = 16
        for i, (kernel, hidden, cout, excite, swish, stride) in enumerate(BLOCKS):
            with g.scope(str(i + 1)):
                x = _build_inverted_residual(g, x, cin, hidden, cout, kernel, stride, excite, swish)
            cin = cout
        with g.scope("16"):
            x = _build_conv_bn(g, x, cin, 960, 1, swish=True, gain=1.0)
    x = flatten_head(g, x)
    with g.scope("classifier"):
        x = hard_swish(g, gemm(g, x, "0", 960, 1280), "1")
        g.output(gemm(g, x, "3", 1280, num_classes), "output", (g.batch, num_classes))


def _build_conv_bn(g: GraphWriter, x: str, cin: int, cout: int, kernel: int, *, stride: int = 1, groups: int = 1, swish: bool | None,
             gain: float, scale: float = 1.0) -> str:
    """Convolution, batch norm and an activation: hard swish, ReLU, or none if `swish` is None."""
    x = conv(g, x, "0", cin, cout, kernel, stride=stride, padding=kernel // 2, groups=groups, gain=gain)
    x = batch_norm(g, x, "1", cout, eps=EPS, scale=scale)
    return x if swish is None else hard_swish(g, x, "2") if swish else relu(g, x, "2")


def _build_inverted_residual(g: GraphWriter, x: str, cin: int, hidden: int, cout: int, kernel: int, stride: int, excite: bool,
                       swish: bool) -> str:
    shortcut, y, n = stride == 1 and cin == cout, x, 0
    with g.scope("block"):
        if hidden != cin:
            with g.scope("0"):
                y = _build_conv_bn(g, y, cin, hidden, 1, swish=swish, gain=1.0)
            n = 1
        with g.scope(str(n)):
            y = _build_conv_bn(g, y, hidden, hidden, kernel, stride=stride, groups=hidden, swish=swish, gain=2.0)
        if excite:
            n += 1
            with g.scope(str(n)):
                y = squeeze_excite(g, y, hidden, _round_to_eight(hidden / 4))
        with g.scope(str(n + 1)):     # the excitation multiplies by about 0.5; the larger gain compensates
            y = _build_conv_bn(g, y, hidden, cout, 1, swish=None, gain=10.0 if excite else 2.5, scale=BRANCH if shortcut else 1.0)
    return g.op("Add", y, x) if shortcut else y


def _round_to_eight(channels: float) -> int:
    """The nearest multiple of 8 that is at most a tenth smaller."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


register("mobilenet_v3_large", mobilenet_v3_large, about="inverted residuals with hard swish and squeeze-excitation",
         parameters=5_483_032)
