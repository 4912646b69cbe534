"""The state of a GPU in the timing report: its clocks after kernels were timed, and other processes."""

from types import SimpleNamespace

from whet.builder import BuildConfig, build
from whet.errors import BackendError
from whet.measure.machine_state import read_machine_state
from whet.network import Network, parse_type

READ = {"sm_clock": 1980, "memory_clock": 3201, "power": 154.0, "temperature": 38, "used_memory": 2**30, "other_processes": ()}


def test_clocks_are_recorded_and_other_processes_are_reported():
    notes = []
    assert read_machine_state(SimpleNamespace(state=dict), notes.append) == {}
    assert read_machine_state(SimpleNamespace(state=lambda: READ), notes.append)["gpu"]["sm_clock"] == 1980
    assert notes == []
    busy = read_machine_state(SimpleNamespace(state=lambda: {**READ, "other_processes": (12, 345)}), notes.append)
    assert busy["gpu"]["other_processes"] == [12, 345]
    assert notes == [n for n in notes if "(12, 345)" in n and "may be off" in n] != []


def test_a_gpu_without_a_reading_does_not_end_the_build():
    def silent():
        raise BackendError("NVML did not start")

    notes = []
    assert read_machine_state(SimpleNamespace(state=silent), notes.append) == {"gpu": {"unknown": "NVML did not start"}}
    assert notes == []


def test_the_report_of_a_build_has_it(monkeypatch):
    from whet.backends.cpu import CpuBackend

    monkeypatch.setattr(CpuBackend, "state", lambda self: READ, raising=False)
    net = Network("net")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[2,3]"))), "y")
    plan = build(net, BuildConfig(timing_cache="", avg_timing=1, whole_engines=0))
    assert plan.report.timing.gpu.power == 154.0
