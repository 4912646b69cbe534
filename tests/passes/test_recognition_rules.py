"""Each condition of the passes that recognize exporters' patterns: the pattern fires, and networks that differ in one condition keep their layers.

A case is a pass, a network in text form, and (old, new) substitutions, each of which breaks one condition.
"""

import re

import pytest
from random_networks import feeds, same

from whet.network import parse_network
from whet.ops import run_network
from whet.passes import lower
from whet.passes.clean.unreshape_masks import find_split_axes

ATTENTION = """\
in %q: f32[2,2,5,4]
in %k: f32[2,2,4,5]
in %v: f32[2,2,5,4]
in %mask: f32[2,1,5,5]
in %other: f32[2,1,5,5]
const %root: f32[] = [2.0]
const %zero: f32[] = [0.0]
const %low: f32[] = [float('-inf')]
%s = MatMul(%q, %k)
%d = Div(%s, %root)
%a = Add(%d, %mask)
%m = ReduceMax(%mask, axes=(-1,), keepdims=1)
%e = Equal(%m, %low)
%p = Softmax(%a, axis=-1)
%g = Where(%e, %zero, %p)
%y = MatMul(%g, %v)
out %y
"""
LAYER_NORM = """\
in %x: f32[N,4,6]
in %z: f32[N,4,6]
const %two: f32[] = [2.0]
const %eps: f32[] = [0.001]
%m = ReduceMean(%x, axes=(-1,), keepdims=1)
%c = Sub(%x, %m)
%q = Pow(%c, %two)
%v = ReduceMean(%q, axes=(-1,), keepdims=1)
%b = Add(%v, %eps)
%r = Sqrt(%b)
%y = Div(%c, %r)
out %y
"""
RMS_NORM = """\
in %x: f32[N,4,6]
in %z: f32[N,4,6]
const %two: f32[] = [2.0]
const %eps: f32[] = [0.001]
%q = Pow(%x, %two)
%v = ReduceMean(%q, axes=(-1,), keepdims=1)
%b = Add(%v, %eps)
%r = Sqrt(%b)
%i = Reciprocal(%r)
%y = Mul(%x, %i)
out %y
"""
GELU = """\
in %x: f32[N,6]
in %z: f32[N,6]
const %root: f32[] = [1.4142135]
const %one: f32[] = [1.0]
const %half: f32[] = [0.5]
%d = Div(%x, %root)
%e = Erf(%d)
%a = Add(%e, %one)
%b = Mul(%x, %a)
%y = Mul(%b, %half)
out %y
"""
TANH_GELU = """\
in %x: f32[N,6]
in %z: f32[N,6]
const %three: f32[] = [3.0]
const %c: f32[] = [0.044715]
const %root: f32[] = [0.7978846]
const %one: f32[] = [1.0]
const %half: f32[] = [0.5]
%h = Mul(%x, %half)
%p = Pow(%x, %three)
%q = Mul(%p, %c)
%s = Add(%x, %q)
%t = Mul(%s, %root)
%u = Tanh(%t)
%w = Add(%u, %one)
%y = Mul(%h, %w)
out %y
"""
HARD_SWISH = """\
in %x: f32[N,6]
in %z: f32[N,6]
const %three: f32[] = [3.0]
const %zero: f32[] = [0.0]
const %six: f32[] = [6.0]
%a = Add(%x, %three)
%c = Clip(%a, %zero, %six)
%b = Mul(%x, %c)
%y = Div(%b, %six)
out %y
"""
HARD_SIGMOID = """\
in %x: f32[N,6]
const %three: f32[] = [3.0]
const %zero: f32[] = [0.0]
const %six: f32[] = [6.0]
%a = Add(%x, %three)
%c = Clip(%a, %zero, %six)
%y = Div(%c, %six)
out %y
"""
MISH = """\
in %x: f32[N,6]
in %z: f32[N,6]
%s = Softplus(%x)
%t = Tanh(%s)
%y = Mul(%x, %t)
out %y
"""
SWISH = """\
in %x: f32[N,6]
in %z: f32[N,6]
const %c: f32[] = [1.702]
%m = Mul(%x, %c)
%s = Sigmoid(%m)
%y = Mul(%x, %s)
out %y
"""
MASKED_FILL = """\
in %q: f32[2,2,5,4]
in %k: f32[2,2,4,5]
in %hidden: bool[2,1,1,5]
const %low: f32[] = [float('-inf')]
%s = MatMul(%q, %k)
%a = Where(%hidden, %low, %s)
%y = Softmax(%a, axis=-1)
out %y
"""
WINDOWS = """\
in %q: f32[6,2,5,4]
in %k: f32[6,2,4,5]
const %mask: f32[3,1,5,5] = seed(1)
%s = MatMul(%q, %k)
%t = Reshape(%s, shape=(2, 3, 2, 5, 5))
%a = Add(%t, %mask)
%b = Reshape(%a, shape=(6, 2, 5, 5))
%y = Softmax(%b, axis=-1)
out %y
"""
MASKS = """\
in %q: f32[2,2,5,4]
in %k: f32[2,2,4,5]
in %bias: f32[1,2,5,5]
in %mask: f32[2,1,1,5]
%s = MatMul(%q, %k)
%a = Add(%s, %bias)
%b = Add(%a, %mask)
%y = Softmax(%b, axis=-1)
out %y
"""
POOL = """\
in %x: f32[N,4,5,3]
%y = ReduceMean(%x, axes=(2, 3), keepdims=1)
out %y
"""
EINSUM = """\
in %a: f32[2,5,3]
in %b: f32[2,4,3]
%y = Einsum(%a, %b, equation='bij,bkj->bik')
out %y
"""
UNBATCH = """\
in %x: f32[2,3,5,4]
%m = Reshape(%x, shape=(6, 5, 4))
%t = Transpose(%m, perm=(0, 2, 1))
%y = Reshape(%t, shape=(2, 3, 4, 5))
out %y
"""
CASES = {
    "recognize_attention": (ATTENTION, {
        "softmax over rows": ("Softmax(%a, axis=-1)", "Softmax(%a, axis=2)"),
        "scale by a tensor": ("Div(%s, %root)", "Div(%s, %other)"),
        "divided by the scores": ("Div(%s, %root)", "Div(%root, %s)"),
        "mask subtracted": ("Add(%d, %mask)", "Sub(%d, %mask)"),
        "guard of another mask": ("ReduceMax(%mask,", "ReduceMax(%other,"),
        "maximum over rows": ("ReduceMax(%mask, axes=(-1,)", "ReduceMax(%mask, axes=(-2,)"),
        "maximum over two axes": ("ReduceMax(%mask, axes=(-1,)", "ReduceMax(%mask, axes=(1, -1)"),
        "minimum": ("ReduceMax(%mask,", "ReduceMin(%mask,"),
        "another bound": ("[float('-inf')]", "[-10000.0]"),
        "guard value": ("const %zero: f32[] = [0.0]", "const %zero: f32[] = [1.0]"),
        "guard reversed": ("Where(%e, %zero, %p)", "Where(%e, %p, %zero)"),
        "guarded before the softmax": ("Where(%e, %zero, %p)", "Where(%e, %zero, %a)"),
        "weights as the second operand": ("%y = MatMul(%g, %v)", "%w = Transpose(%v, perm=(0, 1, 3, 2))\n%y = MatMul(%w, %g)"),
        "weights are an output": ("out %y", "out %y\nout %g"),
        "masked scores are an output": ("out %y", "out %y\nout %a"),
    }),
    "recognize_layer_norm": (LAYER_NORM, {
        "another centre": ("Sub(%x, %m)", "Sub(%z, %m)"),
        "mean minus value": ("Sub(%x, %m)", "Sub(%m, %x)"),
        "cube": ("const %two: f32[] = [2.0]", "const %two: f32[] = [3.0]"),
        "not squared": ("Pow(%c, %two)", "Mul(%c, %two)"),
        "square of the value": ("Pow(%c, %two)", "Pow(%x, %two)"),
        "mean over other axes": ("ReduceMean(%x, axes=(-1,)", "ReduceMean(%x, axes=(-2,)"),
        "variance over other axes": ("ReduceMean(%q, axes=(-1,)", "ReduceMean(%q, axes=(-2,)"),
        "sum of squares": ("ReduceMean(%q,", "ReduceSum(%q,"),
        "epsilon is a tensor": ("Add(%v, %eps)", "Add(%v, %z)"),
        "epsilon subtracted": ("Add(%v, %eps)", "Sub(%eps, %v)"),
        "no root": ("Sqrt(%b)", "Abs(%b)"),
        "inverse": ("Div(%c, %r)", "Div(%r, %c)"),
        "product with the root": ("Div(%c, %r)", "Mul(%c, %r)"),
        "another numerator": ("Div(%c, %r)", "Div(%z, %r)"),
        "root is an output": ("out %y", "out %y\nout %r"),
    }),
    "recognize_rms_norm": (RMS_NORM, {
        "cube": ("const %two: f32[] = [2.0]", "const %two: f32[] = [3.0]"),
        "square of another value": ("Pow(%x, %two)", "Pow(%z, %two)"),
        "mean over another axis": ("axes=(-1,)", "axes=(-2,)"),
        "sum of squares": ("ReduceMean(", "ReduceSum("),
        "epsilon is a tensor": ("Add(%v, %eps)", "Add(%v, %z)"),
        "no root": ("Sqrt(%b)", "Abs(%b)"),
        "no reciprocal": ("Reciprocal(%r)", "Neg(%r)"),
        "another factor": ("Mul(%x, %i)", "Mul(%z, %i)"),
        "quotient by the reciprocal": ("Mul(%x, %i)", "Div(%x, %i)"),
        "mean is an output": ("out %y", "out %y\nout %v"),
    }),
    "recognize_gelu": (GELU, {
        "another root": ("[1.4142135]", "[1.5]"),
        "times the root": ("Div(%x, %root)", "Mul(%x, %root)"),
        "another function": ("Erf(%d)", "Tanh(%d)"),
        "another sum": ("const %one: f32[] = [1.0]", "const %one: f32[] = [0.9]"),
        "one minus": ("Add(%e, %one)", "Sub(%one, %e)"),
        "another factor": ("const %half: f32[] = [0.5]", "const %half: f32[] = [0.6]"),
        "another gated value": ("Mul(%x, %a)", "Mul(%z, %a)"),
        "erf is an output": ("out %y", "out %y\nout %e"),
    }),
    "recognize_gelu (tanh)": (TANH_GELU, {
        "square": ("const %three: f32[] = [3.0]", "const %three: f32[] = [2.0]"),
        "another coefficient": ("[0.044715]", "[0.05]"),
        "another root": ("[0.7978846]", "[0.8]"),
        "difference": ("Add(%x, %q)", "Sub(%x, %q)"),
        "cube of another value": ("Pow(%x, %three)", "Pow(%z, %three)"),
        "another linear term": ("Add(%x, %q)", "Add(%z, %q)"),
        "another function": ("Tanh(%t)", "Erf(%t)"),
        "another gated value": ("Mul(%x, %half)", "Mul(%z, %half)"),
        "another factor": ("const %half: f32[] = [0.5]", "const %half: f32[] = [0.25]"),
    }),
    "recognize_hard_swish": (HARD_SWISH, {
        "another offset": ("const %three: f32[] = [3.0]", "const %three: f32[] = [2.0]"),
        "another lower bound": ("const %zero: f32[] = [0.0]", "const %zero: f32[] = [1.0]"),
        "no upper bound": ("Clip(%a, %zero, %six)", "Clip(%a, %zero)"),
        "another divisor": ("Div(%b, %six)", "Div(%b, %three)"),
        "another gated value": ("Mul(%x, %c)", "Mul(%z, %c)"),
        "three minus x": ("Add(%x, %three)", "Sub(%three, %x)"),
    }),
    "recognize_hard_sigmoid": (HARD_SIGMOID, {
        "another offset": ("const %three: f32[] = [3.0]", "const %three: f32[] = [2.0]"),
        "another lower bound": ("const %zero: f32[] = [0.0]", "const %zero: f32[] = [1.0]"),
        "no upper bound": ("Clip(%a, %zero, %six)", "Clip(%a, %zero)"),
        "another divisor": ("Div(%c, %six)", "Div(%c, %three)"),
        "inverse": ("Div(%c, %six)", "Div(%six, %a)"),
        "three minus x": ("Add(%x, %three)", "Sub(%three, %x)"),
    }),
    "recognize_mish": (MISH, {
        "gate of another value": ("Softplus(%x)", "Softplus(%z)"),
        "another activation": ("Softplus(%x)", "Softsign(%x)"),
        "another gate": ("Tanh(%s)", "Sigmoid(%s)"),
        "sum": ("Mul(%x, %t)", "Add(%x, %t)"),
        "gate is an output": ("out %y", "out %y\nout %t"),
    }),
    "recognize_swish": (SWISH, {
        "gate of another value": ("Mul(%x, %c)", "Mul(%z, %c)"),
        "another gate": ("Sigmoid(%m)", "Tanh(%m)"),
        "sum": ("Mul(%x, %s)", "Add(%x, %s)"),
        "offset": ("Mul(%x, %c)", "Add(%x, %c)"),
        "factor by row": ("const %c: f32[] = [1.702]", "const %c: f32[6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]"),
        "gate is an output": ("out %y", "out %y\nout %s"),
    }),
    "masked_fill_to_add": (MASKED_FILL, {
        "a small value": ("[float('-inf')]", "[-10000.0]"),
        "no softmax": ("Softmax(%a, axis=-1)", "Relu(%a)"),
        "no scores": ("%s = MatMul(%q, %k)", "%t = MatMul(%q, %k)\n%s = Relu(%t)"),
        "read elsewhere": ("out %y", "out %y\nout %a"),
    }),
    "unreshape_masks": (WINDOWS, {
        "mask subtracted": ("Add(%t, %mask)", "Sub(%t, %mask)"),
        "no softmax": ("Softmax(%b, axis=-1)", "Relu(%b)"),
        "masked scores are an output": ("out %y", "out %y\nout %a"),
        "another shape after": ("shape=(6, 2, 5, 5))\n%y", "shape=(2, 6, 5, 5))\n%y"),
    }),
    "merge_masks": (MASKS, {
        "first sum is an output": ("out %y", "out %y\nout %a"),
        "no softmax": ("Softmax(%b, axis=-1)", "Relu(%b)"),
        "mask subtracted": ("Add(%a, %mask)", "Sub(%a, %mask)"),
        "no scores": ("%a = Add(%s, %bias)", "%r = Relu(%s)\n%a = Add(%r, %bias)"),
    }),
    "reduce_mean_to_pool": (POOL, {
        "rows": ("axes=(2, 3)", "axes=(2,)"),
        "channels": ("axes=(2, 3)", "axes=(1,)"),
        "maximum": ("ReduceMean(", "ReduceMax("),
        "three axes": ("in %x: f32[N,4,5,3]\n%y = ReduceMean(%x, axes=(2, 3)", "in %x: f32[N,4,5]\n%y = ReduceMean(%x, axes=(1, 2)"),
    }),
    "einsum_to_matmul": (EINSUM, {
        "sums an axis of one operand": ("'bij,bkj->bik'", "'bij,bkj->bi'"),
        "sums an axis that broadcasts": ("%a: f32[2,5,3]\nin %b: f32[2,4,3]\n%y = Einsum(%a, %b, equation='bij,bkj->bik'",
                                         "%a: f32[5,1]\nin %b: f32[4,3]\n%y = Einsum(%a, %b, equation='i...,k...->ik'"),
    }),
    "unbatch_transposes": (UNBATCH, {
        "another permutation": ("perm=(0, 2, 1)", "perm=(1, 2, 0)"),
        "another split": ("shape=(2, 3, 4, 5))\nout", "shape=(3, 2, 5, 4))\nout"),
        "transposed value is an output": ("out %y", "out %y\nout %t"),
    }),
}  # fmt: skip


