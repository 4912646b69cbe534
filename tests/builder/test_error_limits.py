"""Limits of the comparison of outputs with their reference: rounding ties of integers, float8 steps, and the errors of floats, at and beyond them."""

from types import SimpleNamespace

import numpy as np
import pytest

from whet.builder.verify.differences import compare_output, compute_float8_error, compute_output_error, compute_relative_error
from whet.builder.verify.error_bounds import compare_layer
from whet.builder.verify.rounding_ties import NUDGE, has_ties, run_with_nudged_scales
from whet.measure.compare import measure_run
from whet.network import DTYPES, F8E4M3, parse_network
from whet.ops import run_network

I8, U8, I16, U16, I32 = (DTYPES[name] for name in ("i8", "u8", "i16", "u16", "i32"))


def off_by_one(dtype, ref, count):
    got = ref.copy()
    got.reshape(-1)[:count] += 1
    return compare_output(got, ref, dtype)[0]


def test_a_few_integers_or_a_quarter_may_be_off_by_one():
    small = np.full(20, 5, np.int8)
    assert [off_by_one(I8, small, n) for n in (0, 8)] == [0.0, 0.0]
    assert off_by_one(I8, small, 9) == 1.0
    large = np.full(1000, 5, np.int8)
    assert off_by_one(I8, large, 250) == 0.0
    assert off_by_one(I8, large, 251) == 1.0
    got = small.copy()
    got[0] += 2
    assert compare_output(got, small, I8)[0] == 2.0
    assert compare_output(small.astype("i4") + np.eye(1, 20, dtype="i4")[0], small.astype("i4"), I32)[0] == 1.0  # 32 bits are not rounded


@pytest.mark.parametrize(
    ("dtype", "kind", "saturated"), [(I8, "i1", (-128, 127)), (U8, "u1", (0, 255)), (I16, "i2", (-32768, 32767)), (U16, "u2", (0, 65535))]
)
def test_zeros_and_saturated_integers_do_not_count_as_rounded(dtype, kind, saturated):
    """A kernel that is wrong by one in most of its rounded results must not be hidden by results that cannot be wrong."""
    ref = np.zeros(1000, kind)
    ref[:40] = 7
    for value in (0, *saturated):
        ref[40:] = value
        assert off_by_one(dtype, ref, 10) == 0.0
        assert off_by_one(dtype, ref, 11) == 1.0
    for value in (saturated[0] + 1, saturated[1] - 1):
        ref[40:] = value
        assert off_by_one(dtype, ref, 250) == 0.0


def test_the_tactics_own_error_allows_more_ties():
    ref = np.full(1000, 5, np.int8)
    got = ref.copy()
    got[:500] += 1
    assert compare_output(got, ref, I8)[0] == 1.0
    assert compare_output(got, ref, I8, rtol=5e-4)[0] == 0.0  # 2 * 127 * rtol * 2 more of them
    assert compare_output(got, ref, I8, rtol=4e-4)[0] == 1.0
    assert compare_output(got.astype("i2"), ref.astype("i2"), I16, rtol=1e-2)[0] == 1.0  # of 16 bits it would allow all


@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_a_16_bit_quantization_in_float32_is_not_refused(dtype):
    """x / scale in float32 is within 2^-24 of the quotient: of 2^16 levels some come out on the other side of a tie than in float64."""
    x = np.random.default_rng(3).uniform(-1, 1, 20000).astype(np.float32)
    scale, zero = np.float32(2 / 65535), 0 if dtype == "int16" else 32768
    info = np.iinfo(dtype)
    single = np.clip(np.rint(x / scale) + np.float32(zero), info.min, info.max).astype(dtype)
    double = np.clip(np.rint(x.astype(np.float64) / np.float64(scale)) + zero, info.min, info.max).astype(dtype)
    assert 8 < (single != double).sum() < 400
    assert compare_output(single, double, DTYPES["i16" if dtype == "int16" else "u16"])[0] == 0.0


