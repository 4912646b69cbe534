"""Retuning an engine: the same network and results, no reformats left over from the old selection."""

import dataclasses
import sys

import numpy as np
import pytest

from whet.builder import BuildConfig, build
from whet.builder.retune import read_stored_options, remove_reformats, retune
from whet.engine import engine_bytes, read_engine
from whet.errors import EngineError
from whet.network import parse_network, verify
from whet.runtime import Runtime

NET = """network n source
in %x: f32[N,8,12,12]
const %w: f32[16,8,3,3] = seed(1)
const %b: f32[16] = seed(2)
const %v: f32[16,16,3,3] = seed(3)
%a = Conv(%x, %w, %b, pads=(1, 1, 1, 1)) from "conv1"
%r = Relu(%a) from "relu1"
%c = Conv(%r, %v, pads=(1, 1, 1, 1)) from "conv2"
%s = Add(%c, %a) from "add"
%y = Relu(%s) from "relu2"
out %y
"""


def test_a_retuned_engine_computes_the_same():
    shape = {"x": (2, 8, 12, 12)}
    config = BuildConfig(profiles=((shape, shape, shape),), timing_cache="", avg_timing=2, optimization_level=1)
    old = build(parse_network(NET), config)
    net = verify(remove_reformats(old))
    assert [x.op for x in net.layers].count("Reformat") == 0
    new = retune(old, timing_cache="")
    kept = [{x.name for x in p.network.layers if x.op != "Reformat"} for p in (old, new)]
    assert kept[0] == kept[1]
    x = np.random.default_rng(0).standard_normal((2, 8, 12, 12)).astype(np.float32)
    a, b = (Runtime().load(p).create_context().run({"x": x})["y"] for p in (old, new))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(a).max())  # kernels may accumulate in another order
    assert new.profiles == old.profiles
    assert new.model_digest == old.model_digest


@pytest.fixture(scope="module")
def engine():
    options = {"timing_cache": "", "avg_timing": 2, "optimization_level": 1, "verify": False}
    return build(parse_network(NET), BuildConfig(profiles=((SHAPE, SHAPE, SHAPE),), **options))


SHAPE = {"x": (2, 8, 12, 12)}


def test_options_come_back_with_their_types(engine):
    stored = read_stored_options(read_engine(engine_bytes(engine)))
    config = BuildConfig(**stored)
    assert (config.optimization_level, config.precisions, config.passes) == (1, (), ())
    assert not set(stored) & {"verify", "threads", "lock", "timing_cache", "profiles"}


def test_an_engine_cannot_switch_verification_off(engine, monkeypatch):
    seen = []
    monkeypatch.setattr(sys.modules["whet.builder.retune"], "build", lambda net, config, progress=None: (seen.append(config.verify), engine)[1])
    for verify_option in (False, 0, True):
        retune(dataclasses.replace(engine, options=engine.options | {"verify": verify_option}), timing_cache="")
    assert seen == [True, True, True]


@pytest.mark.parametrize(("name", "value"), [
    ("avg_timing", 10**12), ("avg_timing", True), ("avg_timing", "8"), ("avg_timing", 0), ("whole_engines", 10**9), ("optimization_level", 9),
    ("max_tactics", 10**18), ("precisions", "int8"), ("precisions", [1]), ("precisions", ["int9"]), ("passes", [["a"]]), ("deterministic", 0),
    ("in_network", None), ("layer_precisions", [["a"]]), ("memory_limit", {"workspace": "x"}), ("seed", -5), ("samples", "x"), ("strict", 1),
])  # fmt: skip
def test_options_that_no_build_writes_are_refused(engine, name, value):
    with pytest.raises(EngineError, match=name):
        retune(dataclasses.replace(engine, options=engine.options | {name: value}), timing_cache="")
