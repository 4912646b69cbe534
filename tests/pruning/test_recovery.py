"""Recovery: least squares is optimal, statistics are those of the data, and a cut network regains its accuracy."""

import sys
from pathlib import Path

import numpy as np
import pytest

from whet.errors import PruneError, ShapeError
from whet.frontends import network_from_onnx
from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import PruneConfig, RecoveryConfig, apply_recipe, choose, cut, groups, importance, prune, recover, reestimate_batch_norms
from whet.pruning._least_squares import Problem, convert_conv_to_matrix, convert_matrix_to_conv, gather_conv_outputs, gather_conv_rows, solve

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
RNG = np.random.default_rng(3)


def test_solve_is_least_squares():
    x, y = RNG.standard_normal((2, 300, 7)), RNG.standard_normal((2, 300, 5))
    w, b = solve(Problem(x, y), np.zeros((2, 7, 5)), ridge=0.0, intercept=True)
    for g in range(2):
        ones = np.concatenate([x[g], np.ones((300, 1))], 1)
        want = np.linalg.lstsq(ones, y[g], rcond=None)[0]
        np.testing.assert_allclose(np.concatenate([w[g], b[g][None]]), want, atol=1e-8)


@pytest.mark.parametrize("side", ["low", "high"])
def test_outputs_beyond_a_bound_leave_the_fit_to_the_others(side):
    """Below the bound the targets are large noise: with it the fit finds the weights, without it the noise moves them."""
    rng = np.random.default_rng(0)
    x, true = rng.normal(size=(1, 400, 5)), rng.normal(size=(1, 5, 2))
    y = x @ true
    noisy, bound = np.where(y < 0, y - rng.exponential(20, y.shape), y), np.zeros_like(y)
    sign = 1 if side == "low" else -1
    fit = {"low": Problem(x, noisy, low=bound), "high": Problem(x, -noisy, high=bound)}[side]
    start = np.zeros((1, 5, 2))
    bounded, _ = solve(fit, start, ridge=1e-9, intercept=False)
    plain, _ = solve(Problem(x, sign * noisy), start, ridge=1e-9, intercept=False)
    assert np.abs(sign * bounded - true).max() < 0.3 < np.abs(sign * plain - true).max()
    assert np.sum((fit.find_nearest_targets(x @ bounded) - x @ bounded) ** 2) < 0.1 * np.sum((fit.find_nearest_targets(x @ plain) - x @ plain) ** 2)


def test_targets_beyond_a_bound_follow_the_outputs_up_to_it():
    y, made = np.array([[[-2.0], [-2.0], [0.5], [3.0], [3.0]]]), np.array([[[-5.0], [1.0], [-1.0], [4.0], [2.0]]])
    bounds = {"low": np.zeros_like(y), "high": np.full_like(y, 2.5)}
    assert Problem(y, y, **bounds).find_nearest_targets(made).ravel().tolist() == [-5.0, 0.0, 0.5, 4.0, 2.5]
    assert Problem(y, y).find_nearest_targets(made) is y


def test_a_ridge_stays_near_the_weights_and_without_data_equals_them():
    x, y, start = RNG.standard_normal((1, 300, 7)), RNG.standard_normal((1, 300, 5)), RNG.standard_normal((1, 7, 5))
    far, _ = solve(Problem(x, y), start, ridge=0.0, intercept=False)
    near, _ = solve(Problem(x, y), start, ridge=100.0, intercept=False)
    assert np.abs(near - start).max() < 0.05 < np.abs(far - start).max()
    x[:, :, 3] = 0  # an input that is always zero in the data
    made, _ = solve(Problem(x, y), start, ridge=1e-3, intercept=False)
    np.testing.assert_allclose(made[:, 3], start[:, 3])


