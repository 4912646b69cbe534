"""The page of a search: external text never becomes markup, no network access, and a real browser displays and explains it."""

from __future__ import annotations

import pytest

from report.page_parser import chart_data, check_page, parsed
from report.sample import HOSTILE, sample
from whet.report import render_search_page
from whet.report._html import format_digits
from whet.report._pareto import plot_pareto


def test_external_text_does_not_become_markup_and_nothing_is_requested():
    page = render_search_page(sample())
    check_page(page)
    assert "<script>alert" not in page
    assert "".join(parsed(page).words).count(HOSTILE) >= 5


def test_all_trials_are_listed():
    d = sample()
    words = "".join(parsed(render_search_page(d)).words)
    for t in d["trials"]:
        assert t["verdict"] in words
    for text in ("The target is met.", "What each step gave", "Layer by layer", "channels pruned", "survivor", "whet exec --loadEngine=model.engine"):
        assert text in words
    d["met"] = False
    assert "The target is not met" in "".join(parsed(render_search_page(d)).words)


def test_the_pareto_set_of_the_compared_engines_is_marked():
    d = sample()
    assert "Pareto set</small>" not in render_search_page(d)
    d["rows"][2]["front"] = True
    assert render_search_page(d).count("trial 1<small>Pareto set</small>") == 1


def test_measured_energy_is_shown_gross_and_net():
    d = sample()
    assert "net mJ" not in render_search_page(d)
    for k, r in enumerate(d["rows"]):
        r["energy"] = {"mj": 16.5 - k, "net_mj": 7.25 - k, "watts": 300.0, "idle_watts": 120.0, "about": "a counter; net of 120 W at rest"}
    d["trials"][0]["energy"] = {"mj": 3.5, "net_mj": None, "about": "a counter"}
    page = render_search_page(d)
    words = "".join(parsed(page).words)
    assert "mJ a sample" in words
    assert "net mJ" in words
    assert "16.5" in words
    assert "7.25 → 5.25 mJ" in words
    assert "net of 120 W at rest" in words
    trials = chart_data(page)["figures"]["pareto"]["data"][1]["hovertext"]
    assert "3.50 mJ a sample, net -" in trials[0]


def test_code_in_reasons_is_marked():
    assert "only 1: <code>space.batch: [1, 8]</code> searches over it" in render_search_page(sample())


@pytest.mark.parametrize("higher", [True, False])
def test_the_line_of_the_pareto_set_passes_by_points_that_only_noise_keeps(higher):
    points = [{**p, "front": True, "y": p["y"] if higher else 100 - p["y"]} for p in _points((0.5, 99.0), (0.6, 98.9), (1.0, 99.5))]
    drawn = plot_pareto(points, x_name="x", y_name="y", limit_x=None, limit_y=None, higher=higher)["data"][0]
    assert drawn["x"] == [0.5, 1.0]


def test_the_metric_of_the_pareto_plot_spans_a_percent_at_least():
    """Otherwise the difference of one sample, which is chance, fills the plot."""
    points = [{"x": x, "y": y, "kind": "scout", "name": "t", "lines": []} for x, y in ((0.3, 99.663), (0.6, 99.667))]
    low, high = plot_pareto(points, x_name="time", y_name="top-1 %", limit_x=0.5, limit_y=None)["layout"]["yaxis"]["range"]
    assert high - low >= 0.99
    assert low < 99.2 < 100.1 < high


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (0, "0"), (0.5, "0.500"), (12.345, "12.3"), (615162, "615,162"), (99.66, "99.7"), (100, "100")]
)
def test_numbers(value, shown):
    assert format_digits(value) == shown


def _points(*places: tuple[float, float]) -> list[dict]:
    return [{"x": x, "y": y, "kind": "scout", "name": f"n{i}", "lines": []} for i, (x, y) in enumerate(places)]


def test_a_plot_of_one_point():
    shown = plot_pareto(_points((1.0, 99.0)), x_name="x", y_name="y", limit_x=None, limit_y=None)
    assert [len(t["x"]) for t in shown["data"]] == [0, 1, 0, 0]


