"""Per-sample engines: selected when faster, correct at every batch, saved, locked and reported; refused if samples depend on each other."""

import dataclasses
import json
from contextlib import nullcontext

import numpy as np
import pytest

from whet.backends import get_backend
from whet.backends.cpu import CpuBackend
from whet.backends.cpu.workers import ParallelLaunch
from whet.builder import BuildConfig, build, save_lock
from whet.builder.assemble import make_sample_parallel
from whet.builder.batching import per_sample
from whet.builder.batching.per_profile import join_plans
from whet.builder.batching.per_sample_check import find_batch_difference
from whet.engine import Profile, engine_bytes, read_engine
from whet.errors import BuildError, EngineError, LockError, ShapeError
from whet.measure.compare import Ranking
from whet.measure.policy import SAMPLE_MODES
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.runtime import Runtime, SampleParallelEngine, bind

pytest.importorskip("llvmlite")
QUICK = BuildConfig(timing_cache="", avg_timing=1, whole_engines=2, in_network=False)


def inception(outputs: int = 5, seed: int = 0) -> Network:
    """Branches concatenated along channels, an Add, a Gemm; for one sample the Concat may be a view. A sample's output has `outputs` floats."""
    rng = np.random.default_rng(seed)
    net = Network("inception")

    def weight(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))

    x = net.add_input("x", parse_type("f32[N,16,8,8]"))
    parts = [net.add("Relu", net.add("Conv", x, weight(16, 16, k, k), pads=(k // 2,) * 4)) for k in (1, 3)]
    y = net.add("Concat", *parts, net.add("MaxPool", x, kernel_shape=(3, 3), pads=(1, 1, 1, 1), strides=(1, 1)), axis=1)
    y = net.add("Relu", net.add("Conv", y, weight(16, 48, 1, 1), weight(16)))
    net.mark_output(net.add("Add", y, x), "map")
    net.mark_output(net.add("Gemm", net.add("Flatten", net.add("GlobalAveragePool", y)), weight(outputs, 16), weight(outputs), transB=1), "y")
    return net


def one_convolution() -> Network:
    """An input of the shape of `inception`'s; built in a fraction of its time."""
    net = Network("convolution")
    w = np.random.default_rng(0).standard_normal((4, 16, 1, 1)).astype(np.float32) / 4
    net.mark_output(net.add("Relu", net.add("Conv", net.add_input("x", parse_type("f32[N,16,8,8]")), net.constant(w))), "y")
    return net


def config(low=1, opt=4, high=7, **changes):
    shapes = tuple({"x": (n, 16, 8, 8)} for n in (low, opt, high))
    return dataclasses.replace(QUICK, **({"threads": 2, "samples": "parallel", "profiles": (shapes,)} | changes))


def feed(batch: int, seed: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed + batch).standard_normal((batch, 16, 8, 8)).astype(np.float32)}


def close(got, want, bound=1e-5):
    for name, w in want.items():
        assert got[name].shape == w.shape
        assert np.abs(got[name] - w).max() <= bound * np.abs(w).max()


@pytest.fixture(scope="module")
def parallel():
    return build(inception(), config())


@pytest.fixture(scope="module")
def sequential():
    return build(inception(), config(samples="sequential"))


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_every_batch_equals_the_reference(mode, batch, request):
    context = Runtime().load(request.getfixturevalue(mode)).create_context()
    data = feed(batch)
    got = context.run(data)
    close(got, run_network(inception(), data, widen=True))
    again = context.run(data)
    assert all(np.array_equal(got[n], again[n]) for n in got)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_engine_runs_on_other_thread_counts(parallel, threads):
    with pytest.warns(UserWarning, match="tuned elsewhere") if threads != 2 else nullcontext():
        engine = Runtime(threads=threads).load(parallel)
    context = engine.create_context()
    for batch in (1, 3, 4, 7):
        close(context.run(feed(batch)), run_network(inception(), feed(batch), widen=True))


def test_without_workers_samples_run_one_after_the_other(parallel, monkeypatch):
    """An engine of another machine, on one without a compiler: all threads run one sample after the other."""
    monkeypatch.setattr(CpuBackend, "why_not_parallel", lambda self, calls: "no compiler")
    context = Runtime().load(parallel).create_context()
    for batch in (1, 4, 5):
        close(context.run(feed(batch)), run_network(inception(), feed(batch), widen=True))
        assert not any(isinstance(c, ParallelLaunch) for c in context.launches().executable.calls)
        assert len(context.profile(feed(batch), iterations=1)) == len(parallel.network.layers)
    with pytest.raises(BuildError, match="no compiler"):
        build(inception(), config())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sequential_samples_use_all_threads(sequential, threads):
    """No launch runs on workers, and the memory is that of one sample plus the inputs and outputs of the batch."""
    assert sequential.arenas[0].concurrent_samples == 1
    with pytest.warns(UserWarning, match="tuned elsewhere") if threads != 2 else nullcontext():
        engine = Runtime(threads=threads).load(sequential)
    context = engine.create_context()
    for batch in (1, 3, 4, 7):
        close(context.run(feed(batch)), run_network(inception(), feed(batch), widen=True))
        assert not any(isinstance(c, ParallelLaunch) for c in context.launches().executable.calls)
        assert len(context.profile(feed(batch), iterations=1)) == len(sequential.network.layers)
    ends = 7 * (2 * 16 * 8 * 8 * 4 + 64)
    assert engine.memory(context).arena <= sequential.arenas[0].total + ends + 64


def test_sequential_engines_are_locked_saved_and_need_no_compiled_loop(sequential, tmp_path, monkeypatch):
    """Python kernels may run samples one after the other too; a lock rebuilds the same engine, without workers."""
    save_lock(sequential, path := tmp_path / "lock.json")
    again = build(inception(), config(samples="auto", lock=str(path)))
    assert (again.arenas, again.choices) == (sequential.arenas, sequential.choices)
    read = read_engine(engine_bytes(again))
    close(Runtime().load(read).create_context().run(feed(5)), run_network(inception(), feed(5), widen=True))
    for samples in ("parallel", "together"):
        with pytest.raises(LockError, match=f"it has samples='sequential', the build samples='{samples}'"):
            build(inception(), config(samples=samples, lock=str(path)))
    monkeypatch.setattr(CpuBackend, "why_not_parallel", lambda self, calls: "no compiler")
    assert build(inception(), config(samples="sequential")).arenas[0].concurrent_samples == 1


def test_concats_of_one_sample_may_be_views(parallel):
    """The view kernel is among the candidates of the one-sample engine, but not of a dynamic batch."""

    def views(plan):
        return [c for rows in plan.report.candidates.values() for c in rows if c.tactic == "cpu/part_view" and c.signature]

    assert views(parallel)
    assert not views(build(inception(), config(samples="together")))


def test_user_arrays_are_bound_without_copies_if_samples_are_aligned(parallel):
    """A sample of 'map' has a multiple of 64 bytes; one of 'y' has 20, so it is copied, which is reported."""
    context = Runtime().load(parallel).create_context()
    for batch in (4, 3, 1):
        context.set_input_shape("x", (batch, 16, 8, 8))
        x, y, m = context.input_array("x"), context.output_array("y"), context.output_array("map")
        assert context.bind("x", x) == ""
        assert context.bind("map", m) == ""
        assert ("aligned" in context.bind("y", y)) == (batch > 1)
        for seed in (1, 2):
            x[:] = feed(batch, seed)["x"]
            y[:] = m[:] = np.nan
            context.execute()
            close({"y": y, "map": m}, run_network(inception(), {"x": x}, widen=True))
        close(context.run(feed(batch)), run_network(inception(), feed(batch), widen=True))  # back in the context's own memory
        context.execute()
        close({"y": y, "map": m}, run_network(inception(), {"x": x}, widen=True))


def test_contexts_have_separate_memory(parallel):
    engine = Runtime().load(parallel)
    first, second = engine.create_context(), engine.create_context()
    one, two = first.run(feed(5, 1)), second.run(feed(5, 2))
    close(first.run(feed(5, 1)), one)
    close(second.run(feed(5, 2)), two)
    assert engine.memory(first).arena >= 2 * parallel.arenas[0].total
    first.close()
    close(second.run(feed(5, 2)), two)


def test_batches_outside_the_profile_are_refused(parallel):
    context = Runtime().load(parallel).create_context()
    for batch in (8, 0):
        with pytest.raises(ShapeError):
            context.run(feed(batch))


def test_the_layer_profile_has_a_row_for_each_layer(parallel):
    context = Runtime().load(parallel).create_context()
    for batch in (4, 1):
        rows = context.profile(feed(batch), iterations=2)
        assert [r.layer for r in rows] == [layer.name for layer in parallel.network.layers]


def test_the_engine_file_stores_lanes_and_is_checked(parallel):
    data = engine_bytes(parallel)
    again = read_engine(data)
    assert again.arenas[0].concurrent_samples == parallel.arenas[0].concurrent_samples
    assert engine_bytes(dataclasses.replace(again, report=parallel.report)) == data
    close(Runtime().load(again).create_context().run(feed(5)), run_network(inception(), feed(5), widen=True))


def test_an_engine_with_dependent_samples_is_refused_when_it_is_loaded():
    """Independence is proven again: an engine file is not trusted."""
    net = Network("mixing")
    x = net.add_input("x", parse_type("f32[N,16,8,8]"))
    net.mark_output(net.add("Softmax", x, axis=0), "y")
    one = build(net, config(1, 1, 1, samples="together"))
    claimed = make_sample_parallel(one, [Profile({"x": ((1, 16, 8, 8), (4, 16, 8, 8), (4, 16, 8, 8))})], get_backend("cpu", threads=2), 2)
    with pytest.raises(EngineError, match="depend on each other: Softmax"):
        engine_bytes(claimed)
    with pytest.raises(EngineError, match="depend on each other: Softmax"):
        Runtime().load(claimed)


@pytest.mark.parametrize("backend", ["cuda", "null"])
def test_only_the_cpu_runs_per_sample(parallel, backend):
    with pytest.raises(EngineError, match=f"'{backend}' does not support"):
        engine_bytes(dataclasses.replace(parallel, backend=backend))


def ranking(samples):
    return Ranking(SAMPLE_MODES, samples, samples, list(range(len(samples))))


def test_sequential_is_preferred_on_a_tie(monkeypatch):
    """On a tie the batch runs together; of the per-sample modes \"sequential\" is preferred, which uses all threads at every batch."""
    for least, kept in (([2.0, 2.0, 2.0], "together"), ([3.0, 2.0, 2.005], "sequential"), ([3.0, 2.0, 2.5], "parallel")):
        monkeypatch.setattr(per_sample, "compare", lambda *_, least=least, **__: ranking([[t * (1 + k / 1000) for k in range(9)] for t in least]))
        plan = build(one_convolution(), config(samples="auto"))
        assert plan.report.samples.kept == kept, least


def test_the_fastest_is_kept_and_the_others_are_reported(monkeypatch):
    for ms, kept, lanes in (([4.0, 2.0, 3.0], "parallel", 2), ([2.0, 4.0, 3.0], "together", 0), ([3.0, 4.0, 2.0], "sequential", 1)):
        monkeypatch.setattr(per_sample, "compare", lambda *_, ms=ms, **__: ranking([[t / 1e3] * 3 for t in ms]))
        plan = build(one_convolution(), config(samples="auto"))
        assert plan.arenas[0].concurrent_samples == lanes
        assert plan.report.samples.kept == kept
        assert all(f"{n} ms" in plan.report.samples.why for n in (2, 3, 4))
        assert plan.options["samples"] == "auto"
        assert plan.options["profiles"] == config().profiles
        assert plan.probe["shapes"] == {"x": [4, 16, 8, 8]}


def test_batches_of_one_and_fixed_batches_run_together():
    for net, given in ((inception(), config(1, 1, 1, samples="auto")), (inception(), config(samples="together"))):
        plan = build(net, given)
        assert plan.arenas[0].concurrent_samples == 0
        assert plan.report.samples is None
        assert b'"lanes"' not in engine_bytes(plan)


def test_an_impossible_mode_is_refused_with_a_reason():
    net = Network("mixing")
    x = net.add_input("x", parse_type("f32[N,16,8,8]"))
    net.mark_output(net.add("Softmax", x, axis=0, name="over the batch"), "y")
    with pytest.raises(BuildError, match=r"'over the batch' mixes samples.*samples='parallel'"):
        build(net, config())
    plan = build(net, config(samples="auto"))
    assert plan.arenas[0].concurrent_samples == 0
    assert "over the batch" in plan.report.samples.why


def test_the_lock_rebuilds_the_same_engine_or_fails(parallel, tmp_path):
    path = tmp_path / "lock.json"
    save_lock(parallel, path)
    again = build(inception(), config(samples="auto", lock=str(path)))
    assert again.arenas == parallel.arenas
    assert again.choices == parallel.choices
    one, two = (Runtime().load(p).create_context().run(feed(5)) for p in (parallel, again))
    assert all(np.array_equal(one[n], two[n]) for n in one)
    with pytest.raises(LockError, match="the build samples='together'"):
        build(inception(), config(samples="together", lock=str(path)))
    for lanes in (-1, "x", 10**9, None, [2]):
        lock = json.loads(path.read_text())
        lock["arenas"][0]["lanes"] = lanes
        path.write_text(json.dumps(lock))
        with pytest.raises(LockError):
            build(inception(), config(samples="auto", lock=str(path)))


def test_the_arenas_of_all_lanes_respect_the_limit():
    with pytest.raises(BuildError, match="arenas of all workers"):
        build(inception(), config(memory_limit={"arena": 100_000}))


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_wrong_sample_addresses_are_found(mode, request):
    """Injected fault: a sample of a batch reads another one."""
    parallel = request.getfixturevalue(mode)
    assert find_batch_difference(parallel, get_backend("cpu", threads=2)) is None
    real = SampleParallelEngine.set_address

    def redirect_third_sample(self, name, address):
        real(self, name, address)
        if name == "x" and len(self._samples_launches) > 2:
            at, _ = self._staged[name]
            sample = self._samples_launches[2]
            sample.launches.sites.set_address(sample.engine, name, self.arena.address + at)

    SampleParallelEngine.set_address = redirect_third_sample
    try:
        assert "sample 2 of a batch of 4" in find_batch_difference(parallel, get_backend("cpu", threads=2))
    finally:
        SampleParallelEngine.set_address = real


def test_profiles_may_use_different_sample_modes():
    """The first profile runs per sample, the second has a batch of one."""
    shapes = [tuple({"x": (n, 16, 8, 8)} for n in three) for three in ((2, 4, 4), (1, 1, 1))]
    given = dataclasses.replace(config(), profiles=tuple(shapes), samples="auto")
    plans = []
    for samples, k in (("parallel", 0), ("together", 1)):
        plans.append(build(inception(), dataclasses.replace(given, profiles=given.profiles[k : k + 1], samples=samples)))
    plan = read_engine(engine_bytes(join_plans(plans)))
    assert [a.concurrent_samples > 0 for a in plan.arenas] == [True, False]
    context = Runtime().load(plan).create_context()
    for batch in (1, 3, 4, 1):
        close(context.run(feed(batch)), run_network(inception(), feed(batch), widen=True))
        assert isinstance(context.launches(), SampleParallelEngine) == (batch > 1)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_and_output_sizes(seed):
    rng = np.random.default_rng(seed)
    low, opt, high = sorted(int(n) for n in rng.integers(1, 9, 3))
    net = inception(int(rng.integers(1, 40)), seed)
    plan = build(net, config(low, opt, high, threads=int(rng.integers(1, 3))))
    for batch in range(low, high + 1):
        run = bind(plan, get_backend("cpu", threads=plan.threads), {"x": (batch, 16, 8, 8)})
        run.feed(feed(batch))
        run.run()
        close(run.fetch(), run_network(net, feed(batch), widen=True))


def test_other_axes_may_be_dynamic():
    """Attention over texts with dynamic length and batch."""
    rng = np.random.default_rng(0)
    net = Network("texts")
    x = net.add_input("x", parse_type("f32[N,S,16]"))
    y = net.add("MatMul", x, net.constant(rng.standard_normal((16, 16)).astype(np.float32) / 4))
    scores = net.add("Softmax", net.add("MatMul", y, net.add("Transpose", y, perm=(0, 2, 1))), axis=-1)
    net.mark_output(net.add("MatMul", scores, y), "y")
    shapes = tuple({"x": (n, s, 16)} for n, s in ((1, 2), (3, 5), (4, 9)))
    plan = read_engine(engine_bytes(build(net, config(profiles=(shapes,)))))
    context = Runtime().load(plan).create_context()
    for n, s in ((1, 2), (3, 5), (4, 9), (2, 7), (3, 2)):
        data = {"x": rng.standard_normal((n, s, 16)).astype(np.float32)}
        close(context.run(data), run_network(net, data, widen=True))


def test_results_equal_onnx_runtime(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    from whet.frontends.onnx_writer import save_onnx

    save_onnx(inception(), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    context = Runtime().load(build(inception(), config())).create_context()
    for batch in (1, 3, 6):
        close(context.run(feed(batch)), dict(zip(("map", "y"), session.run(["map", "y"], feed(batch)), strict=True)), 2e-5)


def test_python_kernels_have_no_lanes_and_are_named():
    net = Network("numpy")
    x = net.add_input("x", parse_type("f64[N,16,8,8]"))
    net.mark_output(net.add("Hardmax", x, axis=1, name="largest"), "y")
    with pytest.raises(BuildError, match=r"runs in Python.*\(layer 'largest'\)"):
        build(net, config())
    assert build(net, config(samples="auto")).report.samples.kept in ("together", "sequential")


def test_older_names_of_the_sample_modes_are_accepted():
    assert [config(samples=s).samples for s in ("apart", "turns")] == ["parallel", "sequential"]
