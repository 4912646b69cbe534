"""Each op's reference, on each of its samples, against the independent onnx.reference (ONNX Runtime if that is wrong)."""

import functools
import math

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_conv import Conv
from onnx.reference.ops.op_conv_transpose import ConvTranspose
from onnx.reference.ops.op_gemm import Gemm_7
from onnx.reference.ops.op_matmul import MatMul

from support.data_sizes import with_sizes
from whet.frontends.onnx_writer import OPSET, onnx_from_network
from whet.ops import OPS, run_layer, run_regions, sample_layer

CASES = [(name, i) for name, o in sorted(OPS.items()) for i in range(len(o.samples))]

# Samples (by op, or "op-number") that onnx.reference 1.23 gets wrong or cannot run; ONNX Runtime is the reference for them.
BY_RUNTIME = {
    "AveragePool-6": "an infinity makes windows beside it NaN",
    "ConvTranspose-2": "fails on groups with dilations",
    "ConvTranspose-6": "fails on groups with several input channels",
    "GlobalLpPool": "not there",
    "GlobalMaxPool-2": "takes the largest over axes 1 and 2 of rank 3",
    "GlobalMaxPool-3": "takes the largest over axes 3 and 4 of rank 5",
    "LRN": "counts channels by the batch size",
    "GRU-3": "ignores sequence lengths",
    "LSTM-3": "as GRU-3",
    "LSTM-9": "as GRU-3",
    "LogSoftmax-4": "is the logarithm of a softmax that rounded to 0",
    "LpNormalization-1": "a 1-norm without absolute values",
    "MaxPool-8": "fails on int8",
    "MaxRoiPool": "not there",
    "Loop-0": "joins what the turns scan out along an axis that is there already",
    "Loop-2": "takes no turn where no condition is given",
    "Mean": "does not broadcast",
    "NonMaxSuppression": "takes no absent inputs, and one box format",
    "OneHot-1": "fails on a depth of shape [1]",
    "Pad-5": "fails on negative pads",
    "ConcatShifts": "as Pad",
    "RNN-1": "knows no Relu",
    "Resize-12": "half_pixel_symmetric with floor of the output size",
    "Scan-1": "not there with axes and directions",
    "SelectBoxes": "as NonMaxSuppression",
    "Softsign-3": "fails on scalars",
}
# ... if neither can compute it: a formula below is the reference.
BY_FORMULA = {
    "LRN-1": "ONNX Runtime takes rank 4 only",
    "Erf-5": "onnx.reference rounds to float32",
    "Gelu-5": "as Erf",
    "HardSwish-5": "onnx.reference takes 1/6 in float32",
}


def in_float64(op, name):
    """onnx.reference's `op` with float64 accumulators, rounded once: the order of its float32 accumulation depends on the CPU's BLAS kernel."""

    def run(self, *arrays, **attributes):
        wide = [a.astype(np.float64) if a is not None and a.dtype == np.float32 else a for a in arrays]
        with np.errstate(over="ignore"):
            return tuple(y.astype(arrays[0].dtype) for y in op._run(self, *wide, **attributes))

    return type(name, (op,), {"op_domain": "", "_run": run})


PRODUCTS = [in_float64(Conv, "Conv"), in_float64(ConvTranspose, "ConvTranspose"), in_float64(Gemm_7, "Gemm"), in_float64(MatMul, "MatMul")]


def test_every_op_has_samples_or_is_refused():
    bare = sorted(n for n, o in OPS.items() if not o.samples and o.pure)
    assert bare == ["Reformat"]  # the builder's own ops, tested with the tactics


@functools.cache
def schemas_of_ops() -> dict[str, list]:
    """The schemas of all opsets by op; ONNX copies all of them for each question."""
    schemas: dict[str, list] = {}
    for s in onnx.defs.get_all_schemas_with_history():
        if s.domain == "":
            schemas.setdefault(s.name, []).append(s)
    return schemas


def opset_of(layer) -> int:
    """The opset for writing a layer: the current one, or the first that has the op with these attributes."""
    if layer.op == "Fused":
        return max(opset_of(x) for x in layer.regions["body"].layers)
    known = schemas_of_ops().get(layer.op, [])
    extra = {k for k, v in layer.attrs.items() if v != OPS[layer.op].attrs[k]}
    says_all = [s.since_version for s in known if extra <= set(s.attributes)]
    return max(OPSET, min(says_all, default=OPSET))


def ours(layer, arrays):
    return run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)


@pytest.mark.parametrize(("name", "i"), CASES)
def test_reference(name, i):
    net, layer, arrays = sample_layer(name, OPS[name].samples[i])
    layer.attrs = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in layer.attrs.items()}  # as ONNX stores them
    before = [None if a is None else a.copy() for a in arrays]
    got = ours(layer, arrays)
    for a, b in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(a, b, err_msg="the reference changed its input")
    want = judged(f"{name}-{i}", net, layer, arrays)
    for t, shape, a, b in zip(layer.outputs, with_sizes(layer, got), got, want, strict=True):
        assert a.dtype == t.dtype.numpy, f"%{t.name} is {a.dtype}, inferred {t.type}"
        assert a.shape == shape
        compare(a, np.asarray(b), t.dtype)


def judged(case, net, layer, arrays):
    """The independent result for the sample."""
    if case in BY_FORMULA:
        return [FORMULAS[layer.op](layer, *arrays)]
    model = onnx_from_network(net, opset_of(layer))
    feed = {t.name: a for t, a in zip(layer.inputs, arrays, strict=True) if t in net.inputs}
    with np.errstate(all="ignore"):
        if {case, layer.op, layer.attrs.get("composite")} & set(BY_RUNTIME):
            return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
        return ReferenceEvaluator(model, new_ops=PRODUCTS).run(None, feed)


def lrn(layer, x):
    """One output at a time, as in ONNX's text."""
    a, y = layer.attrs, np.empty_like(x)
    for n, c, p in np.ndindex(*x.shape):
        around = x[n, max(0, c - (a["size"] - 1) // 2) : c + a["size"] // 2 + 1, p]
        y[n, c, p] = x[n, c, p] / (a["bias"] + a["alpha"] / a["size"] * np.sum(around.astype(float) ** 2)) ** a["beta"]
    return y


FORMULAS = {
    "LRN": lrn,
    "HardSwish": lambda layer, x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Erf": lambda layer, x: np.vectorize(math.erf)(x),
    "Gelu": lambda layer, x: np.vectorize(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2)(x),
}


def compare(got, want, dtype):
    assert got.shape == want.shape
    if not dtype.is_float:
        np.testing.assert_array_equal(got, want.astype(got.dtype))
        return
    ulp = {"f64": 1e-14, "f32": 2e-6, "f16": 2e-3, "bf16": 2e-2}.get(dtype.name, 0)
    got, want = got.astype(np.float64), want.astype(np.float64)
    scale = np.abs(want[np.isfinite(want)]).max(initial=0)
    np.testing.assert_allclose(got, want, rtol=4 * ulp, atol=ulp * min(scale, 1e3))


def test_erf_is_accurate_everywhere():
    """The tabulated error function: between and on grid points, at the ends, and across a chunk's border."""
    from whet.ops._erf import erf

    x = np.concatenate([np.linspace(-7, 7, 40001), np.array([0.0, -0.0, 1e-300, -1e-8, 6.0, 5.9999999, np.inf, -np.inf])])
    want = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(erf(x), want, rtol=4e-16, atol=0)
    assert np.signbit(erf(np.array([-0.0])))[0]
    assert np.isnan(erf(np.array([np.nan])))[0]
