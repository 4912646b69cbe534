"""GPUs other than Hopper: kernels compile for them, Hopper's tensor-core tactics refuse with a reason, and notes name untested hardware."""

import sys
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.compiler_flags import COMPILER_FLAGS
from whet.backends import get_backend
from whet.backends.cuda import CudaBackend
from whet.backends.cuda import compile as compiler
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.errors import BackendError
from whet.network import Network, parse_type
from whet.ops import OPS, sample_layer
from whet.tactics import Args, list_tactics
from whet.tactics.cuda._device.source import emit_kernel_source

AMPERE = CompileOnlyGpu("sm_80")
# : kernels built entirely on wgmma and bulk copies
HOPPER_ONLY = {"conv", "stem", "gemm", "stem_as_channels", "qconv", "qstem", "group_conv"}
OURS = [t for t in list_tactics("cuda") if ".library." not in type(t).__module__]
SHARED = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_100": 227 * 1024}  # bytes of shared memory per block
EACH = 2  # samples of a tactic, and instances of a kernel file, that are tested


@cache
def samples_of(op):
    """(network, layer) of each sample; tactics of any op read all of them."""
    return [sample_layer(op, sample)[:2] for sample in OPS[op].samples]


@cache
def offered(t, machine):
    """(layer, signature) of the first samples that a tactic accepts, and the reasons of its refusals."""
    found, reasons = [], []
    for op in sorted(OPS) if "*" in t.ops else sorted({*t.ops, "Fused"} & set(OPS)):
        for network, layer in samples_of(op):
            if t.why_not(layer):
                continue
            for signature in t.signatures(layer, machine):
                reason = t.refuses(layer, signature, machine)
                if reason:
                    reasons.append(reason)
                else:
                    found.append((network, layer, signature))
            if len(found) >= EACH:
                return found, reasons
    return found, reasons


@pytest.fixture(scope="module", autouse=True)
def _free_samples():
    yield
    samples_of.cache_clear()
    offered.cache_clear()


@pytest.fixture(scope="module")
def instances():
    """[(file, constants, bytes of shared memory)] of the launches of the tactics on an A100."""
    seen = OrderedDict()

    def loaded(name, entry, constants, shared=0):
        seen[name, constants] = max(shared, seen.get((name, constants), 0))
        return SimpleNamespace(shared=shared)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("whet.tactics.cuda.") and hasattr(module, "load_kernel"):
                patch.setattr(module, "load_kernel", loaded)
        for t in OURS:
            for _, layer, signature in offered(t, AMPERE)[0]:
                kernel = t.plan(layer, signature, t.configs(layer, signature, AMPERE)[0], AMPERE)
                places = [tuple(4096 * (i + 1) for i in range(n)) for n in (len(layer.inputs), len(layer.outputs), len(kernel.packed))]
                kernel.launches(Args(*places, 1 << 20))
    return [(name, constants, shared) for (name, constants), shared in seen.items()]


@COMPILER_FLAGS
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_86", marks=pytest.mark.slow), "sm_89", "sm_100"])
def test_kernels_compile(instances, arch, flags):
    try:
        compiler.load_nvrtc()
    except BackendError as error:
        pytest.skip(str(error))
    count, wanted = Counter(), []
    for name, constants, shared in instances:
        assert shared <= SHARED[arch], f"{name} asks for {shared} bytes"
        count[name] += 1
        if count[name] <= (EACH if arch == "sm_80" else 1):
            wanted.append((name, constants))
    expected = {"elementwise.cu", "pool.cu", "reduce.cu", "normalize.cu", "depthwise.cu", "conv_generic.cu", "batched_matmul.cu", "reformat.cu"}
    assert expected | {"permute.cu"} <= set(count)

    def code(instance):
        name, constants = instance
        return compiler.compile_cubin(emit_kernel_source(name, dict(constants)), name=name, arch=arch, flags=flags)

    with ThreadPoolExecutor(2) as pool:
        assert all(c.startswith(b"\x7fELF") for c in pool.map(code, wanted))


def test_a_maximum_of_bytes_compiles_without_hoppers_packed_instruction():
    try:
        compiler.load_nvrtc()
    except BackendError as error:
        pytest.skip(str(error))
    constants = {"TYPE": 4, "TO": 4, "MAX": 1, "R": 3, "S": 3}
    assert compiler.compile_cubin(emit_kernel_source("pool.cu", constants), name="pool.cu", arch="sm_80").startswith(b"\x7fELF")


def test_hopper_tactics_refuse_with_a_reason():
    silent = {}
    for t in OURS:
        found, reasons = offered(t, AMPERE)
        if not found:
            silent[t.name.rpartition("/")[2]] = reasons
    assert silent.keys() >= HOPPER_ONLY, "no tactic offers a kernel that cannot run"
    del silent["reformat"]  # has no samples
    for name, reasons in silent.items():
        assert any("Hopper" in r or "sm_90" in r for r in reasons), (name, reasons)


def test_convolutions_and_products_in_16_bits_keep_a_kernel():
    for op in ("Conv", "Gemm", "MatMul"):
        for network, layer in samples_of(op):
            taken = [t.name for t in OURS if not t.why_not(layer) and any(not t.refuses(layer, s, AMPERE) for s in t.signatures(layer, AMPERE))]
            hopper = CompileOnlyGpu(multiprocessors=108)
            there = [t.name for t in OURS if not t.why_not(layer) and any(not t.refuses(layer, s, hopper) for s in t.signatures(layer, hopper))]
            assert bool(taken) >= bool(there), network


def device(capability):
    made = object.__new__(CudaBackend)
    major, minor = capability
    made.device = SimpleNamespace(name="NVIDIA GPU", capability=capability, arch=f"sm_{major}{minor}")
    return made


def test_notes_name_kernels_never_run_on_this_gpu(monkeypatch):
    assert device((9, 0)).caution == ""
    assert "8.6: whet's kernels were only run on 9.0. Tests compile them for 8.0, 8.6, 8.9 and 10.0." in device((8, 6)).caution
    assert "Tests compile them" in device((10, 0)).caution
    assert "They were never compiled for it" in device((8, 7)).caution
    assert "They were never compiled for it" in device((12, 0)).caution
    null = get_backend("null")
    monkeypatch.setattr(type(null), "caution", device((8, 0)).caution, raising=False)
    net = Network("net")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[2,3]"))), "y")
    plan = build(net, BuildConfig(backend="null", timing_cache=""))
    assert any("were only run on 9.0" in note for note in plan.report.notes), "whet exec prints the notes as warnings"


def test_candidates_compile_ahead_for_the_present_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr("whet.backends.cuda.compile_ahead", lambda sources, arch: seen.append((list(sources), arch)))
    device((8, 9)).compile_ahead(["text"])
    assert seen == [(["text"], "sm_89")]