def test_errors_of_floats_by_two_norms():
    ref = np.array([3.0, 4.0, 0.0], "f4")
    assert compute_relative_error(ref, ref) == (0.0, "")
    assert compute_relative_error(np.array([3.0, 4.0, 1.0], "f4"), ref)[0] == pytest.approx(0.25)  # max|e|/max|ref|; ||e||/||ref|| is 0.2
    wide = np.zeros(100, "f4")
    wide[0] = 1.0
    assert compute_relative_error(wide + np.float32(0.1), wide)[0] == pytest.approx(1.0, rel=1e-5)  # ||e||/||ref||; max|e|/max|ref| is 0.1
    assert compute_relative_error(np.array([0.5], "f4"), np.zeros(1, "f4"))[0] == 0.5
    assert compute_relative_error(np.array([0.5], "f4"), np.zeros(1, "f4"), least=10.0)[0] == 0.05
    assert compute_relative_error(np.array([np.nan, 1.0], "f4"), np.array([np.nan, 1.0], "f4"))[0] == 0.0
    assert compute_relative_error(np.array([np.nan, 1.0], "f4"), np.array([1.0, 1.0], "f4"))[0] == np.inf
    assert compute_relative_error(np.array([np.inf, 1.0], "f4"), np.array([-np.inf, 1.0], "f4"))[0] == np.inf
    assert compute_relative_error(np.array([np.inf, 1.1], "f2"), np.array([1e6, 1.0]))[0] == pytest.approx(0.1, rel=1e-2)  # overflows in float16
    assert compare_output(np.zeros((2, 3), "f4"), np.zeros((3, 2), "f4"), DTYPES["f32"])[0] == np.inf
    assert compute_output_error(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25


def test_a_float8_value_may_be_the_next_one_and_few_may_differ():
    kind = F8E4M3.numpy
    ref = np.full(4000, 8.0, kind)
    got = ref.copy()
    got[0] = 9.0  # the next value: steps of 1 from 8 to 16
    assert compare_output(got, ref, F8E4M3) == (0.0, "")
    got[0] = 10.0
    assert compare_output(got, ref, F8E4M3)[0] == pytest.approx(1 / 8)
    got = ref.copy()
    got[: 4000 // 25] = 9.0  # ||e||/||ref|| is 0.025 at 4 % of the values
    assert compare_output(got, ref, F8E4M3)[0] == 0.0
    got[: 4000 // 25 + 4] = 9.0
    assert compare_output(got, ref, F8E4M3)[0] == np.inf


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_nudged_networks_differ_by_a_millionth(axis):
    sizes = {1: 3, 2: 4, -1: 5}
    scales = ", ".join(str(0.5 + 0.25 * i) for i in range(sizes[axis]))
    net = parse_network(f"""
        network n source
        in %x: f32[2,3,4,5]
        const %s: f32[{sizes[axis]}] = [{scales}]
        const %z: i8[{sizes[axis]}] = [{", ".join("0" * sizes[axis])}]
        %q = QuantizeLinear(%x, %s, %z, axis={axis})
        %y = DequantizeLinear(%q, %s, %z, axis={axis})
        out %y
        """)
    assert has_ties(net)
    step = np.array([0.5 + 0.25 * i for i in range(sizes[axis])]).reshape([-1 if i == axis % 4 else 1 for i in range(4)])
    levels = np.random.default_rng(0).integers(-50, 50, (2, 3, 4, 5))
    at_ties = ((levels + 0.5) * step).astype("f4")  # half-way between two integers
    outs = [o[0] for o in run_with_nudged_scales(net, {"x": at_ties})]
    assert len(outs) == 4
    want = [np.where(np.abs(levels + 0.5) > 0, np.rint((levels + 0.5) / (1 + sign * NUDGE)), 0) * step for sign in (1, -1)]
    want += [np.rint(levels + 0.5 + sign * 256 * NUDGE) * step for sign in (1, -1)]
    for got, expected in zip(outs, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    exact = run_network(net, {"x": at_ties})["y"]
    assert all(not np.array_equal(o, exact) for o in outs)
    assert not has_ties(parse_network("network n source\nin %x: f32[2]\n%y = Relu(%x)\nout %y"))


@pytest.mark.parametrize(("largest", "unsaturated"), [(448.0, 4 * 448.0), (447.0, 447.0), (416.0, 416.0), (1000.0, 4 * 448.0)])
def test_a_saturated_float8_value_may_have_been_larger(largest, unsaturated):
    """One value is wrong by half, one step of e4m3 is an eighth."""
    ref = np.array([largest] * 99 + [1.0])
    got = np.clip(ref, -448, 448) + np.array([0.0] * 99 + [0.5])
    assert compute_float8_error(got, ref) == (pytest.approx(0.375 / unsaturated), "")


def test_nudges_go_up_and_down_by_the_same_amount():
    net = parse_network("""network n source
        in %x: f32[4]
        const %s: f32[] = [0.5]
        const %z: i8[] = [0]
        %y = QuantizeLinear(%x, %s, %z)
        out %y
        """)
    made = []

    def run(nudged):
        made.append(nudged)
        return {}

    assert list(run_with_nudged_scales(net, {}, run)) == [[]] * 4
    scales = [float(m.layers[-1].needs(1).array()) for m in made]
    assert scales == [pytest.approx(0.5 * (1 + NUDGE), rel=1e-9), pytest.approx(0.5 * (1 - NUDGE), rel=1e-9), 0.5, 0.5]
    added = [[float(layer.needs(1).array()) for layer in m.layers if layer.op == "Add"] for m in made]
    assert added == [[], [], [256 * NUDGE * 0.5], [-256 * NUDGE * 0.5]]


def test_a_comparison_times_one_run_at_a_time():
    asked = []

    def seconds(repeats):
        asked.append(repeats)
        return [0.25] * repeats

    assert measure_run(SimpleNamespace(seconds=seconds)) == 0.25
    assert asked == [1]


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceSum"])
def test_a_sum_of_values_that_cancel_is_judged_by_their_size(op):
    """The mean of normalized values is 0 but for rounding errors; a sum that misses a value, or one not in f32, is still wrong."""
    net = parse_network(f"in %x: f32[64,48]\n%y = {op}(%x, axes=(1,), keepdims=0)\nout %y\n")
    choice = SimpleNamespace(tactic="cpu/reduce", implementation="rows", rtol=1e-5, inputs=(("linear", "f32"),), outputs=(("linear", "f32"),))
    x = np.random.default_rng(0).standard_normal((64, 48))
    x = ((x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)).astype(np.float32)
    divisor = 48 if op == "ReduceMean" else 1
    exact = x.astype(np.float64).sum(1) / divisor
    sequential = np.cumsum(x, axis=1, dtype=np.float32)[:, -1] / np.float32(divisor)
    assert compute_relative_error(sequential, exact)[0] > 0.01  # relative to results that are rounding errors themselves

    def find_failure(got):
        return compare_layer(net.layers[0], choice, [x], [got.astype(np.float32)]).failure

    assert find_failure(sequential) is None
    assert find_failure(x[:, :-1].astype(np.float64).sum(1) / divisor) is not None
    assert find_failure(x.astype(np.float16).astype(np.float64).sum(1) / divisor) is not None
    assert find_failure(np.full(64, np.nan)) is not None


@pytest.mark.parametrize(("size", "wrong"), [(1.0, 1.01), (1e-3, 1.01), (3e-6, 1.5), (1e-6, 2.0)])
def test_roundings_of_subnormal_halves_are_relative_to_the_smallest_normal_one(size, wrong):
    """A layer scale of 1e-5 makes values whose spacing in float16 is a hundredth of their size."""
    net = parse_network("in %x: f32[64]\nin %s: f32[1]\n%y = Mul(%x, %s)\nout %y\n")
    stored = (("linear", "f16"),)
    choice = SimpleNamespace(tactic="cuda/elementwise", implementation="pointwise", rtol=2e-3, inputs=stored * 2, outputs=stored)
    x = np.linspace(-1, 1, 64, dtype=np.float16).astype(np.float32)
    s = np.array([size], np.float32)
    want = (x * s).astype(np.float16)

    def find_failure(got):
        return compare_layer(net.layers[0], choice, [x, s], [got.astype(np.float32)]).failure

    assert find_failure(want) is None
    assert find_failure((want.astype(np.float32) * wrong).astype(np.float16)) is not None


def test_the_bound_is_widened_by_the_sums_effect_only_for_an_error_above_it(monkeypatch):
    net = parse_network("in %x: i32[4]\n%y = Add(%x, %x)\nout %y\n")
    stored = (("linear", "i32"),)
    choice = SimpleNamespace(tactic="cpu/elementwise", implementation="pointwise", rtol=0.0, inputs=stored * 2, outputs=stored)
    monkeypatch.setattr("whet.builder.verify.error_bounds.bound_sum_effect", lambda *args: 0.5)
    x = np.arange(4, dtype=np.int32)
    assert compare_layer(net.layers[0], choice, [x, x], [x + x]).errors == ((0.0, 0.0),)
    far = compare_layer(net.layers[0], choice, [x, x], [(x + x) * 2])
    assert far.failure is not None
