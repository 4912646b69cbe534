"""Channel permutations through a network: the function stays, masks keep more, recipes repeat them."""

import numpy as np
import pytest
from click.testing import CliRunner

from whet.cli.prune import command
from whet.errors import PruneError, UsageError
from whet.frontends import network_from_onnx
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.pruning import apply_pattern, apply_recipe, groups, load_recipe
from whet.pruning.permute import permute_channels, reorder
from whet.sparsity import list_eligible_layers, parse_pattern


def network():
    """A residual block, a batch norm, a convolution in two groups, a concatenation and a product after a global pool."""
    rng = np.random.default_rng(0)
    net = Network("n", "source")

    def weight(name, *shape):
        w = rng.standard_normal(shape).astype("f4") * np.exp(rng.standard_normal((1, shape[1], *[1] * (len(shape) - 2)))).astype("f4")
        return net.constant(w, name)

    x = net.add_input("x", parse_type("f32[2,3,6,6]"))
    a = net.add("Relu", net.add("Conv", x, weight("stem", 16, 3, 3, 3), pads=(1,) * 4, name="stem"))
    b = net.add("Conv", a, weight("w1", 24, 16, 3, 3), pads=(1,) * 4, name="one")
    scale, shift, mean = (net.constant(rng.random(24).astype("f4") + 0.5, n) for n in ("s", "b", "m"))
    b = net.add("Relu", net.add("BatchNormalization", b, scale, shift, mean, net.constant(np.ones(24, "f4"), "v"), name="norm"))
    c = net.add("Add", net.add("Conv", b, weight("w2", 16, 24, 1, 1), name="two"), a, name="sum")
    d = net.add("Conv", c, weight("w3", 16, 8, 1, 1), group=2, name="grouped")
    e = net.add("Concat", d, c, axis=1, name="both")
    f = net.add("Flatten", net.add("GlobalAveragePool", net.add("Conv", e, weight("w4", 32, 32, 1, 1), name="wide")))
    net.mark_output(net.add("Gemm", f, weight("w5", 8, 32), transB=1, name="last"), "y")
    return net


@pytest.fixture
def net():
    return network()


def output(net):
    x = np.random.default_rng(5).standard_normal((2, 3, 6, 6)).astype("f4")
    return run_network(net, {"x": x}, widen=True)["y"]


def test_the_network_computes_the_same_in_another_order(net):
    found = permute_channels(net, 60)
    assert found.orders
    np.testing.assert_allclose(output(found.network), output(net), rtol=1e-12)
    for name, order in found.orders.items():
        before, after = found.kept[name]
        assert after > before
        assert sorted(order) == list(range(len(order)))
    changed = [n for n, t in net.constants.items() if (t.array() != found.network.constants[n].array()).any()]
    assert {"w1", "w2", "s", "m", "w5"} <= {*changed}
    assert (net.constants["w1"].array() == network().constants["w1"].array()).all()  # the caller's network is unchanged


def test_any_order_of_every_group_keeps_the_function(net):
    rng, found = np.random.default_rng(1), [g for g in groups(net) if "@" not in g.name]
    assert len(found) == 3
    for g in found:
        np.testing.assert_allclose(output(reorder(net, {g.name: rng.permutation(g.size)})), output(net), rtol=1e-12, err_msg=g.name)


def test_masks_keep_more_after_the_permutation(net):
    pattern = parse_pattern("2:4", 0)
    plain, permuted = apply_pattern(net, pattern), apply_pattern(net, pattern, permute_seconds=60)
    assert permuted.orders
    assert permuted.two_four == plain.two_four
    assert list_eligible_layers(permuted.network)[0] == list_eligible_layers(plain.network)[0]
    assert np.mean([*permuted.removed.values()]) < 0.95 * np.mean([*plain.removed.values()])
    for name in ("two", "last"):  # the readers of a group of their own
        assert permuted.removed[name] < plain.removed[name]


def test_the_kept_weights_are_refitted_after_the_permutation(net):
    x = np.random.default_rng(5).standard_normal((64, 3, 6, 6)).astype("f4")
    found = {s: apply_pattern(net, parse_pattern("2:4", 0), {"x": x}, permute_seconds=s) for s in (0, 60)}
    assert found[60].orders
    assert found[60].refitted == found[0].refitted == ("one", "two", "grouped", "wide", "last")
    named = apply_pattern(net, parse_pattern("2:4", 0), {"x": x}, importance="activation", permute_seconds=60)
    assert {k: list(v) for k, v in named.orders.items()} == {k: list(v) for k, v in found[60].orders.items()}, "the default with data"
    magnitude = apply_pattern(net, parse_pattern("2:4", 0), permute_seconds=60)

    def error(pruned):
        return np.linalg.norm(output(pruned.network) - output(net))

    assert error(found[60]) < 0.7 * error(magnitude)


def test_a_group_that_2_4_weights_read_keeps_its_order(net):
    first = apply_pattern(net, parse_pattern("2:4", 0), skip=["one", "grouped", "wide", "last"]).network
    orders = permute_channels(first, 60).orders
    assert list_eligible_layers(reorder(first, orders))[0] == ["two"]


def test_other_patterns_are_refused(net):
    with pytest.raises(PruneError, match="searched for 2:4, not for 1:4"):
        apply_pattern(net, parse_pattern("1:4", 0), permute_seconds=1)


def test_a_recipe_repeats_the_order_and_the_masks(net, tmp_path):
    save_onnx(net, tmp_path / "m.onnx")
    args = [str(tmp_path / "m.onnx"), "-o", str(tmp_path / "p.onnx"), "--pattern=2:4", "--permute=60", f"--recipe={tmp_path / 'r.json'}"]
    done = CliRunner().invoke(command, args, catch_exceptions=False)
    assert "groups of channels were reordered" in done.output
    pruned, source = network_from_onnx(tmp_path / "p.onnx"), network_from_onnx(tmp_path / "m.onnx")
    again = apply_recipe(source, load_recipe(tmp_path / "r.json"))
    for name, t in again.constants.items():
        np.testing.assert_array_equal(t.array(), pruned.constants[name].array(), err_msg=name)
    text = (tmp_path / "r.json").read_text()
    first = next(iter(load_recipe(tmp_path / "r.json").orders))
    (tmp_path / "r.json").write_text(text.replace('"orders": {', f'"orders": {{"{first} ": [0, 2], '))
    with pytest.raises(PruneError, match="permutation"):
        load_recipe(tmp_path / "r.json")


def test_permute_needs_the_pattern(net, tmp_path):
    save_onnx(net, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="no effect without --pattern=2:4"):
        CliRunner().invoke(command, [str(tmp_path / "m.onnx"), "--permute=3"], catch_exceptions=False)
