"""The text of a layer in the timing cache: equal work gives equal text, and a value that changes the kernel's work changes the text."""

import pytest

from whet.measure.timing_key import format_layer_text
from whet.network import parse_network

NET = """network n source
in %x: f32[4,8]
const %s: f32[] = [{scale}]
const %z: {type}[] = [{zero}]
%y = QuantizeLinear(%x, %s, %z) from "q"
out %y
"""


def text(zero: int, scale: float = 0.5, kind: str = "u8") -> str:
    return format_layer_text(parse_network(NET.format(scale=scale, zero=zero, type=kind)).layers[0])


@pytest.mark.parametrize("zero", [0, 255])
def test_zero_points_that_save_a_clamp_have_their_own_times(zero):
    assert text(zero) != text(7)


def test_other_zero_points_and_all_scales_share_times():
    assert text(5) == text(7)
    assert text(5, scale=0.25) == text(5, scale=0.125)


def test_types_have_their_own_times():
    assert text(5, kind="i8") != text(5)


def test_the_two_extremes_have_their_own_times():
    assert text(0) != text(255)


@pytest.mark.parametrize(("dtype", "most"), [("f32", 4), ("i64", 64)])
def test_values_of_small_constants_are_in_the_text(dtype, most):
    """Bounds, scales, axes: up to four floats and 64 integers."""
    for count, shown in ((most, True), (most + 1, False)):
        texts = {
            format_layer_text(parse_network(
                f"network n lowered\nin %x: {dtype}[2,{count}]\nconst %c: {dtype}[{count}] = seed({seed})\n%y = Add(%x, %c)\nout %y\n"
            ).layers[0]) for seed in (1, 2)
        }  # fmt: skip
        assert (len(texts) == 2) == shown
