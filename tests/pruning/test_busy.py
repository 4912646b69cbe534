"""Times measured under external load are marked, reported, repeated on an idle machine, and never preferred to undisturbed ones."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from whet import zoo
from whet.backends import Capabilities, Load, get_backend
from whet.backends.null import NullBackend
from whet.builder.config import BuildConfig
from whet.cli.latency_table import command as latency_table
from whet.cli.prune import command as prune_command
from whet.frontends import network_from_onnx
from whet.pruning import PruneConfig, Target, busy, prune
from whet.pruning.latency_cost import lower_to_static_layers
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.staircase import compute_staircases

NULL = BuildConfig(backend="null", timing_cache="")
OTHERS = "other processes or virtual machines"


@pytest.fixture
def machine(monkeypatch):
    """The null machine with an external load of `others` CPUs, under which the layers with the largest weights take ten times as long. `left` is the
    number of timings until the load ends.
    """
    state = SimpleNamespace(others=0.0, left=10**9, timed=0)
    seconds = NullBackend.seconds

    @contextmanager
    def watch(self):
        load = Load()
        yield load
        load.others, load.seconds = state.others, 1.0

    def slowed(self, executable, repeats):
        state.timed += 1
        state.left -= 1
        if state.left < 0:
            state.others = 0.0
        found = seconds(self, executable, repeats)
        return [t * (10 if state.others and t > 2e-6 else 1) for t in found]

    monkeypatch.setattr(NullBackend, "watch", watch)
    monkeypatch.setattr(NullBackend, "capabilities", replace(NullBackend.capabilities, measures_load=True))
    monkeypatch.setattr(NullBackend, "seconds", slowed)
    for name in ("window_s", "look_s", "valid_s"):
        monkeypatch.setattr(busy.ExternalLoadMonitor, name, 0.0)
    return state


def test_load_is_looked_for_again_when_the_last_look_is_no_longer_valid(machine, monkeypatch):
    looks, real = [], NullBackend.watch

    def watch(self):
        looks.append(1)
        return real(self)

    monkeypatch.setattr(NullBackend, "watch", watch)
    monitor = busy.ExternalLoadMonitor(get_backend("null"))
    for valid_s, more in ((3600.0, 1), (3600.0, 0), (0.0, 1), (0.0, 1)):
        monitor.valid_s, before = valid_s, len(looks)
        assert monitor.quiet()
        assert len(looks) - before == more


@pytest.fixture(scope="module")
def net():
    return network_from_onnx(zoo.build("lenet5"))


def ms(table):
    return {k: r.ms for k, r in table.rows.items()}


def test_disturbed_rows_are_marked_and_timed_again_without_load(machine, net, tmp_path):
    truth = LatencyTable()
    stairs, total = compute_staircases(net, NULL, truth, most=3)
    assert truth.busy == 0
    machine.others = 1.5
    path = tmp_path / "t.json"
    table = LatencyTable(path)
    slow, slow_total = compute_staircases(net, NULL, table, most=3)
    assert slow_total > 2 * total
    assert table.busy == len(table.rows) == len(truth.rows)
    assert {r["others"] for r in json.loads(path.read_text())["rows"].values()} == {1.5}
    asked = machine.timed
    assert compute_staircases(net, NULL, LatencyTable(path), most=3) == (slow, slow_total)
    assert machine.timed == asked, "still busy: nothing is timed again"
    machine.others = 0.0
    again = LatencyTable(path)
    assert compute_staircases(net, NULL, again, most=3) == (stairs, total)
    assert (again.busy, ms(again)) == (0, ms(truth))
    assert LatencyTable(path).rows == again.rows


def test_disturbed_rows_are_timed_again_as_soon_as_the_load_ends(machine, net):
    truth = prune(net, PruneConfig(target=Target("latency", ratio=0.6), build=NULL))
    machine.others, machine.left = 2.0, 150
    done = prune(net, PruneConfig(target=Target("latency", ratio=0.6), build=NULL))
    assert machine.left < 0
    assert replace(done.report, doubtful=truth.report.doubtful) == truth.report
    assert done.report.doubtful[0] == 0
    assert {n: e.kept for n, e in done.recipe.groups.items()} == {n: e.kept for n, e in truth.recipe.groups.items()}


def test_under_lasting_load_the_affected_share_is_reported(machine, net, tmp_path):
    machine.others = 1.25
    report = prune(net, PruneConfig(target=Target("latency", ratio=0.6), build=NULL)).report
    marked, of, others = report.doubtful
    assert 10 < marked == of
    assert others == 1.25
    said = f"{marked} of {marked} layer times were measured while {OTHERS} used up to 1.2 CPUs. A latency table"
    assert said in report.lines()[2]


def test_retiming_replaces_the_table_and_the_timing_cache(machine, net, tmp_path):
    """Rows of an older table and times in the cache have no mark: --retime measures them again and updates both."""
    config = replace(NULL, timing_cache=str(tmp_path / "c.sqlite"))
    machine.others = 1.0
    table = LatencyTable(tmp_path / "t.json")
    compute_staircases(net, config, table, most=3)
    data = json.loads((tmp_path / "t.json").read_text())
    data["version"] = 1
    for row in data["rows"].values():
        del row["others"]
    (tmp_path / "t.json").write_text(json.dumps(data))
    machine.others = 0.0
    quiet, total = compute_staircases(net, NULL, LatencyTable(), most=3)
    assert compute_staircases(net, config, LatencyTable(tmp_path / "t.json"), most=3)[1] > 2 * total
    assert compute_staircases(net, config, LatencyTable(), most=3)[1] > 2 * total, "the timing cache has them too"
    assert compute_staircases(net, config, LatencyTable(tmp_path / "t.json"), most=3, retime=True) == (quiet, total)
    assert compute_staircases(net, config, LatencyTable(tmp_path / "t.json"), most=3) == (quiet, total)
    asked = machine.timed
    assert compute_staircases(net, config, LatencyTable(), most=3) == (quiet, total)
    assert machine.timed == asked, "from the timing cache"


def test_sums_inherit_the_mark_of_their_parts(machine):
    net = network_from_onnx(zoo.build("bert_base", batch=2, layers=1, sequence=9, hidden=96, heads=6))
    base = lower_to_static_layers(net, NULL)
    with Meter(NULL, LatencyTable(), base) as meter:
        truth = {name: meter.ms(x) for name, x in base.items()}
        assert not meter.retimable, "layers with final times are released"
    machine.others = 1.0
    with Meter(NULL, LatencyTable(), base) as meter:
        whole = {name: meter.ms(x) for name, x in base.items()}
        sums = {k: r for k, r in meter.table.rows.items() if r.tactic == "its parts"}
        if not sums:
            pytest.skip("the null machine computes every fused layer of this network whole")
        assert whole != truth
        assert all(meter.table.rows[k].others for k in sums)
        machine.others = 0.0
        assert meter.settle() == len(meter.table.rows)
        assert {name: meter.ms(x) for name, x in base.items()} == truth


def test_undisturbed_rows_replace_disturbed_ones(machine, net, tmp_path):
    quiet, path = LatencyTable(tmp_path / "q.json"), tmp_path / "b.json"
    compute_staircases(net, NULL, quiet, most=3)
    machine.others = 1.0
    busy_one = LatencyTable(path)
    compute_staircases(net, NULL, busy_one, most=3)
    late = LatencyTable(path)
    assert busy_one.take(tmp_path / "q.json") == len(quiet.rows)
    busy_one.save()
    assert LatencyTable(path).busy == 0
    late.mark(next(iter(late.rows)), 2.0)
    late.save()
    assert LatencyTable(path).busy == 0, "a table read earlier does not restore its disturbed rows"


def test_the_commands_report_disturbed_rows(machine, tmp_path):
    model, table = zoo.save("lenet5", tmp_path / "m.onnx"), tmp_path / "t.json"
    null = ["--backend=null", "--timingCacheFile", str(tmp_path / "c.sqlite")]
    machine.others = 1.0
    out = CliRunner().invoke(latency_table, [str(model), f"--export={table}", *null], catch_exceptions=False).output
    assert f"{LatencyTable(table).busy} rows were timed under external load: the next run on an idle machine" in out
    target = [str(model), "--latency=0.7x", f"--latencyTable={table}", "-o", str(tmp_path / "s.onnx"), *null]
    assert f"layer times were measured while {OTHERS} used up to 1.0 CPUs" in CliRunner().invoke(prune_command, target).output
    machine.others = 0.0
    out = CliRunner().invoke(prune_command, target, catch_exceptions=False).output
    assert "layer times behind this" not in out
    left = LatencyTable(table).busy
    assert 0 < left < len(LatencyTable(table).rows), "only rows used by the selection are timed again"
    assert "used the CPUs" not in CliRunner().invoke(latency_table, [str(model), f"--export={table}", *null]).output
    timed = machine.timed
    CliRunner().invoke(latency_table, [str(model), f"--export={table}", "--retime", *null], catch_exceptions=False)
    assert machine.timed > timed + 100


class Clock:
    """The `time` of a module: seconds pass only in `sleep`."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_short_timings_share_a_window(monkeypatch):
    """The system counts CPU time in ticks: intervals shorter than a window are judged together with the following ones."""
    taken, clock = [], Clock()
    monkeypatch.setattr(busy, "time", clock)

    @contextmanager
    def watch():
        load, start = Load(), clock.now
        yield load
        load.seconds, load.others = clock.now - start, 1.0
        taken.append(load.seconds)

    seen = busy.ExternalLoadMonitor(SimpleNamespace(watch=watch, capabilities=Capabilities(measures_load=True)))
    seen.window_s, seen.look_s = 15.0, 12.0
    windows = []
    for k in range(40):
        seen.begin()
        clock.sleep(1.0)
        windows.append(seen.record(str(k)))
    windows.append(seen.end())
    assert [len(w.keys) for w in windows if w.keys] == [15, 15, 10]
    assert [k for w in windows for k in w.keys] == [str(k) for k in range(40)]
    assert {w.others for w in windows if w.keys} == {1.0}
    assert taken == [15.0, 15.0, 12.0], "the last one waits until the load can be judged"
    assert busy.ExternalLoadMonitor(get_backend("null")).quiet(), "a backend that does not measure the load"
