"""Engines and contexts: runs, shapes, user buffers, threads, memory, hardware."""

import copy
import dataclasses
import gc
import pickle
import re
import threading
import warnings
import weakref

import numpy as np
import pytest

import whet.runtime.context as context_module
import whet.runtime.shaped as shaped_module
from handmade import PlainBackend, blocked_conv_net, conv_net, make_plan
from whet.builder import build
from whet.engine import make_probe
from whet.errors import ContextError, EngineError, ShapeError, UsageError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.runtime import EngineWarning, Runtime, allocate_aligned_array
from whet.tactics import PlanRefused, get_tactic


@pytest.fixture
def engine():
    return Runtime(PlainBackend()).load(make_plan(conv_net()))


def image(n=2, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 3, 8, 8)).astype("f4")


def expected(engine, x):
    return run_network(engine.plan.network, {"x": x})["y"]


def test_run_takes_shapes_from_the_arrays(engine):
    context = engine.create_context()
    for n in (2, 1, 4, 2, 3):
        x = image(n, n)
        y = context.run({"x": x})["y"]
        np.testing.assert_allclose(y, expected(engine, x), rtol=1e-5)
    assert context.input_shapes() == {"x": (3, 3, 8, 8)}
    assert context.output_shapes() == {"y": (3, 4, 8, 8)}


def test_kernels_are_planned_once_per_shape_and_for_all_contexts(engine, monkeypatch):
    planned = []
    plan_layer = shaped_module.plan_layer
    monkeypatch.setattr(shaped_module, "plan_layer", lambda *a: (planned.append(a[0].name), plan_layer(*a))[1])
    first, second = engine.create_context(), engine.create_context()
    for context in (first, second, first):
        context.run({"x": image(3)})
        context.run({"x": image(2)})  # the opt shape: planned when the engine was loaded
    assert planned == ["c1", "r1", "c2", "s"]


def test_an_engine_evicts_the_least_recently_used_shapes():
    engine = Runtime(PlainBackend()).load(make_plan(conv_net(), high=64))
    context = engine.create_context()
    for n in range(1, 41):
        context.run({"x": image(n)})
    assert len(engine._shaped) == 16
    assert len(context._bounds) == 4
    x = image(1)
    np.testing.assert_allclose(context.run({"x": x})["y"], expected(engine, x), rtol=1e-5)


def test_a_returned_output_belongs_to_the_caller(engine):
    context = engine.create_context()
    first = context.run({"x": image(seed=1)})["y"]
    kept = first.copy()
    context.run({"x": image(seed=2)})
    np.testing.assert_array_equal(first, kept)


def test_shape_errors_explain_the_remedy(engine):
    context = engine.create_context()
    with pytest.raises(ShapeError, match=r"axis 0: 5, but profile 0 takes 1 to 4 \(min 1x3x8x8, opt 2x3x8x8, max 4x3x8x8\)"):
        context.run({"x": image(5)})
    with pytest.raises(ShapeError, match="axis 2: 9, but the engine takes 8"):
        context.set_input_shape("x", (1, 3, 9, 8))
    with pytest.raises(ShapeError, match=r"3 dimensions \[3, 8, 8\], the engine takes 4: x: f32\[N,3,8,8\]"):
        context.run({"x": image()[0]})
    with pytest.raises(ShapeError, match=r"float64, the engine takes float32: convert it with .astype\('float32'\)"):
        context.run({"x": image().astype("f8")})
    with pytest.raises(ShapeError, match=r"no input 'z'.*It has x"):
        context.run({"z": image()})
    with pytest.raises(ShapeError, match=r"'x' is missing; the engine takes x: f32\[N,3,8,8\]"):
        context.run({})
    with pytest.raises(ShapeError, match="inputs are given by name"):
        context.run(np.zeros((1, 3, 8, 8), np.float32))
    with pytest.raises(ShapeError, match="'x' is a list; give a NumPy array"):
        context.run({"x": [1.0]})


def test_another_profile_is_named():
    plan = make_plan(conv_net())
    wide = dataclasses.replace(make_plan(conv_net(), 5, 6, 8))
    plan.profiles.append(wide.profiles[0])
    plan.arenas.append(wide.arenas[0])
    engine = Runtime(PlainBackend()).load(plan)
    with pytest.raises(ShapeError, match=r"Profile 1 takes it: engine.create_context\(profile=1\)"):
        engine.create_context(profile=0).run({"x": image(6)})
    x = image(6)
    np.testing.assert_allclose(engine.create_context().run({"x": x})["y"], expected(engine, x), rtol=1e-5)
    np.testing.assert_allclose(engine.create_context(profile=1).run({"x": x})["y"], expected(engine, x), rtol=1e-5)
    with pytest.raises(EngineError, match="there is no profile 2; the engine has 2"):
        engine.create_context(2)


