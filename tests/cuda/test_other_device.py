"""An unexpected GPU, driver or machine: error messages, safe tactics, rows of a profile."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.standin_gpu import StandInGpu
from whet.backends import get_backend
from whet.backends.cuda import CudaBackend, driver
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.cli._infer import get_compute_type
from whet.engine.plan import Choice
from whet.errors import BackendError, EngineError
from whet.network import Network, parse_type
from whet.ops import OPS, run_network, sample_layer
from whet.runtime import EngineWarning, Runtime
from whet.runtime.kernels import plan_layer
from whet.tactics.cuda.library import _cublaslt

AMPERE = CompileOnlyGpu("sm_80")


class Binding:
    """The subset of the driver binding that startup uses."""

    CUresult = SimpleNamespace(**{n: SimpleNamespace(name=n) for n in ("CUDA_SUCCESS", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")})
    CUdevice_attribute = SimpleNamespace()

    def __init__(self, status="CUDA_SUCCESS", version=13000, count=1):
        self.status, self.version, self.count = getattr(self.CUresult, status), version, count

    def cuInit(self, flags):
        return (self.status,)

    def cuDriverGetVersion(self):
        return self.CUresult.CUDA_SUCCESS, self.version

    def cuDeviceGetCount(self):
        return self.CUresult.CUDA_SUCCESS, self.count


@pytest.fixture
def start(monkeypatch):
    """Starts the driver with a given binding."""

    def started(binding):
        monkeypatch.setattr("cuda.bindings.driver", binding, raising=False)
        driver.load_driver.cache_clear()
        return driver.load_driver()

    yield started
    driver.load_driver.cache_clear()


def test_the_error_without_a_gpu_says_what_to_check(start):
    with pytest.raises(BackendError, match=r"No NVIDIA GPU is visible.*nvidia-smi.*CUDA_VISIBLE_DEVICES.*backend='cpu'"):
        start(Binding("CUDA_ERROR_NO_DEVICE"))
    with pytest.raises(BackendError, match=r"did not start.*SYSTEM_DRIVER_MISMATCH"):
        start(Binding("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"))


def test_a_missing_or_old_driver_is_reported(start):
    with pytest.raises(BackendError, match=r"supports CUDA 11\.8; whet needs 12\.0 or newer. Update the driver, or use backend='cpu'"):
        start(Binding(version=11080))

    def absent(flags):
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    missing = Binding()
    missing.cuInit = absent
    with pytest.raises(BackendError, match=r"NVIDIA driver \(libcuda.so.1\) cannot be loaded.*backend='cpu'"):
        start(missing)
    assert start(Binding()).version == 13000


def test_a_wrong_device_index_names_the_number_of_gpus(start):
    start(Binding(count=2))
    with pytest.raises(BackendError, match=r"no GPU number 2: this machine has 2 \(0 to 1\)"):
        driver.Device(2)


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(driver, "open_device", lambda n: SimpleNamespace(name="Tesla T4", capability=(7, 5), multiprocessors=40))
    with pytest.raises(BackendError, match=r"Tesla T4 has compute capability 7\.5.*need 8\.0 or newer"):
        CudaBackend(0)


@pytest.mark.parametrize("there", ["conv_generic", "cublaslt_older"])
@pytest.mark.parametrize(("op", "tactic"), [("Conv", "cuda/conv"), ("Gemm", "cuda/gemm"), ("MatMul", "cuda/cublaslt_gone")])
def test_without_its_tensor_cores_a_layer_runs_on_a_kernel_of_the_gpu(op, tactic, there, monkeypatch):
    monkeypatch.setattr(_cublaslt, "load_library", lambda: object() if there == "cublaslt_older" else None)
    machine = CompileOnlyGpu("sm_80", executes=True)
    sample = next(s for s in OPS[op].samples if all(not i or i.startswith("const") for i in s.inputs[1:]))
    _, layer, _ = sample_layer(op, sample)
    form = "nhwc" if op == "Conv" else "linear"
    choice = Choice(tactic, (), ((form, "f16"), *(None,) * (len(layer.inputs) - 1)), ((form, "f16"),))
    planned = plan_layer(layer, choice, machine)
    assert planned.tactic == f"cuda/{there}", "neither the host nor a pack that is off by default"
    assert planned.fell_back


def test_layers_are_measured_against_the_units_that_compute_them():
    def kind(inputs, config=(), out="f32"):
        return get_compute_type(SimpleNamespace(choice=Choice("t", config, inputs, (("nhwc", out),))))

    f32 = (("nhwc", "f32"), None)
    assert kind(f32) == "f32"
    assert kind(f32, (("algo", 0), ("math", "tf32"))) == "tf32"
    assert kind(f32, out="f16") == "f16", "a stem reads the image as given and computes in the type of its output"
    assert kind(f32, out="u8") == "i8"
    assert kind((("nhwc", "f16"),), out="u8") == "f16"
    assert kind((("nhwc", "u8"), ("nhwc", "f16"))) == "i8"
    assert kind((("nhwc", "f8e4m3"),)) == "f8"


def before_hopper(capabilities):
    """The capabilities with an A100's features: tactics refuse if they need Hopper's tensor cores and bulk copies."""
    return replace(capabilities, features=AMPERE.capabilities.features)


def convolutions():
    rng = np.random.default_rng(0)
    net = Network("net")
    x = net.add_input("x", parse_type("f16[4,16,20,20]"))
    shapes = ((32, 16, 3, 3), (32, 32, 3, 3), (16, 32, 1, 1))
    w = [net.constant((rng.standard_normal(s) / np.sqrt(np.prod(s[1:]))).astype(np.float16)) for s in shapes]
    a = net.add("Relu", net.add("Conv", x, w[0], None, pads=(1, 1, 1, 1)))
    b = net.add("Relu", net.add("Add", net.add("Conv", a, w[1], None, pads=(1, 1, 1, 1)), a))
    net.mark_output(net.add("Conv", b, w[2], None), "y")
    return net


@pytest.mark.parametrize("library", [False, True])
def test_a_build_for_a_gpu_before_hopper_selects_no_tactic_that_it_refuses(monkeypatch, standin_gpu, library):
    monkeypatch.setattr(_cublaslt, "load_library", lambda: object() if library else None)
    monkeypatch.setattr(_cublaslt, "get_version", lambda: "cublasLt of the test")
    net = convolutions()

    def selected():
        plan = build(net, BuildConfig(backend="cuda", timing_cache="", avg_timing=2, whole_engines=1, verify=False))
        return {c.tactic for c in plan.choices.values()}

    assert "cuda/conv" in selected(), "the same network on Hopper"
    monkeypatch.setattr(StandInGpu, "capabilities", before_hopper(StandInGpu.capabilities))
    there = selected()
    assert not there & {"cuda/conv", "cuda/conv_sum", "cuda/gemm"}, there
    assert ("cuda/cublaslt_older" in there) == library, there
    assert ("cuda/conv_generic" in there) or library, there


def test_an_engine_of_hopper_loads_with_safe_tactics_before_hopper(monkeypatch, standin_gpu):
    monkeypatch.setattr(_cublaslt, "load_library", lambda: None)
    plan = build(convolutions(), BuildConfig(backend="cuda", timing_cache="", avg_timing=2, whole_engines=1, verify=False))
    replaced = {c.tactic for c in plan.choices.values() if "conv" in c.tactic}
    assert replaced
    other = get_backend("cuda")
    other.capabilities = before_hopper(other.capabilities)
    plan.machine, plan.machine_key = {**plan.machine, "model": "NVIDIA H100 elsewhere"}, "another GPU"
    with pytest.raises(EngineError, match="tuned on other hardware"):
        Runtime(other).load(plan, require_same_hardware=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context = Runtime(other).load(plan).create_context()
        context.run({"x": np.zeros((4, 16, 20, 20), np.float16)})
    text = " ".join(str(w.message) for w in caught if issubclass(w.category, EngineWarning))
    assert "tuned elsewhere" in text
    assert "cuda/conv_generic" in text
    assert all(tactic in text for tactic in replaced)


# On a GPU


@pytest.mark.gpu
def test_an_engine_of_another_gpu_runs_on_safe_tactics_and_says_so():
    if driver.why_unavailable():
        pytest.skip(driver.why_unavailable())
    net = convolutions()
    plan = build(net, BuildConfig(backend="cuda", timing_cache="", avg_timing=2, whole_engines=1))
    assert any("conv" in c.tactic for c in plan.choices.values())
    other = get_backend("cuda")
    other.capabilities = before_hopper(other.capabilities)
    plan.machine, plan.machine_key = {**plan.machine, "model": "NVIDIA H100 elsewhere"}, "another GPU"
    with pytest.raises(EngineError, match="tuned on other hardware"):
        Runtime(other).load(plan, require_same_hardware=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = Runtime(other).load(plan)
        context = engine.create_context()
        x = np.random.default_rng(1).standard_normal((4, 16, 20, 20)).astype(np.float16)
        got = context.run({"x": x})["y"]
    words = " ".join(str(w.message) for w in told if issubclass(w.category, EngineWarning))
    assert "tuned elsewhere" in words
    assert "cuda/conv_generic" in words or "cuda/cublaslt_older" in words
    assert "conv" in words
    want = run_network(net, {"x": x}, widen=True)["y"]
    assert np.abs(got - want).max() / np.abs(want).max() < 4e-3
    assert context.launches().executable.graph_refused == "", "on the GPU, in a graph: no layer ran on the host"


@pytest.mark.gpu
@pytest.mark.parametrize("library", [False, True])
def test_a_network_is_built_for_a_gpu_before_hopper(monkeypatch, library):
    """On Hopper with the capabilities of an older GPU: the choice of tactics is that of an older GPU, the compiled code is not."""
    if driver.why_unavailable():
        pytest.skip(driver.why_unavailable())
    begin = CudaBackend.__init__

    def older(self, *args, **named):
        begin(self, *args, **named)
        self.capabilities = before_hopper(self.capabilities)

    monkeypatch.setattr(CudaBackend, "__init__", older)
    if not library:
        monkeypatch.setattr(_cublaslt, "load_library", lambda: None)
    elif _cublaslt.load_library() is None:
        pytest.skip("libcublasLt is not installed")
    net = convolutions()
    plan = build(net, BuildConfig(backend="cuda", timing_cache="", avg_timing=2, whole_engines=1))
    used = {c.tactic for c in plan.choices.values()}
    assert not used & {"cuda/conv", "cuda/conv_sum", "cuda/gemm"}
    assert ("cuda/cublaslt_older" in used) == library, used
    assert plan.report.verification.failures == []
