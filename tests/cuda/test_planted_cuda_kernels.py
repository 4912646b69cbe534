"""Sixty wrong CUDA kernels, of twelve kinds in five operations: verification finds every one of them, and none in the correct kernels.

The kernels are those of the CUDA backend with one fault in their text (support/planted_cuda.py). On a GPU they are compiled by NVRTC; without one
they run as C++ on the host, with everything else of a CUDA build: formats, tactics, arenas, profiles and verification. The intermittent kernels
are wrong in half of their runs, by a fixed pattern; the probability for random ones is in tests/builder/test_planted_kernels.py.
"""

import dataclasses
import sys
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
from planted_networks import MAX, MIN, OPERATIONS, OPT, network

from support.host_cuda import host_compiler
from support.planted_cuda import FAULTS, TACTICS_OF_FAULTS, compile_faults, constants_of, plant_on_gpu, plant_on_host, planted_text
from whet.backends import get_backend
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import get_current_device
from whet.builder import BuildConfig, build
from whet.builder.progress import ProgressLog
from whet.builder.verify.verification import verify_engine
from whet.network import evaluate

CONFIG = BuildConfig(
    backend="cuda", timing_cache="", avg_timing=1, whole_engines=1, optimization_level=0, samples="together", passes=("none",), verify=False,
)  # fmt: skip
COUNTS = {
    op: tuple(prod(evaluate(d, {"N": n}) for d in network(op).outputs[0].shape) for n in (MIN, MAX)) for op in OPERATIONS
}  # values of the result at the smallest and the largest batch


def verified(operation):
    """(the result of verification, the tactics of the engine) for batches of 1 to 8."""
    net = network(operation)
    profile = tuple({"x": (n, 8) if operation == "gemm" else (n, 8, 6, 6)} for n in (MIN, OPT, MAX))
    config = dataclasses.replace(CONFIG, profiles=(profile,))
    plan = build(net, config)
    return verify_engine(plan, net, get_backend("cuda"), None, config, ProgressLog(None)), {c.tactic for c in plan.choices.values()}


def check(operation, fault):
    checked, tactics = verified(operation)
    assert tactics & set(TACTICS_OF_FAULTS)
    if fault == 0:
        assert checked.failures == []
        assert [next(iter(s.values()))[0] for s in checked.shapes] == [MIN, MAX]
        assert checked.input_kinds >= 6
    else:
        assert checked.failures
        assert all(f.tactic in TACTICS_OF_FAULTS for f in checked.failures)


def count_of(operation, fault):
    return COUNTS[operation][fault == FAULTS.index("largest batch")]


@pytest.fixture(scope="module")
def run_launches():
    if host_compiler() is None:
        pytest.skip("no C++ compiler")
    return compile_faults(COUNTS)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=FAULTS)
def test_a_planted_kernel_is_found_on_the_host(operation, fault, run_launches, monkeypatch):
    plant_on_host(monkeypatch, fault, count_of(operation, fault), run_launches)
    check(operation, fault)


@pytest.mark.parametrize("fault", [0, *range(1, len(FAULTS), 5)])
def test_planted_kernels_compile(fault):
    for file, constants in (
        ("conv_generic.cu", {"FROM": 0, "TO": 0, "ADD": 0, "FACTOR": 0, "ACT": 0}),
        ("conv_transpose.cu", {"TYPE": 0, "VEC": 1, "ACT": 0}),
    ):
        assert compile_cubin(planted_text(file, {**constants, **constants_of(fault, 7)}), name=file)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=FAULTS)
def test_a_planted_kernel_is_found_on_the_gpu(operation, fault, gpu, monkeypatch):
    plant_on_gpu(monkeypatch, fault, count_of(operation, fault), get_current_device().arch)
    check(operation, fault)
