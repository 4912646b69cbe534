"""Small rules of pruning against what their descriptions say, on small cases."""

import time

import numpy as np
import pytest

from whet.backends import Load
from whet.errors import PruneError
from whet.network import parse_network
from whet.ops import run_layer, run_network
from whet.pruning import branches, busy, groups
from whet.pruning._data import check_data
from whet.pruning._vjp import backpropagate
from whet.pruning.costs import Costs
from whet.pruning.cut import cut
from whet.pruning.floor import reweight_scores
from whet.pruning.permute import reorder
from whet.pruning.reconstruction import MOST_UNKNOWNS, compute_reconstruction_scores, is_contracted
from whet.pruning.recovery import RecoveryConfig, recover
from whet.pruning.unstructured import compute_zero_fraction, zero_smallest


@pytest.mark.parametrize("kind", ["f2", "f4", "f8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_data_with_a_value_that_is_not_finite_names_the_sample(kind, value):
    data = np.ones((5, 3, 2), kind)
    check_data({"x": data})
    data[3, 1, 0] = value
    with pytest.raises(PruneError, match=r"sample 3 of 'x' holds NaN or infinite values"):
        check_data({"a": np.arange(5), "x": data})
    check_data({"tokens": np.arange(5), "mask": np.ones((5, 2), bool), "small": np.zeros(5, "u1")})


def test_the_smallest_weights_of_matrices_and_filters_become_zero():
    net = parse_network("""
        network n source
        in %x: f32[1,2,2,2]
        const %w: f32[3,2,1,1] = [0.5, -0.1, 0.3, 4.0, -0.2, 1.0]
        const %b: f32[3] = [0.01, 0.02, 0.03]
        const %v: f32[12,1] = [1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0, 9.0, -10.0, 11.0, -12.0]
        %a = Conv(%x, %w, %b)
        %f = Flatten(%a)
        %y = Gemm(%f, %v)
        out %y
        """)
    half = zero_smallest(net, 0.5)
    np.testing.assert_allclose(half.constants["w"].array().reshape(-1), np.array([0.5, 0, 0, 4, 0, 1], "f4"))
    assert half.constants["v"].array().reshape(-1).tolist() == [0] * 6 + [7, -8, 9, -10, 11, -12]
    assert half.constants["b"].array().tolist() == net.constants["b"].array().tolist()
    assert compute_zero_fraction(half) == 9 / 18
    assert (compute_zero_fraction(zero_smallest(net, 0.0)), compute_zero_fraction(zero_smallest(net, 1.0))) == (0.0, 1.0)
    assert compute_zero_fraction(net) == 0.0
    for wrong in (-0.1, 1.1):
        with pytest.raises(PruneError, match="from 0 to 1"):
            zero_smallest(net, wrong)


def test_trials_scale_the_scores_of_a_group_by_one_factor_from_a_half_to_two():
    scores = {f"g{i}": np.arange(1.0, 5.0) * (i + 1) for i in range(200)}
    assert reweight_scores(scores, 3, 0) is scores
    got = reweight_scores(scores, 3, 1)
    factors = []
    for name, v in scores.items():
        ratios = got[name] / v
        np.testing.assert_allclose(ratios, ratios[0])
        factors.append(ratios[0])
    assert 0.5 <= min(factors) < 0.55
    assert 1.8 < max(factors) <= 2.0
    assert np.isclose(np.median(factors), 1.0, atol=0.25)  # as often smaller as larger
    assert {n: v.tolist() for n, v in reweight_scores(scores, 3, 1).items()} == {n: v.tolist() for n, v in got.items()}
    assert got["g0"].tolist() != reweight_scores(scores, 3, 2)["g0"].tolist() != reweight_scores(scores, 4, 1)["g0"].tolist()


def test_the_total_cost_is_that_of_remaining_items_and_of_what_removed_branches_leave():
    prices = {"a": 1.0, "b": 10.0, "c": 100.0}
    of = {"a": ("g",), "b": (), "c": ("g",)}
    costs = Costs("channels", lambda name, w: prices[name] * (w.get("g", 2) if of[name] else 2), of, {"block": frozenset({"b"})})
    costs.added["block"] = 0.5
    assert costs.total({}) == 222
    assert costs.total({"g": 1}) == 121
    assert costs.total({}, ["block"]) == 202.5
    assert costs.left(["block"]) == ["a", "c"]


CONTRACTIONS = [
    ("Conv(%x, %w)", "1,8,4,4", "3,8,3,3", 1, True),
    ("Conv(%x, %w)", "1,8,4,4", "3,8,3,3", 2, False),
    ("Conv(%x, %w, group=2)", "1,8,4,4", "4,4,3,3", 1, False),
    ("Conv(%x, %w)", "1,1000,4,4", "3,1000,3,3", 1, False),  # its Gram matrix would be too large
    ("Conv(%x, %w)", f"1,{MOST_UNKNOWNS},1,1", f"1,{MOST_UNKNOWNS},1,1", 1, True),  # the largest one
    ("Conv(%x, %w)", f"1,{MOST_UNKNOWNS + 1},1,1", f"1,{MOST_UNKNOWNS + 1},1,1", 1, False),
    ("Gemm(%x, %w)", f"1,{MOST_UNKNOWNS}", f"{MOST_UNKNOWNS},1", 1, True),
    ("Gemm(%x, %w)", f"1,{MOST_UNKNOWNS + 1}", f"{MOST_UNKNOWNS + 1},1", 1, False),
    ("Gemm(%x, %w)", "5,8", "8,3", 1, True),
    ("Gemm(%x, %w)", "5,8", "8,3", 0, False),
    ("Gemm(%x, %w, transA=1)", "8,5", "8,3", 1, False),
    ("MatMul(%x, %w)", "2,5,8", "8,3", 2, True),
    ("MatMul(%x, %w)", "2,5,8", "8,3", 1, False),
    ("MatMul(%x, %w)", "2,5,8", "2,8,3", 2, False),
    ("Mul(%x, %w)", "2,5,8", "8", 2, False),
    ("Relu(%x)", "5,8", "8,3", 1, False),
]


@pytest.mark.parametrize(("text", "x", "w", "axis", "contracts"), CONTRACTIONS)
def test_products_that_a_fit_can_be_made_for(text, x, w, axis, contracts):
    used = "" if "%w" in text else "%z = Add(%w, %w)\n"
    net = parse_network(f"network n source\nin %x: f32[{x}]\nconst %w: f32[{w}] = seed(1)\n{used}%y = {text}\nout %y")
    assert is_contracted(net.layers[-1], axis) == contracts
    if "MatMul" in text:
        other = parse_network(f"network n source\nin %x: f32[{x}]\nin %w: f32[{w}]\n%y = {text}\nout %y")
        assert not is_contracted(other.layers[-1], axis)


def test_channels_that_are_always_zero_have_finite_scores_and_go_first():
    """A depthwise convolution reads them: their energy is a share of a sum, which is zero if all channels are."""
    for alive in (0, 3):
        net = parse_network("""
            network n source
            in %x: f32[N,2,6,6]
            const %w: f32[8,2,3,3] = seed(1)
            const %b: f32[8] = [-90.0, -90.0, -90.0, -90.0, -90.0, -90.0, -90.0, -90.0]
            const %d: f32[8,1,3,3] = seed(2)
            const %v: f32[4,8,1,1] = seed(3)
            %a = Conv(%x, %w, %b) from "a"
            %r = Relu(%a) from "r"
            %s = Conv(%r, %d, group=8) from "d"
            %y = Conv(%s, %v) from "y"
            out %y
            """)
        bias = net.constants["b"].array().copy()
        bias[:alive] = 0
        net.constants["b"].weight = type(net.constants["b"].weight)(bias, net.constants["b"].weight.origin)
        data = {"x": np.random.default_rng(0).standard_normal((4, 2, 6, 6)).astype("f4")}
        found = groups(net)
        (scores,) = [v for n, v in compute_reconstruction_scores(net, found, branches(net), data).items() if len(v) == 8]
        assert np.isfinite(scores).all()
        assert set(np.argsort(scores, kind="stable")[: 8 - alive]) == set(range(alive, 8))
        assert not alive or scores[:3].min() > 100 * scores[3:].max()


def test_a_reordered_network_computes_the_same():
    net = parse_network("""
        network n source
        in %x: f32[2,3,5,5]
        const %w: f32[6,3,3,3] = seed(1)
        const %b: f32[6] = seed(2)
        const %v: f32[4,6,1,1] = seed(3)
        %a = Conv(%x, %w, %b) from "a"
        %r = Relu(%a) from "r"
        %y = Conv(%r, %v) from "y"
        out %y
        """)
    (g,) = groups(net)
    order = np.array([3, 1, 5, 0, 4, 2])
    made = reorder(net, {g.name: order})
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 5, 5)).astype("f4")}
    np.testing.assert_allclose(run_network(made, x)[made.outputs[0].name], run_network(net, x)[net.outputs[0].name], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(made.constants["w"].array(), net.constants["w"].array()[order])
    np.testing.assert_array_equal(made.constants["v"].array(), net.constants["v"].array()[:, order])


def test_the_default_ridge_keeps_a_fit_of_well_posed_data_close():
    """With more rows than unknowns, the fit gives back most of what a cut lost; ten times the regularization would not."""
    rng = np.random.default_rng(0)
    net = parse_network("""
        network n source
        in %x: f32[N,8]
        const %w: f32[8,16] = seed(1)
        const %v: f32[16,8] = seed(2)
        %a = Gemm(%x, %w) from "a"
        %y = Gemm(%a, %v) from "y"
        out %y
        """)
    data = {"x": rng.standard_normal((400, 8)).astype("f4")}
    (g,) = groups(net)
    kept = {g.name: np.arange(8)}  # 8 of 16 columns span all of the input: a fit without regularization is exact
    want = run_network(net, data)["y"]

    def error(pruned):
        (out,) = run_network(pruned, data).values()
        return float(np.linalg.norm(out - want) / np.linalg.norm(want))

    small = cut(net, kept)
    errors = {r: error(recover(small, net, kept, data, RecoveryConfig(ridge=r))) for r in (1e-6, RecoveryConfig().ridge, 1.0)}
    assert errors[1e-6] < 1e-3 < errors[0.1] < 0.75 * errors[1.0] < errors[1.0] < error(small)


def test_a_window_of_load_is_at_least_as_long_as_a_look(monkeypatch):
    """A shorter one would contain too few ticks of the processor's clock to say anything."""
    now, slept = [100.0], []

    class Watched:
        def __enter__(self):
            return Load()

        def __exit__(self, *why):
            return None

    class Machine:
        class capabilities:
            measures_load = True

        def watch(self):
            return Watched()

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    neighbours = busy.ExternalLoadMonitor(Machine())
    neighbours.begin()
    now[0] += 0.05
    assert neighbours.record("k").keys == ()
    neighbours.end()
    assert slept == [pytest.approx(neighbours.look_s - 0.05)]
    neighbours.begin()
    now[0] += 5
    assert list(neighbours.record("k").keys) == ["k"]
    assert slept[1:] == [0.0]


def test_a_computed_fill_value_of_a_pad_has_no_cotangent():
    text = "network n source\nin %x: f32[2]\nin %v: f32[1]\n%f = ReduceSum(%v, keepdims=0)\n%y = Pad(%x, none, %f, pads=(1, 2))\nout %y\n"
    net = parse_network(text)
    pad = net.layers[-1]
    arrays = [np.float32([1, 2]), None, np.float32(7)]
    cotangent = np.float32([10, 20, 30, 40, 50])
    made = backpropagate(pad, arrays, run_layer(pad, arrays), [cotangent])
    assert made[0].tolist() == [20, 30]
    assert made[1:] == [None, None]
