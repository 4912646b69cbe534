"""Runs jobs on the workers: start, wait, read results; finished jobs are not repeated."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whet import __version__
from whet.backends import get_backend, get_capabilities
from whet.search.jobs import job as j
from whet.search.jobs.workers import LocalWorkers, Workers
from whet.search.outcome.folder import WorkFolder
from whet.search.outcome.progress import Watcher
from whet.search.outcome.verdicts import Trial
from whet.search.recipe.recipe import AutoRecipe, Effort
from whet.search.recipe.space import SearchSpace

_POLL = 0.1


class Running:
    """Runs a recipe's jobs on workers; each start and end is a line of events.jsonl."""

    def __init__(self, recipe: AutoRecipe, folder: WorkFolder, workers: Workers, watcher: Watcher):
        self.recipe, self.folder, self.workers, self.watch = recipe, folder, workers, watcher
        self.plain = recipe.to_plain()
        self.made_by = describe_software(recipe, workers)
        self.notes: list[str] = []

    @property
    def slots(self) -> int:
        return self.workers.slots

    def job(self, role: str, trial: Trial, space: SearchSpace, effort: Effort, stop_above: float | None = None) -> j.Job:
        """The job of a trial, which may end before its engine is built (`stop_above`).

        A survivor with a latency budget keeps the channels chosen for its scout.
        """
        c, kept = trial.candidate, space.kept(trial.candidate)
        if role == "survivor" and c.budget is not None and trial.result is not None:
            c, kept = dataclasses.replace(c, removed=tuple(trial.result["removed"])), trial.result["kept"]
        reference = str(self.folder.baseline("fp32", c.batch))
        allowed = self.recipe.target.accuracy_drop if role == "survivor" and c.precision == "int8" and self.recipe.qat is not None else None
        return j.Job(role, f"trial {trial.number}", self.plain, c.to_plain(), kept, dataclasses.asdict(effort), reference, allowed=allowed,
                     stop_above=stop_above, made_by=self.made_by)  # fmt: skip

    def begin(self, folder: Path, text: str) -> None:
        """Starts the job stored in a folder."""
        self.append_event("begin", folder)
        self.watch.start_job(folder, text)
        self.workers.start(folder)

    def do(self, jobs: Iterable[tuple[Path, j.Job]]) -> None:
        """Runs the jobs without a result (or whose folder holds another job), one per worker at a time.

        A job that failed in an earlier call is repeated, since its cause may be fixed.
        """
        waiting, running = [], 0
        for folder, job in jobs:
            result = j.read_result(folder) if job.same_as(folder) else None
            if result is not None and result["state"] == "done" and j.is_complete(folder, result):
                self.watch.end_job(folder, result, True)
            else:
                (folder / j.RESULT).unlink(missing_ok=True)
                job.write(folder)
                waiting.append((folder, job.name))
        while waiting or running:
            while waiting and running < self.slots:
                self.begin(*waiting.pop(0))
                running += 1
            for folder, problem in self.wait():
                running -= 1
                self.watch.end_job(folder, self.result(folder, problem), False)

    def wait(self) -> list[tuple[Path, str | None]]:
        """Waits until a job ends; returns ended jobs with the failure reason or None."""
        while True:
            ended = self.workers.collect_finished()
            self.watch.tick()
            if ended:
                return ended
            time.sleep(_POLL)

    def result(self, folder: Path, problem: str | None) -> dict[str, Any]:
        """A job's result; a failed result is written if its process left none."""
        result = j.read_result(folder)
        if result is None:
            result = j.make_failed_result(j.read_json(folder / j.JOB), problem or "no result")
            j.write_json(folder / j.RESULT, result)
        self.append_event("end", folder)
        return result

    def note(self, text: str) -> None:
        """Reports a note to the watcher and keeps it for the report."""
        self.notes.append(text)
        self.watch.note(text)

    def append_event(self, name: str, folder: Path | None = None) -> None:
        """Appends a line to events.jsonl, which survives kills."""
        job = None if folder is None else str(folder.relative_to(self.folder.path))
        with (self.folder.path / "events.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps({"time": time.time(), "event": name, "job": job}) + "\n")


def describe_software(recipe: AutoRecipe, workers: Workers) -> str:
    """Identity of engines and times: whet's version, and the local processor where it runs the trials (GPUs are not opened here)."""
    here = get_capabilities(recipe.backend).workers and isinstance(workers, LocalWorkers)
    return f"whet {__version__}" + (f" on {get_backend(recipe.backend, threads=recipe.threads).describe().get('model')}" if here else "")
