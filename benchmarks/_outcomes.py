"""Outcomes of tests, written as they happen: a pytest plugin, and the reader of its file. Interrupted runs can be counted too.

`pytest -p _outcomes --outcomes FILE [--only FILE]`: lines of JSON, {"listed": [tests], "files": {test: path}},
{"began": test},
{"test": test, "phase": "setup" | "call" | "teardown", "how": "passed" | "failed" | "skipped", "seconds": s, "why": words}. Tests of the files
named in FIRST run first and those of LAST last, in every process: long tests that start late would run with idle workers. After a failure by
which the process has lost its GPU context, the session stops. `--only` names a file with a JSON list of the tests to run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest

FIRST = ("test_large", "test_ranges", "test_float8", "test_quantized_choice", "test_attention", "test_stem")
LAST = ("test_tactics",)
#: of failures after which nothing runs on the GPU in the same process
_LOST = ("LostContext", "CUDA_ERROR_ILLEGAL", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_MISALIGNED", "illegal memory access")
_WHY = 3000  # characters of a failure text that are kept


def turn(test: str) -> int:
    """The sort key of tests."""
    stem = Path(test.partition("::")[0]).stem
    return FIRST.index(stem) - len(FIRST) if stem in FIRST else int(stem in LAST)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="file that gets a line when a test begins and when it ends")
    parser.addoption("--only", help="file with the names of the tests to run, a JSON list")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path:
        config.pluginmanager.register(_Writer(open(path, "w")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := config.getoption("--only"):
        only = set(json.loads(Path(path).read_text()))
        items[:] = [item for item in items if item.nodeid in only]
    items.sort(key=lambda item: turn(item.nodeid))


class _Writer:
    def __init__(self, file: TextIO):
        self._file, self._lost = file, False

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @pytest.hookimpl(trylast=True)  # other plugins deselect tests by their marks before
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session
        self._write({"listed": [item.nodeid for item in session.items], "files": {item.nodeid: str(item.path) for item in session.items}})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "phase": "teardown", "how": "failed", "seconds": 0.0, "why": report.longreprtext[-_WHY:]})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"began": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        phase = report.when if report.when in ("setup", "call", "teardown") else "teardown"  # "???": its process died
        self._write({"test": report.nodeid, "phase": phase, "how": report.outcome, "seconds": report.duration, "why": why[-_WHY:]})
        self._lost |= any(text in why for text in _LOST)
        if self._lost and phase == "teardown":
            self._write({"lost_context": report.nodeid})
            self._session.shouldstop = "the process has lost its GPU context"


@dataclass
class Outcomes:
    """`how` each test ended ("passed", "failed", "skipped"), by name, in order of time; `why`, if it did not pass; `seconds` over all phases;
    `open`: tests that began or were listed, and did not end; `lost_context`: tests after which a process had to end; `files`: their paths.
    """

    how: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    lost_context: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def which(self, how: str) -> list[str]:
        return [t for t, h in self.how.items() if h == how]

    def longest(self, count: int) -> list[tuple[float, str]]:
        return sorted(((s, t) for t, s in self.seconds.items()), reverse=True)[:count]


def append_failure(path: Path, test: str, why: str) -> None:
    """Adds a test to a file of the plugin that failed without a report."""
    with open(path, "a") as file:
        file.write("\n" + json.dumps({"test": test, "phase": "teardown", "how": "failed", "seconds": 0.0, "why": why}) + "\n")


def read(*paths: Path) -> Outcomes:
    """The outcomes in files of the plugin; truncated lines are ignored."""
    outcomes, worst, seen = Outcomes(), dict[str, str](), dict[str, None]()
    for line in (line for path in paths for line in _lines(path)):
        if "lost_context" in line:
            outcomes.lost_context.append(line["lost_context"])
            continue
        if "test" not in line:
            outcomes.files.update(line.get("files", {}))
            seen.update(dict.fromkeys(line.get("listed", [line.get("began", "")])))
            continue
        test, how = line["test"], line["how"]
        outcomes.seconds[test] = outcomes.seconds.get(test, 0.0) + line["seconds"]
        if how != "passed" and worst.get(test) != "failed":
            worst[test], outcomes.why[test] = how, line["why"]
        if line["phase"] == "teardown":
            outcomes.how[test] = worst.get(test, "passed")
    outcomes.open = [t for t in seen if t not in outcomes.how]
    return outcomes


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue
