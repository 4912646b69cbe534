"""Index expressions as sums: slicing, concatenation and substitution keep their values; and the trees built from them."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest

from whet.network import Network, parse_type
from whet.ops import sample_layer
from whet.ops._base import Sample
from whet.tactics._moves_indices import COLUMN, FLAT, ROW, Place, Refused, compute_flat_offset, regroup_indices, unflatten
from whet.tactics._moves_tree import Moves

ROW_PLACE, COLUMN_PLACE = Place.of(ROW), Place.of(COLUMN)


def worth(place, **known):
    """The value of an index expression for given values of its atoms."""
    total = place.offset
    for atom, n in place.terms:
        if len(atom) == 1:
            total += n * known[atom[0]]
        else:
            inner = worth(atom[1], **known)
            total += n * (inner // atom[2] if atom[0] == "div" else inner % atom[2])
    return total


def test_indices_are_sums_of_row_and_column_terms():
    column = COLUMN_PLACE.plus(3)
    assert ROW_PLACE.times(12).plus(24).cut("div", 6, 9) == Place(4, ((ROW, 2),))
    assert ROW_PLACE.times(12).cut("mod", 6, 6) == Place()
    anchor = ROW_PLACE.cut("div", 25, 3)
    assert anchor.times(85).plus(column).fix(anchor.terms[0][0], 2) == Place(173, ((COLUMN, 1),))
    assert column.step == 1
    assert not ROW_PLACE.by_column
    with pytest.raises(Refused):
        _ = column.cut("div", 2, 9).step


def test_axes_split_from_an_index_recombine_to_it():
    shape = (7, 3, 1, 5, 4)
    cut = unflatten(ROW_PLACE, shape)
    assert compute_flat_offset(cut, shape, "linear") == ROW_PLACE
    assert compute_flat_offset(cut[1:], shape[1:], "linear") == ROW_PLACE.cut("mod", 60, 60), "nested remainders equal the remainder by the product"


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_equals_the_sum_of_its_terms(seed):
    rng = np.random.default_rng(seed)
    parts = [ROW_PLACE, COLUMN_PLACE, ROW_PLACE.plus(7)]
    for _ in range(12):
        a, b = (parts[i] for i in rng.integers(0, len(parts), 2))
        by = int(rng.choice([2, 3, 6]))
        parts += [a.cut("div", by, 9), a.cut("mod", by, by), a.times(by).plus(b), a.cut("div", by, 9).times(by).plus(a.cut("mod", by, by)).plus(b)]
        got, (row, column) = parts[-2:], rng.integers(0, 200, 2).tolist()
        wanted = [by * worth(a, row=row, column=column), worth(a, row=row, column=column)]
        assert [worth(p, row=row, column=column) for p in got] == [w + worth(b, row=row, column=column) for w in wanted]


@pytest.mark.parametrize("seed", range(20))
def test_consecutive_reshapes_change_no_value(seed):
    rng = np.random.default_rng(seed)
    factors = rng.integers(1, 5, 5).tolist()

    def shape():
        ends = sorted(rng.integers(0, 6, 2).tolist())
        return tuple(prod(part) for part in (factors[: ends[0]], factors[ends[0] : ends[1]], factors[ends[1] :]))

    shapes = [shape() for _ in range(4)]
    at = tuple(unflatten(Place.of(FLAT), shapes[0]))
    for after, before in pairwise(shapes):
        at = regroup_indices(at, after, before)
    for i in range(prod(factors)):
        assert tuple(worth(p, at=i) for p in at) == tuple(np.unravel_index(i, shapes[-1]))
    moved = compute_flat_offset(at, shapes[-1], "linear")
    assert moved == Place.of(FLAT) or prod(factors) == 1


def test_bounds_are_attributes_and_operands_are_nodes():
    def regions():
        body = Network("body", "lowered")
        x = body.add_input("x", parse_type("f32[2,3]"))
        top = body.constant(np.float32(6), "top")
        body.mark_output(body.add("Max", body.add("Clip", x, None, top), body.constant(np.float32(2), "two")))
        return {"body": body}

    _, layer, _ = sample_layer("Fused", Sample(["f32[2,3]"], {"composite": "Moves"}, regions))
    kind, op, (clipped, two), _ = Moves(layer, {0: "linear"}, "linear").root
    assert (kind, op, two) == ("step", "Max", ("number", 2.0))
    assert clipped == ("step", "Clip", (("source", 0, ROW_PLACE.times(3).plus(COLUMN_PLACE)),), (("input2", 6.0),))