def test_aligned_buffers_are_used_without_copies(engine, monkeypatch):
    context = engine.create_context()
    context.set_input_shape("x", (2, 3, 8, 8))
    x, y = context.input_array("x"), context.output_array("y")
    assert context.bind("x", x) == ""
    assert context.bind("y", y) == ""
    monkeypatch.setattr(context_module.BoundEngine, "write", lambda *a: pytest.fail("copied in"))
    monkeypatch.setattr(context_module.BoundEngine, "output", lambda *a: pytest.fail("copied out"))
    for seed in (1, 2):
        x[:] = image(seed=seed)
        context.execute()
        np.testing.assert_allclose(y, expected(engine, x), rtol=1e-5)
    monkeypatch.undo()
    np.testing.assert_allclose(context.run({"x": image(seed=5)})["y"], expected(engine, image(seed=5)), rtol=1e-5)
    np.testing.assert_allclose(y, expected(engine, x), rtol=1e-5, err_msg="run() wrote into the bound buffer")


def test_other_buffers_are_copied_with_a_reason(engine):
    context = engine.create_context()
    raw = allocate_aligned_array((2 * 3 * 8 * 8 + 1,), np.float32)
    x = raw[1:].reshape(2, 3, 8, 8)
    x[:] = image()
    y = np.empty((2, 8, 8, 4), "f4").transpose(0, 3, 1, 2)
    assert "aligned" in context.bind("x", x)
    assert "C-contiguous" in context.bind("y", y)
    context.execute()
    np.testing.assert_allclose(y, expected(engine, x), rtol=1e-5)
    with pytest.raises(ShapeError, match="read-only"):
        context.bind("y", np.broadcast_to(np.float32(0), (2, 4, 8, 8)))
    with pytest.raises(ShapeError, match=r"output 'y' has shape \[1, 4, 8, 8\]"):
        context.bind("y", np.empty((1, 4, 8, 8), "f4"))


def test_execute_without_an_input_names_it(engine):
    with pytest.raises(ContextError, match="input 'x' has no array"):
        engine.create_context().execute()


def test_a_shape_set_after_binding_reads_nothing_outside_the_array(engine):
    context = engine.create_context()
    context.set_input_shape("x", (1, 3, 8, 8))
    x, y = context.input_array("x"), context.output_array("y")
    x[:] = image(1)
    assert context.bind("x", x) == context.bind("y", y) == ""
    context.set_input_shape("x", (4, 3, 8, 8))
    context.execute()
    np.testing.assert_allclose(y, expected(engine, x), rtol=1e-5)


def test_unbound_outputs_can_be_fetched(engine):
    context = engine.create_context()
    context.bind("x", image())
    context.execute()
    np.testing.assert_allclose(context.fetch()["y"], expected(engine, image()), rtol=1e-5)


def test_in_place_tensors_move_with_a_bound_output():
    net = Network("chain", "lowered")
    a = net.add("Relu", net.add_input("x", parse_type("f32[4,16]")), name="a")
    net.mark_output(net.add("Relu", a, name="y"), "y")
    plan = make_plan(net)
    plan.choices["y"] = dataclasses.replace(plan.choices["y"], inplace=((0, 0),), tactic="cpu/none")
    plan.arenas[0].offsets["a"] = plan.arenas[0].offsets["y"]
    with pytest.warns(EngineWarning, match="'y' runs on (cpu/elementwise|safe reference) instead of cpu/none"):
        engine = Runtime(PlainBackend()).load(plan)
    context = engine.create_context()
    x, y = context.input_array("x"), context.output_array("y")
    x[:] = np.random.default_rng(0).standard_normal(x.shape)
    assert context.bind("x", x) == context.bind("y", y) == ""
    before = x.copy()
    context.execute()
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(x, before)
    assert not context.launches().value("a").any(), "the first Relu wrote into the arena, not over y"


def test_an_input_modified_in_place_is_copied():
    net = Network("over the input", "lowered")
    net.mark_output(net.add("Identity", net.add("Relu", net.add_input("x", parse_type("f32[4,16]")), name="a"), name="y"))
    plan = make_plan(net)
    plan.choices["a"] = dataclasses.replace(plan.choices["a"], inplace=((0, 0),), tactic="cpu/none")
    plan.arenas[0].offsets["a"] = plan.arenas[0].offsets["x"]
    with pytest.warns(EngineWarning):
        context = Runtime(PlainBackend()).load(plan).create_context()
    x, y = context.input_array("x"), context.output_array("y")
    x[:] = np.random.default_rng(0).standard_normal(x.shape)
    before = x.copy()
    assert context.bind("x", x) == "a layer works on it in place"
    context.bind("y", y)
    context.execute()
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


