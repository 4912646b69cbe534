"""Rules of the builder that need no kernel: exact values of small cases, and definitions written out plainly."""

import dataclasses
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import build, plan_digest
from whet.builder.assemble import compute_model_digest
from whet.builder.batching.batch_items import BatchItems, get_common_batch
from whet.builder.batching.profiles import resolve_profiles
from whet.builder.candidates.enumerate import count_macs, estimate_ms
from whet.builder.candidates.filter import SlowImplementations, is_float32_close, select_for_timing, stores_float16
from whet.builder.candidates.sparse_weights import apply_sparsity
from whet.builder.config import BuildConfig
from whet.builder.lock import lock as locks
from whet.builder.lock.lock import check_lock, save_lock
from whet.builder.memory.byte_groups import Groups
from whet.builder.memory.free_ranges import FreeRanges
from whet.builder.precision.permissions import Permissions, report_precisions
from whet.builder.verify import shape_extents
from whet.builder.verify.differences import compute_float8_error
from whet.builder.verify.emulation import compute_reference_outputs, emulate, round_to_tf32
from whet.builder.verify.error_bounds import Checked, Compared, Failure, compute_layer_bound
from whet.builder.verify.failure_folder import KEPT, VARIABLE, get_failures_folder, save_failures
from whet.builder.verify.input_kinds import KINDS, LARGE, LEAST, Magnitude, list_input_kinds, list_tests, make_values
from whet.builder.verify.segments import SegmentedRuns
from whet.builder.verify.shape_extents import differ_in_batch, list_other_shapes, reads_sizes
from whet.errors import BuildError, LockError, ShapeError, UsageError
from whet.measure.option import Option
from whet.network import BF16, F16, F32, I8, I32, parse_network
from whet.ops import run_layer
from whet.tactics import Operand, Signature

TINY = np.finfo(np.float32).tiny / 64


def layers_of(text):
    return parse_network("network n lowered\n" + text).layers


# inputs of verification


def values(kind, dtype="f4", magnitude=6.0, shape=(16, 40)):
    return make_values(kind, shape, np.dtype(dtype), magnitude, np.random.RandomState(3))


@pytest.mark.parametrize("dtype", ["f4", "i1", "u1"])
def test_whole_tensors_of_one_kind(dtype):
    low, high = {"f4": (-6, 6), "i1": (-6, 6), "u1": (0, 6)}[dtype]
    a = values("random", dtype)
    assert a.dtype == dtype
    assert low <= a.min() < low + 0.5
    assert high - 0.5 < a.max() <= high
    assert not values("zero", dtype).any()
    negative = values("non-positive", dtype)
    assert negative.max() == 0
    assert not negative.reshape(-1)[::5].any()
    assert (negative.min() < low + 0.5) if dtype != "u1" else not negative.any()
    assert np.unique(values("constant", dtype)).tolist() == [3]
    assert np.unique(values("constant", dtype, 5.0)).tolist() == [2.5 if dtype == "f4" else 2]


def test_magnitudes_of_integers_end_at_those_of_the_type_and_an_unknown_one_is_three():
    assert (values("random", "i1", 1e6).min(), values("random", "i1", 1e6).max()) == (-127, 127)
    assert (values("random", "u1", 1e6).min(), values("random", "u1", 1e6).max()) == (0, 255)
    assert 2.9 < np.abs(values("random", "f4", 0.0)).max() <= 3


def test_large_denormal_and_not_finite_values():
    plain = values("random")
    np.testing.assert_array_equal(values("large"), (plain.astype("f8") * LARGE).astype("f4"))
    small = values("denormal")
    tiny = np.abs(small) == np.float32(TINY)
    assert 0.4 < tiny.mean() < 0.6
    np.testing.assert_array_equal(np.sign(small), np.sign(plain))
    np.testing.assert_array_equal(small[~tiny], plain[~tiny])
    flat = values("not finite").reshape(-1)  # 640 values: NaN at every 91st, infinity from 1 on at every 128th
    assert np.flatnonzero(np.isnan(flat)).tolist() == list(range(0, 640, 91))
    assert np.flatnonzero(np.isposinf(flat)).tolist() == list(range(1, 640, 128))


@pytest.mark.parametrize("shape", [(16, 40), (2, 8, 3), (3, 40), (40,)])
@pytest.mark.parametrize("dtype", ["f4", "i1", "u1"])
def test_mixed_values_have_eight_parts(dtype, shape):
    mixed, plain = values("mixed", dtype, shape=shape), values("random", dtype, shape=shape)
    rows = len(mixed.reshape(-1, shape[-1])) >= 8 and len(shape) > 1
    parts = {p: (a.reshape(-1, shape[-1])[p::8] if rows else a.reshape(-1, shape[-1])[:, p::8]) for a in (mixed,) for p in range(8)}
    same = {p: (a.reshape(-1, shape[-1])[p::8] if rows else a.reshape(-1, shape[-1])[:, p::8]) for a in (plain,) for p in range(8)}
    assert not parts[0].any()
    assert np.all(parts[4] == 2)
    for p in (1, 3, 5, 7):
        np.testing.assert_array_equal(parts[p], same[p])
    np.testing.assert_array_equal(parts[2], same[2] if dtype == "u1" else -np.abs(same[2]))
    np.testing.assert_array_equal(parts[6], np.sign(same[6]) * np.float32(TINY) if dtype == "f4" else same[6])


