"""NaN, infinities, denormals and values near overflow in every oneDNN kernel, planted into all samples; declared deviations are minimal."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from test_onednn_tactics import CPU, FUSED, PADS, SAMPLES, B, W, X, check, compute, declared_reference, fused, plain, reference

from support.selection import with_long_variants
from whet.network.types import F32
from whet.ops import OPS, sample_layer
from whet.tactics import get_tactic
from whet.tactics.cpu.onednn._nonfinite import KERNELS, PLAIN_LOOPS, list_declared_references

ODD = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40]  # the last two: denormals
NEAR_OVERFLOW = [3e38, -3e38, 1.5e38, 2e19, -2e19]


def planted(layer, arrays, values, seed):
    """The arrays with `values` at random places of each floating-point input that is computed at run time. Weights of padded convolutions stay: the
    product of an infinite weight and a zero of the padding is NaN, but kernels may leave these products out."""
    rng, made = np.random.default_rng(seed), []
    padded = layer.op in ("Conv", "ConvTranspose") and (any(layer.attrs.get("pads", ())) or layer.attrs.get("auto_pad", "NOTSET") != "NOTSET")
    for i, (t, a) in enumerate(zip(layer.inputs, arrays, strict=True)):
        if t is not None and not (padded and i == 1) and not t.is_constant and a.dtype == np.float32 and a.size:
            a = a.copy()
            at = rng.permutation(a.size)[: min(len(values), max(1, a.size // 4))]
            a.reshape(-1)[at] = rng.permutation(np.array(values, np.float32))[: len(at)]
        made.append(a)
    return made


def pointwise(layer):
    inner = layer.regions["body"].layers if layer.op == "Fused" else [layer]
    return all(OPS[x.op].pointwise for x in inner)


def floats(layer):
    """NaN has no meaning as an integer: quantized results are left out."""
    return all(t.dtype == F32 for t in (*layer.inputs, *layer.outputs) if t is not None and not t.is_constant)


def kind_of(case):
    """Of two neighbouring samples of one op and composite one is in `make test`."""
    name, index = case
    return name, OPS[name].samples[index].attrs.get("composite"), index // 2


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "index"), with_long_variants(SAMPLES, kind_of))
def test_odd_values_anywhere(name, index, seed):
    _, layer, arrays = sample_layer(name, OPS[name].samples[index])
    if floats(layer):
        values = ODD + NEAR_OVERFLOW if pointwise(layer) else ODD  # overflow of accumulators depends on the order of accumulation,
        values = values[:-2] if name == "ReduceProd" else values  # as does underflow in products of denormals
        check(layer, planted(layer, arrays, values, seed))


@pytest.mark.parametrize("name", FUSED)
def test_odd_values_in_fused_layers(name):
    layer, arrays = fused(*FUSED[name])
    for seed in range(3):
        assert check(layer, planted(layer, arrays, ODD, seed)) >= 2


LINE = np.array([*ODD, *NEAR_OVERFLOW, 1, -1, 0.5, 3], np.float32)
TABLES = [(n, f) for table in (KERNELS, PLAIN_LOOPS) for n, f in table.items()]


def both(name, declaration, change):
    """(the op's own, as declared) for each float sample with changed inputs."""
    for sample in OPS[name].samples:
        _, layer, arrays = sample_layer(name, sample)
        if arrays[0].dtype == np.float32:
            fed = [a if a is None or t.is_constant or a.dtype.kind != "f" else change(a) for t, a in zip(layer.inputs, arrays, strict=True)]
            yield from zip(reference(layer, fed), declared_reference(layer, fed, {name: declaration}), strict=True)


@pytest.mark.parametrize(("name", "declaration"), TABLES)
def test_declared_is_the_op_itself_on_usual_numbers(name, declaration):
    for own, other in both(name, declaration, lambda a: np.nan_to_num(a, nan=1, posinf=9, neginf=-9).clip(-1e30, 1e30)):
        np.testing.assert_array_equal(own, other)


INFINITIES = {"Gelu": (-np.inf, 1e30), "Softmax": (-9, 9), "LogSoftmax": (-9, 9), "Resize": (-9, 9)}  # the ranges of their inputs
PLAIN_INFINITIES = {"Relu": (-9, np.inf), **INFINITIES}


@pytest.mark.parametrize(("name", "declaration"), TABLES)
def test_only_nan_and_the_infinities_named_are_treated_otherwise(name, declaration):
    bounds = (PLAIN_INFINITIES if PLAIN_LOOPS.get(name) is declaration else INFINITIES).get(name, (-np.inf, np.inf))
    for own, other in both(name, declaration, lambda a: np.clip(np.where(np.isnan(a), 1, a).astype(a.dtype), *bounds)):
        np.testing.assert_array_equal(own, other)


def computed(layer, arrays):
    """The output of the default kernel of cpu/onednn_eltwise for the first signature."""
    tactic = get_tactic("cpu/onednn_eltwise")
    signature = next(s for s in tactic.signatures(layer, CPU) if tactic.refuses(layer, s, CPU) is None and s.outputs[0].dtype == F32)
    return compute(layer, arrays, tactic, signature, ())[1][0]


@pytest.mark.parametrize(("op", "bounds"), [("Relu", ()), ("Exp", ()), ("Clip", (np.float32(-1),))])
def test_standalone_activations_keep_nan_and_infinity(op, bounds):
    layer, _ = plain(op, ["f32[1,16,1,1]", *map(np.asarray, bounds)], {})
    arrays = [LINE.reshape(1, 16, 1, 1), *bounds]
    got, want = computed(layer, arrays), reference(layer, arrays)[0]
    assert get_tactic("cpu/onednn_eltwise").declares(layer, "jit:uni") == [{}]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


@pytest.mark.parametrize(("op", "bounds", "lost"), [("HardSigmoid", (), 1), ("Clip", (np.float32(-1), np.float32(2)), -1)])
def test_clip_of_nan_is_as_declared(op, bounds, lost):
    layer, _ = plain(op, ["f32[1,16,1,1]", *map(np.asarray, bounds)], {})
    got = computed(layer, [LINE.reshape(1, 16, 1, 1), *bounds])
    assert got.reshape(-1)[0] == lost, "should this fail because NaN is kept: take the op out of KERNELS"
    assert op in list_declared_references(layer, "jit:avx512_core")[0]


def test_a_fused_relu_maps_nan_to_zero_as_declared():
    layer, arrays = fused("Conv", [X, W, B], lambda g, x, w, b: g.add("Relu", g.add("Conv", x, w, b, **PADS)))
    arrays[0][0, 3, 4, 4] = np.nan
    tactic = get_tactic("cpu/onednn_conv")
    signature = next(s for s in tactic.signatures(layer, CPU) if s.outputs[0].dtype == F32)
    kernel, (got,), _ = compute(layer, arrays, tactic, signature, ())
    assert [set(table) for table in tactic.declares(layer, kernel.implementation)] == [{"Relu"}]
    assert not got[:, :, 3:6, 3:6].any()
    assert np.isnan(reference(layer, arrays)[0][:, :, 3:6, 3:6]).all()


def peer(op, x, **attrs):
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attrs)], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None if attrs else x.shape)])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def test_onnx_runtime_and_nan():
    """Peers differ: ONNX Runtime keeps NaN in Relu and Softmax and loses it in window maxima, as declared here."""
    x = np.random.default_rng(0).standard_normal((1, 16, 8, 8)).astype(np.float32)
    x[0, :, 3, 3] = np.nan
    assert np.isnan(peer("Relu", x)[0, :, 3, 3]).all()
    assert np.isnan(peer("Softmax", x, axis=1)[0, :, 3, 3]).all()
    assert not np.isnan(peer("GlobalMaxPool", x)).any()
    assert not np.isnan(peer("ReduceMax", x, axes=(2, 3))).any()
