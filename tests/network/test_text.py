"""The text form round-trips for every op's samples; damaged text is refused with its line, and no other exception is raised."""

import random

import pytest

from whet.errors import NetworkError
from whet.network import parse_network, verify
from whet.ops import OPS, sample_layer

CASES = [(name, i) for name, o in sorted(OPS.items()) for i in range(len(o.samples))]


@pytest.mark.parametrize(("name", "i"), CASES)
def test_text_round_trip(name, i):
    net, _, _ = sample_layer(name, OPS[name].samples[i])
    verify(net)
    text = str(net)
    weights = {"sha256:" + t.weight.digest: t.weight for t in net.constants.values()}
    again = parse_network(text, weights)
    verify(again)
    assert str(again) == text


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