def test_parts_of_a_bound_output_move_with_it():
    net = Network("joined", "lowered")
    x = net.add_input("x", parse_type("f32[4,16]"))
    a, b = net.add("Relu", x, name="a"), net.add("Neg", x, name="b")
    net.mark_output(net.add("Concat", a, b, axis=0, name="y"))
    plan = make_plan(net)
    plan.choices["y"] = dataclasses.replace(plan.choices["y"], inplace=((0, 0), (1, 0)), tactic="cpu/none")
    arena = plan.arenas[0]
    arena.offsets |= {"a": arena.offsets["y"], "b": arena.offsets["y"] + arena.sizes["a"]}
    with pytest.warns(EngineWarning):
        context = Runtime(PlainBackend()).load(plan).create_context()
    given, y = context.input_array("x"), context.output_array("y")
    given[:] = np.random.default_rng(0).standard_normal(given.shape)
    assert context.bind("x", given) == context.bind("y", y) == ""
    addresses = {n: calls[0].addresses for n, calls in zip("ab", context.launches().step_calls, strict=False)}
    context.execute()
    np.testing.assert_array_equal(y, np.concatenate([np.maximum(given, 0), -given]))
    assert [addresses[n]["output"][0] - y.ctypes.data for n in "ab"] == [0, arena.sizes["a"]]


class Foreign:
    """An array of another library that supports only DLPack."""

    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **kwargs):
        return self.a.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


def test_dlpack_in_and_out(engine):
    context = engine.create_context()
    x = image()
    out = context.run({"x": Foreign(x)})
    np.testing.assert_allclose(np.from_dlpack(out["y"]), expected(engine, x), rtol=1e-5)
    held = context.input_array("x")
    held[:] = x
    assert context.bind("x", Foreign(held)) == ""


def test_two_threads_in_one_context(engine, monkeypatch):
    context, inside, go = engine.create_context(), threading.Event(), threading.Event()
    run = context_module.BoundEngine.run

    def slow(self):
        inside.set()
        go.wait(60)
        run(self)

    monkeypatch.setattr(context_module.BoundEngine, "run", slow)
    thread = threading.Thread(target=context.run, args=({"x": image()},))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(ContextError, match="in use by another thread; create one per thread"):
        context.run({"x": image()})
    go.set()
    thread.join()
    assert context.run({"x": image()})["y"].shape == (2, 4, 8, 8)


def test_contexts_in_threads_do_not_disturb_each_other(engine):
    wrong = []

    def work(seed):
        context = engine.create_context()
        for k in range(10):
            x = image(1 + (seed + k) % 4, 100 * seed + k)
            if not np.allclose(context.run({"x": x})["y"], expected(engine, x), rtol=1e-4, atol=1e-5):
                wrong.append((seed, k))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_closed_objects_raise(engine):
    with engine.create_context() as context:
        context.run({"x": image()})
    with pytest.raises(ContextError, match="the context is closed"):
        context.run({"x": image()})
    engine.close()
    with pytest.raises(ContextError, match="the engine is closed"):
        engine.create_context()


def test_contexts_and_engines_are_freed():
    engine = Runtime(PlainBackend()).load(make_plan(conv_net()))
    context = engine.create_context()
    context.run({"x": image()})
    arena = weakref.ref(context._arena)
    gone = [weakref.ref(engine), weakref.ref(context), weakref.ref(engine.plan), weakref.ref(engine.plan.network)]
    del context
    gc.collect()
    assert arena() is None
    del engine
    gc.collect()
    assert [r() for r in gone] == [None] * 4


def test_many_loads_do_not_leak():
    backend, plan = PlainBackend(), make_plan(conv_net(), high=512)  # 4 MB arenas

    def load_ten():
        for _ in range(10):
            context = Runtime(backend).load(plan).create_context()
            context.run({"x": image(4)})
        gc.collect()  # however rarely the process collects garbage by itself

    load_ten()
    before = resident()
    for _ in range(10):
        load_ten()
    assert resident() - before < 40 << 20


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_profile_has_the_users_names(engine):
    rows = engine.create_context().profile({"x": image()}, iterations=3)
    assert [r.name for r in rows] == ["/conv1/Conv", "/relu1/Relu", "/conv2/Conv", "/add/Add"]
    assert all(len(r.times_ms) == 3 and r.total_ms > 0 and r.median_ms <= r.total_ms for r in rows)


def test_memory_report_counts_arena_and_weights(engine):
    context = engine.create_context()
    memory = engine.memory(context)
    assert memory.arena == engine.plan.arenas[0].total
    assert memory.weights == 4 * (4 * 3 * 9 + 4 * 4 * 9 + 4)
    assert memory.peak == memory.arena + memory.weights
    assert "MiB (arena" in str(memory)


