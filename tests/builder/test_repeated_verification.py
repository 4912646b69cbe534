"""An engine that passed verification on this machine is not verified again by the next build of the same engine; any other one is."""

import dataclasses

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.lock.lock import save_lock
from whet.builder.verify import repeated
from whet.builder.verify.error_bounds import Checked, Failure
from whet.engine.file import engine_digest
from whet.network import parse_network
from whet.runtime import verified
from whet.tactics import TACTICS

TEXT = """
network small source
in %x: f32[2,16,12,12]
const %w: f32[32,16,3,3] = seed(1)
%a = Conv(%x, %w, pads=(1, 1, 1, 1)) from "conv"
%y = Relu(%a) from "relu"
out %y
"""
CONFIG = BuildConfig(optimization_level=0, timing_cache="", threads=1, samples="together")


@pytest.fixture
def verifications(monkeypatch, tmp_path):
    """The engines that were verified; records are in a folder of the test's own."""
    monkeypatch.setenv(verified.VARIABLE, str(tmp_path / "verified"))
    plans, verify_engine = [], repeated.verify_engine
    monkeypatch.setattr(repeated, "verify_engine", lambda plan, *rest: plans.append(plan) or verify_engine(plan, *rest))
    return plans


def build_small(text=TEXT, inputs=None, **options):
    return build(parse_network(text), dataclasses.replace(CONFIG, **options), inputs=inputs)


def test_the_same_engine_is_verified_once(verifications):
    first, second = build_small(), build_small()
    assert len(verifications) == 1
    assert repeated.REPEATED in second.report.info
    assert repeated.REPEATED not in first.report.info
    assert second.probe == first.probe
    assert second.report.verification == first.report.verification
    assert engine_digest(second) == engine_digest(first)
    third = build_small(verify_again=True)
    assert len(verifications) == 2, "on request"
    assert engine_digest(third) == engine_digest(first)


def test_what_changes_an_engine_or_its_verification_verifies_again(verifications, monkeypatch, tmp_path):
    build_small()

    def expect_verification(what, *args, **options):
        before = len(verifications)
        build_small(*args, **options)
        assert len(verifications) == before + 1, what

    expect_verification("other weights", TEXT.replace("seed(1)", "seed(2)"))
    expect_verification("another network", TEXT.replace("Relu", "Neg"))
    expect_verification("other kernels", tactic_sources=("-ONEDNN",))
    expect_verification("other passes", passes=("none",))
    expect_verification("another option", strict_numerics=True)
    expect_verification("another seed", seed=1)
    expect_verification("the user's data", inputs={"x": np.ones((2, 16, 12, 12), np.float32)})
    expect_verification("other data of the user", inputs={"x": np.full((2, 16, 12, 12), 0.5, np.float32)})
    with monkeypatch.context() as m:
        m.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")
        expect_verification("another setting of a library")
    with monkeypatch.context() as m:
        m.setattr(verified, "digest_source_files", lambda: "other kernels")
        expect_verification("another version of whet's sources")
    with monkeypatch.context() as m:
        m.setenv(verified.VARIABLE, "0")
        expect_verification("records are off")
    done = len(verifications)
    build_small()
    assert len(verifications) == done, "the first engine's record is still there"
    for record in (tmp_path / "verified").iterdir():
        record.write_bytes(record.read_bytes()[:-10])
    expect_verification("a damaged record")


def test_a_locked_engine_is_verified_once(verifications, tmp_path):
    save_lock(build_small(), tmp_path / "lock.json")
    locked = [build_small(lock=str(tmp_path / "lock.json")) for _ in range(2)]
    assert len(verifications) == 2, "the lock is an option: its first build verifies, its second does not"
    assert locked[0].probe == locked[1].probe != {}


def test_an_engine_that_fails_and_one_with_foreign_kernels_have_no_record(verifications, monkeypatch, tmp_path):
    plan = build_small()
    net, backend = parse_network(TEXT), get_backend("cpu", threads=plan.threads)
    again = dataclasses.replace(CONFIG, seed=5)
    failed = Checked(failures=[Failure("conv", "tactic", 1.0, 0.1, "wrong")])
    with monkeypatch.context() as m:
        m.setattr(repeated, "verify_engine", lambda *args: failed)
        for _ in range(2):
            assert repeated.verify_once(plan, net, backend, None, again, None).checked is failed
    name = plan.choices[plan.network.layers[0].name].tactic
    foreign = type("Foreign", (type(TACTICS[name]),), {"__module__": "of_the_user"})()
    assert repeated.find_verification_record(plan, net, backend, None, CONFIG) is not None
    monkeypatch.setitem(TACTICS, name, foreign)
    assert repeated.find_verification_record(plan, net, backend, None, CONFIG) is None
