"""The cuBLASLt pack: its switches, permission for TF32, and, on a GPU, f32 networks through the library."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.builder.verify.emulation import round_to_tf32
from whet.errors import UsageError
from whet.network import Network, parse_type
from whet.ops import OPS, run_network, sample_layer
from whet.runtime import Runtime
from whet.tactics import get_tactic
from whet.tactics._base import PlanRefused
from whet.tactics.cuda.library import _cublaslt

HOPPER = CompileOnlyGpu()
LIBRARY = {"cuda/cublaslt_f32", "cuda/cublaslt_older", "cuda/cublaslt_tf32"}


def names(*switches):
    return {t.name for t in list_enabled_tactics("cuda", switches) if "cublaslt" in t.name}


def test_switches_disable_the_pack_and_enable_its_16_bit_tactic():
    assert names() == LIBRARY, "the 16-bit tactic is off by default"
    assert names("+cublaslt_half") == LIBRARY | {"cuda/cublaslt_half"}
    assert names("-CUBLAS_LT") == names("-CUBLASLT") == set()
    assert names("-cublaslt_tf32") == LIBRARY - {"cuda/cublaslt_tf32"}
    with pytest.raises(UsageError, match="CUBLASLT"):
        list_enabled_tactics("cuda", ["+CUBLAS"])


def test_tf32_keeps_ten_bits_to_nearest():
    x = np.array([1 + 2**-10, 1 + 2**-11 + 2**-20, 1 + 2**-12, -3.0000002, np.inf, np.nan, 0], np.float32)
    want = np.array([1 + 2**-10, 1 + 2**-10, 1, -3, np.inf, np.nan, 0], np.float32)
    assert np.array_equal(round_to_tf32(x), want, equal_nan=True)
    a = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    assert 2**-12.5 < np.abs(round_to_tf32(a) / a - 1).max() <= 2**-11


def test_a_config_of_another_kind_is_refused():
    _, layer, _ = sample_layer("Conv", OPS["Conv"].samples[0])
    t = get_tactic("cuda/cublaslt_tf32")
    signature = t.signatures(layer, HOPPER)[0]
    assert t.plan(layer, signature, t.configs(layer, signature, HOPPER)[0], HOPPER).scratch > _cublaslt.WORKSPACE
    for config in ((), (("algo", 0), ("math", "f32")), (("algo", -1), ("math", "tf32")), (("algo", "x"), ("math", "tf32"))):
        with pytest.raises(PlanRefused, match="computes in tf32"):
            t.plan(layer, signature, config, HOPPER)


def test_the_error_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_cublaslt, "load_library", lambda: None)
    _, layer, _ = sample_layer("Conv", OPS["Conv"].samples[0])
    t = get_tactic("cuda/cublaslt_f32")
    here = CompileOnlyGpu(executes=True)
    assert "pip install nvidia-cublas" in t.refuses(layer, t.signatures(layer, here)[0], here)


def convolutions(batch):
    """A stem with three channels, a strided and a 1x1 convolution with a residual, and an activation that the library lacks."""
    rng = np.random.default_rng(0)
    net = Network("net")

    def weight(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))

    x = net.add_input("x", parse_type(f"f32[{batch},3,20,20]"))
    a = net.add("Relu", net.add("Conv", x, weight(24, 3, 5, 5), weight(24), pads=(2, 2, 2, 2)))
    b = net.add("HardSwish", net.add("Conv", a, weight(32, 24, 3, 3), weight(32), strides=(2, 2), pads=(1, 1, 1, 1)))
    c = net.add("Relu", net.add("Add", net.add("Conv", b, weight(32, 32, 1, 1), None), b))
    flat = net.add("Flatten", net.add("GlobalAveragePool", c))
    net.mark_output(net.add("Gemm", flat, weight(10, 32), weight(10), transB=1), "y")
    return net


@pytest.mark.gpu
@pytest.mark.parametrize(("back", "math", "bound"), [(("+cublaslt_tf32", "-cublaslt_f32"), "tf32", 3e-3), ((), "f32", 2e-5)])
def test_f32_networks_run_through_the_library(back, math, bound):
    if driver.why_unavailable():
        pytest.skip(driver.why_unavailable())
    if _cublaslt.load_library() is None:
        pytest.skip("libcublasLt is not installed")
    net = convolutions(70)
    plan = build(net, BuildConfig(backend="cuda", timing_cache="", tactic_sources=("-TF32", *back, "-conv_generic", "-conv_3xtf32")))
    used = {c.tactic for c in plan.choices.values()}
    assert f"cuda/cublaslt_{math}" in used
    assert plan.report.verification.failures == []
    x = {"x": np.random.default_rng(1).standard_normal((70, 3, 20, 20)).astype(np.float32)}
    got, want = Runtime("cuda").load(plan).create_context().run(x)["y"], run_network(net, x, widen=True)["y"]
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < bound
    assert (error > 2e-6) == (math == "tf32"), "TF32 rounds measurably"
