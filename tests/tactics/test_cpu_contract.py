"""Every CPU tactic in the folders against the reference, on all samples of its ops: nothing here names one."""

from functools import cache

import pytest
from test_onednn_tactics import TACTICS, check

from whet.ops import OPS, sample_layer


@cache
def layer_of(name, index):
    """A sample's layer and arrays, which `check` leaves as they are."""
    return sample_layer(name, OPS[name].samples[index])[1:]


def samples_of(tactic):
    """(op, sample) that the tactic may take: of its ops, alone or as the root of a fused layer, and of its composites."""
    return [(name, s) for name in sorted({*tactic.ops, "Fused"} & set(OPS)) for s in range(len(OPS[name].samples))]


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda t: t.name)
def test_samples(tactic):
    """All samples, with NaN, infinities, denormals and the largest numbers: one at least, unless the tactic names what the machine lacks."""
    computed = 0
    for name, k in samples_of(tactic):
        layer, arrays = layer_of(name, k)
        computed += check(layer, arrays, [tactic])
    if not computed:
        if reason := tactic.unavailable():
            pytest.skip(reason)
        assert not reachable(tactic), "no sample reaches the tactic"


def reachable(tactic):
    """Whether there are samples for it."""
    return bool(tactic.composites) or "*" in tactic.ops or any(OPS[name].samples for name in tactic.ops if name in OPS)
