"""Hidden width: axes over which norms take statistics are cut only on request, in every notation of the norm, and are recovered on data."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from whet.cli.prune import command
from whet.errors import PruneError
from whet.frontends import save_onnx
from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import PruneConfig, apply_recipe, count_params, cut, groups, make_pruning_recipe, prune, recover
from whet.pruning.floor import compute_rms_error
from whet.pruning.recipe import load_recipe

LAYER_NORM = "%n: f32[N,5,12] = LayerNormalization(%h, %g, %b)"
RMS_NORM = "%n: f32[N,5,12] = RMSNormalization(%h, %g)"
LAYER_NORM_OF_OPS = """%mean: f32[N,5,1] = ReduceMean(%h, axes=(2,))
%d: f32[N,5,12] = Sub(%h, %mean)
%sq: f32[N,5,12] = Mul(%d, %d)
%var: f32[N,5,1] = ReduceMean(%sq, axes=(2,))
%ve: f32[N,5,1] = Add(%var, %eps)
%sd: f32[N,5,1] = Sqrt(%ve)
%dn: f32[N,5,12] = Div(%d, %sd)
%dg: f32[N,5,12] = Mul(%dn, %g)
%n: f32[N,5,12] = Add(%dg, %b)"""
RMS_NORM_OF_OPS = """%sq: f32[N,5,12] = Mul(%h, %h)
%var: f32[N,5,1] = ReduceMean(%sq, axes=(2,))
%ve: f32[N,5,1] = Add(%var, %eps)
%sd: f32[N,5,1] = Sqrt(%ve)
%dn: f32[N,5,12] = Div(%h, %sd)
%n: f32[N,5,12] = Mul(%dn, %g)"""
NORMS = {"LayerNormalization": LAYER_NORM, "RMSNormalization": RMS_NORM, "layer norm of ops": LAYER_NORM_OF_OPS, "RMS norm of ops": RMS_NORM_OF_OPS}


def block(norm=LAYER_NORM):
    """An embedding, a norm with an MLP around which the stream passes, and a head."""
    return parse_network(f"""network n source
in %x: f32[N,5,6]
const %embed: f32[6,12] = seed(1)
const %g: f32[12] = seed(2)
const %b: f32[12] = seed(3)
const %eps: f32[] = (0.00001,)
const %up: f32[12,16] = seed(4)
const %upb: f32[16] = seed(5)
const %down: f32[16,12] = seed(6)
const %downb: f32[12] = seed(7)
const %head: f32[12,3] = seed(8)
%h: f32[N,5,12] = MatMul(%x, %embed)
{norm}
%u: f32[N,5,16] = MatMul(%n, %up)
%ub: f32[N,5,16] = Add(%u, %upb)
%r: f32[N,5,16] = Relu(%ub)
%o: f32[N,5,12] = MatMul(%r, %down)
%ob: f32[N,5,12] = Add(%o, %downb)
%s: f32[N,5,12] = Add(%h, %ob)
%y: f32[N,5,3] = MatMul(%s, %head)
out %y
""")


def samples(n=64):
    return {"x": np.random.default_rng(0).standard_normal((n, 5, 6)).astype(np.float32)}


@pytest.mark.parametrize("norm", NORMS)
def test_the_stream_is_cut_through_its_norm_only_on_request(norm):
    net = block(NORMS[norm])
    assert [g.name for g in groups(net)] == ["up"]
    stream, inner = groups(net, hidden=True)
    assert (stream.name, stream.size, inner.name) == ("embed@hidden", 12, "up")
    used = {t.name for t, _ in stream.members if t.is_constant}
    assert {"embed", "g", "up", "down", "downb", "head"} <= used
    small = cut(net, {stream.name: np.arange(8)})
    assert small.constants["up"].shape == (8, 16)
    assert small.constants["down"].shape == (16, 8)
    assert run_network(small, samples(2))["y"].shape == (2, 5, 3)


def test_an_output_of_the_stream_keeps_it_whole():
    net = block()
    net.outputs.append(next(x for x in net.layers if x.name == "s").output)
    assert [g.name for g in groups(net, hidden=True)] == ["up"]


def test_a_network_that_only_its_norms_lock_says_so():
    net = parse_network("""network n source
