"""What all passes together make of random networks stays as recorded: how often each fires, the layers in order, the elements of all tensors.

The other tests of these networks compare values only, which an unused chance or a superfluous layer does not change. After an intended change:
`WHET_UPDATE_GOLDEN=1 pytest tests/passes/test_recorded_networks.py`, and review the diff.
"""

import numpy as np
import pytest
from pass_golden import FOLDER
from random_networks import describe, random_network
from test_random_moves import Maker as Moves
from test_random_volumes import Maker as Volumes

from support.recorded import compare_with_record
from whet.network import Weight
from whet.passes import lower


def with_zeros(seed):
    """A random network with constants that are zero at some of their first indices, or everywhere."""
    net, rng = random_network(seed, 20), np.random.RandomState(seed)
    for t in net.constants.values():
        if t.dtype.is_float and t.type.rank and rng.rand() < 0.7:
            a = t.array().copy()
            a[rng.rand(len(a)) < rng.choice([0.3, 0.6, 1.0], p=[0.5, 0.4, 0.1])] = 0
            t.weight = Weight(a)
    return net


GENERATORS = {
    "mixed": (lambda seed: random_network(seed, 20), 60, {}),
    "aligned": (lambda seed: random_network(seed + 100, 20), 60, {"channel_alignment": 16}),
    "zeros": (with_zeros, 60, {}),
    "moves": (lambda seed: Moves(seed).make(), 90, {}),
    "volumes": (lambda seed: Volumes(seed).make(6), 60, {"channel_alignment": 16}),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_lowered_networks_stay_as_recorded(name):
    make, count, options = GENERATORS[name]
    lines = []
    for seed in range(count):
        low, log = lower(make(seed), switches=["all"], **options)
        fired = ", ".join(f"{p} {n}" for p, n in sorted(log.counts().items()) if n)
        lines += [f"{seed}: {fired}; {len(log.skipped)} skipped", f"  {describe(low)}"]
    compare_with_record(FOLDER.parent / "lowered_networks" / f"{name}.txt", lines)
