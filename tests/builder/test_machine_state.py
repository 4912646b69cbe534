"""What the timing report says of a GPU: its clocks when kernels had been timed, and who else was on it."""

from types import SimpleNamespace

from whet.builder import BuildConfig, build
from whet.builder.progress import Noting
from whet.errors import BackendError
from whet.measure.machine_state import machine_state
from whet.network import Network, parse_type

READ = {"sm_clock": 1980, "memory_clock": 3201, "power": 154.0, "temperature": 38, "used_memory": 2**30, "other_processes": ()}


def test_clocks_are_recorded_and_other_processes_are_told():
    tell = Noting(None)
    assert machine_state(SimpleNamespace(), tell) == {}
    assert machine_state(SimpleNamespace(state=lambda: READ), tell)["gpu"]["sm_clock"] == 1980
    assert tell.notes == []
    busy = machine_state(SimpleNamespace(state=lambda: {**READ, "other_processes": (12, 345)}), tell)
    assert busy["gpu"]["other_processes"] == [12, 345]
    assert tell.notes == [n for n in tell.notes if "(12, 345)" in n and "may be off" in n] != []


def test_a_gpu_that_tells_nothing_does_not_end_the_build():
    def silent():
        raise BackendError("NVML did not start")

    tell = Noting(None)
    assert machine_state(SimpleNamespace(state=silent), tell) == {"gpu": {"unknown": "NVML did not start"}}
    assert tell.notes == []


def test_it_stands_in_the_report_of_a_build(monkeypatch):
    from whet.backends.cpu import CpuBackend

    monkeypatch.setattr(CpuBackend, "state", lambda self: READ, raising=False)
    net = Network("net")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[2,3]"))), "y")
    plan = build(net, BuildConfig(timing_cache="", avg_timing=1, whole_engines=0))
    assert plan.report.timing.gpu.power == 154.0
