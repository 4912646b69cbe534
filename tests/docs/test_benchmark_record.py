"""The interval that benchmarks print beside a median."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

RECORD = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "_record.py"))
median_interval = RECORD["median_interval"]


@pytest.mark.parametrize("n", [6, 9, 12, 20])
def test_interval_holds_the_median_as_often_as_it_says(n):
    rng = np.random.default_rng(n)
    samples = rng.exponential(size=(4000, n))  # a skewed law: nothing is assumed about it
    inside = 0
    for row in samples:
        _, low, high = median_interval(row)
        inside += low <= math.log(2) <= high
    assert inside / len(samples) > 0.94


def test_too_few_processes_give_no_interval():
    with pytest.raises(ValueError, match="more processes"):
        median_interval([1.0] * 5)


def test_provenance_names_what_a_reader_needs():
    found = RECORD["provenance"](["numpy"])
    assert set(found) == {"date", "commit", "command", "versions"}
    assert found["versions"]["numpy"] == np.__version__


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
def test_commands_name_no_folder_that_a_reader_does_not_have(word, said):
    assert RECORD["neutral"](word) == said
