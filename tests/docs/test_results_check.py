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


def write_results(folder, runs):
    for name, data in runs.items():
        path = folder / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
    return folder / "results"


def test_records_to_measure_again(repository, capsys):
    folder, commit = repository
    first = commit("src/whet/tactics/cpu/conv.py", "def run(): return 1")
    last = commit("src/whet/tactics/cpu/conv.py", "def run(): return 2")
    commit("docs/x.md", "prose")
    origin = {"date": "2026-11-21", "command": "python benchmarks/a.py", "machine": "m", "rows": []}
    own = {"date": "2026-11-21", "command": "python benchmarks/a.py"}
    runs = {
        "cpu/stale.json": {"commit": first, **origin, "date": "2026-11-20"},
        "cpu/current.json": {"commit": last, **origin},
        "cpu/dirty.json": [{"commit": last + "+changes", **origin}],
        "cpu/anonymous.json": {"rows": []},
        "cpu/unknown.json": {"commit": "0" * 12, **origin},
        "cpu/by_row.json": {"commit": last, **origin, "rows": [{**own, "commit": last}, {**own, "commit": first}]},
        "cpu/some_rows.json": {"commit": first, **origin, "rows": [{**own, "commit": last}, {"ms": 1}]},  # the second row is of the header's commit
        "cpu/by_name.json": {"commit": last, **origin, "rows": {"a": {**own, "commit": first}}},
        "h200/other_backend.json": {"commit": first, **origin},
    }
    found = check(write_results(folder, runs), folder)
    assert {name: [s.word for s in states] for name, states in found.items()} == {
        "cpu/stale.json": ["stale"],
        "cpu/current.json": ["current"],
        "cpu/dirty.json": ["origin"],
        "cpu/anonymous.json": ["origin"],
        "cpu/unknown.json": ["origin"],
        "cpu/by_row.json": ["current", "stale"],
        "cpu/some_rows.json": ["current", "stale"],
        "cpu/by_name.json": ["stale"],
        "h200/other_backend.json": ["current"],
    }
    assert found["cpu/stale.json"][0].changed == (("src/whet/tactics/cpu/conv.py", ("run",)),)
    assert found["cpu/dirty.json"][0].gaps == ("uncommitted changes were measured",)
    assert found["cpu/anonymous.json"][0].gaps == tuple(f"no {x} was stored" for x in ("commit", "date", "command", "machine"))
    assert found["cpu/unknown.json"][0].gaps == (f"its commit {'0' * 12} is not in the history",)
    script["print_list"](found, limit=3)
    printed = capsys.readouterr().out.splitlines()
    assert "cpu/anonymous" in printed[0]
    assert "cpu/stale                        1 of 1: changed functions: tactics/cpu 1" in printed[1]  # the oldest with a date
    assert printed[2].strip() == "$ python benchmarks/a.py"
    assert printed[-2] == "... and 4 newer ones (--all)"
    assert printed[-1] == "2 of 9 result files need no new run. Records: 4 stale, 4 current, 3 origin"
    assert list(check(folder / "results", folder, ("h200/", "dirty"))) == ["cpu/dirty.json", "h200/other_backend.json"]


def test_only_the_kernels_of_a_row_count(repository):
    """A row that lists its tactics, or whose network's are known, is stale when these, or what they import, change; others with any tactic."""
    folder, commit = repository
    commit("src/whet/tactics/cpu/_shared.py", "def load(): return 1")
    commit("src/whet/tactics/cpu/conv.py", "from whet.tactics.cpu._shared import load\ndef run(): return load()")
    first = commit("src/whet/tactics/cpu/pool.py", "def run(): return 3")
    origin = {"date": "d", "command": "python benchmarks/a.py", "machine": "m", "commit": first}
    rows = [{"case": "a", "tactics": {"cpu/conv": 2}}, {"case": "unknown"}]
    rows[1:1] = [{"case": "net", "precision": p} for p in ("fp32", "int8")]
    write_results(folder, {"cpu/r.json": {**origin, "rows": [{**origin, **row} for row in rows]}})
    known = {"net:1:fp32": {"tactics": {"cpu/pool": 1}}, "net:8:int8": {"tactics": {"cpu/conv": 1}}}
    (folder / "benchmarks/results/cpu").mkdir(parents=True)
    (folder / "benchmarks/results/cpu/selected_tactics.json").write_text(json.dumps({"rows": known}))
    commit("src/whet/tactics/cpu/pool.py", "def run(): return 4")
    words = lambda: [s.word for s in check(folder / "results", folder)["cpu/r.json"]]  # noqa: E731
    assert words() == ["current", "stale", "current", "stale"]
    commit("src/whet/tactics/cpu/_shared.py", "def load(): return 2")
    assert words() == ["stale"] * 4


def test_a_change_of_the_builder_is_no_change_of_what_was_measured(repository):
    folder, commit = repository
    first = commit("src/whet/builder/b.py", "def select(): return 1")
    commit("src/whet/builder/b.py", "def select(): return 2")
    assert states_of(folder, first) == "selection"
    assert states_of(folder, first, command="python benchmarks/gpu_build_time.py") == "stale"  # the builder's own time


def test_code_that_was_added_does_not_count(repository):
    folder, commit = repository
    first = commit("src/whet/tactics/cpu/t.py", "LIMIT = 1\nclass T:\n    a = 1\n    def run(self): return 1")
    commit("src/whet/tactics/cpu/t.py", "LIMIT = 1\nOTHER = 2\nclass T:\n    a = 1\n    def run(self): return 1\n    def more(self): return 2")
    commit("src/whet/tactics/cpu/new.py", "x = 1")
    assert states_of(folder, first) == "current"
    commit("src/whet/tactics/cpu/t.py", "LIMIT = 1\nclass T:\n    a = 1")
    assert states_of(folder, first) == "stale"


