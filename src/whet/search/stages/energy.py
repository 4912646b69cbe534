"""Energy meters on NVIDIA's counter (NVML) and the processor's (RAPL): gross energy of a run, and net of the idle power.

Without a counter the reason is reported; energy is never estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_TICK = 0.3  # seconds to wait for a counter update: NVML updates every 20 to 100 ms, RAPL every ms
_SETTLED = 0.97  # ratio of successive windows' idle power above which it counts as settled
_WINDOWS = 6
_WARM = 0.25

Read = Callable[[], float]


class Meter:
    """One device's energy counter and idle power. `about` names the counter, or the reason why there is none.

    `gpu` is an NVML index or UUID, None for the processor.
    """

    def __init__(self, gpu: str | None, powercap: Path = POWERCAP):
        self.read, self.about = find_meter(gpu, powercap)
        self.idle: float | None = None  # watts

    def measure_idle(self, seconds: float) -> None:
        """Measures the device's idle power; to be called before the load, with its context open.

        A GPU that was just busy cools down first: windows are repeated until the power has settled.
        """
        if self.read is None:
            return
        last = measure_idle_power(self.read, seconds / 2)
        for _ in range(_WINDOWS - 1):
            self.idle = measure_idle_power(self.read, seconds / 2)
            if self.idle >= _SETTLED * last:
                break
            last = self.idle

    def measure_energy(self, run: Callable[[], object], batch: int, seconds: float) -> dict[str, Any]:
        """Energy per sample of `run`, which processes `batch` samples; measured for at least `seconds`.

        Keys: `mj`, millijoules of the whole device (gross); `net_mj`, net of idle power; `watts`, `idle_watts`; `about`.
        Values that could not be measured are None, with the reason in `about`.
        """
        if self.read is None:
            return {"mj": None, "net_mj": None, "about": self.about}
        measured = measure_run(run, self.read, seconds)
        about = f"{self.about}; {measured['runs']:.0f} runs in {measured['seconds']:.1f} s"
        net = None
        if self.idle is None:
            about += "; idle power was not measured"
        elif self.idle >= measured["watts"]:
            about += f"; no net energy: the device drew {self.idle:.0f} W before the load and {measured['watts']:.0f} W under load, so others use it"
        else:
            net = measured["mj"] * (1 - self.idle / measured["watts"]) / batch
            about += f"; net of {self.idle:.0f} W idle power before the load"
        return {"mj": measured["mj"] / batch, "net_mj": net, "watts": measured["watts"], "idle_watts": self.idle, "about": about}


def find_meter(gpu: str | None, powercap: Path = POWERCAP) -> tuple[Read | None, str]:
    """A function that reads a joule counter, with its description; or None with the reason. `gpu` as in Meter."""
    return _find_rapl(powercap) if gpu is None else _find_nvml(gpu)


def measure_idle_power(read: Read, seconds: float) -> float:
    """Watts over at least `seconds` in which this process sleeps, measured between counter updates."""
    first, start = _wait_for_update(read, sleep_a_little)
    sleep(seconds)
    last, end = _wait_for_update(read, sleep_a_little)
    return (last - first) / (end - start)


def measure_run(run: Callable[[], object], read: Read, seconds: float) -> dict[str, float]:
    """Energy of one `run` over at least `seconds`, measured between counter updates, so that a coarse counter truncates no run.

    A quarter of that time is warm-up: clocks, power and the counter follow a load only after some tenths of a second.
    Keys: `mj` (millijoules of the whole device), `watts`, `seconds`, `runs`.
    """
    runs = 0

    def run_once() -> None:
        nonlocal runs
        run()
        runs += 1

    began = perf_counter()
    while perf_counter() - began < _WARM * seconds:
        run_once()
    first, start = _wait_for_update(read, run_once)
    runs = 0
    while perf_counter() - start < seconds or runs < 3:
        run_once()
    last, end = _wait_for_update(read, run_once)
    return {"mj": 1e3 * (last - first) / runs, "watts": (last - first) / (end - start), "seconds": end - start, "runs": float(runs)}


def _wait_for_update(read: Read, meanwhile: Callable[[], None]) -> tuple[float, float]:
    """(joules, time) right after a counter update, or after _TICK seconds without one. `meanwhile` is called in between to maintain the load."""
    before, began = read(), perf_counter()
    while True:
        meanwhile()
        start, now = read(), perf_counter()
        if start != before or now - began > _TICK:
            return start, now


def sleep_a_little() -> None:
    """Waits without loading the processor."""
    sleep(1e-3)


def _find_rapl(folder: Path) -> tuple[Read | None, str]:
    packages = sorted(p for p in folder.glob("intel-rapl:*") if p.name.count(":") == 1)  # AMD's counters also carry Intel's name
    if not packages:
        return None, f"not measurable: {folder} has no RAPL counters (a virtual machine hides them)"
    counters = []
    for p in packages:
        try:
            span = float((p / "max_energy_range_uj").read_text(encoding="utf-8"))
            float((p / "energy_uj").read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            return None, f"not measurable: {p / 'energy_uj'} cannot be read ({e}); it needs root"
        counters.append((p / "energy_uj", span))
    last = [float(path.read_text(encoding="utf-8")) for path, _ in counters]
    total = [0.0]

    def read() -> float:
        for i, (path, span) in enumerate(counters):
            now = float(path.read_text(encoding="utf-8"))
            total[0] += (now - last[i]) % span if span else now - last[i]  # the counters wrap
            last[i] = now
        return total[0] / 1e6

    return read, f"RAPL, {len(counters)} processor package{'s' if len(counters) > 1 else ''}"


def _find_nvml(gpu: str) -> tuple[Read | None, str]:
    try:
        import pynvml
    except ImportError as e:
        return None, f"not measurable: nvidia-ml-py cannot be loaded ({e}); pip install 'whet[cuda]'"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as e:
        return None, f"not measurable: NVML's energy counter is not available ({e})"
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, "NVML's energy counter of the whole GPU"