def parsed(text):
    return parse_network("network case source\n" + text)


def firings(net, name):
    """How often a pass fires by itself, where the machine has kernels for every composite."""
    _, log = lower(net, switches=["none", "+" + name.split(" ")[0]], refuses=lambda layer: None, check=True)
    return log.counts()[name.split(" ")[0]]


def assert_same_values(net):
    """The network's values in float64 after all passes."""
    after, _ = lower(net, switches=["all"], refuses=lambda layer: None, check=True)
    arrays = feeds(net)
    for want, got in zip(run_network(net, arrays, widen=True).values(), run_network(after, arrays, widen=True).values(), strict=True):
        same(want, got, 2e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_pattern_fires(name):
    net = parsed(CASES[name][0])
    assert firings(net, name) == 1
    assert_same_values(net)


@pytest.mark.parametrize(("name", "condition"), [(name, c) for name, (_, breaks) in CASES.items() for c in breaks])
def test_a_broken_condition_keeps_the_layers(name, condition):
    text, breaks = CASES[name]
    old, new = breaks[condition]
    assert text.count(old) >= 1
    net = parsed(text.replace(old, new))
    assert firings(net, name) == 0
    assert_same_values(net)


def list_commuted():
    """(pass, line of its network) for each sum and product of two values."""
    for name, (text, _) in CASES.items():
        yield from ((name, line) for line in text.splitlines() if re.search(r"= (Add|Mul)\(%\w+, %\w+\)$", line))


@pytest.mark.parametrize(("name", "line"), list(list_commuted()))
def test_operands_of_sums_and_products_may_come_in_either_order(name, line):
    text = CASES[name][0]
    net = parsed(text.replace(line, re.sub(r"\((%\w+), (%\w+)\)", r"(\2, \1)", line)))
    assert firings(net, name) == 1


@pytest.mark.parametrize(("view", "shape", "groups"), [
    ((2, 3, 4), (6, 4), [[0, 1], [2]]), ((2, 3), (2, 3), [[0], [1]]), ((2, 3), (12,), None), ((2, 3), (4,), None), ((6, 1, 1), (6,), [[0, 1, 2]]),
    ((2, 3), (2,), None), ((2,), (2, 3), None),
])  # fmt: skip
def test_the_axes_that_split_an_axis_have_its_size(view, shape, groups):
    assert find_split_axes(view, shape) == groups
