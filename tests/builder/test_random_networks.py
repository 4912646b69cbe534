"""Random networks build at every optimization level, and their engines match the reference."""

import sys
from pathlib import Path

import numpy as np
import pytest

from support.selection import with_long_variants
from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.engine.check import check_plan
from whet.ops import run_network
from whet.runtime import bind

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))
from random_networks import SIZES, feeds, random_network, same


def config_for(net, level):
    shapes = {k: v.shape for k, v in feeds(net).items()}
    low = {t.name: tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
    profiles = () if all(t.type.static for t in net.inputs) else ((low, shapes, shapes),)
    return BuildConfig(optimization_level=level, timing_cache="", avg_timing=1, whole_engines=2, profiles=profiles)


@pytest.mark.parametrize(("seed", "level"), [*with_long_variants([(seed, level) for level in (0, 3) for seed in range(12)])])
def test_engines_of_random_networks_match_the_reference(seed, level):
    net = random_network(seed)
    plan = build(net, config_for(net, level))
    check_plan(plan)
    feed = feeds(net, seed + 1)
    bound = bind(plan, get_backend("cpu"), {k: v.shape for k, v in feed.items()})
    bound.feed(feed)
    bound.run()
    got = bound.fetch()
    with np.errstate(all="ignore"):
        want = run_network(net, feed)
    for a, b in zip(net.outputs, plan.network.outputs, strict=True):
        same(want[a.name], got[b.name], 2e-5)


@pytest.mark.parametrize("seed", range(12, 30))
def test_random_networks_plan_on_the_null_machine(seed):
    net = random_network(seed)
    plan = build(net, BuildConfig(backend="null", timing_cache="", profiles=config_for(net, 0).profiles))
    check_plan(plan)
    assert SIZES["N"] >= 1
