"""Values for calibration and accuracy by engines of the build's GPU: compared with the CPU's once, and left to the CPU where they cannot be had."""

import dataclasses
import threading

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")

from support.standin_gpu import StandInGpu
from whet.backends import BACKENDS, get_backend
from whet.builder import BuildConfig
from whet.builder.precision.accuracy_budget import Judge
from whet.builder.precision.calibration import Calibration, get_calibrated_ranges, prepare
from whet.builder.verify import device_values
from whet.builder.verify.device_values import RunsOfNetworks, select_runs
from whet.builder.verify.engine_values import SharedParts
from whet.errors import BackendError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision.budget import Budget
from whet.precision.emulate import emulate_network
from whet.tactics.cuda._device.kernel import GpuKernel

CONFIG = BuildConfig(backend="cuda", timing_cache="")


def make_network():
    rng, net = np.random.default_rng(0), Network("three")
    x = net.add_input("x", parse_type("f32[1,8,6,6]"))
    for i in range(3):
        w = net.constant(rng.standard_normal((8, 8, 3, 3)).astype("f4") / 8, f"w{i}")
        x = net.add("Relu", net.add("Conv", x, w, pads=(1, 1, 1, 1), name=f"c{i}"), name=f"r{i}")
    net.mark_output(x, "y")
    return net


def samples(count=3):
    return [{"x": np.random.default_rng(i).standard_normal((1, 8, 6, 6)).astype("f4")} for i in range(count)]


class ReferenceGpu(StandInGpu):
    """The simulated GPU, whose launches compute the reference, times `factor`; it says that it computes products, as a real one does."""

    capabilities = dataclasses.replace(StandInGpu.capabilities, reference_products=True)
    factor = 1.0
    threads_seen: set = set()  # noqa: RUF012 - shared on purpose: the backend is created anew by each build


class ReferenceCall:
    launches, native, operands, label, implementation = (), None, None, "", ""

    def __init__(self, kernel, args):
        self.kernel, self.args = kernel, args

    def run(self):
        from support.planted_cuda import view
        from whet.ops import run_layer

        layer, signature, args = self.kernel.layer, self.kernel.signature, self.args
        ReferenceGpu.threads_seen.add(threading.get_ident())
        ins = [
            None if t is None else t.array() if t.is_constant else view(at, t, o).copy()
            for t, at, o in zip(layer.inputs, args.inputs, signature.inputs, strict=True)
        ]
        for y, t, at, o in zip(run_layer(layer, ins), layer.outputs, args.outputs, signature.outputs, strict=True):
            view(at, t, o)[...] = y * ReferenceGpu.factor if t.dtype.is_float and ReferenceGpu.factor != 1 else y


@pytest.fixture
def gpu_values(monkeypatch):
    """Networks of any size use the simulated GPU."""
    from support.planted_cuda import HostGpu
    from whet.tactics import load_tactics

    load_tactics("cuda")
    made = GpuKernel.__init__

    def noting(self, layer, signature, make, **rest):
        made(self, layer, signature, make, **rest)
        self.layer, self.signature = layer, signature

    monkeypatch.setattr(GpuKernel, "__init__", noting)
    monkeypatch.setattr(GpuKernel, "enqueue", lambda self, args, stream: stream.record(ReferenceCall(self, args)))
    monkeypatch.setattr(ReferenceGpu, "stream", HostGpu.stream)
    monkeypatch.setattr(ReferenceGpu, "factor", 1.0)
    monkeypatch.setattr(ReferenceGpu, "threads_seen", set())
    monkeypatch.setitem(BACKENDS, "cuda", ReferenceGpu)
    monkeypatch.setattr(device_values, "LEAST", 0)


