"""A small network that replaces ResNet-18 in tests of the documentation: its first layer has the same name, and channels can be cut.

    python tests/support/standin_model.py FILE.onnx
"""

import sys

import numpy as np

from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type


def standin() -> Network:
    """Three convolutions of 64 channels on 32x32 pixels, one of them with a residual, and a linear layer: input f32[N,1,32,32], output [N,10]."""
    rng = np.random.default_rng(0)
    net = Network("small")

    def weight(*shape: int):
        return net.constant((rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32), "w")

    x = net.add_input("input", parse_type("f32[N,1,32,32]"))
    a = net.add("Relu", net.add("Conv", x, weight(64, 1, 3, 3), pads=(1,) * 4, name="/conv1/Conv"), name="/relu1/Relu")
    b = net.add("Relu", net.add("Conv", a, weight(64, 64, 3, 3), pads=(1,) * 4, name="/conv2/Conv"), name="/relu2/Relu")
    c = net.add("Add", net.add("Conv", b, weight(64, 64, 3, 3), pads=(1,) * 4, name="/conv3/Conv"), a, name="/add/Add")
    pooled = net.add("Flatten", net.add("GlobalAveragePool", net.add("Relu", c, name="/relu3/Relu"), name="/pool/GlobalAveragePool"), name="/flatten")
    net.mark_output(net.add("Gemm", pooled, weight(64, 10), name="/fc/Gemm"), "output")
    return net


if __name__ == "__main__":
    save_onnx(standin(), sys.argv[1])