def test_a_point_far_below_does_not_flatten_the_rest():
    shown = plot_pareto(_points((1.0, 99.6), (2.0, 99.0), (3.0, 12.0)), x_name="x", y_name="y", limit_x=None, limit_y=98.6)
    low, high = shown["layout"]["yaxis"]["range"]
    trials = shown["data"][1]
    assert (99.6 - 99.0) / (high - low) > 0.1
    assert trials["y"][2] == low
    assert trials["marker"]["symbol"] == ["circle", "circle", "triangle-down"]


def test_a_limit_far_beyond_all_points_does_not_flatten_them():
    ranges = {}
    for limit in (None, 0.8, 10.0):
        shown = plot_pareto(_points((0.5, 99.0), (1.0, 99.0)), x_name="x", y_name="y", limit_x=limit, limit_y=None)
        ranges[limit] = shown["layout"]["xaxis"]["range"]
        assert bool(shown["layout"]["shapes"]) == (limit is not None)
    assert ranges[10.0] == ranges[0.8] == ranges[None]


def test_a_trial_names_those_beneath_its_mark():
    shown = plot_pareto(_points(*[(0.4, 99.0)] * 100, (0.9, 97.0)), x_name="x", y_name="y", limit_x=None, limit_y=None)
    texts = shown["data"][1]["hovertext"]
    assert texts[0].startswith("n0<br>99 more here<br>n1: ")
    assert texts[0].count("<br>") == 8
    assert "more here" not in texts[100]


def test_bars_end_at_the_99th_percentile_and_steps_are_a_waterfall():
    figures = chart_data(render_search_page(sample()))["figures"]
    bars = figures["latency"]["data"][0]
    assert bars["x"] == pytest.approx([2.0, 0.9, 0.6])
    assert [x + e for x, e in zip(bars["x"], bars["error_x"]["array"], strict=True)] == pytest.approx([3.0, 1.35, 0.9])
    steps = figures["step-params"]["data"][0]
    assert steps["measure"] == ["absolute", "relative", "relative", "total"]
    assert steps["orientation"] == "h"
    assert steps["x"] == pytest.approx([0.615162, 0.2 - 0.615162, 0.0, 0.2])
    axis = figures["step-params"]["layout"]["yaxis"]
    assert axis["ticktext"][1:] == ["channels pruned<br>0.2000 (-0.415)", "engine (12 layers i8)<br>0.2000 (=)", "result<br>0.2000"]
    assert axis["range"][0] > axis["range"][1], "the first step is on top"
    assert figures["step-ms"]["data"][0]["x"] == pytest.approx([2.0, 0.6 - 2.0, 0.6]), "the original's time is that of the compared engines"
    assert figures["step-metric"]["data"][0]["increasing"]["marker"]["color"] == "--accent", "a higher metric is better"


def test_each_step_with_a_time_is_in_the_waterfall():
    data = sample()
    data["steps"][0]["ms"], data["steps"][1]["ms"] = 2.1, 0.9
    figures = chart_data(render_search_page(data))["figures"]
    assert figures["step-ms"]["data"][0]["x"] == pytest.approx([2.1, 0.9 - 2.1, 0.6 - 0.9, 0.6]), "the original's own time comes first"


@pytest.fixture(scope="module")
def shown(chromium, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render_search_page(sample()), encoding="utf-8")
    chromium.open_report(file, 1100, 900)
    return chromium


