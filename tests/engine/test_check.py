"""The check of memory plans: buffers that overlap while live, exceed the arena or contradict the network are refused."""

import dataclasses

import pytest

from handmade import blocked_conv_net, conv_net, make_plan
from whet.engine.check import check_plan
from whet.errors import EngineError
from whet.network import Network, parse_type


def relu_chain(n=4):
    net = Network("chain", "lowered")
    t = net.add_input("x", parse_type("f32[4,16]"))
    for i in range(n):
        t = net.add("Relu", t, name=f"r{i}")
    net.mark_output(t)
    return make_plan(net)


def test_a_plan_by_hand_is_accepted():
    check_plan(make_plan(conv_net()))


def test_dead_bytes_may_be_reused_and_live_ones_not():
    plan = relu_chain()
    plan.arenas[0].offsets["r2"] = plan.arenas[0].offsets["r0"]
    check_plan(plan)
    plan = relu_chain()
    plan.arenas[0].offsets["r1"] = plan.arenas[0].offsets["r0"] + 64
    with pytest.raises(EngineError, match="%r0 and %r1 overlap in the arena"):
        check_plan(plan)


def test_a_residual_must_stay():
    plan = make_plan(conv_net())  # r1 is read again at the end
    plan.arenas[0].offsets["c2"] = plan.arenas[0].offsets["r1"]
    with pytest.raises(EngineError, match="%r1 and %c2 overlap in the arena"):
        check_plan(plan)


def in_place(plan, layer):
    plan.choices[layer] = dataclasses.replace(plan.choices[layer], inplace=((0, 0),))
    source = next(x for x in plan.network.layers if x.name == layer).inputs[0].name
    out = next(x for x in plan.network.layers if x.name == layer).outputs[0].name
    return source, out


def test_in_place_needs_the_same_bytes_and_the_last_reader():
    plan = relu_chain()
    source, out = in_place(plan, "r1")
    with pytest.raises(EngineError, match="works in place, but %r0 and %r1 do not share"):
        check_plan(plan)
    plan.arenas[0].offsets[out] = plan.arenas[0].offsets[source]
    check_plan(plan)
    plan = make_plan(conv_net())
    source, out = in_place(plan, "c2")  # r1 -> c2, but r1 is read later
    plan.arenas[0].offsets[out] = plan.arenas[0].offsets[source]
    with pytest.raises(EngineError, match="overlap in the arena"):
        check_plan(plan)


def test_a_view_may_be_live_together_with_its_source():
    net = Network("views", "lowered")
    x = net.add_input("x", parse_type("f32[4,16]"))
    a = net.add("Relu", x, name="a")
    v = net.add("Identity", a, name="v")
    net.mark_output(net.add("Add", a, v, name="y"))
    plan = make_plan(net)
    in_place(plan, "v")
    plan.arenas[0].offsets["v"] = plan.arenas[0].offsets["a"]
    check_plan(plan)


