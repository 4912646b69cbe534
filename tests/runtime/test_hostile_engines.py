"""Engines with valid checksums and hostile contents: stored configs and packed weights that no build writes."""

import dataclasses
import warnings
from functools import cache

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.engine import engine_bytes
from whet.errors import EngineError
from whet.network import parse_network
from whet.ops import OPS, run_network, sample_layer
from whet.runtime import EngineWarning, Runtime
from whet.runtime.memory import WeightStore
from whet.tactics import get_tactic, list_tactics

TEXT = """
network small source
in %x: f32[N,16,12,12]
const %w1: f32[32,16,3,3] = seed(1)
const %w2: f32[16,32,1,1] = seed(2)
%a = Conv(%x, %w1, pads=(1, 1, 1, 1)) from "conv1"
%b = Sigmoid(%a) from "sigmoid"
%c = Mul(%a, %b) from "silu"
%d = Conv(%c, %w2) from "conv2"
%y = Relu(%d) from "relu"
out %y
"""


@pytest.fixture(scope="module")
def network():
    return parse_network(TEXT)


@pytest.fixture(scope="module")
def plan(network):
    profile = tuple({"x": (n, 16, 12, 12)} for n in (1, 2, 4))
    return build(network, BuildConfig(optimization_level=1, timing_cache="", profiles=(profile,), threads=1))


def same_answers(engine, network):
    x = np.random.default_rng(1).standard_normal((2, 16, 12, 12)).astype("f4")
    np.testing.assert_allclose(engine.create_context().run({"x": x})["y"], run_network(network, {"x": x})["y"], rtol=1e-3, atol=1e-4)


def test_configs_of_the_builder_are_admitted_at_all_shapes(plan, network):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Runtime().load(engine_bytes(plan))
        for n in (1, 2, 3, 4):
            engine.create_context().run({"x": np.zeros((n, 16, 12, 12), "f4")})
    same_answers(engine, network)


@pytest.mark.parametrize("value", ["1 }\ndefine void @injected()", 10**9, -1, 0, True])
def test_other_configs_are_not_planned(plan, network, value, monkeypatch):
    """Whatever a layer's config says that its tactic does not list, the layer runs on a config that it lists."""
    name = next(n for n, c in plan.choices.items() if c.config)
    tactic = get_tactic(plan.choices[name].tactic)
    changed = tuple((k, value) for k, _ in plan.choices[name].config)
    seen, planned = [], type(tactic).plan
    monkeypatch.setattr(type(tactic), "plan", lambda *args: (seen.append(args[3]), planned(*args))[1])
    choices = plan.choices | {name: dataclasses.replace(plan.choices[name], config=changed)}
    with pytest.warns(EngineWarning, match="does not list the stored config"):
        engine = Runtime().load(dataclasses.replace(plan, choices=choices))
    assert changed not in seen
    same_answers(engine, network)


def kernels():
    """One kernel of each CPU tactic that computes a sample."""
    backend = get_backend("cpu", threads=1)
    samples_of = cache(lambda op: [sample_layer(op, sample)[:2] for sample in OPS[op].samples])
    for tactic in list_tactics("cpu"):
        for op in sorted({*tactic.ops, "Fused"} & set(OPS)):
            for _network, layer in samples_of(op):
                if tactic.why_not(layer) is None:
                    for s in tactic.signatures(layer, backend):
                        if tactic.refuses(layer, s, backend) is None:
                            yield tactic.name, tactic.plan(layer, s, tactic.configs(layer, s, backend)[0], backend)
                            break
                    else:
                        continue
                    break


def test_tables_of_indices_are_derived_never_stored():
    """A table with 1e9 in it crashed the process, one with 20000 read foreign memory: kernels address memory with it."""
    stored, derived = set(), set()
    for name, kernel in kernels():
        hostile = {p.key: np.full(p.nbytes, 0x7F, np.uint8) for p in kernel.packed if not p.storable}
        store = WeightStore(get_backend("cpu"), hostile)
        for p in kernel.packed:
            (stored if p.storable else derived).add(name)
            if not p.storable:
                held = store.packed(p)
                np.testing.assert_array_equal(held.buffer.array.reshape(-1).view(np.uint8)[: p.nbytes], p.make())
        assert not store.used_prepacked
    assert "cpu/onednn_conv" in stored
    if get_tactic("cpu/resized_conv").unavailable() is None:
        assert "cpu/resized_conv" in derived


def test_stored_packed_weights_are_probed(plan, network):
    packed = Runtime().load(plan).packed_weights()
    assert packed
    good = Runtime().load(engine_bytes(plan, packed_weights=packed))
    same_answers(good, network)
    key = max(packed, key=lambda k: packed[k].nbytes)
    bad = packed | {key: (packed[key].view(np.float32) * 1.5).view(np.uint8)}
    with pytest.raises(EngineError, match=r"gives other results with its packed weights .* write it without packed weights"):
        Runtime().load(engine_bytes(plan, packed_weights=bad))


def test_packed_weights_without_a_probe_are_not_used(plan, network):
    packed = {k: np.full_like(a, 0x3F) for k, a in Runtime().load(plan).packed_weights().items()}
    same_answers(Runtime().load(engine_bytes(dataclasses.replace(plan, probe={}), packed_weights=packed)), network)


def test_parts_of_a_view_are_where_its_kernel_needs_them():
    """Parts of a Concat in place may overlap its result, but only at their own offsets."""
    body = ["%a = Relu(%x)", "%b = Sigmoid(%x)", "%y = Concat(%a, %b, axis=1)", "%z = Exp(%y)"]
    lines = ["network parts source", "in %x: f32[1,16,8,8]", *body, "out %z"]
    net = parse_network("\n".join(lines) + "\n")
    plan = build(net, BuildConfig(optimization_level=0, timing_cache="", threads=1, passes=("none",)))
    name = next(n for n, c in plan.choices.items() if c.inplace and len(c.inplace) == 2)
    layer = next(x for x in plan.network.layers if x.name == name)
    Runtime().load(engine_bytes(plan))
    offsets = plan.arenas[0].offsets
    a, b = (t.name for t in layer.inputs)
    offsets[a], offsets[b] = offsets[b], offsets[a]
    with pytest.raises(EngineError, match="bytes apart in the arena"):
        Runtime().load(engine_bytes(plan))
