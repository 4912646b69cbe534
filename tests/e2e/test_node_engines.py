"""ONNX's node cases as engines: the selected kernels pass the cases that the reference passes (tests/frontends/test_onnx_nodes.py)."""

import warnings
import zlib

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from whet.builder import BuildConfig, build
from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx
from whet.runtime import Runtime

EVERY = 12  # one case of so many, by its name; all of them take 90 seconds
SEQUENCES = ("test_if_seq", "test_split_to_sequence_1")  # an output of the engine for each element
ALWAYS = ("masked", "INT4", "UINT4")  # by a part of the name: completely masked rows, 4-bit elements


def chosen():
    """A subset of the cases that whet reads: (case, network)."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are computed on import, overflows and all
        cases = [c for c in load_model_tests(kind="node") if c.model is not None and c.data_sets]
    for case in cases:
        if zlib.crc32(case.name.encode()) % EVERY == 0 or case.name in SEQUENCES or any(part in case.name for part in ALWAYS):
            try:
                yield case, network_from_onnx(case.model)
            except (UnsupportedError, FrontendError):
                continue


def as_array(v):
    return numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v)


def differs(got, want, case):
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{got.shape}, not {want.dtype}{want.shape}"
    if got.dtype.kind in "iub":
        return "" if np.array_equal(got, want) else "integers differ"
    eps = {"float16": 2e-3, "bfloat16": 2e-2}.get(str(got.dtype), 1e-4)
    a, b = got.astype(np.float64), want.astype(np.float64)
    return "" if np.allclose(a, b, rtol=max(case.rtol, eps), atol=max(case.atol, eps / 10), equal_nan=True) else "values differ"


@pytest.mark.slow
def test_node_cases_as_engines():
    ran, wrong = 0, []
    for case, net in chosen():
        for given, wants in case.data_sets:
            feeds = dict(zip((t.name for t in net.inputs), map(as_array, given), strict=True))
            shapes = {n: a.shape for n, a in feeds.items()}
            profiles = () if all(t.type.static for t in net.inputs) else ((shapes, shapes, shapes),)
            plan = build(net, BuildConfig(optimization_level=1, avg_timing=1, timing_cache="", threads=1, profiles=profiles))
            with Runtime().load(plan).create_context() as context:
                got = context.run(feeds)
            elements = [e for w in wants for e in (w if isinstance(w, list) else [w])]
            wrong += [f"{case.name}, {n}: {said}" for (n, g), w in zip(got.items(), elements, strict=True) if (said := differs(g, as_array(w), case))]
        ran += 1
    assert not wrong, "\n".join(wrong)
    assert ran >= 120
