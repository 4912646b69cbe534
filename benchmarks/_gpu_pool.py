"""Runs the cases of a benchmark in separate processes on several GPUs: their CPU work overlaps, their timings on a GPU do not.

A building process holds the GPU lock while kernels are timed and releases it for passes, compilation and verification (`Turns`); reported
times are measured with exclusive use of the GPU (`alone`): processes that only verify wait too.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from whet.builder.progress import Silent
from whet.search.jobs.device_locks import hold_file_lock

TIMED = ("timing", "choice", "whole engines")


def _place() -> str:
    """Prefix of the lock files for this process's GPU."""
    return f"{os.environ.get('WHET_POOL', '/tmp')}/whet-pool-{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"


class Turns(Silent):
    """A build's Progress that holds the GPU lock during stages with kernel timings, and releases it between its other stages."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ExitStack()

    def stage(self, name: str, total: int) -> None:
        self._held.close()
        with hold_file_lock(f"{_place()}.turn"):  # held by the process that waits for exclusive use
            self._held.enter_context(hold_file_lock(f"{_place()}.quiet", fcntl.LOCK_SH))
        if name in TIMED:
            self._held.enter_context(hold_file_lock(f"{_place()}.timing"))

    def close(self) -> None:
        """Releases all locks."""
        self._held.close()


@contextmanager
def alone() -> Iterator[None]:
    """Exclusive use of this process's GPU within the pool."""
    with ExitStack() as held:
        with hold_file_lock(f"{_place()}.turn"):
            held.enter_context(hold_file_lock(f"{_place()}.quiet"))
        yield


def run_cases(cases: Sequence[Sequence[str]], gpus: int, each: int, seconds: float) -> None:
    """Runs this script with each case's arguments, `each` processes at a time on each of `gpus` GPUs, in order of the cases.

    After `seconds` the remaining processes are terminated; results written before are kept.
    """
    visible = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g] or [str(i) for i in range(gpus)]
    threads = max(1, (os.cpu_count() or 8) // max(1, min(gpus * each, len(cases))))
    waiting, guard, end = list(cases), threading.Lock(), time.monotonic() + seconds

    def work(gpu: str) -> None:
        while True:
            with guard:
                if not waiting or time.monotonic() > end:
                    return
                case = waiting.pop(0)
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
            begun = time.monotonic()
            try:
                code = subprocess.run([sys.executable, sys.argv[0], *case], env=env, timeout=max(1.0, end - begun), check=False).returncode
            except subprocess.TimeoutExpired:
                code = -1
            said = "out of time" if code == -1 else f"exit {code}"
            print(f"-- {' '.join(Path(c).name for c in case)} on GPU {gpu}: {said} after {time.monotonic() - begun:.0f} s", flush=True)

    workers = [threading.Thread(target=work, args=(visible[i % len(visible)],)) for i in range(gpus * each)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
