"""The timer of a layer's options on a simulated machine: how often each option runs, and which times are stored."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from whet.backends import Capabilities
from whet.measure.option import Option
from whet.measure.policy import PATIENCE
from whet.measure.timing import COLD, Conditions, Timer, select_fastest
from whet.measure.timing_cache import TimingCache
from whet.network import F32, Network, parse_type
from whet.tactics import Operand, Signature, Tactic

SHOWN = Operand("linear", F32)
SIGNATURE = Signature((SHOWN,), (SHOWN,))


class Named(Tactic):
    """A tactic of the simulated machine."""

    version = 1

    def __init__(self, name):
        self.name = name

    def signatures(self, layer, backend):
        return [SIGNATURE]

    def plan(self, layer, signature, config, backend):
        raise AssertionError("its kernels are planned by the test")

    def library_version(self):
        return ""


class Kernel:
    """Takes the given milliseconds; with `error` it cannot run."""

    inputs, outputs, packed, scratch = (64,), (64,), (), 0
    rtol, deterministic = 0.0, True

    def __init__(self, name, ms, error=None):
        self.implementation, self.ms, self.error = name, ms, error

    def enqueue(self, args, stream):
        stream.calls.append(self)


class SimulatedMachine:
    """A machine with kernels that take their stated times, multiplied by the next value of `clock`. The first `busy` measurements are disturbed.

    It reports cold operands, so that every run is timed by itself.
    """

    name, threads, capabilities = "simulated", 1, Capabilities()

    def __init__(self, busy=0, clock=()):
        self.busy, self.clock, self.launches = busy, iter(clock), []

    def key(self):
        return "simulated"

    def allocate(self, nbytes, alignment=64):
        import numpy as np

        array = np.zeros(nbytes, np.uint8)
        return SimpleNamespace(address=array.ctypes.data, nbytes=nbytes, array=array)

    def stream(self):
        calls = []
        return SimpleNamespace(calls=calls, record=calls.append, finish=lambda: calls[0])

    def warm(self, array):
        """Has no cost here."""

    def evict(self, pieces):
        return True

    def seconds(self, kernel, repeats):
        if kernel.error is not None:
            raise kernel.error
        self.launches.append(kernel.implementation)
        return [kernel.ms / 1e3 * next(self.clock, 1.0) for _ in range(repeats)]

    @contextmanager
    def watch(self):
        disturbed, self.busy = self.busy > 0, self.busy - 1
        yield SimpleNamespace(disturbed=disturbed, others=1.0)


def relu():
    net = Network("net", "lowered")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[4,4]"))), "y")
    return net.layers[0]


def options(**ms):
    return [Option(Named(name), SIGNATURE, (), Kernel(name, m), rank) for rank, (name, m) in enumerate(ms.items())]


def timed(machine, listed, rounds=4, cache=None):
    """Times the options; returns the number of runs of each, and the timer."""
    timer = Timer(machine, TimingCache("") if cache is None else cache, Conditions(COLD, 1 << 20), rounds=rounds)
    timer.time(relu(), "relu", listed)
    return {o.tactic.name: machine.launches.count(o.tactic.name) for o in listed}, timer


def test_a_kernel_of_a_second_runs_once():
    listed = options(absurd=1000.0, good=0.5, slow=1.5)
    counts, timer = timed(SimulatedMachine(), listed)
    assert counts == {"good": 5, "slow": 4, "absurd": 1}
    assert [o.ms for o in listed] == pytest.approx([1000.0, 0.5, 1.5])
    assert timer.loads.disturbed == []


def test_under_load_the_others_are_timed_again_until_the_load_ends():
    listed = options(absurd=1000.0, good=0.5, slow=1.5)
    counts, timer = timed(SimulatedMachine(busy=2), listed)
    assert counts == {"good": 15, "slow": 12, "absurd": 1}
    assert len(timer.loads.disturbed) == 2


def test_permanent_load_exhausts_the_patience():
    counts, timer = timed(SimulatedMachine(busy=999), options(good=0.5))
    assert len(timer.loads.disturbed) == PATIENCE + 1
    assert counts == {"good": 5 * (PATIENCE + 1)}


@pytest.mark.parametrize(("absurd", "times"), [(400.0, 2), (700.0, 1)])
def test_long_kernels_are_dropped_after_one_run_of_four_times_the_fastest(absurd, times):
    """A disturbance of milliseconds may explain it; then the next attempt runs it again."""
    counts, _ = timed(SimulatedMachine(busy=1), options(absurd=absurd, good=30.0, slow=60.0))
    assert counts == {"good": 8, "slow": 6, "absurd": times}


def test_a_run_that_may_have_been_interrupted_is_repeated():
    """Below 20 ms another process may have used the CPU for most of it."""
    assert timed(SimulatedMachine(), options(absurd=19.0, good=0.5))[0]["absurd"] == 2
    assert timed(SimulatedMachine(), options(absurd=21.0, good=0.5))[0]["absurd"] == 1


def test_a_dropped_option_is_corrected_for_the_drift_of_the_clock():
    """The slower option is dropped after three rounds, and later the machine is half as fast: the option is scaled and still takes 1.6 times as long.
    """
    listed = options(good=0.5, slow=0.8)
    counts, _ = timed(SimulatedMachine(clock=[1.0] * 14 + [2.0] * 40), listed, rounds=20)
    assert counts["slow"] < counts["good"]
    assert [o.ms for o in listed] == pytest.approx([1.0, 1.6])


def test_an_option_that_fails_gets_a_note_and_no_time():
    listed = options(good=0.5, broken=1.0)
    listed[1].kernel.error = ValueError("no such instruction")
    timed(SimulatedMachine(), listed)
    assert listed[1].ms is None
    assert listed[1].note == "could not be timed: no such instruction"
    assert listed[0].ms == pytest.approx(0.5)


def test_cached_times_are_read_and_replaced_when_remeasured():
    cache = TimingCache("")
    timed(SimulatedMachine(), options(good=5.0), cache=cache)
    again = options(good=0.5)
    counts, timer = timed(SimulatedMachine(), again, cache=cache)
    assert counts == {"good": 0}
    assert again[0].ms == pytest.approx(5.0)
    timer.time(relu(), "relu", again, remeasure=True)
    assert again[0].ms == pytest.approx(0.5)
    third = options(good=9.0)
    timed(SimulatedMachine(), third, cache=cache)
    assert third[0].ms == pytest.approx(0.5), "the stored time was replaced"


def test_ties_select_the_first_listed_option():
    def option(rank, ms, spread):
        o = Option(None, None, (), None, rank)
        o.ms, o.spread_ms = ms, spread
        return o

    assert select_fastest([option(0, 1.00, 0.05), option(1, 0.97, 0.01)]).rank == 0
    assert select_fastest([option(0, 1.00, 0.01), option(1, 0.97, 0.01)]).rank == 1
    assert select_fastest([option(0, 2.0, 0.01), option(1, 1.0, 0.0), option(2, 0.999, 0.0)]).rank == 1


def test_caches_have_the_state_after_a_network_run():
    machine = SimpleNamespace(capabilities=Capabilities(cache_bytes={2: 1 << 20, 3: 32 << 20}), threads=2)
    assert Conditions.of(machine, 1 << 19).state == "hot"
    assert Conditions.of(machine, 8 << 20) == Conditions("cold L2", 2 << 20)
    assert Conditions.of(machine, 64 << 20) == Conditions(COLD, 48 << 20)
