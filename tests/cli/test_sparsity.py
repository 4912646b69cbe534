"""`whet sparsity`: dense and sparse times per layer, reasons, the share of removed magnitude, and the verdict."""

import json

import pytest
from click.testing import CliRunner

from whet import BuildConfig
from whet.cli.sparsity import command
from whet.errors import UsageError
from whet.network import parse_network
from whet.pruning.sparsity_advice import advise_sparsity


def run(*args):
    done = CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_a_backend_without_sparse_tactics_says_so(model, tmp_path):
    flags = (model / "m.onnx", "--backend=null", "--timingCacheFile", tmp_path / "c.sqlite")
    data = json.loads(run(*flags, "--json").stdout)
    assert not data["has_sparse_tactics"]
    assert data["saved_ms"] == 0 < data["total_ms"]
    assert len(data["layers"]) == 4
    shares = [x["removed_magnitude"] for x in data["layers"]]
    assert shares[0] is None  # three input channels
    assert "alignment: 3 input channels" in data["layers"][0]["reason"]
    assert shares[1:3] == pytest.approx([0.256, 0.256], abs=0.01)  # the two smallest of four normally distributed values
    text = run(*flags).stdout
    assert "backend 'null' has no tactic that computes with 2:4 weights" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_a_depthwise_layer_has_no_groups_of_four():
    net = parse_network("network n source\nin %x: f32[1,8,4,4]\nconst %w: f32[8,1,1,1] = seed(3)\n%y = Conv(%x, %w, group=8)\nout %y\n")
    (layer,) = advise_sparsity(net, BuildConfig(backend="null", timing_cache="")).layers
    assert layer.reason == "alignment: 1 input channels per group are no multiple of 4"
    assert layer.removed_magnitude is None


def test_a_batch_for_fixed_shapes_is_refused(model):
    with pytest.raises(UsageError, match="fixed shapes"):
        CliRunner().invoke(command, [str(model / "m.onnx"), "--batch=2", "--backend=null"], catch_exceptions=False)


@pytest.mark.gpu
def test_a_gpu_times_sparse_and_dense_tactics():
    net = parse_network(
        "network n source\nin %x: f16[2048,1024]\nconst %w: f16[1024,1024] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n"
    )
    (layer,) = advise_sparsity(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="")).layers
    assert layer.dense_ms > 0
    assert layer.sparse_ms > 0
    assert layer.sparse_tactic == "cuda/sparse_gemm"
