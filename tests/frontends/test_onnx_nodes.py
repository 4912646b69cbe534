"""ONNX's node tests: every case whose op whet reads must give the expected outputs, also after writing and reading again."""

import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx, onnx_from_network
from whet.ops import run_network

FLOOR = 1250  # number of cases that ran at the time of writing; fewer means that an op or a form of one was lost

# Cases that whet refuses or computes differently on purpose, by name prefix, with the reason.
OTHERWISE: dict[str, str] = {
    "test_mod_float": "fmod=0 on floats is not allowed by ONNX's text; the cases are newer than it",
}


def cases():
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are computed on import, overflows and all
        return [c for c in load_model_tests(kind="node") if c.model is not None and c.data_sets]


def as_array(v):
    return numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v)


def same(got, want, rtol, atol):
    if got.dtype != want.dtype:
        return f"type {got.dtype}, not {want.dtype}"
    if got.shape != want.shape:
        return f"shape {got.shape}, not {want.shape}"
    if got.dtype.kind in "iub":
        return None if np.array_equal(got, want) else "values differ"
    a, b = got.astype(np.float64), want.astype(np.float64)
    return None if np.allclose(a, b, rtol=rtol, atol=max(atol, 1e-6), equal_nan=True) else f"off by {np.nanmax(np.abs(a - b))}"


def run(net, case):
    for feeds, wants in case.data_sets:
        arrays = [as_array(v) for v in feeds]
        got = run_network(net, dict(zip((t.name for t in net.inputs), arrays, strict=True)))
        wants = [w for want in wants for w in (want if isinstance(want, list) else [want])]  # a sequence is read as one output per element
        for name, g, w in zip(got, got.values(), wants, strict=True):
            eps = {"float16": 2e-3, "bfloat16": 2e-2}.get(str(g.dtype), 1e-4)  # a few units in the last place: the order of accumulation differs
            problem = same(g, as_array(w), max(case.rtol, eps), max(case.atol, eps / 10))
            if problem:
                return f"output {name}: {problem}"
    return None


@pytest.mark.slow
def test_onnx_node_cases():
    ran, skipped, wrong = 0, {}, []
    found = cases()
    if not found:
        pytest.skip(f"onnx {onnx.__version__} does not ship its node cases")
    for case in found:
        if any(case.name.startswith(start) for start in OTHERWISE):
            continue
        try:
            net = network_from_onnx(case.model)
        except UnsupportedError as e:
            skipped[case.name] = str(e)
            continue
        except FrontendError as e:
            if "opset" not in str(e):
                wrong.append(f"{case.name}: {e}")
            continue
        problem = run(net, case)
        if problem is None:
            ran += 1
            again = network_from_onnx(onnx_from_network(net, onnx.defs.onnx_opset_version()))
            problem = run(again, case)
        if problem:
            wrong.append(f"{case.name}: {problem}")
    print(f"\n{ran} of ONNX's node cases ran, {len(skipped)} use what whet has not")
    assert not wrong, "\n".join(wrong)
    assert ran >= FLOOR
