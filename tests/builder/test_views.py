"""Concat, Split and Slice as views: parts have the offsets of the format, no live value is overwritten, results are unchanged."""

import dataclasses

import numpy as np
import pytest
from nets import inputs

from support.selection import with_long_variants
from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.memory.byte_groups import Groups
from whet.builder.memory.planner import Use, plan_memory
from whet.engine import EnginePlan, read_engine, write_engine
from whet.engine.check import check_plan
from whet.errors import EngineError
from whet.network import Network, evaluate, parse_network, parse_type, to_stored
from whet.ops import run_layer, run_network
from whet.runtime import Runtime, bind
from whet.tactics import Args, get_tactic, load_tactics

load_tactics("cpu")
CPU = get_backend("cpu")
QUICK = BuildConfig(timing_cache="", avg_timing=1, whole_engines=3)
BLOCKS_OF_8 = int("avx512f" not in CPU.capabilities.features)  # oneDNN's blocked format has 8 channels on AVX2, 16 on AVX-512


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "count"),
    [
        ("Concat", [(1, 32, 4, 4), (1, 16, 4, 4)], {"axis": 1}, 2),  # row-major and blocked; in channels-last formats parts are interleaved
        ("Concat", [(1, 32, 4, 4), (1, 24, 4, 4)], {"axis": 1}, 2),  # the last block is padded in the part as in the whole
        ("Concat", [(1, 24, 4, 4), (1, 16, 4, 4)], {"axis": 1}, 1 + BLOCKS_OF_8),  # a block of 16 would hold channels of both
        ("Concat", [(2, 32, 4, 4), (2, 16, 4, 4)], {"axis": 1}, 0),  # two batch items
        ("Concat", [(2, 16, 4, 4), (1, 16, 4, 4)], {"axis": 0}, 3),
        ("Concat", [(1, 3, 1, 1), (1, 5, 1, 1)], {"axis": 1}, 0),  # would not start at a multiple of 64 bytes
        ("Split", [(1, 48, 4, 4)], {"axis": 1, "split": (32, 16)}, 2),
        ("Split", [(16, 4)], {"axis": 0, "num_outputs": 2}, 1),
        ("Slice", [(1, 64, 4, 4)], {"starts": (16,), "ends": (48,), "axes": (1,)}, 2),
        ("Slice", [(1, 64, 4, 4)], {"starts": (16,), "ends": (40,), "axes": (1,)}, 1 + BLOCKS_OF_8),  # the rest of a block of 16 would not be zero
        ("Slice", [(1, 64, 4, 4)], {"starts": (0,), "ends": (64,), "axes": (1,), "steps": (2,)}, 0),
    ],
)
def test_parts_have_the_offsets_of_the_format(op, shapes, attrs, count):
    rng, net = np.random.default_rng(0), Network("net", "lowered")
    layer = net.add_layer(op, [net.add_input(f"x{i}", parse_type(f"f32[{','.join(map(str, s))}]")) for i, s in enumerate(shapes)], attrs)
    arrays = [rng.standard_normal(s).astype("f4") for s in shapes]
    outs = run_layer(layer, list(arrays))
    tactic = get_tactic("cpu/part_view")
    found = [s for s in tactic.signatures(layer, CPU) if s.outputs[0].dtype.name == "f32"]
    assert len(found) == count
    for s in found:
        kernel = tactic.plan(layer, s, (), CPU)
        for (i, j), shift in zip(s.inplace, kernel.shifts, strict=True):
            f = s.outputs[j].format
            whole, part = (outs[j], arrays[i]) if op == "Concat" else (arrays[i], outs[j])
            raw, piece = (to_stored(a, f).reshape(-1).view(np.uint8) for a in (whole, part))
            assert np.array_equal(raw[shift : shift + piece.size], piece)


def test_a_part_at_another_address_is_refused_at_launch():
    net = Network("net", "lowered")
    layer = net.add_layer("Concat", [net.add_input(n, parse_type("f32[16,4]")) for n in "ab"], {"axis": 0})
    tactic = get_tactic("cpu/part_view")
    kernel = tactic.plan(layer, tactic.signatures(layer, CPU)[0], (), CPU)
    assert kernel.shifts == (0, 256)
    kernel.enqueue(Args((640, 896), (640,), (), 0), None)
    with pytest.raises(EngineError, match="part 1->0 is not at offset 256 of the whole"):
        kernel.enqueue(Args((640, 960), (640,), (), 0), None)


