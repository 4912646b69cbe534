"""Small source networks shared by the builder's tests."""

from __future__ import annotations

import numpy as np

from whet.builder import Silent
from whet.network import Network, parse_type


class Stages(Silent):
    """Notes the stages of a build; `times` is true if one of them times something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def stage(self, name, total):
        self.names.append(name.rpartition(": ")[2])

    @property
    def times(self):
        """True if a stage was announced in which kernels or engines are timed."""
        return bool({"timing", "fused or unfused", "whole engines", "comparing engines"} & set(self.names))


def residual(batch: int | str = 2, channels: int = 16, size: int = 10, seed: int = 0) -> Network:
    """Conv-Relu, then Conv + skip, Relu, pooled, flattened, Gemm: covers formats, an in-place sum, a view and row-major outputs."""
    rng, net = np.random.default_rng(seed), Network("residual")

    def weight(name, *shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("f4"), name)

    x = net.add_input("x", parse_type(f"f32[{batch},3,{size},{size}]"))
    a = net.add(
        "Relu",
        net.add("Conv", x, weight("w1", channels, 3, 3, 3), weight("b1", channels), pads=(1, 1, 1, 1), sources=["conv1"]),
        sources=["relu1"],
    )
    b = net.add("Relu", net.add("Conv", a, weight("w2", channels, channels, 3, 3), pads=(1, 1, 1, 1), sources=["conv2"]), sources=["relu2"])
    c = net.add("Conv", b, weight("w3", channels, channels, 3, 3), weight("b3", channels), pads=(1, 1, 1, 1), sources=["conv3"])
    s = net.add("Relu", net.add("Add", c, a, sources=["add"]), sources=["relu3"])
    p = net.add("GlobalAveragePool", s, sources=["pool"])
    f = net.add("Flatten", p, axis=1, sources=["flatten"])
    net.mark_output(net.add("Gemm", f, weight("w4", 10, channels), weight("b4", 10), transB=1, sources=["fc"]), "y")
    return net


def inputs(net: Network, seed: int = 5, **sizes: int) -> dict[str, np.ndarray]:
    """Normal random values for the inputs; symbols from `sizes`."""
    from whet.network import evaluate

    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal([evaluate(d, sizes) for d in t.shape]).astype(t.dtype.numpy) for t in net.inputs}
