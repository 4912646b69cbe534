"""The driver of passes: names, sources, order, switches, refusals, regions, and the pass named in errors."""

import numpy as np
import pytest
from random_networks import feeds, same

from support.python_calls import count_calls
from whet.errors import BuildError, NetworkError, UsageError
from whet.network import F16, F32, Network, TensorType, parse_network, verify
from whet.ops import OPS, run_network
from whet.passes import PASSES, Fired, Graph, Pass, Phase, Skip, lower, order_passes, run_passes, select
from whet.passes._widen import widen_floats
from whet.passes.clean.fold_shapes import SIZES
from whet.rewrite.fusing import ACTIVATIONS
from whet.rewrite.rules import register

RESIDUAL = """
in %x: f32[N,4,8,8]
const %w: f32[4,4,3,3] = seed(1)
const %v: f32[4] = [1.0, 2.0, 3.0, 4.0]
%c = Conv(%x, %w, pads=(1, 1, 1, 1)) named conv1 from "conv1"
%b = BatchNormalization(%c, %v, %v, %v, %v) named bn1 from "bn1"
%a = Add(%b, %x) named add1 from "add1"
%y = Relu(%a) named relu1 from "relu1"
out %y
"""


def test_a_fused_layer_has_the_names_and_sources_of_its_parts():
    net, log = lower(parse_network(RESIDUAL), check=True)
    (layer,) = net.layers
    assert layer.name == "conv1 + bn1 + add1 + relu1"
    assert layer.sources == ("conv1", "bn1", "add1", "relu1")
    assert [t.name for t in net.outputs] == ["y"]
    body = layer.regions["body"]
    assert [x.op for x in body.layers] == ["Conv", "Add", "Relu"]
    assert body.layers[0].sources == ("conv1", "bn1")
    assert len(body.inputs) == len(layer.inputs)
    assert log.skipped == {}
    assert [f[0] for f in log.fired if f[0].startswith("fuse")] == ["fuse_conv_add", "fuse_conv_activation"]


def test_the_source_network_is_unchanged():
    net = parse_network(RESIDUAL)
    text = str(net)
    lower(net)
    assert str(net) == text
    assert net.stage == "source"


def test_lowering_twice_is_refused():
    net, _ = lower(parse_network(RESIDUAL))
    with pytest.raises(NetworkError, match="lowered already"):
        lower(net)


def test_no_passes_means_no_change():
    net, log = lower(parse_network(RESIDUAL), switches=["none"])
    assert str(net).splitlines()[1:] == str(parse_network(RESIDUAL)).splitlines()[1:]
    assert log.fired == []


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["conv1"], ["conv1", "bn1", "add1 + relu1"]),
        (["relu1"], ["conv1 + bn1 + add1", "relu1"]),
        (["bn*"], ["conv1", "bn1", "add1 + relu1"]),
        (["add1"], ["conv1 + bn1", "add1", "relu1"]),
        (["*1"], ["conv1", "bn1", "add1", "relu1"]),
        (["conv1", "add1"], ["conv1", "bn1", "add1", "relu1"]),
    ],
)
def test_no_fuse_keeps_nodes_unfused(names, left):
    net, log = lower(parse_network(RESIDUAL), no_fuse=names, check=True)
    assert [x.name for x in net.layers] == left
    assert any("--noFuse names" in why for why in log.skipped.values())


def test_no_fuse_of_an_unknown_node_suggests_the_nearest_name():
    with pytest.raises(UsageError, match=r"no_fuse=\('con1',\): the network has no such node. Did you mean 'conv1'\?"):
        lower(parse_network(RESIDUAL), no_fuse=["con1"])


def test_no_fuse_takes_brackets_literally():
    text = RESIDUAL.replace('from "conv1"', 'from "conv[1]"')
    net, _ = lower(parse_network(text), no_fuse=["conv[1]"])
    assert any(x.op == "Conv" for x in net.layers)


