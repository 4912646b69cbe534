"""The page of a comparison, from the data of `whet compare --json`."""

import json

import pytest
from click.testing import CliRunner

import whet
from report.page_parser import chart_data, check_page, parsed
from whet.cli import group
from whet.network import parse_network
from whet.report import render_comparison_page

NET = """network n source
in %x: f32[1,8,16,16]
const %w: f32[8,8,3,3] = seed(1)
%c = Conv(%x, %w, pads=(1,1,1,1))
%y = Relu(%c)
out %y
"""
HOSTILE = "<script>alert(1)</script>"


def _engine(name, ms, low, high, change, interval):
    return {
        "name": name,
        "latency_ms": ms,
        "interval_ms": [low, high],
        "change": change,
        "change_interval": interval,
        "snr_db": None,
        "max_error": 1e-6,
        "verdict": "a verdict",
        "build_seconds": 1.5,
        "layers": 3,
        "mb_moved": 2.0,
    }


def _data():
    def layer(tactic, ms):
        return {"layer": HOSTILE, "tactic": tactic, "kernel": "k", "types": "f32", "ms": ms}

    groups = [
        {
            "nodes": [HOSTILE, "relu"],
            "same_fusion": False,
            "same_choices": False,
            "engines": [[layer("cpu/a", 1.0)], [layer("cpu/b", 0.5), layer("cpu/c", 1.0)]],
        },
        {"nodes": ["pool"], "same_fusion": True, "same_choices": True, "engines": [[layer("cpu/p", 0.1)], [layer("cpu/p", None)]]},
    ]
    settings = {"optimization_level": [3, 0], "passes": [None, HOSTILE]}
    engines = [_engine(HOSTILE, 2.0, 1.9, 2.2, 0.0, [0, 0]), _engine("b", 3.0, 2.8, 3.5, 0.5, [0.4, 0.6])]
    return {"settings": settings, "engines": engines, "layers": groups}


def test_times_intervals_and_layers_of_the_data_are_drawn():
    page = render_comparison_page(_data(), title=HOSTILE)
    check_page(page)
    assert "1 of 2 groups of layers differ" in "".join(parsed(page).words)
    assert "optimization_level" in parsed(page).words
    figures = chart_data(page)["figures"]
    assert figures["latency"]["data"][0]["x"] == [2.0, 3.0]
    assert figures["latency"]["data"][0]["error_x"]["array"] == pytest.approx([0.2, 0.5])
    assert figures["latency"]["data"][0]["error_x"]["arrayminus"] == pytest.approx([0.1, 0.2])
    change = figures["change"]["data"][0]
    assert (change["x"], change["marker"]["color"]) == ([50.0], ["--warm"])
    assert [t["y"] for t in figures["groups"]["data"]] == [[1.0, 0.1], [1.5, 0.0]]
    assert chart_data(page)["details"]["0"].count("cpu/") == 3


def test_a_difference_within_the_interval_is_grey():
    d = _data()
    d["engines"][1] |= {"change": -0.01, "change_interval": [-0.05, 0.02]}
    assert chart_data(render_comparison_page(d))["figures"]["change"]["data"][0]["marker"]["color"] == ["--grey"]


def test_the_command_writes_the_page_and_report_makes_the_same_of_its_json(tmp_path, chromium):
    model = whet.save_onnx(parse_network(NET), tmp_path / "n.onnx")
    whet.build(model, optimization_level=1, timing_cache="").save(tmp_path / "n.engine")
    call = CliRunner().invoke(
        group,
        [
            "compare",
            str(tmp_path / "n.engine"),
            str(model),
            "--seconds=0.05",
            "--json",
            "--html",
            str(tmp_path / "c.html"),
            "--timingCacheFile",
            str(tmp_path / "t.cache"),
        ],
    )
    assert call.exit_code == 0, call.output
    (tmp_path / "c.json").write_text(call.stdout)
    page = (tmp_path / "c.html").read_text()
    check_page(page)
    done = CliRunner().invoke(group, ["report", str(tmp_path / "c.json"), "--html", str(tmp_path / "d.html")])
    assert done.exit_code == 0, done.output
    assert chart_data((tmp_path / "d.html").read_text())["figures"] == chart_data(page)["figures"]
    assert json.loads(call.stdout)["engines"][0]["name"] in "".join(parsed(page).words)
    chromium.open_report(tmp_path / "c.html", 390, 844)
    assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.problems() == []


def test_models_are_built_for_the_page_and_counts_alone_have_none(tmp_path):
    first = whet.save_onnx(parse_network(NET), tmp_path / "n.onnx")
    other = whet.save_onnx(parse_network(NET), tmp_path / "m.onnx")
    page = tmp_path / "x.html"
    call = ["compare", str(first), str(other), "--html", str(page), "--seconds=0.02", f"--timingCacheFile={tmp_path / 't.cache'}", "--json"]
    done = CliRunner().invoke(group, call, catch_exceptions=False)
    data = json.loads(done.stdout)
    assert [m["name"] for m in data["models"]] == [e["name"] for e in data["engines"]] == ["n", "m"]
    assert data["models"][1]["ms"] == data["engines"][1]["latency_ms"]
    assert data["engines"][1]["max_error"] == 0.0
    assert chart_data(page.read_text())["figures"]["latency"]["data"][0]["x"][0] == data["engines"][0]["latency_ms"]
    assert "leave --noEngines out" in str(CliRunner().invoke(group, [*call, "--noEngines"]).exception)
