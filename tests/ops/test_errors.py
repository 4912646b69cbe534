"""Invalid layers are refused with a NetworkError that names them; accepted ones compute the inferred type."""

import numpy as np
import pytest

from support.data_sizes import with_sizes
from support.selection import with_long_variants
from whet.errors import NetworkError
from whet.network import BOOL, F32, F64, I32, I64, Network, TensorType, get_dtype, parse_type
from whet.ops import OPS, run_layer, sample_layer

CASES = [(name, i) for name, o in sorted(OPS.items()) for i in range(len(o.samples)) if not o.samples[i].regions]
VALUES = [-100, -1, 0, 1, 3, 2.5, "nonsense", (), (0,), (-7, 1), (1, 2, 3, 4, 5, 6), (1, "a"), F32, True]


def spoiled(t, rng):
    """A similar type: another rank, size or element type."""
    shape = list(t.shape)
    match rng.integers(4):
        case 0:
            shape.insert(rng.integers(len(shape) + 1), int(rng.integers(4)))
        case 1 if shape:
            shape.pop(rng.integers(len(shape)))
        case 2 if shape:
            shape[rng.integers(len(shape))] = int(rng.integers(7))
        case _:
            return TensorType([F64, I64, I32, BOOL, F32][rng.integers(5)], tuple(shape))
    return TensorType(t.dtype, tuple(shape))


