"""Comparisons with simulated clocks: interleaving, drop-out, budgets, drift, external load, noise."""

from contextlib import contextmanager
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest

from whet.backends import Load
from whet.measure import policy
from whet.measure.compare import LoadLog, Ranking, compare
from whet.measure.policy import ENGINES, LAYERS, PATIENCE, PRECISIONS, Block, Budget, Policy, Stage
from whet.measure.statistics import compute_confidence_interval, compute_noise, estimate_typical_time


def runner(seconds, calls=None, name=""):
    values = iter(seconds)

    def run():
        if calls is not None:
            calls.append(name)
        return next(values)

    return run


def engines(rounds, seconds=10.0):
    """The policy of whole engines with other limits."""
    return replace(ENGINES.with_seconds(seconds).with_rounds(rounds), attempts=1)


def test_a_clearly_slower_candidate_is_dropped_and_the_leader_continues():
    calls: list[str] = []
    found = compare([runner([1.0] * 20, calls, "a"), runner([1.6] * 20, calls, "b")], engines(10))
    assert [len(s) for s in found.samples] == [7, 1]  # 20 seconds for both, 2.6 a round
    assert calls[:4] == ["a", "b", "a", "b"]  # the first run of each is the warm-up
    assert found.survivors == [0]


def test_close_candidates_take_all_rounds_in_alternating_order():
    calls: list[str] = []
    found = compare([runner([1e-3] * 99, calls, "a"), runner([1.02e-3] * 99, calls, "b")], engines(6))
    assert [len(s) for s in found.samples] == [6, 6]
    assert calls[2:6] == ["a", "b", "b", "a"]


def test_one_slow_run_does_not_drop_a_candidate():
    found = compare([runner([1.0, 1.0] * 9), runner([1.0, 1.4, 1.0, 1.0, 1.0, 1.0])], engines(4, 4.0))
    assert [len(s) for s in found.samples] == [4, 4]


def test_an_interruption_of_a_short_run_does_not_drop_a_candidate():
    """Three ms of external activity during one run: observed on a busy host in about one of a hundred first runs."""
    found = compare([runner([1e-3] * 32), runner([1e-3, 4e-3, 4e-3, *[0.97e-3] * 29])], engines(30))
    assert [len(s) for s in found.samples] == [30, 30]


@pytest.mark.parametrize("rules", [ENGINES, LAYERS], ids=["engines", "layers"])
def test_a_candidate_dropped_in_a_fast_phase_is_corrected_for_drift(rules):
    """The machine is half as fast from the tenth run on; the slower candidate has been dropped by then and is scaled to the end."""
    clock = [1.0] * 10 + [2.0] * 40
    rules = replace(rules.with_rounds(30), drop_after_seconds=0.0, long=None, hopeless=(inf, inf))
    found = compare([runner([1e-4 * c for c in clock]), runner([1.7e-4 * c for c in clock])], rules)
    a, b = found.samples
    assert len(a) == 30 > len(b)
    assert b == pytest.approx([2 * 1.7e-4] * len(b))
    assert a[:2] + a[-2:] == pytest.approx([1e-4, 1e-4, 2e-4, 2e-4]), "samples of survivors stay as measured"
    assert found.runs[1] == pytest.approx([1.7e-4] * len(b))


def test_slow_candidates_take_the_fewest_rounds():
    found = compare([runner([50.0] * 9)], engines(30, 1.0))
    assert len(found.samples[0]) == ENGINES.stages[0].rounds[0] == 3


def test_a_budget_of_the_fastest_ignores_slower_candidates():
    rules = Policy(stages=(Stage(rounds=(1, 99), budget=Budget(0.02, "fastest")),))
    found = compare([runner([4e-3] * 99), runner([9.0] * 99)], rules)
    assert [len(s) for s in found.samples] == [5, 5]


def test_a_budget_of_the_comparison_counts_all_candidates():
    rules = Policy(stages=(Stage(rounds=(0, 99), budget=Budget(1.0, "comparison")),))
    assert len(compare([runner([0.1] * 99)] * 2, rules).samples[0]) == 5
    assert compare([runner([3.0] * 99)], rules).samples == [[]], "one round would exceed the budget"


def test_without_a_warm_up_the_first_round_determines_the_number_of_rounds():
    rules = Policy(stages=(Stage(rounds=(2, 99), budget=Budget(1.0, "comparison")),), warmup_rounds=0)
    assert len(compare([runner([0.125] * 99)] * 2, rules).samples[0]) == 4


