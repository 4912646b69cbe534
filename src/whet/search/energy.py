"""Energy meters: NVIDIA's counter (NVML) and the processor's (RAPL). Where there is none, the reason instead of a guess."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

POWERCAP = Path("/sys/class/powercap")


def meter(gpu: str | None, powercap: Path = POWERCAP) -> tuple[Callable[[], float] | None, str]:
    """A function that reads joules since some start, and what it measures; or None and why there is none.

    `gpu` is a number or UUID as NVML knows it, None for the processor.
    """
    return _rapl(powercap) if gpu is None else _nvml(gpu)


def per_run(run: Callable[[], object], read: Callable[[], float], seconds: float) -> dict[str, float]:
    """Joules of one `run`, over at least `seconds` (the counters tick in milliseconds); idle power is part of it.

    Keys: `mj` (millijoules), `watts`, `seconds`, `runs`.
    """
    run()
    first, start, runs = read(), perf_counter(), 0
    while perf_counter() - start < seconds or runs < 3:
        run()
        runs += 1
    spent, took = read() - first, perf_counter() - start
    return {"mj": 1e3 * spent / runs, "watts": spent / took, "seconds": took, "runs": float(runs)}


def _rapl(folder: Path) -> tuple[Callable[[], float] | None, str]:
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

    return read, f"RAPL, {len(counters)} processor package{'s' if len(counters) > 1 else ''}, idle power included"


def _nvml(gpu: str) -> tuple[Callable[[], float] | None, str]:
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
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, "NVML's energy counter of the whole GPU, idle power included"
