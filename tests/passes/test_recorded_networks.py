"""What all passes together make of random networks stays as recorded: how often each fires, the layers in order, the elements of all tensors.

The other tests of these networks compare values only, which an unused chance or a superfluous layer does not change. After an intended change:
`WHET_UPDATE_GOLDEN=1 pytest tests/passes/test_recorded_networks.py`, and review the diff.
"""

import pytest
from pass_golden import FOLDER
from random_networks import describe, random_network
from test_random_moves import Maker as Moves
from test_random_volumes import Maker as Volumes

from support.recorded import compare_with_record
from whet.passes import lower

GENERATORS = {
    "mixed": (lambda seed: random_network(seed, 20), 60, {}),
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
