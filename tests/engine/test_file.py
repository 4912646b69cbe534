"""The engine file: writing is deterministic and lossless; damaged or hostile files raise EngineError and nothing else."""

import dataclasses
import errno
import os
import random

import numpy as np
import pytest

from handmade import PlainBackend, blocked_conv_net, conv_net, make_plan
from whet.engine import (
    Candidate,
    engine_bytes,
    engine_digest,
    engine_versions,
    make_probe,
    probe_inputs,
    probe_shapes,
    read_engine,
    weights,
    write_engine,
)
from whet.engine.check import check_plan
from whet.engine.report import BuildReport, PassFired, PassRecord
from whet.errors import EngineError
from whet.network import BF16, F16, F32, I4, Network, Origin, Weight, format_network, parse_type
from whet.ops import run_network
from whet.ops._origin import express, make_literal
from whet.runtime import Runtime


def full_plan():
    plan = make_plan(conv_net())
    y = run_network(plan.network, probe_inputs(plan.network, 3, probe_shapes(plan)))
    plan.probe = make_probe(plan, y, seed=3)
    plan.network.metadata["producer"] = "a test"
    plan.model_digest = "0" * 64
    plan.options = {"precisions": ("fp16",), "timing_cache": "/somewhere/else", "seed": 0}
    plan.report = BuildReport(
        candidates={"c1": [Candidate("cpu/numpy_reference", "(f32:linear,-)->(f32:linear)", (("k", 3), ("impl", "x")), "numpy", 1.5)]},
        cold_ms={"c1": [1.75]},
        passes=PassRecord(["a"], [PassFired("a", "c1", "did")], []),
        built="2026-01-01",
    )
    return plan


def test_round_trip(tmp_path):
    plan = full_plan()
    write_engine(plan, tmp_path / "a.engine")
    again = read_engine(tmp_path / "a.engine")
    assert format_network(again.network) == format_network(plan.network)
    for name in ("choices", "profiles", "arenas", "backend", "machine", "machine_key", "threads", "model_digest", "probe", "report"):
        assert getattr(again, name) == getattr(plan, name), name
    assert again.network.metadata == {"producer": "a test", "whet.sources": ""}
    assert again.options == {"precisions": ["fp16"], "seed": 0}
    origins = [str(t.weight.origin) for t in again.network.constants.values()]
    assert origins == ["Add(conv1.weight, bn1.weight)", "conv2.weight", "conv2.bias"]
    assert os.listdir(tmp_path) == ["a.engine"]
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype("f4")
    engine = Runtime(PlainBackend()).load(tmp_path / "a.engine")
    np.testing.assert_array_equal(engine.create_context().run({"x": x})["y"], run_network(plan.network, {"x": x})["y"])


def test_same_plan_same_bytes_and_digest():
    a, b = full_plan(), full_plan()
    b.choices = dict(reversed(b.choices.items()))
    b.report = BuildReport()
    b.options["timing_cache"] = "/another"
    assert engine_bytes(a) == engine_bytes(full_plan())
    assert engine_digest(a) == engine_digest(b) == engine_digest(read_engine(engine_bytes(a)))
    assert engine_versions(engine_bytes(b))["digest"] == engine_digest(a)
    b.threads += 1
    assert engine_digest(b) != engine_digest(a)


def test_constants_of_exact_operations_are_stored_by_their_sources():
    plan = make_plan(conv_net())
    data = engine_bytes(plan)
    w1 = plan.network.constants["w1"].array()
    assert w1.tobytes() not in data
    assert plan.source_weights["bn1.weight"].tobytes() in data
    plan.source_weights = {}
    again = read_engine(engine_bytes(plan))  # stored by value now
    np.testing.assert_array_equal(again.network.constants["w1"].array(), w1)
    assert w1.tobytes() in engine_bytes(plan)


def test_an_expression_that_gives_other_bytes_is_stored_by_value():
    plan = make_plan(conv_net())
    plan.source_weights["bn1.weight"] = plan.source_weights["bn1.weight"] + np.float32(1)
    again = read_engine(engine_bytes(plan))
    np.testing.assert_array_equal(again.network.constants["w1"].array(), plan.network.constants["w1"].array())


