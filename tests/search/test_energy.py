"""Energy: gross energy of a run and the idle energy included in it, on devices with known power; readings of NVML and RAPL."""

from __future__ import annotations

import sys

import pytest

from whet.search.stages import energy


class Device:
    """A device with a simulated clock: draws `idle` W, or `load` W while running, cools down after work; its counter is updated every `tick` s."""

    def __init__(self, idle=100.0, load=300.0, tick=0.1, run=0.004, cooling=0.0):
        self.idle, self.load, self.tick, self.seconds_a_run, self.cooling = idle, load, tick, run, cooling
        self.now = self.joules = self.shown = 0.0
        self.next = tick

    def spend(self, seconds, watts):
        while seconds > 0:
            step = min(seconds, self.next - self.now)
            self.joules += step * watts
            self.now += step
            seconds -= step
            if self.now >= self.next - 1e-12:
                self.shown, self.next = self.joules, self.next + self.tick

    def sleep(self, seconds):
        self.spend(seconds, self.idle + self.cooling * 0.5**self.now)

    def run(self):
        self.spend(self.seconds_a_run, self.load)

    def meter(self, monkeypatch, read=None):
        monkeypatch.setattr(energy, "perf_counter", lambda: self.now)
        monkeypatch.setattr(energy, "sleep", self.sleep)
        monkeypatch.setattr(energy, "find_meter", lambda gpu, powercap=None: (read or (lambda: self.shown), "a counter"))
        return energy.Meter(None)


@pytest.mark.parametrize("tick", [0.001, 0.1])
def test_net_energy_excludes_idle_power(tick, monkeypatch):
    device = Device(idle=100, load=300, tick=tick, run=0.004)
    meter = device.meter(monkeypatch)
    meter.measure_idle(1.0)
    assert meter.idle == pytest.approx(100, rel=0.02)
    found = meter.measure_energy(device.run, 8, 0.5)
    assert found["mj"] == pytest.approx(300 * 4 / 8, rel=0.02)  # 300 W for 4 ms over 8 samples
    assert found["net_mj"] == pytest.approx(200 * 4 / 8, rel=0.03)
    assert found["watts"] == pytest.approx(300, rel=0.02)
    assert found["idle_watts"] == meter.idle
    assert "net of 100 W idle power" in found["about"]


def test_a_warm_device_cools_down_first(monkeypatch):
    device = Device(idle=100, load=300, cooling=60.0)
    meter = device.meter(monkeypatch)
    meter.measure_idle(2.0)
    assert meter.idle < 110
    assert device.now < 10  # but not indefinitely


def test_a_device_in_use_by_others_has_no_net_energy(monkeypatch):
    device = Device(idle=320, load=300)
    meter = device.meter(monkeypatch)
    meter.measure_idle(1.0)
    found = meter.measure_energy(device.run, 1, 0.5)
    assert found["mj"] == pytest.approx(1200, rel=0.02)
    assert found["net_mj"] is None
    assert "no net energy: the device drew 320 W before the load and 300 W under load" in found["about"]


def test_a_stuck_counter_is_not_waited_for(monkeypatch):
    device = Device()
    meter = device.meter(monkeypatch, read=lambda: 7.0)
    meter.measure_idle(0.2)
    assert device.now < 3
    assert meter.measure_energy(device.run, 1, 0.1)["mj"] == 0


def test_unmeasured_idle_power_is_reported(monkeypatch):
    device = Device()
    found = device.meter(monkeypatch).measure_energy(device.run, 1, 0.5)
    assert found["net_mj"] is None
    assert found["mj"] == pytest.approx(1200, rel=0.02)
    assert "idle power was not measured" in found["about"]


class Nvml:
    """The part of pynvml that energy.py uses, for a GPU that has used 5 J and then 1.5 J more."""

    class NVMLError(Exception):
        pass

    def __init__(self, refuses=""):
        self.refuses, self.asked, self.millijoules = refuses, [], iter([5000, 5000, 6500])

    def nvmlInit(self):
        if self.refuses:
            raise self.NVMLError(self.refuses)

    def nvmlDeviceGetHandleByIndex(self, number):
        self.asked.append(number)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, name):
        self.asked.append(name)
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        assert handle == "handle"
        return next(self.millijoules)


@pytest.mark.parametrize(("gpu", "expected"), [("3", 3), ("GPU-abc", "GPU-abc")])
def test_a_gpus_energy_is_the_difference_of_its_counter(gpu, expected, monkeypatch):
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    read, about = energy.find_meter(gpu)
    assert fake.asked == [expected]
    assert "NVML" in about
    first = read()
    assert read() - first == pytest.approx(1.5)  # joules
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("no driver"))
    assert energy.find_meter(gpu) == (None, "not measurable: NVML's energy counter is not available (no driver)")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.find_meter(gpu)[0] is None
    assert "pip install 'whet[cuda]'" in energy.find_meter(gpu)[1]


def test_rapl_counters_are_read_across_their_wrap(tmp_path):
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (tmp_path / "intel-rapl:0:0").mkdir()  # a subdomain of it, which must not be counted twice
    (package / "max_energy_range_uj").write_text("1000000")
    counter = package / "energy_uj"
    counter.write_text("900000")
    read, about = energy.find_meter(None, tmp_path)
    assert read is not None
    assert "1 processor package" in about
    counter.write_text("100000")
    assert read() == pytest.approx(0.2)
    found = energy.measure_run(lambda: counter.write_text(str(int(counter.read_text()) + 5000)), read, 0.01)
    assert found["mj"] == pytest.approx(5.0)


def test_a_missing_meter_is_reported_and_not_estimated(tmp_path):
    meter = energy.Meter(None, tmp_path)
    meter.measure_idle(1.0)
    found = meter.measure_energy(lambda: None, 1, 1.0)
    assert found["mj"] is None
    assert found["net_mj"] is None
    assert found["about"].startswith("not measurable")
