"""Figures and remarks about pruned networks: exact values of small cases."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from whet import BuildConfig
from whet.errors import NetworkError, PruneError, UnsupportedError
from whet.network import parse_network
from whet.pruning import apply_pattern, compare, groups, latency_cost, permute
from whet.pruning._layer_inputs import gather_inputs
from whet.pruning._vjp import backpropagate
from whet.pruning.compare import Comparison, Facts
from whet.pruning.importance import compute_gate_scores
from whet.pruning.knapsack import Choice, find_edges
from whet.pruning.prune import Pruned
from whet.pruning.reconstruction import compute_gain, compute_output_size, draw_positions
from whet.pruning.rounding import count_steps_per_comparison
from whet.pruning.sensitivity import run_batch, sum_units
from whet.pruning.shrink import shrink_layer
from whet.pruning.sizes import Overlaps, Part
from whet.pruning.sparsity_advice import EngineTimes, PeakRates, count_traffic_bytes
from whet.pruning.target import Target
from whet.sparsity import force_two_four, parse_pattern


def test_rows_of_a_comparison():
    first = Facts(1_000, 20_000, 3 << 20, 0.25, 0, 4, 2, 1.5, 4 << 20, 5 << 19)
    second = Facts(500, None, 3 << 19, 0.5, 3, 4, 0, 0.75, 3 << 20, 5 << 18)
    assert Comparison(("a", "b"), (first, second), ()).rows() == [
        ("parameters", "1,000", "500 (-50 %)"),
        ("FLOPs of a run", "20,000", "-"),
        ("weights MiB", "3.00", "1.50 (-50 %)"),
        ("scattered zeros", "25%", "50%"),
        ("zero channels", "2", "0"),
        ("2:4 layers", "0", "3"),
        ("median ms", "1.500", "0.750 (-50 %)"),
        ("peak memory MiB", "4.00", "3.00 (-25 %)"),
        ("engine's weights MiB", "2.50", "1.25 (-50 %)"),
    ]
    counted = Comparison(("a", "b"), (Facts(0, 1, 1 << 20, 0.0, 0, 0, 0), Facts(3, 2, 1 << 20, 0.0, 0, 0, 0)), ("it said",))
    assert [r[0] for r in counted.rows()] == ["parameters", "FLOPs of a run", "weights MiB", "scattered zeros", "zero channels", "2:4 layers"]
    assert counted.rows()[:2] == [("parameters", "0", "3"), ("FLOPs of a run", "1", "2 (+100 %)")]
    assert counted.to_json()["said"] == ["it said"]
    assert [m["name"] for m in counted.to_json()["models"]] == ["a", "b"]


def test_shares_and_gaps():
    assert Pruned(None, None, None, (80, 60)).share == 0.25
    assert Pruned(None, None, None, (0, 0)).share == 0.0
    assert [Choice({}, (), 1.0, 0.5, lost, bound).gap for lost, bound in ((3.0, 2.0), (2.0, 2.0), (0.0, 0.0), (1.0, 0.0))] == [0.5, 0, 0, np.inf]
    assert [EngineTimes(1.0, 0.9, 3, i).is_noise for i in ((-0.1, 0.2), (0.0, 0.2), (-0.2, 0.0), (0.01, 0.2), (-0.2, -0.01))] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert find_edges([8, 16, 24], [1.0, 1.005, 1.02]) == [16, 24]  # within 1 % the costs are equal


def test_targets_as_shares_of_the_cost_before():
    assert Target("latency", value=3.0).of(4.0) == 0.75
    assert Target("latency", value=3.0).of(4.0, batch=2) == 0.75
    assert Target("throughput", value=500.0).of(4.0, batch=1) == 0.5
    assert Target("throughput", value=500.0).of(8.0, batch=2) == 0.5
    assert Target("flops", ratio=0.3).of(1e9) == 0.3


def test_axes_of_groups_that_overlap_multiply_and_others_add():
    parts = [Part("rows", 4, 6), Part("columns", 6, 4), Part("other", 5, 2)]
    overlaps = Overlaps({("rows", "columns"), ("columns", "rows")})
    assert overlaps.size(40, parts, {}) == 40
    assert overlaps.size(40, parts, {"rows": 2}) == 28
    assert overlaps.size(40, parts, {"rows": 2, "columns": 3}) == 22
    assert overlaps.size(40, parts, {"rows": 2, "columns": 3, "other": 1}) == 14
    assert Overlaps().size(40, [Part("a", 4, 2), Part("b", 8, 1)], {"a": 3, "b": 2}) == 32


@pytest.mark.parametrize(("a", "b"), [("4", "4,3"), ("2,4", "4")])
def test_products_with_a_vector_have_no_gradient(a, b):
    (layer,) = parse_network(f"network n source\nin %x: f32[{a}]\nin %w: f32[{b}]\n%y = MatMul(%x, %w)\nout %y").layers
    arrays = [np.ones([int(d) for d in s.split(",")], "f4") for s in (a, b)]
    y = arrays[0] @ arrays[1]
    with pytest.raises(UnsupportedError, match="with a vector has no gradient rule"):
        backpropagate(layer, arrays, [y], [np.ones_like(y)])


# rules of scores, fits and steps: one case per condition


def test_first_and_second_order_scores_are_those_of_their_kind():
    seen = SimpleNamespace(energy={"g": np.array([4.0, 9.0])}, first=lambda name: f"first of {name}", second=lambda name: f"second of {name}")
    assert compute_gate_scores(seen, "activation", "g").tolist() == [2, 3]
    assert [compute_gate_scores(seen, kind, "g") for kind in ("taylor1", "taylor", "taylor2")] == ["first of g", "second of g", "second of g"]


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("samples", [1, 2, 3, 6])
def test_sums_of_units_are_per_sample(samples, axis):
    """Rows belong to samples in order, several for each where the first axis is a multiple of their number."""
    a = np.random.default_rng(0).standard_normal((6, 4, 4))
    units = np.array([[0, 2], [1, 3]])
    per = a.reshape(samples, 6 // samples, 4, 4).sum((1, 4 - axis))
    np.testing.assert_allclose(sum_units(a, axis, units, samples), np.stack([per[:, u].sum(1) for u in units], axis=1))
    np.testing.assert_allclose(sum_units(a, -1, units, samples), a.reshape(samples, -1).sum(1)[:, None])


def test_sums_of_units_that_samples_share_are_split_evenly():
    a = np.random.default_rng(0).standard_normal((6, 4))
    for axis, samples in ((0, 3), (1, 4), (1, 5)):
        units = np.array([[0], [2], [3]])
        want = np.array([np.take(a, u, axis=axis).sum() for u in units]) / samples
        np.testing.assert_allclose(sum_units(a, axis, units, samples), np.tile(want, (samples, 1)))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_energy_of_a_gate_is_its_mean_square(axis):
    net = parse_network('network n source\nin %x: f32[3,4]\n%y = Relu(%x) from "r"\nout %y')
    x = np.random.default_rng(0).standard_normal((3, 4)).astype("f4")
    units = np.array([[0], [2]])
    edges = {(net.layers[0].name, 0): [("g", axis, units)]}
    _, energy = run_batch(net, edges, {"x": x}, None, np.random.default_rng(0), False)
    want = {0: (x**2).sum(1)[[0, 2]] / 3, 1: (x**2).sum(0)[[0, 2]] / 3, -1: np.mean(x**2)[None]}[axis]
    np.testing.assert_allclose(energy["g"], want, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "gain", "scale"),
    [
        ("%y = Relu(%a)", 1.0, "a"),
        ("%s = Add(%a, %x)\n%y = Relu(%s)", 1.0, "s"),  # a residual
        ("%b = Add(%a, %c)\n%y = Relu(%b)", 1.0, "b"),  # a bias, and no residual
        ("%b = Add(%c, %a)\n%s = Add(%x, %b)\n%y = Relu(%s)", 1.0, "s"),
        ("%b = BatchNormalization(%a, %g, %c, %c, %v)\n%d = Add(%b, %c)\n%s = Add(%d, %x)\n%y = Relu(%s)", 1.5, "s"),
        ("in %s: f32[2]\n%b = BatchNormalization(%a, %g, %c, %c, %s)\n%y = Relu(%b)", 1.0, "a"),  # a computed variance
        ("%b = Mul(%a, %c)\n%y = Relu(%b)", 1.0, "a"),
        ("%s = Add(%a, %x)\n%z = Sub(%a, %s)\n%y = Relu(%z)", 1.0, "a"),  # two readers
    ],
)
def test_an_error_is_relative_to_the_sum_that_it_enters(text, gain, scale):
    net = parse_network(f"""network n source
        in %x: f32[2,2]
        const %w: f32[2,2] = seed(1)
        const %c: f32[2] = seed(2)
        const %g: f32[2] = [3.0, -3.0]
        const %v: f32[2] = [4.0, 4.0]
        %a = Gemm(%x, %w)
        {text}
        out %y
        """)
    gains, size = compute_gain(net.layers[0], net.users(), {t: t.name for t in net.tensors()})
    assert size == scale
    np.testing.assert_allclose(np.broadcast_to(gains, 2), gain, rtol=1e-4)


def test_a_pattern_that_fits_nowhere_says_why():
    pattern = parse_pattern("2:4", None)
    text = 'network n source\nin %x: f32[2,3]\nconst %w: f32[3,3] = seed(1)\n%y = MatMul(%x, %w) from "odd"\nout %y'
    with pytest.raises(PruneError, match=r"the pattern 2:4 fits no layer of 'n': y: .*") as e:
        apply_pattern(parse_network(text), pattern)
    assert "no constant weights" not in str(e.value)
    with pytest.raises(PruneError, match="the pattern 2:4 fits no layer of 'n': it has no constant weights"):
        apply_pattern(parse_network("network n source\nin %x: f32[2,3]\n%y = Relu(%x)\nout %y"), pattern)


def test_several_steps_are_taken_per_comparison_where_layers_depend_on_each_width():
    counts = [count_steps_per_comparison(SimpleNamespace(wide=wide, sizes=[2] * n)) for wide in (False, True) for n in (1, 11, 12, 36)]
    assert counts == [1, 1, 1, 1, 1, 1, 2, 4]


def test_the_rows_of_a_gram_matrix_are_shared_among_the_batches():
    """16 samples of 40 rows are a batch; of its 640 rows a batch gives its share of 512, and at least 64."""
    net = parse_network("network n source\nin %x: f32[N,40,2]\nconst %w: f32[2,3] = seed(1)\n%y = MatMul(%x, %w)\nout %y")
    layers = {net.layers[0].name: net.layers[0]}
    for batches, rows in ((1, 512), (4, 4 * 128), (16, 16 * 64)):
        x = np.random.default_rng(0).standard_normal((16 * batches, 40, 2)).astype("f4")
        (inputs,) = gather_inputs(net, layers, {"x": x}, 0, most_rows=512).values()
        assert inputs.rows == rows
        (inputs,) = gather_inputs(net, layers, {"x": x}, 0, most_rows=640 * batches).values()
        assert inputs.rows == 640 * batches
        flat = x.reshape(-1, 2).astype("f8")
        np.testing.assert_allclose(inputs.gram[0], flat.T @ flat, rtol=1e-6)


def test_a_layer_that_was_lowered_with_other_inputs_keeps_its_time(monkeypatch):
    def layer(text, rows):
        return parse_network(f"network n source\nin %x: f32[{rows},4]\nin %b: f32[{rows},4]\n%y = {text}\nout %y").layers[0]

    base = {"same": layer("Add(%x, %b)", 8), "fewer": layer("Add(%x, %b)", 8), "more": layer("Relu(%x)", 8)}
    small = {"same": layer("Add(%x, %b)", 6), "fewer": layer("Relu(%x)", 6), "more": layer("Add(%x, %b)", 6), "new": layer("Relu(%x)", 6)}
    monkeypatch.setattr(latency_cost, "lower_to_static_layers", lambda net, config: small)
    assert latency_cost.compute_axis_shrinkage(None, base, None) == {"same": {("in", 0, 0): 2, ("in", 1, 0): 2, ("out", 0, 0): 2}}


def test_rates_without_a_declared_peak_or_a_timed_layer_are_zero():
    backend = SimpleNamespace(peaks=dict, capabilities=SimpleNamespace(features=()))
    rates = PeakRates.of(backend, [])
    assert (rates.bytes_per_ms, rates.macs_per_ms, rates.declared, rates.sparse_arithmetic) == (0, 0, {}, False)
    fast = SimpleNamespace(peaks=lambda: {"bytes": 5e3}, capabilities=SimpleNamespace(features=("wgmma",)))
    assert (PeakRates.of(fast, []).bytes_per_ms, PeakRates.of(fast, []).sparse_arithmetic) == (5, True)


def select_with(monkeypatch, times):
    """The shares that a selection for half of 10 ms asks for, for engines that take `times`, and its result."""
    asked, measured = [], iter(times)

    def within(costs, share):
        asked.append(share)
        return Choice({}, (), 1.0, share, 0.0, 0.0)

    prune = import_module("whet.pruning.prune")  # the package has a function of this name
    monkeypatch.setattr(prune, "get_opt_batch", lambda net, config: 1)
    monkeypatch.setattr(prune, "cut", lambda *args, **kwargs: "small")
    monkeypatch.setattr(prune, "measure_latency_sum", lambda net, meter: 1.0)
    monkeypatch.setattr(prune, "measure_latencies", lambda nets, build, progress=None: (10.0, next(measured)))
    backend, table = SimpleNamespace(capabilities=SimpleNamespace(executes=True)), SimpleNamespace(save=lambda: None)
    meter = SimpleNamespace(backend=backend, settle=lambda: False, doubtful=lambda: (), table=table)
    config, target = SimpleNamespace(engines=True, build=None), Target("latency", ratio=0.5)
    return asked, prune.select_by_engine_time(None, config, target, [], SimpleNamespace, meter, within, lambda costs, share: share, None)


def test_a_target_is_tightened_by_how_far_the_engine_missed_it(monkeypatch):
    """The engines take 0.9 and 0.6 of the time where a half is wanted: half of 0.5 / 0.9, then that times 0.5 / 0.6."""
    asked, (choice, report, larger) = select_with(monkeypatch, [9.0, 6.0, 4.0])
    assert asked == pytest.approx([0.5, 0.5 * 0.5 / 0.9, 0.5 * 0.5 / 0.9 * 0.5 / 0.6])
    assert (choice.after, report.predicted, larger) == (asked[-1], (1.0, asked[-1]), asked[-1])


@pytest.mark.parametrize(("after", "tries"), [(4.79, 3), (4.8, 1), (5.0, 1), (5.1, 1), (5.2, 3)])
def test_the_search_ends_when_the_engine_meets_the_target(monkeypatch, after, tries):
    """A tolerance of 2 % above and 4 % below; at most three selections."""
    asked, _ = select_with(monkeypatch, [after] * 3)
    assert asked == pytest.approx([0.5 * (5 / after) ** n for n in range(tries)])


@pytest.mark.parametrize(
    ("times", "asked", "kept"),
    [
        ([4.0, 5.0], [0.5, 0.625], 0.625),  # the engine had time left: more channels are kept
        ([4.0, 6.0, 4.9], [0.5, 0.625, 0.5625], 0.5625),  # too many: between the two
        ([4.0, 6.0, 5.5], [0.5, 0.625, 0.5625], 0.5),  # the largest selection that meets the target
        ([6.0, 4.0, 4.9], [0.5, 0.5 * 5 / 6, 0.5 * 5 / 6 * 5 / 4], 0.5 * 5 / 6 * 5 / 4),
        ([1.0, 1.0, 1.0], [0.5, 0.75, 0.875], 0.875),  # never all channels
    ],
)  # fmt: skip
def test_a_selection_uses_the_time_that_the_engine_has_left(monkeypatch, times, asked, kept):
    shares, (choice, _, larger) = select_with(monkeypatch, times)
    assert shares == pytest.approx(asked)
    assert (choice.after, larger) == pytest.approx((kept, kept))


def test_floors_are_the_time_of_bytes_and_of_products_at_the_peak_rates():
    """32 values read and 16 written of 4 bytes, 8 weights, and 64 products."""
    net = parse_network("network n source\nin %x: f32[8,4]\nconst %w: f32[4,2] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n")
    kernel = SimpleNamespace(packed=[], inputs=[128], outputs=[64])
    signature = SimpleNamespace(inputs=(SimpleNamespace(dtype=SimpleNamespace(name="f32")), None))
    option = SimpleNamespace(kernel=kernel, signature=signature, cost=2.0, ms=1)
    none = PeakRates.of(SimpleNamespace(peaks=dict, capabilities=SimpleNamespace(features=())), [])
    assert none.floors_ms(net.layers[0], option) == (0.0, 0.0)
    declared = SimpleNamespace(peaks=lambda: {"bytes": 112e3, "f32": 32e3}, capabilities=SimpleNamespace(features=()))
    assert PeakRates.of(declared, []).floors_ms(net.layers[0], option) == (2.0, 4.0)
    timed = PeakRates.of(SimpleNamespace(peaks=dict, capabilities=SimpleNamespace(features=())), [SimpleNamespace(layer=net.layers[0], dense=option)])
    assert (timed.bytes_per_ms, timed.macs_per_ms) == (112, 32)
    assert timed.floors_ms(net.layers[0], option) == (2.0, 2.0)


def test_all_positions_are_taken_up_to_four_per_unknown():
    rng = np.random.default_rng(0)
    assert len(draw_positions(9000, 3000, rng)) == len(draw_positions(12000, 3000, rng)) - 3000 == 9000
    assert len(draw_positions(12001, 3000, rng)) == 12000
    assert len(draw_positions(9000, 2000, rng)) == 8192
    some = draw_positions(9000, 5, rng)
    assert len(some) == 8192
    assert (np.diff(some) > 0).all()


@pytest.mark.parametrize(("text", "result"), [("shape=(4,3,4)", (4, 2, 4)), ("shape=(-1,3,4)", (4, 2, 4))])
def test_a_layer_whose_size_is_an_attribute_is_resized(text, result):
    net = parse_network(f"network n source\nin %x: f32[4,12]\n%y = Reshape(%x, {text})\nout %y\n")
    small = shrink_layer(net.layers[0], {("in", 0, 1): 8, ("out", 0, 1): 2})
    assert (small.inputs[0].shape, small.outputs[0].shape) == ((4, 8), result)
    with pytest.raises(NetworkError):
        shrink_layer(net.layers[0], {("in", 0, 1): 9, ("out", 0, 1): 2})


def test_layers_that_would_take_too_long_are_not_refitted():
    """8 groups of 64 channels with 896 kept weights each: 2.5e11 operations; a layer beside it takes few."""
    text = "network n source\nin %x: f32[1,8192,1,1]\nconst %w: f32[512,1024,1,1] = seed(1)\nconst %v: f32[2,512,1,1] = seed(2)\n"
    net = parse_network(text + "%a = Conv(%x, %w, group=8)\n%y = Conv(%a, %v)\nout %y\n")
    x = np.random.default_rng(0).standard_normal((8, 8192, 1, 1)).astype(np.float32)
    done = apply_pattern(net, parse_pattern("7:8", 0), {"x": x})
    assert (list(done.removed), done.refitted) == (["a", "y"], ("y",))


@pytest.mark.parametrize("attrs", [
    "", ", strides=[2,2]", ", strides=[3,2], pads=[1,0,0,1]", ", dilations=[2,1], pads=[0,2,1,0]", ", strides=[2,3], dilations=[1,2]",
])  # fmt: skip
def test_positions_of_a_convolution_are_those_of_its_output(attrs):
    net = parse_network(f"network n source\nin %x: f32[2,3,8,9]\nconst %w: f32[4,3,3,2] = seed(1)\n%y = Conv(%x, %w{attrs})\nout %y\n")
    assert tuple(compute_output_size(net.layers[0], np.zeros((2, 3, 8, 9)))) == net.outputs[0].shape[2:]


def test_an_engine_without_2_4_weights_has_no_remark_on_them():
    net = parse_network("network n source\nin %x: f32[4,8]\nconst %w: f32[8,8] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n")
    null = BuildConfig(backend="null", timing_cache="")
    assert compare({"a": net}, null, seconds=0.01).said == ()
    (said,) = compare({"a": force_two_four(net)[0]}, null, seconds=0.01).said
    assert said.startswith("a: 1 of 1 layers have 2:4 weights; ")


def test_an_order_is_searched_for_channels_that_begin_at_a_multiple_of_four():
    """Of two producers whose channels are concatenated: those of the second begin at 8, or at 6."""
    for first, count in ((8, 2), (6, 0)):
        net = parse_network(f"""network n source
