"""Energy meters: NVIDIA's counter (NVML) and the processor's (RAPL), what a run spends and what of it the idle device would have spent anyway.

Where there is no meter, the reason instead of a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_TICK = 0.3  # seconds that a counter is waited for until it moves: NVML's is renewed every 20 to 100 ms, RAPL's every one
_SETTLED = 0.97  # an idle device whose power falls by less from one window to the next has settled
_WINDOWS = 6
_WARM = 0.25

Read = Callable[[], float]


class Meter:
    """One device's energy counter, and the power that it draws at rest. `about` says what is read, or why nothing is.

    `gpu` is a number or UUID as NVML knows it, None for the processor.
    """

    def __init__(self, gpu: str | None, powercap: Path = POWERCAP):
        self.read, self.about = meter(gpu, powercap)
        self.idle: float | None = None  # watts

    def rest(self, seconds: float) -> None:
        """Measures the power of the device while this process leaves it alone; to be called before the load, with its context open.

        A GPU that has just computed cools down first: windows follow each other until the power has settled.
        """
        if self.read is None:
            return
        last = idle_power(self.read, seconds / 2)
        for _ in range(_WINDOWS - 1):
            self.idle = idle_power(self.read, seconds / 2)
            if self.idle >= _SETTLED * last:
                break
            last = self.idle

    def of(self, run: Callable[[], object], batch: int, seconds: float) -> dict[str, Any]:
        """Energy of one sample of a `run` over `batch` of them, measured for at least `seconds`.

        Keys: `mj`, millijoules of the whole device (gross); `net_mj`, without what it draws at rest; `watts`, `idle_watts`; `about`.
        What could not be measured is None, and `about` says why.
        """
        if self.read is None:
            return {"mj": None, "net_mj": None, "about": self.about}
        found = per_run(run, self.read, seconds)
        about = f"{self.about}; {found['runs']:.0f} runs in {found['seconds']:.1f} s"
        net = None
        if self.idle is None:
            about += "; power at rest was not measured"
        elif self.idle >= found["watts"]:
            about += f"; no net energy: the device drew {self.idle:.0f} W before the load and {found['watts']:.0f} W under it, so others use it too"
        else:
            net = found["mj"] * (1 - self.idle / found["watts"]) / batch
            about += f"; net of {self.idle:.0f} W that the device drew at rest, before the load"
        return {"mj": found["mj"] / batch, "net_mj": net, "watts": found["watts"], "idle_watts": self.idle, "about": about}


def meter(gpu: str | None, powercap: Path = POWERCAP) -> tuple[Read | None, str]:
    """A function that reads joules since some start, and what it measures; or None and why there is none. `gpu` as Meter takes it."""
    return _rapl(powercap) if gpu is None else _nvml(gpu)


def idle_power(read: Read, seconds: float) -> float:
    """Watts over at least `seconds` in which this process does nothing, from one move of the counter to another."""
    first, start = _moved(read, sleep_a_little)
    sleep(seconds)
    last, end = _moved(read, sleep_a_little)
    return (last - first) / (end - start)


def per_run(run: Callable[[], object], read: Read, seconds: float) -> dict[str, float]:
    """Joules of one `run` over at least `seconds`, from one move of the counter to another: a coarse counter cuts no run short.

    A quarter of that time goes by under load first: clocks, power and the counter itself follow a load only after some tenths of a second.
    Keys: `mj` (millijoules, all that the device drew), `watts`, `seconds`, `runs`.
    """
    runs = 0

    def once() -> None:
        nonlocal runs
        run()
        runs += 1

    began = perf_counter()
    while perf_counter() - began < _WARM * seconds:
        once()
    first, start = _moved(read, once)
    runs = 0
    while perf_counter() - start < seconds or runs < 3:
        once()
    last, end = _moved(read, once)
    return {"mj": 1e3 * (last - first) / runs, "watts": (last - first) / (end - start), "seconds": end - start, "runs": float(runs)}


def _moved(read: Read, meanwhile: Callable[[], None]) -> tuple[float, float]:
    """(joules, time) when the counter has just moved; after _TICK seconds as it stands. `meanwhile` keeps the device as it is."""
    before, began = read(), perf_counter()
    while True:
        meanwhile()
        found, now = read(), perf_counter()
        if found != before or now - began > _TICK:
            return found, now


def sleep_a_little() -> None:
    """Waits without loading the processor."""
    sleep(1e-3)


def _rapl(folder: Path) -> tuple[Read | None, str]:
    packages = sorted(p for p in folder.glob("intel-rapl:*") if p.name.count(":") == 1)  # AMD's counters have Intel's name too
    if not packages:
        return None, f"not measurable: {folder} has no RAPL counters (a virtual machine hides them)"
    counters = []
    for p in packages:
        try:
            span = float((p / "max_energy_range_uj").read_text())
            float((p / "energy_uj").read_text())
        except (OSError, ValueError) as e:
            return None, f"not measurable: {p / 'energy_uj'} cannot be read ({e}); it needs root"
        counters.append((p / "energy_uj", span))
    last = [float(path.read_text()) for path, _ in counters]
    total = [0.0]

    def read() -> float:
        for i, (path, span) in enumerate(counters):
            now = float(path.read_text())
            total[0] += (now - last[i]) % span if span else now - last[i]  # the counters wrap
            last[i] = now
        return total[0] / 1e6

    return read, f"RAPL, {len(counters)} processor package{'s' if len(counters) > 1 else ''}"


def _nvml(gpu: str) -> tuple[Read | None, str]:
    try:
        import pynvml
    except ImportError as e:
        return None, f"not measurable: nvidia-ml-py cannot be loaded ({e}); pip install 'whet[cuda]'"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as e:
        return None, f"not measurable: NVML's energy counter does not answer ({e})"
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, "NVML's energy counter of the whole GPU"
