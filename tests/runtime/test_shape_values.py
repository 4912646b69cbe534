"""Values of a dynamic network that depend only on shapes: computed once for each set of shapes, in no arena, and right in every context."""

from types import SimpleNamespace

import numpy as np
import pytest

import whet
from whet.network import parse_network
from whet.ops import bind_layer, run_network
from whet.runtime.shape_values import find_shape_values
from whet.tactics import Signature

NETWORK = """\
in %x: f32[N,S,S]
const %one: i64[] = [1]
const %zero: i64[] = [0]
const %low: f32[] = [-5.0]
const %none: f32[] = [0.0]
%shape = Shape(%x, start=1, end=2)
%n = Squeeze(%shape, axes=(0,))
%rows = Range(%zero, %n, %one)
%column = Unsqueeze(%rows, axes=(1,))
%later = Greater(%rows, %column)
%mask = Where(%later, %low, %none)
%y = Add(%x, %mask)
out %y
"""


def build(text, opt=(2, 6, 6), largest=(3, 9, 9)):
    net = parse_network(text)
    rank = net.inputs[0].type.rank
    profile = whet.Profile(min=(1, 4, 4)[:rank], opt=opt[:rank], max=largest[:rank])
    return whet.build(net, shapes={"x": profile}, optimization_level=1, timing_cache="", threads=2)


def check(engine, text, *shapes):
    rng = np.random.default_rng(0)
    for shape in shapes:
        x = rng.standard_normal(shape).astype(np.float32)
        for name, want in run_network(parse_network(text), {"x": x}).items():
            np.testing.assert_allclose(engine.run({"x": x})[name], want, rtol=1e-6, atol=1e-6)


def list_launched(engine, shape):
    """Layers other than format conversions that launch something for a shape."""
    bound = engine.create_context().launches({"x": shape})
    return [s.layer.op for s, calls in zip(bound.shaped.steps, bound.step_calls, strict=True) if calls and s.layer.op != "Reformat"]


def test_a_mask_of_positions_is_computed_once():
    engine = build(NETWORK)
    assert len(engine.plan.network.layers) > 1
    assert len(list_launched(engine, (2, 6, 6))) == 1
    check(engine, NETWORK, (2, 6, 6), (2, 4, 4), (3, 9, 9), (2, 6, 6), (2, 7, 7))


def test_contexts_of_different_shapes_alternate():
    engine = build(NETWORK)
    rng = np.random.default_rng(1)
    contexts = [(engine.create_context(), rng.standard_normal(shape).astype(np.float32)) for shape in ((2, 6, 6), (3, 8, 8), (1, 9, 9))]
    for _ in range(3):
        for context, x in contexts:
            (want,) = run_network(parse_network(NETWORK), {"x": x}).values()
            np.testing.assert_allclose(context.run({"x": x})["y"], want, rtol=1e-6, atol=1e-6)


def test_a_saved_engine_computes_them_too(tmp_path):
    build(NETWORK).save(tmp_path / "e.whet")
    engine = whet.load(tmp_path / "e.whet")
    assert len(list_launched(engine, (2, 6, 6))) == 1
    check(engine, NETWORK, (2, 6, 6), (3, 9, 9))


def test_an_output_of_the_network_is_written_at_every_run():
    text = NETWORK + "out %mask\nout %rows\n"
    engine = build(text)
    check(engine, text, (2, 6, 6), (3, 9, 9), (2, 6, 6))
    context = engine.create_context()
    first = context.run({"x": np.zeros((2, 6, 6), np.float32)})["mask"]
    first[:] = 7  # the caller's copy
    assert context.run({"x": np.zeros((2, 6, 6), np.float32)})["mask"].max() == 0


@pytest.mark.parametrize("size", [40, 800])
def test_large_values_are_computed_at_every_run(size):
    """A mask of 800 x 800 floats is above the limit."""
    shape = (1, size, size)
    engine = build(NETWORK, shape, shape)
    assert (len(list_launched(engine, shape)) == 1) == (size == 40)
    check(engine, NETWORK, shape)


@pytest.mark.parametrize("inplace", [(), ((0, 0),), ((1, 0),)])
def test_a_layer_that_works_in_place_gets_its_operand_in_the_arena(inplace):
    """It would add to the values of the run before, or write its result beside its operand."""
    net = parse_network("in %x: f32[2,3]\n%z = ConstantOfShape(shape=(2, 3), value=1.0, dtype=f32)\n%a = Add(%z, %x)\nout %a\n")
    steps = [SimpleNamespace(layer=layer, signature=Signature((), (), pairs)) for layer, pairs in zip(net.layers, ((), inplace), strict=True)]
    found = find_shape_values(steps, {"a"})
    assert found.precomputed == [inplace != ((0, 0),), False]
    assert set(found.values) == (set() if inplace == ((0, 0),) else {"z"})


def test_wrong_values_are_left_to_the_layer():
    """An index out of range fails when the engine runs, with the layer's own message."""
    net = parse_network("in %x: f32[N,3]\n%s = Shape(%x, end=1)\nconst %t: f32[2,1] = [1, 2]\n%e = Gather(%t, %s)\nout %e\n")
    for size, is_known in ((1, True), (2, False)):
        steps = [SimpleNamespace(layer=bind_layer(layer, {"N": size}), signature=Signature((), ())) for layer in net.layers]
        found = find_shape_values(steps, set())
        assert found.precomputed == [True, is_known]
        np.testing.assert_array_equal(found.values["s"], [size])
