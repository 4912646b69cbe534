"""Functions of pruning against direct computation: widths, choices, uniform cuts, costs, statistics of inputs, runs, errors, least squares."""

from math import ceil, floor, gcd
from types import SimpleNamespace

import numpy as np
import pytest

from whet.errors import PruneError
from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import choose, groups
from whet.pruning._layer_inputs import gather_inputs
from whet.pruning._least_squares import Problem, solve
from whet.pruning._sweep import Sweep, runs_of
from whet.pruning.costs import Costs
from whet.pruning.floor import compute_rms_error, find_uniform_choice, measure_held_out_errors, split_samples
from whet.pruning.importance import get_step
from whet.pruning.knapsack import Choice, find_edges, list_widths
from whet.pruning.recovery import RecoveryConfig

CHAIN = """network n source
in %x: f32[N,3,5,5]
const %w: f32[8,3,3,3] = seed(1)
const %v: f32[6,4,2,2] = seed(2)
const %u: f32[2,6,1,1] = seed(3)
const %m: f32[16,3] = seed(4)
%a = Conv(%x, %w, pads=(1,0,1,1), strides=(2,1))
%b = Conv(%a, %v, group=2, dilations=(1,2))
%c = Conv(%b, %u)
%d = Flatten(%c)
out %d
"""
PLAIN = CHAIN.replace("f32[6,4,2,2]", "f32[6,8,2,2]").replace("group=2, ", "")  # no axis is a product of groups and channels


def group(size, block=1, name="g"):
    return SimpleNamespace(name=name, size=size, block=block)


