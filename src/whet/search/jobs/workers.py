"""Local workers: one spawned (never forked) process per job. ray_workers.py implements the same protocol on Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from whet.backends import get_capabilities
from whet.report.stage import WAITING, find_stage
from whet.search.jobs import job as j

#: thread counts of libraries with their own pools, which would compete with the engine's threads; 1 unless the user sets them
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Workers(Protocol):
    """Runs job folders. `finished` returns ended jobs, each with None or the reason why its process left no result."""

    slots: int

    def start(self, folder: Path) -> None: ...

    def collect_finished(self) -> list[tuple[Path, str | None]]: ...

    def stop(self) -> None: ...


@dataclass
class _Running:
    process: subprocess.Popen
    log: IO[bytes]
    begun: float  # start time, shifted by the time spent waiting for the device
    device: str | None
    seen: float


class LocalWorkers:
    """Up to `slots` concurrent processes. A context manager that terminates them on exit; if this process is killed, they exit by themselves."""

    def __init__(self, slots: int, job_timeout: float, devices: tuple[str, ...] = ()):
        self.slots, self.timeout, self.devices = slots, job_timeout, devices
        self._running: dict[Path, _Running] = {}

    def start(self, folder: Path) -> None:
        """Starts a job."""
        log = (folder / j.LOG).open("ab")
        environment = {**os.environ, **{n: os.environ.get(n, "1") for n in _ONE_THREAD}, "PYTHONUNBUFFERED": "1"}
        taken = [r.device for r in self._running.values()]
        device = min(self.devices, key=taken.count, default=None)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        command = [sys.executable, "-m", "whet.search.jobs.child", str(folder), "--watch"]
        # a new session, so that processes started by a metric function are terminated with it
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True)
        now = time.monotonic()
        self._running[folder] = _Running(process, log, now, device, now)

    def collect_finished(self) -> list[tuple[Path, str | None]]:
        """Jobs that ended since the last call, with the failure reason or None."""
        ended: list[tuple[Path, str | None]] = []
        for folder, r in list(self._running.items()):
            code, now = r.process.poll(), time.monotonic()
            if find_stage(folder).startswith(WAITING):
                r.begun += now - r.seen
            r.seen = now
            late = now - r.begun > self.timeout
            if code is None and not late:
                continue
            if code is None:
                end_session(r.process)
            del self._running[folder]
            r.log.close()
            if r.process.stdin is not None:
                r.process.stdin.close()
            if j.read_result(folder) is not None:
                ended.append((folder, None))
            elif late and code is None:
                ended.append((folder, f"exceeded search.trial_timeout ({self.timeout:g} s) and was terminated"))
            else:
                ended.append((folder, _explain_exit(r.process.returncode, folder)))
        return ended

    def stop(self) -> None:
        """Terminates running jobs; they restart when the search resumes."""
        for r in self._running.values():
            end_session(r.process)
            r.log.close()
            if r.process.stdin is not None:
                r.process.stdin.close()
        self._running.clear()

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def end_session(process: subprocess.Popen) -> None:
    """Terminates a process that leads a session, with its descendants."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()



def _explain_exit(code: int, folder: Path) -> str:
    """The reason why a process left no result."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        why = " (possibly out of memory)" if name == "SIGKILL" else ""
        return f"the trial's process was killed by {name}{why}; see {folder.name}/{j.LOG}"
    tail = (folder / j.LOG).read_text(errors="replace", encoding="utf-8").strip().splitlines()[-1:] if (folder / j.LOG).is_file() else []
    return f"the trial's process exited with code {code}: {tail[0] if tail else 'no output'}"[:400]


def list_gpus(device: str) -> tuple[str, ...]:
    """GPU numbers of a device: all for `cuda`, one for `cuda:N`, () for a CPU."""
    kind, _, ordinal = device.partition(":")
    if not get_capabilities(kind).numbered_devices:
        return ()
    visible = tuple(v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v)
    if ordinal:
        return (visible[int(ordinal)] if int(ordinal) < len(visible) else ordinal,)
    return visible or tuple(str(i) for i in range(_count_gpus())) or ("0",)


def _count_gpus() -> int:
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def make_workers(recipe: Any) -> LocalWorkers:
    """Local workers of a recipe: by default one on a CPU (two would disturb each other's timings), one per GPU."""
    devices = list_gpus(recipe.device)
    slots = recipe.search.workers or max(1, len(devices))
    return LocalWorkers(slots, recipe.search.trial_timeout, devices)