def test_magnitudes_are_of_finite_values():
    m = Magnitude.of([np.float32([1, -3, np.nan]), None, np.float32([-np.inf, 2])], [np.float16([-70, 5]), np.int8([-128, 4]), np.array([True])])
    assert m == Magnitude((3.0, 0.0, 2.0), (70.0, 128.0, 0.0))
    assert Magnitude.of([np.float32([np.nan]), np.empty(0, "f4")], []).inputs == (0.0, 0.0)


CHOICE = SimpleNamespace(tactic="cpu/fast", implementation="", inputs=(("linear", "f32"), None), outputs=(("linear", "f32"),))


@pytest.mark.parametrize(
    ("op", "stored", "kinds"),
    [
        ("Relu(%x)", "f32", set(KINDS) - {"not finite"}),
        ("Identity(%x)", "f32", set(KINDS)),
        ("Mul(%x, %x)", "f32", set(KINDS) - {"large"}),
        ("Sigmoid(%x)", "f32", set(KINDS) - {"large", "not finite"}),
        ("Relu(%x)", "f16", set(KINDS) - {"large", "not finite"}),
        ("Relu(%x)", "bf16", set(KINDS) - {"not finite"}),
        ("Exp(%x)", "f32", set()),
    ],
)
def test_kinds_of_inputs_for_which_results_are_defined(op, stored, kinds):
    (layer,) = layers_of(f"in %x: f32[2,8]\n%y = {op}\nout %y")
    choice = SimpleNamespace(**{**vars(CHOICE), "inputs": (("linear", stored),) * len(layer.inputs)})
    assert set(list_input_kinds(layer, choice)) == kinds
    choice.tactic = "cpu/numpy_reference"
    assert list_input_kinds(layer, choice) == ()


def test_each_kernel_is_tested_on_its_cheapest_layer_within_the_budget():
    text = "in %x: f32[4,1000]\nconst %w: f32[1000,1000] = seed(1)\nconst %v: f32[1000,10] = seed(1)\n"
    layers = layers_of(f"{text}%a = MatMul(%x, %w)\n%b = MatMul(%a, %v)\n%y = Relu(%b)\nout %y")
    choices = {
        x.name: SimpleNamespace(**{**vars(CHOICE), "tactic": f"cpu/{x.op}", "inputs": (("linear", "f32"), None)[: len(x.inputs)]}) for x in layers
    }
    everything = list_tests(layers, choices)
    assert {i for i, _ in everything} == {1, 2}  # of the products the cheap one
    assert [k for i, k in everything if i == 1] == [k for k in KINDS if k != "not finite"]
    assert everything[:2] == [(2, "mixed"), (1, "mixed")]  # kinds first, cheap layers first
    cost = 40_000 + 100 * (4000 + 40)  # multiply-adds of the cheap product and its elements
    assert sum(i == 1 for i, _ in list_tests(layers, choices, LEAST / cost / 2.5)) == 2


# bounds


def test_the_worst_layer_has_the_largest_share_of_its_bound():
    checked = Checked()
    for name, errors in (("a", [(1.0, 0.0)]), ("b", [(1.0, 4.0)]), ("c", [(3.0, 20.0), (1.0, 3.0)]), ("d", [(1.0, 4.0)])):
        checked.take(Compared(name, tuple(errors)))
    assert checked.worst == ("c", 1.0, 3.0)
    assert checked.failures == []
    failure = Failure("e", "t", 2.0, 1.0, "it is wrong")
    checked.take(Compared("e", ((2.0, 1.0),), failure))
    assert (checked.worst, checked.failures, str(failure)) == (("e", 2.0, 1.0), [failure], "it is wrong")
    record = checked.report()
    assert (record.worst_layer.error, record.worst_layer.bound, record.failures) == (2.0, 1.0, ["it is wrong"])
    assert Checked(network_bound=0.3).probe_rtol == 0.6
    assert Checked(network_bound=1e-5).probe_rtol == 1e-4


def test_a_layer_may_be_off_by_its_kernels_bound_or_by_one_rounding():
    relu, move = layers_of(
        'in %x: f32[2]\n%a = Relu(%x)\n%y = Reformat(%a, source_format="linear", source_dtype="f32", format="linear", dtype="f16")\nout %y'
    )
    choice = SimpleNamespace(rtol=1e-3)
    assert [compute_layer_bound(relu, choice, d) for d in ("f32", "f16", "bf16")] == [1e-3, 1e-3, 2**-7]
    assert compute_layer_bound(relu, SimpleNamespace(rtol=0.0), "f16") == 2**-10
    assert [compute_layer_bound(move, choice, d) for d in ("f32", "f16", "bf16")] == [0, 2**-10, 2**-7]


