"""Figures and remarks about pruned networks: exact values of small cases."""

import numpy as np
import pytest

from whet.errors import UnsupportedError
from whet.network import parse_network
from whet.pruning._vjp import backward
from whet.pruning.compare import Comparison, Facts
from whet.pruning.knapsack import Choice, find_edges
from whet.pruning.prune import Pruned
from whet.pruning.sizes import Overlaps, Part
from whet.pruning.sparsity_advice import EngineTimes
from whet.pruning.target import Target


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
    counted = Comparison(("a", "b"), (Facts(0, 1, 1 << 20, 0.0, 0, 0), Facts(3, 2, 1 << 20, 0.0, 0, 0)), ("it said",))
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
        backward(layer, arrays, [y], [np.ones_like(y)])
