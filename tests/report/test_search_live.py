"""The search in a terminal: the best trial, the remaining time, plain lines without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from report.sample import sample
from whet.report.search_live import SearchLive


def result(number: int) -> dict:
    t = sample()["trials"][number]
    candidate = {"precision": "int8", "widths": {"a": 0.5, "b": 0.0}, "removed": [], "batch": 1}
    return t | {"role": "scout", "candidate": candidate, "reason": t["verdict"], "seconds": t["seconds"] or 0.0}


@pytest.fixture
def heard(tmp_path):
    out = io.StringIO()
    live = SearchLive(live=False, console=Console(file=out, width=120))
    live.plan({"target": {"latency": "0.5x", "accuracy_drop": 1.0}, "workers": 1, "resumed": False, "folder": "f", "trials": 4, "points": 16})
    live.phase("scouts", 4)
    for k in range(4):
        live.start_job(tmp_path / f"{k:04d}", "int8")
        live.end_job(tmp_path / f"{k:04d}", result(k), False)
    return live, out


def test_lines_give_the_result_of_each_trial(heard):
    lines = heard[1].getvalue().splitlines()
    assert lines[0].startswith("The search begins in f: 4 trials, target latency 0.5x, accuracy_drop 1.0; 16 points")
    assert lines[1] == "scout 0000 (1/4, 37 s left): 0.450x the original's time, 0.900 ms, metric 99.30, lost 0.300  int8, 25 % cut on average"
    assert lines[4].startswith("scout 0003 (4/4): failed: ")


def test_the_best_loses_no_more_than_allowed(heard):
    name, best = heard[0].find_best()
    assert name == "scout 0001"  # 0002 is faster and loses 84.7
    assert best["latency"]["ratio"] == 0.3


def test_the_screen_fits_its_contents(heard, tmp_path):
    live = heard[0]
    (tmp_path / "0009").mkdir()
    (tmp_path / "0009" / "stage.txt").write_text("building timing 3/7")
    live.start_job(tmp_path / "0009", "bf16 [bold]not markup[/bold]")
    out = io.StringIO()
    Console(file=out, width=100).print(live.view())
    text = out.getvalue()
    assert "building timing 3/7" in text
    assert "[bold]not markup[/bold]" in text
    assert "best so far: scout 0001" in text
    assert max(map(len, text.splitlines())) <= 100


def test_user_names_are_printed_literally(heard):
    live, out = heard
    live.note("python:m:metric and [bold] stay what they are")
    assert "note: python:m:metric and [bold] stay what they are" in out.getvalue()


def test_a_reason_may_contain_a_layer_name_in_brackets(heard, tmp_path):
    live = heard[0]
    live.end_job(tmp_path / "0004", result(3) | {"reason": "layer 'a[/b]' needs whet[jit]"}, False)
    out = io.StringIO()
    Console(file=out, width=200).print(live.view())
    assert "failed: layer 'a[/b]' needs whet[jit]" in out.getvalue()


def test_a_line_lists_all_changes_to_the_original():
    from whet.report.search_live import describe_candidate
    from whet.search.recipe.space import Candidate

    c = Candidate(budget=0.3, precision="int8", two_four=True, fusion="-fuse_conv_add", batch=4, removed=("a",))
    assert describe_candidate({"candidate": c.to_plain()}) == "int8, batch 4, 2:4, passes -fuse_conv_add, latency budget 30 %, 1 branches removed"
