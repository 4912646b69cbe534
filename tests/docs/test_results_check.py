"""`make results-check`: results of changed code, of uncommitted changes and of an incomplete origin are listed; current ones are not.

Changes of names, comments and layout do not make a result stale; the commits that are listed as renames only are checked to be that.
"""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    script = runpy.run_path(str(BENCHMARKS / "check_results.py"))
    import _code_changes


ROOT = BENCHMARKS.parent


def check(results, repository, names=(), same_behaviour=()):
    history = _code_changes.History(repository, same_behaviour)
    found = script["check"](results, history, names)
    history.close()
    return found


@pytest.fixture
def repository(tmp_path):
    """An empty repository. Returns its folder and a function that commits a file and returns the commit."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def commit(path: str, text: str, remove: str = "", subject: str = "") -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        if remove:
            (tmp_path / remove).unlink()
        git("add", "-A")
        git("commit", "-qm", subject or f"Commit {path}", "--allow-empty")
        return git("rev-parse", "--short=12", "HEAD")

    git("init", "-q")
    return tmp_path, commit


def test_reasons_to_measure_again(repository, capsys):
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
    stale = f"since {first} changed: tactics 1; last in {last} (Commit src/whet/tactics/cpu/conv.py)"
    found = check(results, folder)
    assert found == {
        "cpu/stale.json": {stale: 1},
        "cpu/current.json": {"": 1},
        "cpu/dirty.json": {"uncommitted changes were measured": 1},
        "cpu/anonymous.json": {"no commit was stored; no date was stored; no command was stored; no machine was stored": 1},
        "cpu/unknown.json": {f"its commit {'0' * 12} is not in the history": 1},
        "cpu/by_row.json": {"": 1, stale: 1},
        "cpu/some_rows.json": {"": 1, stale: 1},
        "cpu/by_name.json": {stale: 1},
        "h200/other_backend.json": {"": 1},
    }
    script["print_states"](found, every_reason=False)
    printed = capsys.readouterr().out
    assert "cpu/by_row.json                          1 of 2 records are current\n    1 of 2: since" in printed
    assert printed.endswith("2 of 9 result files and 4 of 11 records are current\n")
    assert list(check(results, folder, ("h200/", "dirty"))) == ["cpu/dirty.json", "h200/other_backend.json"]


@pytest.mark.parametrize(
    ("path", "after", "command", "stale"),
    [
        ("src/whet/passes/p.py", "x = 1  # a comment", "python benchmarks/a.py", False),
        ("src/whet/passes/p.py", "'a docstring'\nx = (\n    1\n)", "python benchmarks/a.py", False),
        ("src/whet/passes/p.py", "x = 2", "python benchmarks/a.py", True),
        ("src/whet/passes/p.py", "import y\nx = 1", "python benchmarks/a.py", False),
        ("src/whet/passes/p.cu", "x = 1 // a comment", "python benchmarks/a.py", False),
        ("src/whet/passes/p.cu", 'x = 1 "//"', "python benchmarks/a.py", True),
        ("src/whet/passes/p.json", "x = 1 ", "python benchmarks/a.py", True),
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
    assert (check(folder / "results", folder)["cpu/r.json"] != {"": 1}) == stale


def states_of(folder, first, same_behaviour=()):
    (folder / "results" / "cpu").mkdir(parents=True, exist_ok=True)
    result = {"commit": first, "date": "d", "command": "python benchmarks/a.py", "machine": "m", "rows": []}
    (folder / "results" / "cpu" / "r.json").write_text(json.dumps(result))
    (reason,) = check(folder / "results", folder, (), same_behaviour)["cpu/r.json"]
    return reason


def test_listed_renames_do_not_count_but_what_else_changes_does(repository):
    folder, commit = repository
    first = commit("src/whet/passes/p.py", "def plan(): return 1")
    commit("src/whet/passes/p.py", "def make_plan(): return 1", subject="Rename")
    assert "passes 1" in states_of(folder, first)
    assert not states_of(folder, first, ["Rename"])
    commit("src/whet/passes/p.py", "def make_plan(): return 2")
    assert "passes 1" in states_of(folder, first, ["Rename"])


def test_what_a_listed_commit_does_beside_its_renames_counts(repository):
    folder, commit = repository
    first = commit("src/whet/passes/p.py", "def plan(): return 1")
    commit("src/whet/passes/p.py", "def make_plan(): return 2", subject="Rename")
    assert "passes 1" in states_of(folder, first, ["Rename"])


def test_a_change_that_was_taken_back_does_not_count(repository):
    folder, commit = repository
    first = commit("src/whet/passes/p.py", "x = 1")
    commit("src/whet/passes/p.py", "x = 2")
    commit("src/whet/passes/p.py", "x = 1")
    assert not states_of(folder, first)


def test_a_moved_file_is_followed(repository):
    folder, commit = repository
    text = "\n".join(f"def f{i}(x): return x + {i}" for i in range(20))
    first = commit("src/whet/passes/p.py", text)
    commit("src/whet/passes/q.py", text, remove="src/whet/passes/p.py")
    assert not states_of(folder, first)
    commit("src/whet/passes/p.py", text.replace("+ 7", "- 7"), remove="src/whet/passes/q.py")
    assert "passes 1" in states_of(folder, first)


def test_digests_are_kept_for_the_next_time(repository, monkeypatch):
    folder, commit = repository
    first = commit("src/whet/passes/p.py", "x = 1")
    commit("src/whet/passes/p.py", "x = 2")
    results = []
    for _ in range(2):
        history = _code_changes.History(folder, store=folder / "build" / "digests.json")
        results.append(set(history.list_changes(first, ("src",))))
        history.close()
        monkeypatch.setattr(_code_changes, "digest_code", lambda text, path: pytest.fail("computed again"))
    assert results == [{"src/whet/passes/p.py"}] * 2


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("def plan(a):\n    'Doc.'\n    return a - 1", "def make_plan(b):\n    return b - 1", ""),
        ("def f(a, b): return a - b", "def f(a, b): return b - a", "a became b, as b did"),
        ("def f(a, b): return a - b", "def f(b, a): return b - a", ""),
        ("def f(a, b): return a - b", "def f(a, b): return a - a", "b became a"),
        ("def f(a, b): return a - b", "def f(a, b): return a + b", "became"),
        ("def f(a): return a * 4", "def f(a): return a * 40", "4 became 40"),
        ("def plan(x): return a.plan(plan=plan(x))", "def make_plan(x): return a.plan(plan=make_plan(x))", ""),
        ("def f(a, b): return g(a) + g(b)", "def f(a, b): return h(a) + k(b)", "g became k, elsewhere h"),
        ("def f(a, b): return g(a) + h(b)", "def f(a, b): return g(a) + g(b)", "h became g"),
        ("def f(a): return a.min() + a.max()", "def f(a): return a.min() + a.min()", "max became min"),
        ("def f(a):\n    check(a)\n    return a", "def f(a):\n    return a", "a list of"),
        ("def f(): pass\ndef g(): pass", "def f(): pass", "2 statements became 1"),
        ("def plan(): pass\nNAMES = ['plan']", "def make_plan(): pass\nNAMES = ['make_plan']", ""),
        ("def plan(): pass\nNAMES = ['plan']", "def make_plan(): pass\nNAMES = ['no_plan']", "the text"),
        ("X = 1", "X = True", "1 became True"),
        ("X = 'a'", "X = 'b'", "the text"),
    ],
)
def test_differences_up_to_names(before, after, said):
    answer = _code_changes.describe_difference(before, after)
    assert said in answer
    assert bool(answer) == bool(said)


def test_commits_listed_as_renames_rename():
    """Of the files of a listed commit only those count as unchanged whose trees are alike up to names; these are the most."""
    history = _code_changes.History(ROOT)
    for subject in _code_changes.read_same_behaviour():
        commits = history.read_commits("-1", "--fixed-strings", f"--grep={subject}", "HEAD")
        if not commits:
            pytest.skip("this checkout has no history")
        some = [c for c in commits[0].changes if c.new_path.startswith("src/")][:12]  # a commit may rename in hundreds of files
        changes = history.list_code_changes(_code_changes.Commit(commits[0].id, subject, some))
        assert sum(map(history.has_only_renames, changes)) > len(changes) / 2
    history.close()
