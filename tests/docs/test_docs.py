"""Runs every shell command of the tutorial and every Python block of the README; checks links, tables and numbers of the docs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def run(command: list[str] | str, cwd: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(cwd / "cache")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, shell=isinstance(command, str), check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
def test_tutorial_commands_run(tmp_path):
    commands = [line for b in blocks(ROOT / "docs" / "tutorial.md", "sh") for line in b.splitlines() if line.strip()]
    assert len(commands) > 8
    for line in commands:
        run(line, tmp_path)


def test_readme_python_runs(tmp_path):
    for i, code in enumerate(blocks(ROOT / "README.md", "python")):
        (tmp_path / f"block{i}.py").write_text(code)
        run([sys.executable, f"block{i}.py"], tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/commands.md"])
def test_shell_blocks_name_real_commands(page):
    from whet.cli import group

    names = {line.split()[1] for b in blocks(ROOT / page, "sh") for line in b.splitlines() if line.startswith("whet ")}
    assert names
    assert names <= set(group.list_commands(None))


def test_commands_at_a_glance_names_every_command():
    from whet.cli import group

    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in group.list_commands(None) if f"whet {name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_line_of_prose_starts_with_a_comment(page):
    """Such a line ends the paragraph in Markdown, and its links and emphasis are not read."""
    assert [line for line in page.read_text().splitlines() if re.match(r" *<!-- value", line)] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_the_chart_shows_the_published_results():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "chart.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_version_names_what_a_bug_report_needs():
    done = subprocess.run([sys.executable, "-m", "whet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("whet, version ")
    for fact in ("Python 3.", "CPUs", "numpy ", "onnx ", "onednn-cpu-gomp "):
        assert fact in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_link_targets_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tables_equal_the_results():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("low", "high", "verdict"), [(1.01, 1.2, "met"), (0.9, 1.2, "undecided"), (0.8, 0.9, "lost")])
def test_a_bar_is_met_only_by_the_lower_end_of_the_interval(monkeypatch, low, high, verdict):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    row = {"case": "a", "batch": 1, "precision": "fp32", "whet_ms": 1.0, "ort_ms": 1.1, "ratio": 1.1,
           "ratio_low": low, "ratio_high": high, "bar": 1.0}  # fmt: skip
    assert f"| 1: {verdict} |" in tables.ratios({"rows": [row]})


def test_a_table_names_the_commits_of_its_rows(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import references
    import tables

    (tmp_path / "benchmarks/results/cpu").mkdir(parents=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    path = tmp_path / "benchmarks/results/cpu/r.json"

    def text(**run):
        path.write_text(json.dumps(run))
        return tables.table("cpu/r").split("\n\n", 1)[1]

    whole = {"date": "2026-11-21T10:20:30", "commit": "aa", "command": "python a.py", "machine": "m", "versions": {"numpy": "2.1"}}
    assert text(**whole, rows=[{"ms": 1}]) == "2026-11-21T10:20, m, commit aa; numpy 2.1. `python a.py`\n"
    own = {"ms": 1, "commit": "bb", "date": "2026-11-20T01:02:03", "command": "python a.py --only b", "machine": {"model": "n", "cpus": 2}}
    said = "2026-11-20 to 2026-11-21, n, m, commits bb, aa; numpy 2.1. `python a.py --only b` repeats the first row; "
    assert text(**whole, rows=[own, {"ms": 2}]) == f"{said}the result file has the command of each\n"
    assert "bb" not in text(**whole, rows=[{"ms": 2}], note="bc")
    with pytest.raises(references.UnknownValue, match=r"cpu/r is not published: uncommitted changes were measured"):
        text(**whole, rows=[{**own, "commit": "bb+changes"}])
    with pytest.raises(references.UnknownValue, match=r"r\.json is not published: uncommitted changes were measured"):
        references.resolve(path, "rows[0].ms")
    with pytest.raises(references.UnknownValue, match="no commit was stored, no date was stored, no command was stored, no machine"):
        text(rows=[{"ms": 1}])


def test_numbers_of_the_prose_refer_to_the_results():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "prose.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_number_without_a_reference_is_found(tmp_path, monkeypatch):
    """Also one that a result file has: a value at another place proves nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import prose

    page = tmp_path / "page.md"
    page.write_text(
        "# Old\n9.99\n# Now\n<!-- no file: 1.43: before -->\nresults/a.json: <!-- value: a ms as .3f -->0.405<!-- end --> ms (1.43), `0.123`, 0.405, "
        "Python 3.11, torch 2.13.0\n"
    )
    assert [text.partition(":")[0] for text in prose.unknown(page)] == ["9.99", "0.405"]


def test_references_are_updated_from_the_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import references

    rows = [{"case": "a M=1 f32", "ms": 0.40481}, {"case": "b M=1 f32", "ms": 0.2}, {"case": "b M=1 i8", "ms": 0.1, "inner": {"x": 3}}]
    origin = {"date": "2026-11-22T01:48:46+00:00", "commit": "aa", "command": "python a.py", "machine": "m"}
    (tmp_path / "a.json").write_text(json.dumps({**origin, "rows": rows, "floor": 1.882}))
    (tmp_path / "b.json").write_text(json.dumps([{**origin, "rows": rows}]))

    def value(expression, file="a", form=".3f"):
        return references.update(f"<!-- value: {file} {expression} as {form} -->old<!-- end -->", tmp_path).split("-->")[1].split("<")[0]

    assert value("rows[case=a M=1 f32].ms") == value("rows[0].ms") == "0.405"
    assert value("runs[date=2026-11-22T01:48:46+00:00].rows[case~i8].ms", "b") == "0.100"
    assert value("min rows[case~M=1; case~f32].ms") == "0.200"
    assert value("rows[0].ms over rows[1].ms", form=".2f") == "2.02"
    assert value("floor over 0.01", form=".1f") == "188.2"
    assert value("rows[case~i8].inner.x", form=".0f") == "3"
    assert (value("min rows[].ms"), value("max rows[].ms"), value("max runs[].rows[].ms", "b")) == ("0.100", "0.405", "0.405")
    for wrong in ("rows[case~M=1].ms", "rows[case=c].ms", "rows[0].s", "rows[0].case", "rows[9].ms", "rows[case].ms", "rows[].ms", "floor."):
        with pytest.raises(references.UnknownValue, match=r"a\.json"):
            value(wrong)


SOURCES = {str(p.relative_to(ROOT)) for d in ("src", "tests", "benchmarks", "examples", "docs") for p in (ROOT / d).rglob("*.*")}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    """`builder/select/whole_engine.py` must exist in that folder: pages are updated with moved code."""
    for name in re.findall(r"`([\w./]+\.(?:py|cuh?|md))`", page.read_text()):
        assert any(p == name or p.endswith("/" + name) for p in SOURCES), f"{page.name} names {name}, and there is none"
