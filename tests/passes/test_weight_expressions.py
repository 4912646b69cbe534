"""Expressions over weights: constants computed by passes can be recomputed from the same or from other source weights."""

import numpy as np
import pytest

from whet.errors import NetworkError
from whet.network import F32, F64, I64, Origin, Weight, parse_network
from whet.ops._origin import evaluate_origin, express, make_literal
from whet.passes import lower

NET = """
in %x: f32[N,4,8,8]
const %w: f32[4,4,3,3] = seed(SEED1)
const %gamma: f32[4] = seed(SEED2)
const %mean: f32[4] = seed(SEED3)
const %variance: f32[4] = [1.0, 2.0, 3.0, 4.0]
const %s: f32[4,1,1] = seed(SEED4)
const %m: f32[4,6] = seed(SEED5)
const %b: f32[1,6] = seed(SEED6)
%c = Conv(%x, %w)
%n = BatchNormalization(%c, %gamma, %mean, %mean, %variance)
%t = Mul(%n, %s)
%r = Relu(%t)
%p = ReduceMean(%r, axes=(2, 3), keepdims=0)
%mt = Transpose(%m, perm=(1, 0))
%y = Gemm(%p, %mt, %b, transB=1, alpha=0.5, beta=3.0)
out %y
"""


def _net(seed):
    text = NET
    for i in range(1, 7):
        text = text.replace(f"SEED{i}", str(seed + i))
    return parse_network(text)


def test_a_refit_equals_lowering_the_new_weights():
    old, new = _net(0), _net(100)
    low, _ = lower(old)
    wanted, _ = lower(new)
    sources = {t.weight.origin.name: t.array() for t in new.constants.values()}
    assert sorted(low.constants) == sorted(wanted.constants)
    changed = 0
    for name, t in low.constants.items():
        got = evaluate_origin(t.weight.origin, sources)
        np.testing.assert_array_equal(got, wanted.constants[name].array(), strict=True)
        changed += not np.array_equal(got, t.array())
    assert changed >= 3


def test_the_sources_of_an_expression():
    low, _ = lower(_net(0))
    read = {s for t in low.constants.values() for s in t.weight.origin.sources()}
    assert read == {"w", "gamma", "mean", "variance", "s", "m", "b"}


def test_a_missing_source_is_named():
    with pytest.raises(NetworkError, match="the source weight 'w' is missing"):
        evaluate_origin(Origin("source", "w"), {})


def test_literals_hold_their_values():
    for a in (np.float64(1e-5), np.array([[1, -2], [3, 2**62]]), np.array([np.inf, -0.0], np.float32), np.zeros((0, 3), np.int64)):
        w = make_literal(a)
        np.testing.assert_array_equal(evaluate_origin(w.origin, {}), a, strict=isinstance(a, np.ndarray))
        assert w.type.dtype.numpy == a.dtype
    assert make_literal([1, 2], I64).array.dtype == np.int64
    with pytest.raises(NetworkError, match="too large"):
        make_literal(np.zeros((1 << 18) + 1))


def test_an_expression_is_rounded_once():
    a = Weight(np.array([1 / 3], np.float32), Origin("source", "a"))
    wide = express("Mul", express("Cast", a, to=F64), express("Cast", a, to=F64))
    assert wide.array[0] == np.float64(np.float32(1 / 3)) ** 2
    assert express("Cast", wide, to=F32).array.dtype == np.float32
    assert str(wide.origin) == "Mul(Cast(a), Cast(a))"


def test_an_op_that_does_not_accept_them_is_named():
    a = Weight(np.zeros((2, 3), np.float32), Origin("source", "a"))
    with pytest.raises(NetworkError, match="MatMul"):
        express("MatMul", a, a)


def test_an_expression_with_shared_parts_has_a_short_text_and_each_source_once():
    """Swin's shifted-window mask is written region by region, and each step reads the one before twice."""
    origin = Origin("source", "w")
    for _ in range(60):
        origin = Origin("Add", args=(origin, origin))
    assert list(origin.sources()) == ["w"]
    assert len(str(origin)) < 20_000
    assert str(Origin("Mul", args=(Origin("source", "a"), None))) == "Mul(a, none)"
