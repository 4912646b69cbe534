"""Values known before run time: chains of shape arithmetic are folded, symbols included, and agree with a run."""

import numpy as np
import pytest

from whet.errors import UnsupportedError
from whet.network import F32, I64, Network, evaluate, make_symbol, parse_dim, parse_network
from whet.ops import find_known_values, run_network


def folded(text: str):
    """The known values of the last tensor, as text; checked against a run with N=5, H=6, W=7."""
    net = parse_network(text)
    t = net.outputs[0]
    feed = {i.name: np.zeros([{"N": 5, "H": 6, "W": 7}.get(str(d), d) for d in i.shape], i.dtype.numpy) for i in net.inputs}
    ran = run_network(net, feed)[t.name].reshape(-1)
    if t.shape_value is None:
        return None
    assert [_number(d) for d in t.shape_value] == ran.tolist()
    return " ".join(map(str, t.shape_value))


def _number(d):
    return evaluate(d, {"N": 5, "H": 6, "W": 7})


X = "in %x: f32[N,3,H,W]\nconst %i0: i64[1] = [0]\nconst %i2: i64[1] = [2]\nconst %two: i64[1] = [2]\nconst %minus: i64[1] = [-1]\n"
X += "const %s2: i64[] = [2]\nconst %i9: i64[1] = [9]\nconst %f2: f32[1] = [2.0]\nconst %half: f32[1] = [2.5]\n"
X += "const %n9: i64[] = [9]\n%s = Shape(%x)\n"


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ("%y = Gather(%s, %s2)", "H"),
        ("%y = Shape(%x, start=2)", "H W"),
        ("%y = Slice(%s, %i2, %i9)", "H W"),
        ("%y = Size(%x)", "3*H*N*W"),
        ("%a = Gather(%s, %i0)\n%y = Concat(%a, %minus, axis=0)", "N -1"),
        ("%a = Gather(%s, %s2)\n%b = Unsqueeze(%a, %i0)\n%y = Mul(%b, %two)", "2*H"),
        ("%a = Slice(%s, %i2, %i9)\n%y = Add(%a, %s2)", "H+2 W+2"),
        ("%a = Slice(%s, %i2, %i9)\n%y = Sub(%a, %two)", "H-2 W-2"),
        ("%y = Div(%s, %two)", "((N)//(2)) 1 ((H)//(2)) ((W)//(2))"),
        ("%a = Cast(%s, to=f32)\n%b = Mul(%a, %f2)\n%y = Cast(%b, to=i64)", "2*N 6 2*H 2*W"),
        ("%a = Cast(%s, to=f32)\n%b = Mul(%a, %f2)\n%c = Floor(%b)\n%y = Cast(%c, to=i64)", "2*N 6 2*H 2*W"),
        ("%a = Cast(%s, to=f32)\n%b = Mul(%a, %half)\n%c = Floor(%b)\n%y = Cast(%c, to=i64)", None),
        ("%a = Mul(%s, %two)\n%b = Cast(%a, to=f32)\n%c = Div(%b, %f2)\n%y = Cast(%c, to=i64)", "N 3 H W"),
        ("%a = Cast(%s, to=f32)\n%c = Div(%a, %f2)\n%y = Cast(%c, to=i64)", None),
        ("%y = ReduceProd(%s, keepdims=0)", "3*H*N*W"),
        ("%a, %b = Split(%s, num_outputs=2)\n%y = Concat(%b, %a, axis=0)", "H W N 3"),
        ("%y = Max(%s, %two)", "max(2,N) 3 max(2,H) max(2,W)"),
        ("%y = Min(%s, %s2)", "min(2,N) 2 min(2,H) min(2,W)"),
        ("%a = Unsqueeze(%s, %i0)\n%b = Transpose(%a, perm=(1, 0))\n%y = Reshape(%b, %minus)", "N 3 H W"),
        ("%e = Equal(%s, %minus)\n%y = Where(%e, %i9, %s)", "N 3 H W"),
        ("%e = Equal(%s, %s)\n%y = Where(%e, %i9, %s)", "9 9 9 9"),
        ("%e = Equal(%s, %two)\n%y = Where(%e, %i9, %s)", None),
        ("%n = Size(%s)\n%z = Unsqueeze(%n, %i0)\n%y = ConstantOfShape(%z, value=1, dtype=i64)", "1 1 1 1"),
        ("%y = Mod(%s, %two)", "N-2*((N)//(2)) 1 H-2*((H)//(2)) W-2*((W)//(2))"),
        ("%y = Mod(%s, %two, fmod=1)", None),
        ("%y = ReduceSum(%s, keepdims=0)", "W+N+H+3"),
        ("%y = ReduceMax(%s)", "max(W,max(H,max(3,N)))"),
        ("%y = ReduceMin(%s)", "min(W,min(H,min(3,N)))"),
        ("%y = ReduceProd(%s, noop_with_empty_axes=1)", None),
        ("%y = Tile(%s, %two)", "N 3 H W N 3 H W"),
        ("%a = Gather(%s, %i2)\n%y = Expand(%a, %two)", "H H"),
        ("%y = Clip(%s, %s2, %n9)", "min(9,max(2,N)) 3 min(9,max(2,H)) min(9,max(2,W))"),
        ("%y = Clip(%s, %s2)", "max(2,N) 3 max(2,H) max(2,W)"),
        ("%y = Identity(%s)", "N 3 H W"),
        ("%y = Neg(%s)", "-N -3 -H -W"),
        ("%z = ReduceSum(%x, keepdims=0)\n%c = Cast(%z, to=i64)\n%y = Unsqueeze(%c, %i0)", None),
    ],
)
def test_chains(lines, want):
    assert folded(f"{X}{lines}\nout %y\n") == want


