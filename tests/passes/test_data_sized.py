"""Layers whose sizes depend on data: passes keep them and their symbols; quantization does not move through them; the results stay."""

import numpy as np
import pytest

from whet.network import parse_network
from whet.ops import is_data_sized, run_network
from whet.passes import lower

HEAD = """network n source
in %x: f32[2,8,6]
in %s: i64[1]
in %e: i64[1]
const %one: i64[1] = [1]
const %two: i64[1] = [2]
const %scale: f32[] = [0.05]
const %zero: i8[] = [0]
const %w: f32[6,4] = seed(1)
"""
NETWORKS = {
    "quantized": """%q = QuantizeLinear(%x, %scale, %zero)
%d = DequantizeLinear(%q, %scale, %zero)
%y = Slice(%d, %s, %e, %one)
%r = QuantizeLinear(%y, %scale, %zero)
%z = DequantizeLinear(%r, %scale, %zero)
""",
    "two in a row": """%y = Slice(%x, %s, %e, %one)
%t = Slice(%y, %s, %e, %two)
%u = Transpose(%t, perm=(0,2,1))
%z = Relu(%u)
""",
    "equal ones": """%y = Slice(%x, %s, %e, %one)
%p = MatMul(%y, %w)
%m = Softmax(%p, axis=-1)
%o = Slice(%x, %s, %e, %one)
%n = MatMul(%o, %w)
%z = Add(%m, %n)
""",
}


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("name", NETWORKS)
def test_slices_with_computed_bounds(name, alignment):
    net = parse_network(HEAD + NETWORKS[name] + "out %z\n")
    lowered, _ = lower(net, switches=["all"], check=True, channel_alignment=alignment)
    assert [x.name for x in lowered.layers if is_data_sized(x)] == [x.name for x in net.layers if is_data_sized(x)]
    x = np.random.default_rng(0).standard_normal((2, 8, 6)).astype(np.float32)
    for first, last in ((1, 4), (0, 6), (3, 3)):
        fed = {"x": x, "s": np.array([first]), "e": np.array([last])}
        np.testing.assert_array_equal(run_network(lowered, fed)["z"], run_network(net, fed)["z"])
