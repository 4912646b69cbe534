"""Progress of a search in a terminal: running jobs, finished trials, the best one, time left. Plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.report._html import format_digits
from whet.report.stage import WAITING, find_stage

_SHOWN = 12  # trials in the table


class SearchLive:
    """A watcher of a search (see search/outcome/progress.py), as a context manager that owns the screen.

    `long_wait_s`: seconds of waiting for the device after which a line is printed.
    """

    def __init__(self, *, live: bool, console: Any = None, long_wait_s: float = 20.0):
        from rich.console import Console

        self.console = console or Console(stderr=True, emoji=False)
        self.live, self.long_wait_s = live, long_wait_s
        self.phase_name, self.total, self.done = "", 1, 0
        self.target: Mapping[str, Any] = {}
        self.running: dict[Path, tuple[str, float]] = {}
        self.trials: list[tuple[str, Mapping[str, Any], bool]] = []
        self.seconds: list[float] = []  # durations of this phase's jobs
        self.slots = 1
        self._screen: Any = None
        self._drawn = 0.0
        self._waits: dict[Path, float] = {}  # start of waiting; inf: already reported

    def __enter__(self) -> SearchLive:
        if self.live:
            from rich.live import Live

            self._screen = Live(self.view(), console=self.console, transient=True, auto_refresh=False)
            self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None

    def plan(self, facts: Mapping[str, Any]) -> None:
        self.target, self.slots = facts["target"], facts["workers"]
        going = "goes on" if facts["resumed"] else "begins"
        wanted = ", ".join(f"{k} {v}" for k, v in facts["target"].items())
        self._say(f"The search {going} in {facts['folder']}: {facts['trials']} trials, target {wanted}; {facts['points']:,} points to choose from.")

    def phase(self, name: str, total: int) -> None:
        self.phase_name, self.total, self.done, self.seconds = name, max(total, 1), 0, []
        self.tick()

    def start_job(self, folder: Path, description: str) -> None:
        self.running[folder] = (description, time.monotonic())
        self.tick()

    def end_job(self, folder: Path, result: Mapping[str, Any], again: bool) -> None:
        self.running.pop(folder, None)
        self.done += 1
        if not again and result.get("seconds"):
            self.seconds.append(result["seconds"])
        if result["role"] != "final":
            self.trials.append((f"{result['role']} {folder.name}", result, again))
            if not again or self.live:
                self._say_result(folder, result)
        self.tick()

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def tick(self) -> None:
        if self._screen is None:
            self._tell_waiting()
        if self._screen is not None and time.monotonic() - self._drawn > 0.2:
            self._drawn = time.monotonic()
            self._screen.update(self.view(), refresh=True)

    def eta(self) -> float | None:
        """Estimated seconds left in this phase, from the mean duration of its jobs; None without data."""
        if not self.seconds:
            return None
        return sum(self.seconds) / len(self.seconds) * max(self.total - self.done, 0) / self.slots

    def find_best(self) -> tuple[str, Mapping[str, Any]] | None:
        """The fastest finished trial that loses no more than the target allows."""
        allowed = self.target.get("accuracy_drop")
        good = [(n, r) for n, r, _ in self.trials if r["state"] == "done" and (allowed is None or r["drop"]["value"] <= allowed)]
        return min(good, key=lambda x: x[1]["latency"]["ratio"], default=None)

    def summary(self) -> str:
        """The phase and the running jobs with their stages, on one line."""
        running = list(self.running.items())
        jobs = [f"{folder.name} {find_stage(folder) or 'starting'} ({time.monotonic() - since:.0f} s)" for folder, (_, since) in running]
        left = self.eta()
        about = "" if left is None else f", about {_format_time(left)} left"
        return f"{self.phase_name or 'starting'} {min(self.done, self.total)} of {self.total}{about}" + (f": {', '.join(jobs)}" if jobs else "")

    def view(self) -> Any:
        """The contents of the screen."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        left = self.eta()
        parts: list[Any] = []
        about = "" if left is None else f", about {_format_time(left)} left in this phase"
        parts.append(Text(f"{self.phase_name or 'starting'}: {min(self.done, self.total)} of {self.total}{about}", style="bold"))
        for folder, (what, since) in self.running.items():
            stage = find_stage(folder) or "starting"
            parts.append(Text(f"  {folder.name}: {stage} ({time.monotonic() - since:.0f} s)  {what}", overflow="ellipsis", no_wrap=True))
        found = self.find_best()
        if found is not None:
            parts.append(Text(f"best so far: {found[0]}: {_describe_result(found[1])}", style="green"))
        t = Table(box=None, pad_edge=False)
        for column in ("job", "what", "x original", "median ms", "metric", "lost"):
            t.add_column(column, justify="left" if column in ("job", "what") else "right", no_wrap=column != "what", overflow="ellipsis")
        for name, r, _ in self.trials[-_SHOWN:]:
            if r["state"] != "done":
                t.add_row(name, Text(f"{r['state']}: {r['reason']}"[:80]), "-", "-", "-", "-", style="dim")  # a reason may name a layer: no markup
            else:
                ms = r["latency"]
                ratio, median = format_digits(ms["ratio"]), format_digits(ms["median_ms"])
                t.add_row(name, describe_candidate(r), ratio, median, format_digits(r["metric"]["value"], 4), format_digits(r["drop"]["value"]))
        parts.append(t)
        return Group(*parts)

    def _tell_waiting(self) -> None:
        """Without a screen: reports once each job that has waited long for the device."""
        if time.monotonic() - self._drawn < self.long_wait_s / 4:
            return
        self._drawn = time.monotonic()
        for folder in self.running:
            stage = find_stage(folder)
            if not stage.startswith(WAITING):
                self._waits.pop(folder, None)
            elif time.monotonic() - self._waits.setdefault(folder, time.monotonic()) > self.long_wait_s:
                self._waits[folder] = float("inf")
                self._say(f"{folder.parent.name} {folder.name}: {stage}")

    def _say_result(self, folder: Path, result: Mapping[str, Any]) -> None:
        if self.live:
            return
        what = f"{result['state']}: {result['reason']}" if result["state"] != "done" else f"{_describe_result(result)}  {describe_candidate(result)}"
        left = self.eta()
        self._say(f"{result['role']} {folder.name} ({self.done}/{self.total}" + (f", {_format_time(left)} left" if left else "") + f"): {what}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _describe_result(r: Mapping[str, Any]) -> str:
    others = r["load"].get("gpu_processes")
    busy = ", busy machine" if r["load"]["disturbed"] else f", {len(others)} other process{'es' * (len(others) > 1)} on the GPU" if others else ""
    return (f"{format_digits(r['latency']['ratio'])}x the original's time, {format_digits(r['latency']['median_ms'])} ms{busy}, "
            f"metric {format_digits(r['metric']['value'], 4)}, lost {format_digits(r['drop']['value'])}")  # fmt: skip


def describe_candidate(r: Mapping[str, Any]) -> str:
    """A candidate in a few words: precision, batch, cuts."""
    c = r["candidate"]
    cuts = [v for v in c.get("widths", {}).values() if v > 0]
    parts = [c["precision"]]
    if c["batch"] != 1:
        parts.append(f"batch {c['batch']}")
    if c.get("two_four"):
        parts.append("2:4")
    if c.get("fusion", "all") != "all":
        parts.append(f"passes {c['fusion']}")
    if c.get("budget") is not None:
        parts.append(f"latency budget {100 * c['budget']:.0f} %")
    if c["removed"]:
        parts.append(f"{len(c['removed'])} branches removed")
    if cuts:
        parts.append(f"{100 * sum(cuts) / len(c['widths']):.0f} % cut on average")
    return ", ".join(parts)


def _format_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
