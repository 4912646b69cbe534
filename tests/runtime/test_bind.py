"""bind(): hand-made plans equal the reference; selected tactics that cannot run fall back; sizes are checked."""

import dataclasses

import numpy as np
import pytest

from handmade import PlainBackend, blocked_conv_net, conv_net, make_plan
from whet.errors import BackendError, EngineError, ShapeError
from whet.ops import run_network
from whet.runtime import WeightStore, bind


def feed_for(plan, n=2):
    rng = np.random.default_rng(1)
    return {t.name: rng.standard_normal([n if str(d) == "N" else d for d in t.shape]).astype("f4") for t in plan.network.inputs}


@pytest.mark.parametrize("make", [conv_net, blocked_conv_net])
def test_results_equal_the_reference(make):
    plan = make_plan(make())
    bound, x = bind(plan, PlainBackend()), feed_for(plan)
    bound.feed(x)
    bound.run()
    np.testing.assert_allclose(bound.fetch()["y"], run_network(plan.network, x)["y"], rtol=1e-5)
    assert [name for name, _ in bound.shaped.fell_back] == ["c"] * ("c" in plan.choices)  # NumPy's conv does not accept a blocked format


def test_walk_gives_each_layer_its_actual_inputs():
    plan = make_plan(blocked_conv_net())
    bound, x = bind(plan, PlainBackend()), feed_for(plan)
    seen = {}
    run_network(plan.network, x, watch=lambda t, a: seen.setdefault(t.name, a))
    bound.feed(x)
    names = []
    for layer, ins, outs in bound.walk():
        names.append(layer.name)
        np.testing.assert_allclose(outs[0], seen[layer.outputs[0].name], rtol=1e-5)
        assert ins[0].shape == (2, 5, 4, 4)
    assert names == ["to", "c", "from"]


def test_times_are_per_layer():
    plan = make_plan(conv_net())
    bound = bind(plan, PlainBackend())
    bound.feed(feed_for(plan))
    assert len(bound.run_timed()) == 4
    assert len(bound.seconds(3)) == 3


def test_a_layer_has_the_times_of_its_own_launches():
    bound = bind(make_plan(conv_net()), PlainBackend())
    a, b, c, d = (call for calls in bound.step_calls for call in calls)

    class Timed:
        def run_timed(self):
            return [1.0, 2.0, 4.0, 8.0]

    bound.executable = Timed()
    bound.step_calls = [[a, b], [], [c], [d]]  # as many launches as layers, but not one per layer
    assert bound.run_timed() == [3.0, 0.0, 4.0, 8.0]
    bound.step_calls = [[a, b], [], [c], []]
    with pytest.raises(BackendError, match="timed 4 launches, 3 were recorded"):
        bound.run_timed()


def test_missing_tactic_falls_back_in_a_blocked_format():
    plan = make_plan(blocked_conv_net())
    plan.choices["c"] = dataclasses.replace(plan.choices["c"], tactic="cpu/from_the_future")
    bound, x = bind(plan, PlainBackend()), feed_for(plan)
    bound.feed(x)
    bound.run()
    np.testing.assert_allclose(bound.fetch()["y"], run_network(plan.network, x)["y"], rtol=1e-5)
    assert bound.shaped.fell_back[0][0] == "c"
    assert "cpu/from_the_future" in bound.shaped.fell_back[0][1]


def test_a_tactic_with_another_storage_size_is_refused():
    plan = make_plan(conv_net())
    plan.choices["c2"] = dataclasses.replace(plan.choices["c2"], inputs=(("nhwc", "f32"), None, None))
    with pytest.raises(EngineError, match="Reformat is missing"):
        bind(plan, PlainBackend())


def test_a_buffer_that_is_too_small_is_refused():
    plan = make_plan(conv_net())
    plan.arenas[0].sizes["r1"] = 64
    with pytest.raises(EngineError, match="%r1 needs 2048 bytes"):
        bind(plan, PlainBackend())
    plan = make_plan(conv_net())
    plan.arenas[0].offsets["y"] = plan.arenas[0].total - 64
    with pytest.raises(EngineError, match="%y needs"):
        bind(plan, PlainBackend())


def test_invalid_inputs_are_named():
    plan = make_plan(conv_net())
    bound = bind(plan, PlainBackend())
    with pytest.raises(ShapeError, match="'x' is missing"):
        bound.feed({})
    with pytest.raises(ShapeError, match="float64"):
        bound.feed({"x": np.zeros((2, 3, 8, 8))})
    with pytest.raises(ShapeError, match=r"\[1, 3, 8, 8\]"):
        bound.feed({"x": np.zeros((1, 3, 8, 8), "f4")})


def test_constants_in_memory_are_shared_between_binds():
    plan, backend = make_plan(conv_net()), PlainBackend()
    plan.choices["c2"] = dataclasses.replace(plan.choices["c2"], inputs=(("linear", "f32"), ("linear", "f32"), None), tactic="cpu/none")
    store = WeightStore(backend)
    a, b = bind(plan, backend, store=store), bind(plan, backend, {"x": (1, 3, 8, 8)}, store=store)
    assert a.shaped.constants[2][1] is b.shaped.constants[2][1]
    assert store.nbytes() == 4 * 4 * 9 * 4
    del a, b
    assert store.nbytes() == 0
