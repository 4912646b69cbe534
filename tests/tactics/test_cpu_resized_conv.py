"""1x1 convolutions of an upsampled image concatenated with another: all sizes, every config, threads, separate results, users' own buffers."""

import numpy as np
import pytest
from compiled_results import check_odd_numbers, check_pointed_elsewhere, computed
from test_compiled_kernels import TILES

from whet.backends.cpu import CpuBackend
from whet.builder import BuildConfig, build
from whet.builder.lowering import lower_network
from whet.composites.resized_conv import make_resized_conv_sample
from whet.inspector.facts import layer_facts
from whet.network import Network, parse_type
from whet.ops import run_network, sample_layer
from whet.ops._cost import count_network_operations, count_operations
from whet.runtime import Runtime
from whet.tactics import get_tactic
from whet.tactics.cpu._llvm import jit

NAME = "cpu/resized_conv"
NEAR, HALF = ("asymmetric", "floor"), ("half_pixel", "round_prefer_floor")
SIZES = [
    (1, (16, 16), (16, 16), (6, 5), (2, 2), False, NEAR), (2, (24, 48), (48, 16), (4, 6), (2, 2), True, NEAR),
    (1, (40, 8), (17, 47), (5, 5), (2, 3), False, NEAR), (3, (4, 4), (3, 30), (2, 13), (4, 1), True, NEAR),
    (1, (112, 64), (64, 48), (10, 10), (2, 2), False, HALF), (2, (64, 32), (80,), (5, 7), (1.4, 2.3), False, HALF),
    (1, (8, 104), (112,), (4, 7), (2, 2), True, ("align_corners", "ceil")), (2, (160, 96), (96, 48), (15, 16), (2, 2), False, NEAR),
]  # fmt: skip


@TILES
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("act", ["silu", "Relu"])
def test_results(size, threads, act, monkeypatch):
    """One convolution and two, either image first, all index mappings of the resize, partly used channel blocks."""
    images, channels, filters, small, scales, last, how = size
    _, layer, arrays = sample_layer("Fused", make_resized_conv_sample(images, channels, filters, small, scales, act=act, last=last, modes=how))
    arrays[0] *= 8
    for kernel in computed(NAME, layer, arrays, threads, monkeypatch):
        assert kernel.threads == [min(threads, sizes[-2]) for sizes in kernel.sizes]


@TILES
@pytest.mark.parametrize("filters", [(48,), (16, 32)])
def test_operands_can_be_bound_to_other_buffers(filters):
    _, layer, arrays = sample_layer("Fused", make_resized_conv_sample(2, (32, 16), filters, (5, 6), (2, 2)))
    check_pointed_elsewhere(NAME, layer, arrays)


@TILES
def test_nan_and_infinity_do_not_spread():
    """NaN and infinities of the small image affect only the pixels sampled from them; those of the large image only their own pixel."""
    _, layer, arrays = sample_layer("Fused", make_resized_conv_sample(1, (16, 16), (32, 48), (5, 7), (2, 2)))
    arrays[0][0, 1, 2, 3], arrays[0][0, 0, 0, 0], arrays[1][0, 2, 4, 6], arrays[1][0, 3, 9, 13] = np.nan, np.inf, 3e38, np.nan
    check_odd_numbers(NAME, layer, arrays, 5)


@TILES
@pytest.mark.parametrize(("sample", "why"), [
    (make_resized_conv_sample(1, (18, 16), (16, 16), (6, 6), (2, 2)), "34 channels"),
    (make_resized_conv_sample(1, (18, 22), (16,), (6, 6), (2, 2)), "18 channels"),
    (make_resized_conv_sample(1, (16, 16), (16, 16), (6, 6), (2, 2), act="HardSwish"), "SiLU, ReLU or no epilogue"),
    (make_resized_conv_sample(1, (16, 16), (16,), (6, 6), (2, 2), act="HardSwish"), "SiLU, ReLU or no epilogue"),
])  # fmt: skip
def test_other_layers_are_refused(sample, why):
    layer = sample_layer("Fused", sample)[1]
    assert why in get_tactic(NAME).why_not(layer)
    assert not get_tactic(NAME).signatures(layer, CpuBackend(threads=1))


def neck(channels=16, filters=(16, 16), side=6, act="Relu", scale=2.0, batch=1):
    net = Network("neck")
    x = net.add_input("x", parse_type(f"f32[{batch},{channels},{side},{side}]"))
    large = int(side * scale) if isinstance(side, int) else "2*H"
    z = net.add_input("z", parse_type(f"f32[{batch},32,{large},{large}]"))
    attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", "scales": (1.0, 1.0, scale, scale)}
    joined = net.add("Concat", net.add("Resize", x, **attrs), z, axis=1)
    for k, n in enumerate(filters):
        w = net.constant(np.random.default_rng(k).standard_normal((n, channels + 32, 1, 1)).astype(np.float32), f"w{k}")
        net.mark_output(net.add(act, net.add("Conv", joined, w)), f"y{k}")
    return net


def composites(config=None, **kind):
    return {x.composite for x in lower_network(neck(**kind), config or BuildConfig())[0].layers}


@TILES
def test_layers_without_a_kernel_stay_unfused(monkeypatch):
    """Otherwise the NumPy reference would compute it: unknown activations, channels not divisible by four, images below a tile, unknown sizes, CPUs.
    """
    assert composites() == composites(side=4) == composites(filters=(16,)) == composites(batch="N") == {"ResizedConv"}
    for kind in ({"act": "HardSwish"}, {"channels": 18}, {"side": 2}, {"side": "H"}, {"scale": 1.0}):
        assert "ResizedConv" not in composites(**kind), kind
    bf16 = BuildConfig(precisions=("bf16",))
    monkeypatch.setattr(jit, "has", lambda feature: True)
    assert "ResizedConv" not in composites(bf16)
    monkeypatch.setattr(jit, "has", lambda feature: False)
    assert "ResizedConv" not in composites()


@TILES
def test_dynamic_batch_and_multiply_adds():
    """Batches 1 and 3 of one engine. The fused layer computes less than the original network."""
    net = neck(channels=64, side=20, filters=(32, 64), batch="N")
    shapes = {name: {n: (n, c, s, s) for n in (1, 3)} for name, c, s in (("x", 64, 20), ("z", 32, 40))}
    profile = tuple({name: at[n] for name, at in shapes.items()} for n in (1, 3, 3))
    made = {}
    for passes in ((), ("-fuse_resized_conv",)):
        made[passes] = build(net, BuildConfig(timing_cache="", profiles=(profile,), optimization_level=2, passes=passes))
    whole, parts = ([x for x in layer_facts(p, profile[0]) if x.layer.op != "Reformat"] for p in made.values())
    assert [x.layer.composite for x in whole] == ["ResizedConv"]
    assert [x.layer.composite or x.layer.op for x in parts] == ["Resize", "Concat", "DualOutputConv"]
    saved = 2 * 64 * (32 + 64) * (40 * 40 - 20 * 20)
    assert (
        count_operations(whole[0].layer) == sum(count_operations(x.layer) for x in parts) - saved == count_network_operations(net, {"N": 1}) - saved
    )
    engine = Runtime().load(made[()])
    for n in (1, 3):
        feed = {name: np.random.default_rng(n).standard_normal(at[n]).astype(np.float32) for name, at in shapes.items()}
        with engine.create_context() as context:
            got = context.run(feed)
        for name, want in run_network(net, feed).items():
            np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-4)
