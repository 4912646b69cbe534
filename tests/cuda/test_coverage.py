"""Every layer of the zoo's networks has a kernel, whole or in parts, and a fast one if its channels are a multiple of eight."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER

from whet import zoo
from whet.builder import BuildConfig
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.builder.candidates.unfuse import unfuse
from whet.builder.lowering import lower_network
from whet.frontends.onnx import network_from_onnx
from whet.network.types import F16, F32


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
    for layer, found in covered(network_from_onnx(zoo.build(name, batch=1)), kind):
        assert found, f"nothing computes {layer}"
        ends = [t for t in (layer.inputs[0], layer.outputs[0]) if t is not None and t.dtype.is_float and t.type.rank > 1]
        aligned = all(t.shape[1] % 8 == 0 for t in ends)
        if aligned:
            assert not all(t.fallback for t in found), f"only slow kernels take {layer}"
