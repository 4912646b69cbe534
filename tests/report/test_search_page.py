"""The page of a search: external text never becomes markup, no network access, and a real browser displays and explains it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from report.sample import HOSTILE, sample
from support import browser
from whet.report import search_page
from whet.report._html import number
from whet.report._plot import pareto_plot

VOID = {"meta", "link", "input", "br"}


class Wellformed(HTMLParser):
    """Collects scripts, addresses and text; every element must be closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action", "data", "srcset")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parsed(page: str) -> Wellformed:
    p = Wellformed()
    p.feed(page)
    p.close()
    return p


def test_external_text_does_not_become_markup():
    page = search_page(sample())
    p = parsed(page)
    assert p.open == []
    assert p.scripts == 1
    assert "<script>alert" not in page
    assert "".join(p.words).count(HOSTILE) >= 5


def test_no_network_access():
    page = search_page(sample())
    assert parsed(page).addresses == ["data:,"]
    assert not re.findall(r"(?:https?:)?//[a-z]|url\(|@import|fetch\(|XMLHttpRequest|WebSocket", page.replace("http-equiv", ""))
    assert "default-src 'none'" in page


def test_all_trials_are_listed():
    d = sample()
    words = "".join(parsed(search_page(d)).words)
    for t in d["trials"]:
        assert t["verdict"] in words
    for text in ("The target is met.", "What each step gave", "Layer by layer", "channels pruned", "survivor", "whet exec --loadEngine=model.engine"):
        assert text in words
    d["met"] = False
    assert "The target is not met" in "".join(parsed(search_page(d)).words)


def test_the_pareto_set_of_the_compared_engines_is_marked():
    d = sample()
    assert "Pareto set</small>" not in search_page(d)
    d["rows"][2]["front"] = True
    assert search_page(d).count("trial 1<small>Pareto set</small>") == 1


def test_measured_energy_is_shown_gross_and_net():
    d = sample()
    assert "net mJ" not in search_page(d)
    for k, r in enumerate(d["rows"]):
        r["energy"] = {"mj": 16.5 - k, "net_mj": 7.25 - k, "watts": 300.0, "idle_watts": 120.0, "about": "a counter; net of 120 W at rest"}
    d["trials"][0]["energy"] = {"mj": 3.5, "net_mj": None, "about": "a counter"}
    page = search_page(d)
    words = "".join(parsed(page).words)
    assert "mJ a sample" in words
    assert "net mJ" in words
    assert "16.5" in words
    assert "7.25 → 5.25 mJ" in words
    assert "net of 120 W at rest" in words
    assert "3.50 mJ a sample, net -" in page, "the tooltip of a trial"


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (0, "0"), (0.5, "0.500"), (12.345, "12.3"), (615162, "615,162"), (99.66, "99.7"), (100, "100")]
)
def test_numbers(value, shown):
    assert number(value) == shown


def test_a_plot_of_one_point_or_of_none():
    assert "No trial" in pareto_plot([], x_name="x", y_name="y", limit_x=None, limit_y=None)
    one = [{"x": 1.0, "y": 99.0, "kind": "scout", "name": "a", "lines": []}]
    assert pareto_plot(one, x_name="x", y_name="y", limit_x=None, limit_y=None).count('class="pt scout"') == 1


def test_a_point_far_below_does_not_flatten_the_rest():
    def height(svg: str, name: str) -> float:
        return float(re.search(rf'class="pt scout" data-tip="{name}[^>]*><(?:circle cx="[\d.]+" cy="|path d="M[\d.]+,)([\d.]+)', svg)[1])

    points = [{"x": 1.0 + i, "y": y, "kind": "scout", "name": f"n{i}", "lines": []} for i, y in enumerate((99.6, 99.0, 12.0))]
    svg = pareto_plot(points, x_name="x", y_name="y", limit_x=None, limit_y=98.6)
    assert height(svg, "n1") - height(svg, "n0") > 40


def test_a_limit_far_beyond_all_points_does_not_flatten_them():
    points = [{"x": x, "y": 99.0, "kind": "scout", "name": f"n{x}", "lines": []} for x in (0.5, 1.0)]
    places = {}
    for limit in (None, 0.8, 10.0):
        svg = pareto_plot(points, x_name="x", y_name="y", limit_x=limit, limit_y=None)
        places[limit] = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', svg)]
        assert ("meets the target" in svg) == (limit is not None)
    assert places[10.0] == places[0.8] == places[None]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium: apt-get install chromium (or WHET_CHROMIUM=path) shows the page to a real browser")
    folder = tmp_path_factory.mktemp("page")
    (folder / "report.html").write_text(search_page(sample()), encoding="utf-8")
    with browser.browser(executable, folder / "profile") as page:
        page.open(folder / "report.html", 1100, 900)
        yield page, folder


