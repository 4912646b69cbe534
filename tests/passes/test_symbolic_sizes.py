"""Networks whose dimensions and size inputs are symbolic pass the lowering whenever the network accepts them."""

from itertools import combinations

import pytest

from whet.errors import NetworkError
from whet.network import F32, I64, Network, TensorType, make_symbol, verify
from whet.ops import OPS, sample_layer
from whet.passes import lower

NAMES = sorted(n for n, o in OPS.items() if any(not s.regions for s in o.samples))


def size_input(net, i, values):
    """A computed i64 tensor whose elements are symbols: the shape of a further input."""
    return net.add("Shape", net.add_input(f"s{i}", TensorType(F32, tuple(make_symbol(f"S{i}_{j}") for j in range(len(values))))))


def variants(name, sample):
    """Networks of the sample's layer with symbolic axes, symbolic size inputs, and constant data with symbolic sizes; None if it refuses them."""
    _, layer, arrays = sample_layer(name, sample)
    axes = [(i, a) for i, t in enumerate(layer.inputs) if t is not None and not t.is_constant for a in range(t.type.rank)]
    sizes = [i for i, t in enumerate(layer.inputs) if t is not None and t.is_constant and t.dtype == I64 and t.type.rank == 1 and t.type.elements]
    subsets = [c for r in range(len(sizes) + 1) for c in combinations(sizes, r) if all((arrays[i] >= 0).all() for i in c)]
    for symbolic in [(), *((a,) for a in axes), tuple(axes)]:
        yield _variant(name, sample, layer, arrays, symbolic, (), False)
    for sized in subsets[1:]:
        yield _variant(name, sample, layer, arrays, (), sized, False)
        yield _variant(name, sample, layer, arrays, tuple(axes), sized, False)
        yield _variant(name, sample, layer, arrays, (), sized, True)


def _variant(name, sample, layer, arrays, symbolic, sized, constant_data):
    net, inputs = Network("n"), []
    for i, t in enumerate(layer.inputs):
        if t is None:
            inputs.append(None)
        elif i in sized:
            inputs.append(size_input(net, i, t.array()))
        elif t.is_constant or constant_data:
            inputs.append(net.constant(arrays[i], f"c{i}"))
        else:
            shape = [make_symbol(f"D{i}_{a}") if (i, a) in symbolic else d for a, d in enumerate(t.shape)]
            inputs.append(net.add_input(f"x{i}", t.type.with_shape(shape)))
    try:
        for t in net.add_layer(name, inputs, dict(sample.attrs)).outputs:
            net.mark_output(t)
    except NetworkError as e:
        if "Expr" in str(e):
            raise  # an error inside whet, not a refusal
        return None
    return verify(net)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_network_accepts_can_be_lowered(name):
    for sample in OPS[name].samples:
        if not sample.regions:
            for net in variants(name, sample):
                if net is not None:
                    lower(net, check=True)
