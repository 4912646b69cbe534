"""Times engines in turns, batch by batch; on a GPU also power and utilization meanwhile. Alone it times engine files and prints what it found:

    python examples/yolov5s/timing.py --backend cuda --batches 1,2,4,8 ENGINE ENGINE

so that run.py can do it in processes of their own, each of which lies elsewhere in memory. With `--probe ENGINE` a small engine runs before and
after each round, which tells when others used the machine: twice as many rounds are timed, and the half counts beside which it ran fastest.
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
ROUNDS, SECONDS = 5, 0.4  # engines take turns: so many rounds, each of about so many seconds
SHORTEST = 0.1  # seconds of a round where several processes share them
TRIES = 2  # times as many rounds as count, with a probe
PATIENCE = 1.0  # seconds that a round waits for quiet
SLOWER = 1.1  # than the best that the probe was in this process: others use the machine
IN_ROW = {"cpu": 1, "cuda": 5}  # runs between two looks at the clock: a GPU's go back to back, a CPU's end one by one


@dataclass
class Times:
    """What was measured of an engine, by batch: milliseconds of every round, those of the probe beside it (the slower of two; 0 without one), watts
    and percent of what was read meanwhile."""

    ms: dict[int, list[float]] = field(default_factory=dict)
    probe: dict[int, list[float]] = field(default_factory=dict)
    power: dict[int, list[float]] = field(default_factory=dict)
    busy: dict[int, list[float]] = field(default_factory=dict)

    def add(self, other: dict[str, dict[str, list[float]]]) -> None:
        """What another process measured of the same engine, as it printed it."""
        for name, found in other.items():
            for batch, values in found.items():
                getattr(self, name).setdefault(int(batch), []).extend(values)

    def keep_quiet(self) -> None:
        """Of each batch's rounds the half stays beside which the probe ran fastest, in their order. No bound: clocks change with the hours."""
        for batch, rounds in self.probe.items():
            quiet = sorted(sorted(range(len(rounds)), key=rounds.__getitem__)[: -(-len(rounds) // TRIES)])
            self.ms[batch] = [self.ms[batch][n] for n in quiet]


class Probe:
    """How long one run of a small engine takes; without one, no time."""

    def __init__(self, engine: whet.Engine | None):
        self._bound = None
        self.best = float("inf")
        if engine is not None:
            self._context = engine.create_context()
            self._bound = self._context.launches()
            self._bound.run()

    def ms(self) -> float:
        """The median of some runs."""
        if self._bound is None:
            return 0.0
        taken = statistics.median(self._bound.seconds_in_row(15)) * 1e3
        self.best = min(self.best, taken)
        return taken

    def wait(self) -> float:
        """The same, once it is quiet or PATIENCE has passed."""
        until = time.perf_counter() + PATIENCE
        while (taken := self.ms()) > SLOWER * self.best and time.perf_counter() < until:
            time.sleep(0.02)  # nothing tells when other guests of a host rest but looking again; without a pause the looks would keep a core busy
        return taken


def measure(
    engines: Sequence[whet.Engine],
    batches: Sequence[int],
    backend: str,
    seconds: float = SECONDS,
    turned: bool = False,
    probed: whet.Engine | None = None,
) -> list[Times]:
    """Times every engine at every batch, in turns of about `seconds`; every other round from the last to the first, beginning so with `turned`. With
    an engine to be `probed` each waits until others rest, or for PATIENCE, and there are TRIES times as many."""
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
    """The same of engine files in so many processes, one after the other, every other one `turned`; but for the first none begins that would probably
    end behind `until` (of time.perf_counter). Raises CalledProcessError."""
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
    p.add_argument("--probe", type=Path, help="engine that says whether others use the machine")
    args = p.parse_args()
    runtime = whet.Runtime(backend=args.backend)
    found = measure([runtime.load(path) for path in args.engines], [int(b) for b in args.batches.split(",")], args.backend,
                    seconds=args.seconds, turned=args.turned, probed=runtime.load(args.probe) if args.probe else None)  # fmt: skip
    print(json.dumps([asdict(t) for t in found]))


if __name__ == "__main__":
    main()