def test_a_browser_shows_it_without_errors_or_requests(shown, tmp_path):
    assert shown.run("document.querySelectorAll('.chart .main-svg').length") >= 5
    assert shown.run("document.documentElement.scrollWidth <= window.innerWidth")
    shown.picture(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000
    assert shown.problems() == []


def test_arrow_keys_tell_every_point(shown):
    shown.run("document.getElementById('pareto').focus()")
    told = []
    for _ in range(6):
        shown.key("ArrowRight")
        told.append(shown.run("document.getElementById('spoken').textContent"))
    assert len(set(told)) == 6
    assert told[0].startswith("trial 2, ")
    assert any(HOSTILE in text for text in told)


def test_the_filter_keeps_matching_trials(shown):
    rows = "Array.from(document.querySelectorAll('#trials tbody tr')).filter(r => r.style.display !== 'none').length"
    assert shown.run(rows) == 5
    shown.run("(function(){var f = document.getElementById('filter'); f.value = 'rejected'; f.dispatchEvent(new Event('input'))})()")
    assert shown.run(rows) == 1


def test_a_page_of_many_trials_is_no_longer_than_one_of_few(chromium, tmp_path):
    d = sample()
    first = d["trials"][0]
    places = ((0.4, 99.0), (0.401, 99.0), (0.8, 97.0))
    d["trials"] = [
        first | {"number": k, "cost": places[k % 3][0], "metric": {**first["metric"], "value": places[k % 3][1]}, "kept": False} for k in range(300)
    ]
    (tmp_path / "crowded.html").write_text(render_search_page(d), encoding="utf-8")
    chromium.open_report(tmp_path / "crowded.html", 390, 844)
    assert chromium.run("document.documentElement.scrollHeight") < 6000
    assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.run("document.querySelectorAll('#trials tbody tr').length") == 300


def _with_axes(*axes):
    return sample() | {"axes": [{"name": name, "key": key, "limit": limit} for name, key, limit in axes]}


def _target_boxes(page):
    """By figure the right edge of the drawn target, and the bottom."""
    figures = {n: f for n, f in chart_data(page)["figures"].items() if n.startswith("pareto")}
    return {n: [(s["x1"], s["y0"]) for s in f["layout"]["shapes"]] for n, f in figures.items()}


def test_the_target_box_is_that_of_the_quantities_with_a_target():
    boxes = _target_boxes(render_search_page(_with_axes(("size of the engine file", "engine_bytes", 0.4))))
    assert boxes == {"pareto": [(0.4, 98.6)]}
    page = render_search_page(_with_axes(("time per run", None, 0.5), ("memory", "memory_bytes", 0.6)))
    assert _target_boxes(page) == {"pareto": [(0.5, 98.6)], "pareto-memory_bytes": [(0.6, 98.6)]}
    figures = chart_data(page)["figures"]
    engines = [x for t in figures["pareto-memory_bytes"]["data"][2:] for x in t["x"]]
    assert engines == pytest.approx([1.0, 0.45, 0.3]), "5 MB times the ratio, relative to the original"
    assert "memory, relative to the FP32 original" in figures["pareto-memory_bytes"]["layout"]["xaxis"]["title"]["text"]


def test_energy_that_was_not_measured_has_no_plot():
    d = _with_axes(("energy per sample", "mj", 0.5))
    assert _target_boxes(render_search_page(d)) == {}
    for k, r in enumerate([*d["rows"], *(t for t in d["trials"] if t["state"] == "done")]):
        r["energy"] = {"mj": 10.0 - k, "about": "a counter"}
    assert _target_boxes(render_search_page(d)) == {"pareto": [(0.5, 98.6)]}


def test_results_without_axes_show_time():
    assert _target_boxes(render_search_page(sample())) == {"pareto": [(0.5, 98.6)]}


def test_cuts_are_explained_in_words():
    d = sample() | {"classes": {"48 inner": f"48 channels inside a block {HOSTILE}"}}
    words = "".join(parsed(render_search_page(d)).words)
    assert "48 inner: 48 channels inside a block" in words
    assert "What the cuts are" not in "".join(parsed(render_search_page(sample())).words)


@pytest.mark.parametrize("width", [390, *(pytest.param(w, marks=pytest.mark.slow) for w in (768, 1920))])
def test_it_is_readable_from_390_to_1920_pixels(chromium, tmp_path, width):
    """Nothing is wider than the window except tables, which scroll."""
    (tmp_path / "p.html").write_text(render_search_page(_with_axes(("time per run", None, 0.5), ("memory", "memory_bytes", 0.6))), encoding="utf-8")
    chromium.open_report(tmp_path / "p.html", width, 900)
    assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.run("document.querySelectorAll('.chart .main-svg').length") >= 6