def test_groups_keep_offsets_and_refuse_contradictions():
    g = Groups()
    for name, size in (("a", 10), ("b", 20), ("ab", 30), ("c", 5), ("abc", 35), ("ba", 30)):
        g.add(name, size)
    assert g.join("a", "ab", 0)
    assert g.join("b", "ab", 10)
    assert g.join("a", "abc", 0)  # a prefix of another Concat has the same offset
    assert g.join("b", "abc", 10)
    assert g.join("c", "abc", 30)
    assert [g.offset(n) for n in ("a", "b", "ab", "c", "abc")] == [0, 10, 0, 30, 0]
    assert g.get_extent(g.root("c")) == 35
    assert g.join("b", "ba", 0) is True
    assert g.offset("ba") == g.offset("b") == 10
    assert g.get_extent(g.root("ba")) == 40
    assert g.join("a", "ba", 20) is False


def test_the_arena_holds_parts_inside_their_concat():
    uses = [
        Use("a", (("x", 64),), (("a", 640),)),
        Use("b", (("a", 640),), (("b", 1280),)),
        Use("ab", (("a", 640), ("b", 1280)), (("ab", 1920),), ((0, 0), (1, 0)), shifts=(0, 640)),
        Use("c", (("ab", 1920),), (("c", 64),)),
        Use("abc", (("ab", 1920), ("c", 64)), (("abc", 1984),), ((0, 0), (1, 0)), shifts=(0, 1920)),
        Use("y", (("abc", 1984),), (("y", 64),)),
    ]
    plan = plan_memory(uses, {"x": 64}, ["y"])
    at = plan.offsets
    assert (at["b"] - at["a"], at["ab"] - at["a"], at["c"] - at["a"], at["abc"] - at["a"]) == (640, 0, 1920, 0)
    assert plan.total == 1984 + 2 * 64


def dense(seed: int, wide: bool = False) -> Network:
    """Random Convs, Relus, Adds, Concats and Splits over values with later readers: views that nest, share parts and conflict."""
    rng, net = np.random.default_rng(seed), Network(f"dense_{seed}")
    x = net.add_input("x", parse_type("f32[1,16,6,6]"))
    values = [net.add("Relu", x), net.add("Neg", x)]

    def conv(v, out):
        w = net.constant((rng.standard_normal((out, v.shape[1], 1, 1)) / np.sqrt(v.shape[1])).astype("f4"), "w")
        return net.add("Conv", v, w)

    for _ in range(12):
        kind, v = rng.integers(6), values[rng.integers(len(values))]
        if kind == 0:
            values.append(conv(v, int(rng.choice([16, 32, 24]))))
        elif kind == 1:
            values.append(net.add("Relu", v))
        elif kind == 2:
            same = [o for o in values if o.shape == v.shape and o is not v]
            if same:
                values.append(net.add("Add", conv(v, v.shape[1]), same[rng.integers(len(same))]))
        elif kind == 3 and v.shape[1] % 32 == 0:
            values.extend(net.add("Split", v, axis=1, num_outputs=2))
        else:
            parts = [values[i] for i in rng.choice(len(values), min(len(values), int(rng.integers(2, 4))), replace=False)]
            values.append(net.add("Concat", *parts, axis=1))
    for i, v in enumerate(values[-2:]):
        net.mark_output(v, f"y{i}")
    return net


def check_two_runs(net: Network, plan: EnginePlan) -> None:
    """Compares both of two runs with the reference: the second one overwrites the values of the first."""
    feed = inputs(net)
    bound = bind(plan, CPU)
    for _ in range(2):
        bound.feed(feed)
        bound.run()
        for (name, want), got in zip(run_network(net, feed, widen=True).items(), bound.fetch().values(), strict=True):
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), name


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("seed", with_long_variants(range(14), every=2))
def test_random_networks_of_views_keep_their_results(seed, level):
    net = dense(seed)
    plan = build(net, dataclasses.replace(QUICK, optimization_level=level))
    check_plan(plan)
    check_two_runs(net, plan)


