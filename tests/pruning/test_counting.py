"""Parameters are trainable values: a detector's decoding grids, a Resize's scales and batch-norm statistics are not counted."""

import numpy as np

from whet import zoo
from whet.frontends import network_from_onnx
from whet.network import Network, parse_type
from whet.pruning import count_params
from whet.pruning.counting import list_trainable_constants


def head_network() -> Network:
    """Positions added to patches, a product with a bias, a convolution, an upsampling, and boxes decoded with a grid and anchors."""
    net = Network("head")

    def w(name, *shape):
        return net.constant(np.ones(shape, np.float32), name)

    x = net.add("Add", net.add_input("x", parse_type("f32[1,6,8]")), w("positions", 1, 6, 8))
    x = net.add("Add", net.add("MatMul", x, w("product", 8, 8)), w("bias", 8))
    x = net.add("Reshape", x, net.constant(np.array([1, 8, 2, 3]), "shape"))
    x = net.add("Resize", x, None, w("twice", 4), mode="nearest")
    x = net.add("Conv", x, w("filters", 4, 8, 1, 1), w("filter_bias", 4))
    x = net.add("Mul", net.add("Add", net.add("Sigmoid", x), w("grid", 1, 4, 2, 3)), w("anchors", 4, 2, 3))
    net.mark_output(net.add("Mul", x, w("gain", 4, 1, 1)))
    return net


def test_grids_and_settings_are_not_counted():
    net = head_network()
    names = {t.name for t in list_trainable_constants(net)}
    assert names == {"positions", "product", "bias", "filters", "filter_bias", "gain"}, "a per-channel factor may be trained"
    assert count_params(net) == 48 + 64 + 8 + 32 + 4 + 4


def test_a_constant_used_as_grid_and_as_weight_counts():
    net = head_network()
    grid = net.tensor("grid")
    net.mark_output(net.add("MatMul", grid, net.constant(np.ones((3, 2), np.float32), "read")))
    assert {"grid", "read"} <= {t.name for t in list_trainable_constants(net)}


def test_yolov5s_has_the_published_number():
    assert count_params(network_from_onnx(zoo.build("yolov5s"))) == zoo.info("yolov5s").parameters == 7_235_389
