"""U-Net (Ronneberger et al. 2015) with padded convolutions and batch norms, upsampling by transposed convolutions, the usual modern form."""

from whet.zoo.layers import batch_norm, conv, max_pool, relu
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter, make_normal_init


def unet(g: GraphWriter, *, width: int = 64, num_classes: int = 2, image: int = 256) -> None:
    """input[N,3,image,image] -> output[N,num_classes,image,image] (logits); `image` is a multiple of 16."""
    x = g.input("input", (g.batch, 3, image, image))
    with g.scope("inc"):
        x = _build_double_conv(g, x, 3, width)
    skips = [x]
    for level in range(4):
        with g.scope(f"down{level + 1}"), g.scope("maxpool_conv"):
            with g.scope("0"):
                x = max_pool(g, x, 2, stride=2)
            with g.scope("1"):
                x = _build_double_conv(g, x, width << level, width << level + 1)
        skips.append(x)
    for level in range(4):
        cin = width << 4 - level
        with g.scope(f"up{level + 1}"):
            x = _build_upsampling(g, x, cin)
            x = g.op("Concat", skips[3 - level], x, axis=1)
            with g.scope("conv"):
                x = _build_double_conv(g, x, cin, cin // 2)
    with g.scope("outc"):
        x = conv(g, x, "conv", width, num_classes, 1, bias=True, gain=1.0)
    g.output(x, "output", (g.batch, num_classes, image, image))


def _build_double_conv(g: GraphWriter, x: str, cin: int, cout: int) -> str:
    with g.scope("double_conv"):
        x = relu(g, batch_norm(g, conv(g, x, "0", cin, cout, 3, padding=1, gain=1.0 if cin == 3 else 2.0), "1", cout), "2")
        return relu(g, batch_norm(g, conv(g, x, "3", cout, cout, 3, padding=1), "4", cout), "5")


def _build_upsampling(g: GraphWriter, x: str, cin: int) -> str:
    """Twice the height and width at half the channels."""
    with g.scope("up"):
        weight = g.weight("weight", (cin, cin // 2, 2, 2), make_normal_init((2 / cin) ** 0.5))
        bias = g.weight("bias", (cin // 2,), make_normal_init(0.02))
        return g.op("ConvTranspose", x, weight, bias, kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 0, 0], dilations=[1, 1], group=1)


register("unet", unet, about="segmentation, encoder and decoder joined by Concat, transposed convolutions", parameters=31_037_698)
