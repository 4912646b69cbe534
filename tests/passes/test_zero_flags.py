"""Channels that are zero for every input, per operation: what is found must be zero on random inputs, and nothing that is always zero is missed."""

import numpy as np
import pytest

from whet.network import parse_network
from whet.ops import run_network
from whet.passes._channels import Units, find_zero_channels, is_per_channel

HEAD = """
network n source
in %x: f32[2,4,5,5]
const %w: f32[6,4,3,3] = seed(1)
const %b: f32[6] = [0.0, 0.5, 0.0, 0.0, -1.0, 0.0]
const %d: f32[6,1,3,3] = seed(2)
const %g: f32[6,3,1,1] = seed(3)
const %p: f32[3,6,1,1] = seed(4)
const %m: f32[6,5] = seed(5)
const %row: f32[150,3] = seed(6)
const %bias5: f32[5] = [1.0, 0.0, 0.0, 0.0, 0.0]
const %one: f32[6] = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
const %mean: f32[6] = [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
const %none: f32[6] = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
const %by: f32[6,1,1] = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
const %plus: f32[6,1,1] = [0.0, 0.0, 0.0, 3.0, 0.0, 0.0]
const %two: f32[] = [2.0]
const %zero: f32[] = [0.0]
const %slopes: f32[6,1,1] = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
%c = Conv(%x, %w, %b, pads=(1, 1, 1, 1))
"""
# channels 0 and 2 of %w are zero, so that those of %c are; channel 4's filter is zero, but not its bias
C = {0, 2}
CASES = [
    ("Relu(%c)", C), ("Sigmoid(%c)", set()), ("Identity(%c)", C), ("LeakyRelu(%c)", C), ("Exp(%c)", set()), ("Tanh(%c)", C),
    ("MaxPool(%c, kernel_shape=(2, 2))", C), ("AveragePool(%c, kernel_shape=(2, 2))", C), ("GlobalAveragePool(%c)", C),
    ("Clip(%c, %zero, %two)", C), ("Clip(%c, %two, %two)", set()), ("PRelu(%c, %slopes)", C),
    ("BatchNormalization(%c, %one, %none, %none, %one)", C), ("BatchNormalization(%c, %one, %none, %mean, %one)", {0}),
    ("Add(%c, %plus)", C), ("Add(%c, %two)", set()), ("Add(%c, %c)", C), ("Sub(%c, %plus)", C), ("Mul(%c, %by)", C),
    ("Mul(%c, %plus)", {0, 1, 2, 4, 5}),
    ("Mul(%by, %c)", C), ("Div(%c, %two)", C), ("Div(%c, %by)", set()), ("Concat(%c, %x, axis=1)", C), ("Concat(%x, %c, axis=1)", {4, 6}),
    ("Concat(%c, %c, axis=2)", None), ("Flatten(%c, axis=1)", {*range(25), *range(50, 75)}), ("Flatten(%c, axis=-3)", {*range(25), *range(50, 75)}),
    ("Conv(%c, %d, group=6)", {0, 2, 5}), ("Conv(%c, %p)", {1}), ("Conv(%c, %g, group=2)", set()), ("Conv(%c, %d, %b, group=6)", {0, 2, 5}),
]  # fmt: skip


def network(text):
    net = parse_network(f"{HEAD}%y = {text}\nout %y")

    def change(name, edit):
        if name in net.constants:
            t = net.constants[name]
            a = t.array().copy()
            edit(a)
            t.weight = type(t.weight)(a, t.weight.origin)

    change("w", lambda a: a.__setitem__([0, 2, 4], 0))
    change("d", lambda a: a.__setitem__(5, 0))

    def only_zero_channels(a):
        a[1, [1, 3, 4, 5]] = 0  # filter 1 reads the zero channels alone

    change("p", only_zero_channels)
    return net


@pytest.mark.parametrize(("text", "zero"), CASES, ids=[c[0] for c in CASES])
def test_channels_that_are_always_zero(text, zero):
    net = network(text)
    flags = find_zero_channels(net)[net.outputs[0]]
    if zero is not None:
        assert set(np.flatnonzero(flags)) == zero
    for seed in (1, 2):
        out = run_network(net, {"x": np.random.default_rng(seed).standard_normal((2, 4, 5, 5)).astype("f4")})["y"]
        assert not out[:, flags].any()


