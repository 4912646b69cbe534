"""Who runs jobs: processes of this machine, one for each job, started afresh (never forked); Ray in ray_workers.py keeps the same promise."""

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

from whet.backends import capabilities_of
from whet.report.stage import WAITING, stage_of
from whet.search.jobs import job as j

#: libraries that spin threads of their own beside those that engines run on; one each, unless the user says otherwise
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Workers(Protocol):
    """`start` a job folder, ask which are `finished`: each with None, or why its process left no result."""

    slots: int

    def start(self, folder: Path) -> None: ...

    def finished(self) -> list[tuple[Path, str | None]]: ...

    def stop(self) -> None: ...


@dataclass
class _Running:
    process: subprocess.Popen
    log: IO[bytes]
    begun: float  # later by what it waited for the device
    device: str | None
    seen: float


class LocalWorkers:
    """Up to `slots` processes at once. A context manager: leaving it ends them; if this process is killed, they end by themselves."""

    def __init__(self, slots: int, job_timeout: float, devices: tuple[str, ...] = ()):
        self.slots, self.timeout, self.devices = slots, job_timeout, devices
        self._running: dict[Path, _Running] = {}

    def start(self, folder: Path) -> None:
        """Begins a job."""
        log = (folder / j.LOG).open("ab")
        environment = {**os.environ, **{n: os.environ.get(n, "1") for n in _ONE_THREAD}, "PYTHONUNBUFFERED": "1"}
        taken = [r.device for r in self._running.values()]
        device = min(self.devices, key=taken.count, default=None)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        command = [sys.executable, "-m", "whet.search.jobs.child", str(folder), "--watch"]
        # a session of its own, so that what a metric function has started ends with it
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True)
        now = time.monotonic()
        self._running[folder] = _Running(process, log, now, device, now)

    def finished(self) -> list[tuple[Path, str | None]]:
        """Jobs that ended since the last call, with what went wrong where no result was left."""
        found: list[tuple[Path, str | None]] = []
        for folder, r in list(self._running.items()):
            code, now = r.process.poll(), time.monotonic()
            if stage_of(folder).startswith(WAITING):
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
            if j.result_of(folder) is not None:
                found.append((folder, None))
            elif late and code is None:
                found.append((folder, f"took longer than search.trial_timeout, {self.timeout:g} s, and was ended"))
            else:
                found.append((folder, _words(r.process.returncode, folder)))
        return found

    def stop(self) -> None:
        """Ends what runs; those jobs begin anew when the search goes on."""
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
    """Ends a process that was begun in a session of its own, and all that it has begun."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()



def _words(code: int, folder: Path) -> str:
    """What a process that left no result died of."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        why = " (perhaps out of memory)" if name == "SIGKILL" else ""
        return f"the trial's process was ended by {name}{why}; see {folder.name}/{j.LOG}"
    tail = (folder / j.LOG).read_text(errors="replace").strip().splitlines()[-1:] if (folder / j.LOG).is_file() else []
    return f"the trial's process ended with code {code}: {tail[0] if tail else 'it said nothing'}"[:400]


def gpus(device: str) -> tuple[str, ...]:
    """Numbers of the GPUs that a device such as `cuda` stands for (all), or the one of `cuda:N`; () for a CPU."""
    kind, _, ordinal = device.partition(":")
    if not capabilities_of(kind).numbered_devices:
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


def workers_for(recipe: Any) -> LocalWorkers:
    """Local workers as the recipe wants them: by default one on a CPU (two would disturb each other's times), one a GPU."""
    devices = gpus(recipe.device)
    slots = recipe.search.workers or max(1, len(devices))
    return LocalWorkers(slots, recipe.search.trial_timeout, devices)