def quantized_plan(**options):
    """A plan whose only weight was quantized and dequantized; its network has the dequantized values alone."""
    net = Network("quantized", "lowered")
    rng = np.random.default_rng(0)
    values = Weight(rng.standard_normal((16, 8)).astype("f4"), Origin("source", "before quantization"))
    scale, zero = make_literal(np.linspace(0.01, 0.02, 16, dtype="f4")), make_literal(np.zeros(16, np.int8))
    small = express("QuantizeLinear", values, scale, zero, axis=0)
    turned = express("Transpose", express("DequantizeLinear", small, scale, zero, axis=0), perm=(1, 0))
    x = net.add_input("x", parse_type("f32[8,16]"))
    net.mark_output(net.add("Add", x, net.constant(turned, "w")), "y")
    plan = make_plan(net)
    plan.options = options
    plan.quantized_weights = [small]
    return plan, small.array, turned.array


def test_dequantized_constants_are_stored_as_their_integers():
    plan, integers, floats = quantized_plan()
    data = engine_bytes(plan)
    assert integers.tobytes() in data
    assert floats.tobytes() not in data
    for defer in (False, True):
        again = read_engine(data, defer=defer)
        np.testing.assert_array_equal(again.network.constants["w"].array(), floats)
        assert engine_bytes(again) == data, "an engine that was read keeps the integers"
    plan.quantized_weights = ()
    assert floats.tobytes() in engine_bytes(plan), "without the integers it is stored by value"


def test_integers_that_give_other_values_are_not_stored():
    plan, integers, floats = quantized_plan()
    plan.quantized_weights = [Weight(integers + np.int8(1), plan.quantized_weights[0].origin)]
    data = engine_bytes(plan)
    assert floats.tobytes() in data
    np.testing.assert_array_equal(read_engine(data).network.constants["w"].array(), floats)


def test_quantized_source_weights_are_stored_as_integers():
    plan, integers, floats = quantized_plan()
    plan.quantized_weights = ()
    sources = {"before quantization": np.random.default_rng(0).standard_normal((16, 8)).astype("f4")}
    plan.source_weights = sources
    data = engine_bytes(plan)
    assert integers.tobytes() in data
    assert floats.tobytes() not in data


@pytest.mark.parametrize("objective", ["latency", "size"])
def test_a_smaller_type_is_stored_by_value_for_the_size(objective):
    net = Network("casts", "lowered")
    wide = Weight(np.random.default_rng(0).standard_normal((16, 8)).astype("f4"), Origin("source", "w"))
    half = express("Cast", wide, to=F16)
    x = net.add_input("x", parse_type("f16[16,8]"))
    net.mark_output(net.add("Add", x, net.constant(half, "w16")), "y")
    plan = make_plan(net)
    plan.options, plan.source_weights = {"objective": objective}, {"w": wide.array}
    data = engine_bytes(plan)
    assert (wide.array.tobytes() in data, half.array.tobytes() in data) == ((True, False) if objective == "latency" else (False, True))
    np.testing.assert_array_equal(read_engine(data).network.constants["w16"].array(), half.array)


def test_origins_round_trip():
    net = Network("origins", "lowered")
    w = np.random.default_rng(0).standard_normal((4, 4)).astype("f4")
    plain = Origin("source", "w", assumes=("equal to v", "channels 1, 2 are zero"))
    turned = Origin("Transpose", args=(plain,), attrs=(("perm", (1, 0)),), assumes=("square",))
    odd = Origin("MatMul", args=(turned, Origin("literal", attrs=(("dtype", F32), ("shape", (1,)), ("values", (2.0,))))))
    x = net.add_input("x", parse_type("f32[4,4]"))
    for o, a in ((plain, w), (turned, np.ascontiguousarray(w.T)), (odd, w @ w)):
        x = net.add("Add", x, net.constant(Weight(a, o), "c"))
    net.mark_output(x, "y")
    plan = make_plan(net)
    again = read_engine(engine_bytes(plan))
    assert [t.weight.origin for t in again.network.constants.values()] == [plain, turned, odd]
    assert engine_digest(again) == engine_digest(plan)


