"""Details of recovery, importances and cuts: which layers are fitted on which positions, and the values of the scores."""

import sys

import numpy as np
import pytest

from whet.errors import PruneError
from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import branches, groups
from whet.pruning.cut import find_kept_indices
from whet.pruning.importance import compute_norms, normalize_scores, sum_distances, sum_magnitudes, sum_slices
from whet.pruning.recovery import (
    RecoveryConfig,
    compute_row_limit,
    find_added_bias,
    find_bias,
    find_bounds,
    find_norm_mean,
    is_fittable,
    recover,
    reestimate_batch_norms,
    sample_positions,
)  # fmt: skip


def layer_of(text: str, op: str):
    net = parse_network("network n source\n" + text)
    return next(x for x in net.layers if x.op == op), net.users()


def test_positions_are_all_or_a_sorted_sample():
    rng = np.random.default_rng(0)
    assert sample_positions(4, 5, rng).tolist() == [0, 1, 2, 3]
    assert sample_positions(5, 5, rng).tolist() == [0, 1, 2, 3, 4]
    some = sample_positions(600, 300, rng)
    assert some.tolist() == sorted(set(some.tolist()))
    assert len(some) == 300
    assert 0 <= some[0]
    assert some[-1] < 600


@pytest.mark.parametrize(
    ("rows", "unknowns", "limit"), [(100, 10, 100), (30, 10, 40), (32768, 1 << 10, 1 << 14), (32768, 1 << 14, 1 << 16), (8, 2, 8)]
)
def test_rows_of_a_fit(rows, unknowns, limit):
    assert compute_row_limit(rows, unknowns) == limit


CONV = "in %x: f32[1,2,4,4]\nconst %w: f32[3,2,1,1] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CONV + "const %b: f32[3] = [1.0, 2.0, 3.0]\n%y = Conv(%x, %w, %b)\nout %y", "b"),
        (CONV + "%y = Conv(%x, %w)\nout %y", None),
        (CONV + "const %b: f32[3] = [1.0, 2.0, 3.0]\n%y = Conv(%x, %w, %b)\n%z = Mul(%b, %b)\nout %y\nout %z", None),
        (CONV + "in %b: f32[3]\n%y = Conv(%x, %w, %b)\nout %y", None),
    ],
)
def test_the_bias_that_a_fit_may_set(text, expected):
    b = find_bias(*layer_of(text, "Conv"))
    assert (None if b is None else b.name) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("f32[3] = [1.0, 2.0, 3.0]", "b"), ("f32[1,3] = [1.0, 2.0, 3.0]", None), ("f32[1] = [1.0]", None), ("f32[] = [1.0]", None)]
)
def test_the_bias_of_a_gemm_has_a_value_per_output(shape, expected):
    text = "in %x: f32[4,2]\nconst %w: f32[2,3] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\nconst %b: " + shape + "\n%y = Gemm(%x, %w, %b)\nout %y"
    b = find_bias(*layer_of(text, "Gemm"))
    assert (None if b is None else b.name) == expected


MATMUL = "in %x: f32[4,2]\nconst %w: f32[2,3] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\n%m = MatMul(%x, %w)\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("const %b: f32[3] = [1.0, 2.0, 3.0]\n%y = Add(%m, %b)\nout %y", True),
        ("const %b: f32[3] = [1.0, 2.0, 3.0]\n%y = Add(%b, %m)\nout %y", True),
        ("const %b: f32[1,3] = [1.0, 2.0, 3.0]\n%y = Add(%m, %b)\nout %y", True),
        ("const %b: f32[1] = [1.0]\n%y = Add(%m, %b)\nout %y", False),
        ("in %b: f32[3]\n%y = Add(%m, %b)\nout %y", False),
        ("const %b: f32[3] = [1.0, 2.0, 3.0]\n%y = Mul(%m, %b)\nout %y", False),
        ("const %b: f32[3] = [1.0, 2.0, 3.0]\n%y = Add(%m, %b)\n%z = Relu(%m)\nout %y\nout %z", False),
        ("const %b: f32[3] = [1.0, 2.0, 3.0]\n%y = Add(%m, %b)\n%z = Neg(%b)\nout %y\nout %z", False),
        ("const %b: f32[2,1,3] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\n%y = Add(%m, %b)\nout %y", False),
        ("const %b: f32[1,1,3] = [1.0, 2.0, 3.0]\n%y = Add(%m, %b)\nout %y", False),
        ("out %m", False),
    ],
)
def test_the_bias_that_is_added_to_a_product(text, expected):
    layer, readers = layer_of(MATMUL + text, "MatMul")
    added = find_added_bias(layer, readers)
    assert (added is not None) == expected
    assert find_bias(layer, readers) is (added[1] if added else None)
    if added:
        assert (added[0].op, added[1].name) == ("Add", "b")


