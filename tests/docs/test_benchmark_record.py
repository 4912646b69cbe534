"""The interval that benchmarks print with a median."""

import json
import math
import runpy
import subprocess
import sys
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
    assert set(found) == {"date", "commit", "command", "machine", "versions"}
    assert found["machine"].endswith(" CPUs")
    assert RECORD["find_gaps"](found) in ([], ["uncommitted changes were measured"])
    assert found["versions"]["numpy"] == np.__version__
    assert RECORD["provenance"](["no-such-package"])["versions"]["no-such-package"] == "not installed"


def test_an_archive_of_the_project_names_its_commit(tmp_path):
    root = Path(__file__).parents[2]
    source, copy = tmp_path / "source", tmp_path / "copy"
    for name in (".gitattributes", "benchmarks/archived_commit.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((root / name).read_bytes())
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=source, check=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=source, check=True, capture_output=True).stdout
    copy.mkdir()
    subprocess.run(["tar", "-x", "-C", str(copy)], input=archive, check=True)
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=source, check=True, capture_output=True, text=True).stdout.strip()
    assert RECORD["read_commit"](copy / "benchmarks") == head
    assert RECORD["read_commit"](source / "benchmarks") == head


@pytest.mark.parametrize(
    ("word", "expected"),
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
def test_commands_have_no_local_folders(word, expected):
    assert RECORD["neutral"](word) == expected


def test_a_row_replaces_the_older_row_of_its_case_alone(tmp_path):
    out = tmp_path / "r.json"
    rows = [{"case": "b", "n": 1, "ms": 3}, {"case": "a", "n": 1, "ms": 2}, {"case": "a", "n": 8, "ms": 9}, {"case": "a", "n": 1, "ms": 1}]
    for row in rows:
        got = RECORD["replace_row"](row, out, ("n", "case"), ["numpy"])
    assert [(r["case"], r["n"], r["ms"]) for r in got] == [("a", 1, 1), ("b", 1, 3), ("a", 8, 9)]
    assert json.loads(out.read_text())["rows"] == got
    assert all(r["date"] and r["commit"] for r in got)
    assert len(RECORD["replace_row"](rows[0], out, ("n", "case"), ["numpy"], {"model": "another"})) == 1  # rows of this machine are dropped


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(p.name for p in BENCHMARKS.glob("[a-z]*.py")))
def test_a_script_that_writes_a_result_names_its_commit(name):
    text = (BENCHMARKS / name).read_text()
    if '"results"' in text or "benchmarks/results" in text:
        assert "json.dumps" not in text or "provenance(" in text or "replace_row(" in text or name in NOT_RESULTS


#: they write a chart, a report of the results' age, and lines that gpu_peers.py stores
NOT_RESULTS = {"chart.py", "check_results.py", "gpu_paired.py"}


@pytest.mark.parametrize("changed", ["src/a.py", "benchmarks/b.py", "docs/c.md", None])
def test_a_result_of_changed_sources_or_benchmarks_says_so(changed, tmp_path):
    """A result measured with an edited script cannot be repeated from its commit and command."""
    for name in ("src/a.py", "benchmarks/b.py", "docs/c.md", "benchmarks/_record.py", "benchmarks/results/r.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((BENCHMARKS / "_record.py").read_text() if name.endswith("_record.py") else "1\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.com"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "benchmarks/results/r.json").write_text("2\n")  # a result itself may change
    if changed:
        (tmp_path / changed).write_text("2\n")
    code = "from _record import provenance; print(provenance(())['commit'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "benchmarks", capture_output=True, text=True, check=True)
    unclean = changed in ("src/a.py", "benchmarks/b.py")
    assert done.stdout.strip().endswith("+changes") == unclean
    assert ("cannot be published" in done.stderr) == unclean


def test_targets_on_the_gpu_are_judged_by_the_interval(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_peers

    def verdict(low, high):
        return gpu_peers.bar({"network": "resnet50", "batch": 1, "whet_ms": 0.18, "whet_interval_ms": [low, high]}).split()[-1]

    assert [verdict(0.17, 0.18), verdict(0.181, 0.19), verdict(0.17, 0.19)] == ["met", "missed", "undecided"]
    row = {"network": "yolov5s", "batch": 1, "whet_ms": 1.0}
    ends = {(2.0, 2.2): "met", (1.8, 1.99): "missed", (1.9, 2.1): "undecided"}
    for interval, verdict in ends.items():
        assert gpu_peers.bar(row | {"compile_over_whet": 2.0, "compile_over_whet_interval": list(interval)}) == f"2x: {verdict}"
    assert gpu_peers.bar(row) == ""


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_record_names_its_commit_date_command_and_machine(path):
    """A result that cannot be repeated, or whose commit is not what ran, is no evidence: it is measured again or deleted."""
    assert RECORD["list_gaps"](json.loads(path.read_text())) == []


def test_rows_measured_by_themselves_inherit_no_command():
    """The command and date of a file are those of its last run."""
    run = {"date": "2026-11-21T00:00", "command": "python benchmarks/a.py", "machine": "m", "commit": "abc"}
    assert RECORD["list_gaps"](run | {"rows": [{"ms": 1}]}) == []
    assert RECORD["list_gaps"](run | {"rows": [{"ms": 1, "commit": "def"}]}) == ["no date was stored", "no command was stored"]
    own = {"date": "2026-11-20T00:00", "command": "python benchmarks/a.py --only x"}
    assert RECORD["list_gaps"](run | {"rows": [{"commit": "def", **own}]}) == []
    assert RECORD["list_gaps"](run | {"rows": [{"commit": "def+changes", **own}, {"ms": 1}]}) == ["uncommitted changes were measured"]


def test_a_replaced_row_has_a_complete_origin(tmp_path, monkeypatch):
    monkeypatch.setitem(RECORD["replace_row"].__globals__, "read_commit", lambda folder: "0123456789ab")
    for name in ("a", "b"):
        RECORD["replace_row"]({"case": name, "ms": 1.0}, tmp_path / "r.json", ("case",), ("numpy",))
    found = json.loads((tmp_path / "r.json").read_text())
    assert [r["case"] for r in found["rows"]] == ["a", "b"]
    assert RECORD["list_gaps"](found) == []
