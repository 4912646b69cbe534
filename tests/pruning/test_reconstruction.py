"""Importance by reconstruction error: scores equal the errors of least-squares refits, and the default choice follows from data."""

from importlib import import_module

import numpy as np
import pytest

from whet.errors import PruneError
from whet.network import Weight, parse_network
from whet.ops import run_network
from whet.pruning import PruneConfig, Samples, Target, branches, cut, groups, importance, prune, reconstruction, recover
from whet.pruning.knapsack import Choice
from whet.pruning.prune import COMPARED, OtherChoices
from whet.pruning.reconstruction import compute_variance, find_channel_axes, find_output_channel_axes
from whet.pruning.recovery import RecoveryConfig

pruning = import_module("whet.pruning.prune")  # the package exports a function of this name

NET = """network n source
in %x: f32[N,8]
const %w0: f32[8,8] = seed(1)
const %w: f32[8,16] = seed(2)
const %v: f32[16,8] = seed(3)
const %out: f32[8,2] = seed(4)
%s: f32[N,8] = MatMul(%x, %w0)
%a: f32[N,16] = MatMul(%s, %w)
%r: f32[N,16] = Relu(%a)
%b: f32[N,8] = MatMul(%r, %v)
%y: f32[N,8] = Add(%s, %b)
%z: f32[N,2] = MatMul(%y, %out)
out %z
"""


@pytest.fixture(scope="module")
def case():
    net, rng = parse_network(NET), np.random.default_rng(0)
    w = net.constants["w"].array().copy()
    w[:, 5] = 2 * w[:, 3]  # units 3 and 5 are proportional: either replaces the other after a refit
    net.constants["w"].weight = Weight(w)
    x = {"x": rng.standard_normal((400, 8)).astype(np.float32)}
    return net, x, importance(groups(net), "reconstruction", net=net, samples=Samples(x), blocks=branches(net))


def test_a_redundant_unit_costs_nothing_after_the_refit_and_its_twin_does(case):
    s = case[2]["w"]
    low, high = sorted((s[3], s[5]))
    assert low < 1e-2 * high
    assert high > 0.05 * s.mean(), "the twin that remains is needed"


def test_scores_add_up_to_the_error_of_a_refit_relative_to_the_sum(case):
    """Against numpy's least squares on the same activations, in the unit of the residual sum, which the branch's score shares."""
    net, x, scores = case
    w0, w, v = (net.constants[n].array().astype(np.float64) for n in ("w0", "w", "v"))
    stream = x["x"] @ w0
    r = np.maximum(stream @ w, 0)
    branch = r @ v
    total = (stream + branch).var()
    kept = np.sort(np.argsort(-scores["w"], kind="stable")[:10])
    centred = r - r.mean(0)
    fitted = centred[:, kept] @ np.linalg.lstsq(centred[:, kept], centred @ v, rcond=None)[0]
    error = np.mean((centred @ v - fitted) ** 2) / total
    assert np.sort(scores["w"])[:6].sum() == pytest.approx(error, rel=0.05)
    assert scores["y"][0] == pytest.approx(np.mean(branch**2) / total, rel=1e-4)


@pytest.mark.parametrize("layers", ["a convolution", "a product"])
def test_differences_between_the_means_of_channels_do_not_count_as_their_variance(layers):
    """A detector's logits of rare classes have means far apart: without its inputs such a head would seem to lose nothing."""
    conv = "const %v: f32[6,8,1,1] = seed(2)", "%y: f32[N,6,4,4] = Conv(%r, %v, %b)"
    steps = "%t = Transpose(%r, perm=(0, 2, 3, 1))", "%m = MatMul(%t, %v)", "%y = Add(%m, %b)"
    product = "const %v: f32[8,6] = seed(2)", "\n".join(steps)
    weight, reader = conv if layers == "a convolution" else product
    x = {"x": np.random.default_rng(0).standard_normal((64, 4, 6, 6)).astype(np.float32)}
    scores = []
    for bias in ([0.0] * 6, [0.0, -30.0, 50.0, 20.0, -400.0, 7.0]):
        net = parse_network(f"""network n source
            in %x: f32[N,4,6,6]
            const %w: f32[8,4,3,3] = seed(1)
            {weight}
            const %b: f32[6] = {bias}
            %a: f32[N,8,4,4] = Conv(%x, %w)
            %r: f32[N,8,4,4] = Relu(%a)
            {reader}
            out %y
            """)
        scores.append(importance(groups(net), "reconstruction", net=net, samples=Samples(x))["w"])
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-3)
    assert scores[0].sum() == pytest.approx(1, abs=0.05), "all inputs removed: the whole variance"


