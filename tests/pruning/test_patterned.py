"""`whet prune --pattern`: N:M, blocks and templates, on data with a least-squares update; what fits no kernel is measured; wrong input."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from whet.cli.prune import command
from whet.errors import PruneError, UsageError
from whet.frontends import network_from_onnx
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, Weight, parse_type
from whet.ops import run_network
from whet.pruning import Recipe, apply_pattern, apply_recipe, load_recipe, patterned
from whet.sparsity import list_eligible_layers, parse_pattern


def network():
    """Convolutions with 3, 8 and (in two groups) 4 input channels each, and a product."""
    rng = np.random.default_rng(0)
    net = Network("n", "source")

    def weight(name, *shape):
        return net.constant(rng.standard_normal(shape).astype("f4") / np.float32(np.sqrt(np.prod(shape[1:]))), name)

    x = net.add_input("x", parse_type("f32[4,3,8,8]"))
    a = net.add("Relu", net.add("Conv", x, weight("w1", 8, 3, 3, 3), pads=(1,) * 4, name="first"))
    b = net.add("Relu", net.add("Conv", a, weight("w2", 8, 8, 3, 3), pads=(1,) * 4, name="second"))
    c = net.add("Conv", b, weight("w3", 12, 4, 1, 1), group=2, name="grouped")
    net.mark_output(net.add("Gemm", net.add("Flatten", c), weight("w4", 768, 4), name="last"), "y")
    return net


@pytest.fixture
def net():
    return network()


@pytest.fixture(scope="module")
def data():
    return {"x": np.random.default_rng(1).standard_normal((64, 3, 8, 8)).astype("f4")}


def fours(w):
    return np.moveaxis(w, 1, -1).reshape(-1, 4)


def test_two_of_four_by_magnitude(net):
    done = apply_pattern(net, parse_pattern("2:4", 0))
    assert list_eligible_layers(done.network)[0] == ["second", "grouped", "last"]
    assert done.two_four == ("second", "grouped", "last")
    assert "3 input channels are no multiples" in done.left["first"]
    before, after = (fours(n.constants["w2"].array()) for n in (net, done.network))
    np.testing.assert_array_equal(np.count_nonzero(after, axis=1), 2)
    np.testing.assert_allclose(np.abs(after).sum(1), np.sort(np.abs(before), axis=1)[:, 2:].sum(1), rtol=1e-6)
    share = 1 - np.abs(after).sum() / np.abs(before).sum()
    assert done.removed["second"] == pytest.approx(share)
    assert not list_eligible_layers(net)[0]  # the caller's network is unchanged


@pytest.mark.parametrize(("text", "nonzeros", "fits"), [("1:4", 1, True), ("3:4", 3, False), ("2:8", 2, True), ("3:8", 3, False)])
def test_n_of_m(net, text, nonzeros, fits):
    pattern = parse_pattern(text, 0)
    done = apply_pattern(net, pattern)
    m = int(text[-1])
    w = np.moveaxis(done.network.constants["w2"].array(), 1, -1).reshape(-1, m)
    np.testing.assert_array_equal(np.count_nonzero(w, axis=1), nonzeros)
    assert pattern.is_two_four == fits
    assert ("second" in done.two_four) == fits


def test_blocks_are_zero_as_a_whole(net):
    done = apply_pattern(net, parse_pattern("block:4x1", 0.25))
    w = done.network.constants["w2"].array().reshape(2, 4, 8, 9)
    nonzero = np.count_nonzero(w, axis=1)
    assert set(np.unique(nonzero)) == {0, 4}
    assert (nonzero == 0).mean() == 0.25
    sums = np.abs(net.constants["w2"].array().reshape(2, 4, 8, 9)).sum(1)
    assert sums[nonzero == 0].max() <= sums[nonzero > 0].min()


def test_the_best_template_of_several_is_taken_per_tile(net, tmp_path):
    (tmp_path / "t.yaml").write_text("alternatives:\n- [[1, 1, 0, 0], [0, 0, 1, 1]]\n- [[0, 0, 1, 1], [1, 1, 0, 0]]\n")
    pattern = parse_pattern(f"template:{tmp_path / 't.yaml'}", 0)
    assert pattern.is_two_four
    done = apply_pattern(net, pattern)
    before, after = (n.constants["w2"].array()[:, :, 1, 1].reshape(4, 2, 2, 4).swapaxes(1, 2) for n in (net, done.network))
    for old, new in zip(before.reshape(8, 2, 4), after.reshape(8, 2, 4), strict=True):
        sums = [np.abs(old * a).sum() for a in pattern.alternatives]
        np.testing.assert_array_equal(new, old * pattern.alternatives[int(np.argmax(sums))])


def test_data_lowers_the_error_of_the_outputs(net, data):
    def error(done, x):
        wanted, got = (run_network(n, {"x": x})["y"] for n in (net, done.network))
        return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))

    new = np.random.default_rng(2).standard_normal((4, 3, 8, 8)).astype("f4")
    plain, fitted = (apply_pattern(net, parse_pattern("2:4", 0), d, skip=["last"]) for d in (None, data))
    assert fitted.refitted == ("second", "grouped")
    assert fitted.two_four == plain.two_four
    assert error(fitted, new) < 0.8 * error(plain, new)


def test_a_refitted_layer_solves_the_least_squares_problem(net, data):
    """Against numpy's solver for one output channel of the second group of `grouped`, whose input is computed by the network itself."""
    done = apply_pattern(net, parse_pattern("2:4", 0), data, skip=["first", "second", "last"])
    seen = []
    reader = next(x for x in net.layers if x.name == "grouped").inputs[0]
    for start in range(0, 64, 4):
        run_network(net, {"x": data["x"][start : start + 4]}, watch=lambda t, a: seen.append(a) if t is reader else None)
    x = np.concatenate(seen)[:, 4:].transpose(0, 2, 3, 1).reshape(-1, 4).astype(np.float64)
    old, new = (n.constants["w3"].array()[9, :, 0, 0] for n in (net, done.network))
    at = np.flatnonzero(new)
    wanted, *_ = np.linalg.lstsq(x[:, at], x @ old, rcond=None)
    np.testing.assert_allclose(new[at], wanted, rtol=5e-3)