def test_blocks_discard_their_first_runs_and_give_one_sample():
    rules = Policy(stages=(Stage(rounds=(2, 2)),), block=Block(seconds=3.0, most=50, discard=1))
    found = compare([runner([1.0, *[9.0, 1.0, 2.0, 6.0] * 2])], rules)
    assert found.samples == [[2.0, 2.0]]
    assert found.runs == [[1.0, 2.0, 6.0] * 2]


def test_a_candidate_that_fails_in_its_warm_up_is_left_out():
    def broken():
        raise ValueError("no kernel")

    found = compare([broken, runner([1.0] * 9)], engines(3), catch=(ValueError,))
    assert str(found.failures[0]) == "no kernel"
    assert [len(s) for s in found.samples] == [0, 3]
    with pytest.raises(ValueError, match="no kernel"):
        compare([broken], engines(3))


def machine_under_load(moments):
    """A `watch` whose measurements report external load of these CPU counts."""
    left = iter(moments)

    @contextmanager
    def watch():
        others = next(left, 0.0)
        yield SimpleNamespace(disturbed=others > 0, others=others)

    return watch


def test_a_disturbed_comparison_is_repeated_and_a_quiet_one_counts():
    loads = LoadLog()
    times = [2.0] * 4 + [1.0] * 4
    found = compare([runner(times)], replace(engines(3), attempts=2), watch=machine_under_load([1.0]), loads=loads)
    assert found.samples == [[1.0] * 3]
    assert (found.disturbed, found.attempts, len(loads.disturbed)) == (False, 2, 1)


def test_the_largest_load_is_described():
    assert LoadLog().describe("times may be off.") == ""
    loads = LoadLog([Load(0.5, 1.0), Load(2.5, 1.0, stolen=2.4), Load(1.0, 1.0)])
    who = "other guests of this machine's host took up to 2.5 CPUs while kernels were timed"
    assert loads.describe("times may be off.") == f"{who}; those measurements were repeated, but on a busy machine times may be off."


def test_disturbed_samples_are_pooled_and_the_lower_quartile_counts():
    times = [1.0, 9.0, 1.0, 9.0] * 2
    found = compare([runner(times)], replace(engines(3), attempts=2), watch=machine_under_load([1.0, 1.0]))
    assert found.samples == [[9.0, 1.0, 9.0] * 2]
    assert found.disturbed
    assert found.seconds(0) == 1.0 < estimate_typical_time(found.samples[0])


def test_without_pooling_the_least_disturbed_attempt_counts():
    times = [3.0] * 4 + [1.0] * 4 + [2.0] * 4
    found = compare([runner(times)], replace(engines(3), attempts=3, pool=False), watch=machine_under_load([3.0, 1.0, 2.0]))
    assert found.samples == [[1.0] * 3]
    assert (found.attempts, found.load.others) == (3, 1.0)


def test_a_busy_machine_exhausts_the_patience_of_a_build():
    loads, attempts = LoadLog(), 0
    for _ in range(4):
        attempts += compare([runner([1.0] * 999)], replace(engines(3), attempts=3), watch=machine_under_load([1.0] * 9), loads=loads).attempts
    assert attempts == len(loads.disturbed) == PATIENCE + 2, "the first that exceeds the patience, and one per comparison after that"


@pytest.mark.parametrize(("slow", "busy", "expected"), [(1.0, 0, 1), (1.0, 2, 1), (0.019, 0, 2), (0.021, 0, 1)])
def test_a_run_too_slow_to_be_disturbed_is_not_repeated(slow, busy, expected):
    """References may take a second when kernels take half a millisecond: one run is enough. Below 20 ms another process may have used the CPU."""
    calls: list[str] = []
    found = compare([runner([slow] * 9, calls, "slow"), runner([5e-4] * 99)], LAYERS.with_rounds(4), watch=machine_under_load([1.0] * busy))
    assert calls.count("slow") == expected
    assert found.samples[0] == pytest.approx([slow]), "its time is recorded nevertheless"
    assert len(found.samples[1]) == 4


@pytest.mark.parametrize(("slow", "expected"), [(0.4, 2), (0.7, 1)])
def test_long_candidates_are_dropped_after_their_warm_up_at_four_times_the_fastest(slow, expected):
    """A disturbance of milliseconds may explain it; then the next attempt times it again."""
    calls: list[str] = []
    rules = LAYERS.with_rounds(4)
    compare([runner([slow] * 9, calls, "slow"), runner([0.03] * 99), runner([0.06] * 99)], rules, watch=machine_under_load([1.0]))
    assert calls.count("slow") == expected