def test_the_axis_of_the_channels_follows_transposes_and_layers_that_keep_the_channels():
    net = parse_network("""network n source
        in %x: f32[2,3,4,4]
        const %w: f32[5,3,1,1] = seed(1)
        const %v: f32[5,7] = seed(2)
        const %u: f32[7,2] = seed(3)
        const %c: f32[2,3,4,4] = seed(4)
        %i = Relu(%x)
        %a = Conv(%i, %w)
        %p = MaxPool(%a, kernel_shape=(2, 2))
        %t = Transpose(%p, perm=(0, 2, 3, 1))
        %s = Sigmoid(%t)
        %m = MatMul(%s, %v)
        %f = Flatten(%m)
        %g = ReduceMean(%m, axes=(1, 2), keepdims=0)
        %h = Gemm(%g, %u)
        out %f
        out %h
        """)
    assert {t.name: axis for t, axis in find_channel_axes(net).items()} == {"a": 1, "p": 1, "t": 3, "s": 3, "m": 3, "h": 1}
    assert {t.name: axis for t, axis in find_output_channel_axes(net).items()} == {"h": 1}, "a later product reads the others"


def test_a_variance_is_that_within_channels_but_never_zero():
    x = np.array([[0.0, 10.0], [2.0, 14.0]])
    assert compute_variance(x, 1) == pytest.approx((1 + 4) / 2)
    assert compute_variance(x, None) == pytest.approx(x.var())
    constant = np.array([[0.0, 10.0], [0.0, 10.0]])
    assert compute_variance(constant, 1) == pytest.approx(1e-6 * constant.var()), "one sample, or channels that never change"
    assert compute_variance(np.zeros((2, 2)), 1) > 0


def test_the_default_is_measured_on_data_and_removes_branches_only_then(case):
    net, x, _ = case
    target = Target("params", ratio=0.7)
    with_data = prune(net, PruneConfig(target=target, multiple=1), x).recipe.about
    without = prune(net, PruneConfig(target=target, multiple=1)).recipe.about
    assert with_data["importance"] in COMPARED[:2]
    assert with_data["depth"] is True
    assert (without["importance"], without["depth"]) == ("l1", False)
    assert prune(net, PruneConfig(target=target, multiple=1, depth=True)).recipe.about["depth"] is True


def test_compared_importances_keep_the_one_whose_selection_changes_the_outputs_least(case):
    net, x, _ = case
    how = PruneConfig(target=Target("params", ratio=0.7), multiple=1, importance="compared")
    made = prune(net, how, x)
    errors = made.report.floor.by_importance
    assert set(errors) == set(COMPARED)
    assert made.recipe.about["importance"] == min(errors, key=errors.get)
    assert made.report.floor.chosen == min(errors.values())
    assert any("of the selections by reconstruction" in line for line in made.report.lines())


@pytest.mark.parametrize("large", [1, 40, 10**6])
def test_taking_removed_units_out_of_large_matrices_changes_no_score(large, monkeypatch):
    """Of a layer that reads two groups side by side: the rows of the other group stay."""
    net = parse_network("""network n source
in %x: f32[N,8]
const %w: f32[8,24] = seed(1)
const %v: f32[8,20] = seed(2)
const %u: f32[44,6] = seed(3)
%a = MatMul(%x, %w)
%b = Relu(%a)
%c = MatMul(%x, %v)
%d = Relu(%c)
%e = Concat(%b, %d, axis=1)
%y = MatMul(%e, %u)
out %y
""")
    x = Samples({"x": np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)})
    monkeypatch.setattr(reconstruction, "LARGE", 10**9)
    want = importance(groups(net), "reconstruction", net=net, samples=x)
    sizes = []
    shrink = reconstruction.Reader.shrink
    monkeypatch.setattr(reconstruction.Reader, "shrink", lambda self, left: (shrink(self, left), sizes.append(len(self.h))))
    monkeypatch.setattr(reconstruction, "LARGE", large)
    got = importance(groups(net), "reconstruction", net=net, samples=x)
    assert {k: list(v) for k, v in got.items()} == {k: pytest.approx(list(v), rel=1e-9) for k, v in want.items()}
    assert min(sizes) == {1: 23, 40: 32, 10**6: 44}[large], "of 44"


