"""Times engines interleaved, batch by batch; on a GPU with power and utilization. As a script it times engine files and prints the results:

    python examples/yolov5s/timing.py --backend cuda --batches 1,2,4,8 ENGINE ENGINE

so that run.py can use several processes with different memory layouts. With `--probe ENGINE` a small engine runs before and after each round
to detect external load: twice as many rounds are timed, and the half during which the probe ran fastest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import whet

IMAGE = 640
ROUNDS, SECONDS = 5, 0.4  # engines are interleaved: number of rounds, and seconds of each
SHORTEST = 0.1  # seconds of a round with several processes
TRIES = 2  # factor of additional rounds with a probe
PATIENCE = 1.0  # maximum seconds that a round waits for an idle machine
SLOWER = 1.1  # slower than the probe's best in this process: external load
IN_ROW = {"cpu": 1, "cuda": 5}  # runs between two readings of the clock: on a GPU back to back, on a CPU one by one


@dataclass
class Times:
    """Measurements of an engine by batch: milliseconds of every round, of the probe runs around it (the slower of two; 0 without one), power in W and
    utilization in percent."""

    ms: dict[int, list[float]] = field(default_factory=dict)
    probe: dict[int, list[float]] = field(default_factory=dict)
    power: dict[int, list[float]] = field(default_factory=dict)
    busy: dict[int, list[float]] = field(default_factory=dict)

    def add(self, other: dict[str, dict[str, list[float]]]) -> None:
        """Adds the printed measurements of another process for the same engine."""
        for name, found in other.items():
            for batch, values in found.items():
                getattr(self, name).setdefault(int(batch), []).extend(values)

    def keep_quiet(self) -> None:
        """Keeps the half of each batch's rounds during which the probe ran fastest, in order. No fixed bound, because clocks drift."""
        for batch, rounds in self.probe.items():
            quiet = sorted(sorted(range(len(rounds)), key=rounds.__getitem__)[: -(-len(rounds) // TRIES)])
            self.ms[batch] = [self.ms[batch][n] for n in quiet]


class Probe:
    """Times one run of a small engine; without one, 0."""

    def __init__(self, engine: whet.Engine | None):
        self._bound = None
        self.best = float("inf")
        if engine is not None:
            self._context = engine.create_context()
            self._bound = self._context.launches()
            self._bound.run()

    def ms(self) -> float:
        """Median of several runs."""
        if self._bound is None:
            return 0.0
        taken = statistics.median(self._bound.seconds_in_row(15)) * 1e3
        self.best = min(self.best, taken)
        return taken

    def wait(self) -> float:
        """The same, once the machine is idle or PATIENCE has passed."""
        until = time.perf_counter() + PATIENCE
        while (taken := self.ms()) > SLOWER * self.best and time.perf_counter() < until:
            time.sleep(0.02)  # load by other guests of the host can only be polled; without a pause polling would keep a core busy
        return taken


def measure(
    engines: Sequence[whet.Engine],
    batches: Sequence[int],
    backend: str,
    seconds: float = SECONDS,
    turned: bool = False,
    probed: whet.Engine | None = None,
) -> list[Times]:
    """Times every engine at every batch, interleaved in rounds of about `seconds`; every other round in reverse order, the first too if `turned`.
    With `probed` each round waits until the machine is idle, at most PATIENCE, and there are TRIES times as many rounds."""
    found, probe = [Times() for _ in engines], Probe(probed)
    for batch in batches:
        images = np.random.default_rng(0).random((batch, 3, IMAGE, IMAGE), np.float32)
        contexts, bounds = [engine.create_context() for engine in engines], []
        for context in contexts:
            context.set_input_shape("images", images.shape)
            bounds.append(context.launches())
            bounds[-1].feed({"images": images})
            bounds[-1].run()
        for n in range(ROUNDS * TRIES if probed else ROUNDS):
            beside = probe.wait()
            for times, bound in list(zip(found, bounds, strict=True))[:: -1 if n % 2 != turned else 1]:
                with Watch(backend) as watch:
                    taken, until = [], time.perf_counter() + seconds
                    while time.perf_counter() < until:
                        taken += bound.seconds_in_row(IN_ROW[backend])
                times.ms.setdefault(batch, []).append(statistics.median(taken) * 1e3)
                times.power.setdefault(batch, []).extend(watch.power)
                times.busy.setdefault(batch, []).extend(watch.busy)
            beside = max(beside, probe.ms())
            for times in found:
                times.probe.setdefault(batch, []).append(beside)
        for context in contexts:
            context.close()
    return found


def measure_apart(
    paths: Sequence[Path], batches: Sequence[int], backend: str, processes: int, until: float = float("inf"), probe: Path | None = None
) -> list[Times]:
    """The same for engine files in several processes, one after the other, every other one `turned`. Except for the first, no process begins that
    would probably end after `until` (time.perf_counter). Raises CalledProcessError."""
    found, start = [Times() for _ in paths], time.perf_counter()
    for n in range(processes):
        now = time.perf_counter()
        if n and now + 1.1 * (now - start) / n > until:
            break
        words = [sys.executable, __file__, "--backend", backend, "--batches", ",".join(map(str, batches)), *map(str, paths)]
        words += ["--seconds", str(max(SHORTEST, SECONDS / processes)), *(["--turned"] if n % 2 else [])]
        words += ["--probe", str(probe)] if probe else []
        told = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
        for times, more in zip(found, told, strict=True):
            times.add(more)
    return found


class Watch:
    """Reads a GPU's power (W) and utilization (%) every 50 ms during a run; does nothing on a CPU."""

    def __init__(self, backend: str):
        self.power: list[float] = []
        self.busy: list[float] = []
        self._on = backend == "cuda"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"  # CUDA's first device; NVML numbers all devices
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(first)
        while not self._stop.wait(0.05):
            self.power.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
            self.busy.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        pynvml.nvmlShutdown()

    def __enter__(self) -> Watch:
        if self._on:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._on:
            self._thread.join()


def main() -> None:
    """Times the given engine files."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("engines", nargs="+", type=Path)
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--batches", default="1,2,4,8")
    p.add_argument("--seconds", type=float, default=SECONDS, help="of a round")
    p.add_argument("--turned", action="store_true", help="begin with the last")
    p.add_argument("--probe", type=Path, help="engine for detecting external load")
    args = p.parse_args()
    runtime = whet.Runtime(backend=args.backend)
    found = measure([runtime.load(path) for path in args.engines], [int(b) for b in args.batches.split(",")], args.backend,
                    seconds=args.seconds, turned=args.turned, probed=runtime.load(args.probe) if args.probe else None)  # fmt: skip
    print(json.dumps([asdict(t) for t in found]))


if __name__ == "__main__":
    main()
