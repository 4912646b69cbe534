"""Graphs of an executable by the addresses of its inputs and outputs, without a GPU: what is captured, replayed and released."""

from typing import ClassVar

import pytest

from whet.backends.cuda import executor


class FakeStream:
    handle = None

    def synchronize(self):
        pass


class FakeGraph:
    """Notes the addresses that it was captured with."""

    live: ClassVar[list] = []

    def __init__(self, launches, stream):
        self.seen = [work.addresses for work in launches]
        self.live.append(self)

    def run(self, stream):
        RUNS.append(self.seen)

    def close(self):
        self.live.remove(self)


class Work:
    on_host = False

    def __init__(self, inputs, outputs):
        self.addresses = (inputs, outputs)


class Device:
    lost = ""

    def make_current(self):
        pass


RUNS: list = []


@pytest.fixture
def recorded(monkeypatch):
    """Two calls, x -> a -> y, as an executable."""
    monkeypatch.setattr(executor, "Stream", FakeStream)
    monkeypatch.setattr(executor, "Graph", FakeGraph)
    RUNS.clear()
    FakeGraph.live.clear()
    calls = [executor.GpuCall(lambda ins, outs: [Work(ins, outs)], [i], [o]) for i, o in ((1, 2), (2, 3))]
    return calls, executor.GpuExecutable(calls, Device())


def move(recorded, call, kind, address):
    calls, made = recorded
    calls[call].set_address(kind, 0, address)
    made.refresh([calls[call]])


def test_alternating_outputs_replay_two_graphs(recorded):
    _, made = recorded
    for address in (30, 40, 30, 40, 30, 40):
        move(recorded, 1, "output", address)
        made.enqueue(FakeStream())
        assert RUNS[-1] == [((1,), (2,)), ((2,), (address,))]
    assert len(FakeGraph.live) == 2


def test_calls_that_never_moved_before_are_part_of_the_key_from_then_on(recorded):
    _, made = recorded
    move(recorded, 1, "output", 30)
    made.enqueue()
    move(recorded, 0, "input", 10)
    made.enqueue()
    assert RUNS[-1] == [((10,), (2,)), ((2,), (30,))]
    move(recorded, 0, "input", 1)
    made.enqueue()
    assert RUNS[-1] == [((1,), (2,)), ((2,), (30,))]
    assert len(FakeGraph.live) == 2, "the graph of before has no address of the first call in its key"


def test_the_least_recently_used_graphs_are_released(recorded):
    _, made = recorded
    for address in range(100, 100 + executor.MAX_GRAPHS):
        move(recorded, 1, "output", address)
        made.enqueue()
    move(recorded, 1, "output", 100)
    made.enqueue()
    move(recorded, 1, "output", 500)
    made.enqueue()
    assert len(FakeGraph.live) == executor.MAX_GRAPHS
    outputs = {graph.seen[1][1] for graph in FakeGraph.live}
    assert (100,) in outputs
    assert (101,) not in outputs
    made.discard_graphs()
    assert FakeGraph.live == []
    made.enqueue()
    assert RUNS[-1][1] == ((2,), (500,))