def test_other_hardware_warns_with_the_difference_and_may_be_refused():
    plan = make_plan(conv_net(), backend=PlainBackend(model="old"))
    with pytest.warns(EngineWarning, match=r"tuned elsewhere \(cpu: old there, new here\)"):
        engine = Runtime(PlainBackend(model="new")).load(plan)
    assert "old there" in engine.warnings[0]
    with pytest.raises(EngineError, match="tuned on other hardware: cpu: old there"):
        Runtime(PlainBackend(model="new")).load(plan, require_same_hardware=True)


def test_another_library_version_is_reported_and_the_probe_runs():
    plan = make_plan(conv_net())
    plan.machine["libraries"] = {"cpu/numpy_reference": "numpy 0.1"}
    with pytest.warns(EngineWarning, match="cpu/numpy_reference: numpy 0.1 there, numpy"):
        Runtime(PlainBackend()).load(plan)


def test_probe_runs_elsewhere_and_refuses_other_results():
    plan = make_plan(conv_net(), backend=PlainBackend(model="old"))
    from whet.engine import probe_inputs, probe_shapes

    y = run_network(plan.network, probe_inputs(plan.network, 3, probe_shapes(plan)))
    plan.probe = make_probe(plan, y, seed=3, rtol=1e-4)
    with pytest.warns(EngineWarning):
        Runtime(PlainBackend(model="new")).load(plan)
    plan.probe = make_probe(plan, {"y": y["y"] * 1.01}, seed=3, rtol=1e-4)
    with pytest.warns(EngineWarning), pytest.raises(EngineError, match=r"other results here.*output 'y' differs by 0.0099"):
        Runtime(PlainBackend(model="new")).load(plan)
    Runtime(PlainBackend(model="old")).load(plan)  # the same machine: not run


def test_a_wrong_backend_is_reported():
    with pytest.raises(EngineError, match="built for the backend 'cpu', this runtime is on 'cuda'"):
        Runtime("cuda").load(make_plan(conv_net()))


def test_many_fallback_layers_give_one_warning():
    plan = make_plan(conv_net())
    plan.choices = {n: dataclasses.replace(c, tactic="cpu/none") for n, c in plan.choices.items()}
    plan.machine["libraries"] = {}
    with pytest.warns(EngineWarning) as told:
        engine = Runtime(PlainBackend()).load(plan)
    assert len(told) == 1
    assert re.match(r"4 layers \('c1' and 3 more\) run on cpu/.* instead of cpu/none; the first because", str(told[0].message))
    assert set(engine.describe()["fell_back"]) == {"c1", "r1", "c2", "s"}


def test_another_config_of_the_same_tactic_is_a_warning_at_the_opt_shapes_only(monkeypatch):
    plan = make_plan(conv_net())
    used, refused = get_tactic(plan.choices["r1"].tactic), []

    def refuse_once(layer, *args, tactic_plan=used.plan):
        if layer.name == "r1" and not refused:
            refused.append(layer)
            raise PlanRefused("not in this configuration")
        return tactic_plan(layer, *args)

    engine = Runtime(PlainBackend()).load(plan)
    monkeypatch.setattr(used, "plan", refuse_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        engine.create_context().run({"x": image(3)})
    assert refused.pop().output.shape[0] == 3
    with pytest.warns(EngineWarning, match="layer 'r1' runs on .*: not in this configuration"):
        Runtime(PlainBackend()).load(plan)


def test_static_engine_of_blocked_formats():
    with pytest.warns(EngineWarning, match="does not take"):
        engine = Runtime(PlainBackend()).load(make_plan(blocked_conv_net()))
    x = np.random.default_rng(0).standard_normal((2, 5, 4, 4)).astype("f4")
    np.testing.assert_allclose(engine.create_context().run({"x": x})["y"], run_network(engine.plan.network, {"x": x})["y"], rtol=1e-5)
    with pytest.raises(ShapeError, match="axis 0: 3, but the engine takes 2"):
        engine.create_context().set_input_shape("x", (3, 5, 4, 4))


def test_representation_in_notebooks(engine):
    context = engine.create_context()
    assert repr(engine).startswith(f"<Engine {engine.plan.network.name!r} on cpu: ")
    assert repr(engine.plan).startswith("<EnginePlan of <Network ")
    assert "profile 0" in repr(context)
    assert all(len(repr(x)) < 500 and "object at" not in repr(x) for x in (engine, context, engine.plan, engine.plan.network))
    context.close()
    context.close()  # a second time: no effect
    assert repr(context).endswith("closed>")


def test_engines_and_contexts_are_not_copied(engine):
    """A copied context would share its memory with the first; a pickled engine would need its kernels."""
    for made, text in ((engine, "load its file"), (engine.create_context(), "create_context")):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=text):
                way(made)


def test_build_documents_its_arguments():
    with pytest.raises(UsageError, match="network_from_onnx"):
        build("model.onnx")