def test_equal_weights_are_stored_once():
    net = Network("twice", "lowered")
    w = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    x = net.add_input("x", parse_type("f32[1,64]"))
    a = net.add("Add", x, net.constant(w.reshape(64, 64)[:1].copy(), "a"), name="s")
    for k in range(3):
        a = net.add("Mul", a, net.constant(w, f"w{k}"), name=f"m{k}")
    net.mark_output(a)
    data = engine_bytes(make_plan(net))
    assert data.count(w.tobytes()) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((0, 3), "f4"),
        lambda: np.float32(3),
        lambda: np.arange(100, dtype="i8"),
        lambda: np.array([True, False] * 20),
        lambda: np.arange(40).astype("f2"),
        lambda: np.array([np.nan, np.inf, -0.0], "f4"),
        lambda: np.arange(40).astype(BF16.numpy),
        lambda: np.arange(-8, 8).astype(I4.numpy),
    ],
)
def test_weights_of_every_kind(make):
    a = np.asarray(make())
    net = Network("kinds", "lowered")
    net.add_input("x", parse_type("f32[1]"))
    net.mark_output(net.add("Identity", net.constant(Weight(a, Origin("source", 'odd "name"\n'))), name="y"))
    got = read_engine(engine_bytes(make_plan(net))).network.constants["const"].weight
    assert got.array.dtype == a.dtype
    assert got.array.tobytes() == a.tobytes()
    assert got.origin.name == 'odd "name"\n'


