"""The caches before a candidate is timed: its weights are evicted, the previous layer's output is read back."""

import pytest

from whet.backends.cpu import CpuBackend
from whet.composites.epilogue import make_conv_silu_sample
from whet.measure.bench import Bench
from whet.measure.option import Option
from whet.measure.timing import COLD, Conditions, Timer
from whet.measure.timing_cache import TimingCache
from whet.ops import sample_layer
from whet.tactics import list_tactics

FLUSHED = 1 << 20


class Machine(CpuBackend):
    """Records requests; evicts memory from the caches or reports that it cannot."""

    def __init__(self, evicts: bool):
        super().__init__(threads=1)
        self.evicts, self.asked = evicts, []

    def evict(self, pieces):
        self.asked.append(("evict", [nbytes for _, nbytes in pieces]))
        return self.evicts and super().evict(pieces) in (True, False)

    def warm(self, array):
        self.asked.append(("warm", array.nbytes))
        super().warm(array)


def asked_of(machine, conditions, image="f32[1,16,12,12]"):
    """The requests to the machine for a convolution: 9 KiB in and out, 9 KiB of weights and a cache line of biases."""
    _, layer, _ = sample_layer("Fused", make_conv_silu_sample(image, "f32[16,16,3,3]", pads=(1, 1, 1, 1)))
    tactic = next(t for t in list_tactics("cpu") if t.name == "cpu/onednn_conv")
    signature = next(s for s in tactic.signatures(layer, machine) if s.inputs[0].format.startswith("nChw"))
    config = tactic.configs(layer, signature, machine)[0]
    option = Option(tactic, signature, config, tactic.plan(layer, signature, config, machine), rank=0)
    bench = Bench(Timer(machine, TimingCache(), conditions, 1), layer)
    bench.args(option)
    machine.asked.clear()
    bench.prepare_caches(option)
    return option.kernel


def test_a_kernels_weights_leave_the_caches():
    """The memory of its image, results and scratch was in use a few layers ago."""
    machine = Machine(True)
    kernel = asked_of(machine, Conditions(COLD, FLUSHED))
    assert machine.asked == [("evict", [p.nbytes for p in kernel.packed]), ("warm", 16 * 12 * 12 * 4)]


def test_other_memory_is_walked_over_if_lines_cannot_be_evicted():
    machine = Machine(False)
    asked_of(machine, Conditions(COLD, FLUSHED))
    assert [a for a in machine.asked if a[0] == "warm"] == [("warm", FLUSHED), ("warm", 16 * 12 * 12 * 4)]


def test_memory_that_fits_the_last_cache_stays_there():
    """A network that fits the last cache finds its weights in it: they are evicted only from the L2 cache."""
    machine = Machine(True)
    asked_of(machine, Conditions("cold L2", FLUSHED))
    assert machine.asked == [("warm", FLUSHED), ("warm", 16 * 12 * 12 * 4)]


@pytest.mark.parametrize("conditions", [Conditions("hot", 0), Conditions(COLD, 1 << 12)])
def test_hot_kernels_and_those_larger_than_every_cache_are_not_evicted(conditions):
    machine = Machine(True)
    asked_of(machine, conditions)
    assert machine.asked == []
