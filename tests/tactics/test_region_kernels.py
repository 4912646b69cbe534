"""If, Loop and Scan by launch lists of their bodies' kernels, against the reference: states, captured values, other addresses, NaN."""

import numpy as np
import pytest
from test_onednn_tactics import CPU, Listed, compute, place

from whet.errors import NetworkError
from whet.network import F32, Network, parse_type
from whet.ops import run_regions
from whet.tactics import Args, get_tactic, load_tactic
from whet.tactics.cpu.onednn import _api as dnn

RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def make_body(types, build):
    """A region with inputs of these types; `build(region, *inputs)` returns its outputs."""
    region = Network("body", "lowered")
    inputs = [region.add_input(f"i{k}", parse_type(t)) for k, t in enumerate(types)]
    for t in build(region, *inputs):
        region.mark_output(t)
    return region


def make_layer(op, inputs, regions, attrs=None):
    """A layer whose inputs are types, arrays (constants) or None."""
    net = Network("net", "lowered")
    given = [
        None if x is None else net.add_input(f"x{k}", parse_type(x)) if isinstance(x, str) else net.constant(np.asarray(x))
        for k, x in enumerate(inputs)
    ]
    return net.add_layer(op, given, attrs or {}, regions=regions)


def get_regions_tactic():
    load_tactic("cpu/regions")
    return get_tactic("cpu/regions")


def check(layer, arrays, rtol=2e-6):
    """Compares with the reference; returns the kernel."""
    tactic = get_regions_tactic()
    (signature,) = tactic.signatures(layer, CPU)
    assert tactic.refuses(layer, signature, CPU) is None
    with np.errstate(all="ignore"):
        want = run_regions(layer, arrays)
    kernel, got, _ = compute(layer, arrays, tactic, signature, ())
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    return kernel


def swap(region, turn, condition, a, b, x):
    """Exchanges its states, so that none may be overwritten before the other is read, and leaves the third as it is."""
    total = region.add("Add", region.add("Mul", a, b), x)
    return region.add("Identity", condition), b, a, region.add("Tanh", total), region.add("Cast", turn, to=F32)


def make_swap(count, condition=None):
    body = make_body(["i64[]", "bool[]", "f32[2,3]", "f32[2,3]", "f32[2,3]"], swap)
    return make_layer("Loop", [count, condition, "f32[2,3]", np.full((2, 3), 0.5, np.float32), "f32[2,3]"], {"body": body}, {"states": 2})


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_states_that_change_places(count):
    layer = make_swap(np.array(count))
    check(layer, [np.array(count), None, normal(2, 3), layer.inputs[3].array(), normal(2, 3)])


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_condition_before_the_first_iteration(goes_on):
    layer = make_swap(np.array(3), np.array(goes_on))
    check(layer, [np.array(3), np.array(goes_on), normal(2, 3), layer.inputs[3].array(), normal(2, 3)])


@pytest.mark.parametrize("limit", [None, 3, 0, -1])
def test_a_loop_that_ends_by_its_data(limit):
    """x doubles until its sum exceeds 100, or the limit, an input, is reached."""

    def double(region, turn, condition, x):
        y = region.add("Add", x, x)
        total = region.add("ReduceSum", y, keepdims=0)
        return region.add("Less", total, region.constant(np.array(100, np.float32))), y

    body = make_body(["i64[]", "bool[1]", "f32[4]"], double)
    layer = make_layer("Loop", [None if limit is None else "i64[]", "bool[1]", "f32[4]"], {"body": body})
    for x in (1.0, 30.0):
        check(layer, [None if limit is None else np.array(limit), np.array([True]), np.full(4, x, np.float32)])


def test_a_loop_that_does_not_end_is_reported():
    body = make_body(["i64[]", "bool[]", "f32[4]"], lambda r, turn, go, x: (r.add("Equal", x_sum(r, x), x_sum(r, x)), r.add("Neg", x)))
    layer = make_layer("Loop", [None, "bool[]", "f32[4]"], {"body": body})
    tactic = get_regions_tactic()
    (signature,) = tactic.signatures(layer, CPU)
    with pytest.raises(NetworkError, match="did not end"):
        compute(layer, [None, np.array(True), np.ones(4, np.float32)], tactic, signature, ())


def x_sum(region, x):
    return region.add("ReduceSum", x, keepdims=0)


def make_choice():
    """Outputs of the branches: computed, a view of an input, a constant; in the other branch computed, an input, and twice the same."""

    def first(region, x, y):
        total = region.add("Add", x, y)
        return region.add("Relu", total), region.add("Reshape", x, region.constant(np.array([3, 2]))), region.constant(np.eye(2, dtype=np.float32))

    def second(region, x, y):
        z = region.add("Slice", y, *(region.constant(np.array([v])) for v in (0, 2, 1)))
        return region.add("Mul", x, y), region.add("Reshape", region.add("Neg", x), region.constant(np.array([3, 2]))), z

    types = ["f32[2,3]", "f32[2,3]"]
    return make_layer("If", ["bool[]", *types], {"then_branch": make_body(types, first), "else_branch": make_body(types, second)})


def test_branches():
    layer = make_choice()
    for taken in (True, False):
        kernel = check(layer, [np.array(taken), normal(2, 3), normal(2, 3)])
        assert "numpy" not in kernel.implementation


def test_a_branch_that_computes_nothing():
    def twice(region, x):
        y = region.add("Exp", x)
        return y, region.add("Reshape", y, region.constant(np.array([5])))

    branches = {"then_branch": make_body(["f32[5]"], twice), "else_branch": make_body(["f32[5]"], lambda r, x: (x, r.add("Identity", x)))}
    for taken in (True, False):
        check(make_layer("If", ["bool[1]", "f32[5]"], branches), [np.array([taken]), normal(5)])


