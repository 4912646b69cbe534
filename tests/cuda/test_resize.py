"""Resize by tables: tables equal the definition of the op, machine code, refusals; on a GPU real sizes (contract samples: test_tactics.py)."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, planned, reference

from whet.backends.cuda.compile import compile_cubin
from whet.network.types import BF16
from whet.ops import OPS, Sample, sample_layer
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.move.resize import Resize, list_resampled_axes

FLOATS = [s for s in OPS["Resize"].samples if not str(s.inputs[0]).startswith(("u8", "extreme"))]


@pytest.mark.parametrize("sample", FLOATS, ids=str)
def test_tables_equal_the_definition_of_the_op(sample):
    _, layer, arrays = sample_layer("Resize", sample)
    y, beyond = arrays[0].astype(np.float64), None
    for a in list_resampled_axes(layer):
        matrix = np.zeros((len(a.places), y.shape[a.axis]))
        outside = a.places[:, 0] < 0
        np.add.at(matrix, (np.arange(len(a.places))[:, None], np.maximum(a.places, 0)), a.weights)
        y = np.moveaxis(np.tensordot(matrix, y, (1, a.axis)), 0, a.axis)
        at = np.expand_dims(outside, [i for i in range(y.ndim) if i != a.axis])
        beyond = at if beyond is None else beyond | at
    if beyond is not None:
        y = np.where(beyond, layer.attrs["extrapolation_value"], y)
    np.testing.assert_allclose(y, reference(layer, arrays)[0], rtol=1e-4, atol=1e-5)


def test_all_float_samples_have_a_kernel():
    for sample in FLOATS:
        _, layer, _ = sample_layer("Resize", sample)
        tactic = Resize()
        assert any(tactic.refuses(layer, s, HOPPER) is None for s in tactic.signatures(layer, HOPPER)), sample


def test_refusals_say_why():
    tactic = Resize()
    _, cube, _ = sample_layer("Resize", Sample(["f32[1,2,4,4,4]"], {"scales": (1.0, 1.0, 2.0, 2.0, 2.0), "mode": "linear"}))
    assert "two adjacent" in tactic.refuses(cube, tactic.signatures(cube, HOPPER)[0], HOPPER)
    _, channels, _ = sample_layer("Resize", Sample(["f32[1,2,4,4]"], {"scales": (1.0, 2.0, 2.0, 1.0), "mode": "linear"}))
    last = next(s for s in tactic.signatures(channels, HOPPER) if s.outputs[0].format == "nhwc")
    assert "height and width" in tactic.refuses(channels, last, HOPPER)
    _, far, _ = sample_layer("Resize", Sample(["f32[1,1,200,4]"], {"scales": (1.0, 1.0, 0.02, 1.0), "mode": "linear", "antialias": 1}))
    assert "taps" in tactic.refuses(far, tactic.signatures(far, HOPPER)[0], HOPPER)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_machine_code(kind, tmp_path):
    text = sass(compile_cubin(emit_kernel_source("resize.cu", {"TYPE": kind, "VEC": 8})), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert re.search(r"LDG\.E\.128", text), "16-byte accesses"
    compile_cubin(emit_kernel_source("resize.cu", {"TYPE": kind, "VEC": 1}), arch="sm_80")


SIZES = [
    (["f32[2,64,33,40]"], {"sizes": (2, 64, 66, 80), "mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    (["f32[1,24,17,19]"], {"scales": (1.0, 1.0, 2.5, 1.5), "mode": "cubic"}),
    (["f32[1,9,64,64]"], {"scales": (1.0, 1.0, 0.25, 0.3), "mode": "cubic", "antialias": 1}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_real_sizes_match_the_reference(gpu, case):
    _, layer, arrays = sample_layer("Resize", Sample(*case))
    ran = 0
    for t, signature, _, kernel in planned(layer, gpu):
        if t.name == "cuda/resize":
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, str(signature))
            ran += signature.outputs[0].dtype != BF16
    assert ran >= 4
