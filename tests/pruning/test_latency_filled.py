"""Latency as a cost on a machine whose kernels need channels in multiples of eight: odd widths cost as much as their padded widths."""

from types import SimpleNamespace

import pytest

from whet.builder import BuildConfig
from whet.network import parse_network
from whet.pruning.coupling import groups
from whet.pruning.latency_cost import lower_to_static_layers, make_latency_costs

NETWORK = """network tiny source
in %x: f32[1,3,32,32]
const %w: f32[32,3,3,3] = seed(1)
const %v: f32[32,32,3,3] = seed(2)
const %u: f32[8,64,1,1] = seed(3)
%a = Conv(%x, %w, pads=(1, 1, 1, 1))
%r = Relu(%a)
%b = Conv(%r, %v, pads=(1, 1, 1, 1))
%j = Concat(%r, %b, axis=1)
%y = Conv(%j, %u)
out %y
"""


def test_odd_widths_cost_as_much_as_padded_widths():
    pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
    net, config = parse_network(NETWORK), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="")
    found, base = groups(net), lower_to_static_layers(net, config)

    def ms(layer):
        return sum(t.type.elements for t in (*layer.inputs, *layer.outputs) if t is not None)

    costs = make_latency_costs(net, found, [], SimpleNamespace(config=config, step=8, ms=ms, announce=lambda layers: None), base)
    assert [g.size for g in found] == [32, 32]
    for g in found:
        assert len(costs.items_of[g.name]) >= 2, "each group affects the time of its producer and of its readers"
        total = {width: costs.total({g.name: width}) for width in (9, 16, 17, 32)}
        assert total[9] == total[16] < total[17] < total[32]