def filled(type_, rng):
    return rng.integers(-3, 4, type_.shape).astype(type_.dtype.numpy)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize(("name", "i"), with_long_variants(CASES, lambda case: (case[0], case[1] // 3)))
def test_invalid_layers(name, i):
    rng = np.random.default_rng(i)
    sample, (_, layer, arrays) = OPS[name].samples[i], sample_layer(name, OPS[name].samples[i])
    for _ in range(25):
        net, inputs, feed, attrs = Network("spoiled"), [], [], dict(sample.attrs)
        victim = int(rng.integers(len(layer.inputs))) if layer.inputs else -1
        kind = rng.integers(3)
        if kind == 0 and OPS[name].attrs:
            attrs[rng.choice(list(OPS[name].attrs))] = VALUES[rng.integers(len(VALUES))]
        for k, (t, a) in enumerate(zip(layer.inputs, arrays, strict=True)):
            if t is not None and k == victim and kind == 1:
                a = filled(spoiled(t.type, rng), rng)
            if t is None or (kind == 2 and k == victim):
                inputs.append(None)
                feed.append(None)
            else:
                known = TensorType(t.dtype if a is arrays[k] else get_dtype(a), a.shape)
                inputs.append(net.constant(a, "c") if t.is_constant else net.add_input(f"x{k}", known))
                feed.append(a)
        refused = None
        try:
            made = net.add_layer(name, inputs, attrs, name="victim")
        except NetworkError as e:
            refused = str(e)
        if refused is not None:
            assert "'victim'" in refused, f"{refused} does not name the layer"
            continue
        try:
            got = run_layer(made, feed)
        except NetworkError as e:
            refused = e
        if refused is not None:  # only if the values decide: an index out of range, or the maximum of an empty axis
            assert isinstance(refused.__cause__, IndexError) or any(a is not None and a.size == 0 for a in feed), refused
            continue
        for t, shape, a in zip(made.outputs, with_sizes(made, got), got, strict=True):
            assert a.shape == shape, f"{made} made {a.shape}"
            assert a.dtype == t.dtype.numpy, f"{made} made {a.dtype}"


def test_unknown_attribute_is_named():
    net = Network("n")
    x = net.add_input("x", TensorType(F32, (2, 3)))
    with pytest.raises(NetworkError, match=r"Softmax 'softmax' has no attribute 'axes'; it has axis. Did you mean 'axis'\?"):
        net.add("Softmax", x, axes=1)


def test_missing_attribute_is_named():
    net = Network("n")
    x = net.add_input("x", TensorType(F32, (2, 3)))
    with pytest.raises(NetworkError, match="Concat 'concat' needs the attribute axis"):
        net.add("Concat", x)


@pytest.mark.parametrize("where", ["output", "operand"])
def test_a_fused_body_uses_its_own_tensors_only(where):
    """A file may name a tensor of the network around it, which no tactic passes."""
    net, body = Network("n", "lowered"), Network("body", "lowered")
    x, inner = net.add_input("x", parse_type("f32[2]")), body.add_input("i", parse_type("f32[2]"))
    y = body.add("Relu", x if where == "operand" else inner)
    body.mark_output(x if where == "output" else y)
    with pytest.raises(NetworkError, match=r"its body uses %x of the network around it"):
        net.add("Fused", x, regions={"body": body}, composite="Relu")


@pytest.mark.parametrize(("name", "i"), CASES)
def test_a_layer_with_fewer_inputs_is_refused_by_name_or_runs(name, i):
    _, layer, arrays = sample_layer(name, OPS[name].samples[i])
    for count in range(len(layer.inputs)):
        net = Network("short")
        inputs = [
            None if t is None else net.constant(a, "c") if t.is_constant else net.add_input(f"x{k}", t.type)
            for k, (t, a) in enumerate(zip(layer.inputs[:count], arrays[:count], strict=True))
        ]
        refused = ""
        try:
            made = net.add_layer(name, inputs, dict(OPS[name].samples[i].attrs), name="victim")
        except NetworkError as e:
            refused = str(e)
        if refused:
            assert "'victim'" in refused
            continue
        got = run_layer(made, arrays[:count])
        assert [a.dtype for a in got] == [t.dtype.numpy for t in made.outputs]


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_a_layer_with_more_inputs_than_its_op_takes_is_refused_by_name_or_runs(name):
    """Up to nine more inputs like its last one: an op that takes any number of them runs."""
    sample = OPS[name].samples[0]
    _, layer, arrays = sample_layer(name, sample)
    if not layer.inputs or layer.inputs[-1] is None:
        pytest.skip("the sample has no last input to repeat")
    net = Network("long")
    inputs = [None if t is None else net.constant(a, "c") if t.is_constant else net.add_input(f"x{k}", t.type)
              for k, (t, a) in enumerate(zip(layer.inputs, arrays, strict=True))]  # fmt: skip
    refused = ""
    try:
        made = net.add_layer(name, [*inputs, *inputs[-1:] * 9], dict(sample.attrs), name="victim")
    except NetworkError as e:
        refused = str(e)
    if refused:
        assert "'victim'" in refused
    else:
        run_layer(made, [*arrays, *arrays[-1:] * 9])


def test_surplus_inputs_are_named():
    net = Network("n")
    x = net.add_input("x", TensorType(F32, (2, 3)))
    with pytest.raises(NetworkError, match=r"^Abs 'size' takes at most 1 input; it has %x, %x$"):
        net.add("Abs", x, x, name="size")
    with pytest.raises(NetworkError, match=r"^Slice 'part' takes at most 5 inputs; it has %x, none, none, none, none, none$"):
        net.add("Slice", x, None, None, None, None, None, starts=(0,), ends=(1,), name="part")
    with pytest.raises(NetworkError, match=r"^Relu 'r' takes at most 1 input; it has (%x, ){8}\.\.\.$"):
        net.add("Relu", *[x] * 100, name="r")


def test_missing_inputs_are_named():
    net = Network("n")
    x, scale = net.add_input("x", TensorType(F32, (2, 3))), net.constant(np.ones(3, np.float32), "s")
    with pytest.raises(NetworkError, match=r"BatchNormalization 'norm' needs its first 5 inputs; it has %x, %s, %s, %s$"):
        net.add("BatchNormalization", x, scale, scale, scale, name="norm")
    with pytest.raises(NetworkError, match=r"BatchNormalization 'norm' needs its first 5 inputs; it has %x, %s, none, %s, %s$"):
        net.add("BatchNormalization", x, scale, None, scale, scale, name="norm")
