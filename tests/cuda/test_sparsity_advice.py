"""The advisor of 2:4 on a GPU."""

import pytest

from whet import BuildConfig
from whet.network import parse_network
from whet.pruning import advise_sparsity


@pytest.mark.gpu
def test_sparse_and_dense_tactics_are_timed(gpu):
    net = parse_network("network n source\nin %x: f16[2048,1024]\nconst %w: f16[1024,1024] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n")
    (layer,) = advise_sparsity(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="")).layers
    assert layer.dense_ms > 0
    assert layer.sparse_ms > 0
    assert layer.sparse_tactic == "cuda/sparse_gemm"
