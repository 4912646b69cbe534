"""Sums over channels are cut only if a channel without weights adds nothing to them."""

import numpy as np
import pytest

from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import cut, groups, recover, zero_channels


def linear(*lines, bias=True):
    """x [N,3] -> a [N,8] -> the lines -> y."""
    text = "network n source\nin %x: f32[N,3]\nconst %w: f32[3,8] = seed(1)\nconst %b: f32[8] = seed(2)\nconst %v: f32[8,2] = seed(3)\n"
    text += "const %one: f32[] = [1]\nconst %nought: f32[] = [0]\n%m = MatMul(%x, %w)\n"
    return parse_network(text + ("%a = Add(%m, %b)\n" if bias else "%a = Relu(%m)\n") + "\n".join(lines) + "\nout %y\n")


def names(net):
    return [g.name for g in groups(net)]


def exact(net, channels):
    """Checks that the cut network equals the one with zeroed weights."""
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 5, 6) if net.inputs[0].type.rank == 3 else (4, 3)).astype(np.float32)}
    (got,), (want,) = (run_network(n, feeds).values() for n in (cut(net, channels), zero_channels(net, channels)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


SUM = "%y = ReduceSum(%e, axes=(1,))"


@pytest.mark.parametrize("text", ["%e = Relu(%a)", "%e = Tanh(%a)", "%r = Abs(%a)\n%e = Sqrt(%r)", "%e = Mul(%a, %a)", "%e = Div(%a, %one)"])
def test_channels_that_become_zero_may_be_cut_from_a_sum(text):
    net = linear(text, SUM)
    assert names(net) == ["w"]
    exact(net, {"w": [0, 3, 4]})


@pytest.mark.parametrize(
    "text", ["%e = Sigmoid(%a)", "%e = Exp(%a)", "%e = Add(%a, %one)", "%e = Pow(%a, %nought)", "%e = Clip(%a, %one)", "%e = Div(%one, %a)"]
)
def test_channels_that_do_not_become_zero_stay(text):
    assert names(linear(text, SUM)) == []


def test_a_softmax_of_single_ops_depends_on_all_channels():
    assert names(linear("%e = Exp(%a)", "%s = ReduceSum(%e, axes=(1,))", "%p = Div(%e, %s)", "%y = MatMul(%p, %v)")) == []


def test_norms():
    by = ["%n = LpNormalization(%e, axis=1)", "%y = MatMul(%n, %v)"]
    assert names(linear("%e = Relu(%a)", *by)) == ["w"]
    assert names(linear("%e = Sigmoid(%a)", *by)) == []


def attention(before):
    """Linear attention of one head: (f(q) f(k)^T) v, with `before` of %0 for f."""
    text = "network n source\nin %x: f32[N,5,6]\n" + "".join(f"const %w{c}: f32[6,8] = seed({i})\n" for i, c in enumerate("qkv", 1))
    text += "const %wo: f32[8,3] = seed(4)\nconst %one: f32[] = [1]\n" + "".join(f"%{c}0 = MatMul(%x, %w{c})\n" for c in "qkv")
    text += "".join(before.replace("%0", f"%{c}0").replace("%1", f"%{c}1").replace("%2", f"%{c}") + "\n" for c in "qk")
    text += "%t = Transpose(%k, perm=(0, 2, 1))\n%kv = MatMul(%t, %v0)\n%c = MatMul(%q, %kv)\n%y = MatMul(%c, %wo)\nout %y\n"
    return parse_network(text)


def test_products_of_two_computed_tensors():
    net = attention("%2 = Relu(%0)")
    assert names(net) == ["wq", "wv"]
    exact(net, {"wq": [1, 2, 6], "wv": [0, 7]})
    assert names(attention("%1 = Elu(%0)\n%2 = Add(%1, %one)")) == ["wv"], "elu + 1 of zero is one"


def test_a_norm_of_weights_depends_on_all_entries():
    """Weight normalization: without an input channel the remaining weights would grow."""
    net = linear("%t = ReduceL2(%v, axes=(0,))", "%u = Div(%v, %t)", "%y = MatMul(%a, %u)")
    assert names(net) == []


def test_products_of_weights_may_lose_ranks():
    """A low-rank update of a weight may lose ranks."""
    net = parse_network("""network n source
in %x: f32[N,3]
const %w: f32[3,4] = seed(1)
const %a: f32[3,6] = seed(2)
const %b: f32[6,4] = seed(3)
%ab = MatMul(%a, %b)
%u = Add(%w, %ab)
%y = MatMul(%x, %u)
out %y
""")
    assert names(net) == ["b"]
    exact(net, {"b": [0, 5]})


def response_norm(mean="%t = ReduceMean(%p, axes=(-1,))"):
    """Global response normalization of ConvNeXt V2: x [N,3,5,4] -> channels [N,3,5,8], each divided by its norm over that of all channels."""
    return parse_network(f"""network n source
in %x: f32[N,3,5,4]
const %w: f32[4,8] = seed(1)
const %b: f32[8] = seed(2)
const %g: f32[8] = seed(3)
const %o: f32[8] = seed(4)
const %v: f32[8,2] = seed(5)
const %eps: f32[] = [0.00001]
%m = MatMul(%x, %w)
%a = Add(%m, %b)
%h = Relu(%a)
%p = ReduceL2(%h, axes=(1, 2))
{mean}
%te = Add(%t, %eps)
%r = Div(%p, %te)
%hr = Mul(%h, %r)
%hg = Mul(%hr, %g)
%ho = Add(%hg, %o)
%s = Add(%h, %ho)
%y = MatMul(%s, %v)
out %y
""")


def images(n=16):
    return {"x": np.random.default_rng(0).standard_normal((n, 3, 5, 4)).astype(np.float32)}


def test_a_mean_over_pooled_channels_stays_the_mean_over_all_of_them():
    net, kept = response_norm(), {"w": [0, 3, 4, 7, 6]}
    assert names(net) == ["w"]
    (got,), (want,) = (run_network(n, images()).values() for n in (cut(net, kept), zero_channels(net, kept)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    once, twice = cut(net, {"w": [0, 3, 4, 7, 6, 5]}), {"w": [0, 1, 2, 4]}
    (got,), (want,) = (run_network(n, images()).values() for n in (cut(once, twice), zero_channels(once, twice)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert len({x.name for x in cut(once, twice).layers}) == len(cut(once, twice).layers)


def test_a_network_with_a_corrected_mean_is_recovered():
    net, kept = response_norm(), {"w": [0, 3, 4, 7, 6]}
    small, data = cut(net, kept), images(64)
    (want,), (before,), (after,) = (run_network(n, data).values() for n in (net, small, recover(small, net, kept, data)))
    assert np.square(after - want).mean() < 0.7 * np.square(before - want).mean()


def test_a_mean_over_values_that_are_not_zero_locks_their_channels():
    assert names(response_norm("%q = Exp(%p)\n%t = ReduceMean(%q, axes=(-1,))")) == []


def test_a_product_with_zero_weights_and_a_computed_bias_is_not_zero():
    """Its channels may be cut from a sum only if the bias is zero with them."""
    text = "network n source\nin %x: f32[N,3]\nconst %w: f32[3,8] = seed(1)\nconst %u: f32[3,8] = seed(2)\n%m = MatMul(%x, %u)\n"
    text += "%r = ReduceMax(%m, axes=(0,), keepdims=0)\n%c = {}(%r)\n%a = Gemm(%x, %w, %c)\n%y = ReduceSum(%a, axes=(1,))\nout %y\n"
    assert names(parse_network(text.format("Sigmoid"))) == []
    assert len(names(parse_network(text.format("Tanh")))) == 1
