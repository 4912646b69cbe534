"""Blocks of transformers and modern convolutional networks, exported by both of PyTorch's exporters: one fused layer for each attention, norm and
activation, and the result of ONNX Runtime.
"""

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
import onnxruntime
import torch

from support.transformer_blocks import BLOCKS
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.frontends.onnx import network_from_onnx
from whet.ops import run_network

pytestmark = pytest.mark.usefixtures("shared_registry")
EXPORTERS = {"torchscript": {"dynamo": False, "opset_version": 17}, "dynamo18": {"dynamo": True, "opset_version": 18},
             "dynamo23": {"dynamo": True, "opset_version": 23},
             **{f"torchscript{n}": {"dynamo": False, "opset_version": n} for n in (13, 14, 15, 20)}}  # fmt: skip
#: block -> layers of the lowered network that must be there, and how many of each.
EXPECTED = {
    "bert": {"Attention": 1, "LayerNormalization": 2},
    "bert_eager": {"Attention": 1, "LayerNormalization": 2},
    "gpt2": {"Attention": 1, "LayerNormalization": 2},
    "gpt2_masked_fill": {"Attention": 1, "LayerNormalization": 2},
    "llama": {"Attention": 1, "RMSNormalization": 2},
    "llama_sqrt": {"Attention": 1, "RMSNormalization": 2},
    "vit": {"Attention": 1, "LayerNormalization": 2},
    "vit_scaled_query": {"Attention": 1, "LayerNormalization": 2},
    "swin": {"Attention": 1, "LayerNormalization": 1},
    "swin_batch": {"Attention": 1, "LayerNormalization": 1},
    "swin_unshifted": {"Attention": 1, "LayerNormalization": 1},
    "t5": {"Attention": 1, "RMSNormalization": 1},
    "t5_eager": {"Attention": 1, "RMSNormalization": 1},
    "convnext": {"LayerNormalization": 1},
    "cross": {"Attention": 1, "LayerNormalization": 1},
    "where_lowest": {"Attention": 1},
    "einsum": {"Attention": 1},
    "expanded_mask": {"Attention": 1},
    "soft_capped": {"Attention": 1},
    "late_scale": {"Attention": 1},
    "variance_norm": {"LayerNormalization": 1},
    "rms_norm_division": {"RMSNormalization": 1},
}
WITH_GELU = ("bert", "bert_eager", "gpt2", "gpt2_masked_fill", "vit", "vit_scaled_query", "convnext")
#: Blocks that the slow dynamo exporter writes as another block, or as TorchScript does.
DYNAMO = {"dynamo18": ("bert", "vit", "llama", "swin_batch", "variance_norm", "t5"), 
          "dynamo23": ("gpt2", "bert", "vit", "expanded_mask", "cross", "t5", "llama")}  # fmt: skip
#: Opsets in which ops of these blocks changed: 13 (without torch's fused attention), 15, 18 and 20.
OPSETS = [("bert_eager", "torchscript13"), ("vit_scaled_query", "torchscript13"), ("expanded_mask", "torchscript14"), ("llama", "torchscript15"),
          ("t5_eager", "torchscript15"), ("vit", "torchscript20"), ("swin", "torchscript20")]  # fmt: skip
CASES = [(name, "torchscript") for name in EXPECTED] + OPSETS + [(name, exporter) for exporter, names in DYNAMO.items() for name in names[::3]]
LONG = [pytest.param(n, exporter, marks=pytest.mark.slow) for exporter, names in DYNAMO.items() for i, n in enumerate(names) if i % 3]


def exported(name, exporter, path):
    """(the network, the path of its ONNX file, inputs, the output of torch) of a block."""
    torch.manual_seed(0)
    module, inputs = BLOCKS[name]()
    options = EXPORTERS[exporter]
    if options["dynamo"]:
        pytest.importorskip("onnxscript", reason="the dynamo exporter needs onnxscript")
        options = {**options, "verbose": False, "external_data": False}
    with torch.no_grad():
        torch.onnx.export(module.eval(), inputs, path, **options)
        want = module(*inputs).numpy()
    return network_from_onnx(path), [t.numpy() for t in inputs], want


def layers_inside(layers):
    """All layers, those of fused bodies included."""
    return [y for x in layers for y in (x, *(x.regions["body"].layers if x.op == "Fused" else ()))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "exporter"), CASES + LONG)
def test_exported_block(name, exporter, tmp_path):
    path = tmp_path / "block.onnx"
    net, arrays, want = exported(name, exporter, path)
    low, log = lower_network(net, BuildConfig(backend="cpu"))
    counts = Counter(x.composite or x.op for x in low.layers)
    assert {op: counts[op] for op in EXPECTED[name]} == EXPECTED[name], log.skipped
    assert counts["Moves"] >= (name in ("llama", "llama_sqrt"))  # rotations
    assert not {"Softmax", "IsNaN", "ReduceMax", "Expand", "Einsum", "Erf", "ReduceMean", "Sqrt"} & set(counts)
    inside = Counter(x.op for x in layers_inside(low.layers))
    assert inside["Gelu"] == (name in WITH_GELU)
    if exporter != "dynamo23":  # ONNX Runtime's Attention refuses masks that broadcast
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (want,) = session.run(None, dict(zip([i.name for i in session.get_inputs()], arrays, strict=True)))
    (got,) = run_network(low, dict(zip([t.name for t in low.inputs], arrays, strict=True))).values()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_recognized_has_a_reason(tmp_path):
    net, _, _ = exported("gated_scores", "torchscript", tmp_path / "block.onnx")
    low, log = lower_network(net, BuildConfig(backend="cpu"))
    assert not any(x.composite == "Attention" for x in low.layers)
    assert any(p == "recognize_attention" and "Sigmoid" in why for (p, _), why in log.skipped.items())


@pytest.mark.filterwarnings("ignore")
def test_hidden_rows_are_zero_and_a_fully_masked_sample_stays_finite(tmp_path):
    """TorchScript's guard makes rows without keys 0; the engine's fused layer keeps that."""
    net, arrays, _ = exported("bert", "torchscript", tmp_path / "block.onnx")
    low, _ = lower_network(net, BuildConfig(backend="cpu"))
    arrays[1][0] = 0
    (want,) = run_network(net, dict(zip([t.name for t in net.inputs], arrays, strict=True))).values()
    (got,) = run_network(low, dict(zip([t.name for t in low.inputs], arrays, strict=True))).values()
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