@pytest.mark.parametrize(
    ("text", "bias", "zero"),
    [
        ("Gemm(%f, %w)", None, {1}), ("Gemm(%f, %w, %b)", [0.0, 0.0, 0.0], {1}), ("Gemm(%f, %w, %b)", [0.0, 1.0, 0.0], set()),
        ("Gemm(%f, %w, %b, beta=0.0)", [0.0, 1.0, 0.0], {1}), ("Gemm(%f, %w, transB=1)", None, {1}), ("MatMul(%f, %w)", None, {1}),
        ("Gemm(%f, %w, %f3)", None, set()),
    ],
)  # fmt: skip
def test_products_of_channels_that_are_always_zero(text, bias, zero):
    """Column 0 of the input is always zero; column 1 of the product reads it alone."""
    turned = "transB" in text
    w = np.random.default_rng(0).standard_normal((4, 3)).astype("f4")
    w[1:, 1] = 0
    shape = "3,4" if turned else "4,3"
    head = f"in %x: f32[2,4]\nin %f3: f32[2,3]\nconst %w: f32[{shape}] = seed(1)\nconst %s: f32[4] = [0.0, 1.0, 1.0, 1.0]\n"
    head += "" if bias is None else f"const %b: f32[3] = {bias}\n"
    net = parse_network(f"network n source\n{head}%f = Mul(%x, %s)\n%y = {text}\nout %y")
    t = net.constants["w"]
    t.weight = type(t.weight)(np.ascontiguousarray(w.T if turned else w), t.weight.origin)
    assert set(np.flatnonzero(find_zero_channels(net)[net.outputs[0]])) == zero


@pytest.mark.parametrize(
    ("constant", "x", "per_channel"),
    [
        ("4,1,1", "2,4,5,5", True), ("1,4,1,1", "2,4,5,5", True), ("4", "2,4", True), ("1,4", "2,4", True),
        ("", "2,4,5,5", False), ("1", "2,4,5,5", False), ("5", "2,4,5,5", False), ("1,1,5", "2,4,5,5", False), ("1,1,1,1", "2,4,5,5", False),
        ("4,1,1", "2,1,5,5", None),  # more values than channels, of which there is one
        ("1,1,4,1,1", "2,4,5,5", None), ("1,2,4", "2,4", None),
    ],
)  # fmt: skip
def test_constants_with_one_value_per_channel(constant, x, per_channel):
    net = parse_network(f"network n source\nin %x: f32[{x}]\nconst %c: f32[{constant}] = seed(1)\n%y = Relu(%x)\nout %y")
    assert is_per_channel(net.constants["c"], net.inputs[0]) is per_channel


@pytest.mark.parametrize(
    ("text", "locked"),
    [
        ("%j = Concat(%a, %b, axis=1)", set()),
        ("%j = Concat(%a, %b, axis=-3)", set()),
        ("%j = Concat(%a, %b, axis=0)", {"a", "b"}),
        ("%j = Concat(%a, %b, axis=2)", {"a", "b"}),  # both have the same channels
        ("%j = Concat(%a, %b, axis=-1)", {"a", "b"}),
        ("%j = Add(%a, %b)", set()),
        ("%r = Relu(%a)\n%j = Concat(%r, %b, axis=3)", {"a", "r", "b"}),
    ],
)
def test_a_concatenation_along_the_channels_alone_leaves_them_free(text, locked):
    channels = 6 if "axis=1" in text or "axis=-3" in text else 3
    net = parse_network(f"""network n source
        in %x: f32[2,4,5,5]
        const %u: f32[2,{channels},1,1] = seed(3)
        const %v: f32[3,4,1,1] = seed(1)
        const %w: f32[3,4,1,1] = seed(2)
        %a = Conv(%x, %v)
        %b = Conv(%x, %w)
        {text}
        %y = Conv(%j, %u)
        out %y
        """)
    units = Units()
    units.couple(net)
    roots = {units.root(i) for i in units.locked}

    def is_locked(t):
        return any(units.root(i) in roots for i in units.unit_ids(t))

    assert is_locked(net.inputs[0])
    assert {t.name for t in net.tensors() if t.name in ("a", "b", "r") and t.name not in locked and is_locked(t)} == set()
    assert {name for name in locked if not is_locked(net.tensor(name))} == set()


@pytest.mark.parametrize(
    ("bias", "zero"),
    [
        ("f32[3,1] = [0.0, 0.0, 2.0]", []),
        ("f32[3,1] = [0.0, 0.0, 0.0]", [1, 2]),
        ("f32[1] = [2.0]", []),
        ("f32[1,4] = [0.0, 1.0, 0.0, 0.0]", [2]),
        ("f32[3,4] = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]", [1]),
    ],
)
def test_the_bias_of_a_product_in_each_shape(bias, zero):
    """C of a Gemm is a row, a column, one value or a whole matrix. A column that is not zero adds to every channel."""
    weights = "[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]"
    net = parse_network(f"network n source\nin %x: f32[3,2]\nconst %w: f32[2,4] = {weights}\nconst %c: {bias}\n%y = Gemm(%x, %w, %c)\nout %y\n")
    assert list(np.flatnonzero(find_zero_channels(net)[net.outputs[0]])) == zero
