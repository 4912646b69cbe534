"""Records of engine files that were verified on this machine: the next load of the same file does not run its probe again."""

import dataclasses
import os
import warnings

import numpy as np
import pytest

from whet.builder import BuildConfig, build
from whet.engine import read_engine, write_engine
from whet.engine.probe import probe_differs
from whet.errors import EngineError
from whet.network import parse_network
from whet.runtime import EngineWarning, Runtime, verified
from whet.runtime import engine as engine_module
from whet.runtime.kernels import ConfigCheck

TEXT = """
network small source
in %x: f32[1,16,12,12]
const %w: f32[32,16,3,3] = seed(1)
%a = Conv(%x, %w, pads=(1, 1, 1, 1)) from "conv"
%y = Relu(%a) from "relu"
out %y
"""
X = {"x": np.random.default_rng(0).standard_normal((1, 16, 12, 12)).astype(np.float32)}


@pytest.fixture(scope="module")
def plan():
    return build(parse_network(TEXT), BuildConfig(optimization_level=0, timing_cache="", threads=1))


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """The outputs that probes stored, one for each load that ran its probe; records are in a folder of the test's own."""
    monkeypatch.setenv(verified.VARIABLE, str(tmp_path / "verified"))
    probed = []
    monkeypatch.setattr(engine_module, "probe_differs", lambda probe, outputs: probed.append(probe) or probe_differs(probe, outputs))
    return probed


@pytest.fixture
def file(plan, tmp_path):
    packed = Runtime().load(plan).packed_weights()
    assert packed
    write_engine(plan, tmp_path / "a.engine", packed_weights=packed)
    return tmp_path / "a.engine"


def test_a_verified_file_is_not_probed_again(file, probes, monkeypatch):
    first = Runtime().load(file)
    assert len(probes) == 1
    monkeypatch.setattr(ConfigCheck, "explain_refusal", lambda *args: pytest.fail("the stored configs were admitted before"))
    second = Runtime().load(file)
    assert len(probes) == 1
    np.testing.assert_array_equal(first.run(X)["y"], second.run(X)["y"])
    third = Runtime().load(file.read_bytes())
    assert len(probes) == 1, f"{third}: the same bytes, not the same path"


def test_another_file_another_version_and_another_machine_are_probed(file, probes, plan, monkeypatch):
    Runtime().load(file)
    packed = {k: np.array(a) for k, a in read_engine(file).packed.items()}
    key = max(packed, key=lambda k: packed[k].nbytes)
    packed[key].view(np.float32)[0] += 1e-6
    write_engine(plan, file, packed_weights=packed)
    Runtime().load(file)
    assert len(probes) == 2, "another file"
    Runtime().load(file)
    assert len(probes) == 2
    monkeypatch.setattr(verified, "digest_source_files", lambda: "other sources")
    Runtime().load(file)
    assert len(probes) == 3, "another version of whet"
    write_engine(dataclasses.replace(plan, machine_key="another machine"), file)
    for _ in range(2):
        with pytest.warns(EngineWarning, match="tuned elsewhere"):
            Runtime().load(file)
    assert len(probes) == 4, "an engine of another machine is verified here once"


def test_damaged_packed_weights_are_found_with_a_record(file, probes):
    Runtime().load(file)
    plan = read_engine(file)
    data = bytearray(file.read_bytes())
    packed = max(plan.packed.values(), key=lambda a: a.nbytes).tobytes()
    data[data.index(packed) + 5] ^= 1
    with pytest.raises(EngineError, match=r"the packed weight .* is damaged"):
        Runtime().load(bytes(data))


def test_an_engine_that_fails_its_probe_or_falls_back_is_not_recorded(file, probes, plan):
    packed = {k: a.copy() for k, a in read_engine(file).packed.items()}
    key = max(packed, key=lambda k: packed[k].nbytes)
    packed[key] = (packed[key].view(np.float32) * 1.5).view(np.uint8)
    write_engine(plan, file, packed_weights=packed)
    for _ in range(2):
        with pytest.raises(EngineError, match="gives other results with its packed weights"):
            Runtime().load(file)
    name = next(n for n, c in plan.choices.items() if c.config)
    choices = plan.choices | {name: dataclasses.replace(plan.choices[name], config=(("impl", "unknown"),))}
    write_engine(dataclasses.replace(plan, choices=choices, machine_key="another machine"), file)
    for _ in range(2):
        with pytest.warns(EngineWarning) as seen:
            Runtime().load(file)
        assert any("does not list the stored config" in str(w.message) for w in seen)
    assert len(probes) == 4


def test_a_plan_that_may_have_been_changed_is_probed(file, probes):
    """A plan in memory can differ from the file that it was read from."""
    Runtime().load(file)
    Runtime().load(read_engine(file))
    assert len(probes) == 2


def test_records_can_be_turned_off(file, probes, monkeypatch):
    monkeypatch.setenv(verified.VARIABLE, "0")
    Runtime().load(file)
    Runtime().load(file)
    assert len(probes) == 2


def test_a_folder_that_others_can_write_to_is_not_used(file, probes, tmp_path):
    folder = tmp_path / "verified"
    folder.mkdir()
    os.chmod(folder, 0o777)
    for _ in range(2):
        Runtime().load(file)
    assert len(probes) == 2
    assert not list(folder.iterdir())


def test_the_first_call_uses_the_launches_of_the_probe(file, probes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Runtime().load(file)
    (context,) = engine._pool.idle
    bound = context.launches()
    engine.run(X)
    assert engine._pool.idle == [context]
    assert context.launches() is bound


def test_a_report_is_read_when_it_is_used(file):
    plan, whole = read_engine(file, defer=True), read_engine(file)
    assert type(plan.report) is not type(whole.report)
    assert plan.report == whole.report
    assert type(plan.report) is type(whole.report)