def test_tf32_has_ten_bits_of_mantissa():
    exact = np.float32([0, 1, -1.5, 1 + 2**-10, np.inf, -np.inf])
    np.testing.assert_array_equal(round_to_tf32(exact), exact)
    assert np.isnan(round_to_tf32(np.float32([np.nan]))).all()
    assert round_to_tf32(np.float32([1 + 0.4 * 2**-10, 1 + 0.6 * 2**-10])).tolist() == [1, 1 + 2**-10]


def test_float8_values_of_both_signs_that_agree_have_no_error():
    a = np.float32([-448, -2, -0.5, 0, 3, 448, np.nan])
    assert compute_float8_error(a, np.float32([-900, -2, -0.5, 0, 3, 1e6, np.nan])) == (0.0, "")
    assert compute_float8_error(np.float32([0, 0.5]), np.float32([0, 0])) == (0.5, "up to 0.5 where all is zero")
    assert compute_float8_error(a, -a)[0] == np.inf


# failed verifications


def test_the_folder_of_failed_verifications(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert get_failures_folder() == tmp_path
    monkeypatch.setenv(VARIABLE, "")
    assert get_failures_folder() is None
    assert save_failures(None, {}, []) == ""
    monkeypatch.delenv(VARIABLE)
    assert get_failures_folder().parts[-2:] == ("whet", "failed_verifications")


def test_only_the_last_failed_verifications_are_kept(monkeypatch, tmp_path):
    from handmade import conv_net, make_plan

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    old = [tmp_path / f"2020{n:02d}" for n in range(KEPT + 1)]
    for folder in old:
        folder.mkdir()
    plan = make_plan(conv_net())
    said = save_failures(plan, {"x/1": np.arange(3, dtype="f4")}, [Failure("a", "t", 1.0, 0.5, "first"), Failure("b", "t", 1.0, 0.5, "second")])
    kept = sorted(p for p in tmp_path.iterdir())
    assert kept[:-1] == old[2:]
    assert str(kept[-1]) in said
    assert {p.name for p in kept[-1].iterdir()} == {"engine", "failures.txt", "inputs.npz", "network.txt"}
    assert (kept[-1] / "failures.txt").read_text() == "first\nsecond\n"
    np.testing.assert_array_equal(np.load(kept[-1] / "inputs.npz")["x_1"], np.arange(3))


# memory


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_free_range_is_taken(seed):
    """Against a list of bytes, each free or taken."""
    dice, ranges, taken = random.Random(seed), FreeRanges(), {}
    memory = [False] * 4000  # taken?

    def free_ranges():
        found, at = [], 0
        while at < ranges.end:
            end = at
            while end < ranges.end and not memory[end]:
                end += 1
            found += [(end - at, at)] if end > at else []
            at = max(end, at + 1)
        return found

    for step in range(300):
        if taken and dice.random() < 0.5:
            at = dice.choice(sorted(taken))
            memory[at : at + taken[at]] = [False] * taken[at]
            ranges.release(at, taken.pop(at))
            assert ranges.end == max((a + n for a, n in taken.items()), default=0)
        else:
            n = dice.randint(1, 9)
            want = min((r for r in free_ranges() if r[0] >= n), default=(n, ranges.end))[1]
            at = ranges.take(n)
            assert at == want, step
            assert not any(memory[at : at + n])
            taken[at] = n
            memory[at : at + n] = [True] * n
    assert ranges.take(0) == 0


def test_groups_of_tensors_that_share_bytes():
    groups = Groups()
    for name, size in (("a", 100), ("b", 40), ("c", 40), ("d", 200), ("e", 200)):
        groups.add(name, size)
    assert groups.join("a", "b", 60)
    assert groups.join("c", "a", 10)  # the smaller one lies in the larger
    assert groups.join("a", "d", 50)
    assert [groups.offset(n) for n in "abcd"] == [50, 110, 60, 0]
    assert groups.get_extent(groups.root("b")) == 200
    assert groups.join("b", "d", 110)
    assert not groups.join("b", "d", 109)
    assert groups.join("d", "e", -30)  # of equal ones the second in the first, here before its start
    assert [groups.offset(n) for n in "dea"] == [30, 0, 80]
    assert groups.get_extent(groups.root("e")) == 230
    assert len({groups.root(n) for n in "abcde"}) == 1


# profiles


TWO = parse_network("network n source\nin %x: f32[N,3,H]\nin %m: f32[2,5]\n%y = Relu(%x)\n%z = Relu(%m)\nout %y\nout %z")


@pytest.mark.parametrize("line", ["%y = Reshape(%x, shape=(1, 12))", "%y = Concat(%x, %z, axis=1)"])
def test_a_batch_size_that_the_exporter_fixed_is_refused_before_the_build(line):
    net = parse_network(f"network n source\nin %x: f32[N,3,4]\nconst %z: f32[1,3,4] = seed(1)\n{line}\nout %y")
    low, high = {"x": (1, 3, 4)}, {"x": (2, 3, 4)}
    resolve_profiles(net, BuildConfig(profiles=((low, low, low),)))
    with pytest.raises(ShapeError, match=r"cannot take 'x' \[2, 3, 4\]: .*Give the input shapes that the model was made for"):
        resolve_profiles(net, BuildConfig(profiles=((low, low, high),)))


@pytest.mark.parametrize("line", ["%y = Conv(%x, %w)", "%y = MaxPool(%x, kernel_shape=(12,))", "%y = AveragePool(%x, kernel_shape=(12,))"])
def test_images_smaller_than_a_window_are_refused_before_the_build(line):
    net = parse_network(f"network n source\nin %x: f32[1,3,T]\nconst %w: f32[2,3,12] = seed(1)\n{line}\nout %y")
    low, high = {"x": (1, 3, 10)}, {"x": (1, 3, 20)}
    resolve_profiles(net, BuildConfig(profiles=((high, high, high),)))
    with pytest.raises(ShapeError, match=r"cannot take 'x' \[1, 3, 10\]: .*a window of 12 .* is larger than 10"):
        resolve_profiles(net, BuildConfig(profiles=((low, high, high),)))


def test_profiles_get_every_input_and_missing_shapes():
    (profile,), notes = resolve_profiles(TWO, BuildConfig())
    assert profile.shapes == {"x": ((1, 3, 1),) * 3, "m": ((2, 5),) * 3}
    assert len(notes) == 1
    assert "input 'x' is f32[N,3,H], and no profile gives its shape: the engine is built for [1, 3, 1]" in notes[0]
    shapes = ({"x": (1, 3, 4)}, {"x": (2, 3, 4)}, {"x": (8, 3, 4)})
    (profile,), notes = resolve_profiles(TWO, BuildConfig(profiles=(shapes,)))
    assert (profile.shapes["x"], profile.shapes["m"], notes) == (((1, 3, 4), (2, 3, 4), (8, 3, 4)), ((2, 5),) * 3, [])
    for given, want in (
        (({}, {"x": (2, 3, 4)}, {}), (2, 2, 2)),
        (({}, {}, {"x": (8, 3, 4)}), (8, 8, 8)),
        (({"x": (1, 3, 4)}, {}, {"x": (8, 3, 4)}), (1, 8, 8)),
    ):
        (profile,), _ = resolve_profiles(TWO, BuildConfig(profiles=(given,)))
        assert tuple(s[0] for s in profile.shapes["x"]) == want
    same = ({"x": (1, 3, 4)},) * 3
    assert len(resolve_profiles(TWO, BuildConfig(profiles=(shapes, same)))[0]) == 2


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ("const %w: f32[64,3] = seed(1)\n%y: f32[1,3] = Gemm(%f, %w)\nout %y", r"Gemm .*mismatched inner dimensions: {} is not 64"),
        ("const %w: f32[1,64] = seed(1)\n%y: f32[1,64] = Add(%f, %w)\nout %y", r"Add .*{}"),
    ],
)
def test_shapes_in_which_operands_do_not_fit_are_refused(last, reason):
    net = parse_network("network n lowered\nin %x: f32[1,2,4,W]\n%f: f32[1,8*W] = Flatten(%x, axis=1)\n" + last)

    def resolve(*widths):
        return resolve_profiles(net, BuildConfig(profiles=(tuple({"x": (1, 2, 4, w)} for w in widths),)))

    assert resolve(8, 8, 8)[0][0].shapes["x"][1] == (1, 2, 4, 8)
    for widths, wrong in (((6, 8, 8), 6), ((8, 8, 9), 9)):
        with pytest.raises(ShapeError, match=rf"cannot take 'x' \[1, 2, 4, {wrong}\]: " + reason.format(8 * wrong)):
            resolve(*widths)


