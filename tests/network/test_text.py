"""The text form round-trips for every op's samples."""

import pytest

from whet.network import parse_network, verify
from whet.ops import OPS, sample_layer

CASES = [(name, i) for name, o in sorted(OPS.items()) for i in range(len(o.samples))]


@pytest.mark.parametrize(("name", "i"), CASES)
def test_text_round_trip(name, i):
    net, _, _ = sample_layer(name, OPS[name].samples[i])
    verify(net)
    text = str(net)
    weights = {"sha256:" + t.weight.digest: t.weight for t in net.constants.values()}
    again = parse_network(text, weights)
    verify(again)
    assert str(again) == text
