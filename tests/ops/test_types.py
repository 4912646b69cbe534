"""Inferred types with symbolic sizes: with values for the symbols they equal the reference's types."""

import pytest

from support.data_sizes import with_sizes
from whet.errors import UnsupportedError
from whet.network import Network, evaluate, make_symbol
from whet.ops import OPS, run_layer, sample_layer

CASES = [(name, i) for name, o in sorted(OPS.items()) for i in range(len(o.samples)) if not o.samples[i].regions]
COMPLEX = "the last axis says whether the values are real or complex"
NEEDS_STATIC = {
    "Conv-15": "windows of an unknown size",
    "Conv-16": "windows of an unknown size",
    "Resize-7": "the aspect ratio decides the size",
    "Squeeze-2": "any axis might be 1",
    "DFT-1": COMPLEX,
    "DFT-3": COMPLEX,
    "STFT-2": COMPLEX,
}


def dynamic(name, i, axes):
    """The sample's layer with symbols for `axes` of its inputs (one symbol per size), the original layer, arrays, and values of the symbols."""
    _, layer, arrays = sample_layer(name, OPS[name].samples[i])
    net, env, inputs = Network("dynamic"), {}, []
    for t in layer.inputs:
        if t is None or t.is_constant:
            inputs.append(None if t is None else net.constant(t.array(), t.name))
            continue
        shape = list(t.shape)
        for a in axes:
            if a < len(shape) and shape[a] > 1:
                env[f"s{shape[a]}"] = shape[a]
                shape[a] = make_symbol(f"s{shape[a]}")
        inputs.append(net.add_input(t.name, t.type.with_shape(shape)))
    return net.add_layer(layer.op, inputs, OPS[name].samples[i].attrs), layer, arrays, env


@pytest.mark.parametrize(("name", "i"), CASES)
@pytest.mark.parametrize("axes", [(0,), (0, 2, 3)], ids=["first", "image"])
def test_symbolic_sizes(name, i, axes):
    try:
        made, layer, arrays, env = dynamic(name, i, axes)
    except UnsupportedError:
        assert f"{name}-{i}" in NEEDS_STATIC
        assert axes != (0,)
        return
    assert f"{name}-{i}" not in NEEDS_STATIC or axes == (0,)
    got = run_layer(made, arrays, env)
    wanted = with_sizes(layer, got)
    for t, shape, a, want in zip(made.outputs, with_sizes(made, got), got, wanted, strict=True):
        assert tuple(evaluate(d, env) for d in shape) == want == a.shape
        assert t.dtype.numpy == a.dtype
