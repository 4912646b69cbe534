"""Decisions and reports of a build: sample modes, refused kernels, kept calibration steps, verified profiles, the text of a lock."""

import dataclasses
import json
import re

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build, save_lock
from whet.builder.batching.batch_items import BatchItems, run_network_on_items
from whet.builder.batching.per_sample import may_run_per_sample
from whet.builder.candidates.enumerate import list_candidates
from whet.builder.precision.permissions import Permissions
from whet.builder.verify.differences import compute_float8_error
from whet.errors import BackendError, MemoryLimitError, NetworkError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.tactics import PlanRefused, get_tactic

NULL = BuildConfig(backend="null", timing_cache="", optimization_level=1)


def dense(batch="N", width=6):
    """A product of a batch with a matrix, and a bias of 1/3, which no small type has."""
    net = Network("dense")
    x = net.add_input("x", parse_type(f"f32[{batch},{width}]"))
    w = np.linspace(-1, 1, width * 4).reshape(width, 4).astype(np.float32)
    y = net.add("MatMul", x, net.constant(w, "w"), name="m")
    net.mark_output(net.add("Add", y, net.constant(np.full(4, 1 / 3, np.float32), "b"), name="a"), "y")
    return net


@pytest.mark.parametrize(
    ("opt", "changes", "may"),
    [
        (1, {}, False),
        (2, {}, True),
        (8, {"samples": "together"}, False),
        (1, {"samples": "parallel"}, True),
        (1, {"samples": "sequential"}, True),
        (8, {"optimization_level": 2}, False),
        (8, {"optimization_level": 3}, True),
        (8, {"whole_engines": 0}, False),
        (8, {"max_tactics": 0}, False),
        (8, {"backend": "null"}, False),
    ],
)
def test_per_sample_engines_are_tried_for_batches_of_two_or_more(opt, changes, may):
    shapes = tuple({"x": (n, 6)} for n in (1, opt, 8))
    config = dataclasses.replace(BuildConfig(backend="cpu", profiles=(shapes,)), **changes)
    assert may_run_per_sample(dense(), config) == may


def test_per_sample_engines_need_one_profile_and_a_dynamic_batch():
    shapes = tuple({"x": (n, 6)} for n in (1, 4, 8))
    assert not may_run_per_sample(dense(), BuildConfig(backend="cpu", profiles=(shapes, shapes)))
    assert not may_run_per_sample(dense(batch=4), BuildConfig(backend="cpu"))


@pytest.mark.parametrize("error", [NetworkError, PlanRefused, BackendError])
def test_a_kernel_that_cannot_be_planned_is_listed_with_its_reason(error):
    class Refusing(type(get_tactic("cpu/numpy_reference"))):
        fallback, name = False, "cpu/refusing"

        def plan(self, layer, signature, config, machine):
            raise error("no kernel for this layer")

    net = dense(4)
    reference = get_tactic("cpu/numpy_reference")
    found = list_candidates(net.layers[0], [Refusing(), reference], get_backend("cpu"), Permissions(frozenset()))
    assert {(c.tactic, c.reason) for c in found.refused} == {("cpu/refusing", "no kernel for this layer")}
    assert {o.tactic.name for o in found.options} == {reference.name}


@pytest.mark.parametrize(
    ("shape", "op", "operands", "attrs"),
    [
        ((9, 1, 5), "Squeeze", (), {}),  # with one item, an axis of size 1 more than before
        ((9, 6), "Split", (), {"axis": 1, "num_outputs": 2}),
        ((9, 6), "Reshape", ((9, 2, 3),), {}),
        ((9, 6), "Expand", ((2, 9, 6),), {}),
    ],
)
def test_layers_run_on_some_items_as_on_the_whole_batch(shape, op, operands, attrs):
    net = Network("n")
    x = net.add_input("x", parse_type(f"f32[{','.join(map(str, shape))}]"))
    y = net.add(op, net.add("Relu", x), *(net.constant(np.array(o)) for o in operands), **attrs)
    for i, t in enumerate(y if isinstance(y, tuple | list) else [y]):
        net.mark_output(net.add("Neg", t), f"y{i}")
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    whole = run_network(net, feeds)
    for at in ((4,), (0, 8), (1, 2, 7)):
        items = BatchItems(9, at)
        for name, got in run_network_on_items(net, feeds, items).items():
            axis = whole[name].shape.index(9)
            assert np.array_equal(got, np.take(whole[name], at, axis)), (name, at)


def test_the_text_of_a_lock_can_be_compared_line_by_line(tmp_path):
    plan = build(dense(4), NULL)
    save_lock(plan, tmp_path / "a.lock")
    text = (tmp_path / "a.lock").read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
    save_lock(build(dense(4), NULL), tmp_path / "b.lock")
    assert (tmp_path / "b.lock").read_bytes() == (tmp_path / "a.lock").read_bytes()


def test_an_arena_over_its_limit_names_its_three_largest_tensors():
    net = Network("sizes")
    x = net.add_input("x", parse_type("f32[1024,64]"))
    rng = np.random.default_rng(0)
    for i, width in enumerate((128, 512, 256, 32)):
        w = rng.standard_normal((x.shape[1], width)).astype(np.float32)
        x = net.add("Relu", net.add("MatMul", x, net.constant(w, f"w{i}"), name=f"m{i}"), name=f"r{i}")
    net.mark_output(x, "y")
    with pytest.raises(MemoryLimitError) as e:
        build(net, dataclasses.replace(NULL, memory_limit={"arena": 1000}))
    said = re.findall(r"%\S+ (\d+\.\d+) MiB", str(e.value))
    assert len(said) == 3
    assert [float(s) for s in said] == sorted(map(float, said), reverse=True)
    assert said[0] == "2.00"


@pytest.mark.parametrize(("got", "want"), [(-384, -500), (-448, -500), (-416, -448), (-100, -120), (-448, -447)])
def test_the_error_of_float8_values_has_no_sign(got, want):
    pairs = [(np.array([a, 1.0]), np.array([b, 1.0])) for a, b in ((got, want), (-got, -want))]
    first, second = (compute_float8_error(a, b) for a, b in pairs)
    assert first == second


def test_the_error_of_a_saturated_float8_value():
    """500 is read as 448 that may have been larger: 64 off, less one step of 32, relative to four times 448."""
    error, why = compute_float8_error(np.array([-384.0, *[448.0] * 99]), np.array([-500.0, *[448.0] * 99]))
    assert error == pytest.approx(32 / (4 * 448))
    assert why == ""