in %x: f32[N,6]
const %w1: f32[6,8] = seed(1)
const %w2: f32[8,3] = seed(2)
%h: f32[N,8] = MatMul(%x, %w1)
%n: f32[N,8] = LayerNormalization(%h)
%y: f32[N,3] = MatMul(%n, %w2)
out %y
""")
    with pytest.raises(PruneError, match=r"no prunable channels: .* 1 groups can be cut through means and variances over channels: --hidden"):
        prune(net, PruneConfig(ratio=0.5))
    assert count_params(prune(net, PruneConfig(ratio=0.5, multiple=1, hidden=True)).network) == 0.5 * count_params(net)


def test_statistics_are_those_of_the_kept_channels():
    """The norm of the cut network normalizes the kept channels: mean 0 and variance 1 before scale and bias."""
    net = block()
    kept = np.array([0, 3, 4, 9, 11])
    small = cut(net, {"embed@hidden": kept})
    small.outputs = [next(x for x in small.layers if x.name == "n").output]
    (n,) = run_network(small, samples()).values()
    plain = (n - net.constants["b"].array()[kept]) / net.constants["g"].array()[kept]
    np.testing.assert_allclose(plain.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(plain.var(-1), 1, atol=1e-3)


@pytest.mark.parametrize("norm", NORMS)
def test_recovery_reduces_the_error_of_a_cut_stream(norm):
    net, data, kept = block(NORMS[norm]), samples(), {"embed@hidden": np.arange(9)}
    wanted, small = run_network(net, data), cut(net, kept)
    before = compute_rms_error(wanted, run_network(small, data))
    after = compute_rms_error(wanted, run_network(recover(small, net, kept, data), data))
    assert after < 0.4 * before


def test_the_bias_added_to_a_product_is_fitted_too():
    """Readers of the norm get an intercept: without one the mean of the removed channels is lost."""
    net, data, kept = block(), samples(), {"embed@hidden": np.arange(9)}
    net.constants["b"].weight = type(net.constants["b"].weight)(np.full(12, 3, np.float32))
    made = recover(cut(net, kept), net, kept, data)
    assert not np.array_equal(made.constants["upb"].array(), net.constants["upb"].array())
    u, v = (next(x for x in n.layers if x.name == "r").output for n in (net, made))  # what passes the Relu counts
    net.outputs, made.outputs = [u], [v]
    np.testing.assert_allclose(run_network(made, data)[v.name].mean((0, 1)), run_network(net, data)[u.name].mean((0, 1)), atol=0.05)


def test_prune_cuts_the_stream_and_its_recipe_repeats_the_cut():
    net = block()
    plain, both = (prune(net, PruneConfig(ratio=0.5, multiple=2, hidden=h)) for h in (False, True))
    assert count_params(both.network) < 0.5 * count_params(net) < count_params(plain.network)
    assert "embed@hidden" in both.recipe.groups
    again = apply_recipe(net, both.recipe)
    assert {n: t.shape for n, t in again.constants.items()} == {n: t.shape for n, t in both.cut.constants.items()}
    assert make_pruning_recipe(net, both.recipe.kept()).groups.keys() == both.recipe.groups.keys()
    with pytest.raises(PruneError, match="unknown group"):
        cut(net, {"embed": [0, 1]})


def test_a_target_is_met_with_the_stream_as_a_variable():
    from whet.pruning import Target, count_flops

    net = block()
    done = prune(net, PruneConfig(target=Target("flops", ratio=0.4), hidden=True), samples())
    assert count_flops(done.network) <= 0.4 * count_flops(net)
    assert len(done.recipe.groups["embed@hidden"].kept) < 12


def test_the_flag_of_the_command(tmp_path):
    model, recipe = tmp_path / "m.onnx", tmp_path / "r.json"
    save_onnx(block(), model)
    listed = CliRunner().invoke(command, [str(model), "--list", "--hidden"], catch_exceptions=False).output
    assert "embed@hidden: 12" in listed
    assert "@hidden" not in CliRunner().invoke(command, [str(model), "--list"], catch_exceptions=False).output
    cut_half = ["--hidden", "--ratio=0.5", "--multiple=2", "-o", str(tmp_path / "s.onnx"), "--recipe", str(recipe)]
    done = CliRunner().invoke(command, [str(model), *cut_half])
    assert done.exit_code == 0, done.output
    assert "embed@hidden" in load_recipe(recipe).groups
    assert json.loads(recipe.read_text())["about"]["hidden"] is True
    again = CliRunner().invoke(command, [str(model), "--applyRecipe", str(recipe), "-o", str(tmp_path / "t.onnx")])
    assert again.exit_code == 0, again.output