def test_a_browser_shows_it_without_errors_or_requests(shown):
    page, folder = shown
    assert page.run("document.querySelectorAll('.pt').length") == 6
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.run("document.querySelector('svg').getBoundingClientRect().height") > 200
    page.picture(folder / "report.png")
    assert (folder / "report.png").stat().st_size > 20_000
    asked = [e["params"]["request"]["url"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    assert [u for u in asked if not u.startswith(("file:", "data:"))] == []
    wrong = [e for e in page.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")]
    assert wrong == []


def test_pointing_at_a_trial_describes_it(shown):
    page, _ = shown

    def middle(of: str) -> list[float]:
        box = page.run(f"document.querySelector('{of}').getBoundingClientRect().toJSON()")
        return [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]

    page.point_at(*middle(".pt.chosen path"))
    text = page.run("document.getElementById('tip').textContent")
    assert text.startswith("trial 1\n")
    assert "0.300x the original's time" in text
    assert HOSTILE in text
    tip, plot = (page.run(f"document.querySelector('{of}').getBoundingClientRect().toJSON()") for of in ("#tip", ".plot"))
    assert tip["width"] > 50
    assert tip["left"] >= plot["left"]
    assert tip["right"] <= plot["right"]
    assert tip["top"] >= plot["top"]
    assert tip["bottom"] <= plot["bottom"]
    page.point_at(5, 5)
    assert page.run("document.getElementById('tip').style.display") == "none"


def test_the_filter_keeps_matching_trials(shown):
    page, _ = shown
    rows = "Array.from(document.querySelectorAll('#trials tbody tr')).filter(r => r.style.display !== 'none').length"
    assert page.run(rows) == 5
    page.run("(function(){var f = document.getElementById('filter'); f.value = 'rejected'; f.dispatchEvent(new Event('input'))})()")
    assert page.run(rows) == 1


@pytest.fixture(scope="module")
def crowded(shown):
    """A page with 300 trials at three positions."""
    page, folder = shown
    d = sample()
    first = d["trials"][0]
    places = ((0.4, 99.0), (0.401, 99.0), (0.8, 97.0))
    d["trials"] = [
        first | {"number": k, "cost": places[k % 3][0], "metric": {**first["metric"], "value": places[k % 3][1]}, "kept": False} for k in range(300)
    ]
    (folder / "crowded.html").write_text(search_page(d), encoding="utf-8")
    page.events.clear()
    page.open(folder / "crowded.html", 390, 844)
    return page


def test_pointing_at_many_trials_names_those_beneath(crowded):
    place = "Array.from(document.querySelectorAll('.pt.scout')).pop().getBoundingClientRect().toJSON()"
    crowded.run("document.querySelector('.plot').scrollIntoView()")
    box = crowded.run(place)
    crowded.point_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    text = crowded.run("document.getElementById('tip').textContent")
    assert re.match(r"trial \d+\n", text)
    assert "99 more here\n" in text
    assert text.count("trial ") == 7


def test_the_plot_has_one_tab_stop_and_arrow_keys(crowded):
    assert crowded.run("document.querySelectorAll('.pt[tabindex=\"0\"]').length") == 1
    crowded.run("document.querySelector('.pt[tabindex=\"0\"]').focus()")
    told = [crowded.run("document.getElementById('tip').textContent")]
    for key in ("ArrowRight", "ArrowLeft"):
        crowded.run(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true, cancelable: true}}))")
        told.append(crowded.run("document.getElementById('tip').textContent"))
    assert told[0] == told[2] != told[1]
    assert crowded.run("document.activeElement.classList.contains('pt')")
    assert crowded.run("document.querySelectorAll('.pt[tabindex=\"0\"]').length") == 1


def test_a_page_of_many_trials_is_no_longer_than_one_of_few(crowded):
    assert crowded.run("document.documentElement.scrollHeight") < 6000
    assert crowded.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert crowded.run("document.querySelectorAll('#trials tbody tr').length") == 300
