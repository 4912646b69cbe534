"""Measuring a latency table on a GPU compiles ahead in batches: a layer's kernels at once, all widths of a group together."""

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.standin_gpu import StandInGpu
from whet.builder import BuildConfig
from whet.network import parse_network
from whet.pruning.latency_cost import lower_to_static_layers
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.staircase import compute_staircases

NET = """network block source
in %x: f32[1,32,14,14]
const %w0: f32[64,32,3,3] = seed(1)
const %w1: f32[48,64,3,3] = seed(2)
const %w2: f32[32,48,3,3] = seed(3)
%a = Conv(%x, %w0, pads=(1, 1, 1, 1)) from "first"
%b = Relu(%a) from "first_relu"
%c = Conv(%b, %w1, pads=(1, 1, 1, 1)) from "second"
%d = Relu(%c) from "second_relu"
%y = Conv(%d, %w2, pads=(1, 1, 1, 1)) from "third"
out %y
"""
CONFIG = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", avg_timing=1)


@pytest.fixture
def events(monkeypatch, standin_gpu):
    """Records events in order: ("compile", texts), and ("time", None) for each timed run."""
    seen: list[tuple[str, list[str]]] = []
    seconds = StandInGpu.seconds

    def timed(self, executable, repeats):
        seen.append(("time", []))
        return seconds(self, executable, repeats)

    monkeypatch.setattr(StandInGpu, "seconds", timed)
    monkeypatch.setattr(StandInGpu, "capabilities", replace(StandInGpu.capabilities, compiles_ahead=True))
    monkeypatch.setattr(StandInGpu, "compile_ahead", lambda self, sources: seen.append(("compile", list(sources))))
    return seen


def bursts(events):
    """Numbers of texts compiled between two timings, empty batches omitted."""
    counts, fresh = [], 0
    for kind, texts in events:
        if kind == "compile":
            fresh += len(texts)
        elif fresh:
            counts.append(fresh)
            fresh = 0
    assert not fresh, "compiled but not used"
    return counts


def test_kernels_are_compiled_in_batches(events):
    net = parse_network(NET)
    table = LatencyTable()
    stairs, _ = compute_staircases(net, CONFIG, table, most=6)
    assert [len(s.widths) for s in stairs] == [6, 6]
    counts = bursts(events)
    assert len(table.rows) >= 16
    assert len(counts) == 3, "the whole layers, the widths of the first group, those of the second"
    assert min(counts) > 30


def test_kernels_in_the_table_or_the_timing_cache_are_not_compiled(events, tmp_path):
    net, config = parse_network(NET), replace(CONFIG, timing_cache=str(tmp_path / "t.sqlite"))
    table = LatencyTable()
    compute_staircases(net, config, table, most=3)
    assert events
    events.clear()
    again, _ = compute_staircases(net, config, table, most=3)
    assert not events
    other, _ = compute_staircases(net, config, LatencyTable(), most=3)
    assert other == again
    assert all(kind == "compile" for kind, _ in events)
    least = sum(len(texts) for _, texts in events)
    compute_staircases(net, replace(config, timing_cache=""), LatencyTable(), most=3)
    assert least < sum(len(texts) for _, texts in events) / 2


def test_announced_layers_are_listed_once_and_only_while_they_wait(events):
    base = lower_to_static_layers(parse_network(NET), CONFIG)
    with Meter(CONFIG, LatencyTable(), base) as meter:
        meter.announce(base.values())
        asked = len(events)
        assert asked == len(base)
        meter.announce(base.values())
        for layer in base.values():
            meter.ms(layer)
        assert sum(kind == "compile" for kind, _ in events) == asked
        meter.announce(base.values())
        assert sum(kind == "compile" for kind, _ in events) == asked
        assert not meter.announced
