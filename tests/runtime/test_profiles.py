"""Selection of the profile for given shapes."""

import pytest

from handmade import conv_net, make_plan
from whet.engine import Profile
from whet.runtime.profiles import nearest_profile, takes


def profile(low, opt, high):
    return Profile({"x": tuple((n, 3, 8, 8) for n in (low, opt, high))})


def chosen(n, *profiles):
    plan = make_plan(conv_net())
    plan.profiles = list(profiles)
    return nearest_profile(plan, {"x": (n, 3, 8, 8)})


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
