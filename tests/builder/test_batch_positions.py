"""Differences between an engine's results and those of the rotated batch, on bindings that hold arrays instead of device memory."""

from types import SimpleNamespace

import numpy as np
import pytest

from whet.builder.batching.batch_items import BatchAxes
from whet.builder.verify.batch_positions import measure_rotation_differences
from whet.network import parse_network
from whet.ops import BatchAxis

BATCH = 4


class Binding:
    """Values of `%y = f(%x)` by name; `f` gets the values of %x and returns those of %y."""

    def __init__(self, network, f):
        self.network, self.f, self.values, self.backend = network, f, {}, None
        self.arena = SimpleNamespace(array=None)
        self.shaped = SimpleNamespace(operands={t.name: t.type for t in network.tensors()})

    def feed(self, data):
        self.values.update(data)

    def value(self, name):
        return self.values[name]

    def write_stored(self, name, array):
        self.values[name] = array

    def run_step(self, i):
        self.values["y"] = self.f(self.values["x"])


def difference(f, x, dtype="f32"):
    net = parse_network(f"network n lowered\nin %x: {dtype}[2,{BATCH}]\n%y = Relu(%x)\nout %y\n")
    axes = BatchAxes({"x": BatchAxis(1), "y": BatchAxis(1)}, {"y": {}}, frozenset())
    ((layer, error),) = measure_rotation_differences(Binding(net, f), Binding(net, f), {"x": x}, axes, BATCH)
    assert layer.name == "y"
    return error


def at_position(change):
    """Adds `change` to the last item of the batch, whichever it is."""

    def f(x):
        y = x.copy()
        y[:, -1] = y[:, -1] + np.asarray(change, x.dtype)
        return y

    return f


X = np.float32([[1, 2, -8, 4], [0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("change", "error"),
    [(0.0, 0.0), (0.5, 0.5 / 8), (-0.25, 0.25 / 8), (np.nan, np.inf), (np.inf, np.inf)],
)
def test_the_error_of_an_item_is_relative_to_the_largest_value(change, error):
    assert difference(at_position(change), X) == pytest.approx(error)


def test_an_error_where_all_is_zero_is_absolute():
    found = difference(lambda x: x * 0 + np.float32([0, 0, 0, 0.25]), X)
    assert found == 1.0, "relative to itself"
    calls = []

    def second(x):
        calls.append(1)
        return np.full_like(x, 0.25 * (len(calls) - 1))

    assert difference(second, X) == 0.25


def test_infinities_at_the_same_items_do_not_count():
    x = X.copy()
    x[0, 1] = np.inf
    with np.errstate(invalid="ignore"):
        assert difference(at_position(0.0), x) == 0.0


def test_integers_are_equal_or_not():
    x = X.astype(np.int32)
    assert difference(at_position(0), x, "i32") == 0.0
    assert difference(at_position(1), x, "i32") == np.inf


@pytest.mark.parametrize(
    ("worst", "largest", "odd", "error"), [(0.5, 8.0, False, 0.0625), (0.25, 0.0, False, 0.25), (0.0, 8.0, False, 0.0), (0.0, 8.0, True, np.inf)]
)
def test_devices_compare_the_two_parts_of_a_rotated_batch(worst, largest, odd, error):
    net = parse_network(f"network n lowered\nin %x: f32[{BATCH},2]\n%y = Relu(%x)\nout %y\n")
    axes = BatchAxes({"x": BatchAxis(0), "y": BatchAxis(0)}, {"y": {}}, frozenset())
    parts = []

    def compare(arena, to, other, start, nbytes, dtype):
        parts.append((to, start, nbytes, dtype))
        return SimpleNamespace(worst=worst if len(parts) % 2 else worst / 2, largest=largest / 2 if len(parts) % 2 else largest, odd=odd)

    bindings = []
    for _ in range(2):
        b = Binding(net, lambda x: x)
        b.backend = SimpleNamespace(difference=compare, copy=lambda *args: None)
        b.place = lambda name: ({"x": 0, "y": 64}[name], 8 * BATCH)
        b.values = {"x": np.zeros((BATCH, 2), "f4"), "y": np.zeros((BATCH, 2), "f4")}
        bindings.append(b)
    ((_, found),) = measure_rotation_differences(*bindings, {"x": bindings[0].values["x"]}, axes, BATCH)
    assert found == pytest.approx(error)
    assert sum(n for _, _, n, _ in parts) == 8 * BATCH
    assert {d for *_, d in parts} == {"f32"}
