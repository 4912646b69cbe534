"""The text form round-trips for every op's samples; damaged text is refused with its line, and no other exception is raised."""

import random

import pytest

from whet.errors import NetworkError
from whet.network import F32, Network, TensorType, parse_network, verify
from whet.ops import OPS, sample_layer

CASES = [(name, i) for name, o in sorted(OPS.items()) for i in range(len(o.samples))]


@pytest.mark.parametrize("name", sorted(OPS))
def test_text_round_trip(name):
    for i, sample in enumerate(OPS[name].samples):
        net, _, _ = sample_layer(name, sample)
        verify(net)
        text = str(net)
        weights = {"sha256:" + t.weight.digest: t.weight for t in net.constants.values()}
        again = parse_network(text, weights)
        verify(again)
        assert str(again) == text, f"sample {i}"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("const %w: f32[2] = seed(x)", "expected a whole number"),
        ("const %w: f32[2] = (1, 2, 3)", "needs 2 values"),
        ("const %w: i8[1] = (411,)", "values that are not i8"),
        ("const %w: f32[1] = ('one',)", "values that are not f32"),
        ("const %w: f32[1] = (float('infinite'),)", "expected inf or nan|expected"),
        ("const %w: f32[-1] = seed(1)", "needs a static shape"),
        ("const %w: f32[N] = seed(1)", "needs a static shape"),
        ("const %w: f32[1] = sha256:0000", "were not given"),
        ("%y = Relu(%nothing)", "%nothing is used before it is computed"),
        ("%y = Relu(%x, axis=)", "expected a value"),
        ("%y = Rleu(%x)", "Rleu"),
        ("%y: f64[N,4] = Relu(%x)", "%y"),
    ],
)
def test_errors_name_the_mistake(line, why):
    with pytest.raises(NetworkError, match=why):
        parse_network(f"network n source\nin %x: f32[N,4]\n{line}\nout %x\n")


def test_random_damage_raises_nothing_else():
    rng, refused = random.Random(0), 0
    texts = [str(sample_layer(name, OPS[name].samples[i])[0]) for name, i in CASES[::7]]
    for _ in range(4000):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 3)):
            at, length = rng.randrange(len(text)), rng.randint(0, 6)
            text = text[:at] + "".join(rng.choices("%(){}[]=,:.\"\\-+<>0189aN \n", k=rng.randint(0, 3))) + text[at + length :]
        try:
            parse_network(text)
        except NetworkError:
            refused += 1
    assert refused > 2000


def chain(names):
    """A network of one layer per (layer name, tensor name): Relu and Split by turns, so that some layers have several outputs."""
    net = Network("collisions")
    t = net.add_input("x", TensorType(F32, (2, 4)))
    for i, (layer_name, tensor_names) in enumerate(names):
        attrs = {"axis": 1, "num_outputs": 2} if i % 2 else {}
        layer = net.add_layer("Split" if i % 2 else "Relu", [t], attrs)
        layer.name = layer_name
        for out, name in zip(layer.outputs, tensor_names, strict=False):
            out.name = name
        t = net.add_layer("Concat", layer.outputs, {"axis": 1}, name=f"concat{i}").output if i % 2 else layer.output
    net.mark_output(t)
    return verify(net)


def test_a_layer_may_be_called_like_a_tensor_of_another_layer():
    rng = random.Random(1)
    for _ in range(200):
        count = rng.randint(1, 6)
        names = ["y", "a b", "n:", "b.1", "#", '"', "out", "x", "é", "0", "none", "a\\n", *(f"t{k}" for k in range(12))]
        layer_names = rng.sample(names, count)
        names.remove("x")  # the input's
        tensor_names = rng.sample(names, 2 * count)
        net = chain([(name, tensor_names[2 * i : 2 * i + 2]) for i, name in enumerate(layer_names)])
        again = verify(parse_network(str(net)))
        assert str(again) == str(net)
        assert [layer.name for layer in again.layers] == [layer.name for layer in net.layers]
        fresh = again.fresh(layer_names[0])
        assert fresh not in {*layer_names, *(t.name for t in again.tensors())}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("%y = Relu(%x)\n%y = Neg(%x) named b", "the name %y is given twice"),
        ("%x = Relu(%x) named b", "the name %x is given twice"),
        ("const %w: f32[1] = (1.0,)\nconst %w: f32[1] = (2.0,)", "the name %w is given twice"),
        ("%y = Relu(%x) named a\n%z = Neg(%x) named a", "two layers are called 'a'"),
    ],
)
def test_names_given_twice_are_refused(lines, why):
    with pytest.raises(NetworkError, match=why):
        parse_network(f"network n source\nin %x: f32[N,4]\n{lines}\nout %x\n")
