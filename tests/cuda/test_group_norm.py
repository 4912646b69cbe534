"""Group and instance normalization with channels last: shares of the pixels are joined into the moments of whole groups."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, planned, reference

from support.host_cluster import plan_on_host, run_on_host
from support.host_cuda import host_compiler
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.composites.activated_norm import make_activated_norm_sample
from whet.network import Network, from_stored, parse_type
from whet.ops import Sample, sample_layer
from whet.tactics import PlanRefused
from whet.tactics.cuda.norm import group_norm
from whet.tactics.cuda.norm.group_norm import GroupNorm


def layer_of(image, groups, activation=""):
    """The network, layer and arrays of a norm of `groups` groups (0: instance norm); the values of some channels are far from zero."""
    channels = int(image[4:-1].split(",")[1])
    if activation:
        net, layer, arrays = sample_layer("Fused", make_activated_norm_sample(image, activation, groups))
    else:
        op, attrs = ("GroupNormalization", {"num_groups": groups}) if groups else ("InstanceNormalization", {})
        net, layer, arrays = sample_layer(op, Sample([image, f"const f32[{channels}]", f"const f32[{channels}]"], attrs))
    far = np.where(np.arange(channels) % 5 == 0, 30.0, 0.0) if not groups else np.full(channels, 30.0)
    arrays[0] = (arrays[0] + far[:, None, None]).astype(np.float32)
    return net, layer, arrays


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_kernels_match_the_reference_on_the_host(monkeypatch):
    launches, cases, tactic = [], [], GroupNorm()
    for image, groups, activation, shares in (
        ("f32[2,24,9,11]", 3, "", 5),  # groups of eight channels; 85 rows of threads, more than a share has pixels
        ("f32[1,64,7,9]", 1, "", 4),  # one group
        ("f32[2,40,6,7]", 4, "Relu", 3),  # groups of ten channels
        ("f32[1,16,40,40]", 0, "Swish", 1),  # instance norm; several steps of four pixels
        ("f32[1,2048,2,3]", 32, "", 6),  # all threads in one row
    ):
        net, layer, arrays = layer_of(image, groups, activation)
        for signature in tactic.signatures(layer, HOPPER):
            ran, *case = plan_on_host(monkeypatch, group_norm, tactic, layer, arrays, signature, (("shares", shares),), HOPPER)
            assert len(ran) == 2
            launches += ran
            cases.append((net, layer, arrays, signature, *case))
    run_on_host(launches)
    for _net, layer, arrays, signature, kernel, ins, outs, _memory in cases:
        fed = [a if x is None else from_stored(x, o.format, a.shape).astype(a.dtype) for a, x, o in zip(arrays, ins, signature.inputs, strict=True)]
        got = from_stored(outs[0], "nhwc", arrays[0].shape)
        judge(got, reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{layer} {signature}")


@pytest.mark.parametrize("image", ["f32[1,64,56,56]", "f32[32,512,7,7]", "f32[1,8,3,5]", "f32[4,2048,16,16]"])
def test_shares_have_pixels_and_scratch_holds_them(image):
    _net, layer, _ = layer_of(image, 4)
    tactic = GroupNorm()
    n, _, h, w = (int(d) for d in image[4:-1].split(","))
    for signature in tactic.signatures(layer, HOPPER):
        assert tactic.refuses(layer, signature, HOPPER) is None
        for config in tactic.configs(layer, signature, HOPPER):
            shares = dict(config)["shares"]
            assert 1 <= shares <= h * w
            assert tactic.plan(layer, signature, config, HOPPER).scratch == n * shares * 4 * 8
        for shares in (0, h * w + 1):
            with pytest.raises(PlanRefused):
                tactic.plan(layer, signature, (("shares", shares),), HOPPER)


def test_other_numbers_of_channels_are_refused():
    for image in ("f32[1,12,5,5]", "f32[1,2056,2,2]"):
        _net, layer, _ = layer_of(image, 4)
        tactic = GroupNorm()
        assert "multiple of 8" in tactic.refuses(layer, tactic.signatures(layer, HOPPER)[0], HOPPER)


def diffusion_block(channels):
    net, rng = Network("block"), np.random.default_rng(0)
    x = net.add_input("x", parse_type(f"f32[1,{channels},16,16]"))
    for _ in range(2):
        scale, shift = (net.constant(rng.standard_normal(channels).astype(np.float32)) for _ in range(2))
        y = net.add("Swish", net.add("GroupNormalization", x, scale, shift, num_groups=4))
        x = net.add("Conv", y, net.constant(rng.standard_normal((channels, channels, 3, 3)).astype(np.float32)), pads=(1, 1, 1, 1))
    net.mark_output(x, "y")
    return net


@pytest.mark.parametrize(("backend", "channels", "kinds"), [
    ("cuda", 64, ["ActivatedNorm", "Conv"]),
    ("cuda", 20, ["GroupNormalization", "Swish", "Conv"]),
    ("cpu", 64, ["GroupNormalization", "Swish", "Conv"]),
])
def test_activations_join_norms_where_a_kernel_computes_both(backend, channels, kinds):
    precisions = ("fp16",) if backend == "cuda" else ()
    low, _ = lower_network(diffusion_block(channels), BuildConfig(backend=backend, precisions=precisions, timing_cache=""))
    assert [x.composite or x.op for x in low.layers] == kinds * 2


@pytest.mark.gpu
@pytest.mark.parametrize(("image", "groups", "activation"), [
    ("f32[1,64,56,56]", 1, ""), ("f32[8,320,7,7]", 1, ""), ("f32[2,320,64,64]", 32, "Swish"), ("f32[1,1920,8,8]", 32, "Swish"),
    ("f32[1,64,200,300]", 0, "Relu"), ("f32[3,128,5,7]", 0, ""),
])  # fmt: skip
def test_norms_match_the_reference(gpu, image, groups, activation):
    net, layer, arrays = layer_of(image, groups, activation)
    ran = set()
    for t, signature, config, kernel in planned(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
        ran.add(t.name)
    assert "cuda/group_norm" in ran, net.name
