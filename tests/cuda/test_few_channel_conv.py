"""Few-channel convolutions by image tiles (few_channel.cu): weight packing, tiles that fit, machine code; on a GPU the results."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.compiling import first_configs
from whet.backends.cuda import compile as compiler
from whet.backends.cuda.compile import compile_cubin
from whet.builder import BuildConfig, build
from whet.composites.pointwise_then_conv import make_pointwise_conv_sample
from whet.errors import BackendError
from whet.network import Network, parse_network, parse_type
from whet.ops import OPS, sample_layer
from whet.ops._base import Sample
from whet.ops._samples import sample_arrays
from whet.tactics import PlanRefused, get_tactic
from whet.tactics.cuda.conv._conv import ConvShape, PostOps
from whet.tactics.cuda.conv._few_channel import FewChannelTile, count_k_chunks, count_leading_pixels, list_few_channel_tiles, why_not_few_channel
from whet.tactics.cuda.conv.conv import get_conv_shape

TACTIC = get_tactic("cuda/few_channel_conv")
# : image, filters, attributes of the convolution, and whether a residual is added after the activation
CASES = [
    ((2, 32, 18, 20), (32, 3, 3), {"pads": (1, 1, 1, 1)}, True),
    ((1, 32, 33, 36), (40, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}, False),
    ((2, 64, 11, 13), (64, 3, 3), {"pads": (1, 1, 1, 1)}, True),
    ((1, 64, 21, 9), (136, 3, 3), {"pads": (0, 1, 2, 0), "strides": (1, 2)}, False),
    ((2, 16, 17, 24), (24, 5, 5), {"pads": (2, 2, 2, 2)}, True),
    ((1, 16, 40, 36), (16, 3, 1), {"pads": (1, 0, 1, 0), "strides": (2, 1)}, False),
    ((1, 32, 40, 70), (8, 2, 4), {}, False),
]


def layer_of(image, filters, attrs, add):
    """A convolution with bias and SiLU, with or without a residual, as the passes leave it; and its arrays."""
    k, r, s = filters
    net, body = Network("narrow"), Network("body", "lowered")
    specs = [f"f32[{','.join(map(str, image))}]", f"const f32[{k},{image[1]},{r},{s}]", f"const f32[{k}]"]
    plain = Network("shape")
    made = plain.add("Conv", *(plain.add_input(n, parse_type(t.split()[-1])) for n, t in zip("xwb", specs, strict=True)), **attrs)
    specs += [str(made.type)] * add
    arrays = sample_arrays(Sample(specs, {}), "narrow")
    arrays[1] *= np.float32(2 / np.sqrt(image[1] * r * s))
    outer = [net.constant(a, n) if "const" in t else net.add_input(n, parse_type(t)) for n, t, a in zip("xwbr", specs, arrays, strict=False)]
    inner = [body.add_input(t.name, t.type) for t in outer]
    y = body.add("Conv", *inner[:3], **attrs)
    y = body.add("Mul", y, body.add("Sigmoid", y))
    body.mark_output(body.add("Add", y, inner[3]) if add else y)
    layer = net.add_layer("Fused", outer, {"composite": "Conv"}, regions={"body": body})
    net.mark_output(layer.outputs[0])
    return layer, arrays


def undealt(weights):
    """Rows before they were permuted over threads."""
    return weights.reshape(-1, 4, 4, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_filters_meet_the_pixels_of_their_taps(case):
    layer, arrays = layer_of(*case)
    s, signature = get_conv_shape(layer), TACTIC.signatures(layer, HOPPER)[0]
    config = TACTIC.configs(layer, signature, HOPPER)[0]
    kernel, permuted = TACTIC.plan(layer, signature, config, HOPPER), FewChannelTile(**dict(config)).permuted
    rows = kernel.packed[0].make().view(np.float16).reshape(-1, count_k_chunks(s) * 64).astype(np.float64)
    rows = 2 * (undealt(rows) if permuted else rows)[: s.k]  # of SiLU: halved
    x = np.pad(arrays[0].astype(np.float64), ((0, 0), (0, 0), (s.pad[0], s.pad[2]), (s.pad[1], s.pad[3])))
    window = np.concatenate([x[0, :, i, j] for i in range(s.r) for j in range(s.s)])  # of the first result, taps in order, channels innermost
    want = (arrays[1].astype(np.float64) * x[0, :, : s.r, : s.s]).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(rows[:, : window.size] @ window, want, rtol=2e-3, atol=2e-3 * np.abs(want).max())
    assert not rows[:, window.size :].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_that_is_offered_fits(case):
    layer, _ = layer_of(*case)
    s, signature = get_conv_shape(layer), TACTIC.signatures(layer, HOPPER)[0]
    found = list_few_channel_tiles(s, 132)
    assert found
    assert len(TACTIC.configs(layer, signature, HOPPER)) == len(found) == len(set(found))
    for t in found:
        assert t.why_not(s) is None
        assert t.blocks * t.threads <= 2048
        assert t.tw * s.stride[1] * s.c % 64 == 0, "every tile begins with a whole row of 128 bytes"
        assert (t.tw * s.stride[1] * 3 - s.pad[1] - count_leading_pixels(s)) * s.c % 64 == 0
        assert t.box(s)[0] * (64 // s.c) >= count_leading_pixels(s) + (t.tw - 1) * s.stride[1] + s.s


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ConvShape(1, 8, 8, 48, 32, 3, 3), "16, 32 or 64 channels"),
        (ConvShape(1, 8, 7, 32, 32, 3, 3), "rows of a multiple of 128 bytes"),
        (ConvShape(1, 8, 8, 64, 20, 3, 3), "a multiple of 8"),
        (ConvShape(1, 8, 8, 64, 64), "2 to 49 taps"),
        (ConvShape(1, 8, 8, 64, 64, 3, 3, dilation=(2, 2)), "no dilation"),
        (ConvShape(1, 40, 40, 64, 64, 7, 7, (2, 2)), "exceed shared memory"),
    ],
)
def test_refusals(shape, words):
    assert words in why_not_few_channel(shape)


def test_a_tile_that_does_not_fit_is_refused():
    layer, _ = layer_of(*CASES[2])
    config = (("th", 16), ("tw", 16), ("bn", 64), ("slots", 2), ("blocks", 2))
    with pytest.raises(PlanRefused, match="cannot hold"):
        TACTIC.plan(layer, TACTIC.signatures(layer, HOPPER)[0], config, HOPPER)


@pytest.mark.parametrize(
    ("shape", "tile", "residual"),
    [
        (ConvShape(8, 160, 160, 32, 32, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(8, 16, 32, 2, 4), 2),
        (ConvShape(8, 320, 320, 32, 64, 3, 3, (2, 2), (1, 1, 1, 1)), FewChannelTile(8, 16, 64, 1, 2), 0),
        (ConvShape(8, 80, 80, 64, 64, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(16, 16, 64, 1, 1), 1),
        (ConvShape(1, 40, 40, 16, 16, 5, 5, (1, 1), (2, 2, 2, 2)), FewChannelTile(4, 16, 16, 2, 6), 0),
        (ConvShape(8, 160, 160, 32, 32, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(8, 16, 32, 2, 3, front=True), 2),
        (ConvShape(8, 80, 80, 64, 64, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(8, 16, 64, 1, 1, front=True), 2),
        (ConvShape(8, 160, 160, 32, 32, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(16, 16, 32, 1, 1, 4, 4, front=True), 2),
        (ConvShape(8, 80, 80, 64, 64, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(8, 16, 64, 1, 1, 2, 3, front=True), 2),
        (ConvShape(8, 80, 80, 64, 64, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(4, 16, 64, 1, 1, 1, 5, front=True), 2),
    ],
    ids=str,
)
def test_machine_code(shape, tile, residual, tmp_path):
    try:
        compiler.load_nvrtc()
    except BackendError as error:
        pytest.skip(str(error))
    assert tile.why_not(shape) is None
    silu = ("silu", 0.0, 0.0)
    own = residual > 0 and tile.run > 1  # the residual is the input
    text = sass(compile_cubin(tile.source(shape, PostOps(silu, residual), False, silu if tile.front else None, own)), tmp_path)
    front = tile.front * shape.c // 16
    products, read = shape.r * shape.s * shape.c // 16 * tile.run, (shape.r + tile.run - 1) * shape.s * shape.c // 16
    assert text.count("HGMMA") in (products + front, products + 2 * front), "every product once, unrolled; the 1x1 at most twice"
    assert len(re.findall(r"\bLDSM\b", text)) in (read + front, read + 2 * front), "a fragment is one instruction and serves all of a warp's rows"
    assert "UTMALDG.4D" in text, "input tiles are loaded by bulk copies"
    assert len(re.findall(r"\bSTSM\b", text)) in (front, 2 * front), "intermediate results are stored to shared memory by fragments"
    assert "STG.E.128" in text, "results are stored 16 bytes at a time"
    assert ("LDG.E.128" in text) == (residual > 0 and not own)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "BRA.U.ANY" not in text, "addresses of copies and products are warp-uniform: no loops over lanes"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_match_the_reference(gpu, case):
    layer, arrays = layer_of(*case)
    for signature in TACTIC.signatures(layer, gpu):
        for config in first_configs(TACTIC, layer, signature, gpu, 4):
            kernel = TACTIC.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")


NET = """network bottleneck source
in %x: f32[2,32,24,24]
const %w0: f32[32,32,1,1] = seed(1)
const %w1: f32[32,32,3,3] = seed(2)
const %w2: f32[32,32,1,1] = seed(3)
const %w3: f32[32,32,3,3] = seed(4)
%a = Conv(%x, %w0) from "narrow"
%b = Sigmoid(%a)
%c = Mul(%a, %b)
%d = Conv(%c, %w1, pads=(1, 1, 1, 1)) from "wide"
%e = Sigmoid(%d)
%f = Mul(%d, %e)
%g = Add(%x, %f) from "sum"
%h = Conv(%g, %w2) from "read twice"
%i = Conv(%h, %w3, pads=(1, 1, 1, 1)) from "last"
%j = Add(%h, %i)
out %j
"""


def test_a_bottleneck_is_one_launch_if_its_intermediate_has_one_reader(standin_gpu):
    config = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False, avg_timing=1)
    plan = build(parse_network(NET), config)
    made = [x for x in plan.network.layers if (x.composite or x.op) in ("Conv", "PointwiseThenConv")]
    assert [x.composite or x.op for x in made] == ["PointwiseThenConv", "Conv", "Conv"], "the second pair's first result is added as well"
    pair = made[0]
    assert {"narrow", "wide", "sum"} <= set(pair.sources)
    assert plan.choices[pair.name].tactic == "cuda/pointwise_then_conv"


def kinds(configs):
    """The first configuration of each combination of rows per warp, groups and input tiles in flight."""
    found = {}
    for config in configs:
        found.setdefault(tuple(pair for pair in config if pair[0] in ("slots", "run", "groups")), config)
    return list(found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("i", [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] == "PointwiseThenConv"])
def test_pairs_match_the_reference(gpu, i):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    tactic = get_tactic("cuda/pointwise_then_conv")
    for signature in tactic.signatures(layer, gpu):
        for config in kinds(tactic.configs(layer, signature, gpu)):
            kernel = tactic.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [16, 32, 64])
def test_persistent_blocks_give_the_same_bits_for_every_tile(gpu, channels):
    image = f"f32[{128 // max(channels, 32)},{channels},164,168]"
    _, layer, arrays = sample_layer("Fused", make_pointwise_conv_sample(image, channels, residual=True))
    tactic, first = get_tactic("cuda/pointwise_then_conv"), None
    signature = tactic.signatures(layer, gpu)[0]
    for config in tactic.configs(layer, signature, gpu):
        got, _ = compute(gpu, layer, arrays, signature, tactic.plan(layer, signature, config, gpu))
        first = got[0] if first is None else first
        np.testing.assert_array_equal(got[0], first, str(config))
    assert np.isfinite(first).all()
    assert np.abs(first).max() > 0
