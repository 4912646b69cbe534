"""Engines on a GPU through the public runtime: asynchronous runs, torch tensors without copies, parallel contexts, profile shapes, faults."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver
from whet.builder import BuildConfig, build
from whet.errors import ContextError, ShapeError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.runtime import Runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable())),
    # torch warns about its own deprecations; those are not our errors
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
CONFIG = BuildConfig(backend="cuda", timing_cache="", avg_timing=2, whole_engines=1)


def network(batch="N", kind="f16"):
    """Two convolutions, softmax over channels; row-major inputs and outputs, channels-last intermediates."""
    rng = np.random.default_rng(0)
    net = Network("net")
    x = net.add_input("x", parse_type(f"{kind}[{batch},16,12,12]"))
    dtype = np.float16 if kind == "f16" else np.float32
    y = net.add("Conv", x, net.constant((rng.standard_normal((32, 16, 3, 3)) / 12).astype(dtype)), None, pads=(1, 1, 1, 1))
    y = net.add("Conv", net.add("Relu", y), net.constant((rng.standard_normal((8, 32, 1, 1)) / 6).astype(dtype)), None)
    net.mark_output(net.add("Softmax", y, axis=1), "y")
    return net


def feed(batch, seed=0, kind=np.float16):
    return np.random.default_rng(seed).standard_normal((batch, 16, 12, 12)).astype(kind)


@pytest.fixture(scope="module")
def dynamic():
    """(engine, network) for batches 1 to 8."""
    net = network()
    shapes = tuple({"x": (n, 16, 12, 12)} for n in (1, 4, 8))
    return Runtime("cuda").load(build(net, BuildConfig(**{**vars(CONFIG), "profiles": (shapes,)}))), net


def close(got, want):
    return np.abs(got.astype(np.float64) - want.astype(np.float64)).max() < 4e-3


def test_every_batch_of_a_profile_equals_the_reference_and_keeps_its_graph(dynamic):
    engine, net = dynamic
    context = engine.create_context()
    for batch in (1, 3, 8, 3, 1):
        x = feed(batch, batch)
        assert close(context.run({"x": x})["y"], run_network(net, {"x": x})["y"])
    assert len(context._bounds) == 3
    assert all(b.executable.graph is not None for b in context._bounds.values())
    with pytest.raises(ShapeError, match="takes 1 to 8"):
        context.run({"x": feed(9)})


def test_torch_tensors_are_bound_without_copies_and_runs_use_torchs_stream(dynamic):
    torch = pytest.importorskip("torch")
    engine, net = dynamic
    context = engine.create_context()
    host = [feed(4, s) for s in range(6)]
    x = torch.from_numpy(host[0]).cuda()
    y = torch.empty(4, 8, 12, 12, dtype=torch.half, device="cuda")
    assert context.bind("x", x) == ""
    assert context.bind("y", y) == ""
    stream, kept = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # inputs change between runs, all on one stream, without waiting on the host
        for a in host:
            x.copy_(torch.from_numpy(a).pin_memory(), non_blocking=True)
            pending = context.enqueue(stream)
            kept.append(y.clone())
    pending.synchronize()
    assert pending.done
    stream.synchronize()
    for a, got in zip(host, kept, strict=True):
        assert close(got.cpu().numpy(), run_network(net, {"x": a})["y"])
    x.copy_(torch.from_numpy(host[2]))  # on the default stream: execute() is ordered after it
    context.execute()
    assert close(y.cpu().numpy(), run_network(net, {"x": host[2]})["y"])


def test_allocated_outputs_are_shared_with_torch_without_a_copy(dynamic):
    torch = pytest.importorskip("torch")
    engine, net = dynamic
    context = engine.create_context()
    context.bind("x", torch.from_numpy(feed(4, 9)).cuda())
    torch.cuda.synchronize()
    context.enqueue().synchronize()
    seen = torch.from_dlpack(context.output_tensor("y"))
    assert seen.data_ptr() == context.output_tensor("y").address
    assert close(seen.cpu().numpy(), run_network(net, {"x": feed(4, 9)})["y"])


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_called_engine_returns_arrays_of_the_callers_library_on_the_gpu(dynamic, library):
    module, (engine, net), x = pytest.importorskip(library), dynamic, feed(4)
    y = engine(module.tensor(x, device="cuda") if library == "torch" else module.asarray(x))
    assert isinstance(y, module.Tensor if library == "torch" else module.ndarray)
    got = y.cpu().numpy() if library == "torch" else module.asnumpy(y)
    assert close(got, run_network(net, {"x": x})["y"])


def test_cupy_arrays_by_name_in_lists_strided_and_of_another_stream(dynamic):
    cupy, (engine, net), x = pytest.importorskip("cupy"), dynamic, feed(4)
    want = run_network(net, {"x": x})["y"]
    given = cupy.asarray(x)
    strided = cupy.asarray(np.ascontiguousarray(x.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
    assert not strided.flags.c_contiguous
    with cupy.cuda.Stream(non_blocking=True):
        late = given * 2 / 2  # computed on this stream: the engine must wait for it
        results = [engine(x=given)["y"], engine({"x": strided})["y"], engine.run([given])[0], engine(late)]
    for y in results:
        assert isinstance(y, cupy.ndarray)
        assert y.shape == want.shape
        assert close(cupy.asnumpy(y), want)
    assert close(engine(cupy.asnumpy(given)), want), "NumPy in, NumPy out afterwards"


def test_what_cannot_run_asynchronously_says_why(dynamic):
    engine, _ = dynamic
    context = engine.create_context()
    context.bind("x", feed(4))
    with pytest.raises(ContextError, match="'x': it is in host memory"):
        context.enqueue()
    torch = pytest.importorskip("torch")
    with pytest.raises(ShapeError, match=r"f32.*takes f16"):
        context.bind("x", torch.zeros(4, 16, 12, 12, device="cuda"))
    with pytest.raises(ShapeError, match="contiguous"):
        context.bind("x", torch.zeros(4, 16, 12, 12, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last))


def test_contexts_in_threads_and_on_streams_do_not_disturb_each_other(dynamic):
    engine, net = dynamic
    wrong, done = [], []

    def work(k):
        context = engine.create_context()
        for i in range(20):
            batch = 1 + (k + i) % 8
            x = feed(batch, 100 * k + i)
            if not close(context.run({"x": x})["y"], run_network(net, {"x": x})["y"]):
                wrong.append((k, i))
        done.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert sorted(done) == [0, 1, 2, 3]


def test_results_without_a_graph_are_the_same(dynamic):
    engine, net = dynamic
    context = engine.create_context()
    x = feed(4, 5)
    with_graph = context.run({"x": x})["y"]
    bound = context.launches()
    bound.executable.use_graph = False
    assert np.array_equal(context.run({"x": x})["y"], with_graph)
    bound.executable.use_graph, bound.executable.graph_refused = True, "as if the driver had refused it"
    bound.executable.discard_graphs()
    assert np.array_equal(context.run({"x": x})["y"], with_graph)
    assert bound.executable.graph is None
    assert close(with_graph, run_network(net, {"x": x})["y"])


def test_verification_of_a_large_batch_finds_one_wrong_element():
    plan = build(network(96, "f32"), BuildConfig(**{**vars(CONFIG), "precisions": ("fp16",)}))
    said = plan.report.verification
    assert said.failures == []
    assert len(said.images) == 3
    from whet.builder.batching.batch_items import BatchItems, find_batch_axes
    from whet.builder.verify.batch_positions import measure_rotation_differences
    from whet.runtime import bind

    engine = Runtime("cuda").load(plan)
    shapes = {"x": (96, 16, 12, 12)}
    bound, other = bind(plan, engine.backend), bind(plan, engine.backend)
    places = find_batch_axes(plan.network, shapes, 96)
    data = {"x": feed(96, 3, np.float32)}
    assert all(e <= 2e-3 for _, e in measure_rotation_differences(bound, other, data, places, 96))
    step, run = len(plan.network.layers) - 1, other.run_step

    def spoiled(i):
        run(i)
        if i == step:
            at, nbytes = other.place("y")
            engine.backend.write(other.arena, at + nbytes // 2, np.zeros(64, np.uint8))

    other.run_step = spoiled
    errors = [e for _, e in measure_rotation_differences(bound, other, data, places, 96)]
    assert errors[-1] > 0.01
    assert max(errors[:-1], default=0) <= 2e-3
    assert BatchItems.of(96).at[0] == 0


FAULT = """
import struct, sys
import numpy as np
sys.path.insert(0, {tests!r})
from test_running import CONFIG, build, feed, network
from whet.errors import BackendError, ContextError
from whet.runtime import Runtime
plan = build(network(4), CONFIG)
engine = Runtime("cuda").load(plan)
context = engine.create_context()
good = context.run({{"x": feed(4)}})["y"]
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.launch import Launch, Module
text = "struct A {{ int* p; }}; extern \\"C\\" __global__ void f(const __grid_constant__ A a) {{ *a.p = 1; }}"
bad = Launch(Module(compile_cubin(text)).kernel("f"), (1, 1, 1), 32, struct.pack("<Q", 64), overlap=False)
context.launches().executable.calls[0].launches.insert(0, bad)
context.launches().executable.discard_graphs()
try:
    context.run({{"x": feed(4)}})
