"""Selections in several steps: the same target, kept units of the original, scores of the recovered network."""

import numpy as np
import pytest
from test_floor import residual, samples

from whet.errors import PruneError
from whet.ops import run_network
from whet.pruning import PruneConfig, Target, count_flops, cut, groups, prune
from whet.pruning.knapsack import Choice
from whet.pruning.recovery import RecoveryConfig
from whet.pruning.stepwise import choose_stepwise, list_remaining_groups

HALF = {"target": Target("flops", ratio=0.4), "multiple": 1, "floor": False}


def test_steps_reach_the_target_and_refer_to_the_original():
    net = residual(blocks=4)
    got = prune(net, PruneConfig(**HALF, steps=3), samples(32))
    assert 0.3 * count_flops(net) < count_flops(got.network) <= 0.4 * count_flops(net)
    again = cut(net, got.recipe.kept(), removed=got.recipe.removed)
    x = samples(4, seed=9)
    np.testing.assert_array_equal(run_network(again, x)["out"], run_network(got.cut, x)["out"])
    assert got.recipe.about["steps"] == 3
    assert got.report.known_gap is None


def test_each_step_scores_the_recovered_network():
    """The second selection sees weights that were refitted after the first cut."""
    net = residual(blocks=2)
    seen = []

    def select(present, here, progress):
        seen.append((present, [g.size for g in here], progress))
        return Choice({here[0].name: np.arange(0, here[0].size, 2)}, (), 0, 0, 0)

    found = groups(net)
    kept, removed = choose_stepwise(net, found, select, 2, samples(32), RecoveryConfig())
    assert [p for _, _, p in seen] == [0.5, 1.0]
    assert seen[0][0] is net
    first = found[0].name
    assert kept[first].tolist() == [0, 4, 8, 12]  # every second of every second
    assert seen[1][1][0] == 8
    plain = cut(net, {first: np.arange(0, 16, 2)}, found)
    changed = [n for n, t in seen[1][0].constants.items() if not np.array_equal(t.array(), plain.constants[n].array())]
    assert changed
    assert removed == ()


def test_groups_of_another_size_are_left_out():
    net = residual(blocks=2)
    found = groups(net)
    small = cut(net, {found[0].name: np.arange(8)}, found)
    assert [g.name for g in list_remaining_groups(found, small, {found[0].name: 8})] == [g.name for g in found]
    assert found[0].name not in [g.name for g in list_remaining_groups(found, small, {})]


def test_steps_without_a_counted_target_or_data_are_refused():
    net = residual()
    for config, data in ((PruneConfig(steps=2), samples(8)), (PruneConfig(**HALF, steps=2), None)):
        with pytest.raises(PruneError, match="several steps need a target"):
            prune(net, config, data)
