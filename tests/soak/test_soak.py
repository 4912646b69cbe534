"""A short selection of `make soak`: the cases of benchmarks/soak.py for a few seconds each."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import soak


@pytest.mark.parametrize("case", [pytest.param("kill_build", marks=pytest.mark.slow), "threads"])
def test_a_case_passes_for_a_few_seconds(case, tmp_path):
    row = soak.run_cases([case], 2, soak.Soak(tmp_path, 0))[case]
    assert row["failures"] == []
    assert row["rounds"] > 0


@pytest.mark.parametrize(("case", "rounds"), [("growth_runs", 2000), pytest.param("growth_builds", 30, marks=pytest.mark.slow)])
def test_memory_does_not_grow_over_some_rounds(case, rounds, tmp_path):
    row = getattr(soak.Soak(tmp_path, 0, runs=rounds, builds=rounds, engine_threads=1), case)(60.0)
    assert row["failures"] == []
    assert row["rounds"] == rounds


def test_a_row_replaces_the_earlier_one_of_its_case():
    old = [{"case": "threads", "commit": "a", "failed": 0}, {"case": "kill_build", "commit": "a", "failed": 1}]
    table = {"kill_build": {"rounds": 3, "failures": ["x", "y"]}, "shared_cache": {"rounds": 1, "failures": []}}
    rows = soak.merge_rows(old, table, {"commit": "b"})
    assert [(r["case"], r["commit"], r["failed"]) for r in rows] == [("kill_build", "b", 2), ("shared_cache", "b", 0), ("threads", "a", 0)]
    assert rows[0]["failures"] == ["x", "y"]
