"""The page of an engine: its content, and what a real browser shows of it by mouse, keyboard, in both themes and from 390 to 1920 pixels."""

import json
import sys

import pytest
from click.testing import CliRunner

import whet
from report.page_parser import chart_data, check_page, parsed
from whet.cli import group
from whet.errors import UsageError
from whet.network import parse_network
from whet.report import render_engine_page
from whet.report._html import Html
from whet.report._lanes import assign_lanes

NET = """network n source
in %x: f32[1,8,16,16]
const %w: f32[8,8,3,3] = seed(1)
const %v: f32[8,8,3,3] = seed(2)
const %u: f32[8,8,1,1] = seed(3)
%c = Conv(%x, %w, pads=(1,1,1,1))
%a = Relu(%c)
%d = Conv(%a, %v, pads=(1,1,1,1))
%s = Add(%d, %x)
%r = Relu(%s)
%p = MaxPool(%r, kernel_shape=(2,2), strides=(2,2))
%y = Conv(%p, %u)
out %y
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model = whet.save_onnx(parse_network(NET), folder / "n.onnx")
    whet.build(model, optimization_level=2, timing_cache="").save(folder / "n.engine")
    return folder / "n.engine"


@pytest.fixture(scope="module")
def page(engine):
    return render_engine_page(whet.read_engine(engine), title="<script>alert(1)</script>")


def test_the_page_is_one_file_and_markup_in_names_is_text(page):
    check_page(page)
    assert "<script>alert(1)</script>" in "".join(parsed(page).words)


def test_every_layer_is_in_each_part(engine, page):
    plan = whet.read_engine(engine)
    layers = [str(k) for k in range(len(plan.network.layers))]
    data = chart_data(page)
    assert list(data["details"]) == layers
    figures = data["figures"]
    assert set(figures) == {"graph", "types", "layers-time", "roofline", "precision", "memory", "engines"}
    for name in ("graph", "layers-time"):
        assert {k for t in figures[name]["data"] for k in t.get("customdata", [])} == set(layers)
    assert page.count("data-key=") == len(layers)
    total = sum(t for t in plan.report.layer_ms.values())
    assert sum(figures["types"]["data"][0]["x"]) == pytest.approx(total)


def test_a_fused_layer_is_a_group_with_its_operations(page):
    graph = chart_data(page)["figures"]["graph"]
    texts = " ".join(t for trace in graph["data"] for t in trace.get("text", []))
    for op in ("Conv", "Add", "Relu", "MaxPool"):
        assert op in texts
    assert graph["layout"]["shapes"], "no group is drawn"
    assert all(g["y1"] - g["y0"] > 1 for g in graph["layout"]["shapes"])


def test_details_have_candidates_with_times_and_refusals_with_reasons(engine, page):
    convs = [x for x in whet.inspector.explain(whet.read_engine(engine))["slowest"] if x["type"] == "CaskConvolution"]
    detail = next(d for d in chart_data(page)["details"].values() if convs[0]["kernel"] in d)
    assert "Timed (" in detail
    assert "Refused (" in detail
    assert "tactics are for other operators" in detail


def test_tensors_do_not_overlap_in_space_and_time(engine, page):
    """The rectangles of the memory chart: two that share a layer have different bytes, unless one is a view of the other's bytes."""
    bars = chart_data(page)["figures"]["memory"]["data"][0]
    boxes = [(x - (w - 0.9) / 2, x + (w - 0.9) / 2, b, b + y) for x, w, b, y in zip(bars["x"], bars["width"], bars["base"], bars["y"], strict=True)]
    inplace = {b for c in whet.read_engine(engine).choices.values() for b in c.inplace}
    clashes = [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]]
    assert boxes
    assert clashes == [] or inplace


def test_bytes_in_use_never_exceed_the_arena(engine, page):
    plan = whet.read_engine(engine)
    live = chart_data(page)["figures"]["memory"]["data"][1]["y"]
    assert 0 < max(live) * 2**20 <= plan.arenas[0].total


def test_an_engine_without_times_has_a_page_that_says_so(tmp_path):
    model = whet.save_onnx(parse_network(NET), tmp_path / "n.onnx")
    whet.build(model, optimization_level=0, timing_cache="").save(tmp_path / "n.engine")
    page = render_engine_page(whet.read_engine(tmp_path / "n.engine"))
    check_page(page)
    assert "not timed" in page
    assert "types" not in chart_data(page)["figures"]


def test_zeros_and_two_of_four_weights_are_shown(tmp_path):
    model = whet.save_onnx(parse_network(NET), tmp_path / "n.onnx")
    whet.build(model, optimization_level=1, timing_cache="", sparsity="force").save(tmp_path / "n.engine")
    zeros = chart_data(render_engine_page(whet.read_engine(tmp_path / "n.engine")))["figures"]["precision"]["data"][1]
    assert zeros["y"] == [50.0] * 3
    assert "2:4, runs dense" in zeros["hovertext"][0]


def test_lanes_keep_a_residual_straight():
    lanes = assign_lanes([(["x"], ["a"]), (["a"], ["b"]), (["b", "a"], ["c"]), (["c"], ["d"])])
    assert lanes.lane == [0, 1, 0, 0]
    assert lanes.edges == [(0, 1, 0), (1, 2, 1), (0, 2, 0), (2, 3, 0)]
    assert lanes.width == 2


