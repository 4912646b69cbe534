"""Results of several fuzzing runs become one; a run counts once."""

import json

import pytest


@pytest.fixture
def fuzz_engine(monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "benchmarks"))
    import fuzz_engine

    return fuzz_engine


def outcomes(seed, kinds, outcome="refused: because"):
    return [{"seed": seed + i, "kind": k, "outcome": outcome, "seconds": 0.1 * i, "grown": i << 20} for i, k in enumerate(kinds)]


def part(fuzz_engine, date, results):
    return {"date": date, "commit": "c", "command": f"run {date}", "workers": 2, **fuzz_engine.summarize(results)}


def test_counts_of_runs_are_added(fuzz_engine, tmp_path):
    first = part(fuzz_engine, "2026-01-01", outcomes(0, "aab"))
    second = part(fuzz_engine, "2026-01-02", [*outcomes(9, "bc"), *outcomes(30, "c", "BAD worker ended with -11")])
    output = tmp_path / "all.json"
    output.write_text(json.dumps(first))
    (tmp_path / "p.json").write_text(json.dumps(second))
    assert fuzz_engine.merge_files(output, [tmp_path / "p.json"]) == 1
    merged = json.loads(output.read_text())
    assert merged["files"] == 6
    assert merged["by_kind"] == {"a": {"refused": 2}, "b": {"refused": 2}, "c": {"refused": 1, "BAD": 1}}
    assert [r["seed"] for r in merged["bad"]] == [30]
    assert merged["date"] == "2026-01-02"
    assert [(r["date"], r["files"]) for r in merged["runs"]] == [("2026-01-01", 3), ("2026-01-02", 3)]
    assert merged["commonest_reasons"][0] == ["because", 5]
    with pytest.raises(ValueError, match="twice"):
        fuzz_engine.merge_files(output, [tmp_path / "p.json"])
