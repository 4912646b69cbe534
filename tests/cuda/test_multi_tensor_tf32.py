"""Concat-input and dual-output 1x1 convolutions of f32 tensors in TF32: packing, machine code, cases of the builder, results."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_concat_input_conv import HOPPER, steps_of
from test_dual_output_conv import build_plan
from test_stem import check
from test_tf32 import undealt

from whet.backends.cuda.compile import compile_cubin
from whet.builder.verify.emulation import emulate, list_multiplied_inputs
from whet.ops import OPS, sample_layer
from whet.tactics import get_tactic
from whet.tactics.cuda.conv._tf32 import Tf32Config, compute_channel_order, emit_tf32_source
from whet.tactics.cuda.conv.multi_tensor_conv_tf32 import match_convs

TACTIC = get_tactic("cuda/multi_tensor_conv_tf32")
SAMPLES = [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] in TACTIC.composites]


def accepted_case(i):
    """The sample's layer, arrays and signature; skips samples on integers or in 16 bits."""
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    found = TACTIC.signatures(layer, HOPPER)
    if not found or TACTIC.refuses(layer, found[0], HOPPER):
        pytest.skip("not of f32 tensors, or not in fours")
    return layer, arrays, found[0]


@pytest.mark.parametrize("i", SAMPLES)
def test_packed_weights_cover_all_inputs_and_results(i):
    layer, arrays, signature = accepted_case(i)
    found = match_convs(layer)
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
    rows = np.concatenate([steps_of(arrays[i], found.bk) for i in found.images], axis=1)
    assert rows.shape[1] == found.steps * found.bk
    k = found.shapes[0].k
    packed = undealt(kernel.packed[0].make().view(np.float32).reshape(-1, rows.shape[1]))[:k].astype(np.float64)
    # in the order in which threads read the channels of a step
    read = rows.reshape(len(rows), -1, found.bk)[:, :, compute_channel_order(found.bk)].reshape(rows.shape)
    got = read @ packed.T + kernel.packed[1].make().view(np.float32)[:k]
    whole = np.concatenate([np.moveaxis(arrays[i], 1, -1).reshape(rows.shape[0], -1) for i in found.images], axis=1).astype(np.float64)
    want = np.concatenate(
        [
            whole @ np.asarray(way.weights.array(), np.float64).reshape(way.shape.k, -1).T
            + way.epilogue.bias(way.bias, way.shape.k).astype(np.float64)
            for way in found.ways
        ],
        axis=1,
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_some_samples_are_accepted():
    composites = set()
    for i in SAMPLES:
        _, layer, _ = sample_layer("Fused", OPS["Fused"].samples[i])
        found = TACTIC.signatures(layer, HOPPER)
        if found and TACTIC.refuses(layer, found[0], HOPPER) is None:
            composites.add(layer.composite)
    assert composites == {"ConcatInputConv", "DualOutputConv"}


@pytest.mark.parametrize(
    ("tile", "joined", "fork"),
    [
        (Tf32Config(2, 64, 32, 3, blocks=2), True, True),
        (Tf32Config(1, 32, 32, 4, sk=4), True, False),
        (Tf32Config(1, 64, 32, 3, blocks=4), False, True),
    ],
    ids=str,
)
def test_machine_code(tile, joined, fork, tmp_path):
    assert tile.valid()
    text = sass(compile_cubin(emit_tf32_source(tile, False, "silu", False, False, joined, fork)), tmp_path)
    plain = sass(compile_cubin(emit_tf32_source(tile, False, "silu", False)), tmp_path)
    assert (text.count("UTMALDG") > plain.count("UTMALDG")) == joined, "a second input has its own copy"
    assert "STG.E.128" in text
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "BRA.U.ANY" not in text


def test_a_network_in_tf32_reads_its_input_once(standin_gpu):
    plan = build_plan(precisions=())
    layers = [x for x in plan.network.layers if x.op != "Reformat"]
    assert [x.composite for x in layers] == ["DualOutputConv", "DualOutputConv"]
    assert all(plan.choices[x.name].tactic == "cuda/multi_tensor_conv_tf32" for x in layers)


@pytest.mark.parametrize("i", SAMPLES)
def test_images_and_weights_count_as_rounded(i):
    layer, _, _ = accepted_case(i)
    convs, rounded = match_convs(layer), list_multiplied_inputs(layer)
    assert {t.name for t in rounded} == {layer.inputs[i].name for i in convs.images} | {way.weights.name for way in convs.ways}


def test_a_network_of_them_can_be_emulated(standin_gpu):
    plan = build_plan(precisions=())
    x = np.random.default_rng(0).standard_normal((2, 64, 20, 20)).astype(np.float32)
    emulated, exact = emulate(plan, {"x": x}), emulate(build_plan(precisions=(), tactic_sources=("-conv_tf32", "-multi_tensor_conv_tf32")), {"x": x})
    for name, want in exact.items():
        error = np.linalg.norm(emulated[name] - want) / np.linalg.norm(want)
        assert 1e-4 < error < 1e-3, "two layers' rounding to TF32"


@pytest.mark.gpu
@pytest.mark.parametrize("i", SAMPLES)
def test_results_match_the_reference(gpu, i):
    layer, arrays, _ = accepted_case(i)
    check(gpu, TACTIC, layer, arrays)