def test_the_command_writes_the_page(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(group, ["report", str(engine)])
    assert done.exit_code == 0, done.output
    assert "Wrote n.html" in done.output
    check_page((tmp_path / "n.html").read_text())
    done = CliRunner().invoke(group, ["report", str(engine), "--html", "p.html", "--json"])
    assert json.loads(done.output)["page"] == "p.html"


@pytest.mark.parametrize(("name", "content", "message"), [
    ("missing.engine", None, "there is no file"), ("a.json", "{}", "is no source of a page"), ("a.txt", "text", "nor JSON"),
    ("b.json", '{"engines": [{}], "layers": []}', "lacks what a report needs"),
])  # fmt: skip
def test_other_files_are_refused_with_advice(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    done = CliRunner().invoke(group, ["report", str(tmp_path / name), "--html", str(tmp_path / "x.html")])
    assert done.exception is not None
    assert message in str(done.exception)
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("arguments", [["--html", "/nowhere/x.html"], ["--profile=3"]])
def test_wrong_options_are_refused(engine, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(CliRunner().invoke(group, ["report", str(engine), *arguments]).exception, whet.WhetError)


def test_without_plotly_the_extra_is_named(monkeypatch):
    from whet.report import _page

    _page.read_library.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match=r"pip install 'whet\[report\]'"):
        _page.make_page("t", Html(""), {"a": {}})
    _page.read_library.cache_clear()


@pytest.fixture(scope="module")
def shown(chromium, page, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "engine.html"
    file.write_text(page, encoding="utf-8")
    chromium.open_report(file, 1280, 900)
    return chromium, file


def test_a_browser_draws_every_chart_without_errors_or_requests(shown):
    browser, _ = shown
    assert browser.run("document.querySelectorAll('.chart .main-svg').length") >= 7
    assert browser.run("Array.from(document.querySelectorAll('.chart')).every(c => c.querySelector('.main-svg'))")
    assert browser.problems() == []


def test_the_slowest_layer_is_shown_first(shown, engine):
    browser, _ = shown
    times = whet.read_engine(engine).report.layer_ms
    names = [x.layer.name for x in whet.inspector.layer_facts(whet.read_engine(engine))]
    assert browser.run("document.querySelector('tr[aria-selected=\"true\"]').dataset.key") == str(names.index(max(times, key=times.get)))


def test_no_axis_title_is_cut_off(shown):
    browser, _ = shown
    boxes = browser.run("""Array.from(document.querySelectorAll('.chart .xtitle'), t => t.closest('.chart').getBoundingClientRect().bottom
        - t.getBoundingClientRect().bottom)""")
    assert len(boxes) >= 5
    assert min(boxes) >= 2, "pixels between a title and the frame"


def test_a_click_on_a_point_shows_the_layers_candidates(shown):
    browser, _ = shown
    browser.run("document.getElementById('layers-time').scrollIntoView({block: 'center'})")
    bars = "Array.from(document.querySelectorAll('#layers-time .bars .point path'), p => p.getBoundingClientRect().toJSON())"
    box = sorted(browser.run(bars), key=lambda b: b["height"])[-2]  # the highest is selected already
    before = browser.run("document.getElementById('detail').textContent")
    browser.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    browser.wait(f"document.getElementById('detail').textContent !== {json.dumps(before)}", 10)
    assert "Timed (" in browser.run("document.getElementById('detail').textContent")
    assert browser.run("document.querySelectorAll('tr[aria-selected=\"true\"]').length") == 1


def test_the_keyboard_reaches_points_rows_filter_and_theme(shown):
    browser, _ = shown
    browser.run("document.getElementById('roofline').focus()")
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        browser.key(key)
        told.append(browser.run("document.getElementById('spoken').textContent"))
    assert told[0] == told[2] != told[1]
    assert "ms" in told[0]
    browser.run("document.querySelector('tr[tabindex=\"0\"]').focus()")
    first = browser.run("document.activeElement.dataset.key")
    rows = browser.run("document.querySelectorAll('#layers tbody tr').length")
    key, step = ("ArrowDown", 1) if int(first) + 1 < rows else ("ArrowUp", -1)  # the slowest layer has the focus first, which may be the last row
    browser.key(key)
    assert browser.run("document.activeElement.dataset.key") == str(int(first) + step)
    assert browser.run("document.activeElement.getAttribute('aria-selected')") == "true"
    before = browser.run("document.documentElement.dataset.theme + getComputedStyle(document.body).backgroundColor")
    browser.key("t")
    assert browser.run("document.documentElement.dataset.theme + getComputedStyle(document.body).backgroundColor") != before
    browser.key("/")
    assert browser.run("document.activeElement.id") == "filter"
    browser.run("(() => { const f = document.getElementById('filter'); f.value = 'CaskPooling'; f.dispatchEvent(new Event('input')); })()")
    assert browser.run("Array.from(document.querySelectorAll('#layers tbody tr')).filter(r => r.style.display !== 'none').length") == 1


@pytest.mark.parametrize("width", [390, *(pytest.param(w, marks=pytest.mark.slow) for w in (768, 1920))])
def test_the_page_fits_the_window(shown, width, tmp_path):
    browser, file = shown
    browser.open_report(file, width, 844)
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.run("Array.from(document.querySelectorAll('.chart')).every(c => c.getBoundingClientRect().width > 250)")
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.problems() == []
