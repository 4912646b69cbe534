"""Who is timed how often: what a library has for reference may take a second where others take half a millisecond, and one run tells."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from whet.backends import Backend, Load
from whet.measure import timing
from whet.measure.timing import Conditions, Timer
from whet.measure.timing_cache import TimingCache

GOOD, SLOW, ABSURD = 0, 1, 2


class Machine(Backend):
    """Runs take what is written here, in ms by option; the first `busy` measurements find other programs at work."""

    def __init__(self, busy=0, **ms):
        self.busy, self.ms, self.runs_of = busy, {GOOD: 0.5, SLOW: 1.5, ABSURD: 1000.0} | {globals()[k.upper()]: v for k, v in ms.items()}, []

    def key(self):
        return "invented"

    def seconds(self, option, n):
        self.runs_of.append(option.rank)
        return [self.ms[option.rank] / 1e3] * n

    @contextmanager
    def watch(self):
        disturbed, self.busy = self.busy > 0, self.busy - 1
        yield Load(1.0, 1.0 if disturbed else 0.0)


@pytest.fixture
def timed(monkeypatch):
    """Times three options on a machine; gives how often each ran."""
    bench = SimpleNamespace(prepare=lambda option: (option, 1))
    monkeypatch.setattr(timing, "Bench", lambda timer, layer: bench)
    monkeypatch.setattr(timing, "_about", lambda option, text: {})
    monkeypatch.setattr(Timer, "key", lambda self, option, text: f"{option.rank}")

    def run(machine):
        options = [SimpleNamespace(rank=rank, ms=None, spread_ms=0.0, note="") for rank in (ABSURD, GOOD, SLOW)]
        timer = Timer(machine, TimingCache(""), Conditions("hot", 0), rounds=4)
        timer.time(SimpleNamespace(name="conv"), "conv", options)
        assert {o.rank: o.ms for o in options} == machine.ms
        return {rank: machine.runs_of.count(rank) for rank in machine.ms}, len(timer.disturbed)

    return run


def test_what_takes_a_second_runs_once(timed):
    assert timed(Machine()) == ({GOOD: 5, SLOW: 4, ABSURD: 1}, 0)


def test_in_a_busy_moment_too(timed):
    """The others are measured again until it is quiet; what no disturbance explains stays as it was measured."""
    assert timed(Machine(busy=2)) == ({GOOD: 15, SLOW: 12, ABSURD: 1}, 2)


def test_where_all_of_a_layer_is_long_the_same_factor_counts(timed):
    """A first run of four times the best is enough for kernels of milliseconds; disturbances of milliseconds make it come again."""
    machine = Machine(busy=1, good=30.0, slow=60.0, absurd=400.0)
    assert timed(machine) == ({GOOD: 8, SLOW: 6, ABSURD: 2}, 1)
    machine = Machine(busy=1, good=30.0, slow=60.0, absurd=700.0)
    assert timed(machine) == ({GOOD: 8, SLOW: 6, ABSURD: 1}, 1)


def test_what_may_have_been_interrupted_is_timed_again(timed):
    """Under 20 ms another program may have had the CPU for most of it."""
    assert timed(Machine(absurd=19.0))[0][ABSURD] == 2
    assert timed(Machine(absurd=21.0))[0][ABSURD] == 1


def test_what_left_in_a_fast_moment_is_told_as_of_the_end(monkeypatch):
    """One of 1.6 times the best one's time leaves after three rounds, and after nine the machine is half as fast: it takes 1.6 times still."""
    rounds = iter([1.0] * 14 + [2.0] * 40)

    class Moody(Machine):
        def seconds(self, option, n):
            return [s * next(rounds) for s in super().seconds(option, n)]

    bench = SimpleNamespace(prepare=lambda option: (option, 1))
    monkeypatch.setattr(timing, "Bench", lambda timer, layer: bench)
    monkeypatch.setattr(timing, "_about", lambda option, text: {})
    monkeypatch.setattr(Timer, "key", lambda self, option, text: f"{option.rank}")
    good, slow = (SimpleNamespace(rank=rank, ms=None, spread_ms=0.0, note="") for rank in (GOOD, SLOW))
    machine = Moody(slow=0.8)
    Timer(machine, TimingCache(""), Conditions("hot", 0), rounds=20).time(SimpleNamespace(name="conv"), "conv", [good, slow])
    assert machine.runs_of.count(SLOW) < machine.runs_of.count(GOOD)
    assert (good.ms, slow.ms) == pytest.approx((1.0, 1.6))
