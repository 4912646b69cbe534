"""Ranges and metrics by their definitions: percentiles, bounds of activations, exact padding values, an accuracy budget's measure."""

import numpy as np
import pytest

from whet.network import Network, parse_type
from whet.passes._move_quantize import is_padding_exact
from whet.precision import find_quantization_sites


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