def test_switches():
    everything = [p.name for p in select(3)]
    assert "fuse_silu" in everything
    assert [n for n in everything if n != "fuse_silu"] == [p.name for p in select(3, ["-fuse_silu"])]
    assert [p.name for p in select(3, ["none", "+fuse_silu"])] == ["fuse_silu"]
    assert [p.name for p in select(0, ["all"])] == [p.name for p in order_passes()]
    assert {p.name for p in select(0)} < {p.name for p in select(1)} <= {p.name for p in select(2)}


def test_an_unknown_pass_suggests_the_nearest_name():
    with pytest.raises(UsageError, match=r"there is no pass 'fuse_sylu'. Did you mean 'fuse_silu'\?"):
        select(3, ["-fuse_sylu"])


def test_every_pass_has_a_docstring_and_known_predecessors():
    for p in order_passes():
        assert p.doc.endswith((".", ":")), p.name
        assert all(PASSES[a].phase <= p.phase for a in p.after), p.name
    names = [p.name for p in order_passes()]
    for p in order_passes():
        assert all(names.index(a) < names.index(p.name) for a in p.after)


PARAMETERS = {"Clip": ("%low", "%high"), "PRelu": ("%slopes",)}


@pytest.mark.parametrize("anchor", ["Conv", "ConvTranspose", "Gemm", "MatMul"])
@pytest.mark.parametrize("op", [*ACTIVATIONS, "SiLU"])
def test_every_activation_fuses(op, anchor):
    image = anchor.startswith("Conv")
    act = "%s = Sigmoid(%c)\n%y = Mul(%c, %s)" if op == "SiLU" else f"%y = {op}({', '.join(('%c', *PARAMETERS.get(op, ())))})"
    net = parse_network(f"""
        in %x: f32[N,{"4,6,6" if image else "4"}]
        const %w: f32[4,4{",3,3" if image else ""}] = seed(1)
        const %low: f32[] = [0.0]
        const %high: f32[] = [6.0]
        const %slopes: f32[4{",1,1" if image else ""}] = [0.1, 0.2, 0.3, 0.4]
        %c = {anchor}(%x, %w)
        {act}
        out %y
    """)
    low, _ = lower(net, check=True)
    (layer,) = low.layers
    assert layer.composite == anchor
    arrays = feeds(net, extreme=True)
    same(run_network(net, arrays)["y"], run_network(low, arrays)["y"], 0)


# rules of our own


def _pass(run, ops=("Relu",), phase=Phase.CLEAN) -> Pass:
    return Pass("mine", phase, run, ops)


def _relus(n: int) -> Network:
    net = Network("relus")
    t = net.add_input("x", TensorType(F32, (2,)))
    for i in range(n):
        t = net.add("Relu", t, name=f"relu{i}")
    net.mark_output(t)
    return net


def test_a_pass_that_breaks_the_network_is_blamed():
    def wrong(g, layer):
        return g.net.constant(np.zeros(7, np.float32))

    net = _relus(1)
    net.outputs[0] = net.add("Tanh", net.outputs[0])
    with pytest.raises(NetworkError, match=r"pass mine: .*Tanh"):
        run_passes(net, [_pass(wrong)], check=True)


def test_a_rule_that_adds_layers_and_declines_is_blamed():
    def careless(g, layer):
        g.add("Tanh", layer.inputs[0])

    with pytest.raises(NetworkError, match="pass mine: it added layers but returned no replacement for 'relu0'"):
        run_passes(_relus(1), [_pass(careless)])


def test_a_rule_that_never_terminates_is_blamed():
    def restless(g, layer):
        return g.add("Relu", layer.inputs[0])

    with pytest.raises(NetworkError, match="pass mine: it does not converge"):
        run_passes(_relus(1), [_pass(restless)])


def test_passes_that_undo_each_other_are_blamed():
    there = Pass("there", Phase.CLEAN, lambda g, x: g.add("Tanh", x.inputs[0]), ("Relu",))
    back = Pass("back", Phase.CLEAN, lambda g, x: g.add("Relu", x.inputs[0]), ("Tanh",))
    with pytest.raises(NetworkError, match="passes of phase CLEAN do not converge: there, back"):
        run_passes(_relus(1), [there, back])


