"""The page of a sensitivity analysis, from the data of `whet debug precision --json`."""

import json

import pytest
from click.testing import CliRunner

from report.page_parser import chart_data, check_page, parsed
from whet.builder.precision.layer_sensitivity import SensitivityReport
from whet.cli import group
from whet.precision import LayerSensitivity
from whet.report import render_sensitivity_page

HOSTILE = "<script>alert(1)</script>"


def _data(count=3, **more):
    rows = [LayerSensitivity(f"{HOSTILE}{k}", "Conv", 20.0 + k, 10.0 + k if k else None, None, 0.5, 0.25 if k else 0.75) for k in range(count)]
    return SensitivityReport("int8", rows, 9.5, 8, **more).to_json()


def test_bars_dots_and_rows_are_those_of_the_analysis():
    page = render_sensitivity_page(_data(float_ms=3.0, low_ms=1.5, notes=["no calibration data"]), title=HOSTILE)
    check_page(page)
    bars, dots = chart_data(page)["figures"]["sensitivity"]["data"]
    assert bars["x"] == pytest.approx([20.0, 21.0, 22.0])
    assert (dots["x"], dots["y"]) == ([11.0, 12.0], [1, 2])  # the first row has no value
    assert "costs 0.250 ms" in bars["hovertext"][0]
    assert "saves 0.250 ms" in bars["hovertext"][1]
    words = "".join(parsed(page).words)
    for text in ("9.5 dB", "no calibration data", "3.00 → 1.50 ms", f"{HOSTILE}2"):
        assert text in words


def test_the_chart_shows_the_most_sensitive_layers_and_the_table_all():
    page = render_sensitivity_page(_data(70))
    assert len(chart_data(page)["figures"]["sensitivity"]["data"][0]["x"]) == 60
    words = "".join(parsed(page).words)
    assert "The 10 least sensitive layers are in the table only." in words
    assert f"{HOSTILE}69" in words


def test_the_report_of_the_json_is_the_page_and_a_browser_draws_it(tmp_path, chromium):
    (tmp_path / "s.json").write_text(json.dumps({"model": "m.onnx", **_data()}))
    done = CliRunner().invoke(group, ["report", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html")])
    assert done.exit_code == 0, done.output
    chromium.open_report(tmp_path / "s.html", 390, 844)
    assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.run("document.querySelectorAll('#sensitivity .bars .point').length") == 3
    assert chromium.problems() == []
