"""Weights that a file computes from others are freed once kernels have their copies, and computed again when they are read."""

import gc
import weakref

import numpy as np
import pytest

from whet.builder import BuildConfig, build
from whet.engine import engine_bytes, engine_digest, read_engine, weights
from whet.errors import EngineError
from whet.network import Network, Weight, parse_type
from whet.ops import run_network
from whet.runtime import Runtime


def network():
    """A convolution with a batch norm that is folded into 147 KB of weights."""
    rng, net = np.random.default_rng(0), Network("folded")

    def weight(shape, name):
        return net.constant(np.abs(rng.standard_normal(shape)).astype(np.float32) + np.float32(0.1), name)

    y = net.add("Conv", net.add_input("x", parse_type("f32[1,64,6,6]")), weight((64, 64, 3, 3), "w"))
    y = net.add("BatchNormalization", y, *(weight(64, f"bn.{n}") for n in ("scale", "bias", "mean", "var")))
    net.mark_output(net.add("Relu", y), "y")
    return net


@pytest.fixture(scope="module")
def data():
    return engine_bytes(build(network(), BuildConfig(timing_cache="", optimization_level=0, threads=1)))


def folded(plan):
    """The folded weights."""
    (found,) = (t.weight for t in plan.network.constants.values() if t.shape == (64, 64, 3, 3))
    assert found.origin.op != "source"
    return found


def test_a_loaded_engine_keeps_only_the_kernels_copies(data):
    plan, whole = read_engine(data), read_engine(data)
    assert folded(plan).held is not None
    engine = Runtime().load(plan)
    weights = folded(plan)
    assert weights.held is None
    assert engine.memory().weights >= 64 * 64 * 9 * 4
    assert weights.held is None, "its size is known without its values"
    np.testing.assert_array_equal(weights.array, folded(whole).array)
    assert Weight(weights.array).digest == weights.digest
    assert not weights.array.flags.writeable
    with pytest.raises(AttributeError, match="no attribute 'arrays'"):
        _ = weights.arrays


def test_engines_with_released_weights_run_and_are_saved_and_refitted(data):
    engine, x = Runtime().load(read_engine(data)), {"x": np.random.default_rng(1).standard_normal((1, 64, 6, 6)).astype(np.float32)}
    want = run_network(network(), x)["y"]
    np.testing.assert_allclose(engine.run(x)["y"], want, rtol=1e-4, atol=1e-3)
    assert engine_digest(engine.plan) == engine_digest(read_engine(data))
    twice = engine.refit({"bn.scale": network().constants["bn.scale"].array() * 2, "bn.bias": network().constants["bn.bias"].array() * 0})
    assert not np.allclose(twice.run(x)["y"], want)


def test_intermediate_values_of_shared_expressions_are_computed_once_and_dropped(data, monkeypatch, frozen_heap):
    results, alive = [], []
    run_layer = weights.run_layer

    def compute(layer, arrays):
        gc.collect()
        alive.append(sum(r() is not None for r in results))
        outputs = run_layer(layer, arrays)
        results.extend(map(weakref.ref, outputs))
        return outputs

    monkeypatch.setattr(weights, "run_layer", compute)
    origins = [t.weight.origin for t in read_engine(data).network.constants.values()]
    nodes = {id(o) for origin in origins for o in every_origin(origin) if o.op not in ("source", "literal")}
    assert 4 < len(results) <= len(nodes)
    assert max(alive) < len(results) / 2, "values that no later operation reads are dropped"


def every_origin(origin):
    yield origin
    for a in origin.args:
        if a is not None:
            yield from every_origin(a)


def test_weights_in_memory_are_not_released():
    plan = build(network(), BuildConfig(timing_cache="", optimization_level=0, threads=1))
    Runtime().load(plan)
    assert folded(plan).held is not None


def test_a_damaged_source_is_still_found(data):
    broken = bytearray(data)
    at = data.index(network().constants["w"].array().tobytes())
    broken[at] ^= 1
    with pytest.raises(EngineError, match="damaged"):
        read_engine(bytes(broken))
    with pytest.raises(EngineError, match="damaged"):
        Runtime().load(bytes(broken))


def test_a_start_computes_only_the_constants_that_it_reads(data, monkeypatch):
    """Kernels with packed weights in the file need no constants: none is computed, and no source weight is compared with its digest."""
    packed = engine_bytes(read_engine(data), packed_weights=Runtime().load(data).packed_weights())
    computed, run_layer = [], weights.run_layer
    monkeypatch.setattr(weights, "run_layer", lambda layer, arrays: computed.append(layer.op) or run_layer(layer, arrays))
    engine = Runtime().load(packed)
    assert not computed
    assert folded(engine.plan).held is None
    read_engine(packed)
    assert len(computed) > 4, "read_engine without defer computes all"
    again = Runtime().load(data)
    x = {"x": np.random.default_rng(2).standard_normal((1, 64, 6, 6)).astype(np.float32)}
    np.testing.assert_array_equal(engine.run(x)["y"], again.run(x)["y"])
    np.testing.assert_array_equal(folded(engine.plan).array, folded(read_engine(data)).array)
    assert engine_digest(engine.plan) == engine_digest(read_engine(packed))


def test_deferred_constants_are_compared_with_their_digests_when_they_are_read(data):
    broken = bytearray(data)
    at = data.index(network().constants["w"].array().tobytes())
    broken[at] ^= 1
    plan = read_engine(bytes(broken), defer=True)
    with pytest.raises(EngineError, match="damaged"):
        _ = folded(plan).array
    with pytest.raises(EngineError, match="damaged"):
        _ = plan.source_weights["w"]


def test_a_deferred_constant_that_is_not_what_the_file_states_is_refused(data, monkeypatch):
    plan = read_engine(data, defer=True)
    run_layer = weights.run_layer
    monkeypatch.setattr(weights, "run_layer", lambda layer, arrays: [y + np.ones((), y.dtype) for y in run_layer(layer, arrays)])
    with pytest.raises(EngineError, match="a constant that has its type and digest"):
        _ = folded(plan).array