def select(margin, error, uniform=None, steps=1):
    """The selection that is kept and its gap: the default's, with an error of 1 on held-out samples, the alternative's or uniform cuts."""
    net = parse_network(TWO_HEADS)
    found = groups(net)
    first, other, even = (Choice({g.name: np.arange(n) for g in found}, (), 1.0, 0.7, 0.2, bound=0.1) for n in (8, 9, 10))
    others = OtherChoices(even if uniform is not None else None, alternatives={"weighted_reconstruction": other}, margin=margin)
    how = PruneConfig(target=Target("params", ratio=0.7), importance="reconstruction", steps=steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "measure_held_out_errors", lambda *a: [1.0, error, *([] if uniform is None else [uniform])])
        choice, report, kind = pruning.select_by_outputs(net, how, found, first, pruning.Report(gap=0.3), others, {}, None)
    assert report.floor.by_importance == {"reconstruction": 1.0, "weighted_reconstruction": error}
    assert report.floor.chosen == (error if choice is other or (choice is even and error < 1) else 1.0)
    assert kind == ("weighted_reconstruction" if choice is other else "reconstruction")
    return {8: "default", 9: "alternative", 10: "uniform"}[len(choice.kept["w"])], report.gap


def test_an_alternative_replaces_the_default_only_by_a_clear_margin():
    assert select(0.1, 0.89) == ("alternative", 1.0)
    assert select(0.1, 0.91) == ("default", 0.3)
    assert select(0.0, 0.91) == ("alternative", 1.0)
    assert select(0.1, 0.89, steps=2) == ("alternative", None), "no bound is known of several steps"


def test_uniform_cuts_must_be_better_than_every_selection():
    assert select(0.1, 0.95, uniform=0.97) == ("alternative", 1.0), "no margin: the default loses anyway"
    assert select(0.1, 0.95, uniform=1.01) == ("default", 0.3)
    assert select(0.1, 0.95, uniform=0.94) == ("uniform", None)


def test_the_default_compares_two_importances_where_outputs_can_be_compared(case, monkeypatch):
    net, x, _ = case
    seen = []
    monkeypatch.setattr(pruning, "select_by_outputs", lambda *a: seen.append(a[5]) or (a[3], a[4], a[1].importance))
    target = Target("params", ratio=0.7)
    prune(net, PruneConfig(target=target, multiple=1), x)
    assert (list(seen[0].alternatives), seen[0].margin) == (["weighted_reconstruction"], 0.1)
    prune(net, PruneConfig(target=target, multiple=1, importance="compared"), x)
    assert (list(seen[1].alternatives), seen[1].margin) == (["weighted_reconstruction", "taylor2"], 0.0)
    few = {"x": x["x"][:7]}
    for how, data in (({"importance": "reconstruction"}, x), ({}, few)):
        prune(net, PruneConfig(target=target, multiple=1, **how), data)
        assert not seen[-1].alternatives
    prune(net, PruneConfig(target=target, multiple=1, floor=False), x)
    assert len(seen) == 4, "nothing to compare with"


def test_the_default_takes_errors_of_the_outputs_where_they_say_more():
    """A head that reaches the output a hundred times weaker: its own errors say that it needs as many units as the other."""
    net = parse_network(TWO_HEADS)
    x = {"x": np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)}
    made = prune(net, PruneConfig(target=Target("params", ratio=0.6), multiple=1), x)
    errors = made.report.floor.by_importance
    assert errors["weighted_reconstruction"] < 0.5 * errors["reconstruction"]
    assert made.recipe.about["importance"] == "weighted_reconstruction"
    plain = prune(net, PruneConfig(target=Target("params", ratio=0.6), multiple=1, importance="reconstruction"), x)
    assert plain.report.floor.chosen == errors["reconstruction"]
    assert len(plain.recipe.kept()["w"]) < len(made.recipe.kept().get("w", range(16)))


@pytest.mark.parametrize("missing", [{"target": None}, {"floor": False}, {"recovery": None}, {"data": None}])
def test_a_comparison_of_importances_needs_all_that_it_compares_by(case, missing):
    net, x, _ = case
    options = {"target": Target("params", ratio=0.7), "multiple": 1, "importance": "compared", "data": x, **missing}
    data = options.pop("data")
    with pytest.raises(PruneError, match="needs a target"):
        prune(net, PruneConfig(**options), data)


def test_a_comparison_leaves_out_importances_that_need_a_gradient_which_an_op_lacks(case):
    x, axis = case[1], "const %axis: i64[] = [1]\n"
    net = parse_network(NET.replace("%s: ", axis + "%s: ", 1).replace("out %z", "%sums: f32[N,2] = CumSum(%z, %axis)\nout %sums"))
    made = prune(net, PruneConfig(target=Target("params", ratio=0.7), multiple=1, importance="compared"), x)
    assert made.report.floor.by_importance == {}
    assert made.recipe.about["importance"] == "reconstruction"
    with pytest.raises(PruneError, match="choose the importance"):
        importance(groups(net), "weighted_reconstruction", net=net, samples=Samples(x))


