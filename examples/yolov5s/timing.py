"""Times engines in turns, batch by batch; on a GPU also power and utilization meanwhile. Alone it times engine files and prints what it found:

    python examples/yolov5s/timing.py --backend cuda --batches 1,2,4,8 ENGINE ENGINE

so that run.py can do it in processes of their own, each of which lies elsewhere in memory.
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

ROUNDS, SECONDS = 5, 0.4  # engines take turns: so many rounds, each of about so many seconds
SHORTEST = 0.1  # seconds of a round where several processes share them
IN_ROW = {"cpu": 1, "cuda": 5}  # runs between two looks at the clock: a GPU's go back to back, a CPU's end one by one


@dataclass
class Times:
    """What was measured of an engine, by batch: milliseconds of every round, watts and percent of what was read meanwhile."""

    ms: dict[int, list[float]] = field(default_factory=dict)
    power: dict[int, list[float]] = field(default_factory=dict)
    busy: dict[int, list[float]] = field(default_factory=dict)

    def add(self, other: dict[str, dict[str, list[float]]]) -> None:
        """What another process measured of the same engine, as it printed it."""
        for name, found in other.items():
            for batch, values in found.items():
                getattr(self, name).setdefault(int(batch), []).extend(values)


def measure(engines: Sequence[whet.Engine], batches: Sequence[int], backend: str, *, seconds: float = SECONDS, turned: bool = False) -> list[Times]:
    """Times every engine at every batch, in turns of about `seconds`; every other round from the last to the first, beginning so with `turned`."""
    found = [Times() for _ in engines]
    for batch in batches:
        images = np.random.default_rng(0).random((batch, 3, 640, 640), np.float32)
        contexts, bounds = [engine.create_context() for engine in engines], []
        for context in contexts:
            context.set_input_shape("images", images.shape)
            bounds.append(context.launches())
            bounds[-1].feed({"images": images})
            bounds[-1].run()
        for n in range(ROUNDS):
            for times, bound in list(zip(found, bounds, strict=True))[:: -1 if n % 2 != turned else 1]:
                with Watch(backend) as watch:
                    taken, until = [], time.perf_counter() + seconds
                    while time.perf_counter() < until:
                        taken += bound.seconds_in_row(IN_ROW[backend])
                times.ms.setdefault(batch, []).append(statistics.median(taken) * 1e3)
                times.power.setdefault(batch, []).extend(watch.power)
                times.busy.setdefault(batch, []).extend(watch.busy)
        for context in contexts:
            context.close()
    return found


def measure_apart(paths: Sequence[Path], batches: Sequence[int], backend: str, processes: int, until: float = float("inf")) -> list[Times]:
    """The same of engine files in so many processes, one after the other, every other one `turned`; but for the first none begins that would probably
    end behind `until` (of time.perf_counter). Raises CalledProcessError."""
    found, start = [Times() for _ in paths], time.perf_counter()
    for n in range(processes):
        now = time.perf_counter()
        if n and now + 1.1 * (now - start) / n > until:
            break
        words = [sys.executable, __file__, "--backend", backend, "--batches", ",".join(map(str, batches)), *map(str, paths)]
        words += ["--seconds", str(max(SHORTEST, SECONDS / processes)), *(["--turned"] if n % 2 else [])]
        told = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
        for times, more in zip(found, told, strict=True):
            times.add(more)
    return found


class Watch:
    """Reads a GPU's power (W) and utilization (%) every 50 ms while something runs; on a CPU it reads nothing."""

    def __init__(self, backend: str):
        self.power: list[float] = []
        self.busy: list[float] = []
        self._on = backend == "cuda"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"  # CUDA's first device; NVML counts all that there are
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
    """Times the engine files that are named."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("engines", nargs="+", type=Path)
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--batches", default="1,2,4,8")
    p.add_argument("--seconds", type=float, default=SECONDS, help="of a round")
    p.add_argument("--turned", action="store_true", help="begin with the last")
    args = p.parse_args()
    runtime = whet.Runtime(backend=args.backend)
    found = measure([runtime.load(path) for path in args.engines], [int(b) for b in args.batches.split(",")], args.backend,
                    seconds=args.seconds, turned=args.turned)  # fmt: skip
    print(json.dumps([asdict(t) for t in found]))


if __name__ == "__main__":
    main()