@pytest.mark.parametrize("block", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("multiple", [1, 2, 4, 8, 12])
def test_steps_are_the_fewest_units_of_whole_multiples(block, multiple):
    assert get_step(group(64, block), multiple) == next(n for n in range(1, 100) if n * block % multiple == 0) == multiple // gcd(multiple, block)


@pytest.mark.parametrize(
    ("size", "multiple", "most", "widths"),
    [
        (8, 8, 12, [8]),
        (9, 8, 12, [8, 9]),
        (16, 8, 12, [8, 16]),
        (17, 8, 12, [8, 16, 17]),
        (1, 1, 12, [1]),
        (12, 1, 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),  # 11 and the full size are the most
        (14, 1, 12, [1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 14]),
        (10, 1, 4, [1, 5, 9, 10]),
        (32, None, 12, [4, 8, 12, 16, 20, 24, 28, 32]),  # eighths
        (64, None, 12, [8, 16, 24, 32, 40, 48, 56, 64]),
        (128, None, 12, [8, 16, 32, 40, 56, 64, 72, 88, 96, 112, 120, 128]),
        (7, None, 12, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_candidate_widths(size, multiple, most, widths):
    assert list_widths(group(size), multiple, most) == widths


@pytest.mark.parametrize("seed", range(20))
def test_edges_cost_less_than_every_wider_width(seed):
    rng = np.random.default_rng(seed)
    costs = [float(c) for c in rng.integers(1, 30, rng.integers(1, 9))]
    widths = list(range(1, len(costs) + 1))
    want = [w for w, c in zip(widths, costs, strict=True) if all(c < 0.99 * d for d in costs[w:])]
    assert find_edges(widths, costs) == want


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("scope", ["group", "global"])
def test_the_units_with_the_largest_scores_stay(ratio, multiple, scope):
    net = parse_network(PLAIN)
    found = groups(net)
    rng = np.random.default_rng(7)
    scores = {g.name: rng.permutation(g.size).astype(float) + 0.1 * n for n, g in enumerate(found)}
    kept = choose(found, scores, ratio, scope=scope, multiple=multiple)
    every = sorted(float(s) for v in scores.values() for s in v)
    for g in found:
        share = 1 - ratio if scope == "group" else sum(s >= every[int(len(every) * ratio)] for s in scores[g.name]) / g.size
        step = get_step(g, multiple)
        n = max(step, round(g.size * share / step) * step)
        assert (g.name in kept) == (n < g.size)
        if g.name in kept:
            order = sorted(range(g.size), key=lambda i: -scores[g.name][i])
            assert kept[g.name].tolist() == sorted(order[:n])


def test_given_widths_and_limits_of_choices():
    net = parse_network(PLAIN)
    found = groups(net)
    scores = {g.name: np.zeros(g.size) for g in found}
    name, size = found[0].name, found[0].size
    assert choose(found, scores, 0.0, widths={name: 1}, multiple=1).keys() == {name}
    assert choose(found, scores, 0.0, widths={name: 1}, multiple=1)[name].tolist() == [0], "of equal scores the first"
    assert choose(found, scores, 0.0, widths={name: size}) == {}
    assert len(choose(found, scores, 0.99, multiple=1, least=2)[name]) == 2
    for wrong in ({name: 0}, {name: size + 1}, {name: 1.0}, {"none": 1}):
        with pytest.raises(PruneError):
            choose(found, scores, 0.0, widths=wrong)
    for options in ({"ratio": 1.0}, {"ratio": -0.01}, {"ratio": 0.5, "multiple": 0}, {"ratio": 0.5, "scope": "all"}):
        with pytest.raises(PruneError):
            choose(found, scores, **options)


def test_costs_ask_once_and_announce_what_is_unknown():
    asked, announced = [], []

    def price(item, widths):
        asked.append((item, dict(widths)))
        return {"a": 10.0, "b": 20.0, "c": 40.0, "d": 80.0}[item] * widths.get("g", 4) / 4

    costs = Costs(
        "ms", price, {"a": ("g",), "b": (), "c": ("g",), "d": ()}, {"s": frozenset("a"), "t": frozenset("ac")}, {"s": 3.0}, measured=True,
        expect=lambda queries: announced.append([(i, dict(w)) for i, w in queries]), unneeded=frozenset("d"),
    )  # fmt: skip
    assert costs.items_of == {"g": ["a", "c"]}
    assert (costs.total({}), len(asked)) == (150, 4)
    assert (costs.total({}), len(asked)) == (150, 4)
    assert (costs.total({"g": 2}), len(asked)) == (125, 6), "b and d do not depend on the group"
    assert (costs.total({"g": 2, "other": 1}), len(asked)) == (125, 6)
    assert costs.total({}, ["s"]) == 20 + 40 + 3
    assert costs.total({}, ["t"]) == 20
    assert costs.total({}, ["s", "t"]) == 23
    assert costs.left([]) == ["a", "b", "c", "d"]
    assert (costs.left(["s"]), costs.left(["u"])) == (["b", "c"], ["a", "b", "c"])
    costs.expect([("a", {"g": 2}), ("a", {"g": 1}), ("b", {"g": 1}), ("c", {"g": 3})])
    assert announced == [[("a", {"g": 1}), ("c", {"g": 3})]]


@pytest.mark.parametrize("share", [1.0, 0.9, 0.6, 0.35, 0.1, 0.01])
def test_uniform_cuts_are_the_widest_within_the_target(share):
    net = parse_network("network n source\nin %x: f32[N,3]\n"
                        "const %w: f32[3,12] = seed(1)\nconst %v: f32[12,8] = seed(2)\nconst %u: f32[8,2] = seed(3)\n"
                        "%a = MatMul(%x, %w)\n%b = MatMul(%a, %v)\n%c = MatMul(%b, %u)\nout %c\n")  # fmt: skip
    found = groups(net)
    scores = {g.name: np.arange(g.size)[::-1].astype(float) for g in found}
    names = {g.size: g.name for g in found}
    costs = Costs("units", lambda i, w: float(w.get(names[12], 12) * w.get(names[8], 8)), {"p": tuple(names.values())}, {})
    target = share * 96
    choice = find_uniform_choice(found, scores, costs, target, 1)
    for n in range(63, 0, -1):
        widths = {size: min(range(1, size + 1), key=lambda w: (abs(w - size * n / 64), w)) for size in (12, 8)}
        if widths[12] * widths[8] <= target:
            break
    else:
        assert choice is None
        return
    assert choice.kept.keys() == {names[size] for size, w in widths.items() if w < size}
    assert all(at.tolist() == list(range(widths[next(s for s in names if names[s] == name)])) for name, at in choice.kept.items())
    assert (choice.before, choice.after) == (96, widths[12] * widths[8])
    assert choice.lost == sum(sum(range(size - w)) for size, w in widths.items())


@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_gram_matrices_are_those_of_all_rows(count):
    """Few enough positions that all are taken; samples of an incomplete batch are left out."""
    net = parse_network(CHAIN)
    x = np.random.default_rng(0).standard_normal((count, 3, 5, 5)).astype(np.float32)
    batch = min(count, 16)
    used = x[: count // batch * batch]
    found = gather_inputs(net, {layer.name: layer for layer in net.layers if layer.op == "Conv"}, {"x": x}, 0)
    seen = {}
    run_network(net, {"x": used}, watch=lambda t, a: seen.setdefault(t.name, a))
    seen["x"] = used
    for name, source, group_count, kernel, strides, pads, dilations in (
        ("a", "x", 1, (3, 3), (2, 1), (1, 0, 1, 1), (1, 1)), ("b", "a", 2, (2, 2), (1, 1), (0, 0, 0, 0), (1, 2)),
        ("c", "b", 1, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    ):  # fmt: skip
        a = np.pad(seen[source].astype(np.float64), ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
        rows = [[] for _ in range(group_count)]
        channels = a.shape[1] // group_count
        for n in range(len(a)):
            for i in range(0, a.shape[2] - dilations[0] * (kernel[0] - 1), strides[0]):
                for j in range(0, a.shape[3] - dilations[1] * (kernel[1] - 1), strides[1]):
                    for g in range(group_count):
                        part = a[n, g * channels : (g + 1) * channels, i:, j:][:, :: dilations[0], :: dilations[1]]
                        rows[g].append(part[:, : kernel[0], : kernel[1]].ravel())
        want = np.array([np.array(r).T @ np.array(r) for r in rows])
        limit = max(64, 4096 // (count // batch))
        if len(rows[0]) <= limit:
            assert found[name].rows == len(rows[0])
            np.testing.assert_allclose(found[name].gram, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shapes", "data", "runs"),
    [
        (["2,3"], [(6, 3)], 3),
        (["2,3"], [(2, 3)], 1),
        (["2,3"], [(5, 3)], 1),  # no whole number of batches
        (["N,3"], [(6, 3)], 1),
        (["2,3", "1,4"], [(6, 3), (3, 4)], 3),
        (["2,3", "1,4"], [(6, 3), (6, 4)], 1),
        (["2,3", "N,4"], [(6, 3), (6, 4)], 1),
        (["1,3"], [(1, 3)], 1),
        (["0,3"], [(0, 3)], 1),
        (["2,3"], [(6,)], 1),
    ],
)
def test_samples_of_a_fixed_batch_are_split_into_runs(shapes, data, runs):
    lines = "".join(f"in %x{i}: f32[{s}]\n" for i, s in enumerate(shapes))
    net = parse_network(f"network n source\n{lines}%y = Relu(%x0)\nout %y\n")
    arrays = {f"x{i}": np.arange(np.prod(s), dtype=np.float32).reshape(s) for i, s in enumerate(data)}
    found = runs_of(net, arrays)
    assert len(found) == runs
    for name, a in arrays.items():
        assert np.array_equal(np.concatenate([r[name] for r in found]), a)
        assert len({len(r[name]) for r in found}) == 1


@pytest.mark.parametrize(("batch", "count"), [("N", 1), ("N", 16), ("N", 17), ("N", 40), ("2", 2), ("2", 6), ("20", 40)])
def test_a_run_layer_by_layer_gives_the_values_of_the_network(batch, count):
    net = parse_network(CHAIN.replace("f32[N,3,5,5]", f"f32[{batch},3,5,5]"))
    x = np.random.default_rng(1).standard_normal((count, 3, 5, 5)).astype(np.float32)
    size = count if batch == "N" else int(batch)
    want = np.concatenate([run_network(net, {"x": x[i : i + size]})["d"] for i in range(0, count, size)])
    sweep = Sweep(net, {"x": x})
    assert sweep.run_to("b")
    assert not sweep.run_to("a"), "it has run"
    assert sweep.done == 2
    assert {t.name for t in sweep.values} == {"b"}, "values that nothing reads any more are freed"
    assert sweep.run_to("d")
    np.testing.assert_allclose(sweep.value(net.outputs[0]), want, rtol=1e-5, atol=1e-6)
    assert {t.name for t in sweep.values} == {"d"}


@pytest.mark.parametrize(
    ("batch", "count", "parts"),
    [
        ("N", 7, 0), ("N", 8, 2), ("N", 15, 2), ("N", 16, 1), ("N", 64, 1), ("1", 7, 0), ("1", 8, 2), ("1", 16, 1),
        ("2", 7, 0), ("2", 9, 2), ("2", 13, 2), ("2", 16, 1), ("8", 31, 0), ("8", 32, 1),
    ],
)  # fmt: skip
def test_a_quarter_of_the_batches_is_held_out_and_of_few_samples_each_half(batch, count, parts):
    """From eight samples and four batches on; an incomplete batch is left out."""
    net = parse_network(f"network n source\nin %x: f32[{batch},3]\nconst %w: f32[3,2] = seed(1)\n%y = MatMul(%x, %w)\nout %y\n")
    x = np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)
    pairs = split_samples(net, {"x": x}, 0)
    assert len(pairs) == parts
    size = 1 if batch == "N" else int(batch)
    used = count // size * size
    for fitted, judged in pairs:
        assert len(fitted["x"]) + len(judged["x"]) == used
        expected = used // size / (4 if parts == 1 else 2)
        assert len(judged["x"]) // size in (floor(expected), ceil(expected))
        assert {tuple(a) for a in np.concatenate([fitted["x"], judged["x"]])} == {tuple(a) for a in x[:used]}
    if parts == 2:
        assert {tuple(a) for _, judged in pairs for a in judged["x"]} == {tuple(a) for a in x[:used]}
    errors = measure_held_out_errors(net, [], [Choice({}, (), 1.0, 1.0, 0.0)], {"x": x}, RecoveryConfig(least_squares=False))
    assert errors == ([0.0] if parts else None)


def test_errors_are_relative_to_the_spread_of_each_output():
    want = {"a": np.float32([[1, 3], [5, 7]]), "b": np.float32([0, 2]), "i": np.array([1, 2])}
    got = {"a": want["a"] + 2, "b": want["b"] - np.float32([1, 1]), "i": np.array([5, 6])}
    assert compute_rms_error(want, got) == pytest.approx((2 / 5**0.5 + 1) / 2)
    assert compute_rms_error(want, want) == 0
    assert compute_rms_error({"i": want["i"]}, {"i": got["i"]}) == 0


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [1e-6, 0.1, 3.0])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_least_squares_minimize_the_penalized_error(kind, ridge, intercept):
    """The gradient is zero: x'(x W + b - y) + ridge * mean(diag(x'x)) * (W - w) = 0, and the sum of the errors too with an intercept."""
    rng = np.random.default_rng(5)
    x, y, w = (rng.standard_normal(s).astype(kind) + kind(0.5) for s in ((2, 30, 4), (2, 30, 3), (2, 4, 3)))
    found, b = solve(Problem(x, y), w.astype(np.float64), ridge=ridge, intercept=intercept)
    assert found.shape == w.shape
    for g in range(2):
        a = x[g].astype(np.float64)
        centred = a - a.mean(0) if intercept else a
        error = a @ found[g] + b[g] - y[g]
        assert intercept or not b.any()
        if intercept:
            np.testing.assert_allclose(error.sum(0), 0, atol=1e-3)
        penalty = ridge * float((centred**2).sum(0).mean())
        np.testing.assert_allclose(centred.T @ error + penalty * (found[g] - w[g]), 0, atol=2e-3)
