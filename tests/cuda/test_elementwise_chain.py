"""Chains of elementwise layers: a value that is read more than once is one operand, operands spread over the result along any axes."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, planned, reference

from support.host_cluster import plan_on_host, run_on_host
from support.host_cuda import host_compiler
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.network import Network, from_stored, parse_type
from whet.ops import Sample, sample_layer
from whet.tactics import list_tactics
from whet.tactics.cuda.elementwise import elementwise
from whet.tactics.cuda.elementwise.elementwise import find_spread, match_chain

ELEMENTWISE = next(t for t in list_tactics("cuda") if t.name == "cuda/elementwise")
#: result, operand, format, kind of the operand as in elementwise.cu
SPREAD = [
    ("[2,6,6,16]", "[1,1,1,16]", "linear", 1),  # ConvNeXt V2 in PyTorch's order of axes
    ("[2,6,6,16]", "[2,1,1,16]", "linear", 1),
    ("[2,5,3,12]", "[2,1,1,12]", "linear", 3),
    ("[2,5,3,12]", "[12]", "linear", 3),
    ("[2,5,24]", "[2,5,1]", "linear", 2),  # a value per row: q / max(|q|, eps)
    ("[2,5,9]", "[2,5,1]", "linear", 3),
    ("[3,4,8]", "[1,4,8]", "linear", 1),  # the same rows for each sample
    ("[3,4,7,8]", "[1,4,1,1]", "linear", 2),
    ("[3,4,5,8]", "[3,1,5,1]", "linear", 2),
    ("[3,4,5,7]", "[3,1,5,1]", "linear", 3),
    ("[2,16,3,5]", "[2,16,1,1]", "nhwc", 1),
    ("[2,12,3,5]", "[1,12,1,1]", "nhwc", 3),
    ("[2,16,3,5]", "[2,1,3,5]", "nhwc", 2),
    ("[2,16,3,5]", "[1,1,1,1]", "nhwc", 2),
    ("[1,1,1,21]", "[]", "linear", 2),
    ("[2,16,3,5]", "[2,16,3,5]", "nhwc", 0),
]  # fmt: skip


def response_normalization():
    """ConvNeXt V2: x * factor * gamma + beta + x, the factor one value per channel of each image."""
    rng, net = np.random.default_rng(0), Network("grn")
    x, factor = net.add_input("x", parse_type("f32[2,16,6,5]")), net.add_input("factor", parse_type("f32[2,16,1,1]"))
    gamma, beta = (net.constant(rng.standard_normal((1, 16, 1, 1)).astype(np.float32)) for _ in range(2))
    scaled = net.add("Add", net.add("Mul", net.add("Mul", x, factor), gamma), beta)
    net.mark_output(net.add("Add", scaled, x), "y")
    return net


def read_layer():
    low, _ = lower_network(response_normalization(), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    (layer,) = low.layers
    return low, layer


def test_a_value_that_is_read_twice_is_one_operand():
    _net, layer = read_layer()
    chain = match_chain(layer)
    assert not isinstance(chain, str)
    assert chain.operands == [0, 1, 2, 3]
    assert chain.text.count("operand(p, 0, at, length)") == 1  # once more than the chain's beginning, which the kernel reads by itself
    assert {t.name for t, *_ in planned(layer, HOPPER)} == {"cuda/elementwise"}


def dims(text):
    return tuple(int(d) for d in text[1:-1].split(",") if d)


def div_layers(result, operand):
    """Quotients by a computed and by a constant operand, with their arrays; the values of the operands are near 2."""
    for prefix in ("", "const "):
        _net, layer, arrays = sample_layer("Div", Sample([f"f32{result}", f"{prefix}f32{operand}"]))
        far = (2 + 0.1 * arrays[1]).astype(np.float32)
        if prefix:
            net = Network("quotient")
            x = net.add_input("x", parse_type(f"f32{result}"))
            layer = net.add("Div", x, net.constant(far)).maker
        yield _net if not prefix else net, layer, [arrays[0], far]


@pytest.mark.parametrize(("result", "operand", "form", "kind"), SPREAD)
def test_every_element_has_its_value(result, operand, form, kind):
    out, shape = dims(result), dims(operand)
    spread = find_spread(shape, out, form)
    assert spread.kind == kind
    if kind:
        values = np.arange(np.prod(shape, dtype=int)).reshape((1,) * (len(out) - len(shape)) + shape)
        last = (lambda a: np.moveaxis(a, 1, -1)) if form == "nhwc" else np.asarray
        want, i = last(np.broadcast_to(values, out)).reshape(-1), np.arange(np.prod(out))
        where = (i // spread.outer * spread.stride if spread.outer else 0) + i // spread.inner % spread.size
        assert np.array_equal(last(values).reshape(-1)[where], want)


def test_other_spreads_are_left_to_the_broadcast_kernel():
    for result, operand in (("[2,3,4,5,6]", "[1,3,1,5,1]"), ("[2,3,4,5,6]", "[2,1,4,1,6]")):
        assert find_spread(dims(operand), dims(result), "linear") is None
        _net, layer, _ = sample_layer("Mul", Sample([f"f32{result}", f"f32{operand}"]))
        assert {t.name for t, *_ in planned(layer, HOPPER)} & {"cuda/elementwise", "cuda/broadcast"} == {"cuda/broadcast"}


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_quotients_match_the_reference_on_the_host(monkeypatch):
    launches, cases = [], []
    for result, operand, form, _kind in SPREAD:
        for net, layer, arrays in div_layers(result, operand):
            for signature in ELEMENTWISE.signatures(layer, HOPPER):
                if signature.outputs[0].format != form and len(dims(operand)) == 4:
                    continue
                ran, *case = plan_on_host(monkeypatch, elementwise, ELEMENTWISE, layer, arrays, signature, (), HOPPER)
                launches += ran
                cases.append((net, layer, arrays, signature, *case))
    run_on_host(launches)
    assert len(cases) >= 6 * len(SPREAD)
    for _net, layer, arrays, signature, kernel, ins, outs, _memory in cases:
        fed = [a if x is None else from_stored(x, o.format, a.shape).astype(a.dtype) for a, x, o in zip(arrays, ins, signature.inputs, strict=True)]
        got = from_stored(outs[0], signature.outputs[0].format, arrays[0].shape)
        judge(got, reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{layer} {signature}")


@pytest.mark.gpu
@pytest.mark.parametrize(("result", "operand", "form", "kind"), SPREAD)
def test_quotients_match_the_reference(gpu, result, operand, form, kind):
    for _net, layer, arrays in div_layers(result, operand):
        for t, signature, config, kernel in planned(layer, gpu):
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")


@pytest.mark.gpu
def test_a_value_that_is_read_twice_is_right(gpu):
    _net, layer = read_layer()
    rng = np.random.default_rng(1)
    arrays = [t.array() if t.is_constant else rng.standard_normal(t.shape).astype(np.float32) for t in layer.inputs]
    for t, signature, config, kernel in planned(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