def test_unused_layers_of_a_rule_are_removed():
    def wasteful(g, layer):
        g.add("Exp", layer.inputs[0])
        return g.add("Abs", layer.inputs[0])

    net = _relus(1)
    run_passes(net, [_pass(wasteful)], check=True)
    assert [x.op for x in net.layers] == ["Abs"]
    assert net.layers[0].name == "relu0"


def test_new_layers_take_the_position_of_the_old_ones():
    net = _relus(3)
    run_passes(net, [_pass(lambda g, x: g.add("Abs", x.inputs[0]) if x.name == "relu1" else None)])
    assert [x.name for x in net.layers] == ["relu0", "relu1", "relu2"]
    assert [x.op for x in net.layers] == ["Relu", "Abs", "Relu"]


def test_a_stale_skip_is_forgotten():
    """The second run sees a changed network: the log has no skips of the first."""

    def fires_later(g, layer):
        return Skip("not yet") if any(x.op == "Tanh" for x in g.layers) else None

    net = _relus(1)
    net.outputs[0] = net.add("Tanh", net.outputs[0])
    drop = Pass("drop", Phase.CLEAN, lambda g, x: x.inputs[0], ("Tanh",))
    log = run_passes(net, [_pass(fires_later), drop])
    assert log.skipped == {}


def test_skips_of_a_whole_pass_are_logged():
    log = run_passes(_relus(1), [Pass("mine", Phase.FINAL, lambda g: [Fired("this", "relu0"), Skip("that", "relu0")][len(g.layers) :], None)])
    assert log.fired == []
    assert log.skipped == {("mine", "relu0"): "that"}


def test_refused_fusions_are_undone():
    net, log = lower(parse_network(RESIDUAL), refuses=lambda layer: f"{len(layer.regions['body'].layers)} is too much")
    assert not any(x.op == "Fused" for x in net.layers)
    assert log.skipped["fuse_conv_add", "add1"] == "2 is too much"
    verify(net)


def test_a_pass_after_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.setitem(PASSES, "odd", Pass("odd", Phase.CLEAN, None, None, after=("nowhere",)))
    with pytest.raises(BuildError, match="pass odd is declared after nowhere, which does not exist"):
        order_passes()


def test_cyclic_order_is_refused(monkeypatch):
    monkeypatch.setitem(PASSES, "one", Pass("one", Phase.CLEAN, None, None, after=("two",)))
    monkeypatch.setitem(PASSES, "two", Pass("two", Phase.CLEAN, None, None, after=("one",)))
    with pytest.raises(BuildError, match="passes depend on each other in a cycle: one, two"):
        order_passes()


def test_two_passes_of_one_name(monkeypatch):
    with pytest.raises(BuildError, match="two passes are named fuse_silu"):
        register(Pass("fuse_silu", Phase.FUSE, None, None))


def test_constant_sizes_become_attributes_of_the_ops():
    for op, places in SIZES.items():
        assert set(places.values()) <= set(OPS[op].attrs), op


# the graph that passes see


def test_graph_knows_readers_and_reasons():
    net = parse_network(RESIDUAL)
    g = Graph(net)
    x, c = net.inputs[0], net.tensor("c")
    conv, bn, add, _ = net.layers
    assert g.readers(x) == [conv, add]
    assert g.escapes(c, bn) is None
    assert g.escapes(x, conv) == "%x is also read by 'add1'"
    assert g.escapes(net.outputs[0]) == "%y is an output of the network"
    assert g.maker(c) is conv
    assert g.maker(x) is None


def test_weights_are_compared_to_the_last_byte():
    """Large constants are sampled first: a difference between the sampled elements must not be overlooked."""
    a = np.zeros(1000, np.float32)
    b, same_again = a.copy(), a.copy()
    b[1] = 1
    net = Network("weights")
    x = net.add_input("x", TensorType(F32, (1000,)))
    for i, w in enumerate((a, b, same_again)):
        x = net.add("Add", x, net.constant(w, f"w{i}"))
    net.mark_output(x)
    run_passes(net, [PASSES["merge_equal_weights"]], check=True)
    assert sorted(net.constants) == ["w0", "w1"]
    assert net.layers[2].inputs[1] is net.constants["w0"]


