"""The lock: the same lock gives the same engine, or the build fails and names the differences."""

import dataclasses
import json
import re

import numpy as np
import pytest
from nets import Stages, inputs, residual
from test_verification import only

from whet.backends import get_backend
from whet.builder import BuildConfig, build, plan_digest, save_lock
from whet.engine import engine_bytes, engine_digest
from whet.engine.file import SECTIONS
from whet.engine.layout import read_sections
from whet.errors import LockError
from whet.runtime import Runtime, bind

# : without the kernel that may be faster than oneDNN's convolutions: these tests edit the oneDNN entries of locks
QUICK = BuildConfig(timing_cache="", avg_timing=1, whole_engines=1, tactic_sources=("-DIRECT", "-WINOGRAD"))


@pytest.fixture(scope="module")
def plan_and_lock(tmp_path_factory):
    path = tmp_path_factory.mktemp("lock") / "lock.json"
    plan = build(residual(), QUICK)
    save_lock(plan, path)
    return plan, path


def entry(data, tactic):
    return next(e for e in data["layers"] if e["tactic"] == tactic)


def locked(path, net=None, progress=None, **options):
    return build(net or residual(), dataclasses.replace(QUICK, lock=str(path), **options), progress=progress)


def sections(plan):
    """The bytes of each section of the plan's file, its packed weights included."""
    data = engine_bytes(plan, packed_weights=Runtime().load(plan).packed_weights())
    return {n: bytes(v) for n, v in read_sections(memoryview(data), SECTIONS, frozenset({"weights", "packed"})).items()}


def test_the_same_lock_gives_the_same_engine_and_times_nothing(plan_and_lock):
    (plan, path), stages = plan_and_lock, Stages()
    again = locked(path, progress=stages)
    assert stages.names
    assert not stages.times
    assert plan_digest(again) == plan_digest(plan)
    assert engine_digest(again) == engine_digest(plan)
    once, twice = (sections(locked(path)) for _ in range(2))
    assert again.report.verification == plan.report.verification is not None, "a locked engine is verified, and says so"
    assert once["info"] != twice["info"], "times and dates are in the files"
    assert {**once, "info": b""} == {**twice, "info": b""} == {**sections(plan), "info": b""}, "and nothing else differs"
    assert again.probe == plan.probe
    feed, outs = inputs(residual()), []
    for p in (plan, again):
        bound = bind(p, get_backend("cpu"))
        bound.feed(feed)
        bound.run()
        outs.append(bound.fetch()["y"])
    np.testing.assert_array_equal(outs[0], outs[1])


def test_the_order_of_permissions_does_not_matter(tmp_path):
    net, path = residual(), tmp_path / "lock.json"
    first = build(net, dataclasses.replace(QUICK, precisions=("bf16", "fp16")))
    save_lock(first, path)
    assert plan_digest(locked(path, net, precisions=("fp16", "bf16"))) == plan_digest(first)
    with pytest.raises(LockError, match="precisions"):
        locked(path, net, precisions=("fp16",))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("deterministic", True),
        ("sparsity", "force"),
        ("optimization_level", 4),
        ("no_fuse", ("a",)),
        ("precision_constraints", "obey"),
        ("layer_precisions", (("*", "fp32"),)),
        ("layer_output_types", (("*", "fp32"),)),
    ],
)
def test_each_option_that_determines_the_engine_is_locked(plan_and_lock, option, value):
    with pytest.raises(LockError, match=f"the option {option}: was "):
        locked(plan_and_lock[1], **{option: value})


def test_other_weights_are_another_model(plan_and_lock):
    with pytest.raises(LockError, match=r"the model: was \w+\.\.\., is"):
        locked(plan_and_lock[1], residual(seed=3))


def test_all_differences_are_named_at_once(plan_and_lock):
    with pytest.raises(LockError, match=r"(?s)the number of threads: was \d+, is 1.*the option passes") as e:
        locked(plan_and_lock[1], threads=1, passes=("-cancel_transposes",))
    get_backend("cpu")  # restores this thread's number of threads
    assert re.search(r"the machine: was .*threads=\d+.*, is .*threads=1", str(e.value)), "the part that differs is shown"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["tactics"]["cpu/onednn_conv"].update(sources="0" * 64), "cpu/onednn_conv, sources"),
        (lambda d: d["tactics"]["cpu/onednn_conv"].update(library="onednn 9.9"), "cpu/onednn_conv, library: was onednn 9.9"),
        (lambda d: d["tactics"].update({"cpu/gone": {}}), "the tactic cpu/gone is gone"),
        (lambda d: d["arenas"][0].update(total=1), "the memory plan is another"),
        (lambda d: entry(d, "cpu/onednn_conv").update(implementation="other"), "locked is other"),
        (lambda d: d.update(digest="0"), "the lowered network is another"),
        (lambda d: d["layers"].pop(2), "that the lock does not have"),
        (lambda d: d.update(unfused=["nothing"]), "'nothing' is gone"),
    ],
)
def test_a_lock_that_cannot_be_kept_names_the_differences(plan_and_lock, tmp_path, change, message):
    data = json.loads(plan_and_lock[1].read_text())
    change(data)
    if "arenas" in message or "memory" in message:
        data["digest"] = "0"
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    with pytest.raises(LockError, match=message):
        locked(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "whet tactic lock"}', '{"format": "whet tactic lock", "version": 1}', "[" * 100_000])
def test_damaged_files_are_refused(tmp_path, text):
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(LockError):
        locked(path)


@pytest.mark.parametrize("key", ["layers", "tactics", "arenas", "profiles"])
def test_damaged_entries_are_refused(plan_and_lock, tmp_path, key):
    for wrong in (None, [1], {"a": 1}, [[]], "x"):
        data = json.loads(plan_and_lock[1].read_text())
        data[key] = wrong
        path = tmp_path / "lock.json"
        path.write_text(json.dumps(data))
        with pytest.raises(LockError):
            locked(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(LockError, match=r"save_lock\(plan, path\)"):
        locked(tmp_path / "none.json")
    with pytest.raises(LockError, match="cannot be written"):
        save_lock(build(residual(), dataclasses.replace(QUICK, optimization_level=0, verify=False)), tmp_path / "no" / "lock.json")


def test_deterministic_builds_use_only_deterministic_kernels(plant):
    planted = plant(lambda call: None)
    plan_it = planted.plan

    def varying(self, layer, signature, config, backend):
        kernel = plan_it(self, layer, signature, config, backend)
        kernel.deterministic = False
        return kernel

    planted.plan = varying
    config = dataclasses.replace(only(), optimization_level=0)  # nothing is timed: the planted tactic is listed first
    assert any(c.tactic == "cpu/planted" for c in build(residual(), config).choices.values())
    plan = build(residual(), dataclasses.replace(config, deterministic=True))
    assert all(c.deterministic for c in plan.choices.values())
    assert not any(c.tactic == "cpu/planted" for c in plan.choices.values())
    rows = [r for rows in plan.report.candidates.values() for r in rows]
    assert any("--deterministic" in r.reason for r in rows)