def test_a_helper_of_a_benchmark_belongs_to_it(repository):
    folder, commit = repository
    commit("benchmarks/_timer.py", "def time(): return 1")
    first = commit("benchmarks/a.py", "from _timer import time")
    assert states_of(folder, first) == "current"
    commit("benchmarks/_timer.py", "def time(): return 2", subject="Store more")
    assert states_of(folder, first) == "stale"
    assert states_of(folder, first, ["benchmarks: Store more"]) == "current"
    commit("benchmarks/_timer.py", "def time(): return 3")
    assert states_of(folder, first, ["benchmarks: Store more"]) == "stale"


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("def f(): return 1", "def f():\n    'Doc.'\n    return 1\ndef g(): pass", []),
        ("def f(): return 1", "def f(): return 2", ["f"]),
        ("def f(): return 1", "", ["f"]),
        ("X = 1\nY = 2", "Y = 2\nZ = 3\nX = 1", []),
        ("X = 1\nY = 2", "X = 1\nY = 3", ["module"]),
        ("class A:\n    x = 1\n    def f(self): return 1", "class A:\n    x = 2\n    def f(self): return 1", ["A"]),
        ("class A:\n    x = 1\n    def f(self): return 1", "class A(B):\n    x = 1\n    def f(self): return 2", ["A", "A.f"]),
    ],
)
def test_definitions_that_differ(old, new, lost):
    assert _code_changes.list_lost_definitions(*map(_code_changes.collect_definitions, (old, new))) == lost


@pytest.mark.parametrize(
    ("path", "after", "command", "stale"),
    [
        ("src/whet/runtime/steps.py", "x = 1  # a comment", "python benchmarks/a.py", False),
        ("src/whet/runtime/steps.py", "'a docstring'\nx = (\n    1\n)", "python benchmarks/a.py", False),
        ("src/whet/runtime/steps.py", "x = 2", "python benchmarks/a.py", True),
        ("src/whet/runtime/steps.py", "import y\nx = 1", "python benchmarks/a.py", False),
        ("src/whet/tactics/cpu/p.cu", "x = 1 // a comment", "python benchmarks/a.py", False),
        ("src/whet/tactics/cpu/p.cu", 'x = 1 "//"', "python benchmarks/a.py", True),
        ("src/whet/tactics/cpu/p.json", "x = 1 ", "python benchmarks/a.py", True),
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
    assert states_of(folder, first, command=command) == ("stale" if stale else "current")


def states_of(folder, first, same_behaviour=(), command="python benchmarks/a.py"):
    """The state of a result of one record, made by `command` at the commit `first`."""
    write_results(folder, {"cpu/r.json": {"commit": first, "date": "d", "command": command, "machine": "m", "rows": []}})
    (state,) = check(folder / "results", folder, (), same_behaviour)["cpu/r.json"]
    return state.word


def test_listed_renames_do_not_count_but_what_else_changes_does(repository):
    folder, commit = repository
    first = commit("src/whet/runtime/steps.py", "def plan(): return 1")
    commit("src/whet/runtime/steps.py", "def make_plan(): return 1", subject="Rename")
    assert states_of(folder, first) == "stale"
    assert states_of(folder, first, ["Rename"]) == "current"
    commit("src/whet/runtime/steps.py", "def make_plan(): return 2")
    assert states_of(folder, first, ["Rename"]) == "stale"


def test_what_a_listed_commit_does_beside_its_renames_counts(repository):
    folder, commit = repository
    first = commit("src/whet/runtime/steps.py", "def plan(): return 1")
    commit("src/whet/runtime/steps.py", "def make_plan(): return 2", subject="Rename")
    assert states_of(folder, first, ["Rename"]) == "stale"


def test_a_change_that_was_taken_back_does_not_count(repository):
    folder, commit = repository
    first = commit("src/whet/runtime/steps.py", "x = 1")
    commit("src/whet/runtime/steps.py", "x = 2")
    commit("src/whet/runtime/steps.py", "x = 1")
    assert states_of(folder, first) == "current"


def test_a_moved_file_is_followed(repository):
    folder, commit = repository
    text = "\n".join(f"def f{i}(x): return x + {i}" for i in range(20))
    first = commit("src/whet/runtime/steps.py", text)
    commit("src/whet/runtime/calls.py", text, remove="src/whet/runtime/steps.py")
    assert states_of(folder, first) == "current"
    commit("src/whet/runtime/steps.py", text.replace("+ 7", "- 7"), remove="src/whet/runtime/calls.py")
    assert states_of(folder, first) == "stale"


def test_digests_are_kept_for_the_next_time(repository, monkeypatch):
    folder, commit = repository
    first = commit("src/whet/runtime/steps.py", "x = 1")
    commit("src/whet/runtime/steps.py", "x = 2")
    results = []
    for _ in range(2):
        history = _code_changes.History(folder, store=folder / "build" / "digests.json")
        results.append(set(history.list_changes(first, ("src",))))
        history.close()
        monkeypatch.setattr(_code_changes, "digest_code", lambda text, path: pytest.fail("computed again"))
    assert results == [{"src/whet/runtime/steps.py"}] * 2


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
        if subject.startswith(_code_changes.KEEPS_FIGURES):
            continue
        commits = history.read_commits("-1", "--fixed-strings", f"--grep={subject}", "HEAD")
        if not commits:
            pytest.skip("this checkout has no history")
        some = [c for c in commits[0].changes if c.new_path.startswith("src/")][:12]  # a commit may rename in hundreds of files
        changes = history.list_code_changes(_code_changes.Commit(commits[0].id, subject, some))
        assert sum(map(history.has_only_renames, changes)) > len(changes) / 2
    history.close()