except BackendError as e:
    print("FAULT", e)
try:
    context.run({{"x": feed(4)}})
except ContextError as e:
    print("POISONED", e)
try:
    again = Runtime("cuda").load(plan).create_context().run({{"x": feed(4)}})["y"]
    print("AGAIN", np.array_equal(again, good))
except Exception as e:
    print("NO", type(e).__name__, e)
"""


def test_a_faulting_kernel_poisons_its_engine_and_the_process_goes_on():
    script = FAULT.format(tests=os.path.dirname(__file__))
    got = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ}, timeout=120)
    lines = got.stdout.splitlines()
    assert got.returncode == 0, got.stderr[-2000:]
    assert lines[0].startswith("FAULT A GPU kernel failed"), lines
    assert lines[1].startswith("POISONED this engine is poisoned"), lines
    # a fresh context where the driver gives one, else words that say what to do
    assert lines[2] == "AGAIN True" or (lines[2].startswith("NO") and "new process" in lines[2]), lines


def test_times_of_exec_come_from_gpu_events(dynamic):
    from whet.measure.queries_gpu import measure_gpu

    engine, _ = dynamic
    for streams, transfers, overlap, graph in ((1, True, True, True), (2, True, True, True), (1, False, True, True), (1, True, False, False)):
        m = measure_gpu(engine, 0, {"x": feed(4)}, streams=streams, transfers=transfers, overlap=overlap, graph=graph, warmup_ms=20, duration_s=0.1)
        assert len(m.traces) >= 10 * streams
        assert all(0 < t.compute < 50 for t in m.traces)
        assert all((t.h2d > 0) == transfers == (t.d2h > 0) for t in m.traces)
        busy = sum(t.compute for t in m.traces) / 1e3
        assert streams > 1 or busy < m.wall
        assert all(a.startComputeMs <= b.startComputeMs for a, b in zip(m.traces, m.traces[1:], strict=False))


def test_an_evicted_cache_costs_time():
    """33 MB of weights, which stay in the cache between queries: from memory they take at least 8 us."""
    from whet.measure.queries_gpu import measure_gpu

    rng = np.random.default_rng(0)
    net = Network("net")
    x = net.add_input("x", parse_type("f16[8,2048]"))
    for _ in range(4):
        x = net.add("MatMul", x, net.constant((rng.standard_normal((2048, 2048)) / 45).astype(np.float16)))
    net.mark_output(x, "y")
    engine = Runtime("cuda").load(build(net, CONFIG))
    data = {"x": rng.standard_normal((8, 2048)).astype(np.float16)}
    runs = [measure_gpu(engine, 0, data, warmup_ms=20, duration_s=0.1, transfers=False, cold=cold) for cold in (False, True)]
    warm, cold = (np.min([t.compute for t in run.traces]) for run in runs)  # the minimum: other users of the GPU evict the cache as well
    assert cold > warm + 0.002
    assert cold < warm + 0.1, "the eviction is not timed"


def test_out_of_memory_errors_give_the_sizes_of_the_plan(dynamic, monkeypatch):
    engine, _ = dynamic
    from whet.errors import BackendError
    from whet.runtime import context as context_module

    free, _ = engine.backend.device.free_memory()
    monkeypatch.setattr(context_module, "count_arena_bytes", lambda plan, profile: free + 2**30)
    context = engine.create_context()
    with pytest.raises(BackendError, match=r"no memory for a context: its arena takes \d+.*packed weights.*MiB of GPU memory were requested"):
        context.run({"x": feed(4)})


@pytest.fixture
def reversal():
    """An op of a user's own that has no kernel for the GPU."""
    from whet import register
    from whet.ops import OPS
    from whet.plugin_packages import PACKAGES
    from whet.tactics import TACTICS

    register("Reverse", lambda layer: layer.inputs[0].type, lambda layer, x: x[..., ::-1], domain="com.acme", package_name="acme", version="1")
    yield "com.acme.Reverse"
    for registry in (OPS, TACTICS, PACKAGES):
        for name in [n for n in registry if "acme" in n]:
            del registry[name]


def test_a_layer_without_a_kernel_runs_on_the_host_if_allowed(reversal):
    from whet.errors import NoTacticError

    net = Network("net")
    x = net.add_input("x", parse_type("f32[5,8,3,3]"))
    y = net.add(reversal, net.add("Relu", x))
    net.mark_output(net.add("Softmax", y, axis=1), "y")
    with pytest.raises(NoTacticError, match="Reverse"):
        build(net, CONFIG)
    plan = build(net, BuildConfig(**{**vars(CONFIG), "tactic_sources": ("+host_reference",)}))
    assert [n for n, c in plan.choices.items() if c.tactic == "cuda/host_reference"] == [next(x.name for x in net.layers if x.op == reversal)]
    context = Runtime("cuda").load(plan).create_context()
    for seed in (1, 2):
        a = np.random.default_rng(seed).standard_normal((5, 8, 3, 3)).astype(np.float32)
        assert np.allclose(context.run({"x": a})["y"], run_network(net, {"x": a})["y"], atol=1e-6)
    assert context.launches().executable.graph_refused == "a layer runs on the host"
    assert len(context.profile({"x": a})) == len(plan.network.layers)
