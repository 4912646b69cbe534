"""The loop: baselines, scouts that Optuna draws, survivors that get the full treatment, all of them in turns, the choice.

Everything that is known is in files (folder.py), so the loop holds no state that a kill could take: each step looks at what is there
and does what is missing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.errors import BuildError
from whet.frontends import network_from_onnx
from whet.network import Network
from whet.pruning.depth import branches
from whet.search import job as j
from whet.search.folder import WorkFolder
from whet.search.recipe import AutoRecipe, Effort
from whet.search.space import Candidate, SearchSpace, search_space
from whet.search.study import Study
from whet.search.targets import Check, checks, choose, distance, met, pareto
from whet.search.watching import Silent, Watcher
from whet.search.workers import Workers, workers_for

_POLL = 0.1
_SAME_IN_A_ROW = 200  # points drawn without a new one: the space is used up


@dataclass
class Trial:
    """A scout: its number, its candidate, and its result once there is one. `same_as`: it came to the engine of another trial."""

    number: int
    candidate: Candidate
    result: dict[str, Any] | None = None
    same_as: int | None = None


@dataclass
class SearchResult:
    """What a search found. `rows` are the compared engines (the original first), `chosen` one of them, `met` whether the target is met."""

    recipe: AutoRecipe
    folder: WorkFolder
    space: SearchSpace
    baselines: dict[str, dict[str, Any]]
    trials: list[Trial]
    survivors: list[tuple[Trial, dict[str, Any]]]
    final: dict[str, Any]
    chosen: int
    checks: list[list[Check]]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def met(self) -> bool:
        return met(self.checks[self.chosen])


class Loop:
    """One call of `whet auto` on an opened work folder."""

    def __init__(self, recipe: AutoRecipe, folder: WorkFolder, workers: Workers, watcher: Watcher):
        self.recipe, self.folder, self.workers, self.watch = recipe, folder, workers, watcher
        self.plain = recipe.to_plain()
        self.net: Network = network_from_onnx(recipe.model)
        self.space = search_space(self.net, recipe, [b.name for b in branches(self.net)])  # a baseline will rank the branches
        self.batches: tuple[int, ...] = next((d.values for d in self.space.dimensions if d.name == "batch"), (self.space.fixed.get("batch", 1),))
        self.precisions = next((d.values for d in self.space.dimensions if d.name == "precision"), (self.space.fixed.get("precision", "fp32"),))
        self.notes: list[str] = []

    def run(self, resumed: bool) -> SearchResult:
        """From wherever the folder stands to the end. Raises BuildError when the original itself cannot be built, or all trials failed."""
        begun = time.monotonic()
        self.watch.plan(self.facts(resumed))
        baselines = self.baselines()
        self.space = search_space(self.net, self.recipe, baselines[f"fp32-b{self.batches[0]}"].get("branches", ()))
        trials = self.scouts(baselines)
        survivors = self.survivors(trials, baselines)
        final = self.comparison(survivors)
        rows = final["rows"]
        originals = self.originals(baselines, final)
        checked = [checks(self.recipe.target, r, originals[i]) for i, r in enumerate(rows)]
        points = [(*self.point(r, baselines, self.batch_of(i, survivors)), checked[i]) for i, r in enumerate(rows)]
        chosen = choose(points, self.recipe.prefer)
        return SearchResult(
            self.recipe, self.folder, self.space, baselines, trials, survivors, final, chosen, checked, self.notes, time.monotonic() - begun
        )

    def facts(self, resumed: bool) -> dict[str, Any]:
        """What a dry run prints, and a watcher is told first."""
        r, s = self.recipe, self.space
        return {
            "model": r.model, "device": r.device, "target": self.plain["target"], "prefer": r.prefer, "trials": r.search.trials,
            "survivors": r.survivor.count, "timeout": r.search.timeout, "workers": self.workers.slots, "folder": str(self.folder.path),
            "resumed": resumed, "baselines": [f"{p}, batch {b}" for p, b in self.baseline_rows()], "points": s.size(),
            "space": {d.name: list(d.values) if d.values else f"0 to {d.most:g} in steps of {d.step:g}" for d in s.dimensions},
            "classes": {name: list(members) for name, members in s.classes.items()}, "fixed": dict(s.fixed),
            "left_out": [list(x) for x in s.left_out],
        }  # fmt: skip

    # the phases

    def baseline_rows(self) -> list[tuple[str, int]]:
        """The original in FP32 at each batch, then in the other types at the first one."""
        others = [p for p in self.precisions if p != "fp32"]
        return [("fp32", b) for b in self.batches] + [(p, self.batches[0]) for p in others]

    def baselines(self) -> dict[str, dict[str, Any]]:
        """Results of the original by `precision-bN`. Raises BuildError when it cannot be built in FP32."""
        rows = self.baseline_rows()
        self.watch.phase("baselines", len(rows))
        effort = dataclasses.asdict(self.recipe.survivor)
        effort.pop("count")
        for part in ([r for r in rows if r[0] == "fp32"], [r for r in rows if r[0] != "fp32"]):
            jobs = []
            for precision, batch in part:
                reference = None if precision == "fp32" else str(self.folder.baseline("fp32", batch))
                c = Candidate(precision=precision, batch=batch)
                jobs.append((self.folder.baseline(precision, batch), j.Job("baseline", f"{precision}, batch {batch}", self.plain, c.to_plain(),
                                                                          effort=effort, reference=reference)))  # fmt: skip
            self._do(jobs)
        found = {f"{p}-b{b}": j.result_of(self.folder.baseline(p, b)) or {} for p, b in rows}
        for name, r in found.items():
            if r["state"] != "done":
                if name.startswith("fp32"):
                    raise BuildError(f"the original cannot be built and judged ({name}): {r['reason']}")
                self._note(f"the original in {name.partition('-')[0]}: {r['reason']}")
        return {name: r for name, r in found.items() if r["state"] == "done"}

    def scouts(self, baselines: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
        """All trials of the study, run until the budget is used."""
        r, budget = self.recipe, self.recipe.search
        self.watch.phase("scouts", budget.trials)
        if not self.space.dimensions:
            self._note("there is nothing to search over: the space has one point")
            return self._single(baselines)
        study = Study(self.folder.study, self.space, higher_is_better=r.higher_is_better, sampler=budget.sampler, seed=budget.seed,
                      startup=max(4, min(10, budget.trials // 3)))  # fmt: skip
        study.enqueue(self.space.seeds()[: max(1, budget.trials // 2)])
        deadline = None if budget.timeout is None else time.monotonic() + budget.timeout
        trials, waiting = self._known(study), list(study.unfinished())
        known = {self.space.key(t.candidate): t for t in trials.values() if t.result is not None and t.same_as is None}
        running: dict[Path, Trial] = {}
        drawn_again = 0
        while True:
            while len(running) < self.workers.slots:
                late = deadline is not None and time.monotonic() > deadline
                if waiting:
                    number, params = waiting.pop(0)
                elif late or self._fresh(trials) + len(running) >= budget.trials or drawn_again >= _SAME_IN_A_ROW:
                    break
                else:
                    number, params = study.ask()
                trial = Trial(number, self.space.candidate(params))
                folder, key = self.folder.scout(number), self.space.key(trial.candidate)
                trial.result = j.result_of(folder)
                if trial.result is None and key in known:
                    trial.same_as, trial.result = known[key].number, known[key].result
                    drawn_again += 1
                if trial.result is not None:
                    self._tell(study, trial, trials, known, baselines, found=True)
                    continue
                twin = next((t for t in running.values() if self.space.key(t.candidate) == key), None)
                if twin is not None:  # its result is on its way: told when that is there
                    trial.same_as = twin.number
                    trials[number] = trial
                    drawn_again += 1
                    continue
                drawn_again = 0
                self._job("scout", trial, r.scout).write(folder)
                running[folder] = trial
                self.watch.begun(folder, trial.candidate.words())
                self.workers.start(folder)
            if not running:
                break
            for folder, problem in self._wait():
                trial = running.pop(folder)
                trial.result = self._result(folder, problem)
                self._tell(study, trial, trials, known, baselines)
                for t in [t for t in trials.values() if t.same_as == trial.number and t.result is None]:
                    t.result = trial.result
                    self._tell(study, t, trials, known, baselines, found=True)
        if drawn_again >= _SAME_IN_A_ROW:
            self._note(f"no new point was drawn {_SAME_IN_A_ROW} times in a row: the space of {self.space.size()} points is used up")
        return [trials[n] for n in sorted(trials)]

    def survivors(self, trials: list[Trial], baselines: Mapping[str, Mapping[str, Any]]) -> list[tuple[Trial, dict[str, Any]]]:
        """The scouts that are nearest to the target, and the ends of what is beyond it, prepared and built with full effort."""
        picked = self.pick(trials, baselines)
        self.watch.phase("survivors", len(picked))
        if trials and not picked:
            first = next((t.result["reason"] for t in trials if t.result and t.result["state"] == "failed"), "")
            raise BuildError(f"all {len(trials)} trials failed; the first: {first}")
        effort = Effort(self.recipe.survivor.samples, self.recipe.survivor.rows, self.recipe.survivor.level, self.recipe.survivor.seconds)
        jobs = [(self.folder.survivor(t.number), self._job("survivor", t, effort)) for t in picked]
        self._do(jobs)
        found = []
        for t in picked:
            result = j.result_of(self.folder.survivor(t.number)) or {}
            if result.get("state") == "done":
                found.append((t, result))
            else:
                self._note(f"trial {t.number} did not survive: {result.get('reason', 'no result')}")
        return found

    def pick(self, trials: list[Trial], baselines: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
        """Which scouts go on: of the Pareto set those that miss the target least, then by cost; then others by the same order.

        A scout recovers less than a survivor will, so its drop is forgiven once more: what decides is the distance to the target.
        """
        done = [t for t in trials if t.result is not None and t.result["state"] == "done" and t.same_as is None]
        points = [self.point(t.result, baselines, t.candidate.batch) for t in done]  # type: ignore[arg-type]
        front = set(pareto(points))
        away = [distance(self.checks_of(t, baselines)) for t in done]
        if self.recipe.prefer == "accuracy":
            points = [(loss, cost) for cost, loss in points]
        order = sorted(range(len(done)), key=lambda i: (i not in front, away[i], points[i]))
        return [done[i] for i in order[: self.recipe.survivor.count]]

    def comparison(self, survivors: list[tuple[Trial, dict[str, Any]]]) -> dict[str, Any]:
        """The originals and the survivors in turns, judged on data that nothing else has seen, where there are such."""
        folders = self.compared(survivors)
        self.watch.phase("comparison", 1)
        effort = {"samples": self.recipe.survivor.samples, "seconds": self.recipe.survivor.seconds}
        job = j.Job("final", "comparison", self.plain, Candidate(batch=self.batches[0]).to_plain(), effort=effort, folders=[str(p) for p in folders])
        self._do([(self.folder.final, job)])
        found = j.result_of(self.folder.final) or {}
        if found.get("state") != "done":
            raise BuildError(f"the last comparison failed: {found.get('reason', 'no result')}")
        return found

    def compared(self, survivors: list[tuple[Trial, dict[str, Any]]]) -> list[Path]:
        """Folders of the engines that are compared: the original in FP32 at each batch, in the other types, the survivors."""
        originals = [self.folder.baseline(p, b) for p, b in self.baseline_rows()]
        alive = [p for p in originals if (j.result_of(p) or {}).get("state") == "done"]
        return [*alive, *(self.folder.survivor(t.number) for t, _ in survivors)]

    # what the numbers mean

    def originals(self, baselines: Mapping[str, Mapping[str, Any]], final: dict[str, Any]) -> list[dict[str, Any]]:
        """For each compared row the original's FP32 row at the same batch; the rows' ratios are made to be of that one."""
        rows = final["rows"]
        by_name = {r["folder"]: r for r in rows}
        found = []
        for r in rows:
            batch = self._batch_named(r["folder"])
            own = by_name[f"fp32-b{batch}"]
            found.append(own)
        first = {r["folder"]: r["latency"]["ratio"] for r in rows}
        for r, own in zip(rows, found, strict=True):
            r["latency"] = {**r["latency"], "ratio": first[r["folder"]] / first[own["folder"]]}
        return found

    def _batch_named(self, name: str) -> int:
        if "-b" in name:
            return int(name.rpartition("-b")[2])
        return int((j.read_json(self.folder.survivor(int(name)) / j.JOB) or {})["candidate"]["batch"])

    def batch_of(self, row: int, survivors: list[tuple[Trial, dict[str, Any]]]) -> int:
        """The batch of a compared row."""
        rows = self.compared(survivors)
        return self._batch_named(rows[row].name)

    def point(self, row: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]], batch: int) -> tuple[float, float]:
        """(cost, loss), both the smaller the better. Cost is milliseconds of a run, in a sample where throughput or several batches are asked for.

        It is the ratio to the original, taken in turns, times the original's own time: a busy hour does not count against a trial.
        """
        ms = row["latency"]["ratio"] * baselines[f"fp32-b{batch}"]["latency"]["median_ms"]
        a_sample = len(self.batches) > 1 or (self.recipe.target.throughput is not None and self.recipe.target.latency is None)
        value = row["metric"]["value"]
        return (ms / batch if a_sample else ms), (-value if self.recipe.higher_is_better else value)

    def checks_of(self, trial: Trial, baselines: Mapping[str, Mapping[str, Any]]) -> list[Check]:
        assert trial.result is not None
        return checks(self.recipe.target, trial.result, baselines[f"fp32-b{trial.candidate.batch}"])

    # inside

    def _known(self, study: Study) -> dict[int, Trial]:
        """Trials that were told, with their results from their folders."""
        found = {}
        for number, state in study.numbers().items():
            if state == "running":
                continue
            about = study.attributes(number)
            same = about.get("same_as")
            result = j.result_of(self.folder.scout(number if same is None else same))
            trial = Trial(number, Candidate.from_plain(about["candidate"]), result, same)
            found[number] = trial
            if result is not None:
                self.watch.ended(self.folder.scout(number), result, True)
        return found

    @staticmethod
    def _fresh(trials: Mapping[int, Trial]) -> int:
        """Trials that were a point of their own: what the budget counts."""
        return sum(t.same_as is None for t in trials.values())

    def _tell(self, study: Study, trial: Trial, trials: dict[int, Trial], known: dict[str, Trial], baselines: Any, found: bool = False) -> None:
        r = trial.result
        assert r is not None
        about: dict[str, Any] = {"candidate": trial.candidate.to_plain(), "state": r["state"]}
        if trial.same_as is not None:
            about["same_as"] = trial.same_as
        values = None
        if r["state"] == "done":
            cost, _ = self.point(r, baselines, trial.candidate.batch)
            values = (cost, r["metric"]["value"])
            about["misses"] = [c.miss for c in self.checks_of(trial, baselines) if c.miss is not None]
            about["latency_ms"], about["disturbed"] = r["latency"]["median_ms"], r["load"]["disturbed"]
        else:
            about["reason"] = r["reason"]
        study.tell(trial.number, values, about)
        trials[trial.number] = trial
        if trial.same_as is None:
            known.setdefault(self.space.key(trial.candidate), trial)
        self.watch.ended(self.folder.scout(trial.number), r, found)

    def _single(self, baselines: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
        """The only point there is."""
        trial = Trial(0, self.space.candidate({}))
        folder = self.folder.scout(0)
        self._do([(folder, self._job("scout", trial, self.recipe.scout))])
        trial.result = j.result_of(folder)
        return [trial]

    def _job(self, role: str, trial: Trial, effort: Effort) -> j.Job:
        c = trial.candidate
        return j.Job(role, f"trial {trial.number}", self.plain, c.to_plain(), self.space.kept(c), dataclasses.asdict(effort),
                     str(self.folder.baseline("fp32", c.batch)))  # fmt: skip

    def _do(self, jobs: Iterable[tuple[Path, j.Job]]) -> None:
        """Runs the jobs that have no result yet, as many at once as there are workers."""
        waiting, running = [], 0
        for folder, job in jobs:
            found = j.result_of(folder) if job.same_as(folder) else None
            if found is not None:
                self.watch.ended(folder, found, True)
            else:
                (folder / j.RESULT).unlink(missing_ok=True)
                job.write(folder)
                waiting.append((folder, job))
        names = {folder: job.name for folder, job in waiting}
        while waiting or running:
            while waiting and running < self.workers.slots:
                folder, _ = waiting.pop(0)
                self.watch.begun(folder, names[folder])
                self.workers.start(folder)
                running += 1
            for folder, problem in self._wait():
                running -= 1
                self.watch.ended(folder, self._result(folder, problem), False)

    def _wait(self) -> list[tuple[Path, str | None]]:
        """Jobs that ended; waits for one."""
        while True:
            found = self.workers.finished()
            self.watch.tick()
            if found:
                return found
            time.sleep(_POLL)

    def _result(self, folder: Path, problem: str | None) -> dict[str, Any]:
        """A job's result; where its process left none, that is written as its result."""
        found = j.result_of(folder)
        if found is None:
            found = j.failed(j.read_json(folder / j.JOB), problem or "no result")
            j.write_json(folder / j.RESULT, found)
        return found

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.watch.note(text)


