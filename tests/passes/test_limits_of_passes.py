"""Limits of passes: a network just within a limit is rewritten, a network just beyond it is unchanged."""

import numpy as np
import pytest
from random_networks import feeds, same

from whet.network import Network, Weight, parse_network
from whet.ops import run_network
from whet.passes import lower
from whet.passes._scale import to_channel_vector


def count(text, name):
    """How often a pass fires by itself; the values stay the same."""
    net = parse_network("network case source\n" + text)
    after, log = lower(net, switches=["none", "+" + name], refuses=lambda layer: None, check=True)
    arrays = feeds(net)
    for want, got in zip(run_network(net, arrays, widen=True).values(), run_network(after, arrays, widen=True).values(), strict=True):
        same(want, got, 2e-6)
    return log.counts()[name]


@pytest.mark.parametrize(("layers", "fires"), [(1, 1), (7, 1), (8, 0)])
def test_transposes_move_past_seven_layers_in_a_row(layers, fires):
    steps = "".join(f"%r{i + 1} = Tanh(%r{i})\n" for i in range(layers))
    text = f"in %x: f32[2,6,4]\n%r0 = Transpose(%x, perm=(0, 2, 1))\n{steps}%y = Transpose(%r{layers}, perm=(0, 2, 1))\nout %y\n"
    assert count(text, "move_transposes") == fires


@pytest.mark.parametrize(("summands", "fires"), [(2, 1), (7, 1), (8, 0)])
def test_transposes_move_past_eight_layers_at_most(summands, fires):
    steps = "".join(f"%a{i} = Tanh(%r)\n" for i in range(summands))
    text = f"in %x: f32[2,6,4]\n%r = Transpose(%x, perm=(0, 2, 1))\n{steps}%s = Sum({', '.join(f'%a{i}' for i in range(summands))})\n"
    assert count(text + "%y = Transpose(%s, perm=(0, 2, 1))\nout %y\n", "move_transposes") == fires


@pytest.mark.parametrize(("moves", "fires"), [(0, 1), (3, 1), (4, 0), (6, 0)])
@pytest.mark.parametrize("op", ["Identity(%r{i})", "Concat(%r{i}, axis=1)", "MaxPool(%r{i}, kernel_shape=(1, 1))"])
def test_a_maximum_of_values_that_are_not_negative_takes_over_zeros(op, moves, fires):
    steps = "".join(f"%r{i + 1} = {op.format(i=i)}\n" for i in range(moves))
    text = f"in %x: f32[1,2,6,6]\n%r0 = Relu(%x)\n{steps}%p = Pad(%r{moves}, pads=(0,0,1,1,0,0,1,1))\n%y = MaxPool(%p, kernel_shape=(3,3))\nout %y\n"
    assert count(text, "fold_pads") == fires


@pytest.mark.parametrize(
    ("kind", "fires"),
    [("Relu(%x)", 1), ("Sigmoid(%x)", 1), ("Abs(%x)", 1), ("Softplus(%x)", 1), ("Softmax(%x, axis=1)", 1), ("HardSigmoid(%x)", 1), 
     ("Clip(%x, %zero)", 1),
     ("Clip(%x, %less)", 0), ("Tanh(%x)", 0), ("Elu(%x)", 0), ("Selu(%x)", 0), ("Gelu(%x)", 0), ("Floor(%x)", 0), 
     ("Neg(%x)", 0), ("Softsign(%x)", 0)],
)  # fmt: skip
def test_values_that_are_never_negative(kind, fires):
    text = f"in %x: f32[1,2,6,6]\nconst %zero: f32[] = [0.0]\nconst %less: f32[] = [-0.5]\n%r = {kind}\n"
    assert count(text + "%p = Pad(%r, pads=(0,0,1,1,0,0,1,1))\n%y = MaxPool(%p, kernel_shape=(3,3))\nout %y\n", "fold_pads") == fires


@pytest.mark.parametrize(("v", "y", "fires"), [("4,3,5", "4,3,5", 1), ("4,4,3,5", "4,4,3,5", 0), ("3,5", "4,3,5", 0)])
def test_heads_are_split_where_both_operands_have_the_same_axes(v, y, fires):
    text = f"""in %s: f32[2,2,3,3]
in %v: f32[{v}]
%p = Softmax(%s, axis=-1)
%c = Reshape(%p, shape=(4,3,3))
%y: f32[{y}] = MatMul(%c, %v)
out %y
"""
    assert count(text, "unmerge_heads") == fires


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [((3, 1, 1), 1, [0.0, 1.0, 2.0]), ((1, 3, 1, 1), 1, [0.0, 1.0, 2.0]), ((), 1, [0.0, 0.0, 0.0]), ((1,), 1, [0.0, 0.0, 0.0]), 
     ((3, 1), 1, None), ((4,), 3, [0.0, 1.0, 2.0, 3.0]),
     ((3,), 3, None), ((2, 3, 1, 1), 1, None), ((3, 0, 1), 1, None), ((0, 3, 1, 1), 1, None), 
     ((3, 4, 1), 1, None), ((1, 1, 3, 1, 1), 1, None), ((0,), 3, None)],
)  # fmt: skip
def test_constants_with_a_value_per_channel(shape, axis, expected):
    net = Network("n")
    x = parse_network("network n source\nin %x: f32[2,3,4,4]\nout %x\n").inputs[0]
    t = net.constant(Weight(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)), "c")
    vector = to_channel_vector(t, x, axis)
    assert (None if vector is None else vector.array.tolist()) == expected