@pytest.mark.parametrize("text", ["Conv(%x, %w, pads=(1, 0, 0, 1), strides=(2, 1))", "Conv(%x, %w, group=2, dilations=(2, 1))"])
def test_rows_times_matrix_equal_the_convolution(text):
    group = 2 if "group" in text else 1
    net = parse_network(f"""network n source
in %x: f32[N,4,9,8]
const %w: f32[6,{4 // group},3,3] = seed(1)
%y = {text}
out %y
""")
    x, w = RNG.standard_normal((3, 4, 9, 8)).astype(np.float32), net.constants["w"].array()
    y = run_network(net, {"x": x})["y"]
    at = np.sort(RNG.choice(y.size // 6, 40, replace=False))
    rows, matrix = gather_conv_rows(net.layers[0], x, w, at), convert_conv_to_matrix(w, group)
    np.testing.assert_allclose(rows @ matrix, gather_conv_outputs(y, group, at), atol=1e-4)
    np.testing.assert_array_equal(convert_matrix_to_conv(matrix, w), w)


REDUNDANT = """network n source
in %x: f32[N,3,6,6]
const %w1: f32[8,3,3,3] = seed(1)
const %b1: f32[8] = seed(7)
const %w2: f32[5,8,3,3] = seed(2)
const %s: f32[5] = seed(3)
const %b: f32[5] = seed(4)
const %m: f32[5] = seed(5)
const %v: f32[5] = [1, 2, 3, 4, 5]
const %w3: f32[2,5] = seed(6)
const %b3: f32[2] = seed(8)
%c1: f32[N,8,4,4] = Conv(%x, %w1, %b1)
%r: f32[N,8,4,4] = Relu(%c1)
%c2: f32[N,5,2,2] = Conv(%r, %w2)
%n: f32[N,5,2,2] = BatchNormalization(%c2, %s, %b, %m, %v)
%p: f32[N,5,1,1] = GlobalAveragePool(%n)
%f: f32[N,5] = Flatten(%p)
%y: f32[N,2] = Gemm(%f, %w3, %b3, transB=1)
out %y
"""


def redundant():
    """A network whose channels 4..7 of the first conv are channels 0..3 shifted: removed channels can be compensated exactly."""
    from whet.network import Weight

    net = parse_network(REDUNDANT)
    for name in ("w1", "b1"):
        a = net.constants[name].array().copy()
        a[4:] = a[:4]
        net.constants[name].weight = Weight(a)
    return net


def test_redundant_channels_are_recovered_exactly():
    net = redundant()
    kept = {"w1": [0, 1, 2, 3]}
    small = cut(net, kept)
    data = {"x": RNG.standard_normal((200, 3, 6, 6)).astype(np.float32)}
    want = run_network(net, data)["y"]
    before = np.abs(run_network(small, data)["y"] - want).max()
    notes = []
    made = recover(
        small, net, kept, data, RecoveryConfig(batch_norms=False, ridge=0), lambda done, total, stage: notes.append((done, total, stage))
    )
    after = np.abs(run_network(made, data)["y"] - want).max()
    assert after < 1e-4 < 0.1 < before
    assert [n[:2] for n in notes] == [(k, 7) for k in range(1, 8)]
    assert "c1: already exact" in notes[0][2]
    assert notes[2][2].endswith("-> 0.000")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_fixed_batch_takes_many_samples_in_several_runs(rows):
    """Deployed models often have a fixed batch of 1; recovery still needs hundreds of samples."""
    kept = {"w1": [0, 1, 2, 3, 4]}
    data = {"x": RNG.standard_normal((40, 3, 6, 6)).astype(np.float32)}
    made = []
    for text in (REDUNDANT, REDUNDANT.replace("[N,", f"[{rows},")):
        net = parse_network(text)
        made.append(recover(cut(net, kept), net, kept, data))
    for name in ("w1", "w2", "m", "v", "w3", "b3"):
        np.testing.assert_allclose(made[1].constants[name].array(), made[0].constants[name].array(), rtol=1e-4, atol=1e-5)


def test_samples_that_do_not_fill_a_fixed_batch_are_refused():
    net, kept = parse_network(REDUNDANT.replace("[N,", "[2,")), {"w1": [0, 1, 2, 3, 4]}
    with pytest.raises(ShapeError, match="axis 0: the network has 2, the array 5"):
        recover(cut(net, kept), net, kept, {"x": np.zeros((5, 3, 6, 6), np.float32)})


def test_an_intercept_is_added_to_the_batch_norm_and_the_bias():
    net, kept = parse_network(REDUNDANT), {"w1": [0, 1, 2, 3, 4]}
    small = cut(net, kept)
    data = {"x": (RNG.standard_normal((300, 3, 6, 6)) + 1).astype(np.float32)}
    made = recover(small, net, kept, data, RecoveryConfig(batch_norms=False))
    assert not np.array_equal(made.constants["m"].array(), small.constants["m"].array())
    assert not np.array_equal(made.constants["b3"].array(), small.constants["b3"].array())
    norms = []
    for n in (net, made):
        run_network(n, data, watch=lambda t, a: norms.append(a.mean((0, 2, 3))) if t.name == "n" else None)
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-3, atol=1e-3)
    want, got, raw = (run_network(n, data)["y"] for n in (net, made, small))
    np.testing.assert_allclose(got.mean(0), want.mean(0), atol=1e-3)
    assert np.linalg.norm(got - want) < 0.75 * np.linalg.norm(raw - want)
    assert str(made.constants["w2"].weight.origin) == "w2", "recovered weights are source weights of the new network"


def test_statistics_are_those_of_the_data():
    net = parse_network(REDUNDANT)
    data = {"x": RNG.standard_normal((100, 3, 6, 6)).astype(np.float32)}
    made = reestimate_batch_norms(net, data)
    seen = {}
    run_network(net, data, watch=lambda t, a: seen.setdefault(t.name, a))
    np.testing.assert_allclose(made.constants["m"].array(), seen["c2"].mean((0, 2, 3)), atol=1e-4)
    np.testing.assert_allclose(made.constants["v"].array(), seen["c2"].var((0, 2, 3)), rtol=1e-4)
    again = {}
    run_network(made, data, watch=lambda t, a: again.setdefault(t.name, a))
    scale, shift = net.constants["s"].array(), net.constants["b"].array()
    np.testing.assert_allclose(again["n"].mean((0, 2, 3)), shift, atol=1e-3)
    np.testing.assert_allclose(again["n"].std((0, 2, 3)), np.abs(scale), rtol=1e-2)


def test_the_cut_network_is_unchanged_and_others_are_refused():
    net, kept = parse_network(REDUNDANT), {"w1": [0, 1]}
    small = cut(net, kept)
    before = str(small)
    data = {"x": np.ones((4, 3, 6, 6), np.float32)}
    recover(small, net, kept, data)
    assert str(small) == before
    other = parse_network(REDUNDANT.replace("%p", "%q"))
    with pytest.raises(PruneError, match="layers that the original lacks"):
        recover(small, other, kept, data)


@pytest.fixture(scope="module")
def digits():
    sys.path.insert(0, str(DIGITS))
    try:
        from data import load_heldback, load_train
    finally:
        sys.path.remove(str(DIGITS))
    return load_train()[0], load_heldback()


@pytest.mark.slow
def test_digits_regain_their_accuracy(digits):
    """40 % of the channels of a trained network: the cut loses most of the accuracy; recovery without labels restores it to within a point."""
    training, (images, labels) = digits
    net = network_from_onnx(DIGITS / "digits_resnet.onnx")
    found = groups(net)
    kept = choose(found, importance(found), 0.4, scope="global")
    small = cut(net, kept, found)
    data = {"input": training[:128]}

    def accuracy(n):
        got = [run_network(n, {"input": images[i : i + 16]})["logits"] for i in range(0, 320, 16)]
        return float((np.concatenate(got).argmax(1) == labels[:320]).mean())

    norms = accuracy(recover(small, net, kept, data, RecoveryConfig(least_squares=False)))
    both = accuracy(recover(small, net, kept, data))
    assert accuracy(net) > 0.985
    assert accuracy(small) < 0.5
    assert norms > 0.8
    assert both >= accuracy(net) - 0.01


def test_prune_runs_all_steps():
    net = parse_network(REDUNDANT)
    data = {"x": RNG.standard_normal((100, 3, 6, 6)).astype(np.float32)}
    made = prune(net, PruneConfig(ratio=0.5, multiple=2, skip=("w2",)), data)
    assert made.channels == (8, 4)
    assert made.share == 0.5
    assert list(made.recipe.groups) == ["w1"]
    assert made.recipe.about["ratio"] == 0.5
    raw, want, got = (run_network(n, data)["y"] for n in (made.cut, net, made.network))
    assert np.linalg.norm(got - want) < np.linalg.norm(raw - want)
    assert str(apply_recipe(net, made.recipe)) == str(made.cut)
    assert prune(net, PruneConfig(multiple=1)).network.constants["w2"].shape[0] < 5


def test_networks_that_cannot_be_pruned():
    net = parse_network(REDUNDANT)
    with pytest.raises(PruneError, match=r"no prunable group, branch or layer is called 'w9'\. The groups are w1, w2\."):
        prune(net, PruneConfig(skip=("w9",)))
    with pytest.raises(PruneError, match="no prunable channels"):
        prune(net, PruneConfig(skip=("w1", "w2")))