@pytest.mark.parametrize(
    ("shapes", "error", "text"),
    [
        (((2, 3, 4), (1, 3, 4), (4, 3, 4)), UsageError, "needs min <= opt <= max"),
        (((1, 3, 4), (2, 3, 4), (1, 3, 4)), UsageError, "needs min <= opt <= max"),
        (((1, 3), (2, 3), (4, 3)), ShapeError, "another rank"),
        (((1, 3, 4), (2, 3, 4), (4, 3)), ShapeError, "another rank"),
        (((1, 3, 4), (2, 4, 4), (4, 4, 4)), ShapeError, "x"),
    ],
)
def test_shapes_that_do_not_fit(shapes, error, text):
    with pytest.raises(error, match=text):
        resolve_profiles(TWO, BuildConfig(profiles=(tuple({"x": s} for s in shapes),)))
    with pytest.raises(UsageError, match="names an input 'q', unknown"):
        resolve_profiles(TWO, BuildConfig(profiles=(({}, {"q": (1,)}, {}),)))


# candidates


def option(rank=0, dtype=F32, name="cpu/onednn_conv", ms=None, fallback=False, implementation="jit", config=(), composites=(), inplace=()):
    tactic = SimpleNamespace(name=name, fallback=fallback, composites=composites)
    kernel = SimpleNamespace(implementation=implementation, inputs=(4_000_000, 0), outputs=(6_000_000,), packed=(SimpleNamespace(nbytes=10_000_000),))
    signature = Signature((Operand("linear", dtype), None), (Operand("linear", dtype),), inplace)
    return Option(tactic, signature, config, kernel, rank, ms=ms)


