"""benchmarks/sparsity_crossover.py with tiny layers: rows, resuming and the time limit."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sparsity_crossover.py"


@pytest.fixture
def study(monkeypatch, tmp_path):
    """Runs the script; returns its exit status and rows."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    output = tmp_path / "rows.json"

    def run(*flags):
        small = ["--backend=null", "--precisions=fp32", "--kinds=1x1,linear", "--pixels=4", "--rows=2", "--timing-cache=", f"--output={output}"]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *small, *flags])
        status = runpy.run_path(str(SCRIPT))["main"]()
        return status, json.loads(output.read_text())["rows"] if output.exists() else []

    return run


def test_rows_are_measured_once_and_a_run_continues(study, capsys):
    assert study("--batches=1", "--channels=8", "--seconds=0") == (3, [])
    status, rows = study("--batches=1", "--channels=8")
    assert status == 0
    assert [(r["kind"], r["channels"], r["batch"], r["precision"]) for r in rows] == [("1x1", 8, 1, "fp32"), ("linear", 8, 1, "fp32")]
    assert all(r["dense_ms"] > 0 and r["sparse_ms"] is None and not r["wins"] for r in rows)
    status, more = study("--batches=1,2", "--channels=8")
    assert status == 0
    assert more[:2] == rows
    assert [r["batch"] for r in more] == [1, 1, 2, 2]
    assert "linear  fp32  batch    2: sparse never wins" in capsys.readouterr().out


def test_a_network_gives_a_row_per_layer_and_one_for_the_whole(study):
    status, rows = study("--networks=lenet5:2")
    assert status == 0
    assert rows[0]["kind"] == "network"
    assert rows[0]["predicted"] == 1
    assert {r["kind"] for r in rows[1:]} == {"5x5", "linear"}
    assert all(r["network"] == "lenet5" and r["batch"] == 2 for r in rows)