def search(
    recipe: AutoRecipe, *, fresh: bool = False, watcher: Watcher | None = None, ray: str | None = None, deploy: bool = True
) -> SearchResult:
    """Runs or goes on with the search of a recipe; `deploy` also writes the deploy folder. The Python form of `whet auto`.

    `ray` is "auto" or the address of a Ray cluster whose processes and machines run the trials. Raises UsageError (recipe, work folder
    in use or of another recipe), BuildError (the original cannot be built, all trials failed).
    """
    folder, watch = WorkFolder(recipe.out or "whet.auto"), watcher or Silent()
    with ExitStack() as stack:
        resumed = stack.enter_context(folder.opened(recipe, fresh))
        workers: Any = stack.enter_context(_workers(recipe, ray))
        found = Loop(recipe, folder, workers, watch).run(resumed)
        if deploy:
            from whet.search.deploy import write_deploy

            watch.phase("deploy", 1)
            write_deploy(found)
        return found


def _workers(recipe: AutoRecipe, ray: str | None) -> Any:
    if ray is None:
        return workers_for(recipe)
    from whet.search.ray_workers import RayWorkers

    return RayWorkers(recipe, ray)


def dry_run(recipe: AutoRecipe) -> dict[str, Any]:
    """What a search would do: space, baselines, budget; the data and the metric's function are looked at, nothing is built or written."""
    from whet.search.build import input_shapes
    from whet.search.data import labelled, load_function, modules_of, unlabelled

    loop = Loop(recipe, WorkFolder(recipe.out or "whet.auto"), workers_for(recipe), Silent())
    facts = loop.facts((loop.folder.path / "search.json").is_file())
    input_shapes(loop.net, recipe, loop.batches[0])
    with modules_of(recipe.folder):
        some = unlabelled(recipe.data.calibrate, loop.net, 4, recipe.data.preprocess)
        facts["data"] = {"calibrate": {n: list(a.shape[1:]) for n, a in some.items()}}
        for which in ("score", "judge", "train"):
            source = getattr(recipe.data, which)
            if source and recipe.metric == "top1":
                facts["data"][which] = len(labelled(source, loop.net, f"data.{which}"))
        if recipe.metric != "top1":
            load_function(recipe.metric, "metric")
    return facts


__all__ = ["Loop", "SearchResult", "Trial", "dry_run", "search"]