def test_unusual_names_round_trip():
    net = Network('a "net"', "lowered")
    x = net.add_input("in:0 %,(", parse_type("f32[2]"))
    net.mark_output(net.add("Relu", x, name="r\u2028\x1e12345678901234567890123", sources=["n(1), = {", 'q"']))
    again = read_engine(engine_bytes(make_plan(net)))
    assert format_network(again.network) == format_network(net)


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.engine"
    path.write_bytes(b"old")

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match="No space left on device; the target is unchanged"):
        write_engine(full_plan(), path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.engine"]
    with pytest.raises(EngineError, match="No such file or directory"):
        write_engine(full_plan(), tmp_path / "none" / "a.engine")


def test_an_inconsistent_plan_is_not_written(tmp_path):
    plan = full_plan()
    plan.arenas[0].sizes["y"] = 1
    with pytest.raises(EngineError, match="%y takes"):
        write_engine(plan, tmp_path / "a.engine")
    assert not os.listdir(tmp_path)


def test_files_other_than_engines(tmp_path):
    with pytest.raises(EngineError, match=r"cannot open .*none.*No such file"):
        read_engine(tmp_path / "none")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(EngineError, match="0 bytes are fewer"):
        read_engine(tmp_path / "empty")
    with pytest.raises(EngineError, match="not an engine of whet, but a truncated zip archive"):
        read_engine(b"PK\3\4" + bytes(200))
    with pytest.raises(EngineError, match=r"cannot open .* it is not a file"):
        read_engine(tmp_path)
    with pytest.raises(EngineError, match="it is not a file"):
        read_engine("/dev/zero")


def test_other_versions_are_named():
    data = bytearray(engine_bytes(full_plan()))
    data[8] = 1
    with pytest.raises(EngineError, match="format version 1, this whet reads 4: build it again"):
        read_engine(data)


def test_every_flipped_bit_and_every_truncation_is_found():
    data = engine_bytes(make_plan(blocked_conv_net()))
    rng = random.Random(0)
    for at in [*range(64), *(rng.randrange(len(data)) for _ in range(600))]:
        bad = bytearray(data)
        bad[at] ^= 1 << rng.randrange(8)
        with pytest.raises(EngineError):
            read_engine(bad)
    for cut in [*range(0, 200, 7), *(rng.randrange(len(data)) for _ in range(100))]:
        with pytest.raises(EngineError):
            read_engine(data[:cut])
    with pytest.raises(EngineError, match="truncated or extended"):
        read_engine(data + bytes(64))


def test_packed_weights_are_stored(tmp_path):
    plan = full_plan()
    packed = {"k2": np.arange(100, dtype=np.uint8), "k1": np.arange(7, dtype=np.uint8)}
    write_engine(plan, tmp_path / "a", packed_weights=packed)
    again = read_engine(tmp_path / "a")
    assert {k: v.tolist() for k, v in again.packed.items()} == {k: v.tolist() for k, v in packed.items()}
    digest = engine_versions(tmp_path / "a")["digest"]
    assert digest == engine_digest(again) == engine_digest(plan, packed_weights=packed) != engine_digest(plan)
    write_engine(again, tmp_path / "b")  # a plan from a file keeps its packed weights
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    other = dict(packed, k1=packed["k1"][::-1])
    assert engine_versions(engine_bytes(plan, packed_weights=other))["digest"] != digest


def test_mapped_weights_do_not_copy_the_file(tmp_path):
    net = Network("large", "lowered")
    w = np.ones((4096, 1024), "f4")
    net.mark_output(net.add("Add", net.add_input("x", parse_type("f32[4096,1024]")), net.constant(w, "w"), name="y"))
    write_engine(make_plan(net), tmp_path / "a")
    again = read_engine(tmp_path / "a").network.constants["w"].array()
    base = again
    while isinstance(base, np.ndarray):
        base = base.base
    assert "mmap" in repr(base.obj if isinstance(base, memoryview) else base)
    assert again.ctypes.data % 64 == 0


def test_loaded_plans_pass_the_check():
    for make in (conv_net, blocked_conv_net):
        check_plan(read_engine(engine_bytes(make_plan(make()))))


def test_a_time_that_is_not_finite_becomes_none():
    plan = full_plan()
    plan.report.candidates["c1"].append(dataclasses.replace(plan.report.candidates["c1"][0], ms=float("nan"), reason="why"))
    again = read_engine(engine_bytes(plan))
    assert again.report.candidates["c1"][1].ms is None


def test_findings_are_stored_separately_from_warnings():
    plan = full_plan()
    assert read_engine(engine_bytes(plan)).report.info == []
    plan.report.info, plan.report.notes = ["INT8 pays"], ["a busy machine"]
    again = read_engine(engine_bytes(plan)).report
    assert (again.info, again.notes) == (["INT8 pays"], ["a busy machine"])
    plan.report.info = [3]
    with pytest.raises(EngineError):
        read_engine(engine_bytes(plan))


def test_a_plan_that_cannot_be_read_back_is_refused_and_leaves_no_file(tmp_path):
    plan = make_plan(conv_net())
    plan.model_digest = "0" * 300  # the reader allows 200 characters
    with pytest.raises(EngineError, match="cannot be read back"):
        write_engine(plan, tmp_path / "e.engine")
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read_back_without_evaluating_it_again(tmp_path, monkeypatch):
    """Arrays are compared by digest, expressions by their text; a difference in either is found."""
    w = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    net = Network("turned", "lowered")
    turned = net.constant(Weight(np.ascontiguousarray(w.T), Origin("Transpose", args=(Origin("source", "w"),), attrs=(("perm", (1, 0)),))), "turned")
    net.mark_output(net.add("MatMul", net.add("MatMul", net.add_input("x", parse_type("f32[64,64]")), turned), net.constant(w, "v")), "y")
    net.source = {"w": w}
    plan = make_plan(net)
    applied, apply, parse = [], weights.apply_op, weights.parse_value
    monkeypatch.setattr(weights, "apply_op", lambda *args: applied.append(args[0]) or apply(*args))
    write_engine(plan, tmp_path / "a.engine")
    assert applied == ["Transpose"], "once, by the writer"
    read_engine(tmp_path / "a.engine")
    assert applied == ["Transpose"] * 2
    with monkeypatch.context() as m:
        m.setattr(weights, "parse_value", lambda text: tuple(reversed(parse(text))))
        with pytest.raises(EngineError, match="cannot be read back"):
            write_engine(plan, tmp_path / "b.engine")
    plan.network.constants["v"].weight.__dict__["digest"] = "0" * 64
    with pytest.raises(EngineError, match=r"cannot be read back: .*digest"):
        write_engine(plan, tmp_path / "c.engine")
    assert [p.name for p in tmp_path.iterdir()] == ["a.engine"]


def test_a_folder_is_no_engine_file(tmp_path):
    with pytest.raises(EngineError, match=r"the target is unchanged\. It is a folder: add a file name"):
        write_engine(make_plan(conv_net()), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "released").mkdir()
    (tmp_path / "current.engine").symlink_to("released/v1.engine")
    write_engine(make_plan(conv_net()), tmp_path / "current.engine")
    assert (tmp_path / "current.engine").is_symlink()
    assert read_engine(tmp_path / "released" / "v1.engine").choices
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["current.engine", "released", "v1.engine"]


@pytest.mark.parametrize("name", ["ä" * 127, "x" * 255])
def test_the_longest_name_of_an_engine_that_a_file_system_takes(tmp_path, name):
    write_engine(make_plan(conv_net()), tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
