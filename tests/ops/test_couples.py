"""Oracle of zeroed channels: with coupled input units zeroed, a layer equals the cut layer on the remaining units."""

import numpy as np
import pytest

from whet.network import Network, Tensor
from whet.ops import OPS, Couple, run_layer, sample_layer

LEVELS = {None: "", 1: "-second", 0: "-innermost"}  # interpretations of axes that hold a product
CASES = [
    pytest.param(name, i, level, id=f"{name}-{i}{text}")
    for name, o in sorted(OPS.items())
    if o.couples
    for i in range(len(o.samples))
    for level, text in LEVELS.items()
    if level is None or o.inner
]
SIZES = {"Shape", "Size"}  # they compute the size itself
STATES = {"LSTM", "GRU", "RNN"}  # a unit without weights does not map infinity to zero, and the next time step reads it

Element = tuple[Tensor, int, int]  # tensor, axis, index


def components(couples: list[Couple]) -> dict[Element, frozenset[Element]]:
    """Coupled elements of axes."""
    parent: dict[Element, Element] = {}

    def find(e):
        while parent.setdefault(e, e) != e:
            e = parent[e]
        return e

    for c in couples:
        for t, axis in ((c.a, c.a_axis), (c.b, c.b_axis)):
            for i in range(t.shape[axis]):
                find((t, axis, i))  # units without a couple form their own sets
        for unit in units(c):
            for e in unit[1:]:
                parent[find(e)] = find(unit[0])
    groups: dict[Element, set[Element]] = {}
    for e in parent:
        groups.setdefault(find(e), set()).add(e)
    return {e: frozenset(groups[find(e)]) for e in parent}


def units(c: Couple) -> list[list[Element]]:
    """The elements of each unit of a couple."""
    count = c.count if c.count is not None else (c.a.shape[c.a_axis] - c.a_at) // c.a_block
    made = []
    for i in range(count):
        a = [(c.a, c.a_axis, c.a_at + (r * count + i) * c.a_block + k) for r in range(c.a_repeat) for k in range(c.a_block)]
        made.append(a + [(c.b, c.b_axis, c.b_at + (r * count + i) * c.b_block + k) for r in range(c.b_repeat) for k in range(c.b_block)])
    assert [sorted(e[2] for e in u) for u in made] == [sorted([*a, *b]) for a, b in zip(*(x.tolist() for x in c.indexes()), strict=True)]
    for t, axis, i in (e for u in made for e in u):
        assert 0 <= i < t.shape[axis], f"{c} reaches element {i} of axis {axis} of {t}"
    return made


def cuts(couples: list[Couple]) -> list[set[Element]]:
    """Sets of elements to test: for each couple its first and last unit, and the first unit that it does not cover."""
    of = components(couples)
    found: list[set[Element]] = []
    for c in couples:
        own = units(c)
        assert len(own) < 2 or leaves_some(set(of[own[0][0]])), f"{c}: its first unit includes everything"
        tries = [set(of[own[0][0]])] + ([set(of[own[0][0]]) | set(of[own[-1][0]])] if len(own) > 2 else [])
        for t, axis in ((c.a, c.a_axis), (c.b, c.b_axis)):
            free = [of[t, axis, i] for i in range(t.shape[axis]) if len(of[t, axis, i]) == 1]
            tries += [set(free[0])] if free else []
        found += [cut for cut in tries if leaves_some(cut) and cut not in found]
    return found


def leaves_some(cut: set[Element]) -> bool:
    lost: dict[tuple[Tensor, int], int] = {}
    for t, axis, _ in cut:
        lost[t, axis] = lost.get((t, axis), 0) + 1
    return all(n < t.shape[axis] for (t, axis), n in lost.items())


def take_kept(a, t, channels):
    for (other, axis), at in channels.items():
        if other is t:
            a = np.take(a, at, axis=axis)
    return a