in %x: f32[N,3,2,2]
const %a: f32[{first},3,1,1] = seed(1)
const %b: f32[8,3,1,1] = seed(2)
const %w: f32[4,{first + 8},1,1] = seed(3)
%p = Conv(%x, %a)
%q = Conv(%x, %b)
%c = Concat(%p, %q, axis=1)
%y = Conv(%c, %w)
out %y
""")
        readers = permute.list_readers(net, ())
        if count:
            assert [t.name for t, _, _ in readers] == ["w"]
        found = [permute.concatenate_scores(g, readers, lambda layer, array, axis: np.abs(array)) for g in groups(net)]
        assert sum(m is not None for m in found) == count
        for m in found:
            assert m is None or m.shape == (4, 8)


def test_traffic_counts_each_constant_that_a_kernel_does_not_pack():
    net = parse_network("network n source\nin %x: f32[8,4]\nconst %w: f32[4,2] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n")
    kernel = SimpleNamespace(packed=[], inputs=[128], outputs=[64])
    stored = SimpleNamespace(dtype=SimpleNamespace(name="f32"))
    assert count_traffic_bytes(net.layers[0], SimpleNamespace(kernel=kernel, signature=SimpleNamespace(inputs=(stored, None)))) == 128 + 64 + 32
    assert count_traffic_bytes(net.layers[0], SimpleNamespace(kernel=kernel, signature=SimpleNamespace(inputs=(stored, stored)))) == 128 + 64
    clip = parse_network("network n source\nin %x: f32[8]\nconst %h: f32[] = [1]\n%y = Clip(%x, none, %h)\nout %y\n")
    kernel = SimpleNamespace(packed=[], inputs=[32], outputs=[32])
    assert count_traffic_bytes(clip.layers[0], SimpleNamespace(kernel=kernel, signature=SimpleNamespace(inputs=(stored, None, None)))) == 32 + 32 + 4
