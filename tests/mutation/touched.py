"""A pytest plugin that writes which functions each passing test enters: `-p touched`, with WHET_TOUCHED naming a folder. Needs Python 3.12.

One JSON line per test in a file per process: its name, its seconds, and the entered functions of src/whet as FILE:QUALIFIED NAME, which
later commits keep.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

_TOOL = 2  # sys.monitoring.PROFILER_ID


class Touched:
    """Records entered functions by sys.monitoring; a function that was entered costs nothing more in the same test."""

    def __init__(self, folder: Path):
        self.out = open(folder / f"{os.getpid()}.jsonl", "a")
        self.entered: set[str] = set()
        self.failed = False
        monitoring: Any = vars(sys)["monitoring"]
        monitoring.use_tool_id(_TOOL, "whet-touched")
        monitoring.register_callback(_TOOL, monitoring.events.PY_START, self._start)
        monitoring.set_events(_TOOL, monitoring.events.PY_START)
        self.monitoring = monitoring

    def _start(self, code: CodeType, offset: int) -> Any:
        _, found, module = code.co_filename.rpartition("src/whet/")
        if found:
            self.entered.add(f"{found}{module}:{code.co_qualname}")
        return self.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        self.entered.clear()
        self.failed = False
        self.monitoring.restart_events()
        begun = time.perf_counter()
        result = yield
        if not self.failed:
            found = {"test": item.nodeid, "seconds": round(time.perf_counter() - begun, 3), "entered": sorted(self.entered)}
            self.out.write(json.dumps(found) + "\n")
            self.out.flush()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed or report.skipped


def pytest_configure(config: pytest.Config) -> None:
    """Not in the process that only distributes tests."""
    folder = os.environ.get("WHET_TOUCHED")
    if folder and (not config.getoption("numprocesses", None) or hasattr(config, "workerinput")):
        config.pluginmanager.register(Touched(Path(folder)), "touched-recorder")