@pytest.mark.parametrize("taken", [True, False])
def test_operands_at_other_addresses(taken):
    """Users' own arrays are bound after the launches were recorded."""
    layer, arrays = make_choice(), [np.array(taken), normal(2, 3), normal(2, 3)]
    tactic = get_regions_tactic()
    (signature,) = tactic.signatures(layer, CPU)
    kernel, stream = tactic.plan(layer, signature, (), CPU), Listed()
    packed, scratch = [p.make() for p in kernel.packed], dnn.allocate_aligned(max(kernel.scratch, 64))
    nowhere = [dnn.allocate_aligned(max(n, 64)) for n in (*kernel.inputs, *kernel.outputs)]
    at = [b.ctypes.data for b in nowhere]
    kernel.enqueue(Args(tuple(at[:3]), tuple(at[3:]), tuple(p.ctypes.data for p in packed), scratch.ctypes.data), stream)
    (call,) = stream.calls
    images = [place(a, o) for a, o in zip(arrays, signature.inputs, strict=True)]
    outs = [dnn.allocate_aligned(n) for n in kernel.outputs]
    for kind, buffers in (("input", images), ("output", outs)):
        for i, b in enumerate(buffers):
            call.set_address(kind, i, b.ctypes.data)
    call.run()
    for out, want in zip(outs, run_regions(layer, arrays), strict=True):
        np.testing.assert_allclose(out.view(np.float32).reshape(want.shape), want, rtol=2e-6)


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan_with_a_branch_in_it(backwards):
    """Sequences along other axes and in both directions; the inner If captures nothing, as after lowering."""
    branches = {
        "then_branch": make_body(["f32[3]", "f32[3]"], lambda r, s, e: (r.add("Add", s, e),)),
        "else_branch": make_body(["f32[3]", "f32[3]"], lambda r, s, e: (r.add("Sub", s, e),)),
    }

    def step(region, state, a, b, scale):
        positive = region.add("Greater", x_sum(region, a), region.constant(np.array(0, np.float32)))
        new = region.add_layer("If", [positive, state, a], regions=branches).output
        return new, region.add("Mul", new, scale), region.add("Add", b, b)

    body = make_body(["f32[3]", "f32[3]", "f32[2,2]", "f32[1]"], step)
    attrs = {
        "num_scan_inputs": 2, "states": 1, "scan_input_axes": (1, 0), "scan_input_directions": (backwards, 0), "scan_output_axes": (1, 2),
        "scan_output_directions": (0, backwards),
    }  # fmt: skip
    layer = make_layer("Scan", ["f32[3]", "f32[3,6]", "f32[6,2,2]", "f32[1]"], {"body": body}, attrs)
    check(layer, [normal(3), normal(3, 6), normal(6, 2, 2), normal(1)])


def test_a_scan_without_steps_and_states():
    body = make_body(["f32[4]"], lambda r, x: (r.add("Neg", x),))
    for steps in (1, 5):
        check(make_layer("Scan", [f"f32[{steps},4]"], {"body": body}, {"num_scan_inputs": 1}), [normal(steps, 4)])


def test_convolutions_in_a_loop():
    """Their formats differ from the states', and one state is read after it is computed anew."""
    weights = [normal(16, 8, 3, 3) / 9, normal(8, 16, 1, 1) / 4]

    def refine(region, turn, condition, x, guide):
        y = region.add("Conv", x, region.constant(weights[0]), pads=(1, 1, 1, 1))
        z = region.add("Conv", region.add("Relu", y), region.constant(weights[1]))
        new = region.add("Add", z, guide)
        return region.add("Identity", condition), new, region.add("ReduceMean", x, region.constant(np.array([1, 2, 3])), keepdims=0)

    body = make_body(["i64[]", "bool[]", "f32[1,8,12,12]", "f32[1,8,12,12]"], refine)
    layer = make_layer("Loop", [np.array(4), None, "f32[1,8,12,12]", "f32[1,8,12,12]"], {"body": body}, {"states": 1})
    kernel = check(layer, [np.array(4), None, normal(1, 8, 12, 12), normal(1, 8, 12, 12)], rtol=1e-5)
    assert "numpy" not in kernel.implementation


def test_nan_is_kept():
    def keep(region, x):
        y = region.add("Clip", x, region.constant(np.array(-1, np.float32)), region.constant(np.array(1, np.float32)))
        return region.add("Relu", y), region.add("MaxPool", x, kernel_shape=(2, 2))

    branches = {k: make_body(["f32[1,2,4,4]"], keep) for k in ("then_branch", "else_branch")}
    x = normal(1, 2, 4, 4)
    x[0, 0, 1, 1], x[0, 1, 3, 0] = np.nan, np.inf
    check(make_layer("If", ["bool[]", "f32[1,2,4,4]"], branches), [np.array(True), x])


def test_a_layer_without_a_kernel_runs_in_numpy():
    body = make_body(["f64[3,3]"], lambda r, x: (r.add("Det", x),))
    kernel = check(make_layer("If", ["bool[]", "f64[3,3]"], {"then_branch": body, "else_branch": body}), [np.array(True), RNG.random((3, 3))])
    assert "numpy" in kernel.implementation


def test_sizes_that_depend_on_the_data_are_refused():
    def select(region, x):
        return (region.add("ReduceSum", region.add("NonZero", x), keepdims=0),)

    body = make_body(["f32[4]"], select)
    layer = make_layer("If", ["bool[]", "f32[4]"], {"then_branch": body, "else_branch": body})
    tactic = get_regions_tactic()
    (signature,) = tactic.signatures(layer, CPU)
    assert "depends on the data" in tactic.refuses(layer, signature, CPU)