TWO_HEADS = """network n source
in %x: f32[N,8]
const %w: f32[8,16] = seed(2)
const %v: f32[16,4] = seed(3)
const %p: f32[8,16] = seed(5)
const %q: f32[16,4] = seed(6)
const %k: f32[] = [0.01]
%a: f32[N,16] = MatMul(%x, %w)
%r: f32[N,16] = Relu(%a)
%b: f32[N,4] = MatMul(%r, %v)
%c: f32[N,16] = MatMul(%x, %p)
%d: f32[N,16] = Relu(%c)
%e: f32[N,4] = MatMul(%d, %q)
%f: f32[N,4] = Mul(%e, %k)
%y: f32[N,4] = Add(%b, %f)
out %y
"""


def test_weighted_errors_are_those_of_the_outputs():
    """Two hidden layers of one size, of which one reaches the output a hundred times weaker: alike by their own errors, not by the outputs'."""
    net = parse_network(TWO_HEADS)
    x = {"x": np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)}
    plain, weighted = (importance(groups(net), kind, net=net, samples=Samples(x)) for kind in ("reconstruction", "weighted_reconstruction"))
    assert plain["p"].sum() == pytest.approx(plain["w"].sum(), rel=0.9)
    assert weighted["p"].sum() == pytest.approx(1e-4 * weighted["w"].sum(), rel=0.9)
    small = cut(net, {"w": np.sort(np.argsort(weighted["w"])[8:])}, groups(net))
    fitted = recover(small, net, {"w": np.sort(np.argsort(weighted["w"])[8:])}, x, RecoveryConfig(ridge=1e-3))
    whole, got = (run_network(n, x)["y"] for n in (net, fitted))
    error = np.sum((got - whole) ** 2) / np.sum(whole**2)
    assert np.sort(weighted["w"])[:8].sum() == pytest.approx(error, rel=0.3)


def test_the_sensitivity_of_a_branch_counts_the_values_that_it_adds():
    net = parse_network(NET)
    x = {"x": np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)}
    (block,) = branches(net)
    score = importance(groups(net), "weighted_reconstruction", net=net, samples=Samples(x), blocks=[block])[block.name][0]
    seen = {}
    whole = run_network(net, x, watch=lambda t, a: seen.__setitem__(t.name, a))["z"]
    each = np.mean(seen["b"] ** 2, 0) @ np.sum(net.constants["out"].array() ** 2, 1)  # without products of different channels
    assert score == pytest.approx(each / np.mean(np.sum(whole**2, 1)), rel=0.5)


def test_a_layer_that_ends_in_a_sum_also_corrects_the_shortcut():
    """Both summands are fitted when units of the stream's first layer are gone: the second one aims at what the first lacks."""
    net = parse_network("""network n source
in %x: f32[N,8]
const %w: f32[8,16] = seed(2)
const %v: f32[16,8] = seed(3)
const %u: f32[8,8] = seed(4)
%a: f32[N,16] = MatMul(%x, %w)
%r: f32[N,16] = Relu(%a)
%s: f32[N,8] = MatMul(%r, %v)
%b: f32[N,8] = MatMul(%x, %u)
%y: f32[N,8] = Add(%s, %b)
%z: f32[N,8] = Relu(%y)
out %z
""")
    x = {"x": np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)}
    kept = {"w": np.arange(6)}
    small = recover(cut(net, kept), net, kept, x, RecoveryConfig(ridge=1e-3))
    w, v = (small.constants[n].array() for n in ("w", "v"))
    first = np.maximum(x["x"] @ w, 0) @ v  # the present other summand
    whole = np.maximum(x["x"] @ net.constants["w"].array(), 0) @ net.constants["v"].array() + x["x"] @ net.constants["u"].array()
    best = np.linalg.lstsq(x["x"], whole - first, rcond=None)[0]
    fitted, unfitted = (n.constants["u"].array() for n in (small, net))
    error, least_squares, before = (np.mean((np.maximum(whole, 0) - np.maximum(first + x["x"] @ u, 0)) ** 2) for u in (fitted, best, unfitted))
    assert error < 0.98 * least_squares, "what the Relu maps to 0 counts as equal"
    assert error < 0.9 * before