def test_estimates_without_times():
    product, relu, view = layers_of(
        "in %x: f32[100,500]\nconst %w: f32[500,1000] = seed(1)\n%a = MatMul(%x, %w)\n%b = Relu(%a)\n%y = Identity(%b)\nout %y"
    )
    assert count_macs(product) == 50_000_000
    for rank in (0, 7):
        more = 1 + 1e-3 * rank
        assert estimate_ms(option(rank), product) == pytest.approx((0.002 + 2 + 1) * more)
        assert estimate_ms(option(rank), relu) == pytest.approx((0.002 + 2) * more)
        assert estimate_ms(option(rank, inplace=((0, 0),)), relu) == pytest.approx((0.002 + 1.4) * more)  # the output's bytes are the input's
        assert estimate_ms(option(rank, inplace=((0, 0),)), view) == pytest.approx(1e-6 * (1 + rank))
        assert estimate_ms(option(rank, fallback=True), product) == pytest.approx((30.02 + 0.1) * more)
        assert estimate_ms(option(rank, implementation="ref:any"), product) == pytest.approx(30.02 * more)


def test_options_are_timed_in_turns_up_to_the_cap():
    options = [option(i, name="cpu/a") for i in range(4)] + [option(4, name="cpu/b"), option(5, name="cpu/c"), option(6, name="cpu/d", fallback=True)]
    assert [o.rank for o in select_for_timing(options, 3, None, False)] == [0, 1, 2, 3, 4, 5]
    assert options[6].note.startswith("not timed: a reference in NumPy")
    assert [o.rank for o in select_for_timing(options, 4, None, False)] == list(range(7))
    assert options[6].note == ""
    assert [o.rank for o in select_for_timing(options, 3, 4, False)] == [0, 1, 4, 5]
    assert options[2].note == "not timed: at most 4 tactics a layer at this level"
    assert [o.rank for o in select_for_timing(options[6:], 1, 4, False)] == [6]  # nothing else is there


def test_few_options_of_32_bits_are_timed_if_there_are_smaller_ones():
    wide, half = [option(i, name="cpu/a") for i in range(6)], [option(6 + i, F16, name="cpu/a") for i in range(4)]
    chosen = select_for_timing(wide + half, 3, 8, True)  # 0.625 of the cap
    assert [o.rank for o in chosen] == [0, 1, 6, 7, 8]
    assert wide[2].note.startswith("not timed: the first 32-bit options were much slower")
    assert len(select_for_timing(wide + half, 3, 10, True)) == 10  # as many as the cap
    assert len(select_for_timing(wide + half, 4, 8, True)) == 8
    assert len(select_for_timing(wide, 3, 4, True)) == 4  # nothing smaller
    parts = [option(i, name="cpu/a", composites=("couple",)) for i in range(6)] + [
        option(6 + i, F16, name="cpu/a", composites=("couple",)) for i in range(4)
    ]
    assert [o.rank for o in select_for_timing(parts, 3, 8, True)] == [6, 7, 8, 9]
    assert parts[0].note == "not timed: in 32 bits its parts are"


def test_implementations_that_were_always_slow_are_left_out():
    def layer(slow, fast=1.0):
        return [option(0, ms=fast, implementation="jit"), option(1, ms=slow, implementation="gemm"), option(2, implementation="not timed")]

    slow = SlowImplementations()
    for factor in (2.5, 3.0, 9.0):
        slow.record(layer(factor))
    slow.record(layer(9.0 * 0.49, 0.49))  # too short to count
    assert len(slow.drop_slow(layer(3.0))) == 3
    slow.record(layer(2.6 * 0.5, 0.5))
    after = layer(3.0)
    assert [o.kernel.implementation for o in slow.drop_slow(after)] == ["jit", "not timed"]
    assert after[1].note == "not timed: at least 2.5 times slower than the best in all layers before"
    assert len(slow.drop_slow(after[1:2])) == 1  # nothing else has this signature
    slow.record(layer(2.4))
    assert len(slow.drop_slow(layer(3.0))) == 3


def test_options_of_32_bits_are_close_up_to_1_3_times_the_fastest():
    assert is_float32_close([option(ms=1.3), option(ms=9.0), option(dtype=F16, ms=1.0), option(dtype=F16, ms=2.0), option()])
    assert not is_float32_close([option(ms=1.31), option(dtype=I8, ms=1.0)])
    assert not is_float32_close([option(ms=1.0)])
    assert not is_float32_close([option(dtype=F16, ms=1.0), option()])
    assert [stores_float16(option(dtype=d)) for d in (F32, F16, BF16, I8)] == [False, True, True, False]


# segments