def test_views_are_used_if_possible_and_copies_on_conflict():
    kept = copied = 0
    for seed in range(10):
        plan = build(dense(seed), dataclasses.replace(QUICK, optimization_level=0, verify=False))
        concats = [plan.choices[x.name].tactic for x in plan.network.layers if x.op in ("Concat", "Split")]
        kept += concats.count("cpu/part_view")
        copied += len(concats) - concats.count("cpu/part_view")
    assert kept > 5
    assert copied > 5


@pytest.mark.parametrize("start", [0, 4])
def test_a_slice_that_is_contiguous_for_one_sample_is_no_view_of_a_dynamic_batch(start):
    """GPT-2 and Swin with a dynamic batch did not build: the first rows of one sample are contiguous, those of more samples are not."""
    net = parse_network(f"""network sliced source
in %x: f32[N,8,16]
const %s: i64[1] = [{start}]
const %e: i64[1] = [{start + 4}]
const %a: i64[1] = [1]
%r = Relu(%x)
%p = Slice(%r, %s, %e, %a)
%y = Sigmoid(%p)
out %y
""")
    profile = ({"x": (1, 8, 16)}, {"x": (1, 8, 16)}, {"x": (4, 8, 16)})
    plan = build(net, dataclasses.replace(QUICK, optimization_level=0, profiles=(profile,)))
    with Runtime().load(plan) as engine:
        for n in (1, 2, 4):
            x = np.random.default_rng(n).standard_normal((n, 8, 16)).astype("f4")
            want = 1 / (1 + np.exp(-np.maximum(x, 0)[:, start : start + 4]))
            np.testing.assert_allclose(engine.create_context().run({"x": x})["y"], want, rtol=1e-5, atol=1e-6)


def test_an_engine_with_views_is_saved_and_loaded(tmp_path):
    net = dense(3)
    plan: EnginePlan = build(net, dataclasses.replace(QUICK, optimization_level=0))
    assert any(c.tactic == "cpu/part_view" for c in plan.choices.values())
    write_engine(plan, tmp_path / "e.engine")
    again = read_engine(tmp_path / "e.engine")
    feed, outs = inputs(net), []
    for p in (plan, again):
        bound = bind(p, CPU)
        bound.feed(feed)
        bound.run()
        outs.append(bound.fetch())
    for a, b in zip(outs[0].values(), outs[1].values(), strict=True):
        np.testing.assert_array_equal(a, b)


def channels_last(seed: int) -> Network:
    """Random ConvNeXt-like blocks: convolutions, and layers on transposed values in between, whose inputs may have later readers."""
    rng, net = np.random.default_rng(seed), Network(f"channels_last_{seed}")

    def weight(*shape):
        return net.constant((rng.standard_normal(shape) / 4).astype("f4"), "w")

    values = [net.add("Conv", net.add_input("x", parse_type("f32[2,16,6,6]")), weight(16, 16, 1, 1))]
    for _ in range(4):
        v = values[rng.integers(len(values))]
        y = net.add("Transpose", net.add("Conv", v, weight(16, 1, 3, 3), group=16, pads=(1, 1, 1, 1)), perm=(0, 2, 3, 1))
        if rng.integers(2):
            y = net.add("LayerNormalization", y, weight(16), weight(16), axis=-1)
        z = net.add("MatMul", net.add("Gelu", net.add("MatMul", y, weight(16, 32))), weight(32, 16))
        z = net.add("Add", y, z) if rng.integers(2) else z
        values.append(net.add("Add", v, net.add("Mul", net.add("Transpose", z, perm=(0, 3, 1, 2)), weight(16, 1, 1))))
        if not rng.integers(3):
            values.append(net.add("Relu", y.maker.inputs[0] if y.maker.op == "Transpose" else values[-1]))
    for i, v in enumerate(values[-2:]):
        net.mark_output(v, f"y{i}")
    return net


