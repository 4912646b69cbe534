"""Work stealing between threads in our kernels, against static partitions: whole engines on an idle machine and with external load.

    python benchmarks/cpu_dealing.py ENGINE... [--seconds 10] [--burners 0,1,2] [--save benchmarks/results/cpu/dealing.json]

Each engine file is opened by two processes, one per mode, whose runs are interleaved, three at a time; a pair of blocks gives one ratio. Rounds
in which other processes (except the burners) took more than 4 % of the CPU time are omitted and counted. docs/design/threads.md has the decision.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from _record import median_interval, provenance

from whet.backends import get_backend
from whet.runtime import Runtime
from whet.tactics.cpu._llvm import work_stealing

WAYS = ("equal", "dealt")
RUNS = 3
STRANGERS = 0.04
ENOUGH = 6  # minimum number of rounds for a 95 % interval of the median


def child(way: str, engine: str) -> None:
    """Opens an engine; for each line of its input prints the seconds of some runs."""
    if way == "equal":
        work_stealing.PARTS = 1  # each thread takes its whole range
    context = Runtime(backend="cpu").load(engine).create_context()
    launches = context.launches()
    launches.feed({name: np.random.default_rng(0).random(shape, np.float32) for name, shape in context.input_shapes().items()})
    launches.run()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(launches.seconds_in_row(RUNS + 1)[1:]), flush=True)


def ticks(pids: list[int]) -> tuple[int, int]:
    """CPU time of all processes, and of the given ones, in clock ticks."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    fields = [Path(f"/proc/{p}/stat").read_text().rsplit(")", 1)[1].split() for p in pids]
    return user + nice + system, sum(int(f[11]) + int(f[12]) for f in fields)


def measure(engine: str, burners: int, seconds: float) -> list[dict]:
    """One row per mode."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burners)]
    ways = [
        subprocess.Popen([sys.executable, __file__, "--child", way, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for way in WAYS
    ]
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    left_out = 0
    try:
        for process in ways:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            before = ticks([os.getpid(), *(p.pid for p in (*busy, *ways))])
            order = list(zip(WAYS, ways, strict=True))[:: 1 if len(times[WAYS[0]]) % 2 else -1]
            found = {way: _turn(process) for way, process in order}
            after = ticks([os.getpid(), *(p.pid for p in (*busy, *ways))])
            all_of, ours = after[0] - before[0], after[1] - before[1]
            if all_of - ours > STRANGERS * all_of + 1:
                left_out += 1
                continue
            for way in WAYS:
                times[way].append(found[way])
    finally:
        for process in (*busy, *ways):
            process.kill()
            process.wait()
    if len(times["dealt"]) < ENOUGH:
        raise SystemExit(f"only {len(times['dealt'])} rounds were undisturbed, {left_out} were not: measure on a quiet machine, or for longer")
    ratios = [median(d) / median(e) for e, d in zip(*times.values(), strict=True)]
    rows = []
    for way, found_ms in ((w, np.array(t) * 1e3) for w, t in times.items()):
        ratio, low, high = median_interval(ratios) if way == "dealt" else (1.0, 1.0, 1.0)
        row = {"engine": Path(engine).stem, "burners": burners, "way": way, "ms": median(found_ms.flat), "p90_ms": np.quantile(found_ms, 0.9)}
        row |= {"of_equal": ratio, "of_equal_low": low, "of_equal_high": high}
        rows.append({k: round(float(v), 4) if isinstance(v, float) else v for k, v in row.items()} | {"rounds": len(ratios), "left_out": left_out})
    return rows


def _turn(process: subprocess.Popen) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    """Measures, prints, and writes the file on request."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("engines", nargs="*")
    p.add_argument("--seconds", type=float, default=10.0, help="for each engine and number of burners")
    p.add_argument("--burners", default="0,1,2")
    p.add_argument("--save", type=Path)
    p.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return child(*args.child)
    rows = []
    for engine in args.engines:
        for burners in map(int, args.burners.split(",")):
            rows += measure(engine, burners, args.seconds)
            for row in rows[-2:]:
                print(row, flush=True)
    if args.save:
        machine = get_backend("cpu").describe()
        about = provenance(("numpy", "llvmlite")) | {"machine": {k: machine[k] for k in ("model", "cpus", "threads", "wait_policy")}}
        args.save.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
