"""Opening an engine: weights are read and copied in threads during the planning of kernels, and the code of kept kernels is not generated."""

import threading
import time

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.engine import write_engine
from whet.network import Network, parse_type
from whet.runtime import Runtime, shaped
from whet.runtime.memory import ReadAhead, WeightStore
from whet.tactics import Packed
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import why_no_registers


def make_packed(key, data, wait=lambda: None):
    def create():
        wait()
        return data

    return Packed(key, data.nbytes, create)


def run_together(functions):
    results = [None] * len(functions)

    def call(i):
        results[i] = functions[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def test_weights_are_created_by_several_threads_at_once():
    store, meet = WeightStore(get_backend("cpu")), threading.Barrier(2, timeout=20)
    data = [np.full(1000, i, np.uint8) for i in range(2)]
    held = run_together([lambda i=i: store.packed(make_packed(f"w{i}", data[i], meet.wait)) for i in range(2)])
    for i in range(2):
        np.testing.assert_array_equal(held[i].buffer.array[:1000], data[i])


def test_a_weight_that_two_threads_create_is_kept_once():
    store, meet = WeightStore(get_backend("cpu")), threading.Barrier(2, timeout=20)
    held = run_together([lambda: store.packed(make_packed("w", np.ones(1000, np.uint8), meet.wait))] * 2)
    assert held[0] is held[1]
    assert store.nbytes() == held[0].buffer.nbytes


def test_tasks_are_delivered_in_order_a_few_at_a_time():
    def work(task):
        time.sleep(0.002 * (task % 3))
        return 10 * task

    with ReadAhead(work) as ahead:
        early = [taken for task in range(30) for taken in ahead.submit(task)]
        late = list(ahead.finish())
    assert early + late == [(task, 10 * task) for task in range(30)]
    assert 0 < len(late) < 15


def test_an_error_of_a_task_is_raised_on_delivery():
    with ReadAhead(lambda task: 1 // task) as ahead:
        assert list(ahead.submit(0)) == []
        with pytest.raises(ZeroDivisionError):
            list(ahead.finish())


@pytest.fixture
def network():
    """Twenty convolutions with 3x3 windows, stride 2 first: more steps than are read ahead."""
    rng, net = np.random.default_rng(0), Network("chain")
    x = net.add_input("x", parse_type("f32[1,16,24,24]"))
    for i in range(20):
        w = net.constant(rng.standard_normal((16, 16, 3, 3)).astype(np.float32) * np.float32(0.08), f"w{i}")
        x = net.add("Relu", net.add("Conv", x, w, pads=(1, 1, 1, 1), strides=(1 + (i == 0),) * 2))
    net.mark_output(x, "y")
    return net


def test_weights_are_read_beside_the_planning(network, tmp_path, monkeypatch):
    """The first weights are read before the last kernel is planned, and the results are those of the built engine."""
    plan = build(network, BuildConfig(timing_cache="", optimization_level=0, threads=1))
    write_engine(plan, tmp_path / "e.engine")
    Runtime(threads=1).load(plan).save(tmp_path / "e.packed", packed_weights=True)
    events, plan_layer, load = [], shaped.plan_layer, shaped.StepWeights.load

    def note_plan(*args):
        events.append("plan")
        return plan_layer(*args)

    def note_load(weights, step):
        events.append("load")
        load(weights, step)

    monkeypatch.setattr(shaped, "plan_layer", note_plan)
    monkeypatch.setattr(shaped.StepWeights, "load", note_load)
    feed = {"x": np.random.default_rng(1).standard_normal((1, 16, 24, 24)).astype(np.float32)}
    want = Runtime(threads=1).load(plan).run(feed)["y"]
    for name in ("e.engine", "e.packed"):
        events.clear()
        engine = Runtime(threads=1).load(tmp_path / name)
        assert events.index("load") < len(events) - events[::-1].index("plan")
        assert events.count("load") == events.count("plan") >= 20
        np.testing.assert_array_equal(engine.run(feed)["y"], want)


@pytest.mark.skipif(bool(jit.why_unavailable() or why_no_registers()), reason="the kernel needs a compiler and the registers of AVX2")
def test_the_code_of_kept_kernels_is_not_generated(network, tmp_path, monkeypatch):
    """An engine of direct convolutions opens without generating their IR: a module takes 10 ms."""
    from whet.tactics.cpu.conv import direct_conv

    only = BuildConfig(timing_cache="", optimization_level=0, threads=1, tactic_sources=("-ONEDNN", "-WINOGRAD", "-INDIRECT"))
    plan = build(network, only)
    assert any(c.tactic == "cpu/direct_conv" for c in plan.choices.values())
    write_engine(plan, tmp_path / "e.engine")
    Runtime(threads=1).load(tmp_path / "e.engine")

    def never(form):
        raise AssertionError("the object of this kernel is kept")

    never.__module__, never.__qualname__ = direct_conv.emit_direct_ir.__module__, direct_conv.emit_direct_ir.__qualname__
    monkeypatch.setattr(direct_conv, "emit_direct_ir", never)
    Runtime(threads=1).load(tmp_path / "e.engine")