def test_the_command_writes_the_model_and_the_masks(net, tmp_path):
    save_onnx(net, tmp_path / "m.onnx")
    flags = [str(tmp_path / "m.onnx"), "--pattern=2:4", "-o", str(tmp_path / "s.onnx"), "--recipe", str(tmp_path / "r.json")]
    done = CliRunner().invoke(command, flags, catch_exceptions=False)
    assert "2:4 by magnitude in 3 layers" in done.output
    assert "left out: first: 8 output and 3 input channels are no multiples of 1 and 4" in done.output
    assert "All these layers are 2:4" in done.output
    sparse = network_from_onnx(tmp_path / "s.onnx")
    assert len(list_eligible_layers(sparse)[0]) == 3
    masks = load_recipe(tmp_path / "r.json").masks
    np.testing.assert_array_equal(masks["w2"], sparse.constants["w2"].array() != 0)
    history = json.loads(sparse.metadata["prop.whet.history"])
    assert history == [{"step": "prune", "pattern": "2:4"}]


def test_times_prove_that_no_kernel_uses_a_block_pattern(net, tmp_path):
    save_onnx(net, tmp_path / "m.onnx")
    flags = [str(tmp_path / "m.onnx"), "--pattern=block:4x1", "--ratio=0.5", "-o", str(tmp_path / "s.onnx"), "--backend=null", "--timingCacheFile="]
    text = " ".join(CliRunner().invoke(command, flags, catch_exceptions=False).output.split())
    assert "layers with block:4x1 are not 2:4 (as 'first': 3 input channels have no whole groups of four), and" in text
    assert "no kernel skips other zeros: the engine takes " in text
    quick = " ".join(CliRunner().invoke(command, [*flags, "--noEngines"], catch_exceptions=False).output.split())
    assert "no kernel skips other zeros. whet prune --latency=0.7x" in quick


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4:2", "N is from 1 to M - 1"),
        ("0:4", "N is from 1 to M - 1"),
        ("block:0x4", "at least one output channel"),
        ("every other", "is no pattern; write 2:4"),
        ("template:no.yaml", "cannot be read"),
    ],
)
def test_wrong_patterns_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_pattern(text, 0.5)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[]", "empty"),
        ("[[1, 0], [1]]", "one length"),
        ("[[1, 2, 0, 0]]", "zeros and ones only"),
        ("[[0.5, 0]]", "zeros and ones only"),
        ("[[[1, 0]]]", "one or two axes"),
        ("[0, 0, 0, 0]", "keeps no weight"),
        ("alternatives: 3", "rows of zeros and ones"),
        ("alternatives:\n- [1, 0]\n- [1, 0, 0]", "one length"),
        (json.dumps([[1] * 80] * 80), "too large"),
        ("a: [", "no YAML"),
    ],
)
def test_wrong_templates_are_refused(tmp_path, written, message):
    (tmp_path / "t.yaml").write_text(written)
    with pytest.raises(UsageError, match=message):
        parse_pattern(f"template:{tmp_path / 't.yaml'}", 0)


def test_wrong_networks_are_refused(net):
    pattern = parse_pattern("2:4", 0)
    with pytest.raises(PruneError, match=r"no layer with weights is named 'secnd'\. Did you mean"):
        apply_pattern(net, pattern, skip=["secnd"])
    with pytest.raises(PruneError, match="fits no layer of 'n'"):
        apply_pattern(net, parse_pattern("2:1000", 0))
    broken = network()
    w = broken.constants["w2"]
    array = w.array().copy()
    array[1, 2, 0, 1] = np.nan
    w.weight = Weight(array, w.weight.origin)
    with pytest.raises(PruneError, match=r"'second' hold a NaN \(at \(1, 2, 0, 1\)\)"):
        apply_pattern(broken, pattern)


@pytest.mark.parametrize("mask", [np.ones((8, 4, 3, 3), bool), np.ones(8, bool)])
def test_masks_of_another_shape_are_refused(net, mask):
    with pytest.raises(PruneError, match=rf"the recipe masks 'w2' of shape {re.escape(str(list(mask.shape)))}, the network has f32\[8,8,3,3\]"):
        apply_recipe(net, Recipe({}, masks={"w2": mask}))


@pytest.mark.parametrize(("flag", "message"), [("--latency=0.5x", "removing channels"), ("--ratio=0.5", "how many weights stay")])
def test_flags_without_effect_are_refused(net, tmp_path, flag, message):
    save_onnx(net, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(command, [str(tmp_path / "m.onnx"), "--pattern=2:4", flag], catch_exceptions=False)


@pytest.mark.parametrize(("flops", "refitted"), [(2 / 3 * 12 * 2**3, ("grouped",)), (2 / 3 * 12 * 2**3 - 1, ())])
def test_layers_whose_solutions_take_too_long_keep_their_weights(net, data, monkeypatch, flops, refitted):
    """12 output channels with 2 kept weights each: a solution takes 2/3 n^3 operations."""
    monkeypatch.setattr(patterned, "MOST_REFIT_FLOPS", flops)
    assert apply_pattern(net, parse_pattern("2:4", 0), data, skip=["first", "second", "last"]).refitted == refitted