def cut_layer(layer, arrays, channels):
    """The layer over cut inputs, in its own network, with the attributes from recut; and its arrays."""
    o = OPS[layer.op]
    change = o.recut(layer, channels) if o.recut else {}
    attrs = {k: v for k, v in {**layer.attrs, **{k: v for k, v in change.items() if isinstance(k, str)}}.items() if v is not None}
    given = list(arrays) + [None] * (1 + max([k for k in change if isinstance(k, int)], default=-1) - len(arrays))
    net, inputs, feed = Network("cut"), [], []
    for i, a in enumerate(given):
        t = layer.input(i)
        a = change[i] if i in change else (None if t is None else take_kept(a, t, channels))
        feed.append(a)
        if a is None:
            inputs.append(None)
        elif t is None or t.is_constant:
            inputs.append(net.constant(a, f"c{i}"))
        else:
            inputs.append(net.add_input(f"x{i}", t.type.with_shape(a.shape)))
    return net.add_layer(layer.op, inputs, attrs), feed


def read(name, layer, level):
    return OPS[name].couples(layer) if level is None else OPS[name].inner(layer, level)


@pytest.mark.parametrize(("name", "i", "level"), CASES)
def test_couples(name, i, level):
    _, layer, arrays = sample_layer(name, OPS[name].samples[i])
    couples = read(name, layer, level)
    assert all(c.a in (*layer.inputs, *layer.outputs) and c.b in (*layer.inputs, *layer.outputs) for c in couples)
    for cut in cuts(couples):
        kept = {}
        for t, axis, _ in cut:
            kept[t, axis] = np.array([k for k in range(t.shape[axis]) if (t, axis, k) not in cut])
        zeroed = [None if a is None else a.copy() for a in arrays]
        for t, axis, k in cut:
            for place, x in enumerate(layer.inputs):
                if x is t:
                    zeroed[place][(slice(None),) * axis + (k,)] = 0
        big = run_layer(layer, zeroed)
        small, feed = cut_layer(layer, arrays, kept)
        got = run_layer(small, feed)
        for t, twin, a, b in zip(layer.outputs, small.outputs, big, got, strict=True):
            want = take_kept(a, t, kept)
            what = f"cutting {sorted((x.name, axis, k) for x, axis, k in cut)}"
            assert twin.shape == want.shape == b.shape, what
            if name not in SIZES and (name not in STATES or np.isfinite(want).all()):
                exact = 2e-3 if t.dtype.name == "f16" else 1e-5
                np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(want, np.float64), rtol=exact, atol=exact, err_msg=what)


@pytest.mark.parametrize(("name", "i"), [(n, i) for n, o in sorted(OPS.items()) if o.statistics for i in range(len(o.samples))])
def test_axes_of_statistics_can_be_cut(name, i):
    """Values change with the statistics; the cut layer accepts its inputs and has the kept axes."""
    _, layer, arrays = sample_layer(name, OPS[name].samples[i])
    statistics = OPS[name].statistics(layer)
    of = components([*read(name, layer, None), *statistics])
    for c in statistics:
        cut = of[c.a, c.a_axis, 0]
        if leaves_some(set(cut)):
            kept = {(t, axis): np.array([k for k in range(t.shape[axis]) if (t, axis, k) not in cut]) for t, axis, _ in cut}
            small, feed = cut_layer(layer, arrays, kept)
            want = tuple(len(kept[layer.output, d]) if (layer.output, d) in kept else n for d, n in enumerate(layer.output.shape))
            assert small.output.shape == want == run_layer(small, feed)[0].shape


def test_enough_is_cut():
    """The oracle must not pass because nothing is cut."""
    tried = {level: 0 for level in LEVELS}
    for n, i, level in (c.values for c in CASES):
        tried[level] += len(cuts(read(n, sample_layer(n, OPS[n].samples[i])[1], level)))
    assert tried[None] > 1400
    assert tried[0] > 60
    assert tried[1] > 60


def test_factors_of_a_split_axis():
    """36 = (3, 4, 3): the interpretation of each level couples that factor, at any position."""
    _, layer, _ = sample_layer("Reshape", OPS["Reshape"].samples[-1])
    net = Network("n")
    x = net.add_input("x", layer.inputs[0].type.with_shape((2, 36)))
    made = net.add_layer("Reshape", [x, net.constant(np.array([2, 3, 4, 3]), "s")])
    for level, axis in ((0, 3), (1, 2), (2, 1), (7, 1)):
        (c,) = [c for c in OPS["Reshape"].inner(made, level) if c.a_axis == 1]
        assert c.b_axis == axis
        flat = np.arange(36).reshape(3, 4, 3)
        assert np.array_equal(c.indexes()[0], np.moveaxis(flat, axis - 1, 0).reshape(flat.shape[axis - 1], -1))
