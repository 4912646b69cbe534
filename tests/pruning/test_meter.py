"""A layer's latency is that of its fastest timed tactic."""

import pytest

from whet.builder import BuildConfig
from whet.measure.timing import Timer
from whet.network import parse_network
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter


def test_options_that_were_not_timed_count_only_where_none_was(monkeypatch):
    """An option without a time has an estimate, which says nothing beside measured times."""
    (layer,) = parse_network("in %x: f32[4,8]\n%y = Relu(%x)\nout %y\n").layers
    seen = []

    def measure(times):
        def time(self, layer, text, options, keep=False):
            seen.append(options)
            for k, o in enumerate(options):
                o.ms, o.estimate_ms = (times(k) if k else None), 1e-6 + k

        monkeypatch.setattr(Timer, "time", time)
        with Meter(BuildConfig(threads=1, timing_cache=""), LatencyTable(), {layer.name: layer}) as meter:
            return meter.ms(layer)

    timed, estimated = measure(lambda k: 5.0 + k), measure(lambda k: None)
    if len(seen[0]) < 2:
        pytest.skip("this CPU has one kernel for the layer")
    assert timed == 6.0
    assert estimated == pytest.approx(1e-6)