@pytest.mark.parametrize(
    ("skip", "cuts"),
    [
        ((), [("v3",), ("v7",), ("v11",)]),
        ((3, 5), [("v3",), ("v7",), ("v11",)]),
        ((2, 4), [("v2",), ("v6",), ("v10",), ("v14",)]),
        ((0, 13), [("v0", "v3"), ("v0", "v7"), ("v13",)]),
    ],
)
def test_a_network_is_cut_where_few_tensors_cross(skip, cuts):
    """A chain of 16 layers is cut near every fourth; `skip` (a, b): layer b also reads the value of layer a."""
    lines = ["in %x: f32[4]"]
    for i in range(16):
        before = f"%v{i - 1}" if i else "%x"
        lines.append(f"%v{i} = Add({before}, %v{skip[0]})" if skip and i == skip[1] else f"%v{i} = Relu({before})")
    runs = SegmentedRuns(parse_network("network n source\n" + "\n".join([*lines, "out %v15"])))
    assert runs.cuts == cuts
    assert [s.ends for s in runs.own] == [*cuts, ("v15",)]


@pytest.mark.parametrize(("layers", "count"), [(7, 0), (8, 1), (9, 2)])
def test_short_networks_are_not_cut(layers, count):
    lines = [f"%v{i} = Relu(%{f'v{i - 1}' if i else 'x'})" for i in range(layers)]
    net = parse_network("network n source\n" + "\n".join(["in %x: f32[4]", *lines, f"out %v{layers - 1}"]))
    assert len(SegmentedRuns(net).cuts) == count


# other shapes


def test_every_other_shape_of_the_profiles_is_checked_once():
    def profile(*sizes):
        return SimpleNamespace(shapes={"x": tuple((n, 3) for n in sizes)})

    plan = SimpleNamespace(profiles=[profile(1, 4, 8), profile(4, 4, 9)])
    verified = {"x": (4, 3), "m": (5,)}
    assert list_other_shapes(plan, verified) == [{"x": (n, 3), "m": (5,)} for n in (1, 8, 9)]
    assert differ_in_batch({"x": (1, 3)}, {"x": (8, 3)})
    assert not differ_in_batch({"x": (1, 3)}, {"x": (8, 4)})
    assert not differ_in_batch({"x": (1, 3)}, {"x": (1, 3, 1)})
    assert not differ_in_batch({"x": ()}, {"x": ()})


@pytest.mark.parametrize(("read", "differs"), [("x: f32[N]", True), ("x: f32[N,3]", True), ("y: f32[3,5]", False)])
def test_sizes_of_the_batch_are_read(read, differs):
    """A layer whose values are the sizes themselves is compared with the reference: its items at another batch are other values, rightly."""
    net = parse_network(f"network n source\nin %{read}\nin %z: f32[N,2]\n%s = Shape(%{read[0]})\nout %s")
    small, large = ({"z": (n, 2), "x": (n, 3)[: 1 + (",3" in read)], "y": (3, 5)} for n in (1, 4))
    shapes = [{t.name: s[t.name] for t in net.inputs} for s in (small, large)]
    assert reads_sizes(net, *shapes) == differs
    assert not reads_sizes(net, shapes[1], shapes[1])


def test_selected_items_are_the_ends_and_others():
    assert BatchItems.of(1).at == (0,)
    assert BatchItems.of(2).at == (0, 1)
    assert BatchItems.of(3).at == (0, 1, 2)
    some = BatchItems.of(100, seed=3, most=5)
    assert (len(some.at), some.at[0], some.at[-1]) == (5, 0, 99)
    assert list(some.at) == sorted(set(some.at))
    assert BatchItems.of(100, most=1).at == (0, 99)
    assert some.all.at == tuple(range(100))
    assert get_common_batch({"a": (4, 2), "b": (4, 9, 9)}) == 4
    assert get_common_batch({"a": (4, 2), "b": (4,)}) == 1
    assert get_common_batch({"a": (4, 2), "b": (5, 2)}) == 1


# permissions


def test_use_of_permitted_precisions_is_counted():
    relu, gelu = layers_of("in %x: f32[4]\n%a = Relu(%x)\n%y = Relu(%a)\nout %y")

    def of(dtype):
        return Signature((Operand("linear", dtype),), (Operand("linear", dtype),))

    signatures = {"a": (relu, of(F16)), "b": (gelu, of(BF16)), "c": (gelu, of(F16)), "d": (gelu, of(F32))}
    config = BuildConfig(backend="null", precisions=("fp16", "bf16", "best", "int8", "fp32"))
    report = report_precisions(config, signatures)
    assert {p: (u.layers, u.of) for p, u in report.items()} == {"fp16": (2, 4), "bf16": (1, 4), "best": (3, 4), "int8": (0, 4), "fp32": (0, 4)}
    assert [p for p, u in report.items() if u.reason] == ["int8"]
    assert "needs Q/DQ nodes in the network or calibration" in report["int8"].reason
    none = report_precisions(BuildConfig(backend="null", precisions=("fp16",)), {"d": signatures["d"]})
    assert none["fp16"].reason == "no tactic with f16 storage ran or won on this machine"
    with pytest.raises(BuildError, match="cannot be used: no tactic with f16 storage"):
        report_precisions(BuildConfig(backend="null", precisions=("fp16",), strict=True), {"d": signatures["d"]})


