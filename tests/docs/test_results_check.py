"""`make results-check`: results of changed code, of uncommitted changes and of no commit are listed; current ones are not."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

check = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "check_results.py"))["check"]


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
    first = commit("src/whet/tactics/cpu/conv.py", "first")
    last = commit("src/whet/tactics/cpu/conv.py", "second")
    commit("docs/x.md", "prose")
    runs = {
        "cpu/stale.json": {"commit": first, "rows": []},
        "cpu/current.json": {"commit": last, "rows": []},
        "cpu/dirty.json": [{"commit": last + "+changes", "rows": []}],
        "cpu/anonymous.json": {"rows": []},
        "cpu/unknown.json": {"commit": "0" * 12, "rows": []},
        "cpu/by_row.json": {"commit": last, "rows": [{"commit": last}, {"commit": first}]},
        "h200/other_backend.json": {"commit": first, "rows": []},
    }
    results = folder / "results"
    for name, data in runs.items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(json.dumps(data))
    assert check(results, folder) == {
        "cpu/stale.json": ["1 commits since changed what it measures"],
        "cpu/current.json": [],
        "cpu/dirty.json": ["uncommitted changes were measured"],
        "cpu/anonymous.json": ["names no commit"],
        "cpu/unknown.json": [f"its commit {'0' * 12} is not in the history"],
        "cpu/by_row.json": ["1 commits since changed what it measures"],
        "h200/other_backend.json": [],
    }
