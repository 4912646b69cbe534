"""Transposed convolutions and unfused batch normalizations: packing, machine code, refusals; on a GPU sizes of real networks."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, planned, reference

from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.ops import OPS, Sample, sample_layer
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv_transpose import Transposed
from whet.tactics.cuda.conv.conv_transpose import ConvTranspose, convert_to_tap_rows
from whet.tactics.cuda.conv.conv_transpose_generic import order_by_taps

IMAGES = [s for s in OPS["ConvTranspose"].samples if str(s.inputs[0]).count(",") == 3 and not str(s.inputs[0]).startswith("extreme")]


def gathered(t, columns, bias):
    """The sums of `gather` in conv_transpose.cu over columns [n, h, w, r, s, k]."""
    y = np.zeros((t.n, t.p, t.q, t.k)) + bias
    for p in range(t.p):
        for q in range(t.q):
            for r in range(t.r):
                for s in range(t.s):
                    at = p + t.pad[0] - r * t.dilation[0], q + t.pad[1] - s * t.dilation[1]
                    if any(a < 0 or a % d for a, d in zip(at, t.stride, strict=True)):
                        continue
                    i, j = at[0] // t.stride[0], at[1] // t.stride[1]
                    if i < t.h and j < t.w:
                        y[:, p, q] += columns[:, i, j, r, s]
    return y


@pytest.mark.parametrize("sample", IMAGES, ids=str)
def test_products_and_gathering_equal_the_reference(sample):
    _, layer, (x, w, b) = sample_layer("ConvTranspose", sample)
    t = Transposed.of(layer)
    pixels = x.transpose(0, 2, 3, 1)
    if t.group == 1:
        columns = (pixels @ convert_to_tap_rows(w).T).reshape(t.n, t.h, t.w, t.r, t.s, t.k)
    else:
        taps = order_by_taps(w, t.group)
        columns = np.empty((t.n, t.h, t.w, t.r, t.s, t.k))
        for k in range(t.k):
            c0 = k // (t.k // t.group) * (t.c // t.group)
            columns[..., k] = np.einsum("nhwc,rsc->nhwrs", pixels[..., c0 : c0 + t.c // t.group], taps[..., k])
    y = gathered(t, columns, 0 if b is None else b)
    np.testing.assert_allclose(y.transpose(0, 3, 1, 2), reference(layer, [x, w, b])[0], rtol=1e-4, atol=1e-5)


def test_direct_weights_of_one_group_are_those_of_the_product():
    w = np.random.default_rng(0).standard_normal((6, 5, 3, 2))
    np.testing.assert_array_equal(order_by_taps(w, 1).transpose(0, 1, 3, 2).reshape(-1, 6), convert_to_tap_rows(w))


@pytest.mark.parametrize("vec", [1, 8])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_machine_code_of_transposed(vec, kind, tmp_path):
    text = sass(compile_cubin(emit_kernel_source("conv_transpose.cu", {"TYPE": kind, "VEC": vec, "ACT": 0})), tmp_path)
    assert {"gather", "direct"} <= set(re.findall(r"^\.text\.(\w+):", text, re.MULTILINE)), "both entries"
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


@pytest.mark.parametrize("last", [0, 1])
def test_machine_code_of_affine(last, tmp_path):
    text = sass(compile_cubin(emit_kernel_source("affine.cu", {"TYPE": 1, "ACT": 0, "LAST": last, "VEC": 8})), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert re.search(r"LDG\.E\.128", text), "16-byte accesses"
    assert re.search(r"STG\.E\.128", text)


def test_refusals_say_why():
    tactic = ConvTranspose()
    _, grouped, _ = sample_layer("ConvTranspose", Sample(["f32[1,16,4,4]", "const f32[16,8,2,2]", None], {"group": 2}))
    signature = tactic.signatures(grouped, HOPPER)[0]
    assert "one group" in tactic.refuses(grouped, signature, HOPPER)
    old = CompileOnlyGpu("sm_80")
    assert "Hopper" in tactic.refuses(grouped, signature, old)
    _, odd, _ = sample_layer("ConvTranspose", Sample(["f32[1,9,4,4]", "const f32[9,8,2,2]", None], {}))
    assert "9 input" in tactic.refuses(odd, tactic.signatures(odd, HOPPER)[0], HOPPER)


LAYERS = [
    ("ConvTranspose", ["f32[2,64,16,12]", "const f32[64,32,2,2]", "const f32[32]"], {"strides": (2, 2)}),
    ("ConvTranspose", ["f32[1,40,9,11]", "const f32[40,24,4,4]", "const f32[24]"], {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ("ConvTranspose", ["f32[1,16,9,9]", "const f32[16,5,3,3]", None], {"strides": (3, 1), "pads": (0, 2, 1, 1), "output_padding": (1, 0)}),
    ("BatchNormalization", ["f32[2,96,28,28]", *["const f32[96]"] * 3, "const positive f32[96]"], {}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_real_sizes_match_the_reference(gpu, case):
    _, layer, arrays = sample_layer(case[0], Sample(*case[1:]))
    ran = set()
    for t, signature, config, kernel in planned(layer, gpu, most=12):
        if t.name.startswith(("cuda/conv_transpose", "cuda/batch_norm")):
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
            ran.add(t.name)
    assert ran


@pytest.mark.gpu
def test_patches_of_a_transformer_match_the_reference(gpu):
    shapes = ["f32[2,3,64,48]", "const f32[96,3,16,16]", "const f32[96]"]
    _, layer, arrays = sample_layer("Conv", Sample(shapes, {"strides": (16, 16)}))
    ran = 0
    for t, signature, config, kernel in planned(layer, gpu, most=12):
        if t.name == "cuda/patch_embedding":
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            ran += 1
    assert ran >= 4
