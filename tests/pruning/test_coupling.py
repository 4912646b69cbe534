"""Groups: coupled channels in small hand-written networks, and channels that must not be cut."""

import numpy as np
import pytest

from whet.errors import PruneError
from whet.network import Network, parse_network, parse_type
from whet.pruning import find_group, groups


def net_of(text):
    return parse_network(text)


def shown(net):
    """name -> {tensor axis: first unit's indices}"""
    return {g.name: {f"{t.name}:{i}": at[0].tolist() for (t, i), at in g.members.items()} for g in groups(net)}


def test_conv_norm_conv():
    net = net_of("""network n source
in %x: f32[N,3,8,8]
const %w1: f32[6,3,3,3] = seed(1)
const %s: f32[6] = seed(2)
const %b: f32[6] = seed(3)
const %m: f32[6] = seed(4)
const %v: f32[6] = seed(5)
const %w2: f32[4,6,3,3] = seed(6)
%c1: f32[N,6,6,6] = Conv(%x, %w1)
%n1: f32[N,6,6,6] = BatchNormalization(%c1, %s, %b, %m, %v)
%r1: f32[N,6,6,6] = Relu(%n1)
%y: f32[N,4,4,4] = Conv(%r1, %w2)
out %y
""")
    (g,) = groups(net)
    assert (g.name, g.size, g.layers) == ("w1", 6, ("c1", "n1", "r1", "y"))
    want = {"w1:0", "c1:1", "s:0", "b:0", "m:0", "v:0", "n1:1", "r1:1", "w2:1"}
    assert {f"{t.name}:{i}" for t, i in g.members} == want
    assert all(at.tolist() == [[k] for k in range(6)] for at in g.members.values())


def test_a_residual_couples_both_branches_and_an_output_locks_them():
    text = """network n source
in %x: f32[N,3,8,8]
const %w1: f32[6,3,1,1] = seed(1)
const %w2: f32[5,6,1,1] = seed(2)
const %w3: f32[6,5,1,1] = seed(3)
const %w4: f32[2,6,1,1] = seed(4)
%a: f32[N,6,8,8] = Conv(%x, %w1)
%b: f32[N,5,8,8] = Conv(%a, %w2)
%c: f32[N,6,8,8] = Conv(%b, %w3)
%d: f32[N,6,8,8] = Add(%a, %c)
%y: f32[N,2,8,8] = Conv(%d, %w4)
out %y
"""
    found = shown(net_of(text))
    assert set(found) == {"w1", "w2"}
    assert {"w1:0", "w3:0", "w2:1", "w4:1", "a:1", "c:1", "d:1"} == set(found["w1"])
    assert set(shown(net_of(text.replace("out %y", "out %y\nout %d")))) == {"w2"}, "an output keeps its channels"


def test_flatten_couples_a_channel_with_its_features():
    net = net_of("""network n source
in %x: f32[N,3,8,8]
const %w1: f32[4,3,3,3] = seed(1)
const %w2: f32[7,144] = seed(2)
%c: f32[N,4,6,6] = Conv(%x, %w1)
%f: f32[N,144] = Flatten(%c)
%y: f32[N,7] = Gemm(%f, %w2, transB=1)
out %y
""")
    (g,) = groups(net)
    members = {f"{t.name}:{i}": at for (t, i), at in g.members.items()}
    assert members["w2:1"].shape == (4, 36)
    assert members["w2:1"][2].tolist() == list(range(72, 108))


def test_concat_does_not_couple_its_parts():
    net = net_of("""network n source
in %x: f32[N,3,8,8]
const %w1: f32[4,3,1,1] = seed(1)
const %w2: f32[5,3,1,1] = seed(2)
const %w3: f32[2,9,1,1] = seed(3)
%a: f32[N,4,8,8] = Conv(%x, %w1)
%b: f32[N,5,8,8] = Conv(%x, %w2)
%c: f32[N,9,8,8] = Concat(%a, %b, axis=1)
%y: f32[N,2,8,8] = Conv(%c, %w3)
out %y
""")
    found = shown(net)
    assert found["w1"]["w3:1"] == [0]
    assert found["w2"]["w3:1"] == [4]


def test_a_sum_over_an_axis_of_unknown_size_is_not_cut():
    net = net_of("""network n source
in %x: f32[N,S]
const %w1: f32[6,8] = seed(1)
const %w2: f32[8,2] = seed(2)
%a = MatMul(%x, %w1)
%y = MatMul(%a, %w2)
out %y
""")
    assert set(shown(net)) == {"w1"}
    assert set(shown(net)["w1"]) == {"w1:1", "a:1", "w2:0"}, "the number of rows of w1 must equal S"


