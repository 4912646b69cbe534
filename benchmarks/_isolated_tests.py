"""Runs tests in batches, each in a process of its own: a kernel that faults takes the GPU context of its process away, and with it every later test
there. The process stops after such a test (_outcomes.py); the rest of its batch runs in a new one. A test whose process dies counts as failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from _outcomes import Outcomes, append_failure, read

MOST = 40  # tests of a batch


class IsolatedTests:
    """Runs of a pytest command (with the plugin _outcomes), whose logs are in `folder`. `outcomes` counts also what was interrupted."""

    def __init__(self, folder: Path, command: Sequence[str], cwd: Path, environment: Mapping[str, str], gpus: Sequence[str]) -> None:
        self.folder, self.command, self.cwd, self.environment, self.gpus = folder, list(command), cwd, dict(environment), list(gpus)
        self.guard, self.stopped, self.count = threading.Lock(), False, 0
        self.children: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []
        self.listed = Outcomes()

    @property
    def outcomes(self) -> Outcomes:
        """All tests so far; those that were collected and have not ended are open."""
        return read(*self.logs)

    def run(self, which: Sequence[str], workers: int, limit: float | None) -> None:
        """Runs the tests of these files and folders in `workers` processes at once. After `limit` seconds, or if a signal's exception interrupts
        it, no child is left."""
        batches: deque[list[str]] = deque()
        worker = threading.Thread(target=self._collect_and_work, args=(which, batches, workers))
        end = time.monotonic() + (1e9 if limit is None else limit)
        try:
            worker.start()
            while worker.is_alive():
                if time.monotonic() > end:
                    print("\ncut off", flush=True)
                    break
                worker.join(0.1)
        finally:
            with self.guard:
                self.stopped = True
                for child in self.children:
                    if child.poll() is None:
                        os.killpg(child.pid, signal.SIGKILL)
            worker.join()

    def _collect_and_work(self, which: Sequence[str], batches: deque[list[str]], workers: int) -> None:
        listing = self._run_process(which, ["--collect-only"], self.gpus[0])
        if listing is None:
            return
        self.listed = read(listing[0])
        batches.extend(split_into_batches(self.listed, workers))
        threads = [threading.Thread(target=self._work, args=(batches, self.gpus[i % len(self.gpus)])) for i in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_process(self, which: Sequence[str], options: Sequence[str], gpu: str) -> tuple[Path, int] | None:
        """The log and the exit code of a process; None if the run was stopped."""
        with self.guard:
            if self.stopped:
                return None
            log = self.folder / f"outcomes{len(self.logs)}"
            self.logs.append(log)
            words = [*self.command, f"--outcomes={log}", *options, *which]
            environment = {**self.environment, "CUDA_VISIBLE_DEVICES": gpu}
            child = subprocess.Popen(words, cwd=self.cwd, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
            self.children.append(child)
        code = child.wait()
        return None if self.stopped else (log, code)

    def _work(self, batches: deque[list[str]], gpu: str) -> None:
        """Runs batches on a GPU until none is left."""
        while True:
            with self.guard:
                if not batches:
                    return
                batch = batches.popleft()
                self.count += 1
                names = self.folder / f"batch{self.count}"
            names.write_text(json.dumps(batch))
            ran = self._run_process([self.listed.files[batch[0]]], [f"--only={names}"], gpu)
            if ran is None:
                return
            log, code = ran
            ended = read(log)
            rest = [t for t in batch if t not in ended.how]
            if rest and not ended.lost_context:
                append_failure(log, rest.pop(0), f"its process ended with code {code} before the test did")
            if rest:
                with self.guard:
                    batches.appendleft(rest)


def split_into_batches(listed: Outcomes, workers: int) -> list[list[str]]:
    """Collected tests, of one file each, in order: at most MOST, fewer if workers would be idle at the end."""
    most = min(MOST, max(5, len(listed.open) // (4 * workers)))
    files = [list(group) for _, group in groupby(listed.open, lambda test: listed.files[test])]
    return [group[i : i + most] for group in files for i in range(0, len(group), most)]
