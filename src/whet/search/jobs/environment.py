"""A job's environment in its child process: recipe, data, locks, energy meter, and the current stage for watchers."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from whet.backends import Backend, get_backend, get_capabilities
from whet.measure.tensorrt_engine import ComparedEngine
from whet.network import Network
from whet.registry import import_user_function
from whet.report.stage import STAGE, WAITING
from whet.search.jobs.device_locks import DeviceLock, find_physical_gpu
from whet.search.jobs.job import Job
from whet.search.recipe import fields as f
from whet.search.recipe.data import Labelled, load_labelled
from whet.search.recipe.metrics import Predict, Score, call_user_metric, knows_which, top1
from whet.search.recipe.recipe import Effort, recipe_from
from whet.search.recipe.space import Candidate
from whet.search.stages.energy import Meter
from whet.search.stages.executor import load_executor


class Worker:
    """State shared by the steps of a job."""

    def __init__(self, job: Job, folder: Path):
        self.job, self.folder = job, folder
        self.recipe = recipe_from(job.recipe)
        self.candidate = Candidate.from_plain(job.candidate)
        self.effort = f.read(Effort, job.effort, "effort") if job.effort else Effort()
        self.lock = DeviceLock(self.recipe.device, waiting=self._waits)
        self.started = perf_counter()
        self.stages: dict[str, float] = {}
        self._stage, self._since, self._said, self._before = "", self.started, "", ""
        self._data: dict[str, Labelled] = {}
        self.meter = Meter(find_physical_gpu(self.recipe.device))

    def say(self, stage: str) -> None:
        """Writes the current stage to stage.txt and accumulates the duration of each kind of work."""
        now, kind = perf_counter(), stage.split(" ")[0]
        if self._stage:
            self.stages[self._stage] = self.stages.get(self._stage, 0.0) + now - self._since
        self._stage, self._since, self._said = kind, now, stage
        (self.folder / STAGE).write_text(stage, encoding="utf-8")

    def _waits(self, holder: str | None) -> None:
        """Writes a waiting stage while the device lock is unavailable, then restores the previous stage."""
        if holder is None:
            self.say(self._before)
        elif not self._said.startswith(WAITING):
            self._before = self._said
            self.say(f"{WAITING} ({holder})")

    def score(self, predict: Predict, net: Network, which: str = "score") -> Score:
        """The metric on `data.score` or `data.judge`."""
        if self.recipe.metric == "top1":
            source = getattr(self.recipe.data, which) or self.recipe.data.score
            assert source is not None
            if source not in self._data:
                self._data[source] = load_labelled(source, net, f"data.{which}", self.recipe.data.preprocess)
            return top1(predict, self._data[source])
        return call_user_metric(import_user_function(self.recipe.metric, "metric"), predict, self.recipe.metric, which)

    @property
    def last_data(self) -> str:
        """The data set of the final comparison: "judge" where the recipe gives it, else "score"."""
        if self.recipe.metric == "top1":
            return "judge" if self.recipe.data.judge else "score"
        return "judge" if knows_which(import_user_function(self.recipe.metric, "metric")) else "score"

    def backend(self) -> Backend:
        """The recipe's device."""
        return get_backend(self.recipe.backend, threads=self.recipe.threads)

    def load(self, path: Path) -> ComparedEngine:
        """Loads the engine of an engine file on the recipe's device: whet's, or TensorRT's if that is the executor."""
        return load_executor(path, self.recipe)

    @property
    def energy_seconds(self) -> float:
        """Duration of an energy measurement: at least the counter's need, less with a small effort."""
        return min(get_capabilities(self.recipe.backend).energy_seconds, 4 * self.effort.seconds)

    def measure_idle(self) -> None:
        """Measures the device's idle power with this process's context open. Acquires the timing lock."""
        self.say("resting")
        self.backend()
        self.meter.measure_idle(self.energy_seconds)


class Stages:
    """Reports a builder's progress as the stage of the job."""

    def __init__(self, w: Worker):
        self.w, self.name, self.total, self.done, self.last = w, "", 1, 0, 0.0

    def stage(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0

    def step(self, description: str, done: int = 1) -> None:
        self.done += done
        if perf_counter() - self.last > 0.2:
            self.last = perf_counter()
            self.w.say(f"building {self.name} {self.done}{f'/{self.total}' if self.total else ''}")

    def note(self, text: str) -> None:
        """Ignored: the plan's report holds the notes."""
