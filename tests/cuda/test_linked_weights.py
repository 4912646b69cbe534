"""A launch brings the weights of the next one into the L2 cache: which launches are linked, and what their kernels get."""

import struct

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.launch import GpuWork, Kernel, Launch, Module, link_weights
from whet.ops import sample_layer
from whet.ops._base import Sample
from whet.tactics._base import Args, get_tactic
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import NEXT_WEIGHTS, ConvArguments, Features, emit_conv_source

MIB = 2**20


class Other(GpuWork):
    def run(self, stream):
        pass


def launch(weights=(0, 0), links=True):
    return Launch(Kernel(Module(b""), "none", 0), (1, 1, 1), 32, bytes(range(40)), weights=weights, next_weights=8 if links else -1)


def get_link(call):
    assert call.parameters[:8] == bytes(range(8))
    assert call.parameters[20:] == bytes(range(20, 40))
    return struct.unpack("<QI", call.parameters[8:20])


def test_a_launch_gets_the_weights_of_the_next_one_that_has_some():
    calls = [launch((4096, MIB)), Other(), launch(links=False), launch((8192, MIB + 24)), launch(), launch((16384, 2 * MIB), links=False)]
    link_weights(calls, 64 * MIB)
    assert [get_link(calls[i]) for i in (0, 3, 4)] == [(8192, MIB + 16), (0, 0), (16384, 2 * MIB)]


def test_links_are_made_anew_for_another_order_and_are_limited():
    calls = [launch((4096, MIB)), launch((8192, MIB))]
    link_weights(calls, 64 * MIB)
    link_weights(calls[::-1], MIB // 2)
    assert [get_link(c) for c in calls] == [(0, 0), (4096, MIB // 2)]


def test_products_can_be_linked(monkeypatch):
    monkeypatch.setattr(tensormap, "make_tiled_map", lambda *_: bytes(128))  # needs the driver
    tactic = get_tactic("cuda/gemm")
    _, layer, _ = sample_layer("MatMul", Sample(["f32[197,768]", "const f32[768,3072]"]))
    signature = tactic.signatures(layer, HOPPER)[0]
    kernel = tactic.plan(layer, signature, tactic.configs(layer, signature, HOPPER)[0], HOPPER)
    (call,) = kernel.launches(Args((1 << 20,), (2 << 20,), (3 << 20, 4 << 20), 0))
    assert call.weights == (3 << 20, 768 * 3072 * 2)
    assert call.next_weights == NEXT_WEIGHTS == ConvArguments.layout(("NORM", "GROUPED"))[0]["next_weights"]


def test_the_kernel_asks_the_cache(tmp_path):
    text = sass(compile_cubin(emit_conv_source(ConvConfig(1, 1, 96, stages=4, direct=1), Features(norm=1)), name="conv.cu"), tmp_path)
    assert "UBLKPF" in text
    assert "STL" not in text