NORM = (
    "const %s: f32[3] = [1.0, 1.0, 1.0]\nconst %o: f32[3] = [0.0, 0.0, 0.0]\nconst %m: f32[3] = [0.5, 1.0, 2.0]\nconst %v: f32[3] = [1.0, 4.0, 9.0]\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%a = Conv(%x, %w)\n%y = BatchNormalization(%a, %s, %o, %m, %v)\nout %y", "m"),
        ("%a = Conv(%x, %w)\n%y = BatchNormalization(%a, %s, %o, %m, %v)\n%z = Relu(%a)\nout %y\nout %z", None),
        ("%a = Conv(%x, %w)\n%y = BatchNormalization(%a, %s, %o, %m, %v)\n%z = Neg(%m)\nout %y\nout %z", None),
        ("%a = Conv(%x, %w)\n%y = Relu(%a)\nout %y", None),
    ],
)
def test_the_mean_that_absorbs_an_intercept(text, expected):
    mean = find_norm_mean(*layer_of(CONV + NORM + text, "Conv"))
    assert (None if mean is None else mean.name) == expected


@pytest.mark.parametrize(
    ("text", "op", "fits"),
    [
        (CONV + "%y = Conv(%x, %w)\nout %y", "Conv", True),
        (CONV + "%y = Conv(%x, %w)\n%z = Neg(%w)\nout %y\nout %z", "Conv", False),
        ("in %x: f32[1,2,4,4]\nin %w: f32[3,2,1,1]\n%y = Conv(%x, %w)\nout %y", "Conv", False),
        (MATMUL + "out %m", "MatMul", True),
        ("in %x: f32[1,4,2]\nconst %w: f32[1,2,1] = [1.0, 2.0]\n%y = MatMul(%x, %w)\nout %y", "MatMul", False),
        *(
            (
                "in %x: f32[2,2]\nconst %w: f32[2,2] = [1.0, 2.0, 3.0, 4.0]\nconst %b: f32[2] = [1.0, 2.0]\n%y = Gemm(%x, %w, %b" + a + ")\nout %y",
                "Gemm",
                f,
            )
            for a, f in (
                ("", True),
                (", transA=1", False),
                (", alpha=2.0", False),
                (", beta=0.5", False),
                (", alpha=0.5", False),
                (", transB=1", True),
            )
        ),
        (MATMUL + "%y = Relu(%m)\nout %y", "Relu", False),
    ],
)
def test_layers_that_are_fitted(text, op, fits):
    assert is_fittable(*layer_of(text, op)) is fits


BOUNDED = CONV + "const %b: f32[3] = [1.0, 2.0, 3.0]\nconst %l: f32[] = [-1.0]\nconst %h: f32[] = [6.0]\nin %o: f32[1,3,4,4]\n%c = Conv(%x, %w, %b)\n"


@pytest.mark.parametrize(
    ("text", "summed", "expected"),
    [
        ("%y = Relu(%c)\nout %y", False, (0.0, None)),
        ("%y = Clip(%c, %l, %h)\nout %y", False, (-1.0, 6.0)),
        ("%y = Clip(%c, %l)\nout %y", False, (-1.0, None)),
        ("%y = Sigmoid(%c)\nout %y", False, (None, None)),
        ("%y = Relu(%c)\nout %y\nout %c", False, (None, None)),
        ("%y = Relu(%c)\n%z = Neg(%c)\nout %y\nout %z", False, (None, None)),
        ("%s = Add(%c, %o)\n%y = Relu(%s)\nout %y", True, (0.0, None)),
        ("%s = Add(%c, %o)\n%y = Relu(%s)\nout %y", False, (None, None)),
        ("%s = Add(%c, %o)\n%y = Relu(%s)\nout %y\nout %s", True, (None, None)),
    ],
)
def test_the_bounds_beyond_which_all_outputs_mean_the_same(text, summed, expected):
    net = parse_network("network n source\n" + BOUNDED + text)
    layer = next(x for x in net.layers if x.op == "Conv")
    assert find_bounds(layer, net, net.users(), summed=summed) == expected


