"""A short selection of `make soak`: the cases of benchmarks/soak.py for a few seconds each."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import soak


@pytest.mark.parametrize("case", [pytest.param("kill_build", marks=pytest.mark.slow), "threads", "growth_runs", "growth_builds"])
def test_a_case_passes_for_a_few_seconds(case, tmp_path):
    row = soak.run_cases([case], 3, 0, tmp_path)[case]
    assert row["failures"] == []
    assert row["rounds"] > 0
