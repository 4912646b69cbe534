"""Parts of a Concat share a scale; a part with other readers keeps its own scale if the scales differ much, and is requantized for the Concat."""

import numpy as np
import pytest

from whet.builder.precision.int8 import EngineRun
from whet.network import Network, parse_type
from whet.precision import Analysis, calibrate, find_quantization_sites, quantize, read_cache, write_cache
from whet.precision.joined import APART, assign_stored_forms
from whet.precision.ranges import Range


def joined_network(loud: float) -> Network:
    """As in a detector's neck: `quiet` is read by a convolution and, together with the much larger `loud`, by a Concat."""
    rng = np.random.default_rng(4)
    net = Network("neck")

    def w(*shape, gain=1.0):
        return net.constant((gain * rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    x = net.add_input("x", parse_type("f32[1,8,12,12]"))
    quiet = net.add("Relu", net.add("Conv", x, w(16, 8, 3, 3), pads=(1,) * 4), name="quiet")
    down = net.add("Conv", quiet, w(16, 16, 3, 3), pads=(1,) * 4, strides=(2, 2), name="down")
    big = net.add("Relu", net.add("Conv", down, w(8, 16, 1, 1, gain=loud)), name="big")
    up = net.add("Resize", big, None, net.constant(np.array([1, 1, 2, 2], np.float32), "twice"), mode="nearest", name="up")
    both = net.add("Concat", up, quiet, axis=1, name="both")
    net.mark_output(net.add("Conv", both, w(8, 24, 1, 1), name="y"))
    net.mark_output(net.add("Conv", down, w(8, 16, 1, 1), name="z"))
    return net


def samples(n=8):
    rng = np.random.default_rng(5)
    return [{"x": rng.standard_normal((1, 8, 12, 12)).astype(np.float32)} for _ in range(n)]


def test_a_small_part_keeps_its_scale_for_its_other_readers():
    net = joined_network(40.0)
    places, ranges = find_quantization_sites(net), calibrate(net, samples())
    quiet, big = net.tensor("quiet"), net.tensor("big")
    own, joined = assign_stored_forms(places, ranges)[quiet]
    assert own.range == ranges.tensors["quiet"]
    assert joined.readers == frozenset(x for x in net.layers if x.name == "both")
    assert joined.range.scale == ranges.tensors["big"].scale
    assert [f.range for f in assign_stored_forms(places, ranges)[big]] == [joined.range], "the parts of the Concat have one scale"
    net = quantize(net, ranges)
    assert sum(x.op == "QuantizeLinear" for x in net.layers) == len(places.roots) + 1


def test_close_scales_are_merged():
    net = joined_network(1.0)
    places, ranges = find_quantization_sites(net), calibrate(net, samples())
    ratio = ranges.tensors["big"].scale / ranges.tensors["quiet"].scale
    assert 1 / APART < ratio < APART
    forms = assign_stored_forms(places, ranges)
    assert all(len(f) == 1 for f in forms.values())
    assert forms[net.tensor("quiet")][0].range == forms[net.tensor("big")][0].range == ranges.tensors["quiet"].merge(ranges.tensors["big"])


def test_float8_needs_no_second_scale():
    net = joined_network(40.0)
    made = quantize(net, calibrate(net, samples()), kind="fp8")
    assert sum(x.op == "QuantizeLinear" for x in made.layers) == len(find_quantization_sites(net).roots)


def test_outputs_become_more_accurate(monkeypatch):
    """A shared scale would cost the convolution that reads the part precision."""
    net, data = joined_network(40.0), samples()
    ranges = calibrate(net, data)
    judged = Analysis(net, "int8", data[:2], EngineRun, ranges).snr()
    monkeypatch.setattr("whet.precision.insert.APART", np.inf)
    assert judged > Analysis(net, "int8", data[:2], EngineRun, ranges).snr() + 3


def test_the_cache_gives_the_same_network(tmp_path):
    net = joined_network(40.0)
    ranges = calibrate(net, samples(), model="m")
    write_cache(tmp_path / "c.json", ranges)
    again = read_cache(tmp_path / "c.json", net, "m")
    forms, others = assign_stored_forms(find_quantization_sites(net), ranges), assign_stored_forms(find_quantization_sites(net), again)
    assert [[f.range.scale for f in forms[t]] for t in forms] == [[f.range.scale for f in others[t]] for t in others]


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (Range(0, 2), Range(0, 8), Range(0, 8)),
        (Range(-2, 2), Range(-0.25, 8), Range(-2, 8)),  # a zero point is allowed, and still pays off
        (Range(-6, 6), Range(-0.25, 8), Range(-8, 8)),
        (Range(-2, 2), Range(0, 8), Range(-8, 8)),  # none of them has a zero point: possibly none is allowed
    ],
)
def test_merged_ranges(a, b, both):
    assert a.merge(b) == b.merge(a) == both
