"""Dual-output 1x1 convolutions by whet's CPU kernel: all sizes, every config, threads, separate results, users' own buffers."""

import numpy as np
import pytest
from compiled_results import check_odd_numbers, check_pointed_elsewhere, computed
from test_compiled_kernels import TILES

from whet.backends.cpu import CpuBackend
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.composites.dual_output_conv import make_dual_output_sample
from whet.network import Network, parse_type
from whet.ops import sample_layer
from whet.tactics import get_tactic
from whet.tactics.cpu._llvm import jit

NAME = "cpu/dual_output_conv"
SIZES = [
    (1, 16, (16, 16), 12, 12), (2, 24, (48, 16), 5, 5), (1, 40, (17, 47), 4, 6), (3, 4, (3, 30), 1, 24), (1, 112, (64, 48), 14, 14),
    (2, 96, (96, 48), 30, 31), (1, 32, (80, 80), 9, 7), (3, 8, (107, 20), 4, 7), (1, 160, (16, 32), 20, 21),
]  # fmt: skip


@TILES
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("act", ["silu", "Relu"])
def test_both_results(size, threads, act, monkeypatch):
    """Blocks of a group within one result and across both, several strips of tiles, partly used channel blocks."""
    images, channels, filters, h, w = size
    _, layer, arrays = sample_layer("Fused", make_dual_output_sample(images, (channels,), filters, h, w, act))
    arrays[0] *= 8
    for kernel in computed(NAME, layer, arrays, threads, monkeypatch):
        assert kernel.threads == min(threads, kernel.sizes[-2])


@TILES
def test_results_can_be_bound_to_other_buffers():
    _, layer, arrays = sample_layer("Fused", make_dual_output_sample(2, (32,), (16, 32), 6, 9))
    check_pointed_elsewhere(NAME, layer, arrays)


@TILES
def test_nan_and_infinity_do_not_spread():
    """NaN and infinities affect their own pixel in both results, and no other."""
    _, layer, arrays = sample_layer("Fused", make_dual_output_sample(1, (16,), (32, 48), 5, 7))
    arrays[0][0, 1, 2, 3], arrays[0][0, 0, 0, 0], arrays[0][0, 2, 4, 6] = np.nan, np.inf, 3e38
    check_odd_numbers(NAME, layer, arrays, 1)


@TILES
@pytest.mark.parametrize(("sample", "why"), [
    (make_dual_output_sample(1, (18,), (16, 16), 6, 6), "18 channels"), (make_dual_output_sample(1, (16, 16), (16, 16), 6, 6), "computes Conv, not"),
    (make_dual_output_sample(1, (16,), (16, 16), 6, 6, "HardSwish"), "SiLU, ReLU or no epilogue"),
])  # fmt: skip
def test_other_layers_are_refused(sample, why):
    layer = sample_layer("Fused", sample)[1]
    assert why in get_tactic(NAME).why_not(layer)
    assert not get_tactic(NAME).signatures(layer, CpuBackend(threads=1))


def composites(channels=16, filters=(16, 16), side=6, act="Relu", **config):
    net = Network("two ways")
    x = net.add_input("x", parse_type(f"f32[1,{channels},{side},{side}]"))
    for k, n in enumerate(filters):
        w = net.constant(np.random.default_rng(k).standard_normal((n, channels, 1, 1)).astype(np.float32), f"w{k}")
        net.mark_output(net.add(act, net.add("Conv", x, w)), f"y{k}")
    return {x.composite for x in lower_network(net, BuildConfig(**config))[0].layers}


@TILES
def test_layers_without_a_kernel_stay_unfused(monkeypatch):
    """Otherwise the NumPy reference would compute it: unknown activations, channels not divisible by four, images below a tile, unknown sizes, CPUs.
    """
    assert composites() == composites(side=4) == {"DualOutputConv"}
    for kind in ({"act": "HardSwish"}, {"channels": 18}, {"side": 2}, {"side": "H"}):
        assert "DualOutputConv" not in composites(**kind)
    assert composites(precisions=("bf16",)) == ({"Conv"} if jit.has("avx512_bf16") else {"DualOutputConv"})
    monkeypatch.setattr(jit, "has", lambda feature: True)
    assert "DualOutputConv" not in composites(precisions=("bf16",))
    monkeypatch.setattr(jit, "has", lambda feature: False)
    assert "DualOutputConv" not in composites()
