"""Selection of the profile for given shapes."""

import warnings

import numpy as np
import pytest

from handmade import conv_net, make_plan
from whet.builder import BuildConfig, build
from whet.engine import Profile
from whet.network import Network, parse_type
from whet.runtime import EngineWarning, Runtime
from whet.runtime.profiles import find_nearest_profile, takes


def profile(low, opt, high):
    return Profile({"x": tuple((n, 3, 8, 8) for n in (low, opt, high))})


def chosen(n, *profiles):
    plan = make_plan(conv_net())
    plan.profiles = list(profiles)
    return find_nearest_profile(plan, {"x": (n, 3, 8, 8)})


def test_the_nearest_fitting_profile_is_selected():
    apart = profile(1, 1, 1), profile(2, 8, 8)
    assert [chosen(n, *apart) for n in (1, 2, 8, 9)] == [0, 1, 1, None]
    over_each_other = profile(1, 1, 8), profile(1, 8, 8)
    assert [chosen(n, *over_each_other) for n in (1, 2, 3, 8)] == [0, 0, 1, 1], "by ratio: 2 is nearer to 1 than to 8, 3 is nearer to 8"
    assert chosen(4, profile(1, 4, 8), profile(1, 4, 8)) == 0, "ties select the first"
    assert chosen(2) == 0, "an engine without profiles accepts what its network accepts"


@pytest.mark.parametrize(("shape", "fits"), [((4, 3, 8, 8), True), ((9, 3, 8, 8), False), ((4, 3, 8), False)])
def test_takes(shape, fits):
    assert takes(profile(1, 4, 8), {"x": shape}) == fits
    assert takes(profile(1, 4, 8), {"y": shape})


def test_a_warning_names_shapes_far_from_those_of_the_tuning():
    net = Network("far")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[N,4]"))), "y")
    profile = ({"x": (1, 4)}, {"x": (2, 4)}, {"x": (80, 4)})
    engine = Runtime().load(build(net, BuildConfig(profiles=(profile,), timing_cache="", optimization_level=0, threads=1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(np.ones((64, 4), np.float32))
    with pytest.warns(EngineWarning, match=r"x: 65x4 differs by a factor of 32.5 from what profile 0 was tuned for \(x: 2x4\)"):
        engine(np.ones((65, 4), np.float32))
    assert len(engine.warnings) == 1
    engine(np.ones((80, 4), np.float32))
    assert len(engine.warnings) == 1
