"""The search loop: baselines, scouts sampled by Optuna, survivors with full recovery, an interleaved comparison, the choice.

All state is in files (folder.py), so a killed search resumes: each step reads the existing results and computes the missing ones.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from typing import Any

from whet.errors import BuildError, PruneError, UsageError
from whet.frontends import network_from_file
from whet.network import Network
from whet.pruning.depth import branches
from whet.pruning.order import check_order
from whet.registry import import_user_function
from whet.search.jobs import job as j
from whet.search.jobs.run_jobs import Running
from whet.search.jobs.workers import LocalWorkers, Workers, make_workers
from whet.search.outcome import advice
from whet.search.outcome.deploy import write_deploy
from whet.search.outcome.folder import WorkFolder
from whet.search.outcome.progress import Silent, Watcher
from whet.search.outcome.result import SearchResult
from whet.search.outcome.verdicts import Judging, Trial
from whet.search.recipe.data import allow_imports_from, load_labelled, load_unlabelled
from whet.search.recipe.recipe import AutoRecipe, Effort, load_recipe
from whet.search.recipe.space import Candidate, list_baseline_types, search_space
from whet.search.recipe.targets import check_target, choose_candidate, compute_distance, find_pareto_set
from whet.search.stages.finetune import read_training_set
from whet.search.study.scouting import Scouting
from whet.search.study.study import import_optuna


class Loop:
    """One call of `whet auto` on an opened work folder."""

    def __init__(self, recipe: AutoRecipe, folder: WorkFolder, workers: Workers, watcher: Watcher):
        self.recipe, self.folder = recipe, folder
        self.jobs = Running(recipe, folder, workers, watcher)
        self.net: Network = network_from_file(recipe.model)
        _must_be_floating(self.net, recipe)
        self.space = search_space(self.net, recipe, [b.name for b in branches(self.net)])  # a baseline ranks the branches
        if self.space.dimensions:
            import_optuna()  # a missing Optuna is reported before anything is built
        self.batches: tuple[int, ...] = self._values("batch")
        self.types = list_baseline_types(recipe, self._values("precision"))

    def run(self, resumed: bool) -> SearchResult:
        """Runs the search to its end from the folder's current state. Raises BuildError when the original cannot be built or all trials failed."""
        self.jobs.append_event("resume" if resumed else "begin")
        facts = self.facts(resumed)
        self.jobs.watch.plan(facts)
        for text in facts["advice"]:
            self.jobs.note(text)
        judging = Judging(self.recipe, self.baselines(), self.batches)
        self.space = search_space(self.net, self.recipe, judging.original(self.batches[0]).get("branches", ()))
        trials = self.scouts(judging)
        alive = self.survivors(trials, judging)
        final = self.comparison(alive)
        originals = self.originals(final["rows"])
        checked = [check_target(self.recipe.target, r, o) for r, o in zip(final["rows"], originals, strict=True)]
        points = [judging.point(r, self._batch_of(r["folder"])) for r in final["rows"]]
        chosen = choose_candidate([(*p, c) for p, c in zip(points, checked, strict=True)], self.recipe.prefer)
        self.jobs.append_event("done")
        return SearchResult(
            self.recipe, self.folder, self.net, self.space, judging, trials, final, chosen, checked, points, self.jobs.notes, self._seconds(trials)
        )

    def facts(self, resumed: bool) -> dict[str, Any]:
        """Facts that a dry run prints and a watcher receives first."""
        r, s = self.recipe, self.space
        return {
            "model": r.model, "device": ", ".join([r.device, *r.executor_identity.values()]),
            "target": self.jobs.plain["target"], "prefer": r.prefer, "trials": r.search.trials,
            "survivors": r.survivor.count, "timeout": r.search.timeout, "workers": self.jobs.slots, "folder": str(self.folder.path),
            "resumed": resumed, "baselines": [f"{p}, batch {b}" for p, b in self.baseline_rows()], "points": s.size(),
            "space": {d.name: list(d.values) if d.values else f"{d.least:g} to {d.most:g} in steps of {d.step:g}" for d in s.dimensions},
            "classes": {name: list(members) for name, members in s.classes.items()}, "fixed": dict(s.fixed),
            "left_out": [list(x) for x in s.left_out], "advice": advice.advise_before_search(r, here=isinstance(self.jobs.workers, LocalWorkers)),
        }  # fmt: skip

    # the phases

    def baseline_rows(self) -> list[tuple[str, int]]:
        """(precision, batch) of the original: FP32 at each batch, then the other types at the first batch."""
        return [("fp32", b) for b in self.batches] + [(p, self.batches[0]) for p in self.types if p != "fp32"]

    def baselines(self) -> dict[str, dict[str, Any]]:
        """Results of the original by `precision-bN`. Raises BuildError when it cannot be built in FP32."""
        rows = self.baseline_rows()
        self.jobs.watch.phase("baselines", len(rows))
        for part in ([r for r in rows if r[0] == "fp32"], [r for r in rows if r[0] != "fp32"]):
            self.jobs.do([(self.folder.baseline(p, b), self._baseline_job(p, b)) for p, b in part])
        results = {f"{p}-b{b}": j.read_result(self.folder.baseline(p, b)) or {} for p, b in rows}
        for name, r in results.items():
            if r["state"] != "done":
                if name.startswith("fp32"):
                    raise BuildError(f"the original cannot be built and scored ({name}): {r['reason']}")
                self.jobs.note(f"the original in {name.partition('-')[0]}: {r['reason']}")
        for text in advice.advise_on_original(self.recipe, results[f"fp32-b{self.batches[0]}"]):
            self.jobs.note(text)
        return {name: r for name, r in results.items() if r["state"] == "done"}

    def scouts(self, judging: Judging) -> list[Trial]:
        """Runs trials until the budget is used and returns all trials of the study."""
        self.jobs.watch.phase("scouts", self.recipe.search.trials)
        if self.space.dimensions:
            return Scouting(self.recipe, self.folder, self.space, judging, self.jobs).run()
        self.jobs.note("nothing to search: the space has one point")
        trial = Trial(0, self.space.candidate({}))
        folder = self.folder.scout(0)
        self.jobs.do([(folder, self.jobs.job("scout", trial, self.space, self.recipe.scout))])
        trial.result = j.read_result(folder)
        return [trial]

    def survivors(self, trials: list[Trial], judging: Judging) -> list[Trial]:
        """Builds the selected scouts with full effort and returns those that succeeded. Raises BuildError when all failed.

        A failed survivor is replaced by the next best scout; at most `survivors.count` replacements are tried.
        """
        count = self.recipe.survivor.count
        picked = pick(trials, judging, 2 * count)
        self.jobs.watch.phase("survivors", min(count, len(picked)))
        if trials and not picked:
            first = next((t.result["reason"] for t in trials if t.result and t.result["state"] == "failed"), "")
            raise BuildError(f"all {sum(t.same_as is None for t in trials)} trials failed; first failure: {first}")
        s = self.recipe.survivor
        effort = Effort(s.samples, s.rows, s.level, s.seconds)
        alive: list[Trial] = []
        while picked and len(alive) < count:
            picked, some = picked[count - len(alive) :], picked[: count - len(alive)]
            self.jobs.do([(self.folder.survivor(t.number), self.jobs.job("survivor", t, self.space, effort)) for t in some])
            for t in some:
                result = j.read_result(self.folder.survivor(t.number)) or {}
                if result.get("state") == "done":
                    alive.append(t)
                else:
                    self.jobs.note(f"trial {t.number} failed as a survivor: {result.get('reason', 'no result')}")
        return alive

    def comparison(self, alive: list[Trial]) -> dict[str, Any]:
        """Interleaved timing of the originals and the survivors, scored on data.judge where it is given."""
        originals = [self.folder.baseline(p, b) for p, b in self.baseline_rows()]
        folders = [p for p in originals if (j.read_result(p) or {}).get("state") == "done"]
        folders += [self.folder.survivor(t.number) for t in alive]
        self.jobs.watch.phase("comparison", 1)
        effort = {"samples": self.recipe.survivor.samples, "seconds": self.recipe.survivor.seconds}
        timestamps = "".join(str(p.stat().st_mtime_ns) for p in (f / j.RESULT for f in folders))  # rebuilt engines are compared again
        job = j.Job("final", f"comparison {hash_of(timestamps)}", self.jobs.plain, Candidate(batch=self.batches[0]).to_plain(), effort=effort,
                    folders=[str(p) for p in folders], made_by=self.jobs.made_by)  # fmt: skip
        self.jobs.do([(self.folder.final, job)])
        result = j.read_result(self.folder.final) or {}
        if result.get("state") != "done":
            raise BuildError(f"the final comparison failed: {result.get('reason', 'no result')}")
        return result

    def originals(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """For each compared row the original's FP32 row at the same batch; rescales the rows' ratios to that row."""
        by_name = {r["folder"]: r for r in rows}
        references = [by_name[f"fp32-b{self._batch_of(r['folder'])}"] for r in rows]
        ratio = {r["folder"]: r["latency"]["ratio"] for r in rows}
        for r, reference in zip(rows, references, strict=True):
            by, own = ratio[reference["folder"]], r["latency"]
            intervals = {k: [v / by for v in own[k]] for k in ("ratio_quartiles", "ratio_interval") if k in own}
            r["latency"] = {**own, "ratio": ratio[r["folder"]] / by, **intervals}
        return references

    # inside

    def _values(self, name: str) -> tuple:
        """All values of a dimension, also of one that is not searched."""
        return next((d.values for d in self.space.dimensions if d.name == name), (self.space.fixed.get(name),))

    def _baseline_job(self, precision: str, batch: int) -> j.Job:
        effort = {k: v for k, v in dataclasses.asdict(self.recipe.survivor).items() if k != "count"}
        reference = None if precision == "fp32" else str(self.folder.baseline("fp32", batch))
        c = Candidate(precision=precision, batch=batch)
        return j.Job("baseline", f"{precision}, batch {batch}", self.jobs.plain, c.to_plain(), effort=effort, reference=reference,
                     made_by=self.jobs.made_by)  # fmt: skip

    def _batch_of(self, name: str) -> int:
        """The batch of a compared folder: 8 for `int8-b8`, for a survivor the batch of its job."""
        if "-b" in name:
            return int(name.rpartition("-b")[2])
        return int(j.Job.read(self.folder.survivor(int(name))).candidate["batch"])

    def _seconds(self, trials: list[Trial]) -> float:
        """Sum of the durations of all finished jobs; with one worker the length of the search, interruptions excluded."""
        results = [t.result for t in trials if t.same_as is None and t.result]
        for folder in ("baselines", "survivors"):
            results += [j.read_result(p) or {} for p in sorted((self.folder.path / folder).glob("*"))]
        results.append(j.read_result(self.folder.final) or {})
        return sum(r.get("seconds") or 0.0 for r in results)


def _must_be_floating(net: Network, recipe: AutoRecipe) -> None:
    """Raises UsageError if the space prunes a network that is quantized already."""
    try:
        check_order(net, "prune", insist=recipe.space.width is None and not recipe.space.depth)
    except PruneError:
        raise UsageError(
            "'model' is already quantized (Q/DQ nodes or a calibration), and pruning changes the activations on which its ranges were measured. "
            "Give the floating-point model: the search calibrates pruned networks. To search without pruning: `space.width: false` and "
            "`space.depth: false`."
        ) from None


def pick(trials: list[Trial], judging: Judging, count: int) -> list[Trial]:
    """Selects survivors: scouts nearest to the target; ties (all that meet it) are ordered by Pareto set, then by `prefer`."""
    done = [t for t in trials if t.result is not None and t.result["state"] == "done" and t.same_as is None]
    points = [judging.trial_point(t) for t in done]
    front = set(find_pareto_set(points))
    misses = [compute_distance(judging.trial_checks(t)) for t in done]
    if judging.recipe.prefer == "accuracy":
        points = [(loss, cost) for cost, loss in points]
    order = sorted(range(len(done)), key=lambda i: (misses[i], i not in front, points[i]))
    return [done[i] for i in order[:count]]


def hash_of(text: str) -> str:
    """The first digits of a SHA-256 digest."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:12]


def search(
    recipe: AutoRecipe | str | os.PathLike[str],
    *,
    fresh: bool = False,
    watcher: Watcher | None = None,
    ray: str | None = None,
    deploy: bool = True,
) -> SearchResult:
    """Starts or resumes the search of a recipe or a recipe file; with `deploy` also writes the deploy folder. The Python form of
    `whet auto`.

    `ray` is "auto" or the address of a Ray cluster that runs the trials. Raises UsageError (bad recipe, work folder in use or of another
    recipe) and BuildError (the original cannot be built, all trials failed).
    """
    recipe = recipe if isinstance(recipe, AutoRecipe) else load_recipe(recipe)
    folder, watch = WorkFolder(recipe.out or "whet.auto"), watcher or Silent()
    with ExitStack() as stack:
        stack.enter_context(folder.usable())
        resumed = stack.enter_context(folder.open_locked(recipe, fresh))
        workers: Any = stack.enter_context(_make_workers(recipe, ray))
        result = Loop(recipe, folder, workers, watch).run(resumed)
        if deploy:
            watch.phase("deploy", 1)
            write_deploy(result)
        return result


def _make_workers(recipe: AutoRecipe, ray: str | None) -> Any:
    if ray is None:
        return make_workers(recipe)
    from whet.search.jobs.ray_workers import RayWorkers

    return RayWorkers(recipe, ray)


def dry_run(recipe: AutoRecipe) -> dict[str, Any]:
    """Space, baselines and budget of a search; loads the data and the metric function, builds and writes nothing."""
    from whet.search.stages.build_engine import make_input_shapes

    loop = Loop(recipe, WorkFolder(recipe.out or "whet.auto"), make_workers(recipe), Silent())
    facts = loop.facts((loop.folder.path / "search.json").is_file())
    make_input_shapes(loop.net, recipe, loop.batches[0])
    with allow_imports_from(recipe.folder):
        some = load_unlabelled(recipe.data.calibrate, loop.net, 4, recipe.data.preprocess)
        facts["data"] = {"calibrate": {n: list(a.shape[1:]) for n, a in some.items()}}
        for which in ("score", "judge"):
            source = getattr(recipe.data, which)
            if source and recipe.metric == "top1":
                facts["data"][which] = len(load_labelled(source, loop.net, f"data.{which}", recipe.data.preprocess))
        if recipe.data.train is not None:
            facts["data"]["train"] = len(read_training_set(recipe, loop.net))
        facts["advice"] += advice.advise_on_samples(recipe, facts["data"].get("score", 0))
        if recipe.metric != "top1":
            import_user_function(recipe.metric, "metric")
    return facts
