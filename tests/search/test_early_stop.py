"""Scouts whose accuracy after recovery is of no interest get no engine; the study learns their loss and an estimate of their cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from support.search_case import recipe_with
from whet.search.jobs import work
from whet.search.jobs.job import Job, read_result, write_json, write_result
from whet.search.outcome.verdicts import Trial
from whet.search.recipe.space import Candidate
from whet.search.study.scouting import Scouting
from whet.search.study.surrogate import Reference


class EngineBuiltError(Exception):
    """Raised in place of the building of an engine."""


@pytest.fixture
def scout(case, tmp_path, monkeypatch):
    """A function that runs a scout which keeps 8 of 96 and 8 of 64 channels, and stops above a loss."""
    (tmp_path / "fp32-b1").mkdir()
    write_json(tmp_path / "fp32-b1" / "result.json", {"metric": {"value": 97.0, "low": 95.0, "high": 98.0, "samples": 400}})
    folder = tmp_path / "0000"

    def build(*args):
        raise EngineBuiltError

    monkeypatch.setattr(work, "build_first_engine", build)

    def run(stop_above, width=8):
        c = Candidate({"96 inner": 0.75, "64 inner": 0.75} if width else {})
        recipe = recipe_with(case, tmp_path).to_plain()
        job = Job("scout", "trial 0", recipe, c.to_plain(), {"w0": width, "w1": width} if width else {}, {"samples": 64, "rows": 512, "level": 1},
                  str(tmp_path / "fp32-b1"), stop_above=stop_above)  # fmt: skip
        job.write(folder)
        assert Job.read(folder) == job
        write_result(folder, work.run_job(job, folder))
        return read_result(folder)

    return run


def test_a_scout_beyond_the_loss_of_interest_gets_no_engine(scout):
    result = scout(stop_above=5.0)
    assert result["state"] == "stopped"
    assert result["drop"]["value"] > 5
    assert 0 < result["flops_ratio"] < 0.2
    assert "before its engine is built, 5 at most are of interest (search.early_stop)" in result["reason"]


@pytest.mark.parametrize(("stop_above", "width"), [(100.0, 8), (None, 8), (-100.0, 0)])
def test_other_scouts_get_one(scout, stop_above, width):
    """A smaller loss than the limit, no limit, nothing pruned."""
    with pytest.raises(EngineBuiltError):
        scout(stop_above, width)


def make_scouting(case, tmp_path, done=2, **search):
    """A Scouting with `done` measured trials, and a list to which the results for its study are appended."""
    told = []
    recipe = recipe_with(case, tmp_path, search={"trials": 5, **search})
    original = {"latency": {"ratio": 1.0, "median_ms": 8.0}}
    judging = SimpleNamespace(original=lambda batch: original, baselines={"int8-b1": {"latency": {"ratio": 0.5}}},
                              point=lambda row, batch: (8.0 * row["latency"]["ratio"], 0.0))  # fmt: skip
    self = SimpleNamespace(
        recipe=recipe, judging=judging, reference=Reference(8.0, 10.0, 2.0), known={}, space=SimpleNamespace(key=str),
        trials={n: Trial(n, Candidate(), {"state": "done"}) for n in range(done)}, folder=SimpleNamespace(scout=lambda n: n),
        study=SimpleNamespace(tell=lambda *a: told.append(a)), jobs=SimpleNamespace(watch=SimpleNamespace(end_job=lambda *a: None)),
    )  # fmt: skip
    return self, told


def test_trials_may_be_stopped_once_there_are_as_many_engines_as_survivors(case, tmp_path):
    assert Scouting.get_loss_limit(make_scouting(case, tmp_path)[0]) == 10.0, "five times the permitted loss"
    assert Scouting.get_loss_limit(make_scouting(case, tmp_path, done=1)[0]) is None
    assert Scouting.get_loss_limit(make_scouting(case, tmp_path, early_stop=False)[0]) is None
    self, _ = make_scouting(case, tmp_path)
    self.reference = None
    assert Scouting.get_loss_limit(self) is None, "without a target for the accuracy no loss is too large"


@pytest.mark.parametrize(("precision", "cost"), [("fp32", 2.0), ("int8", 1.0)])
def test_the_study_learns_the_loss_and_the_cost_by_flops(case, tmp_path, precision, cost):
    self, told = make_scouting(case, tmp_path)
    stopped = {"state": "stopped", "metric": {"value": 60.0}, "drop": {"value": 37.0}, "flops_ratio": 0.25, "reason": "loses 37"}
    Scouting.record_result(self, Trial(7, replace(Candidate(), precision=precision), stopped))
    ((number, values, about),) = told
    assert (number, values) == (7, (cost, 60.0))
    assert about["misses"] == [37.0 / 2.0 - 1]
    assert about["state"] == "stopped"