def test_small_constants_of_any_rank():
    """Old exporters compute Pad's amounts from constants through matrices (silero_vad does)."""
    text = """
    in %x: f32[1,8]
    const %p: i64[4] = [0, 0, 0, 3]
    const %m: i64[2] = [-1, 2]
    const %z: i64[1] = [0]
    const %back: i64[1] = [-1]
    const %far: i64[1] = [-9223372036854775807]
    const %flat: i64[1] = [-1]
    %a = Reshape(%p, %m)
    %b = Slice(%a, %back, %far, %z, %back)
    %c = Transpose(%b, perm=(1, 0))
    %d = Reshape(%c, %flat)
    %y = Pad(%x, %d)
    out %y
    """
    net = parse_network(text)
    assert net.tensor("d").shape_value == (0, 0, 3, 0)
    assert str(net.outputs[0].type) == "f32[4,8]"


def test_reshape_of_a_dynamic_batch():
    net = parse_network("in %x: f32[N,3,H,W]\nconst %t: i64[3] = [0, 3, -1]\n%y = Reshape(%x, %t)\nout %y\n")
    assert net.outputs[0].shape == (make_symbol("N"), 3, parse_dim("H*W"))


def test_values_that_depend_on_data_are_unknown():
    net = Network("n")
    x, t = net.add_input("x", parse_network("in %a: f32[4]\nout %a\n").inputs[0].type), net.add_input("t", I64_1)
    assert find_known_values(t) is None
    with pytest.raises(UnsupportedError, match="Reshape 'r': its shape is computed from data at run time"):
        net.add("Reshape", x, t, name="r")


I64_1 = parse_network("in %a: i64[1]\nout %a\n").inputs[0].type


def test_values_of_large_tensors_are_not_tracked():
    net = Network("n")
    big = net.constant(np.arange(65))
    assert find_known_values(big) is None
    assert find_known_values(net.add("Neg", big)) is None
    assert find_known_values(net.add("ConstantOfShape", net.constant(np.array([64])), value=2, dtype=I64)) == (2,) * 64
    assert net.add("ConstantOfShape", net.constant(np.array([64])), value=0.5, dtype=F32).shape_value is None


def test_small_constants_sliced_by_a_symbol_are_unknown():
    """Position indices of a short model: the end is a symbol, so the values are unknown, which is no error."""
    text = "in %x: f32[N,S]\nconst %at: i64[1,8] = [0, 1, 2, 3, 4, 5, 6, 7]\nconst %z: i64[1] = [0]\nconst %one: i64[1] = [1]\n"
    text += "%s = Shape(%x, start=1)\n%y = Slice(%at, %z, %s, %one)\n%g = Gather(%at, %s, axis=1)\nout %y\nout %g\n"
    net = parse_network(text)
    assert str(net.outputs[0].type) == "i64[1,min(8,S)]"
    assert net.outputs[0].shape_value is None
    assert net.outputs[1].shape_value is None


def test_a_symbol_and_an_expression_broadcast_to_the_symbol():
    """A Slice may keep one element or all, by a dynamic size; the other operand has the symbol's size."""
    net = parse_network("in %x: f32[N,4]\nin %b: f32[max(3-N,1),4]\n%y = Add(%x, %b)\n%z = Add(%b, %x)\nout %y\nout %z\n")
    assert [str(t.type) for t in net.outputs] == ["f32[N,4]", "f32[N,4]"]


def test_a_range_of_fractions_up_to_a_dynamic_size_has_a_known_length():
    """Pixel centres: 0.5, 1.5, ... below H // 8 as a float."""
    text = "in %x: f32[1,2,H]\nconst %k: i64[] = [8]\nconst %i: i64[] = [2]\nconst %a: f32[] = [0.5]\nconst %c: f32[] = [0.75]\n%s = Shape(%x)\n"
    text += "%h = Gather(%s, %i)\n%d = Div(%h, %k)\n%f = Cast(%d, to=f32)\n%y = Range(%a, %f, %c)\nout %y\n"
    net = parse_network(text)
    for h in (16, 40, 71):
        assert evaluate(net.outputs[0].shape[0], {"H": h}) == len(run_network(net, {"x": np.ones((1, 2, h), np.float32)})["y"])


def test_pads_up_to_a_multiple_of_a_dynamic_size():
    text = "in %x: f32[1,2,H]\nconst %k: i64[1] = [8]\nconst %z: i64[5] = [0, 0, 0, 0, 0]\n%h = Shape(%x, start=2)\n%m = Neg(%h)\n"
    text += "%p = Mod(%m, %k)\n%pads = Concat(%z, %p, axis=0)\n%y = Pad(%x, %pads)\nout %y\n"
    net = parse_network(text)
    assert str(net.outputs[0].type.shape[2]) == "-8*((-H)//(8))"
    for h in (3, 8, 13):
        assert run_network(net, {"x": np.ones((1, 2, h), np.float32)})["y"].shape == (1, 2, -(-h // 8) * 8)