def test_storage_types_need_a_flag_or_a_demand():
    relu, index = layers_of("in %x: f32[4]\nin %i: i64[4]\n%a = Relu(%x)\n%y = Identity(%i)\nout %a\nout %y")

    def of(*dtypes):
        return Signature((Operand("linear", dtypes[0]),), (Operand("linear", dtypes[1]),))

    def permissions(**options):
        return Permissions.of(BuildConfig(backend="null", **options))

    assert permissions().refuses(relu, of(F32, F32)) is None
    assert permissions().refuses(relu, of(F16, F32)) == "f16 storage is not permitted (--fp16)"
    assert permissions(precisions=("bf16",)).refuses(relu, of(F32, F16)) == "f16 storage is not permitted (--fp16)"
    assert permissions(precisions=("fp16",)).refuses(relu, of(F16, F16)) is None
    assert permissions(precisions=("best",)).refuses(relu, of(F16, BF16)) is None
    assert "stores i64 %i as i32, which no flag permits" in permissions(precisions=("best",)).refuses(index, of(I32, I32))
    assert "stores f32 %x as i8, which no flag permits" in permissions(precisions=("best",)).refuses(relu, of(I8, F32))
    name = relu.name
    obeyed = permissions(layer_precisions=((name, "fp16"),), precision_constraints="obey")
    assert obeyed.refuses(relu, of(F16, F16)) is None  # a demand is a permission
    assert obeyed.refuses(relu, of(F32, F32)) == f"--layerPrecisions demands f16 for '{name}'"
    assert permissions(layer_precisions=((name, "fp16"),), precision_constraints="prefer").refuses(relu, of(F32, F32)) is None
    assert permissions(layer_precisions=((name, "fp16"),), precision_constraints="none").refuses(relu, of(F16, F16)) is not None
    outputs = permissions(layer_output_types=((name, "bf16"),), precision_constraints="obey")
    assert outputs.refuses(relu, of(F32, F32)) == f"--layerOutputTypes demands bf16 of '{name}'"
    assert outputs.refuses(relu, of(F32, BF16)) is None
    last = permissions(layer_precisions=((name, "fp16"), ("*", "fp32")), precision_constraints="obey")
    assert (last.demanded(relu), last.is_demanded_by_wildcard(relu)) == (F32, True)
    assert last.without_wildcards().demanded(relu) == F16
    assert (last.meets(relu, of(F32, F32)), last.meets(relu, of(F16, F32))) == (True, False)


# bans


def test_a_lock_shows_values_around_their_first_difference():
    config = BuildConfig(backend="null", layer_precisions=tuple((f"layer{i}", "fp32") for i in range(60)))
    net = parse_network("network n source\nin %x: f32[4]\n%y = Relu(%x)\nout %y")
    backend = get_backend("null")
    options = {k: v for k, v in json.loads(json.dumps(vars(config), default=list)).items()}
    good = {"model": compute_model_digest(net), "backend": "null", "machine": backend.key(), "threads": backend.threads}
    good |= {"options": options, "tactics": {}}
    check_lock(good, net, config, backend)
    for at in (0, 30, 59):
        changed = json.loads(json.dumps(good))
        changed["options"]["layer_precisions"][at][0] = "another"
        with pytest.raises(LockError) as e:
            check_lock(changed, net, config, backend)
        (line,) = [x for x in str(e.value).splitlines() if "the option layer_precisions" in x]
        assert '"another' in line
        assert f'"layer{at}' in line
        assert len(line.partition("was ")[2].partition(", is ")[0].removeprefix("...")) == 160
    for key, other, words in (("threads", backend.threads + 1, "number of threads"), ("threads", backend.threads - 1, "number of threads"),
                              ("machine", "a", "the machine: was a, is"), ("machine", "zzz", "the machine: was zzz, is"),
                              ("model", "0" * 64, "the model: was 0000000000000000\\.\\.\\., is"), ("backend", "z", "the backend")):  # fmt: skip
        with pytest.raises(LockError, match=words):
            check_lock({**good, key: other}, net, config, backend)


def test_a_note_names_the_layers_that_cannot_be_sparse():
    lines = ["in %x: f32[2,16]", "const %good: f32[16,16] = seed(1)"]
    lines += [f"const %w{i}: f32[{16 - i},{15 - i}] = seed(1)" for i in range(9)]
    body = ["%a = MatMul(%x, %good)", *(f"%b{i} = MatMul(%{f'b{i - 1}' if i else 'a'}, %w{i})" for i in range(9)), "out %b8"]
    net = parse_network("network n source\n" + "\n".join([*lines, *body]))
    sparse, (note,) = apply_sparsity(net, BuildConfig(backend="null", sparsity="force"))
    done, left = int(note.split(" weights into ")[1].split()[0]), int(note.split("fine-tuning. ")[1].split()[0])
    assert done + left == 10
    assert left > 4
    assert note.endswith(f"; and {left - 4} more")
    assert "the largest two of every four" in note
    assert "the first two of every four" in apply_sparsity(net, BuildConfig(backend="null", sparsity="force:positional"))[1][0]
    assert apply_sparsity(net, BuildConfig(backend="null", sparsity="enable")) == (net, [])
    assert apply_sparsity(sparse, BuildConfig(backend="null", sparsity="force")) == (sparse, [])


