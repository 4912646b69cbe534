"""`whet auto` on the command line: the lines of a dry run, exit codes, options that override the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("optuna", reason="the search needs Optuna: pip install 'whet[search]'")
pytest.importorskip("yaml", reason="recipes need PyYAML: pip install 'whet[search]'")

from report.sample import sample
from whet.cli import main
from whet.cli.auto import print_outcome


def run(capsys, *argv: str) -> tuple[int, str, str]:
    try:
        main(["auto", *argv])
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    return code, *capsys.readouterr()


def test_a_dry_run_describes_the_search(case, tmp_path, capsys):
    code, out, _ = run(capsys, str(case / "recipe.yaml"), "--dry-run", "--trials", "7", "--timeout", "2 min", "--out", str(tmp_path / "w"))
    assert code == 0
    assert "trials     7, no new one after 120 s; 2 survive; baselines: fp32, batch 1" in out
    assert "96 inner: 0 to 0.75 in steps of 0.25  (1 groups)" in out
    assert "not varied 2:4" in out
    code, out, _ = run(capsys, str(case / "recipe.yaml"), "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["points"] == 16


def test_mistakes_are_usage_errors(case, tmp_path, capsys):
    code, _, err = run(capsys, str(tmp_path / "none.yaml"))
    assert code == 2
    assert "cannot be read" in err
    code, _, err = run(capsys, str(case / "recipe.yaml"), "--timeout", "soon")
    assert code == 2
    assert "'--timeout' is a time such as 90 s" in err


@pytest.mark.slow
def test_a_missed_target_has_its_own_exit_code(case, tmp_path, capsys):
    recipe = json.loads((case / "recipe.yaml").read_text())
    recipe |= {"target": {"memory": 1}, "search": {"trials": 1}, "survivor": {**recipe["survivor"], "count": 1}}
    (case / "missed.yaml").write_text(json.dumps(recipe))
    code, out, err = run(capsys, str(case / "missed.yaml"), "--out", str(tmp_path / "w"))
    assert code == 3
    assert "The target is NOT met" in out
    assert "scout 0000 (1/1)" in err
    assert "NOT met" in (tmp_path / "w" / "deploy" / "README.md").read_text()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    found = sample()
    for row in found["rows"]:
        row["throughput"] = 123456.0
    print_outcome(SimpleNamespace(met=True, folder=SimpleNamespace(deploy=Path("d"))), found)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if line.startswith("engine "))
    assert "median ms" in head
    assert "MiB" in head, "the last column is not wrapped"
    assert ("p99 ms" in head) == (width >= 100)
