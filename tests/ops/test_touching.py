"""Independence of samples: for proven ops the result per sample equals that of the batch; ops that mix samples are refused by name."""

import itertools
from functools import cache

import numpy as np
import pytest

from whet.errors import WhetError
from whet.network import Layer, Network, Tensor, TensorType, make_symbol, parse_type
from whet.ops import OPS, batch_symbol, run_network, sample_layer, why_samples_touch

BATCH = 3
MOST = 6  # changing inputs of which all subsets are tried as constants; of more, only none, single ones and all but one: subsets double with each


def differ(net: Network, feeds: dict[str, np.ndarray]) -> str | None:
    """Differences between a batch's outputs and those of its samples, run one by one; None if there are none."""
    whole = list(run_network(net, feeds).values())
    each = [list(run_network(net, {n: a[i : i + 1] for n, a in feeds.items()}).values()) for i in range(BATCH)]
    for k, got in enumerate(whole):
        alone = np.concatenate([values[k] for values in each])
        if got.shape != alone.shape:
            return f"output {k}: {got.shape} against {alone.shape}"
        if got.dtype.kind in "iub":
            close = np.array_equal(got, alone)
        else:
            close = np.allclose(got.astype(np.float64), alone.astype(np.float64), rtol=1e-4, atol=1e-5, equal_nan=True)
        if not close:
            return f"output {k}: other numbers"
    return None


def with_a_batch(layer: Layer, arrays: list, constants: tuple[int, ...]) -> tuple[Network, dict[str, np.ndarray]] | None:
    """The layer of a sample, whose inputs have the batch N as first axis (except `constants`); None if that is invalid."""
    net, feeds, inputs = Network("one"), {}, []
    rng = np.random.default_rng(0)
    for i, (t, a) in enumerate(zip(layer.inputs, arrays, strict=True)):
        if t is None or a is None:
            inputs.append(None)
        elif i in constants or t.is_constant or a.ndim == 0 or not len(a):
            inputs.append(net.constant(a))
        else:
            feeds[f"x{i}"] = a[rng.integers(0, len(a), BATCH)]
            inputs.append(net.add_input(f"x{i}", TensorType(t.dtype, (make_symbol("N"), *a.shape[1:]))))
    if not feeds:
        return None
    try:
        layer = net.add_layer(layer.op, inputs, dict(layer.attrs), regions=layer.regions)
        for y in layer.outputs:
            net.mark_output(y)
    except (WhetError, ValueError, IndexError, TypeError):
        return None  # the op does not accept such inputs
    return (net, feeds) if batch_symbol(net) else None


@cache
def list_proven(name: str) -> list[tuple[str, Network, dict[str, np.ndarray]]]:
    """(case, network, its inputs) of all samples of an op that the proof accepts, with each subset of the inputs as constants."""
    proven = []
    for k, sample in enumerate(OPS[name].samples):
        if any(isinstance(s, str) and s.startswith(("extreme", "nonfinite")) for s in sample.inputs):
            continue  # sums of infinities and of the largest values depend on their order
        changing = [i for i, s in enumerate(sample.inputs) if isinstance(s, str) and not s.startswith("const ")]
        sizes = range(len(changing)) if len(changing) <= MOST else (0, 1, len(changing) - 1)
        _net, layer, arrays = sample_layer(name, sample)
        for n in sizes:
            for constants in itertools.combinations(changing, n):
                made = with_a_batch(layer, arrays, constants)
                if made is not None and why_samples_touch(made[0], {x: a.shape for x, a in made[1].items()}) is None:
                    proven.append((f"sample {k}, constants {constants}", *made))
    return proven


@pytest.fixture(scope="module", autouse=True)
def _free_networks():
    yield
    list_proven.cache_clear()


def test_most_ops_are_proven():
    """Elementwise ops, windows, norms, products, data movement: the ops of usual networks."""
    proven = {name: len(list_proven(name)) for name in OPS}
    names = {name for name, count in proven.items() if count}
    assert sum(proven.values()) > 500
    assert names >= {"Add", "Conv", "MaxPool", "BatchNormalization", "LayerNormalization", "MatMul", "Gemm", "Softmax", "ReduceMean"}
    assert names >= {"Reshape", "Transpose", "Concat", "Split", "Slice", "Gather", "Resize", "ConvTranspose", "Where"}


@pytest.mark.parametrize("name", sorted(OPS))
def test_ops_accepted_by_the_proof_are_independent_per_sample(name):
    assert not {case: why for case, net, feeds in list_proven(name) if (why := differ(net, feeds)) is not None}


def make_network(make, *types: str) -> Network:
    """A network around `make(net, *inputs)`, which returns its output."""
    net = Network("hostile")
    made = make(net, *(net.add_input(f"x{i}", parse_type(t)) for i, t in enumerate(types)))
    net.mark_output(made, "y")
    return net


def const(net: Network, *values, dtype=np.int64) -> Tensor:
    return net.constant(np.array(values, dtype))


def scalar(net: Network, value, dtype=np.int64) -> Tensor:
    return net.constant(np.array(value, dtype))


def count(net: Network, x: Tensor) -> Tensor:
    """The number of samples, as a float."""
    return net.add("Cast", net.add("Gather", net.add("Shape", x), scalar(net, 0), axis=0), to=parse_type("f32[]").dtype)


def rolled(net: Network, x: Tensor) -> Tensor:
    """Replaces every sample by the previous one."""
    last = net.add("Slice", x, const(net, -1), const(net, 2**31), const(net, 0), const(net, 1))
    rest = net.add("Slice", x, const(net, 0), const(net, -1), const(net, 0), const(net, 1))
    return net.add("Concat", last, rest, axis=0)


