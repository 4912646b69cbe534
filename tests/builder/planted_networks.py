"""The networks of the tests that plant wrong kernels: a Relu, then one operation, for batches of 1 to 8."""

import numpy as np

from whet.network import Network, parse_type

OPERATIONS = ("conv3x3", "conv1x1", "depthwise", "gemm", "transposed")
MIN, OPT, MAX = 1, 4, 8


def network(operation: str, integers: bool = False) -> Network:
    """Relu, then the operation with a bias, for batches of 1 to 8; with `integers` the result is quantized."""
    rng, net = np.random.default_rng(3), Network(operation)

    def weight(*shape):
        return net.constant(rng.standard_normal(shape).astype("f4"))

    x = net.add("Relu", net.add_input("x", parse_type("f32[N,8]" if operation == "gemm" else "f32[N,8,6,6]")))
    y = {
        "conv3x3": lambda: net.add("Conv", x, weight(8, 8, 3, 3), weight(8), pads=(1, 1, 1, 1)),
        "conv1x1": lambda: net.add("Conv", x, weight(8, 8, 1, 1), weight(8), strides=(2, 2)),
        "depthwise": lambda: net.add("Conv", x, weight(8, 1, 3, 3), weight(8), group=8),
        "gemm": lambda: net.add("Gemm", x, weight(8, 12), weight(12)),
        "transposed": lambda: net.add("ConvTranspose", x, weight(8, 8, 2, 2), weight(8), strides=(2, 2)),
    }[operation]()
    if integers:
        s, z = net.constant(np.float32(0.07)), net.constant(np.int8(0))
        y = net.add("DequantizeLinear", net.add("QuantizeLinear", y, s, z), s, z)
    net.mark_output(y, "y")
    return net