def test_values_come_from_the_gpu_and_are_compared_once(gpu_values):
    net, notes = make_network(), []
    runs = select_runs(net, CONFIG, samples()[0], notes.append)
    run = runs(net, ["x", "r0", "y"])
    for feeds in samples():
        got, want = run(feeds), run_network(net, feeds)
        np.testing.assert_allclose(got["y"], want["y"], rtol=1e-4, atol=1e-5)
        assert np.array_equal(got["x"], feeds["x"])
    assert ReferenceGpu.threads_seen
    assert (runs.checked, runs.refused, notes) == (True, "", [])


def test_wrong_values_are_refused(gpu_values, monkeypatch):
    monkeypatch.setattr(ReferenceGpu, "factor", 1.01)
    net, notes = make_network(), []
    run = select_runs(net, CONFIG, samples()[0], notes.append)(net, ["y"])
    for feeds in samples():
        np.testing.assert_allclose(run(feeds)["y"], run_network(net, feeds)["y"], rtol=1e-4, atol=1e-5)
    assert len(notes) == 1
    assert "computed on the CPU" in notes[0]
    assert "'y' are off by" in notes[0]


def test_a_gpu_that_fails_leaves_the_values_to_the_cpu(gpu_values, monkeypatch):
    def fail(self, nbytes, alignment=64):
        raise BackendError("0 of 80 GiB are free")

    net, notes = make_network(), []
    runs = select_runs(net, CONFIG, samples()[0], notes.append)
    monkeypatch.setattr(ReferenceGpu, "allocate", fail)
    np.testing.assert_allclose(runs(net, ["y"])(samples()[0])["y"], run_network(net, samples()[0])["y"], rtol=1e-4, atol=1e-5)
    assert len(notes) == 1
    assert "0 of 80 GiB" in notes[0]


def test_small_networks_and_other_backends_use_the_cpu(gpu_values, monkeypatch):
    net, feeds = make_network(), samples()[0]
    assert select_runs(net, BuildConfig(), feeds, pytest.fail).device is None
    assert select_runs(net, CONFIG, None, pytest.fail).device is None
    monkeypatch.setattr(device_values, "LEAST", 1e9)
    assert select_runs(net, CONFIG, feeds, pytest.fail).device is None


def test_calibration_and_accuracy_agree_with_the_cpu(gpu_values):
    net = make_network()
    prepared, data = prepare(net, CONFIG), samples(4)
    notes: list[str] = []
    found = []
    for config in (CONFIG, BuildConfig(timing_cache="")):
        ranges = get_calibrated_ranges(net, prepared, Calibration(lambda: data, method="minmax"), config, notes.append)
        judge = Judge(prepared, "int8", ranges, data, Budget("snr", 30.0), config)
        found.append((ranges, judge.low(judge.names).value))
    (on_gpu, gpu_db), (on_cpu, cpu_db) = found
    assert notes == []
    assert len(ReferenceGpu.threads_seen) >= 1
    for name, r in on_cpu.tensors.items():
        assert on_gpu.tensors[name].high == pytest.approx(r.high, rel=1e-4)
    assert gpu_db == pytest.approx(cpu_db, abs=0.3)


@pytest.mark.gpu
def test_a_gpu_computes_the_values_of_exact_and_rounded_networks(gpu):
    net, data = make_network(), samples(4)
    ranges = get_calibrated_ranges(net, net, Calibration(lambda: data, method="minmax"), BuildConfig(timing_cache=""), pytest.fail)
    runs = RunsOfNetworks(SharedParts("cuda"), pytest.fail)
    for kind in ("", "int8", "fp8"):
        made = emulate_network(net, kind, ranges) if kind else net
        run = runs(made, ["y"])
        for feeds in data:
            got, want = run(feeds)["y"], run_network(made, feeds)["y"]
            assert np.linalg.norm(got - want) <= (0.02 if kind else 1e-4) * np.linalg.norm(want)  # a few roundings differ
            assert run(feeds)["y"].tobytes() == got.tobytes()
    assert runs.checked
    assert get_backend("cuda").lost == ""
