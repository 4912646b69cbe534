"""Quantized few-channel convolutions by image tiles: packing of filters, refusals, and results of the kernel."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_quantized_pool import by_registers

from whet.backends.cuda import driver
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig
from whet.builder.precision.int8 import prepare
from whet.network import Network, parse_type
from whet.ops import run_regions
from whet.passes import lower
from whet.precision import Range, Ranges, find_quantization_sites, quantize
from whet.tactics import TACTICS, load_tactics
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.quantized.qconv_few_channel import list_integer_tiles, pack_filters_for_registers, why_not_few_channel_integer

CONFIG = BuildConfig(backend="cuda", precisions=("fp16", "int8"), timing_cache="", avg_timing=1)
HOPPER = CompileOnlyGpu()


def layer_of(image=(2, 32, 20, 24), channels=32, filters=(3, 3), stride=1, pads=(1, 1, 1, 1), act="Silu", added="", low=-1.0):
    """The quantized convolution of a small network; `added`: a tensor of the same shape is added "before" or "behind" its activation."""
    rng = np.random.default_rng(0)
    net = Network("narrow")
    x = net.add("Relu", net.add_input("x", parse_type("f32[" + ",".join(map(str, image)) + "]")))
    w = net.constant((rng.standard_normal((channels, image[1], *filters)) / 8).astype(np.float32), "w")
    y = net.add("Conv", x, w, net.constant(rng.standard_normal(channels).astype(np.float32), "b"), strides=(stride,) * 2, pads=pads)
    other = net.add("Relu", net.add_input("z", parse_type("f32[" + ",".join(map(str, y.shape)) + "]"))) if added else None
    y = net.add("Add", y, other) if added == "before" else y
    y = net.add("Mul", y, net.add("Sigmoid", y)) if act == "Silu" else net.add(act, y)
    y = net.add("Add", y, other) if added == "behind" else y
    behind = net.constant((rng.standard_normal((16, channels, 2, 2)) / 8).astype(np.float32), "v")
    for value, name in ((y, "y"), (other, "u")):  # inputs of convolutions become integers
        if value is not None:
            net.mark_output(net.add("Conv", value, behind, None), name)
    made = prepare(net, CONFIG)
    lowered, _ = lower(quantize(made, Ranges({t.name: Range(low, 4.0) for t in find_quantization_sites(made).roots})), refuses=lambda layer: None)
    return next(x for x in lowered.layers if x.composite == "Conv" and x.outputs[0].dtype.bits == 8)


SHAPES = {
    "two rows at once": {"image": (2, 32, 20, 24)},
    "odd sizes": {"image": (1, 32, 19, 33)},
    "stride 2": {"image": (2, 32, 22, 36), "channels": 64, "stride": 2},
    "stride 2, two rows at once": {"image": (1, 32, 21, 36), "stride": 2, "act": "Relu"},
    "64 channels, added behind": {"image": (2, 64, 20, 20), "channels": 64, "added": "behind"},
    "added behind": {"image": (1, 32, 20, 172), "added": "behind"},
    "added before": {"image": (2, 32, 18, 24), "channels": 64, "added": "before", "act": "Relu"},
    "wide tile": {"image": (1, 32, 10, 320), "channels": 64, "stride": 2},
    "zero point 0": {"image": (1, 64, 12, 28), "channels": 64, "act": "Relu", "low": 0.0},
    "other filter and padding": {"image": (1, 32, 15, 26), "filters": (2, 5), "pads": (1, 2, 0, 2), "act": "Relu"},
}


@pytest.mark.parametrize("name", SHAPES)
def test_few_channel_layers_are_accepted(name):
    load_tactics("cuda")
    mine, layer = TACTICS["cuda/qconv_few_channel"], layer_of(**SHAPES[name])
    (signature,) = mine.signatures(layer, HOPPER)
    assert mine.refuses(layer, signature, HOPPER) is None
    configs = mine.configs(layer, signature, HOPPER)
    assert len(configs) >= 3
    for config in configs:
        assert mine.plan(layer, signature, config, HOPPER).rtol == 0.0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"image": (1, 16, 20, 20)}, "16 input"),
        ({"channels": 48}, "48 output"),
        ({"filters": (1, 1), "pads": (0,) * 4}, "filter 1 x 1"),
        ({"image": (1, 32, 20, 21), "stride": 2}, "21 columns"),
        ({"stride": 3}, "strides of 1 or 2"),
    ],
)
def test_refusals_give_the_reason(changed, why):
    load_tactics("cuda")
    mine, layer = TACTICS["cuda/qconv_few_channel"], layer_of(**changed)
    assert why in mine.refuses(layer, mine.signatures(layer, HOPPER)[0], HOPPER)


def test_gpus_without_these_products_and_other_activations_are_refused():
    load_tactics("cuda")
    mine, layer = TACTICS["cuda/qconv_few_channel"], layer_of()
    assert "Hopper" in mine.refuses(layer, mine.signatures(layer, HOPPER)[0], CompileOnlyGpu("sm_80"))
    assert "Clip or SiLU" in mine.why_not(layer_of(act="LeakyRelu"))


@pytest.mark.parametrize(
    "s",
    [
        ConvShape(1, 6, 9, 32, 32, 3, 3, (1, 1), (1, 1, 1, 1)),
        ConvShape(1, 7, 8, 32, 64, 3, 3, (2, 2), (1, 1, 1, 1)),
        ConvShape(1, 8, 10, 64, 32, 2, 4, (2, 2), (0, 2, 1, 2)),
        ConvShape(1, 5, 7, 64, 64, 3, 2, (1, 1), (2, 0, 0, 1)),
    ],
    ids=str,
)
def test_filters_packed_for_rows_of_a_tile_are_the_convolution(s):
    """Even and odd columns separated for stride 2, in the order of the copies in qconv_few_channel.cu."""
    rng = np.random.default_rng(3)
    image, filters = rng.integers(0, 256, (s.h, s.w, s.c)), rng.integers(-128, 128, (s.k, s.c, s.r, s.s)).astype(np.int8)
    tall, step, side = by_registers(pack_filters_for_registers(filters, s).astype(np.int64)), s.stride[0], 64 // s.k
    tile = next(t for t in list_integer_tiles(s) if t.fits(False))
    assert len(tall[0]) == tile.steps
    assert why_not_few_channel_integer(s) is None
    first = -s.pad[1] if step == 1 else -((s.pad[1] + 1) // 2)
    wide = np.pad(image, ((s.pad[0], 16), (16, 400), (0, 0)))
    parts = [wide[:, 16 + first * step + i :: step][:, : tile.columns] for i in range(step)]  # of a tile at the left edge
    for p in range(0, s.p, side):
        for q in range(s.q):
            sums = np.zeros(64, np.int64)
            for i in range(tile.steps):
                half, tap, row = i % (s.c // 32), i // (s.c // 32) % s.s, i // (s.c // 32) // s.s
                column = tap - s.pad[1] if step == 1 else (tap - s.pad[1]) >> 1
                read = parts[(tap - s.pad[1]) % step][p * step + row, q + column - first, half * 32 : half * 32 + 32]
                sums += tall[:, i] @ read
            for row in range(64):
                warp, group, later = row // 16, row % 8, row % 16 // 8
                channel, down = warp % (s.k // 16) * 16 + 2 * group + later, p + warp // (s.k // 16)
                if down < s.p:
                    at = (down * step, 16 - s.pad[1] + q * step)
                    window = wide[at[0] : at[0] + s.r, at[1] : at[1] + s.s].transpose(2, 0, 1)
                    assert sums[row] == (filters[channel] * window).sum()


@pytest.mark.gpu
@pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable()))
@pytest.mark.parametrize("name", SHAPES)
def test_every_instance_equals_the_reference(name):
    from test_tactics import compute

    from whet.backends import get_backend

    load_tactics("cuda")
    gpu, layer, mine = get_backend("cuda"), layer_of(**SHAPES[name]), TACTICS["cuda/qconv_few_channel"]
    rng = np.random.default_rng(1)
    arrays = [t.array() if t.is_constant else rng.integers(0, 256, t.shape).astype(t.dtype.numpy) for t in layer.inputs]
    (want,) = run_regions(layer, arrays)
    (signature,) = mine.signatures(layer, gpu)
    for config in mine.configs(layer, signature, gpu):
        ((got,), _) = compute(gpu, layer, arrays, signature, mine.plan(layer, signature, config, gpu))
        assert np.abs(got.astype(int) - want.astype(int)).max() <= 1, config
        assert (got != want).mean() < 0.01, config
