"""Locks with one missing or wrong value: refused with a LockError, unless their meaning is unchanged."""

import dataclasses
import json

import numpy as np
import pytest

from support.damage import damaged
from whet.builder import BuildConfig, Calibration, build, build_int8, plan_digest, save_lock
from whet.errors import LockError
from whet.network import parse_network

NET = """network n source
in %x: f32[2,3,4,4]
const %w: f32[4,3,1,1] = seed(1)
const %v: f32[2,4,1,1] = seed(2)
%a: f32[2,4,4,4] = Conv(%x, %w)
%b: f32[2,4,4,4] = Relu(%a)
%y: f32[2,2,4,4] = Conv(%b, %v)
out %y
"""
SAMPLES = [{"x": np.random.default_rng(i).standard_normal((2, 3, 4, 4)).astype(np.float32)} for i in range(3)]


def floats(config: BuildConfig):
    return build(parse_network(NET), config)


def integers(config: BuildConfig):
    config = dataclasses.replace(config, precisions=("int8",))
    return build_int8(parse_network(NET), config, Calibration(samples=lambda: iter(SAMPLES)))


@pytest.mark.parametrize(("make", "every"), [(floats, 5), (integers, 14), pytest.param(integers, 5, marks=pytest.mark.slow)])
def test_locks(tmp_path, make, every):
    path, config, refused, kept = tmp_path / "l.json", BuildConfig(backend="null", timing_cache=""), [], []
    plan = make(config)
    save_lock(plan, path)
    for what, data in damaged(json.loads(path.read_text()), every=every):
        path.write_text(json.dumps(data))
        try:
            again = make(dataclasses.replace(config, lock=str(path)))
        except LockError:
            refused.append(what)
        else:
            assert plan_digest(again) == plan_digest(plan), what
            kept.append(what)
    assert len(refused) > 8 * len(kept)
