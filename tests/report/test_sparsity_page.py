"""The page of 2:4 advice, from the data of `whet sparsity --json`."""

import json
from math import exp, log

import pytest
from click.testing import CliRunner

from report.page_parser import chart_data, check_page, parsed
from whet.cli import group
from whet.pruning import EngineTimes, LayerAdvice, SparsityAdvice
from whet.report import render_sparsity_page

HOSTILE = "<script>alert(1)</script>"


def _layer(name, kind, channels, speedup):
    return LayerAdvice(name, name, kind, channels, 64, 1.0, 1.0 / speedup, "cpu/dense", "cpu/sparse", 0.26, "" if speedup > 1 else "slower or equal")


def _advice(batch, *layers, engine=None):
    return SparsityAdvice("cuda", "fp16", batch, "", 0.0, layers, engine).to_json()


LAYERS = (_layer("a", "3x3", 64, 2.0), _layer("b", "3x3", 64, 0.5), _layer("c", "3x3", 256, 1.25), _layer(HOSTILE, "linear", 2048, 0.8))


def test_points_of_the_chart_are_the_speedups_of_the_layers():
    page = render_sparsity_page({"settings": [_advice(8, *LAYERS)]})
    check_page(page)
    traces = chart_data(page)["figures"]["setting0"]["data"]
    assert [t.get("name") for t in traces] == [None, "3x3", None, "linear"]
    assert traces[1]["x"] == [64, 64, 256]
    assert traces[1]["y"] == pytest.approx([2.0, 0.5, 1.25])
    assert (traces[0]["x"], traces[0]["y"]) == ([64, 256], pytest.approx([exp((log(2.0) + log(0.5)) / 2), 1.25]))
    assert "a<br>2.00x at 64 input channels" in traces[1]["hovertext"][0]
    (equal,) = chart_data(page)["figures"]["setting0"]["layout"]["shapes"]
    assert (equal["y0"], equal["y1"]) == (1, 1)


def test_each_setting_has_a_chart_with_the_same_axes_and_each_verdict_is_said_once():
    engine = EngineTimes(2.0, 1.8, 1, (0.05, 0.15))
    page = render_sparsity_page({"settings": [_advice(1, LAYERS[3]), _advice(8, *LAYERS, engine=engine), _advice(32, LAYERS[3])]})
    figures = chart_data(page)["figures"]
    assert sorted(figures) == ["setting0", "setting1", "setting2"]
    assert len({json.dumps([f["layout"]["xaxis"], f["layout"]["yaxis"]]) for f in figures.values()}) == 1
    words = "".join(parsed(page).words)
    assert "fp16, batch 1; fp16, batch 32: " in words
    assert "+5.0% to +15.0%" in words
    assert chart_data(page)["details"]["0"].count("fp16, batch") == 3  # the first row is the layer that all settings have
    assert words.count(HOSTILE) >= 1


def test_layers_without_sparse_tactics_are_said_to_have_none():
    dense = LayerAdvice("a", "a", "1x1", 8, 8, 1.0, None, "cpu/dense", "", None, "no sparse tactic")
    page = render_sparsity_page({"settings": [SparsityAdvice("cpu", "fp32", None, "no sparse tactics", 0.0, (dense,)).to_json()]})
    check_page(page)
    assert chart_data(page)["figures"] == {}
    assert "No layer has both a dense and a sparse tactic." in parsed(page).words


def test_the_report_of_the_json_is_the_page_and_a_browser_draws_it(tmp_path, chromium):
    data = {"model": "m.onnx", "settings": [_advice(1, *LAYERS), _advice(8, *LAYERS)]}
    (tmp_path / "s.json").write_text(json.dumps(data))
    done = CliRunner().invoke(group, ["report", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html")])
    assert done.exit_code == 0, done.output
    chromium.open_report(tmp_path / "s.html", 390, 844)
    assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.run("document.querySelectorAll('.chart .scatterlayer .point').length") == 2 * len(LAYERS)
    assert chromium.problems() == []
