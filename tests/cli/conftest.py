"""Tests of commands read flags in messages, also where they invoke a command without the group `whet`."""

import numpy as np
import pytest

from support.search_case import case as case  # a fixture
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type
from whet.option_names import keep_flags


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    with keep_flags():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small convolutional network with a residual, as ONNX, and data for it."""
    rng = np.random.default_rng(1)
    net = Network("small")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    x = net.add_input("x", parse_type("f32[1,3,16,16]"))
    a = net.add("Relu", net.add("Conv", x, w(32, 3, 3, 3), pads=(1,) * 4))
    b = net.add("Relu", net.add("Conv", a, w(32, 32, 3, 3), pads=(1,) * 4))
    c = net.add("Relu", net.add("Add", net.add("Conv", b, w(32, 32, 3, 3), pads=(1,) * 4), a))
    net.mark_output(net.add("Gemm", net.add("Flatten", net.add("GlobalAveragePool", c)), w(32, 5)), "y")
    folder = tmp_path_factory.mktemp("int8")
    save_onnx(net, folder / "m.onnx")
    np.savez(folder / "data.npz", x=rng.standard_normal((8, 3, 16, 16)).astype(np.float32))
    return folder
