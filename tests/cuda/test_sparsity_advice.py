"""The advisor of 2:4 on a GPU."""

import pytest

from whet import BuildConfig
from whet.network import parse_network
from whet.pruning import advise_sparsity
from whet.pruning.truth import measure_engines


@pytest.mark.gpu
def test_sparse_and_dense_tactics_are_timed(gpu):
    net = parse_network("network n source\nin %x: f16[2048,1024]\nconst %w: f16[1024,1024] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n")
    (layer,) = advise_sparsity(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="")).layers
    assert layer.dense_ms > 0
    assert layer.sparse_ms > 0
    assert layer.sparse_tactic == "cuda/sparse_gemm"


@pytest.mark.gpu
def test_the_time_of_an_engine_excludes_the_transfer_of_inputs(gpu):
    """64 MiB of input of which a kernel reads 16 KiB: the copy to the device alone takes over a millisecond."""
    net = parse_network(
        "network n source\nin %x: f32[4096,4096]\n%y = Slice(%x, starts=(0, 0), ends=(64, 64), axes=(0, 1))\n%z = Relu(%y)\nout %z\n"
    )
    (measured,) = measure_engines([net], BuildConfig(backend="cuda", timing_cache=""), seconds=0.2)
    assert 0 < measured.ms < 0.2