def test_layers_with_nearly_equal_weights_are_not_merged():
    a = np.zeros(1000, np.float32)
    b = a.copy()
    b[1] = 1
    net = Network("weights")
    x = net.add_input("x", TensorType(F32, (1000,)))
    net.mark_output(net.add("Sub", net.add("Mul", x, net.constant(a, "a")), net.add("Mul", x, net.constant(b, "b"))))
    log = run_passes(net, [PASSES["merge_equal_layers"]], check=True)
    assert log.fired == []


def test_sizes_known_only_inside_a_loop_stay_computed():
    """Dimensions of a body's inputs change between iterations: no attribute can hold them."""
    text = """
        in %x: f32[K,4]
        %s = Shape(%x)
        const %f: i64[1] = [-1]
        %r = Reshape(%x, %f)
        %y = Reshape(%r, %s)
        out %y
    """
    body, outer = parse_network(text), parse_network("in %z: f32[N]\nout %z")
    for net, folded in ((body, True), (outer, False)):
        g = Graph(body, root=net)
        reshape = body.layers[2]
        assert (PASSES["fold_shapes"].run(g, reshape) is not None) == folded
        assert g.is_sized(body.inputs[0].shape) == folded


IF = """
in %x: f32[2,4]
in %p: bool[]
%r = Relu(%x)
%y = If(%p) {
  region then_branch
    %a = Relu(%r)
    %b = Identity(%a)
    %c = Sigmoid(%b)
    %d = Mul(%b, %c)
    out %d
  region else_branch
    %e = Transpose(%x, perm=(1, 0))
    %f = Transpose(%e, perm=(1, 0))
    out %f
}
out %y
"""


@pytest.mark.skipif("If" not in OPS, reason="needs the op If")
def test_passes_run_inside_regions():
    net = parse_network(IF)
    low, log = lower(net, check=True)
    fired = {name for name, n in log.counts().items() if n}
    assert {"drop_no_ops", "cancel_transposes", "recognize_swish"} <= fired
    for p in (True, False):
        arrays = {**feeds(net), "p": np.array(p)}
        for key, a in run_network(net, arrays).items():
            same(a, run_network(low, arrays)[key], 0)


def test_the_work_of_lowering_grows_with_the_number_of_layers():
    """Twice the layers are twice the work, not four times."""

    def calls(blocks):
        net = Network("long")
        t = net.add_input("x", TensorType(F32, (1, 8, 4, 4)))
        w = net.constant(np.random.default_rng(0).standard_normal((8, 8, 1, 1)).astype(np.float32), "w")
        v = net.constant(np.ones(8, np.float32), "v")
        for _ in range(blocks):
            y = net.add("BatchNormalization", net.add("Conv", t, w), v, v, v, v)
            t = net.add("Relu", net.add("Add", y, t))
        net.mark_output(t)
        lowered = []
        count = count_calls(lambda: lowered.append(lower(net)[0]))
        assert len(lowered[0].layers) == blocks
        return count

    calls(4)  # caches are filled
    assert calls(100) < 2.2 * calls(50)


def test_a_region_gets_the_widened_types_of_what_enters_it():
    net = parse_network("""network n source
        in %x: f16[2]
        const %n: i64[] = [3]
        const %go: bool[] = [True]
        const %c: f16[2] = [0.5, 0.25]
        %y = Loop(%n, %go, %x) {
          region body
            in %i: i64[]
            in %k: bool[]
            in %s: f16[2]
            %t = Mul(%s, %c)
            %l = Identity(%k)
            out %l
            out %t
        }
        out %y
        """)
    wide, count = widen_floats(net, {F16})
    assert count == 2  # the Loop and the product in it
    (loop,) = (x for x in wide.layers if x.op == "Loop")
    assert [t.dtype.name for t in loop.regions["body"].inputs] == ["i64", "bool", "f32"]
    assert [x.op for x in loop.regions["body"].layers] == ["Mul", "Identity"]  # nothing is converted in the region
    assert (wide.inputs[0].dtype, wide.outputs[0].dtype) == (F16, F16)
    verify(wide)
    x = np.float16([1, 3])
    np.testing.assert_array_equal(run_network(wide, {"x": x})["y"], x * np.float16([0.125, 0.015625]))
