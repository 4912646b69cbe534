"""Verdicts of docs/claims.md follow from the rows, with the measure and the bar."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def claims():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import claims

        return claims


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("zeros", [{"ms": 10.0}, {"ms": 9.95}], "no: 0.5 % less time"),
        ("zeros", [{"ms": 10.0}, {"ms": 8.0}], "yes: 20.0 % less time (bar 10 % less); medians only"),
        ("zeros", [{"ms": 10.0}, {"ms": 10.1}], "no: 1.0 % more time"),
        ("zeros", [{"ms": 10.0}, {"ms": 8.0, "interval": [0.7, 0.89]}], "yes: 20.0 % less time (bar 10 % less)"),
        ("zeros", [{"ms": 10.0}, {"ms": 8.0, "interval": [0.7, 0.91]}], "undecided: 20.0 % less"),
        ("zeros", [{"ms": 10.0}, {"ms": 9.5, "interval": [0.91, 0.97]}], "no: 5.0 % less"),
        ("macs_are_not_time", [{"FLOPs x": 2.0, "time x": 1.9, "interval": [1.7, 2.0]}], "undecided: the time falls by 95 %"),
        ("macs_are_not_time", [{"FLOPs x": 2.0, "time x": 1.9, "interval": [1.81, 2.0]}], "yes: the time falls by 95 %"),
        ("macs_are_not_time", [{"FLOPs x": 2.0, "time x": 1.7, "interval": [1.6, 1.79]}], "no: the time falls by 85 %"),
        ("one_by_one", [{"x": 1.4, "interval": [1.3, 1.5]}, {"x": 1.9, "interval": [1.8, 2.1]}], "undecided: 1.4 to 1.9"),
        ("one_by_one", [{"x": 2.1, "interval": [2.0, 2.2]}], "no: 2.1 to 2.1"),
        ("predicted", [{"measured": 0.58, "predicted": 0.5, "FLOPs": 0.5, "branches removed": 0, "interval": [0.5, 0.61]}], "undecided: off by"),
        ("predicted", [{"measured": 0.58, "predicted": 0.5, "FLOPs": 0.5, "branches removed": 0, "interval": [0.56, 0.59]}], "yes: off by up to 8 %"),
        ("predicted", [{"measured": 0.65, "predicted": 0.5, "FLOPs": 0.5, "branches removed": 0, "interval": [0.61, 0.7]}], "no: off by up to 15 %"),
        ("predicted", [{"measured": 0.65, "predicted": 0.5, "FLOPs": 0.5, "branches removed": 0, "interval": [0.3, 0.7]}], "undecided: off by"),
        ("latency_or_flops", [{"ms": 2.0, "importance lost": 100}, {"ms": 2.0, "importance lost": 90, "interval": [0.9, 1.1]}], "undecided: 10.0 %"),
        ("latency_or_flops", [{"ms": 2.0, "importance lost": 100}, {"ms": 2.0, "importance lost": 98, "interval": [0.9, 1.1]}], "no: 2.0 %"),
        ("macs_are_not_time", [{"FLOPs x": 2.0, "time x": 1.9}, {"FLOPs x": 2.0, "time x": 1.5}], "no: the time falls by 75 %"),
        ("macs_are_not_time", [{"FLOPs x": 1.0, "time x": 1.0}], "no case: nothing was cut"),
        ("one_by_one", [{"x": 1.4}, {"x": 1.9}], "yes: 1.4 to 1.9 times the time"),
        ("one_by_one", [{"x": 1.4}, {"x": 2.1}], "no: 1.4 to 2.1 times the time"),
        ("predicted", [{"measured": 0.62, "predicted": 0.5, "FLOPs": 0.5, "branches removed": 0}], "no: off by up to 12 %"),
        ("predicted", [{"measured": 1.0, "predicted": 1.0, "FLOPs": 1.0, "branches removed": 0}], "no case: nothing was cut"),
        ("latency_or_flops", [{"ms": 2.0, "importance lost": 100}, {"ms": 1.9, "importance lost": 90}], "yes: 10.0 % less importance lost at 0.95"),
        ("latency_or_flops", [{"ms": 2.0, "importance lost": 100}, {"ms": 2.2, "importance lost": 90}], "no: 10.0 % less"),
        ("latency_or_flops", [{"ms": 2.0, "importance lost": 100}, {"ms": 2.0, "importance lost": 0}], "no case"),
        ("knee", [{"ratio": 0.0}, {"ratio": 0.3, "points lost a tenth": 4.0}, {"ratio": 0.6, "points lost a tenth": 6.0}], "yes: more than 5 points"),
        ("knee", [{"ratio": 0.0}, {"ratio": 0.3, "points lost a tenth": 4.0}], "no: no knee up to 30%"),
        ("odd_channels", [{"channels": c, "ms": ms} for c, ms in ((61, 1.2), (63, 1.0), (64, 1.0))], "yes: 61 or 63 channels take up to 1.200"),
        (
            "odd_channels",
            [{"channels": c, "ms": ms, "interval": i} for c, ms, i in ((61, 1.06, [1.0, 1.08]), (63, 1.0, [0.9, 1.01]), (64, 1.0, [1.0, 1.0]))],
            "undecided: 61 or 63 channels take up to 1.060",
        ),
        ("odd_channels", [{"channels": c, "ms": ms} for c, ms in ((61, 1.049), (63, 1.0), (64, 1.0))], "no: 61 or 63 channels take up to 1.049"),
    ],
)
def test_verdicts_follow_from_rows(claims, name, rows, expected):
    assert claims.verdict_of(name, {"rows": rows, "verdict": "stored"}).startswith(expected)


def test_intervals_are_of_the_rounds_that_two_networks_share(claims):
    bench = claims.Bench("null", True, "")
    bench.samples = [[2.0] * 4 + [2.2] * 5 + [9.0], [1.0] * 9, [1.0] * 5]
    assert bench.interval(0, 1) == pytest.approx([2.0, 2.2])
    assert bench.interval(0, 2) is None


def test_every_claim_is_judged_by_its_rows_or_says_why_not(claims):
    assert set(claims.CLAIMS) - set(claims.VERDICTS) == {"fusion_and_memory"}
    assert claims.verdict_of("fusion_and_memory", {"rows": [], "verdict": "stored"}) == "stored"


def test_the_page_has_the_verdicts_of_the_stored_rows(claims, tmp_path):
    claims.write(tmp_path / "claims.md")
    assert (tmp_path / "claims.md").read_text() == (BENCHMARKS.parent / "docs" / "claims.md").read_text(), "run benchmarks/claims.py --write"