def test_channels_added_to_an_input_of_unknown_size_are_not_cut():
    text = """network n source
in %x: f32[N,3,8,8]
in %s: f32[N,C,8,8]
const %w1: f32[6,3,1,1] = seed(1)
const %w2: f32[2,6,1,1] = seed(2)
%a = Conv(%x, %w1)
%b = Add(%a, %s)
%y = Conv(%b, %w2)
out %y
"""
    assert groups(net_of(text)) == [], "C may be 6"
    assert set(shown(net_of(text.replace("f32[N,C,8,8]", "f32[N,1,8,8]")))) == {"w1"}


GEMM = """network n source
in %x: f32[N,3]
in %c: f32[K]
const %w: f32[3,8] = seed(1)
const %v: f32[8,2] = seed(2)
%a = Gemm(%x, %w, %c)
%y = MatMul(%a, %v)
out %y
"""
MATMUL = """network n source
in %x: f32[3,16]
in %c: f32[K,4,4]
const %w: f32[6,3] = seed(1)
const %v: f32[2,6] = seed(2)
%z = MatMul(%w, %x)
%a = Reshape(%z, shape=(6,4,4))
%b = MatMul(%a, %c)
%f = Reshape(%b, shape=(6,16))
%y = MatMul(%v, %f)
out %y
"""
EINSUM = """network n source
in %x: f32[N,3]
in %c: f32[N,K]
const %w: f32[3,8] = seed(1)
const %v: f32[8,2] = seed(2)
%a = MatMul(%x, %w)
%b = Einsum(%a, %c, equation="...,...->...")
%y = MatMul(%b, %v)
out %y
"""


@pytest.mark.parametrize("text", [GEMM, MATMUL, EINSUM, EINSUM.replace("...", "nk")])
def test_product_axes_shared_with_an_input_of_unknown_size_are_not_cut(text):
    assert groups(net_of(text)) == [], "K may equal the number of channels"
    if "nk" not in text:  # a letter of Einsum does not broadcast
        assert len(groups(net_of(text.replace("K", "1")))) == 1


def test_concat_with_an_input_locks_only_the_input():
    net = net_of("""network n source
in %x: f32[N,3,8,8]
const %w1: f32[4,3,1,1] = seed(1)
const %w3: f32[2,7,1,1] = seed(3)
%a: f32[N,4,8,8] = Conv(%x, %w1)
%c: f32[N,7,8,8] = Concat(%x, %a, axis=1)
%y: f32[N,2,8,8] = Conv(%c, %w3)
out %y
""")
    assert shown(net)["w1"]["w3:1"] == [3]


@pytest.mark.parametrize(
    "line",
    [
        "%s: f32[N,6,8,8] = Softmax(%a, axis=1)",  # every channel depends on every other
        "%s: f32[N,6,8,8] = LRN(%a, size=3)",
        "%s = Transpose(%a, perm=(0, 1, 3, 2))\n%u = ReduceMax(%s, axes=(2,), keepdims=0)\n%q = Softmax(%u, axis=1)",
    ],
)
def test_axes_without_a_coupling_rule_are_not_cut(line):
    net = net_of(
        f"""network n source
in %x: f32[N,3,8,8]
const %w1: f32[6,3,1,1] = seed(1)
const %w2: f32[2,6,1,1] = seed(2)
%a: f32[N,6,8,8] = Conv(%x, %w1)
{line}
%y: f32[N,2,8,8] = Conv(%s, %w2)
out %y
{"out %q" if "%q" in line else ""}
""".replace("\n\n", "\n")
    )
    assert shown(net) == {}


def test_captured_values_are_not_cut():
    net = Network("n")
    x, go = net.add_input("x", parse_type("f32[N,3,8,8]")), net.add_input("go", parse_type("bool[]"))
    a = net.add("Conv", x, net.constant(np.ones((6, 3, 1, 1), np.float32), "w1"))
    regions = {}
    for key, op in (("then_branch", "Relu"), ("else_branch", "Tanh")):
        regions[key] = Network(key)
        regions[key].mark_output(regions[key].add(op, a))
    b = net.add("If", go, regions=regions)
    net.mark_output(net.add("Conv", b, net.constant(np.ones((2, 6, 1, 1), np.float32), "w2")), "y")
    assert groups(net) == []


def test_names_are_unique_and_a_wrong_one_is_reported():
    net = net_of("""network n source
in %x: f32[N,3]
const %w: f32[3,8] = seed(1)
const %v: f32[8,3] = seed(2)
%a: f32[N,8] = MatMul(%x, %w)
%y: f32[N,3] = MatMul(%a, %v)
out %y
""")
    found = groups(net)
    assert find_group(found, "w").size == 8
    with pytest.raises(PruneError, match=r"unknown group 'ww'\. Did you mean 'w'"):
        find_group(found, "ww")
