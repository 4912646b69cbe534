"""Whole engines in turns: who leaves, and how many turns there are."""

import pytest

from whet.builder.precision.comparison import standing
from whet.measure.compare import FEWEST, race


def runner(seconds, calls, name):
    values = iter(seconds)

    def run():
        calls.append(name)
        return next(values)

    return run


def test_one_that_is_clearly_behind_leaves_and_the_leader_goes_on():
    calls: list[str] = []
    a, b = race([runner([1.0] * 20, calls, "a"), runner([1.6] * 20, calls, "b")], 10.0, 10)
    assert (len(a), len(b)) == (7, 1)  # 20 seconds for both, 2.6 a turn
    assert calls[:4] == ["a", "b", "a", "b"]  # the first of each is the one that does not count


def test_those_that_are_near_take_all_turns_forwards_and_backwards():
    calls: list[str] = []
    a, b = race([runner([1e-3] * 99, calls, "a"), runner([1.02e-3] * 99, calls, "b")], 10.0, 6)
    assert (len(a), len(b)) == (6, 6)
    assert calls[2:6] == ["a", "b", "b", "a"]


def test_one_slow_run_is_no_reason_to_leave():
    a, b = race([runner([1.0, 1.0] * 9, [], "a"), runner([1.0, 1.4, 1.0, 1.0, 1.0, 1.0], [], "b")], 4.0, 4)
    assert len(b) == len(a) == 4


def test_an_interruption_of_a_short_run_is_no_reason_to_leave():
    """Three ms in which the machine did something else, at a run of one: seen on a busy host about once in a hundred first runs."""
    a, b = race([runner([1e-3] * 32, [], "a"), runner([1e-3, 4e-3, 4e-3, *[0.97e-3] * 29], [], "b")], 10.0, 30)
    assert len(a) == len(b) == 30


def test_one_that_left_in_a_fast_moment_does_not_pass_those_that_went_on():
    """The machine is half as fast from the tenth turn on; one that takes a third more has left by then, and is told as it would be now."""
    pace = [1.0] * 10 + [2.0] * 40
    a, b = race([runner([4e-3 * p for p in pace], [], "a"), runner([5.4e-3 * p for p in pace], [], "b")], 10.0, 30)
    assert (len(a), len(b)) == (30, 4)
    assert b == pytest.approx([2 * 5.4e-3] * 4)
    assert a[:2] + a[-2:] == pytest.approx([4e-3, 4e-3, 8e-3, 8e-3])  # measured, not told


def test_slow_things_have_few_turns():
    (a,) = race([runner([50.0] * 9, [], "a")], 1.0, 30)
    assert len(a) == FEWEST


def test_the_first_that_noise_cannot_tell_from_the_fastest_is_kept():
    steady = [[10.0, 10.0, 10.0, 10.0], [9.0, 9.0, 9.0, 9.0], [9.02, 9.02, 9.02, 9.02]]
    assert standing(steady, [0, 1, 2]).kept == 1, "a tenth less is no noise"
    assert standing(steady, [2, 1, 0]).kept == 2, "a five-hundredth is"
    assert standing(steady, [0, 2]).kept == 2, "of those that may be kept"
    scattered = [[8.0, 9.1, 9.2, 12.0], [8.0, 9.0, 9.0, 12.0]]
    found = standing(scattered, [0, 1])
    assert found.kept == 0, "times that scatter count as equal within a fiftieth"
    assert found.ms == pytest.approx([9150.0, 9000.0])
    assert standing([[9.2, 9.2, 9.2, 9.2], scattered[1]], [0, 1]).kept == 1, "both have to scatter"
