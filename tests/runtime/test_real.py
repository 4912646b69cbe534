"""Built engines on the CPU backend: saving and loading, dynamic batch, users' buffers, threads, packed weights."""

import dataclasses
import gc
import os
import threading
import warnings

import numpy as np
import pytest

import whet
from whet.builder import BuildConfig, build
from whet.engine import engine_bytes, engine_digest, read_engine, write_engine
from whet.frontends import network_from_onnx
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.runtime import EngineWarning, Runtime, list_machine_differences
from whet.runtime.memory import WeightStore


@pytest.fixture(scope="module")
def network():
    return network_from_onnx(whet.zoo.build("lenet5"))


@pytest.fixture(scope="module")
def plan(network):
    def at(n):
        return {"input": (n, 1, 32, 32)}

    return build(network, BuildConfig(optimization_level=1, timing_cache="", profiles=((at(1), at(4), at(8)),)))


def images(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 1, 32, 32)).astype("f4")


def same(network, x, y):
    want = run_network(network, {"input": x})["output"]
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-5 * np.abs(want).max())


def test_save_and_load(tmp_path, network, plan):
    write_engine(plan, tmp_path / "e")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = whet.Runtime().load(tmp_path / "e")
    assert engine_digest(engine.plan) == engine_digest(plan)
    assert engine_bytes(engine.plan) == (tmp_path / "e").read_bytes()
    context = engine.create_context()
    for n in (4, 1, 8, 3):
        same(network, images(n), context.run({"input": images(n)})["output"])


def test_users_buffers_without_copies(network, plan):
    context = Runtime().load(plan).create_context()
    context.set_input_shape("input", (3, 1, 32, 32))
    x, y = context.input_array("input"), context.output_array("output")
    assert context.bind("input", x) == context.bind("output", y) == ""
    for seed in (1, 2):
        x[:] = images(3, seed)
        context.execute()
        same(network, x, y)
    context.run({"input": images(5)})
    x[:] = images(3, 7)
    context.execute()
    same(network, x, y)


def test_views_at_inputs_and_outputs_move_with_users_buffers():
    net = Network("views")
    x = net.add_input("x", parse_type("f32[4,64]"))
    a = net.add("Reshape", x, net.constant(np.array([4, 4, 4, 4]), "s"))
    b = net.add("Relu", net.add("Softmax", a, axis=-1))
    net.mark_output(net.add("Flatten", b), "y")
    plan = build(net, BuildConfig(optimization_level=1, timing_cache="", passes=("none",)))
    assert {"Reshape", "Flatten"} <= {layer.op for layer in plan.network.layers}
    context = Runtime().load(plan).create_context()
    given, y = context.input_array("x"), context.output_array("y")
    assert context.bind("x", given) == context.bind("y", y) == ""
    given[:] = np.random.default_rng(0).standard_normal((4, 64))
    before = given.copy()
    context.execute()
    np.testing.assert_allclose(y, run_network(net, {"x": given})["y"], rtol=1e-5)
    np.testing.assert_array_equal(given, before)


def test_threads_of_contexts(network, plan):
    engine, wrong = Runtime().load(plan), []

    def work(seed):
        context = engine.create_context()
        for k in range(20):
            x = images(1 + (seed + k) % 8, seed * 100 + k)
            want = run_network(network, {"input": x})["output"]
            got = context.run({"input": x})["output"]
            if not np.allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max()):
                wrong.append((seed, k))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_packed_weights_from_the_file_are_not_packed_again(network, plan, monkeypatch):
    packed = Runtime().load(plan).packed_weights()
    assert packed
    data = engine_bytes(plan, packed_weights=packed)
    calls, get_packed = [], WeightStore.packed

    def count_packing(store, weight):
        def make():
            calls.append(weight.key)
            return weight.make()

        # whichever tactics were the fastest: every kernel's weights that an engine file may contain
        return get_packed(store, dataclasses.replace(weight, make=make) if weight.storable else weight)

    monkeypatch.setattr(WeightStore, "packed", count_packing)
    Runtime().load(plan)
    assert set(calls) == set(packed)
    calls.clear()
    same(network, images(4), Runtime().load(data).create_context().run({"input": images(4)})["output"])
    assert not calls


def test_weights_are_shared_between_contexts_and_freed(plan):
    engine = Runtime().load(plan)
    contexts = [engine.create_context() for _ in range(3)]
    for c in contexts:
        c.run({"input": images(4)})
    one = engine.memory(contexts[0]).packed
    assert one == contexts[0].launches().nbytes()["packed"]
    for c in contexts:
        c.run({"input": images(2)})  # another shape: the same packed weights if the kernels need the same layout
    assert engine.memory().packed <= 2 * one
    store = engine._store
    del contexts, engine, c
    gc.collect()
    assert store.nbytes() == 0


@pytest.mark.slow
def test_many_loads_free_their_memory(tmp_path, plan):
    write_engine(plan, tmp_path / "e")

    def once():
        context = Runtime().load(tmp_path / "e").create_context()
        context.run({"input": images(8)})

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    for _ in range(10):
        once()
    gc.collect()
    files, growth = len(os.listdir("/proc/self/fd")), []
    for _ in range(3):  # a leak grows in each; the heap of a process that ran other tests may grow once
        before = resident()
        for _ in range(50):
            once()
        gc.collect()
        growth.append(resident() - before)
    assert len(os.listdir("/proc/self/fd")) == files
    assert min(growth) < 50 * len((tmp_path / "e").read_bytes()) / 4  # a leak of only the weights would be 50 times the file


def test_another_number_of_threads_is_reported(plan):
    threads = 1 if plan.threads != 1 else 2
    with pytest.warns(EngineWarning, match=f"threads: {plan.threads} there, {threads} here"):
        engine = Runtime("cpu", threads=threads).load(plan)
    assert engine.backend.threads == threads
    assert list_machine_differences(plan, engine.backend)


def test_profile_names_the_users_nodes(plan):
    rows = Runtime().load(plan).create_context().profile({"input": images(4)}, iterations=5)
    assert any("/conv1/Conv" in r.name for r in rows)
    assert [r.layer for r in rows] == [layer.name for layer in plan.network.layers]


def test_libraries_are_recorded_in_the_engine(plan):
    again = read_engine(engine_bytes(plan))
    assert any("oneDNN" in v or v for v in again.machine["libraries"].values())