def test_transposes_to_and_from_channels_last_cost_nothing():
    views = 0
    for seed in range(6):
        net = channels_last(seed)
        plan = build(net, dataclasses.replace(QUICK, optimization_level=0, verify=False))
        check_plan(plan)
        views += sum(bool(plan.choices[x.name].inplace) for x in plan.network.layers if x.op == "Transpose")
        check_two_runs(net, plan)
    assert views >= 6


def reshaped(seed: int) -> Network:
    """Random products, Relus, Negs, Adds and Reshapes over values with later readers: kernels that work in place meet values with two shapes."""
    rng, net = np.random.default_rng(seed), Network(f"reshaped_{seed}")
    x = net.add_input("x", parse_type("f32[8,64]"))
    values = [net.add("Relu", x), net.add("MatMul", x, net.constant((rng.standard_normal((64, 64)) / 8).astype("f4"), "w"))]
    for _ in range(14):
        kind, v = rng.integers(5), values[rng.integers(max(0, len(values) - 6), len(values))]
        if kind <= 1:
            values.append(net.add("Reshape", v, shape=(32, 16) if v.shape == (8, 64) else (8, 64)))
        elif kind == 2:
            values.append(net.add("Relu" if rng.integers(2) else "Neg", v))
        elif kind == 3:
            w = (rng.standard_normal((v.shape[1], v.shape[1])) / np.sqrt(v.shape[1])).astype("f4")
            values.append(net.add("MatMul", v, net.constant(w, "w")))
        else:
            same = [o for o in values if o.shape == v.shape]
            values.append(net.add("Add", v, same[rng.integers(len(same))]))
    for i, v in enumerate(values[-2:]):
        net.mark_output(v, f"y{i}")
    return net


def test_values_with_two_shapes_share_bytes_while_both_are_read():
    read_later = 0
    for seed in range(10):
        net = reshaped(seed)
        plan = build(net, dataclasses.replace(QUICK, optimization_level=0, verify=False))
        check_plan(plan)
        layers = plan.network.layers
        for k, layer in enumerate(layers):
            if layer.op == "Reshape" and plan.choices[layer.name].inplace:
                read_later += any(layer.inputs[0] in later.inputs for later in layers[k + 1 :])
        check_two_runs(net, plan)
    assert read_later >= 3


def only_at_one(kind: str) -> Network:
    """A network with a value whose bytes stay in place if the symbol N is 1."""
    rng, net = np.random.default_rng(0), Network("one")
    if kind == "transpose":  # of the batch with another axis
        x = net.add_input("x", parse_type("f32[N,8,4]"))
        y = net.add("Transpose", net.add("Relu", x), perm=(1, 0, 2))
    elif kind == "reshape":  # channels last are row-major if an image has one pixel
        x = net.add_input("x", parse_type("f32[1,16,N,1]"))
        w = net.constant(rng.standard_normal((16, 16, 1, 1)).astype("f4"), "w")
        size = net.constant(np.array([1, 16, -1]), "size")
        y = net.add("Reshape", net.add("Conv", net.add("Conv", x, w), w), size)
    else:  # a reformat between the convolutions and the output
        x = net.add_input("x", parse_type("f32[1,16,N,1]"))
        w = net.constant(rng.standard_normal((16, 16, 1, 1)).astype("f4"), "w")
        y = net.add("Conv", net.add("Relu", net.add("Conv", x, w)), w)
    net.mark_output(net.add("Neg", y), "y")
    return net


@pytest.mark.parametrize("kind", ["transpose", "reshape", "reformat"])
def test_a_view_at_the_opt_shape_only_is_refused(kind):
    net = only_at_one(kind)
    shapes = [{"x": tuple(evaluate(d, {"N": n}) for d in net.inputs[0].shape)} for n in (1, 1, 5)]
    plan = build(net, dataclasses.replace(QUICK, optimization_level=0, profiles=(tuple(shapes),)))
    for given in (shapes[0], shapes[2]):
        feed = {"x": np.random.default_rng(0).standard_normal(given["x"]).astype("f4")}
        bound = bind(plan, CPU, given)
        assert [s.layer.name for s in bound.shaped.steps if s.tactic == "safe reference"] == []
        bound.feed(feed)
        bound.run()
        np.testing.assert_allclose(bound.fetch()["y"], run_network(net, feed)["y"], rtol=1e-5, atol=1e-5)