def numbered(net: Network, x: Tensor) -> Tensor:
    """Adds its index to each sample."""
    n = net.add("Gather", net.add("Shape", x), scalar(net, 0), axis=0)
    places = net.add("Cast", net.add("Range", scalar(net, 0), n, scalar(net, 1)), to=x.dtype)
    return net.add("Add", x, net.add("Unsqueeze", places, const(net, 1)))


MIXED = {
    "mean over the samples": lambda net, x: net.add("Sub", x, net.add("ReduceMean", x, const(net, 0), keepdims=1)),
    "softmax over the samples": lambda net, x: net.add("Softmax", x, axis=0),
    "norm over the samples": lambda net, x: net.add("LpNormalization", x, axis=0),
    "running sum": lambda net, x: net.add("CumSum", x, scalar(net, 0)),
    "reversed": lambda net, x: net.add("Slice", x, const(net, -1), const(net, -(2**31)), const(net, 0), const(net, -1)),
    "rolled": rolled,
    "halves of samples": lambda net, x: net.add("Reshape", net.add("Transpose", x, perm=(1, 0)), const(net, -1, 4)),
    "regrouped": lambda net, x: net.add("Reshape", net.add("Reshape", x, const(net, 2, -1)), const(net, -1, 4)),
    "every pair": lambda net, x: net.add("MatMul", net.add("MatMul", x, net.add("Transpose", x, perm=(1, 0))), x),
    "largest of all": lambda net, x: net.add("Sub", x, net.add("ReduceMax", x, keepdims=1)),
    "divided by their number": lambda net, x: net.add("Div", x, count(net, x)),
    "numbered": numbered,
    "only the upper triangle": lambda net, x: net.add("Trilu", x),
    "gathered by a sample's values": lambda net, x: net.add("GatherElements", x, net.add("Cast", x, to=parse_type("i64[1]").dtype), axis=0),
    "the first for all": lambda net, x: net.add("Add", x, net.add("Gather", x, scalar(net, 0), axis=0)),
    "a constant for each of four": lambda net, x: net.add("Add", x, net.constant(np.ones((4, 4), np.float32))),
    "doubled": lambda net, x: net.add("Concat", x, x, axis=0),
}


@pytest.mark.parametrize("kind", MIXED)
def test_ops_that_mix_samples_are_refused(kind):
    net = make_network(MIXED[kind], "f32[N,4]")
    assert why_samples_touch(net, {"x0": (8, 4)})


def test_the_layer_is_named():
    net = make_network(lambda net, x: net.add("Softmax", x, axis=0, name="over the batch"), "f32[N,4]")
    assert "'over the batch'" in why_samples_touch(net, {"x0": (2, 4)})


def test_a_branch_that_depends_on_the_batch_is_refused():
    """Values captured by a region are not inputs of the layer."""

    def make(net, x):
        def branch(name: str, value: float) -> Network:
            made = Network(name)
            made.mark_output(made.add("Mul", x, made.constant(np.array([value], np.float32))), "z")
            return made

        return net.add("If", net.constant(np.array(True)), regions={"then_branch": branch("a", 1.0), "else_branch": branch("b", 2.0)})

    net = make_network(lambda net, x: net.add("Add", x, make(net, x)), "f32[N,4]")
    assert "may use the batch arbitrarily" in why_samples_touch(net, {"x0": (2, 4)})


@pytest.mark.parametrize(
    ("types", "why"),
    [(("f32[8,4]",), "one dynamic batch"), (("f32[N,N]",), "one dynamic batch"), (("f32[N,4]", "f32[M,4]"), "one dynamic batch")],
)
def test_only_a_single_dynamic_batch_is_accepted(types, why):
    net = make_network(lambda net, *x: net.add("Relu", x[0]), *types)
    assert why in why_samples_touch(net, {f"x{i}": (8, 4) for i in range(len(types))})


def test_an_output_for_all_samples_is_refused():
    net = Network("two")
    x = net.add_input("x", parse_type("f32[N,4]"))
    net.mark_output(net.add("Relu", x), "y")
    net.mark_output(net.add("ReduceSum", x, const(net, 0), keepdims=1), "all")
    assert why_samples_touch(net, {"x": (8, 4)})


def token(net: Network, x: Tensor) -> Tensor:
    """A learned token before each sample's tokens, repeated by the batch size as exporters write it."""
    n = net.add("Gather", net.add("Shape", x), const(net, 0), axis=0)
    shape = net.add("Concat", n, const(net, 1, 4), axis=0)
    return net.add("Concat", net.add("Expand", net.constant(np.arange(4, dtype=np.float32).reshape(1, 1, 4)), shape), x, axis=1)


def flattened(net: Network, x: Tensor) -> Tensor:
    """A shape computed from the batch's shape."""
    n = net.add("Gather", net.add("Shape", x), const(net, 0), axis=0)
    return net.add("Reshape", x, net.add("Concat", n, const(net, -1), axis=0))


@pytest.mark.parametrize("make", [token, flattened])
def test_batch_expressions_of_exporters_are_proven(make):
    net = make_network(make, "f32[N,3,4]")
    assert why_samples_touch(net, {"x0": (8, 3, 4)}) is None
    assert differ(net, {"x0": np.random.default_rng(0).standard_normal((BATCH, 3, 4)).astype(np.float32)}) is None
