"""A detector's heads in one launch a level: which rows come of which pixels, what is packed, the machine code, and on a GPU the boxes."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from whet import network_from_onnx, zoo
from whet.backends.cuda import compile as compiler
from whet.backends.cuda.compile import compile_cubin
from whet.builder import BuildConfig, build
from whet.errors import BackendError
from whet.ops import OPS, sample_layer
from whet.tactics import get_tactic
from whet.tactics.cuda._moves import Moves
from whet.tactics.cuda._source import source
from whet.tactics.cuda.own_heads import _heads

TACTIC = get_tactic("cuda/own_heads")
SAMPLES = [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["hint"] == "Heads"]
MOVES = [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["hint"] == "Moves"]


@pytest.mark.parametrize("i", SAMPLES)
def test_filters_and_biases_stand_by_anchors(i):
    _, layer, _ = sample_layer("Fused", OPS["Fused"].samples[i])
    made, signature = _heads(layer), TACTIC.signatures(layer, HOPPER)[0]
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
    assert sum(x.anchors * x.pixels for x in made.levels) == made.rows
    for k, x in enumerate(made.levels):
        filters = kernel.packed[1 + 2 * k].make().view(signature.inputs[x.place].dtype.numpy).reshape(x.anchors, made.columns, -1).astype(np.float32)
        bias = kernel.packed[2 + 2 * k].make().view(np.float32).reshape(x.anchors, made.columns)
        given, own = (layer.inputs[layer.inputs.index(t)].array() for t in x.conv.inputs[1:3])
        count = x.anchors * made.span
        np.testing.assert_allclose(filters[:, : made.span, : x.channels].reshape(count, -1), given[:count, :, 0, 0], rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(bias[:, : made.span].reshape(-1), own[:count])
        assert not filters[:, made.span :].any()
        assert not filters[:, :, x.channels :].any()


@pytest.mark.parametrize("i", MOVES)
def test_rows_that_are_no_anchors_of_a_pixel_have_no_code(i):
    sample = OPS["Fused"].samples[i]
    _, layer, _ = sample_layer("Fused", sample)
    formats = {k: "nhwc" for k, t in enumerate(layer.inputs) if t is not None and not t.is_constant}
    if layer.outputs[0].type.rank != 3:
        pytest.skip("no rows")
    _, c, h, w = layer.inputs[0].shape
    span = layer.outputs[0].shape[2]
    moves = Moves(layer, formats, "linear", rows=True)
    text = moves.level(0, 0, c // span, h * w, c)
    assert text
    assert "source(0," in text
    assert "source(1," not in text, "of this level alone"
    assert moves.level(0, 0, c // span, h * w, c + 1) is None, "another distance from pixel to pixel"
    if len(formats) > 1:
        assert moves.level(1, 0, c // span, h * w, c) is None, "another source"
        assert moves.level(0, 1, c // span, h * w, c) is None, "rows of two levels"


@pytest.mark.parametrize("i", SAMPLES)
def test_its_machine_code_is_what_was_meant(i, tmp_path):
    try:
        compiler.nvrtc()
    except BackendError as error:
        pytest.skip(str(error))
    _, layer, _ = sample_layer("Fused", OPS["Fused"].samples[i])
    made = _heads(layer)
    for x in made.levels[:1]:
        constants = made.constants(x, 2, False)
        text = sass(compile_cubin(source("heads.cu", constants), cached=False), tmp_path)
        assert text.count("HGMMA") == constants["HOLD"] * 4, "every product once, unrolled"
        assert "UTMALDG.3D" in text, "pixels come by bulk copies"
        assert "UBLKCP" in text, "rows leave by bulk copies"
        assert not re.search(r"\b(LDL|STL)\b", text), "nothing spills"


def test_a_detectors_heads_are_one_layer(standin_gpu):
    net = network_from_onnx(zoo.build("yolov5s"))
    shape = {"images": (2, 3, 640, 640)}
    config = BuildConfig(backend="cuda", precisions=("fp16",), profiles=((shape, shape, shape),), timing_cache="", verify=False, avg_timing=1)
    plan = build(net, config)
    (layer,) = [x for x in plan.network.layers if x.hint == "Heads"]
    assert plan.choices[layer.name].tactic == "cuda/own_heads"
    assert not [x for x in plan.network.layers if x.hint == "Moves"]


@pytest.mark.gpu
@pytest.mark.parametrize("i", SAMPLES)
def test_boxes_match_the_reference(gpu, i):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    for signature in TACTIC.signatures(layer, gpu):
        for config in TACTIC.configs(layer, signature, gpu):
            kernel = TACTIC.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.inputs[0].dtype, f"{signature} {config}")
