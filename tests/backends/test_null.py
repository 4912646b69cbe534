"""The null machine: deterministic times, no memory, no results."""

import dataclasses
import sys
from pathlib import Path

import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build, plan_digest
from whet.engine.check import check_plan
from whet.runtime import bind

sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
from nets import residual

NULL = BuildConfig(backend="null", timing_cache="")


def test_the_same_engine_every_time_and_in_every_listing_of_levels():
    first = build(residual(), NULL)
    check_plan(first)
    assert plan_digest(first) == plan_digest(build(residual(), NULL))
    assert build(residual(), NULL).report.candidates == first.report.candidates
    assert plan_digest(first) != plan_digest(build(residual(channels=32), NULL))


def test_blocked_formats_win_for_multiples_of_sixteen_channels():
    formats = [c.outputs[0][0] for c in build(residual(channels=16), NULL).choices.values() if c.tactic == "null/conv"]
    assert set(formats) == {"nChw16c"}
    plan = build(residual(channels=20), NULL)
    assert {c.outputs[0][0] for c in plan.choices.values() if c.tactic == "null/conv"} == {"nhwc"}
    rows = plan.report.candidates[next(n for n in plan.choices if n.startswith("conv"))]
    assert any("sixteens" in r.reason for r in rows)


def test_sums_are_in_place_without_other_readers():
    plan = build(residual(), NULL)
    summed = [layer for layer in plan.network.layers if "add" in layer.sources]
    assert plan.choices[summed[0].name].inplace
    a = plan.arenas[0].offsets
    i, o = plan.choices[summed[0].name].inplace[0]
    assert a[summed[0].inputs[i].name] == a[summed[0].outputs[o].name]


def test_it_plans_but_does_not_run():
    plan = build(residual(), NULL)
    bound = bind(plan, get_backend("null"))
    assert bound.seconds(3) == [pytest.approx(sum(bound.run_timed()))] * 3
    assert plan.probe == {}
    assert plan.report.verification is None


def test_times_are_the_cost_table_not_the_clock():
    a = build(residual(), NULL).report.candidates
    b = build(residual(), dataclasses.replace(NULL, avg_timing=1)).report.candidates
    assert a == b
