"""Operation counts against published or hand-counted values."""

import numpy as np
import pytest

from whet.network import Network, parse_type
from whet.ops import OPS, sample_layer
from whet.ops._cost import count_network_operations, count_operations


def layer_of(op, *shapes, weights=(), **attrs):
    net = Network("one")
    inputs = [net.add_input(f"x{i}", parse_type(s)) for i, s in enumerate(shapes)]
    inputs += [net.constant(np.zeros([int(d) for d in w.split("x")], "f4"), "w") for w in weights]
    return net.add_layer(op, inputs, attrs)


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (lambda: layer_of("Conv", "f32[1,3,8,8]", weights=["4x3x3x3"], pads=(1, 1, 1, 1)), 2 * 4 * 64 * 27),
        (lambda: layer_of("Conv", "f32[2,8,8,8]", weights=["8x1x3x3", "8"], group=8, pads=(1, 1, 1, 1)), 2 * 8 * 64 * (2 * 9 + 1)),
        (lambda: layer_of("ConvTranspose", "f32[1,4,5,5]", weights=["4x6x2x2"], strides=(2, 2)), 2 * 4 * 25 * 6 * 4),
        (lambda: layer_of("Gemm", "f32[3,5]", weights=["5x7", "7"]), 3 * 7 * 11),
        (lambda: layer_of("MatMul", "f32[2,3,5]", weights=["5x7"]), 2 * 2 * 3 * 5 * 7),
        (lambda: layer_of("Relu", "f32[2,3]"), 6),
        (lambda: layer_of("Add", "f32[2,3]", "f32[2,3]"), 6),
        (lambda: layer_of("Transpose", "f32[2,3]", perm=(1, 0)), 0),
        (lambda: layer_of("ReduceSum", "f32[2,3]"), 6),
        (lambda: layer_of("MaxPool", "f32[1,2,4,4]", kernel_shape=(2, 2), strides=(2, 2)), 2 * 4 * 4),
    ],
)
def test_by_hand(layer, count):
    assert count_operations(layer()) == count


def test_resnet18_has_the_published_operations():
    from whet import zoo
    from whet.frontends import network_from_onnx

    net = network_from_onnx(zoo.build("resnet18"))
    found = count_network_operations(net, {s: 1 for s in net.symbols()})
    assert found == pytest.approx(2 * 1.82e9, rel=0.01)  # 1.82 GMAC (torchvision's table: 1.81)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_can_be_counted(name):
    for s in OPS[name].samples:
        _, layer, _ = sample_layer(name, s)
        assert count_operations(layer) >= 0
