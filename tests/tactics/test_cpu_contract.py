"""Every discovered CPU tactic against the reference, on all samples of its ops."""

from functools import cache

import pytest
from test_onednn_tactics import TACTICS, check

from whet.ops import OPS, sample_layer


@cache
def layer_of(name, index):
    """A sample's layer and arrays; `check` does not modify them."""
    return sample_layer(name, OPS[name].samples[index])[1:]


def samples_of(tactic):
    """(op, sample) that the tactic may accept: of its ops, as single layers or as the root of a fused layer, and of its composites."""
    return [(name, s) for name in sorted({*tactic.ops, "Fused"} & set(OPS)) for s in range(len(OPS[name].samples))]


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda t: t.name)
def test_samples(tactic):
    """All samples, also with NaN, infinities, denormals and the largest values. At least one sample must reach the tactic, unless it names the CPU
    feature that the machine lacks.
    """
    computed = 0
    for name, k in samples_of(tactic):
        layer, arrays = layer_of(name, k)
        computed += check(layer, arrays, [tactic])
    if not computed:
        if reason := tactic.unavailable():
            pytest.skip(reason)
        assert not reachable(tactic), "no sample reaches the tactic"


def reachable(tactic):
    """True if samples exist for it."""
    return bool(tactic.composites) or "*" in tactic.ops or any(OPS[name].samples for name in tactic.ops if name in OPS)
