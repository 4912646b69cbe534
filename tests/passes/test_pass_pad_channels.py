"""Channel padding: random networks keep their results, and networks pruned to odd widths get tensor-core kernels for all convolutions after
the stem.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_networks import feeds, random_network, same

from support.selection import with_long_variants
from whet.network import F32, Network, Tensor, TensorType, make_symbol, parse_network, verify
from whet.ops import run_network
from whet.ops._origin import evaluate_origin
from whet.passes import lower
from whet.passes.fill import pad_channels
from whet.passes.final.pad_moved_channels import find_channel_axis

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 10**6)


@pytest.fixture(autouse=True)
def _any_work(monkeypatch):
    """Pads layers with few products too, since those of the tests have few."""
    monkeypatch.setattr(pad_channels, "MIN_WORK", 0)


def filled(net, *switches):
    """The lowered network with channels padded to multiples of 16 bytes, and the log of the passes."""
    return lower(net, switches=switches, check=True, refuses=lambda layer: None, channel_alignment=16)


@SETTINGS
@given(seeds)
def test_random_networks_keep_their_results(seed):
    net = random_network(seed, 22)
    made, _ = filled(net)
    verify(made)
    for sizes in ({"N": 2}, {"N": 3}):
        arrays = feeds(net, seed, sizes=sizes)
        want, got = run_network(net, arrays, widen=True), run_network(made, arrays, widen=True)
        for key, a in want.items():
            same(a, got[key], 2e-6)


class Odd:
    """A random image network with widths that are no multiples of 8, as pruners produce them; every layer's output feeds weights."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng([seed, 5])
        self.net = Network(f"odd_{seed}")
        x = self.net.add_input("x", TensorType(F32, (make_symbol("N"), 3, 8, 6)))
        x = self.conv(x, self.width())
        kinds = [self.residual, self.joined, self.halves, self.depthwise, self.gate, self.norm, self.resized, self.pooled, self.quantized,
                 self.shortcut, self.ranged]  # fmt: skip
        for _ in range(5):
            x = kinds[int(self.rng.integers(len(kinds)))](x)
        ends = [self.net.add("GlobalAveragePool", x), self.net.add("MaxPool", x, kernel_shape=(2, 2))]
        y = self.net.add("Flatten", ends[int(self.rng.integers(2))])
        self.net.mark_output(self.net.add("Gemm", y, self.weight(4, int(y.shape[1])), self.weight(4), transB=1), "y")

    def width(self) -> int:
        return int(self.rng.choice([5, 9, 11, 12, 13, 20]))

    def weight(self, *shape: int) -> Tensor:
        fan = int(np.prod(shape[1:])) or 1
        return self.net.constant((self.rng.standard_normal(shape) * fan**-0.5).astype(np.float32), "w")

    def conv(self, x: Tensor, k: int, size: int = 3, act: str = "Relu") -> Tensor:
        y = self.net.add("Conv", x, self.weight(k, int(x.shape[1]), size, size), self.weight(k), pads=(size // 2,) * 4)
        return self.net.add(act, y)

    def residual(self, x: Tensor) -> Tensor:
        y = self.conv(self.conv(x, self.width()), int(x.shape[1]), act="Sigmoid")
        return self.net.add("Relu", self.net.add("Add", y, x))

    def joined(self, x: Tensor) -> Tensor:
        other = self.conv(x, self.width(), 1)
        return self.conv(self.norm(self.net.add("Concat", x, other, self.conv(other, self.width()), axis=1)), self.width(), 1)

    def halves(self, x: Tensor) -> Tensor:
        a, b = self.width(), self.width()
        parts = [self.conv(x, a + b, 1), self.net.constant(np.array([a, b], np.int64), "n")]
        first, second = self.net.add_layer("Split", parts, {"axis": 1}).outputs
        return self.net.add("Concat", self.conv(first, a), second, axis=1)

    def depthwise(self, x: Tensor) -> Tensor:
        y = self.conv(x, k := self.width(), 1, "HardSwish")
        y = self.net.add("Conv", y, self.weight(k, 1, 3, 3), group=k, pads=(1, 1, 1, 1))
        return self.conv(self.net.add("Clip", y, self.net.constant(np.float32(0), "lo"), self.net.constant(np.float32(6), "hi")), self.width(), 1)

    def gate(self, x: Tensor) -> Tensor:
        s = self.conv(self.net.add("GlobalAveragePool", x), self.width(), 1)
        return self.net.add("Mul", x, self.conv(s, int(x.shape[1]), 1, "HardSigmoid"))

    def norm(self, x: Tensor) -> Tensor:
        c = int(x.shape[1])
        positive = self.net.constant((self.rng.random(c) + 0.5).astype(np.float32), "v")
        return self.net.add("BatchNormalization", x, self.weight(c), self.weight(c), self.weight(c), positive)

    def resized(self, x: Tensor) -> Tensor:
        y = self.net.add("Resize", x, None, self.net.constant(np.array([1, 1, 2, 2], np.float32), "s"), mode="nearest")
        return self.net.add("AveragePool", y, kernel_shape=(2, 2), strides=(2, 2))

    def pooled(self, x: Tensor) -> Tensor:
        return self.net.add("PRelu", self.net.add("MaxPool", x, kernel_shape=(3, 3), pads=(1, 1, 1, 1)), self.weight(int(x.shape[1]), 1, 1))

    def shortcut(self, x: Tensor) -> Tensor:
        """A shortcut without weights: zero padding before and after the channels."""
        c, before, behind = int(x.shape[1]), int(self.rng.choice([0, 5, 8])), int(self.rng.choice([0, 4, 7]))
        pads = self.net.constant(np.array([0, before, 0, 0, 0, behind, 0, 0], np.int64), "p")
        return self.net.add("Add", self.conv(x, c + before + behind), self.net.add("Pad", x, pads))

    def ranged(self, x: Tensor) -> Tensor:
        """A slice of the channels of a convolution."""
        n, first, behind = self.width(), int(self.rng.choice([0, 5, 8])), int(self.rng.choice([0, 4, 7]))
        bounds = [self.net.constant(np.array([v], np.int64), "b") for v in (first, first + n, 1)]
        return self.net.add("Slice", self.conv(x, n + first + behind), *bounds)

    def quantized(self, x: Tensor) -> Tensor:
        """An 8-bit integer convolution whose filters have per-channel scales and whose image has a zero point."""
        step, zero = self.net.constant(np.float32(0.02), "s"), self.net.constant(np.array(120, np.uint8), "z")
        k, c = self.width(), int(x.shape[1])
        w = self.net.constant(self.rng.integers(-127, 128, (k, c, 3, 3)).astype(np.int8), "w")
        scales = self.net.constant(((self.rng.random(k) + 0.5) / 1000).astype(np.float32), "s")
        read = self.net.add("DequantizeLinear", self.net.add("QuantizeLinear", x, step, zero), step, zero)
        y = self.net.add("Conv", read, self.net.add("DequantizeLinear", w, scales, axis=0), self.weight(k), pads=(1, 1, 1, 1))
        y = self.net.add("QuantizeLinear", self.net.add("Relu", y), step, zero)
        return self.net.add("DequantizeLinear", y, step, zero)


@pytest.mark.parametrize("seed", with_long_variants(range(60), every=4))
def test_odd_networks_keep_their_results_without_odd_widths(seed):
    net = Odd(seed).net
    made, _ = filled(net)
    for sizes in ({"N": 1}, {"N": 3}):
        arrays = feeds(net, seed, sizes=sizes)
        want, got = run_network(net, arrays, widen=True), run_network(made, arrays, widen=True)
        same(want["y"], got["y"], 2e-6)
    bare, _ = filled(net, "none", "+pad_channels")
    for layer in bare.layers:
        (y,) = layer.outputs[:1]
        if y.type.rank == 4 and y.maker.op != "DequantizeLinear":
            assert y.shape[1] % (16 if y.dtype.bits == 8 else 8) == 0, f"{layer}"


def test_padded_weights_follow_the_weights_of_the_model():
    """Origins of padded weights describe how they derive from the model's: new values of these give the weights of the same cut."""
    fired = 0
    for seed in range(30):
        net = Odd(seed).net
        made, log = filled(net, "none", "+pad_channels")
        fired += log.counts()["pad_channels"]
        sources = {t.name: t.array() for t in net.constants.values()}
        for t in made.constants.values():
            if t.name.endswith("_filled"):
                np.testing.assert_array_equal(evaluate_origin(t.weight.origin, sources), t.array())
    assert fired > 100


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ("6", 0), ("6,2,3,3", 0), ("1,6,1,1", 1),
        ("6,1", None), ("6,1,1", None), ("1,6", None), ("1,6,1,2", None), ("2,6,1,1", None), ("1,5,1,1", None), ("4", None),
    ],
)  # fmt: skip
def test_the_axis_of_a_constant_that_holds_output_channels(shape, axis):
    net = parse_network(f"network n source\nin %x: f32[2]\nconst %c: f32[{shape}] = seed(1)\n%y = Relu(%x)\nout %y")
    assert find_channel_axis(net.constants["c"], 6) == axis
