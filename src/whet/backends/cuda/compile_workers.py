"""Kernels compiled by processes beside this one, many at a time; they end when nothing has been asked for a while.

Threads of one process do not do: NVRTC takes memory from the system and gives it back all the time, and there all threads of a process wait for each
other. On 32 CPUs beside an H200 they compiled 28 kernels a second (27 of the 42 seconds of a first build of YOLOv5s), processes several hundred.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from whet.backends.cuda.compile_worker import ANSWER, REQUEST
from whet.errors import BackendError

Compile = Callable[[str, str, str, tuple[str, ...]], bytes]
"""Machine code of a source; its name, the architecture and the compiler's flags."""
MOST = 16  # processes: more bring little, and each takes about 100 MB
IDLE_S = 5.0


class Worker:
    """One such process. Where it cannot be started, or is killed, `otherwise` compiles."""

    def __init__(self, otherwise: Compile) -> None:
        self.otherwise = otherwise
        self.process: subprocess.Popen[bytes] | None = None
        path = os.pathsep.join(p for p in sys.path if p)
        try:
            self.process = subprocess.Popen(
                [sys.executable or "python3", "-m", __package__ + ".compile_worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        except OSError:
            pass  # no processes here: threads are slower, and right

    def compile(self, source: str, name: str, arch: str, flags: tuple[str, ...]) -> bytes:
        """Raises BackendError with the compiler's words."""
        request = json.dumps([source, name, arch, flags]).encode()
        answer = self._answer(REQUEST.pack(len(request)) + request)
        if answer is None:
            self.end()
            return self.otherwise(source, name, arch, flags)
        failed, said = answer
        if failed:
            raise BackendError(said.decode())
        return said

    def _answer(self, request: bytes) -> tuple[int, bytes] | None:
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return None
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            head = self.process.stdout.read(ANSWER.size)
            failed, size = ANSWER.unpack(head) if len(head) == ANSWER.size else (0, -1)
            said = self.process.stdout.read(size) if size >= 0 else b""
        except OSError:  # it is gone
            return None
        return (failed, said) if len(said) == size else None

    def end(self) -> None:
        """Lets the process end."""
        process, self.process = self.process, None
        if process is not None:
            process.communicate()  # closes its stdin, waits


class Workers:
    """At most `count` of them, each behind a thread of this process."""

    def __init__(self, count: int, otherwise: Compile) -> None:
        self.count, self.otherwise = count, otherwise
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._mine = threading.local()
        self._workers: list[Worker] = []
        self._waiting = 0
        self._timer: threading.Timer | None = None
        atexit.register(self.end)

    def submit(self, work: Callable[..., bytes], *args: Any) -> Future[bytes]:
        """Runs work(compile, *args), where `compile` is a worker's."""
        with self._lock:
            self._waiting += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="nvrtc")
            future = self._threads.submit(self._run, work, args)
        future.add_done_callback(self._done)
        return future

    def _run(self, work: Callable[..., bytes], args: tuple[Any, ...]) -> bytes:
        worker = getattr(self._mine, "worker", None)
        if worker is None:
            worker = self._mine.worker = Worker(self.otherwise)
            with self._lock:
                self._workers.append(worker)
        return work(worker.compile, *args)

    def _done(self, _: Future[bytes]) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(IDLE_S, self.end)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Ends the processes, unless something is waiting for them."""
        with self._lock:
            if self._waiting:
                return
            if self._timer is not None:
                self._timer.cancel()
            threads, self._threads, self._mine = self._threads, None, threading.local()
            workers, self._workers, self._timer = self._workers, [], None
        if threads is not None:
            threads.shutdown()
        for w in workers:
            w.end()