def test_a_transpose_may_be_live_together_with_its_source_only_if_the_formats_keep_the_bytes():
    net = Network("views", "lowered")
    a = net.add("Relu", net.add_input("x", parse_type("f32[1,4,3,2]")), name="a")
    v = net.add("Transpose", a, perm=(0, 2, 3, 1), name="v")
    net.mark_output(net.add("Relu", v, name="y"))
    net.mark_output(net.add("Relu", a, name="z"))
    plan = make_plan(net)
    in_place(plan, "v")
    plan.arenas[0].offsets["v"] = plan.arenas[0].offsets["a"]
    with pytest.raises(EngineError, match="%a and %v overlap in the arena while both are live"):
        check_plan(plan)
    last = ("nhwc", "f32")
    plan.choices["a"] = dataclasses.replace(plan.choices["a"], outputs=(last,))
    plan.choices["v"] = dataclasses.replace(plan.choices["v"], inputs=(last,))
    plan.choices["z"] = dataclasses.replace(plan.choices["z"], inputs=(last,))
    check_plan(plan)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a.offsets.update(y=-64), "outside of the arena"),
        (lambda a: a.offsets.update(y=a.total - 64), "outside of the arena"),
        (lambda a: a.offsets.update(y=10**30), "outside of the arena"),
        (lambda a: a.sizes.update(y=64), "takes 4096 bytes, the engine says 64"),
        (lambda a: a.offsets.pop("y"), "do not hold the same tensors: 'y'"),
        (lambda a: a.offsets.update(ghost=0), "do not hold the same tensors: 'ghost'"),
        (lambda a: setattr(a, "total", 10**15), "far more than its tensors"),
        (lambda a: setattr(a, "total", -1), "negative size"),
        (lambda a: setattr(a, "scratch_bytes", 64), "the scratch.*overlap in the arena"),
        (lambda a: (setattr(a, "scratch_bytes", 128), setattr(a, "scratch_offset", a.total - 64)), "the scratch is outside"),
    ],
)
def test_arenas_that_contradict(change, text):
    plan = make_plan(conv_net())
    change(plan.arenas[0])
    with pytest.raises(EngineError, match=text):
        check_plan(plan)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p.choices.pop("c1"), "'c1' has a layer but no choice"),
        (lambda p: p.choices.update(c9=p.choices["c1"]), "'c9' has a layer but no choice"),
        (lambda p: p.arenas.append(p.arenas[0]), "1 profiles and 2 arenas"),
        (lambda p: p.profiles[0].shapes.update(x=((1, 3, 8, 8), (9, 3, 8, 8), (4, 3, 8, 8))), "not in order"),
        (lambda p: p.profiles[0].shapes.update(x=((1, 3, 8), (2, 3, 8), (4, 3, 8))), "not of rank 4"),
        (lambda p: p.profiles[0].shapes.update(x=((1, 9, 8, 8), (2, 9, 8, 8), (4, 9, 8, 8))), "does not fit the network"),
        (lambda p: p.profiles[0].shapes.update(w=((1,), (1,), (1,))), "names the input 'w'"),
    ],
)
def test_plans_that_contradict(change, text):
    plan = make_plan(conv_net())
    change(plan)
    with pytest.raises(EngineError, match=text):
        check_plan(plan)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("inputs", (("linear", "f32"),), "another number of inputs"),
        ("inputs", (None, None), "does not say how %x is stored"),
        ("inputs", (("nhwc4", "f32"), None), "which is not supported"),
        ("outputs", (("linear", "float"),), "which is not supported"),
        ("outputs", (("nhwc", "f32"),), "it is stored as"),
        ("inplace", ((3, 0),), "in-place pair 3->0"),
        ("inplace", ((1, 0),), "in-place pair 1->0"),
    ],
)
def test_choices_that_contradict(field, value, text):
    plan = make_plan(conv_net())
    plan.choices["c1"] = dataclasses.replace(plan.choices["c1"], **{field: value})
    with pytest.raises(EngineError, match=text):
        check_plan(plan)


OTHER_TYPES = [("f32", "i8"), ("f32", "u8"), ("f32", "f64"), ("f16", "f32"), ("f16", "bf16"), ("i64", "i32"), ("i8", "u8")]


@pytest.mark.parametrize(("logical", "stored"), OTHER_TYPES)
def test_a_tensor_is_stored_in_its_own_type(logical, stored):
    net = Network("typed", "lowered")
    net.mark_output(net.add("Identity", net.add_input("x", parse_type(f"{logical}[4,16]")), name="y"))
    plan = make_plan(net)
    check_plan(plan)
    plan.choices["y"] = dataclasses.replace(plan.choices["y"], outputs=(("linear", stored),))
    with pytest.raises(EngineError, match=f"stores %y .* as {stored}:linear, which is not supported"):
        check_plan(plan)


def test_a_reformat_does_what_its_attributes_say():
    plan = make_plan(blocked_conv_net())
    check_plan(plan)
    layer = next(x for x in plan.network.layers if x.name == "to")
    layer.attrs["dtype"] = "f16"  # relabelled: the choice still stores f32
    with pytest.raises(EngineError, match=r"'to' reformats .*f16.*, its choice"):
        check_plan(plan)


def test_the_arena_may_have_64_kib_of_slack_per_tensor_and_one_more():
    plan = relu_chain()
    arena = plan.arenas[0]
    most = sum(arena.sizes.values()) + arena.scratch_bytes + (1 << 16) * (len(arena.sizes) + 1)
    arena.total = most
    check_plan(plan)
    arena.total = most + 1
    with pytest.raises(EngineError, match=f"the arena has {most + 1} bytes, far more"):
        check_plan(plan)


@pytest.mark.parametrize(("low", "accepted"), [(0, True), (-1, False)])
def test_a_profile_may_begin_at_an_empty_batch(low, accepted):
    plan = make_plan(blocked_conv_net())
    shape = plan.profiles[0].shapes["x"]
    plan.profiles[0].shapes["x"] = ((low, *shape[0][1:]), *shape[1:])
    if accepted:
        check_plan(plan)
    else:
        with pytest.raises(EngineError, match="not in order"):
            check_plan(plan)
