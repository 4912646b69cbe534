"""The interval that benchmarks print with a median."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

RECORD = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "_record.py"))
median_interval = RECORD["median_interval"]


@pytest.mark.parametrize("n", [6, 9, 12, 20])
def test_the_interval_has_its_nominal_coverage(n):
    rng = np.random.default_rng(n)
    samples = rng.exponential(size=(4000, n))  # a skewed distribution: the interval is distribution-free
    inside = 0
    for row in samples:
        _, low, high = median_interval(row)
        inside += low <= math.log(2) <= high
    assert inside / len(samples) > 0.94


def test_too_few_samples_give_no_interval():
    with pytest.raises(ValueError, match="more processes"):
        median_interval([1.0] * 5)


def test_provenance_has_the_required_fields():
    found = RECORD["provenance"](["numpy"])
    assert set(found) == {"date", "commit", "command", "versions"}
    assert found["versions"]["numpy"] == np.__version__
    assert RECORD["provenance"](["no-such-package"])["versions"]["no-such-package"] == "not installed"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--out=.hidden/place", "--out=FOLDER"),
        (".hidden/x.json", "FOLDER/x.json"),
        (str(Path(__file__).parents[2] / ".hidden" / "x.json"), "FOLDER/x.json"),
        (str(Path(__file__).parents[2] / "benchmarks" / "x.json"), "benchmarks/x.json"),
        ("/somewhere/else", "FOLDER"),
        ("../shared/data", "../shared/data"),
        ("--rate=.5", "--rate=.5"),
        ("resnet18", "resnet18"),
    ],
)
def test_commands_have_no_local_folders(word, said):
    assert RECORD["neutral"](word) == said