def test_statistics_of_batch_norms_are_those_of_the_data():
    text = "in %x: f32[n,2,1,2]\n" + "".join(f"const %{n}: f32[2] = [{v}, {v}]\n" for n, v in (("s", 1.0), ("o", 0.0), ("m", 5.0), ("v", 7.0)))
    net = parse_network("network n source\n" + text + "%y = BatchNormalization(%x, %s, %o, %m, %v)\nout %y")
    x = np.array([[[[1, 3]], [[0, 0]]], [[[5, 7]], [[2, 4]]]], np.float32)
    said = []
    new = reestimate_batch_norms(net, {"x": x}, lambda done, of, stage: said.append((done, of, stage)))
    assert new.constants["m"].array().tolist() == [4.0, 1.5]
    assert new.constants["v"].array().tolist() == [5.0, 2.75]
    assert net.constants["m"].array().tolist() == [5.0, 5.0]
    assert said[-1][:2] == (1, 1)
    assert said[-1][2].endswith("mean and variance re-estimated")
    assert new.constants["m"].weight.origin.op == "source"


def test_the_defaults_of_recovery():
    config = RecoveryConfig()
    assert (config.batch_norms, config.least_squares, config.ridge, config.rows, config.seed) == (True, True, 0.1, 32768, 0)


def test_the_distance_of_a_unit_is_the_sum_to_all_others():
    w = np.array([[0.0, 0.0, 3.0], [4.0, 0.0, 0.0]], np.float32)
    at = np.arange(2)[:, None]
    assert sum_distances(w, 0, at) == pytest.approx([5.0, 5.0])
    three = np.array([[0, 0], [3, 4], [0, 8], [6, 8]], np.float32)
    at = np.array([[0, 1], [2, 3]])  # units of two rows: (0, 0, 3, 4) and (0, 8, 6, 8)
    assert sum_distances(three, 0, at) == pytest.approx([np.sqrt(64 + 9 + 16)] * 2)
    rows = np.array([[0.0], [1.0], [3.0]], np.float32)
    assert sum_distances(rows, 0, np.arange(3)[:, None]) == pytest.approx([4.0, 3.0, 5.0])
    assert sum_distances(rows.T, 1, np.arange(3)[:, None]) == pytest.approx([4.0, 3.0, 5.0])


def test_norms_of_units(monkeypatch):
    w = np.array([[1.0, -2.0, 2.0], [-3.0, 0.0, 4.0], [0.5, 0.0, 0.0]], np.float32)
    at = np.array([[0], [1], [2]])
    for part in (1 << 24, 1, 2):
        monkeypatch.setattr(sys.modules[sum_magnitudes.__module__], "SUMMED_WEIGHTS", part)
        assert sum_magnitudes(w, 0, at).tolist() == [5.0, 7.0, 0.5]
        assert compute_norms(w, 0, at).tolist() == [3.0, 5.0, 0.5]
        assert sum_magnitudes(w, 1, at).tolist() == [4.5, 2.0, 6.0]
        assert compute_norms(w, 1, np.array([[0, 1]])) == pytest.approx([np.sqrt(1 + 9 + 0.25 + 4)])
        assert sum_slices(np.abs, np.zeros((0, 3), np.float32), 1).tolist() == [0, 0, 0]
    assert normalize_scores(np.array([1.0, 3.0])).tolist() == [0.5, 1.5]
    assert normalize_scores(np.zeros(3)).tolist() == [1.0, 1.0, 1.0]


TWO = """
    in %x: f32[1,2,2,2]
    const %w: f32[3,2,1,1] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    const %v: f32[2,3,1,1] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    %a = Conv(%x, %w)
    %r = Relu(%a)
    %y = Conv(%r, %v)
    out %y
    """


@pytest.mark.parametrize(
    ("channels", "text"),
    [
        ([], "non-empty list of integers, not \\[\\]"),
        ([[0]], "non-empty list of integers"),
        ([0.0], "non-empty list of integers"),
        (1, "non-empty list of integers"),
        ([True], "non-empty list of integers"),
        ([0, 3], r"channels 0 to 2, each at most once; \[0, 3\]"),
        ([-1], r"channels 0 to 2, each at most once; \[-1\]"),
        ([0, 0], r"each at most once; \[0, 0\]"),
    ],
)
def test_channels_that_are_refused(channels, text):
    with pytest.raises(PruneError, match=text):
        find_kept_indices(parse_network("network n source" + TWO), {"w": channels})


def test_messages_about_channels_are_short():
    net = parse_network("network n source" + TWO)
    with pytest.raises(PruneError) as e:
        find_kept_indices(net, {"w": [[0] * 1000]})
    assert len(str(e.value)) == 300
    with pytest.raises(PruneError) as e:
        find_kept_indices(net, {"w": list(range(40))[::-1]})
    assert str(list(range(12))) + "..." in str(e.value)


