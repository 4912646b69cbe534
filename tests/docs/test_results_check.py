"""`make results-check`: results of changed code, of uncommitted changes and of an incomplete origin are listed; current ones are not."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    check = runpy.run_path(str(BENCHMARKS / "check_results.py"))["check"]


@pytest.fixture
def repository(tmp_path):
    """A repository with two commits: one adds a tactic, one changes it. Returns its folder and a function that commits a change."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def commit(path: str, text: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        git("add", "-A")
        git("commit", "-qm", text)
        return git("rev-parse", "--short=12", "HEAD")

    git("init", "-q")
    return tmp_path, commit


def test_reasons_to_measure_again(repository):
    folder, commit = repository
    first = commit("src/whet/tactics/cpu/conv.py", "x = 1")
    last = commit("src/whet/tactics/cpu/conv.py", "x = 2")
    commit("docs/x.md", "prose")
    origin = {"date": "2026-11-21", "command": "python benchmarks/a.py", "machine": "m", "rows": []}
    runs = {
        "cpu/stale.json": {"commit": first, **origin},
        "cpu/current.json": {"commit": last, **origin},
        "cpu/dirty.json": [{"commit": last + "+changes", **origin}],
        "cpu/anonymous.json": {"rows": []},
        "cpu/unknown.json": {"commit": "0" * 12, **origin},
        "cpu/by_row.json": {"commit": last, **origin, "rows": [{"commit": last}, {"commit": first}]},
        "cpu/some_rows.json": {"commit": first, **origin, "rows": [{"commit": last}, {"ms": 1}]},  # the second row is of the header's commit
        "cpu/by_name.json": {"commit": last, **origin, "rows": {"a": {"commit": first}}},
        "h200/other_backend.json": {"commit": first, **origin},
    }
    results = folder / "results"
    for name, data in runs.items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(json.dumps(data))
    stale = [f"1 of the files that it measures have changed since {first}"]
    assert check(results, folder) == {
        "cpu/stale.json": stale,
        "cpu/current.json": [],
        "cpu/dirty.json": ["uncommitted changes were measured"],
        "cpu/anonymous.json": ["no commit was stored; no date was stored; no command was stored; no machine was stored"],
        "cpu/unknown.json": [f"its commit {'0' * 12} is not in the history"],
        "cpu/by_row.json": stale,
        "cpu/some_rows.json": stale,
        "cpu/by_name.json": stale,
        "h200/other_backend.json": [],
    }
    assert list(check(results, folder, ("h200/", "dirty"))) == ["cpu/dirty.json", "h200/other_backend.json"]


@pytest.mark.parametrize(
    ("path", "after", "command", "stale"),
    [
        ("src/whet/passes/p.py", "x = 1  # a comment", "python benchmarks/a.py", False),
        ("src/whet/passes/p.py", "'a docstring'\nx = (\n    1\n)", "python benchmarks/a.py", False),
        ("src/whet/passes/p.py", "x = 2", "python benchmarks/a.py", True),
        ("src/whet/passes/p.cu", "x = 1  # a comment", "python benchmarks/a.py", True),
        ("benchmarks/a.py", "x = 2", "python benchmarks/a.py", True),
        ("benchmarks/b.py", "x = 2", "python benchmarks/a.py", False),
        ("src/whet/pruning/p.py", "x = 2", "python benchmarks/a.py", False),
        ("src/whet/pruning/p.py", "x = 2", "python benchmarks/claims.py", True),
        ("tests/test_a.py", "x = 2", "python tests/mutation/run.py", True),
        ("src/whet/trt/p.py", "x = 2", "python tests/mutation/run.py", False),
        ("src/whet/trt/p.py", "x = 2", "python benchmarks/fuzz_files.py", True),
    ],
)
def test_a_result_is_stale_when_the_code_that_it_measures_changed(repository, path, after, command, stale):
    folder, commit = repository
    first = commit(path, "x = 1")
    commit(path, after)
    (folder / "results" / "cpu").mkdir(parents=True)
    (folder / "results" / "cpu" / "r.json").write_text(json.dumps({"commit": first, "date": "d", "command": command, "machine": "m", "rows": []}))
    assert bool(check(folder / "results", folder)["cpu/r.json"]) == stale
