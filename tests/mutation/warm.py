"""A pytest plugin that runs mutants in forked children of one process that has imported the package and collected the tests: `-p warm`.

WHET_MUTATION names the folder of a run (see run.py): `plan.json` and `options.json` are read, `touched.jsonl` (which functions each test enters)
is written by a first child if it is not there, `outcomes.jsonl` gets one line per mutant. A child gives the functions the mutant's
code; a mutant of code that runs at import is executed by a new process instead. Tests of subprocesses do not see a mutant.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutated import ROOT, existing_functions, replace_code
from mutation_plan import Mutant, from_data, to_data
from run import PYTEST, TESTS, choose_tests, order_tests, read_touched

MEMORY = 16 << 30  # bytes of address space of a child


class Recorder:
    """Records the package's functions that Python calls, as FILE:QUALIFIED NAME.

    From Python 3.12 on only the first call of a function in each test calls back (sys.monitoring), so tests take about as long as without.
    """

    def __init__(self) -> None:
        self.entered: set[Any] = set()
        if sys.version_info >= (3, 12):
            sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "whet mutants")
            sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START, self._start)
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START)
        else:
            threading.settrace(self._call)
            sys.settrace(self._call)

    def _start(self, code: CodeType, offset: int) -> object:
        self.entered.add(code)
        return sys.monitoring.DISABLE if sys.version_info >= (3, 12) else None

    def _call(self, frame: FrameType, event: str, argument: object) -> None:
        self.entered.add(frame.f_code)

    def names(self) -> list[str]:
        """The functions entered since the last call."""
        entered, self.entered = self.entered, set()  # calls in the next line are recorded too
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
        else:
            sys.settrace(self._call)  # Python removes a trace function in which the recursion limit was reached
        codes = [c for c in entered if "src/whet/" in c.co_filename]
        return sorted({f"src/whet/{c.co_filename.rpartition('src/whet/')[2]}:{c.co_qualname}" for c in codes})


def record(items: list[pytest.Item], path: Path, longest: float, until: float) -> bool:
    """Writes which functions each test enters; none for a test that does not pass within `longest` seconds of processor time.

    False if it stopped because time.monotonic() reached `until`; tests in `path` are not repeated.
    """
    known = {json.loads(line)["test"] for line in path.read_text().splitlines()} if path.exists() else set()
    items = [item for item in items if item.nodeid not in known]

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("longer than the tests that mutants run")

    signal.signal(signal.SIGVTALRM, stop)
    recorder = Recorder()
    with open(path, "a") as out:
        for item, following in zip(items, [*items[1:], None], strict=True):
            if time.monotonic() > until:
                return False
            recorder.names()
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, longest)
            reports = runtestprotocol(item, nextitem=following, log=False)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            entered = recorder.names()
            passed = all(r.passed for r in reports)
            row = {"test": item.nodeid, "seconds": round(time.process_time() - begun, 3), "entered": entered if passed else []}
            out.write(json.dumps(row) + "\n")
            out.flush()
    return True


class Runner:
    """Forks a child per mutant; at most `workers` at once."""

    def __init__(self, folder: Path, session: pytest.Session):
        self.folder, self.items = folder, {item.nodeid: item for item in session.items}
        self.options = json.loads((folder / "options.json").read_text())
        self.begun = time.monotonic()
        self.busy: dict[int, tuple[Mutant, float, int]] = {}

    def record_tests(self) -> bool:
        """One child per worker, for tests of other files; False if they did not finish in time. Writes touched.jsonl when all have."""
        skipped = set((self.folder / "skip.txt").read_text().splitlines()) if (self.folder / "skip.txt").exists() else set()
        files = sorted({item.path for item in self.items.values()})
        parts: list[list[pytest.Item]] = [[] for _ in range(self.options["workers"])]
        for item in self.items.values():
            if item.nodeid not in skipped:
                parts[files.index(item.path) % len(parts)].append(item)
        children, until = [], self.begun + self.options["seconds"]
        for k, part in enumerate(parts):
            pid = os.fork()
            if not pid:
                self._in_child(lambda part=part, k=k: record(part, self.folder / f"part{k}", self.options["longest"], until))
            children.append(pid)
        if any([os.waitpid(pid, 0)[1] for pid in children]):
            return False
        written = [p.read_text() for k in range(len(parts)) if (p := self.folder / f"part{k}").exists()]
        (self.folder / "touched.jsonl").write_text("".join(written))
        return True

    def _in_child(self, act: Any) -> None:
        """Runs `act` and ends this process: 0, or 1 if it raised or returned False."""
        code = 1
        try:
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            own = self.folder / f"tmp{os.getpid()}"
            own.mkdir()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)
            code = int(act() is False)
        except BaseException:
            (self.folder / "errors.txt").write_text(traceback.format_exc())
            raise
        finally:
            os._exit(code)

    def _attempt(self, mutant: Mutant, tests: list[str], functions: Any) -> bool:
        seconds = int(self.options["timeout"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if not replace_code(mutant, functions):
            one, listed = self.folder / f"mutant{os.getpid()}.json", self.folder / f"tests{os.getpid()}.txt"
            one.write_text(json.dumps(to_data([mutant])[0]))
            listed.write_text("\n".join(tests) + "\n")
            environment = {**os.environ, "WHET_MUTANT": str(one)}
            del environment["WHET_MUTATION"]
            os.execve(sys.executable, [sys.executable, "-m", "pytest", "-x", *PYTEST, "-p", "mutated", f"@{listed}"], environment)
        chosen = [self.items[t] for t in tests]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            if any(r.failed for r in runtestprotocol(item, nextitem=following, log=False)):
                return False
        return True

    def run(self, mutants: list[Mutant]) -> None:
        """Runs the mutants that have no outcome yet."""
        touched = {} if self.options["unrecorded"] else read_touched(self.folder / "touched.jsonl")
        functions, log = existing_functions(), self.folder / "outcomes.jsonl"
        for mutant in mutants:
            while len(self.busy) >= self.options["workers"]:
                self._collect(log)
            if time.monotonic() - self.begun > self.options["seconds"]:
                break
            tests = self._tests_for(mutant, touched)
            if not tests:
                self._write(log, mutant, "no tests", 0.0, 0)
                continue
            pid = os.fork()
            if not pid:
                self._in_child(lambda mutant=mutant, tests=tests: self._attempt(mutant, tests, functions))
            self.busy[pid] = (mutant, time.monotonic(), len(tests))
        while self.busy and time.monotonic() - self.begun < self.options["seconds"] + self.options["timeout"]:
            self._collect(log)
        for pid in self.busy:  # no outcome: the next call runs them again
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _tests_for(self, mutant: Mutant, touched: dict[str, list[tuple[float, str]]]) -> list[str]:
        budget = self.options["budget"]
        if not self.options["unrecorded"]:
            return [t for t in choose_tests(mutant, ROOT, touched, budget) if t in self.items]
        own = [t for t in self.items if t.startswith(tuple(TESTS[mutant.package]))]
        return order_tests(mutant, ROOT, own, self.options["durations"], budget)

    def _collect(self, log: Path) -> None:
        """Waits a moment; takes the outcomes of children that ended, and ends those that are overdue."""
        for pid, (mutant, since, count) in list(self.busy.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - since
            overdue = not ended and seconds > max(120.0, 10 * self.options["timeout"])  # a test that waits uses no processor time
            if overdue:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if not ended and not overdue:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # processes that its tests left
            del self.busy[pid]
            shutil.rmtree(self.folder / f"tmp{pid}", ignore_errors=True)
            late = overdue or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL))
            self._write(log, mutant, "timeout" if late else "killed" if status else "survived", seconds, count)
        time.sleep(0.05)

    def _write(self, log: Path, mutant: Mutant, outcome: str, seconds: float, tests: int) -> None:
        with open(log, "a") as out:
            row = {"name": mutant.name, "outcome": outcome, "seconds": round(seconds, 1), "tests": tests}
            out.write(json.dumps(row) + "\n")


def pytest_runtestloop(session: pytest.Session) -> bool:
    """In place of pytest's own loop over the collected tests."""
    folder = Path(os.environ["WHET_MUTATION"])
    runner = Runner(folder, session)
    if not runner.options["unrecorded"] and not (folder / "touched.jsonl").exists() and not runner.record_tests():
        return True  # the next call goes on
    known = {json.loads(x)["name"] for x in (folder / "outcomes.jsonl").read_text().splitlines()} if (folder / "outcomes.jsonl").exists() else set()
    drawn = [m for m in from_data(json.loads((folder / "plan.json").read_text())) if m.name not in known]
    groups = [[m for m in drawn if m.package == p] for p in runner.options["packages"]]
    mutants = [m for some in zip_longest(*groups) for m in some if m is not None]  # an early end leaves all packages counted
    for module in {".".join(Path(m.module).with_suffix("").parts[1:]).removesuffix(".__init__") for m in mutants}:
        importlib.import_module(module)
    runner.run(mutants)
    return True
