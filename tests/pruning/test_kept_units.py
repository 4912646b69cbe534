"""Which units a choice keeps: the ones with the highest scores, whatever the order of the channels."""

import numpy as np

from whet.network import Network, parse_type
from whet.pruning import groups, importance
from whet.pruning.costs import make_flop_costs
from whet.pruning.knapsack import choose_within

RNG = np.random.default_rng(5)


def network(gammas: np.ndarray | None = None) -> Network:
    """Two convolutions; the first has 16 channels, optionally with a batch norm of the given scales."""
    net = Network("two")
    x = net.add_input("x", parse_type("f32[1,3,8,8]"))
    strength = RNG.permutation(np.geomspace(0.01, 1, 16)).astype(np.float32)
    w = RNG.choice([-1.0, 1.0], (16, 3, 3, 3)).astype(np.float32) * strength[:, None, None, None]
    a = net.add("Conv", x, net.constant(w, "w1"), pads=(1,) * 4, name="first")
    if gammas is not None:
        zero, one = net.constant(np.zeros(16, np.float32), "zero"), net.constant(np.ones(16, np.float32), "one")
        a = net.add("BatchNormalization", a, net.constant(gammas, "gamma"), zero, zero, one, name="norm")
    a = net.add("Relu", a, name="relu")
    net.mark_output(net.add("Conv", a, net.constant(np.ones((4, 16, 1, 1), np.float32), "w2"), name="second"), "y")
    return net


def test_a_budget_keeps_the_units_with_the_highest_scores():
    net = network()
    found = groups(net)
    scores = importance(found, "l1")
    costs = make_flop_costs(net, found, [])
    choice = choose_within(found, [], scores, costs, 0.5 * costs.total({}), multiple=2)
    (kept,) = (units for units in choice.kept.values() if len(units) < 16)
    (name,) = (g for g, units in choice.kept.items() if len(units) < 16)
    removed = np.setdiff1d(np.arange(16), kept)
    assert scores[name][kept].min() > scores[name][removed].max()


def test_bn_scale_reads_the_magnitude_of_gamma():
    gammas = RNG.permutation(np.concatenate([-np.linspace(1, 2, 8), np.linspace(0.1, 0.2, 8)])).astype(np.float32)
    net = network(gammas)
    found = groups(net)
    (scores,) = (s for s in importance(found, "bn_scale", net=net).values() if s.size == 16)
    assert np.array_equal(np.argsort(scores), np.argsort(np.abs(gammas)))
