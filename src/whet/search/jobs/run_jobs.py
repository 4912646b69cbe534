"""Jobs on the workers: begun, waited for, their results read; what is there already is not done again."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whet import __version__
from whet.backends import capabilities_of, get_backend
from whet.search.jobs import job as j
from whet.search.jobs.workers import LocalWorkers, Workers
from whet.search.outcome.folder import WorkFolder
from whet.search.outcome.progress import Watcher
from whet.search.outcome.verdicts import Trial
from whet.search.recipe.recipe import AutoRecipe, Effort
from whet.search.recipe.space import SearchSpace

_POLL = 0.1


class Running:
    """The workers with the recipe's jobs; each begin and end is a line of events.jsonl."""

    def __init__(self, recipe: AutoRecipe, folder: WorkFolder, workers: Workers, watcher: Watcher):
        self.recipe, self.folder, self.workers, self.watch = recipe, folder, workers, watcher
        self.plain = recipe.to_plain()
        self.made_by = made_by(recipe, workers)
        self.notes: list[str] = []

    @property
    def slots(self) -> int:
        return self.workers.slots

    def job(self, role: str, trial: Trial, space: SearchSpace, effort: Effort) -> j.Job:
        """The job of a trial; a survivor that had a budget keeps what was chosen for it as a scout."""
        c, kept = trial.candidate, space.kept(trial.candidate)
        if role == "survivor" and c.budget is not None and trial.result is not None:
            c, kept = dataclasses.replace(c, removed=tuple(trial.result["removed"])), trial.result["kept"]
        reference = str(self.folder.baseline("fp32", c.batch))
        allowed = self.recipe.target.accuracy_drop if role == "survivor" and c.precision == "int8" and self.recipe.qat is not None else None
        return j.Job(role, f"trial {trial.number}", self.plain, c.to_plain(), kept, dataclasses.asdict(effort), reference, allowed=allowed,
                     made_by=self.made_by)  # fmt: skip

    def begin(self, folder: Path, what: str) -> None:
        """Starts a job that is written in its folder."""
        self.event("begin", folder)
        self.watch.begun(folder, what)
        self.workers.start(folder)

    def do(self, jobs: Iterable[tuple[Path, j.Job]]) -> None:
        """Runs the jobs that are not done (or whose folder holds another job), as many at once as there are workers.

        One that failed in an earlier call is tried again: its cause may have been mended.
        """
        waiting, running = [], 0
        for folder, job in jobs:
            found = j.result_of(folder) if job.same_as(folder) else None
            if found is not None and found["state"] == "done" and j.whole(folder, found):
                self.watch.ended(folder, found, True)
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
                self.watch.ended(folder, self.result(folder, problem), False)

    def wait(self) -> list[tuple[Path, str | None]]:
        """Jobs that ended, with what went wrong; waits for one."""
        while True:
            found = self.workers.finished()
            self.watch.tick()
            if found:
                return found
            time.sleep(_POLL)

    def result(self, folder: Path, problem: str | None) -> dict[str, Any]:
        """A job's result; where its process left none, that is written as its result."""
        found = j.result_of(folder)
        if found is None:
            found = j.failed(j.read_json(folder / j.JOB), problem or "no result")
            j.write_json(folder / j.RESULT, found)
        self.event("end", folder)
        return found

    def note(self, text: str) -> None:
        """Something the user should know; it stands in the report too."""
        self.notes.append(text)
        self.watch.note(text)

    def event(self, what: str, folder: Path | None = None) -> None:
        """A line of events.jsonl: when what began and ended, across kills."""
        job = None if folder is None else str(folder.relative_to(self.folder.path))
        with (self.folder.path / "events.jsonl").open("a") as f:
            f.write(json.dumps({"time": time.time(), "event": what, "job": job}) + "\n")


def made_by(recipe: AutoRecipe, workers: Workers) -> str:
    """What engines and times are of: this version of whet, and this machine's processor where it runs the trials (a GPU is not opened here)."""
    here = capabilities_of(recipe.backend).workers and isinstance(workers, LocalWorkers)
    return f"whet {__version__}" + (f" on {get_backend(recipe.backend, threads=recipe.threads).describe().get('model')}" if here else "")