def test_kept_indices_of_every_axis():
    net = parse_network("network n source" + TWO)
    kept = {(t.name, axis): at.tolist() for (t, axis), at in find_kept_indices(net, {"w": [2, 0]}).items()}
    assert kept == {(n, axis): [0, 2] for n, axis in (("w", 0), ("a", 1), ("r", 1), ("v", 1))}
    assert find_kept_indices(net, {"w": [0, 1, 2]}) == {}
    assert find_kept_indices(net, {"w": np.array([0, 1], np.uint8)}, groups(net)).keys() == find_kept_indices(net, {"w": [0, 1]}).keys()


RESIDUAL = """
    in %x: f32[1,2,2,2]
    const %w: f32[2,2,1,1] = [1.0, 2.0, 3.0, 4.0]
    const %v: f32[2,2,1,1] = [1.0, 2.0, 3.0, 4.0]
    %s = Relu(%x)
    """


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%a = Conv(%s, %w)\n%y = Add(%s, %a)\nout %y", [(1, ["a"])]),
        ("%a = Conv(%s, %w)\n%y = Add(%a, %s)\nout %y", [(0, ["a"])]),
        ("%a = Conv(%s, %w)\n%b = Conv(%a, %v)\n%y = Add(%s, %b)\nout %y", [(1, ["a", "b"])]),
        ("%a = Conv(%s, %w)\n%b = Conv(%a, %v)\n%c = Add(%s, %b)\n%y = Add(%c, %a)\nout %y", [(0, ["b", "c"])]),
        ("%y = Add(%s, %s)\nout %y", []),
        ("%a = Conv(%s, %w)\n%b = Conv(%s, %v)\n%y = Add(%a, %b)\nout %y", []),
        ("%a = Conv(%s, %w)\n%y = Add(%s, %a)\nout %y\nout %a", []),
        ("%a = Conv(%s, %w)\n%y = Mul(%s, %a)\nout %y", []),
        ("%a = GlobalAveragePool(%s)\n%y = Add(%s, %a)\nout %y", []),
        ("%a = Conv(%s, %w)\n%y = Add(%s, %a)\n%b = Conv(%y, %v)\n%z = Add(%y, %b)\nout %z", [(1, ["a"]), (1, ["b"])]),
        ("%a = Conv(%s, %w)\n%y = Add(%s, %a)\n%b = Relu(%y)\n%z = Add(%b, %s)\nout %z", [(1, ["a"]), (0, ["a", "y", "b"])]),
    ],
)
def test_branches_that_can_be_removed(text, expected):
    net = parse_network("network n source" + RESIDUAL + text)
    name_of = {layer.name: layer.output.name for layer in net.layers}
    assert [(b.place, [name_of[x] for x in b.layers]) for b in branches(net)] == expected


def test_a_fit_makes_the_outputs_of_a_cut_network_those_of_the_original():
    """Channels that repeat others can be cut without loss once the next layer is fitted."""
    from whet.pruning.cut import cut

    rng = np.random.default_rng(1)
    w = rng.standard_normal((2, 3), np.float32)
    v = rng.standard_normal((4, 2), np.float32)
    b = [0.5, -1.0]

    def text(a) -> str:
        return "[" + ", ".join(repr(float(x)) for x in np.asarray(a).reshape(-1)) + "]"

    wide = np.stack([w[0], w[1], 2 * w[0], w[1]])  # [4 units, 3 inputs]
    net = parse_network(
        f"network n source\nin %x: f32[n,3]\nconst %w: f32[4,3] = {text(wide)}\nconst %v: f32[4,2] = {text(v)}\nconst %b: f32[2] = {text(b)}\n"
        "%a = Gemm(%x, %w, transB=1)\n%y = Gemm(%a, %v, %b)\nout %y"
    )
    x = {"x": rng.standard_normal((64, 3), np.float32)}
    (g,) = groups(net)
    small = cut(net, {g.name: [0, 1]})
    fitted = recover(small, net, {g.name: [0, 1]}, x, RecoveryConfig(ridge=1e-9))
    np.testing.assert_allclose(run_network(fitted, x)["y"], run_network(net, x)["y"], rtol=1e-3, atol=1e-3)
    assert np.abs(run_network(small, x)["y"] - run_network(net, x)["y"]).max() > 0.1
    same = recover(small, net, {g.name: [0, 1]}, x, RecoveryConfig(least_squares=False))
    assert np.array_equal(run_network(same, x)["y"], run_network(small, x)["y"])
