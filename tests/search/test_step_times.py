"""The times of the steps between the original and the chosen engine."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from support.search_case import perceptron, recipe_with
from whet.backends import get_backend
from whet.errors import BuildError
from whet.runtime import Runtime
from whet.search.recipe.space import Candidate
from whet.search.stages import candidate_engines
from whet.search.stages.candidate_engines import ENGINE, ScoredEngine, build_step_engines, measure_engines, write_step_times
from whet.search.stages.prepare import Prepared


@pytest.fixture
def worker(case, tmp_path):
    """The parts of a worker that building and timing need."""
    recipe = recipe_with(case, tmp_path / "out", scout__level=0)
    runtime = Runtime(threads=1)
    return SimpleNamespace(
        recipe=recipe, candidate=Candidate(precision="int8"), effort=SimpleNamespace(level=0, seconds=0.02), folder=tmp_path, energy_seconds=0.1,
        lock=SimpleNamespace(timing=nullcontext), say=lambda text: None, load=runtime.load, backend=lambda: get_backend("cpu", threads=1),
        job=SimpleNamespace(reference=""), meter=SimpleNamespace(measure_energy=lambda run, batch, seconds: {"mj": None}),
    )  # fmt: skip


@pytest.fixture
def prepared():
    """A network with two steps that change its time, and one that changes its weights only."""
    net = perceptron()[0]
    result = Prepared(net)
    for name, changes in (("original", False), ("channels pruned", True), ("recovered", False), ("2:4", True)):
        result.add_step(name, 0.0, None, changes_time=changes)
    return result


def time_in_order(runs, seconds, backend):
    """Runs each engine once; the first takes 1 ms, the second 2 ms, and so on."""
    for run in runs:
        run()
    return [{"median_ms": float(k), "mean_ms": float(k)} for k in range(1, len(runs) + 1)], {}


def test_each_step_has_a_time_in_the_run_of_the_candidates_engine(worker, prepared, monkeypatch):
    monkeypatch.setattr(candidate_engines, "time_engines", time_in_order)
    steps = build_step_engines(worker, prepared)
    assert list(steps) == [1, 3]
    plan = worker.load(steps[1]).plan
    (worker.folder / ENGINE).write_bytes(steps[1].read_bytes())
    kept = ScoredEngine(worker.folder / ENGINE, prepared.network, None, plan, 1.0, None)
    worker.job.reference = str(worker.folder)
    figures = measure_engines(worker, [kept], kept, {"x": perceptron()[1]["x"][:4]}, prepared, steps)
    ms = [s["ms"] for s in prepared.steps]
    assert ms[0] == figures["reference_ms"] == 1
    assert figures["latency"]["median_ms"] == 2
    assert ms[1:] == [3, 3, 4], "each engine has a time of its own; other weights do not change the time"
    assert [p.name for p in worker.folder.glob("*.engine")] == [ENGINE], "the engines of the steps are removed"


def test_the_engine_of_an_fp32_candidate_is_that_of_its_last_step(worker, prepared):
    worker.candidate = Candidate(precision="fp32")
    steps = build_step_engines(worker, prepared)
    assert list(steps) == [1]


def test_a_step_that_cannot_be_built_has_no_time_and_a_note(worker, prepared, monkeypatch):
    def refuse(*args, **more):
        raise BuildError("no tactic")

    monkeypatch.setattr(candidate_engines, "build", refuse)
    assert build_step_engines(worker, prepared) == {}
    assert prepared.notes[0] == "no time of the step 'channels pruned': no tactic"
    write_step_times(prepared, {0: 3.0})
    assert [s.get("ms") for s in prepared.steps] == [3.0, None, None, None]
