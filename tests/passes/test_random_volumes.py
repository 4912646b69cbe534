"""Random networks of volumes: conv_3d_to_2d keeps their results, and leaves no layer of volumes but those that move values."""

import numpy as np
import pytest
from random_networks import feeds, same

from whet.network import Network, parse_type
from whet.ops import run_network
from whet.passes import lower

LAYERS = ("conv", "conv", "grouped", "depthwise", "along_depth", "pool", "up", "pointwise", "norm", "residual", "join")


class Maker:
    """A network of one volume with a batch that varies, grown at its last value."""

    def __init__(self, seed):
        self.rng = np.random.RandomState(seed)
        self.net = Network("volumes")
        self.x = self.net.add_input("x", parse_type(f"f32[N,4,{self.rng.randint(4, 8)},6,5]"))
        self.last = self.net.add("Conv", self.x, self.constant(4, 4, 1, 1, 1))

    def constant(self, *shape):
        return self.net.constant(self.rng.standard_normal(shape).astype(np.float32), f"w{len(self.net.constants)}")

    def window(self, kernel):
        """Strides, dilations and pads that leave something of each axis."""
        sizes = self.last.shape[2:]
        pads = [int(self.rng.randint(min(2, k - 1) + 1)) if k > 1 else 0 for k in (*kernel, *kernel)]
        dilations = [2 if n > 2 * (k - 1) and self.rng.rand() < 0.3 else 1 for n, k in zip(sizes, kernel, strict=True)]
        return {"strides": tuple(int(s) for s in self.rng.choice([1, 1, 2], 3)), "pads": tuple(pads), "dilations": tuple(dilations)}

    def kernel(self, most=3):
        return [int(self.rng.randint(1, min(n, most) + 1)) for n in self.last.shape[2:]]

    def convolve(self, k, c, kernel, group=1):
        bias = [self.constant(k)] if self.rng.rand() < 0.7 else []
        return self.net.add("Conv", self.last, self.constant(k, c // group, *kernel), *bias, group=group, **self.window(kernel))

    def conv(self, c):
        return self.convolve(int(self.rng.choice([2, 4, 6])), c, self.kernel())

    def grouped(self, c):
        return self.convolve(4, c, self.kernel(), 2)

    def depthwise(self, c):
        return self.convolve(c * int(self.rng.choice([1, 2])), c, self.kernel(), c)

    def along_depth(self, c):
        return self.convolve(4, c, (self.kernel()[0], 1, 1))

    def pool(self, c):
        kernel = self.kernel(2)
        attrs = self.window(kernel) | {"ceil_mode": int(self.rng.randint(2))}
        attrs["pads"] = tuple(min(p, 1) if k > 1 else 0 for p, k in zip(attrs["pads"], (*kernel, *kernel), strict=True))
        if self.rng.rand() < 0.5:
            return self.net.add("MaxPool", self.last, kernel_shape=tuple(kernel), **attrs)
        return self.net.add("AveragePool", self.last, kernel_shape=tuple(kernel), count_include_pad=int(self.rng.randint(2)), **attrs)

    def up(self, c):
        kd, kh, kw = self.rng.randint(1, 3, 3)
        if kd * self.last.shape[2] > 8 or 2 * self.last.shape[3] > 16:
            return self.last
        return self.net.add("ConvTranspose", self.last, self.constant(c, 4, kd, kh, kw), self.constant(4), strides=(int(kd), 2, 1))

    def pointwise(self, c):
        if self.rng.rand() < 0.5:
            return self.net.add("Mul", self.last, self.constant(*[(c, 1, 1, 1), (1, c, 1, 1, 1), (1, 1, 1, 1, 1), ()][self.rng.randint(4)]))
        return self.net.add(["Relu", "Sigmoid"][self.rng.randint(2)], self.last)

    def norm(self, c):
        return self.net.add("InstanceNormalization", self.last, self.constant(c), self.constant(c))

    def residual(self, c):
        return self.net.add("Add", self.net.add("Conv", self.last, self.constant(c, c, 3, 1, 1), pads=(1, 0, 0, 1, 0, 0)), self.last)

    def join(self, c):
        return self.net.add("Concat", self.net.add("Relu", self.last), self.last, axis=1) if c <= 6 else self.last

    def make(self, steps):
        for _ in range(steps):
            self.last = getattr(self, LAYERS[self.rng.randint(len(LAYERS))])(self.last.shape[1])
            if self.rng.rand() < 0.15 and self.last.maker.op != "Relu":
                self.net.mark_output(self.net.add("Neg", self.last))
        self.net.mark_output(self.net.add("GlobalAveragePool", self.last))
        self.net.mark_output(self.net.add("Relu", self.last))
        return self.net


@pytest.mark.parametrize("seed", range(40))
def test_results_are_kept(seed):
    net = Maker(seed).make(6)
    low, log = lower(net, switches=["none", "+conv_3d_to_2d"], check=True, channel_alignment=16)
    assert log.counts()["conv_3d_to_2d"] >= 3
    moved = ("Concat", "Pad", "Reshape", "Slice", "Transpose")
    assert [x.op for x in low.layers if x.op not in moved and any(t is not None and t.type.rank == 5 for t in x.inputs)] == []
    arrays = feeds(net, seed=seed)
    want, got = run_network(net, arrays), run_network(low, arrays)
    assert list(want) == list(got)
    for key, a in want.items():
        same(a, got[key], 2e-5)
