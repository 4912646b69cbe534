"""Every layer of the zoo's networks has a kernel, whole or in parts, and a fast one if its channels are a multiple of eight."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER

from support.zoo_structure import read_zoo_structure
from whet.builder import BuildConfig
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.builder.candidates.unfuse import unfuse
from whet.builder.lowering import lower_network
from whet.network import Network, parse_type
from whet.network.types import F16, F32
from whet.tactics import list_tactics

TENSOR_CORES = {"cuda/conv", "cuda/conv_sum", "cuda/conv_then_pointwise", "cuda/conv_transpose", "cuda/dual_output_conv", "cuda/stem"}


def takers(layer, tactics, kind):
    """The tactics that accept a layer with results of a type, fallbacks included."""
    found = []
    for t in tactics:
        if t.why_not(layer) is None:
            signatures = t.signatures(layer, HOPPER)
            floats = any(o.dtype.is_float for s in signatures for o in s.outputs)
            if any((not floats or s.outputs[0].dtype in (kind, F32)) and t.refuses(layer, s, HOPPER) is None for s in signatures):
                found.append(t)
    return found


def covered(net, kind, *passes):
    """(layer, tactics) of every layer of a network; fused layers that no tactic accepts are listed by their parts. `passes` switches passes."""
    config = BuildConfig(backend="cuda", precisions=("fp16",) if kind == F16 else (), timing_cache="", passes=passes)
    low, _ = lower_network(net, config)
    tactics = [t for t in list_enabled_tactics("cuda", ("-CUBLASLT",)) if t.name != "cuda/host_reference"]
    waiting = list(low.layers)
    while waiting:
        layer = waiting.pop(0)
        found = takers(layer, tactics, kind)
        if layer.op == "Fused" and all(t.name == "cuda/decomposed" for t in found):
            waiting = unfuse(low, layer) + waiting
        else:
            yield layer, found


@pytest.mark.parametrize("kind", [F16, F32], ids=str)
@pytest.mark.parametrize("name", ["unet", "densenet121", "resnext50_32x4d", "lenet5", "swin_t", "mobilenet_v2"])
def test_every_layer_has_a_kernel(name, kind):
    for layer, found in covered(read_zoo_structure(name, batch=1), kind):
        assert found, f"nothing computes {layer}"
        ends = [t for t in (layer.inputs[0], layer.outputs[0]) if t is not None and t.dtype.is_float and t.type.rank > 1]
        aligned = all(t.shape[1] % 8 == 0 for t in ends)
        if aligned:
            assert not all(t.fallback for t in found), f"only slow kernels take {layer}"


def conv_3d(net, x, k, kernel, stride=1, act=True):
    """A convolution of a volume that keeps its sizes (divided by `stride`), perhaps with an activation."""
    w = net.constant(np.full((k, x.shape[1], *kernel), 0.01, np.float32), "w")
    pads = tuple(n // 2 for n in kernel)
    y = net.add("Conv", x, w, net.constant(np.zeros(k, np.float32), "b"), pads=pads * 2, strides=(stride,) * 3)
    return net.add("Relu", y) if act else y


def unet_3d():
    """A U-Net of volumes with two levels."""
    net = Network("unet_3d")
    x = net.add_input("x", parse_type("f32[1,1,16,16,16]"))
    skip = conv_3d(net, conv_3d(net, x, 32, (3, 3, 3)), 32, (3, 3, 3))
    y = conv_3d(net, net.add("MaxPool", skip, kernel_shape=(2, 2, 2), strides=(2, 2, 2)), 64, (3, 3, 3))
    up = net.constant(np.full((64, 32, 2, 2, 2), 0.01, np.float32), "up")
    y = net.add("Concat", net.add("ConvTranspose", y, up, strides=(2, 2, 2)), skip, axis=1)
    net.mark_output(conv_3d(net, conv_3d(net, y, 32, (3, 3, 3)), 8, (1, 1, 1), act=False))
    return net


def video_network(separable):
    """A residual network of video with one block that halves all sizes; `separable`: convolutions of the plane and then of time (R(2+1)D)."""
    net = Network("video")
    x = net.add_input("x", parse_type("f32[2,3,8,32,32]"))

    def both(x, k, stride=1, act=True):
        if not separable:
            return conv_3d(net, x, k, (3, 3, 3), stride, act)
        return conv_3d(net, conv_3d(net, x, 48, (1, 3, 3)), k, (3, 1, 1), stride, act)

    x = conv_3d(net, x, 32, (3, 7, 7))
    x = net.add("Relu", net.add("Add", both(both(x, 32), 32, act=False), x))
    x = net.add("Relu", net.add("Add", both(both(x, 64, 2), 64, act=False), conv_3d(net, x, 64, (1, 1, 1), 2, act=False)))
    net.mark_output(net.add("Flatten", net.add("GlobalAveragePool", x)))
    return net


@pytest.mark.parametrize("make", [unet_3d, lambda: video_network(False), lambda: video_network(True)], ids=["unet", "r3d", "r2plus1d"])
def test_volumes_are_computed_on_tensor_cores(make):
    layers = list(covered(make(), F16))
    convolutions = [(x, found) for x, found in layers if any(op in str(x) for op in ("= Conv(", "= ConvTranspose("))]
    assert len(convolutions) >= 5
    for layer, found in convolutions:
        assert layer.needs(0).type.rank == 4
        assert {t.name for t in found} & TENSOR_CORES, f"only slow kernels take {layer}"
    left = [x for x, found in layers if any(t.type.rank == 5 for t in x.outputs) and not {"cuda/view"} & {t.name for t in found}]
    assert {x.composite or x.op for x in left} <= {"Concat", "ConcatShifts", "Pad", "Slice", "Transpose"}, left


@pytest.mark.parametrize("channels", [1, 3, 9, 21])
@pytest.mark.parametrize("batch", [1, 32])
def test_few_output_channels_of_large_images_have_tensor_core_kernels(channels, batch):
    """The last convolution of networks for super-resolution and segmentation; a number of channels that is no multiple of 8."""
    net = Network("last")
    x = net.add_input("x", parse_type(f"f32[{batch},32,224,224]"))
    weights = net.constant(np.zeros((channels, 32, 3, 3), np.float32))
    net.mark_output(net.add("Conv", x, weights, net.constant(np.zeros(channels, np.float32)), pads=(1, 1, 1, 1)), "y")
    layer = net.layers[-1]
    found = {}
    for tactic in list_tactics("cuda"):
        if tactic.name in ("cuda/conv", "cuda/conv_tf32", "cuda/conv_3xtf32"):
            for signature in tactic.signatures(layer, HOPPER):
                assert tactic.refuses(layer, signature, HOPPER) is None
                found[signature.outputs[0].dtype.name, tactic.name] = len(tactic.configs(layer, signature, HOPPER))
    assert found.keys() == {("f16", "cuda/conv"), ("bf16", "cuda/conv"), ("f32", "cuda/conv_tf32"), ("f32", "cuda/conv_3xtf32")}
    assert all(found.values()), found


def test_scores_of_relative_positions_have_fast_kernels():
    """DeBERTa: queries times the embeddings of all positions, gathered by distance, plus a mask: two kernels on tensor cores and for moves."""
    net, rows, rng = Network("relative"), 16, np.random.default_rng(0)
    q = net.add("Relu", net.add_input("q", parse_type(f"f32[3,{rows},32]")))
    mask = net.add("Softmax", net.add_input("mask", parse_type(f"f32[1,{rows},{rows}]")), axis=-1)
    embeddings = net.constant(rng.standard_normal((3, 32, 24)).astype(np.float32), "embeddings")
    distance = np.clip(np.arange(rows) - np.arange(rows)[:, None] + 12, 0, 23)
    index = net.constant(np.broadcast_to(distance, (3, rows, rows)).copy(), "distance")
    scores = net.add("GatherElements", net.add("MatMul", q, embeddings), index, axis=-1)
    net.mark_output(net.add("Add", net.add("Div", scores, net.constant(np.array(6, np.float32), "scale")), mask))
    layers = [(layer, [t.name for t in found if not t.fallback]) for layer, found in covered(net, F16) if layer.op not in ("Relu", "Softmax")]
    assert [(layer.composite or layer.op, names) for layer, names in layers if layer.op != "Reshape"] == [
        ("MatMul", ["cuda/batched_matmul"]),
        ("Moves", ["cuda/moves"]),
    ]