def test_the_first_layer_is_the_worst_so_far_even_without_an_error():
    checked = Checked()
    assert checked.worst == ("", 0.0, 0.0)
    checked.take(Compared("a", ((0.0, 0.5),)))
    assert checked.worst == ("a", 0.0, 0.5)
    checked.take(Compared("b", ((0.0, 0.1),)))
    assert checked.worst == ("a", 0.0, 0.5)


@pytest.mark.parametrize(("batch", "other"), [(4, 6), (4, 8), (4, 1), (3, 7), (2, 2)])
def test_items_fill_the_tensor_and_nothing_after_it(monkeypatch, batch, other):
    """A tensor of 8 bytes an item at the larger batch: its items are those of the smaller one in turn."""
    copies = []
    monkeypatch.setattr(shape_extents, "copy_bytes", lambda bound, to, at, where, nbytes: copies.append((at, where, nbytes)))
    bound, larger = (SimpleNamespace(place=lambda name, n=n, at=at: (at, 8 * n)) for n, at in ((batch, 1000), (other, 5000)))
    axis = SimpleNamespace(is_outermost=True)
    assert shape_extents.copy_items(bound, larger, SimpleNamespace(name="t"), axis, batch, np.arange(other) % batch)
    assert [(at, where) for at, where, _ in copies] == [(1000, 5000 + 8 * first) for first in range(0, other, batch)]
    assert sum(n for _, _, n in copies) == 8 * other
    assert max(where + n for _, where, n in copies) == 5000 + 8 * other


@pytest.mark.parametrize(("mode", "threads", "made"), [("sequential", 2, []), ("parallel", 2, [("cpu", 1)]), ("parallel", 1, [])])
def test_a_lock_of_samples_one_after_the_other_keeps_all_threads(mode, threads, made, monkeypatch, tmp_path):
    """Samples that run at once have a thread each: their kernels are planned for one."""
    net = parse_network(
        "network n source\nin %x: f32[N,3,8,8]\nconst %w: f32[8,3,3,3] = seed(1)\n%a = Conv(%x, %w)\n%y = Relu(%a)\nout %y\n"
    )
    config = BuildConfig(timing_cache="", threads=threads, samples=mode, optimization_level=0, verify=False, profiles=((({"x": (4, 3, 8, 8)},) * 3),))
    path = tmp_path / "lock.json"
    plan = build(net, config)
    save_lock(plan, path)
    asked = []
    monkeypatch.setattr(locks, "get_backend", lambda name, threads: (asked.append((name, threads)), get_backend(name, threads=threads))[1])
    again = build(net, dataclasses.replace(config, lock=str(path)))
    assert plan_digest(again) == plan_digest(plan)
    assert asked == made


def test_the_emulation_rounds_weights_of_two_axes_and_more_but_no_biases():
    net = parse_network(
        "network n source\nin %x: f32[3,64]\nconst %w: f32[64,8] = seed(1)\nconst %b: f32[8] = seed(2)\n%y = Gemm(%x, %w, %b)\nout %y\n"
    )
    (gemm,) = net.layers
    choice = SimpleNamespace(inputs=(("linear", "f16"), None, None), outputs=(("linear", "f16"),), config=())
    plan = SimpleNamespace(network=net, choices={gemm.name: choice})
    x = np.random.default_rng(0).standard_normal((3, 64)).astype("f4")
    w, b = (net.constants[n].array() for n in "wb")
    (got,) = emulate(plan, {"x": x}).values()
    np.testing.assert_array_equal(got, run_layer(gemm, [x, w.astype("f2").astype("f4"), b])[0].astype("f2").astype("f4"))


def test_the_reference_of_a_layer_rounds_its_weights_and_no_biases():
    net = parse_network(
        "network n source\nin %x: f32[1,3,4,4]\nconst %w: f32[8,3,3,3] = seed(1)\nconst %b: f32[8] = seed(2)\n%y = Conv(%x, %w, %b)\nout %y\n"
    )
    (conv,) = net.layers
    choice = SimpleNamespace(inputs=(("linear", "f16"), ("linear", "f16"), None), outputs=(("linear", "f16"),), config=())
    x = np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype("f4")
    w, b = (net.constants[n].array() for n in "wb")
    (got,) = compute_reference_outputs(conv, choice, [x, w, b])
    np.testing.assert_array_equal(got, run_layer(conv, [a.astype("f8") for a in (x, w.astype("f2"), b)])[0])
    assert got.dtype == np.float64


@pytest.mark.parametrize("shift", [0, 8, 24, 56])
def test_the_size_of_a_group_is_the_end_of_its_last_tensor(shift):
    """Also where sizes and offsets have bits in common."""
    groups = Groups()
    groups.add("a", 64)
    groups.add("b", 56)
    assert groups.join("a", "b", shift)
    assert groups.get_extent(groups.root("a")) == max(64, shift + 56)