def test_times_in_order_are_taken_back_to_back_after_the_warm_up():
    orders = []

    def run_in_order(order):
        orders.append(list(order))
        return [1.0 + i for i in order]

    found = compare([runner([5.0])] * 1 + [runner([5.0])], Policy(stages=(Stage(rounds=(2, 2)),)), run_in_order=run_in_order)
    assert orders == [[0, 1], [1, 0]]
    assert found.samples == [[1.0, 1.0], [2.0, 2.0]]


def in_network(*seconds, rules=policy.IN_NETWORK):
    """A comparison of kernels in the network whose replays take these times; an iterator or a value for each."""
    clocks = [iter(s) if hasattr(s, "__iter__") else iter([s] * 999) for s in seconds]
    return compare([lambda: 0.0] * len(clocks), rules, run_in_order=lambda order: [next(clocks[i]) for i in order])


def test_stages_narrow_the_candidates_and_the_incumbent_stays():
    found = in_network(1.03e-3, 1e-3, 1.02e-3, 1.1e-3)
    assert found.survivors == [0, 1]
    assert [len(s) for s in found.samples] == [24, 24, 12, 4]
    assert found.select([0, found.fastest(found.survivors)]) == 1


def test_an_undecided_comparison_goes_on_and_keeps_the_incumbent():
    noise = [1e-3 * (1 + 0.004 * (k * 7 % 11) / 11) for k in range(999)]
    ahead = [s * 0.9995 for s in noise[3:]]
    found = in_network(noise, ahead)
    assert len(found.samples[0]) == 4 + 8 + 3 * 12, "all permitted rounds while undecided"
    assert found.select([0, found.fastest(found.survivors)]) == 0


def test_a_gain_below_the_resolution_of_a_replay_changes_nothing():
    found = in_network(1e-3, 0.9995e-3)
    assert found.select([0, 1]) == 0
    found = in_network(1e-3, 0.999e-3)
    assert found.select([0, 1]) == 1


def test_the_first_candidate_within_the_noise_of_the_fastest_is_selected():
    def ranking(*samples):
        return Ranking(PRECISIONS, [list(s) for s in samples], [], list(range(len(samples))))

    steady = ranking([10.0] * 4, [9.0] * 4, [9.02] * 4)
    assert steady.select([0, 1, 2]) == 1, "a difference of 10 % is not noise"
    assert steady.select([2, 1, 0]) == 2, "a difference of 0.2 % is"
    assert steady.select([0, 2]) == 2, "among those that may be selected"
    scattered = ranking([8.0, 9.1, 9.2, 12.0], [8.0, 9.0, 9.0, 12.0])
    assert scattered.select([0, 1]) == 0
    assert scattered.seconds(0) == pytest.approx(9.15)
    assert ranking([9.2] * 4, [8.0, 9.0, 9.0, 12.0]).select([0, 1]) == 1, "noisy times count as equal within at most 2 %"


def test_a_common_change_of_the_clock_hides_no_difference():
    """Both vary by half of their time and differ by 7 % in every round: their quartiles overlap."""
    clock = [1.0, 2.0] * 15
    found = Ranking(ENGINES, [[1.07 * c for c in clock], clock], [], [0, 1])
    assert found.spread(0) > 0.07 * found.seconds(1)
    assert found.select([0, 1]) == 1
    assert found.ratios(0, 1) == pytest.approx([1.07] * 30)


def test_candidates_with_different_rounds_are_judged_by_their_spread():
    assert compute_noise([1.02, 1.03, 1.02], [1.0, 1.1] * 15) == pytest.approx(0.05)


def test_confidence_intervals_narrow_with_samples():
    few, many = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 0.9, 1.0] * 16
    (a, b), (c, d) = compute_confidence_interval(few), compute_confidence_interval(many)
    assert a < c < 1.0 < d < b
    assert (b - a) / (d - c) == pytest.approx(4, rel=0.3)


def test_confidence_intervals_stay_within_the_samples():
    """The quartiles of few samples with one interruption would give a latency below zero."""
    low, high = compute_confidence_interval([1.0, 1.1, 9.0, 1.2, 8.0, 1.05, 7.0])
    assert low == 1.0
    assert 1.2 < high <= 9.0
    low, high = compute_confidence_interval([1.0, 20.0, 2.0, 18.0])
    assert low == 0.0
    assert high > 20.0, "four samples do not bound the median with 95 %"
    assert compute_confidence_interval([-1.0, 9.0, 5.0])[0] < -1.0, "differences may be negative"


def test_interrupted_samples_do_not_count_under_load():
    samples = [1.0, 1.1, 5.0, 6.0, 7.0, 1.05, 8.0]
    assert estimate_typical_time(samples, disturbed=False) == 5.0
    assert estimate_typical_time(samples, disturbed=True) == 1.05
