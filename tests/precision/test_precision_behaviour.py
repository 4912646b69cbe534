"""Ranges and metrics by their definitions: percentiles, bounds of activations, exact padding values, an accuracy budget's measure."""

import numpy as np
import pytest

from whet.network import Network, parse_type
from whet.passes._move_quantize import is_padding_exact
from whet.precision import find_quantization_sites
from whet.precision.histogram import Histogram
from whet.precision.methods import LIMITS
from whet.precision.scaling import find_sites, propose_scales


@pytest.mark.parametrize(
    ("padding", "step", "zero", "exact"),
    [
        (0.0, 0.1, None, True),
        (0.5, 0.25, None, True),
        (0.5, 0.3, None, False),
        (63.75, 0.25, None, True),  # 255 steps
        (64.0, 0.25, None, False),
        (-0.25, 0.25, None, False),
        (-0.25, 0.25, np.uint8(1), True),
        (-0.5, 0.25, np.uint8(1), False),
        (63.75, 0.25, np.uint8(1), False),
        (-32.0, 0.25, np.int8(0), True),
        (-32.25, 0.25, np.int8(0), False),
        (31.75, 0.25, np.int8(0), True),
        (32.0, 0.25, np.int8(0), False),
        (32.0, 0.25, np.int8(-1), True),
    ],
)
def test_a_padding_value_is_exact_if_an_integer_of_the_type_gives_it(padding, step, zero, exact):
    net = Network("n")
    x = net.add_input("x", parse_type("f32[1,2,4,4]"))
    value = net.constant(np.array([padding], np.float32), "value")
    y = net.add("Pad", x, net.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1])), value)
    net.mark_output(y, "y")
    scale = net.constant(np.float32(step), "scale")
    assert is_padding_exact(net.layers[0], scale, None if zero is None else net.constant(zero, "zero")) == exact


@pytest.mark.parametrize(
    ("op", "low", "never_negative"),
    [
        ("Relu", None, True),
        ("Sigmoid", None, True),
        ("Neg", None, False),
        ("Clip", 0.0, True),
        ("Clip", 0.5, True),
        ("Clip", -0.5, False),
        ("Clip", [0.0], True),
        ("Clip", None, False),
    ],
)
def test_tensors_that_are_never_negative(op, low, never_negative):
    from whet.precision.quantization_sites import is_never_negative

    net = Network("n")
    x = net.add_input("x", parse_type("f32[1,2]"))
    bounds = [] if op != "Clip" else [None if low is None else net.constant(np.array(low, np.float32)), net.constant(np.float32(6))]
    net.mark_output(net.add(op, x, *bounds), "y")
    assert is_never_negative(net.outputs[0]) == never_negative
    assert find_quantization_sites(net).roots is not None


def histogram(*arrays):
    h = Histogram()
    for a in arrays:
        h.add(np.asarray(a, np.float32))
    return h


def test_values_that_are_spread_evenly_keep_their_range():
    h = histogram(np.linspace(-1, 1, 200_001))
    for method in ("minmax", "entropy", "percentile", "mse"):
        assert LIMITS[method](h) == pytest.approx(1.0, rel=0.01), method
    assert LIMITS["entropy"](h) == 1.0


@pytest.mark.parametrize("values", [[3.0], [-3.0], [3.0, -3.0], [3.0] * 5])
def test_a_single_magnitude_is_the_limit(values):
    assert {m: LIMITS[m](histogram(values)) for m in ("minmax", "percentile", "mse")} == {"minmax": 3.0, "percentile": 3.0, "mse": 3.0}


def test_the_percentile_is_the_top_of_the_bin_that_completes_it():
    ones, twos = np.full(9_999, 1.0), np.full(20_000, 2.0)
    assert LIMITS["percentile"](histogram(ones, [5.0])) == pytest.approx(1.0, rel=0.01)
    assert LIMITS["percentile"](histogram(ones, twos)) == 2.0
    assert LIMITS["percentile"](histogram(twos, [7.0] * 3)) == 7.0  # three of 20,003 are more than 0.01 %
    assert LIMITS["percentile"](histogram(twos, [7.0] * 2)) == pytest.approx(2.0, rel=0.01)


def test_the_least_squared_error_by_definition():
    """Of a hundred limits between the largest value and a hundredth of it, the one of least error of 128 levels."""
    a = np.random.default_rng(0).standard_normal(20_000) ** 3
    h = histogram(a)
    middles, _, counts = h.magnitudes()
    limits = [h.largest * (1 - 0.99 * k / 100) for k in range(100)]
    errors = [float(np.sum(counts * np.where(middles > t, (middles - t) ** 2, (t / 127) ** 2 / 12))) for t in limits]
    assert LIMITS["mse"](h) == pytest.approx(limits[int(np.argmin(errors))], rel=0.02)


def test_scales_that_equalize_are_by_definition():
    """A scale is the normalized geometric mean of the largest weights of a channel's filter and of its readers; it is 1 if either is zero."""
    net = Network("n")
    x = net.add_input("x", parse_type("f32[1,3]"))
    own, read = np.array([4.0, 0.0, 1.0, 9.0]), np.array([1.0, 2.0, 0.0, 4.0])
    first = np.zeros((3, 4), np.float32)
    first[0], first[1] = own, -own / 2
    second = np.zeros((4, 2), np.float32)
    second[:, 0], second[:, 1] = read, -read / 3
    h = net.add("Relu", net.add("MatMul", x, net.constant(first, "w1")), name="h")
    net.mark_output(net.add("MatMul", h, net.constant(second, "w2")), "y")
    site = find_sites(net)[0][h.name]
    made = propose_scales(site, np.array([1.0, 1.0, 0.0, 2.0]), ("equalize", "smooth"))
    s = np.array([2.0, 1.0, 1.0, 1.5])
    assert made["equalize"] == pytest.approx(s / np.exp(np.log(s).mean()), rel=1e-6)
    s = np.array([1.0 / 1.0, 1.0 / 2**0.5, 1.0, 2.0**0.5 / 4.0**0.5])
    assert made["smooth 0.5"] == pytest.approx(s / np.exp(np.log(s).mean()), rel=1e-6)
