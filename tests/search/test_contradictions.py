"""Ratios of a search that contradict their own medians: measured again, else uncertain; intervals of ratios."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from report.page_parser import chart_data
from report.sample import sample
from whet.report.search_page import format_ratio, render_ratio, render_search_page
from whet.search.stages import measure


@dataclass
class Outcome:
    """A ranking of two engines: times of runs and ratios of rounds."""

    medians: tuple[float, float]
    ratio: float
    runs: list = field(init=False)
    disturbed: bool = False
    attempts: int = 1
    load: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(others=0.0))

    def __post_init__(self):
        self.runs = [[m] * 5 for m in self.medians]

    def ratios(self, i):
        return [1.0] * 5 if i == 0 else [self.ratio, self.ratio * 0.98, self.ratio * 1.02]


def timed(monkeypatch, *outcomes):
    """Rows, load and the seconds of each measurement."""
    left, seconds = list(outcomes), []

    def compare(runs, policy, **how):
        seconds.append(policy.stages[0].budget.seconds)
        return left.pop(0)

    monkeypatch.setattr(measure, "compare", compare)
    backend = SimpleNamespace(watch=None, state=dict)
    rows, load = measure.time_engines([lambda: None] * 2, 1.0, backend)
    return rows, load, seconds


def test_a_ratio_that_fits_its_medians_is_measured_once(monkeypatch):
    rows, load, seconds = timed(monkeypatch, Outcome((1.0, 0.7), 0.72))
    assert len(seconds) == 1
    assert rows[1]["ratio"] == pytest.approx(0.72)
    low, high = rows[1]["ratio_interval"]
    assert low < 0.72 < high
    assert "contradiction" not in rows[1]
    assert not load["disturbed"]


def test_a_contradiction_is_measured_again_and_longer(monkeypatch):
    """A scout under load said 0.332 where its medians gave 0.717."""
    rows, load, seconds = timed(monkeypatch, Outcome((1.0, 0.717), 0.332), Outcome((1.0, 0.717), 0.70))
    assert seconds == [1.0, 2.0]
    assert rows[1]["ratio"] == pytest.approx(0.70)
    assert not load["disturbed"]


def test_a_contradiction_that_stays_is_uncertain_and_cannot_win(monkeypatch):
    rows, load, seconds = timed(monkeypatch, *[Outcome((1.0, 0.717), 0.332)] * 3)
    assert len(seconds) == 3
    assert rows[1]["ratio"] == pytest.approx(0.717)
    assert rows[1]["contradiction"] == pytest.approx([0.332, 0.717])
    assert load["disturbed"]
    assert "uncertain: 0.332 or 0.717" in render_ratio(rows[1])


def test_the_page_shows_intervals_and_reads_results_without():
    assert render_ratio({"ratio": 0.7, "ratio_interval": [0.69, 0.71]}) == "0.700<small>0.690 to 0.710</small>"
    assert render_ratio({"ratio": 0.7}) == "0.700"
    assert format_ratio({"ratio": 0.7, "ratio_interval": [0.69, 0.71]}) == "0.700x (0.690 to 0.710)"
    assert format_ratio({"ratio": 0.7}) == "0.700x"
    page = sample()
    page["trials"][0]["latency"]["ratio_interval"] = [0.44, 0.46]
    assert "0.450x (0.440 to 0.460) of the original" in chart_data(render_search_page(page))["figures"]["pareto"]["data"][1]["hovertext"][0]
