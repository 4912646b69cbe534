"""Normalizations, softmax, means and products over many values in 16-bit storage: every kernel accumulates in FP32.

A bf16 accumulator of ones stops at 256, since 257 is not representable; in f16 it stops at 2048. 20,000 values around one reveal the
accumulator's type.
"""

import numpy as np
import pytest
from test_onednn_tactics import CPU, compute

from whet.network import Network, parse_type
from whet.network.types import BF16
from whet.ops import run_layer
from whet.tactics import list_tactics
from whet.tactics.cpu.onednn import _api as dnn

LONG = 20_000
pytestmark = pytest.mark.skipif(
    "avx512_bf16" not in CPU.capabilities.features or not dnn.has_isa("avx512_core_bf16"), reason="this CPU has no AVX-512 BF16"
)

# : op -> (input types, indices of constant inputs, attributes); values are around one
LAYERS = {
    "Softmax": (["f32[2,20000]"], (), {"axis": -1}),
    "LayerNormalization": (["f32[2,20000]", "f32[20000]", "f32[20000]"], (1, 2), {"axis": -1}),
    "ReduceMean": (["f32[1,16,100,200]", "i64[2]"], (1,), {"keepdims": 1}),
    "GlobalAveragePool": (["f32[1,16,100,200]"], (), {}),
    "AveragePool": (["f32[1,16,100,200]"], (), {"kernel_shape": (100, 200)}),
    "Gemm": (["f32[4,20000]", "f32[20000,16]"], (1,), {}),
    "MatMul": (["f32[2,4,20000]", "f32[2,20000,16]"], (), {}),
    "Conv": (["f32[1,2048,6,6]", "f32[16,2048,3,3]"], (1,), {"pads": (1, 1, 1, 1)}),
}


def layer_of(op):
    """The layer with its constants, and arrays for all inputs."""
    types, constants, attrs = LAYERS[op]
    net, rng = Network(op), np.random.default_rng(3)
    arrays, inputs = [], []
    for i, text in enumerate(types):
        t = parse_type(text)
        a = np.array([2, 3]) if text.startswith("i64") else rng.uniform(0.5, 1.5, t.shape).astype(BF16.numpy).astype(np.float32)
        arrays.append(a)
        inputs.append(net.constant(a, f"c{i}") if i in constants else net.add_input(f"x{i}", t))
    net.mark_output(net.add(op, *inputs, **attrs))
    return net.layers[0], arrays


@pytest.mark.parametrize("op", LAYERS)
def test_sums_are_in_fp32(op):
    layer, arrays = layer_of(op)
    (want, *_) = run_layer(layer, [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays])
    count = 0
    for tactic in list_tactics("cpu"):
        if tactic.fallback or tactic.why_not(layer) is not None:
            continue
        for signature in tactic.signatures(layer, CPU):
            if signature.outputs[0].dtype != BF16 or tactic.refuses(layer, signature, CPU) is not None:
                continue
            for config in tactic.configs(layer, signature, CPU):
                kernel, got, _ = compute(layer, arrays, tactic, signature, config)
                off = np.abs(got[0] - want).max() / np.abs(want).max()
                assert off < 2**-7, f"{tactic.name} {kernel.implementation}: {off:.3f} of the largest"
                count += 1
    assert count, "no kernel of this machine stores it in bf16: the test shows nothing"
