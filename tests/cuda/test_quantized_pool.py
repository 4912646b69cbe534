"""The quantized stem fused with its pooling and the quantization of the image: the pass that forms it, and results of the kernel."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.builder.precision.int8 import prepare
from whet.network import Network, parse_type
from whet.ops import run_regions
from whet.passes import lower
from whet.precision import Range, Ranges, find_quantization_sites, quantize
from whet.tactics import TACTICS, load_tactics
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.stem.qstem_overlap import pack_fragments, step_positions

CONFIG = BuildConfig(backend="cuda", precisions=("fp16", "int8"), timing_cache="", avg_timing=1)


def stem(image=(2, 3, 32, 32), filters=7, stride=2, pool=(3, 2, 1), act="Relu", skewed=False, channels=64, pads=None):
    """A quantized network of a stem, pooling, and a 1x1 convolution."""
    rng = np.random.default_rng(0)
    net = Network("stem")
    x = net.add_input("x", parse_type("f32[" + ",".join(map(str, image)) + "]"))
    w = net.constant((rng.standard_normal((channels, image[1], filters, filters)) / filters).astype(np.float32), "w0")
    b = net.constant(rng.standard_normal(channels).astype(np.float32), "b0")
    y = net.add("Conv", x, w, b, strides=(stride, stride), pads=pads or (filters // 2,) * 4)
    if act == "Silu":
        y = net.add("Mul", y, net.add("Sigmoid", y))
    else:
        y = net.add(act, y) if act else y
    size, step, pad = pool  # size 0: not pooled
    y = net.add("MaxPool", y, kernel_shape=(size, size), strides=(step, step), pads=(pad,) * 4) if size else y
    net.mark_output(net.add("Conv", y, net.constant((rng.standard_normal((32, channels, 1, 1)) / 8).astype(np.float32), "w1"), None), "y")
    made = prepare(net, CONFIG)
    low = -1.0 if skewed else -3.0
    roots = find_quantization_sites(made).roots
    ranges = {t.name: Range(low if t.name == "x" else 0.0 if act == "Relu" else -4.0, 3.0 if t.name == "x" else 4.0) for t in roots}
    return quantize(made, Ranges(ranges))


def fused_layer(net, composite="ConvPool"):
    """The layer as formed by the pass and seen by candidates."""
    lowered, _ = lower(net, refuses=lambda layer: None)
    return next(x for x in lowered.layers if x.composite == composite)


def test_one_layer_from_the_image_to_the_pooled_integers(standin_gpu):
    plan = build(stem(), BuildConfig(**{**vars(CONFIG), "verify": False}))
    first = plan.network.layers[0]
    assert first.composite == "ConvPool"
    assert [x.op for x in first.regions["body"].layers] == ["QuantizeLinear", "Fused", "MaxPool"]
    assert plan.choices[first.name].tactic in ("cuda/qstem_pool", "cuda/qstem_overlap")
    assert plan.choices[first.name].inputs[0] == ("linear", "f32")
    assert plan.report.precisions["int8"].layers == 2


def test_without_pooling_the_convolution_reads_the_image_itself(standin_gpu):
    plan = build(stem(pool=(0, 0, 0)), BuildConfig(**{**vars(CONFIG), "verify": False}))
    first = plan.network.layers[0]
    assert first.composite == "QuantizeThenConv"
    assert plan.choices[first.name].tactic in ("cuda/qstem_image", "cuda/qstem_overlap")
    assert plan.choices[first.name].inputs[0] == ("linear", "f32")


def test_it_is_unfused_if_its_parts_are_faster(standin_gpu):
    standin_gpu["pooled"] = 30.0
    plan = build(stem(), BuildConfig(**{**vars(CONFIG), "verify": False}))
    assert [x.composite or x.op for x in plan.network.layers if x.op != "Reformat"] == ["QuantizeLinear", "Conv", "MaxPool", "Conv"]
    assert any("unfused" in why for _, why in plan.report.unfused)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"pool": (5, 2, 2)}, ("windows of 5", "3 x 3 windows")),
        ({"pool": (3, 1, 1)}, (None, "strides of 2")),
        ({"act": "LeakyRelu"}, (None, "pools before it activates")),
        ({"filters": 3, "stride": 1}, (None, "strides of 2")),
        ({"image": (2, 3, 32, 39)}, (None, "39 columns")),
        ({"channels": 32}, ("32 output channels", "32 channels")),
        ({"image": (1, 3, 16, 320)}, (None, "160 columns")),
    ],
)
def test_refusals_give_the_reason(changed, why):
    load_tactics("cuda")
    machine = CompileOnlyGpu()
    layer = fused_layer(stem(**changed))
    for name, reason in zip(("cuda/qstem_pool", "cuda/qstem_overlap"), why, strict=True):
        mine = TACTICS[name]
        said = mine.refuses(layer, mine.signatures(layer, machine)[0], machine)
        assert said is None if reason is None else reason in said
        assert "Hopper" in mine.refuses(layer, mine.signatures(layer, machine)[0], CompileOnlyGpu("sm_80"))


def by_registers(packed):
    """Operand A [64, step, 32] from the registers of wgmma (PTX: m64k32, 8 bits)."""
    tall = np.zeros((64, len(packed), 32), np.int64)
    for thread in range(128):
        for register in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
            at = thread % 4 * 4 + register // 2 * 16
            tall[row, :, at : at + 4] = packed[:, thread, register * 4 : register * 4 + 4]
    return tall


@pytest.mark.parametrize(
    "s",
    [
        ConvShape(1, 10, 12, 3, 64, 7, 7, (2, 2), (3, 3, 3, 3)),
        ConvShape(1, 12, 8, 3, 32, 6, 6, (2, 2), (2, 2, 2, 2)),
        ConvShape(1, 9, 8, 4, 32, 3, 3, (2, 2), (1, 1, 1, 1)),
        ConvShape(1, 7, 6, 1, 64, 5, 5, (2, 2), (2, 1, 2, 1)),
    ],
    ids=str,
)
def test_filters_packed_for_blocks_of_two_by_two_pixels_equal_the_convolution(s):
    rng = np.random.default_rng(3)
    image, filters = rng.integers(-128, 128, (s.c, s.h, s.w)), rng.integers(-128, 128, (s.k, s.c, s.r, s.s)).astype(np.int8)
    tall, steps, side = by_registers(pack_fragments(filters, s).astype(np.int64)), step_positions(s), 64 // s.k
    top, left = s.pad[0] + s.pad[0] % 2, s.pad[1] + s.pad[1] % 2
    wide = np.pad(image, ((0, 0), (top, 16), (left, 16)))

    def place(row, column):  # 16 bytes: two rows, two columns, channels
        seen = wide[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].transpose(1, 2, 0).reshape(-1)
        return np.concatenate([seen, np.full(16 - seen.size, 77)])  # bytes after the channels have no effect

    for p in range(0, s.p, side):
        for q in range(s.q):
            read = np.stack([np.concatenate([place(p + y, q + x) for y, x in (a, b or a)]) for a, b in steps])
            sums = np.einsum("msk,sk->m", tall, read)
            for row in range(64):
                warp, group, later = row // 16, row % 8, row % 16 // 8
                channel, down = warp % (s.k // 16) * 16 + 2 * group + later, p + warp // (s.k // 16)
                if down < s.p:
                    first = (2 * down - s.pad[0] + top, 2 * q - s.pad[1] + left)
                    window = wide[:, first[0] : first[0] + s.r, first[1] : first[1] + s.s]
                    assert sums[row] == (filters[channel] * window).sum()


SHAPES = {
    "resnet": {"image": (3, 3, 64, 64)},
    "odd sizes": {"image": (2, 3, 45, 39)},
    "zero point, one channel": {"image": (2, 1, 32, 40), "skewed": True},
    "signed results": {"image": (2, 3, 32, 32), "act": ""},
    "small filter, windows side by side": {"image": (2, 4, 32, 32), "filters": 3, "stride": 1, "pool": (2, 2, 0)},
    "leaky": {"image": (2, 3, 32, 32), "act": "LeakyRelu"},
    "not pooled": {"image": (2, 3, 45, 39), "filters": 3, "pool": (0, 0, 0)},
    "not pooled, zero point, leaky": {"image": (1, 3, 64, 64), "pool": (0, 0, 0), "skewed": True, "act": "LeakyRelu"},
    "two rows at once, silu": {"image": (2, 3, 70, 64), "filters": 6, "pads": (2,) * 4, "pool": (0, 0, 0), "act": "Silu", "channels": 32},
    "two rows at once, zero point": {"image": (1, 3, 45, 70), "filters": 3, "pool": (0, 0, 0), "skewed": True, "channels": 32},
    "two tiles in a row": {"image": (1, 4, 16, 420), "filters": 3, "pool": (0, 0, 0), "act": "Silu", "channels": 64},
    "resnet, whole rows": {"image": (2, 3, 224, 224)},
}


@pytest.mark.gpu
@pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable()))
@pytest.mark.parametrize("name", SHAPES)
def test_every_instance_equals_the_reference(name):
    from test_tactics import compute

    from whet.backends import get_backend

    pooled = SHAPES[name].get("pool") != (0, 0, 0)
    gpu, layer = get_backend("cuda"), fused_layer(stem(**SHAPES[name]), "ConvPool" if pooled else "QuantizeThenConv")
    load_tactics("cuda")
    rng = np.random.default_rng(1)
    arrays = [t.array() if t.is_constant else (2 * rng.standard_normal(t.shape)).astype(np.float32) for t in layer.inputs]
    arrays = [np.where(rng.random(a.shape) < 0.001, np.nan, a) if a is not None and a.ndim == 4 and not t.is_constant else a
              for t, a in zip(layer.inputs, arrays, strict=True)]  # fmt: skip
    (want,) = run_regions(layer, arrays)
    tried = 0
    for mine in (TACTICS["cuda/qstem_pool" if pooled else "cuda/qstem_image"], TACTICS["cuda/qstem_overlap"]):
        for signature in mine.signatures(layer, gpu):
            if mine.refuses(layer, signature, gpu):
                continue
            for config in mine.configs(layer, signature, gpu):
                ((got,), _) = compute(gpu, layer, arrays, signature, mine.plan(layer, signature, config, gpu))
                assert np.abs(got.astype(int) - want.astype(int)).max() <= 1, (mine, signature, config)
                assert (got != want).mean() < 0.01, (mine, signature, config)
                tried += 1
    assert tried >= 4
