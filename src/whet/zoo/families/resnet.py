"""ResNet and ResNeXt (He et al. 2015, Xie et al. 2016), as in torchvision: stride on the 3x3 convolution of a bottleneck."""

from whet.zoo.layers import batch_norm, conv, flatten_head, gemm, max_pool, relu
from whet.zoo.registry import register
from whet.zoo.writer import GraphWriter

BRANCH = 0.3                          # gamma at the end of a residual branch: 50 layers stay within one order of magnitude


def resnet(g: GraphWriter, *, bottleneck: bool, blocks: tuple[int, ...], groups: int, group_width: int,
           num_classes: int = 1000, image: int = 224, width: int = 64) -> None:
    """input[N,3,image,image] -> output[N,num_classes] (logits); `width` channels in the first stage, doubled by each following one."""
    x = g.input("input", (g.batch, 3, image, image))
    x = relu(g, batch_norm(g, conv(g, x, "conv1", 3, width, 7, stride=2, padding=3, gain=1.0), "bn1", width))
    with g.scope("maxpool"):
        x = max_pool(g, x, 3, stride=2, padding=1)
    expansion = 4 if bottleneck else 1
    cin = width
    for stage, count in enumerate(blocks):
        planes = width << stage
        with g.scope(f"layer{stage + 1}"):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                with g.scope(str(block)):
                    x = _build_block(g, x, cin, planes, stride, bottleneck, groups, group_width)
                cin = planes * expansion
    g.output(gemm(g, flatten_head(g, x), "fc", cin, num_classes), "output", (g.batch, num_classes))


def _build_block(g: GraphWriter, x: str, cin: int, planes: int, stride: int, bottleneck: bool, groups: int, group_width: int) -> str:
    cout = planes * 4 if bottleneck else planes
    if bottleneck:
        width = planes * group_width // 64 * groups
        y = relu(g, batch_norm(g, conv(g, x, "conv1", cin, width, 1), "bn1", width))
        y = relu(g, batch_norm(g, conv(g, y, "conv2", width, width, 3, stride=stride, padding=1, groups=groups), "bn2", width))
        y = batch_norm(g, conv(g, y, "conv3", width, cout, 1), "bn3", cout, scale=BRANCH)
    else:
        y = relu(g, batch_norm(g, conv(g, x, "conv1", cin, planes, 3, stride=stride, padding=1), "bn1", planes))
        y = batch_norm(g, conv(g, y, "conv2", planes, cout, 3, padding=1), "bn2", cout, scale=BRANCH)
    if stride != 1 or cin != cout:
        with g.scope("downsample"):
            x = batch_norm(g, conv(g, x, "0", cin, cout, 1, stride=stride), "1", cout)
    return relu(g, g.op("Add", y, x))


def _register(name: str, about: str, parameters: int, bottleneck: bool, blocks: tuple[int, ...], groups: int = 1,
              group_width: int = 64) -> None:
    register(name, resnet, about=about, parameters=parameters, bottleneck=bottleneck, blocks=blocks, groups=groups,
             group_width=group_width)


_register("resnet18", "residual network of basic blocks, 18 layers", 11_689_512, False, (2, 2, 2, 2))
_register("resnet34", "residual network of basic blocks, 34 layers", 21_797_672, False, (3, 4, 6, 3))
_register("resnet50", "residual network of bottlenecks, 50 layers (v1.5)", 25_557_032, True, (3, 4, 6, 3))
_register("resnet101", "residual network of bottlenecks, 101 layers (v1.5)", 44_549_160, True, (3, 4, 23, 3))
_register("resnext50_32x4d", "ResNet-50 with 32 groups of width 4", 25_028_904, True, (3, 4, 6, 3), groups=32, group_width=4)
