"""Scouting: Optuna samples points, child processes evaluate them, and the study records the values. Resumes after a kill."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.search.jobs import job as j
from whet.search.jobs.run_jobs import Running
from whet.search.outcome.folder import WorkFolder
from whet.search.outcome.verdicts import Judging, Trial
from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import Candidate, SearchSpace
from whet.search.recipe.targets import SMALL_DROP
from whet.search.study.study import Study

if TYPE_CHECKING:
    from whet.search.study.surrogate import Reference

_LOSSES = 5  # times the permitted loss: up to there the sampler weighs accuracy against cost
_SAME_IN_A_ROW = 200  # consecutive duplicate points after which the space counts as exhausted


def _compute_reference(recipe: AutoRecipe, judging: Judging) -> Reference | None:
    """The original's cost and several times the permitted loss; None without a target for the accuracy."""
    from whet.search.study.surrogate import Reference

    if recipe.target.accuracy_drop is None:
        return None
    batch = judging.batches[0]
    cost, loss = judging.point(judging.original(batch), batch)
    scale = recipe.target.accuracy_drop or abs(loss) * SMALL_DROP or 1.0
    return Reference(cost, loss + _LOSSES * scale, scale)


class Scouting:
    """The trials of one study. `trials` holds finished and running trials by number."""

    def __init__(self, recipe: AutoRecipe, folder: WorkFolder, space: SearchSpace, judging: Judging, jobs: Running):
        self.recipe, self.folder, self.space, self.judging, self.jobs = recipe, folder, space, judging, jobs
        budget = recipe.search
        startup = max(4, min(10, budget.trials // 3))  # random trials before the sampler uses its model
        self.reference = _compute_reference(recipe, judging)
        self.study = Study(
            folder.study, space, higher_is_better=recipe.higher_is_better, sampler=budget.sampler, seed=budget.seed, startup=startup,
            reference=self.reference,
        )  # fmt: skip
        self.study.enqueue(space.seeds()[: max(1, budget.trials // 2)])
        self.trials: dict[int, Trial] = {}
        self.known: dict[str, Trial] = {}  # by candidate key
        self.running: dict[Path, Trial] = {}
        self.drawn_again = 0

    def run(self) -> list[Trial]:
        """Runs trials until the budget is used and returns all of them."""
        lost = self._read()
        timeout = self.recipe.search.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = [*((n, self.study.params(n)) for n in lost), *self.study.list_unfinished()]
        while True:
            while len(self.running) < self.jobs.slots:
                if waiting:
                    self._start_trial(*waiting.pop(0))
                elif self._has_ended(deadline):
                    break
                else:
                    self._start_trial(*self.study.ask())
            if not self.running:
                break
            for folder, problem in self.jobs.wait():
                trial = self.running.pop(folder)
                trial.result = self.jobs.result(folder, problem)
                self.record_result(trial)
                for twin in [t for t in self.trials.values() if t.same_as == trial.number and t.result is None]:
                    twin.result = trial.result
                    self.record_result(twin, is_reused=True)
        if self.drawn_again >= _SAME_IN_A_ROW:
            self.jobs.note(f"{_SAME_IN_A_ROW} duplicate points were drawn in a row: the space of {self.space.size()} points is exhausted")
        return [self.trials[n] for n in sorted(self.trials)]

    def _has_ended(self, deadline: float | None) -> bool:
        late = deadline is not None and time.monotonic() > deadline
        distinct = sum(t.same_as is None for t in self.trials.values()) + len(self.running)
        return late or distinct >= self.recipe.search.trials or self.drawn_again >= _SAME_IN_A_ROW

    def _start_trial(self, number: int, params: Mapping[str, Any]) -> None:
        """Starts a trial unless it has a result: its own from a killed process, or that of an identical trial."""
        trial = Trial(number, self.space.candidate(params))
        folder, key = self.folder.scout(number), self.space.key(trial.candidate)
        trial.result = j.read_result(folder)
        if trial.result is None and key in self.known:
            trial.same_as, trial.result = self.known[key].number, self.known[key].result
            self.drawn_again += 1
        if trial.result is not None:
            self.record_result(trial, is_reused=True)
            return
        twin = next((t for t in self.running.values() if self.space.key(t.candidate) == key), None)
        if twin is not None:  # reported when that trial has a result
            trial.same_as = twin.number
            self.trials[number] = trial
            self.drawn_again += 1
            return
        self.drawn_again = 0
        self.jobs.job("scout", trial, self.space, self.recipe.scout, self.get_loss_limit()).write(folder)
        self.running[folder] = trial
        self.jobs.begin(folder, trial.candidate.words())

    def get_loss_limit(self) -> float | None:
        """The loss above which a trial gets no engine: that of the sampler's reference, once there are as many engines as survivors are wanted."""
        measured = sum(t.same_as is None and t.result is not None and t.result["state"] == "done" for t in self.trials.values())
        if self.reference is None or not self.recipe.search.early_stop or measured < self.recipe.survivor.count:
            return None
        return _LOSSES * self.reference.scale

    def _read(self) -> list[int]:
        """Reads the finished trials' results from their folders; returns the trials to repeat, whose result is damaged or missing."""
        lost, others = [], 0
        for number, state in self.study.numbers().items():
            if state == "running":
                continue
            attributes = self.study.attributes(number)
            same = attributes.get("same_as")
            result = j.read_result(self.folder.scout(number if same is None else same))
            if result is None and same is None:
                lost.append(number)
                continue
            trial = Trial(number, Candidate.from_plain(attributes["candidate"]), result, same)
            self.trials[number] = trial
            if result is not None and same is None:
                self.known.setdefault(self.space.key(trial.candidate), trial)
                self.jobs.watch.end_job(self.folder.scout(number), result, True)
                others += j.read_fields(self.folder.scout(number) / j.JOB).get("made_by") != self.jobs.made_by
        if others:
            self.jobs.note(f"{others} trials were measured with another whet version or processor; originals and survivors are rebuilt")
        return lost

    def record_result(self, trial: Trial, is_reused: bool = False) -> None:
        r = trial.result
        assert r is not None
        about: dict[str, Any] = {"candidate": trial.candidate.to_plain(), "state": r["state"]}
        if trial.same_as is not None:
            about["same_as"] = trial.same_as
        values = None
        if r["state"] == "done":
            values = (self.judging.trial_point(trial)[0], r["metric"]["value"])
            about["misses"] = [c.miss for c in self.judging.trial_checks(trial) if c.miss is not None]
            about["latency_ms"], about["disturbed"] = r["latency"]["median_ms"], r["load"]["disturbed"]
        elif r["state"] == "stopped":
            batch, precision = trial.candidate.batch, trial.candidate.precision
            same = self.judging.baselines.get(f"{precision}-b{batch}") or self.judging.original(batch)
            values = (self.judging.point(same, batch)[0] * r["flops_ratio"], r["metric"]["value"])
            assert self.reference is not None
            about["misses"], about["reason"] = [r["drop"]["value"] / self.reference.scale - 1], r["reason"]
        else:
            about["reason"] = r["reason"]
        self.study.tell(trial.number, values, about)
        self.trials[trial.number] = trial
        if trial.same_as is None:
            self.known.setdefault(self.space.key(trial.candidate), trial)
            self.jobs.watch.end_job(self.folder.scout(trial.number), r, is_reused)
