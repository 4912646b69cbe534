"""The kernels of blocked images with the registers of AVX2, on a machine that may have more: the samples of their ops, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from whet.backends.cpu import info
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import AVX2, AVX512, get_registers, why_no_registers

KERNELS = (
    "depthwise_conv", "detector_heads", "direct_conv", "dual_output_conv", "inverted_residual", "max_pool", "moves", "pointwise_conv", "resized_conv",
    "winograd_conv",
)  # fmt: skip


@pytest.mark.skipif(jit.why_unavailable() is not None or not (jit.has("avx2") and jit.has("fma")), reason="needs llvmlite, AVX2 and FMA")
def test_samples_with_the_registers_of_avx2(tmp_path):
    """`test_samples` of test_cpu_contract.py compares each tactic with the reference on all samples; none of these may skip."""
    folder = Path(__file__).parent
    names = [f"{folder / 'test_cpu_contract.py'}::test_samples[cpu/{name}]" for name in KERNELS]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *names]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment = {**own, info.VARIABLE: "avx2", "WHET_CPU_CACHE": str(tmp_path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(KERNELS)} passed" in done.stdout


def test_registers_follow_the_instruction_sets(monkeypatch):
    """Blocks of 16 channels with AVX-512; of 8 with AVX2 and with NEON, whose registers are used in pairs. Other x86 CPUs have no such tiles."""
    has = set()
    monkeypatch.setattr(jit, "has", lambda feature: feature in has)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "AVX2" in why_no_registers()
    has |= {"avx2", "fma"}
    assert (get_registers(), why_no_registers()) == (AVX2, None)
    assert AVX2.stored.format == "nChw8c"
    has |= {"avx512f"}
    assert (get_registers(), why_no_registers()) == (AVX512, None)
    assert AVX512.stored.format == "nChw16c"
    has.clear()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert (get_registers(), why_no_registers()) == (AVX2, None)
