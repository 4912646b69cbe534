"""Timing keys: changes that must and must not change them. In-place pairs: conditions of use. Selection between equal times."""

import importlib
import sys

import numpy as np
import pytest
from nets import residual

import whet.tactics
from whet.backends import Backend, Capabilities, get_backend
from whet.builder.candidates.enumerate import count_macs, list_candidates
from whet.builder.candidates.reformats import Reformats, with_reformats
from whet.builder.precision.permissions import Permissions
from whet.builder.select.formats import explain_inplace_refusal, list_links
from whet.measure import timing_key as keys
from whet.measure.bench import fill
from whet.measure.option import Option
from whet.measure.timing import COLD, Conditions
from whet.measure.timing_key import compute_source_digest, find_transitive_modules, format_layer_text, make_timing_key
from whet.network import BF16, F32, I64, Network, Tensor, Weight, parse_network, parse_type
from whet.network.weight import Origin
from whet.tactics import Operand, Signature, get_tactic, list_tactics


def conv(name="c", channels=8, seed=1, pads=(1, 1, 1, 1)):
    net = Network("n")
    x = net.add_input("x" + name, parse_type("f32[1,4,6,6]"))
    w = net.constant(np.random.default_rng(seed).standard_normal((channels, 4, 3, 3)).astype("f4"), "w" + name)
    return net.add_layer("Conv", (x, w), {"pads": pads}, name=name, sources=[name])


def test_names_sources_and_weights_do_not_change_the_text():
    assert format_layer_text(conv("a")) == format_layer_text(conv("b", seed=9))


@pytest.mark.parametrize("other", [conv(channels=9), conv(pads=(0, 0, 0, 0))])
def test_shapes_and_attributes_change_the_text(other):
    assert format_layer_text(conv()) != format_layer_text(other)


def test_small_constants_and_assumptions_change_the_text():
    def clip(top, assumes=()):
        net = Network("n")
        x = net.add_input("x", parse_type("f32[8]"))
        high = net.constant(Weight(np.array(top, "f4"), Origin("source", "h", assumes=assumes)), "high")
        return net.add_layer("Clip", (x, None, high))

    assert format_layer_text(clip(6.0)) != format_layer_text(clip(7.0))
    assert format_layer_text(clip(6.0)) != format_layer_text(clip(6.0, ("is 2:4",)))
    assert format_layer_text(clip(6.0)) == format_layer_text(clip(6.0))


def test_the_body_of_a_fused_layer_and_its_operand_order_change_the_text():
    def fused(op, swapped):
        text = f"""network n lowered
        in %x: f32[1,4,6,6]
        in %z: f32[1,4,6,6]
        const %w: f32[4,4,1,1] = seed(1)
        %y = Fused({"%x, %w, %z" if not swapped else "%z, %w, %x"}, composite='Conv') {{
          region body
            in %a: f32[1,4,6,6]
            in %b: f32[4,4,1,1]
            in %c: f32[1,4,6,6]
            %d = Conv(%a, %b)
            %e = {op}(%d, %c)
            out %e
        }}
        out %y
        """
        return format_layer_text(parse_network(text).layers[0])

    assert fused("Add", False) == fused("Add", True)
    assert fused("Add", False) != fused("Mul", False)
    net = parse_network("network n lowered\nin %x: f32[4]\nin %z: f32[4]\n%y = Sub(%x, %z)\n%s = Sub(%x, %x)\nout %y\nout %s\n")
    assert format_layer_text(net.layers[0]) != format_layer_text(net.layers[1])


def test_every_part_of_the_key_changes_it():
    tactic = (list_tactics("cpu"), get_tactic("cpu/numpy_reference"))[1]
    o = Operand("linear", F32)
    s = Signature((o,), (o,))
    base = make_timing_key(tactic, "layer", s, (), "machine", "hot")
    assert base == make_timing_key(tactic, "layer", s, (), "machine", "hot")
    others = [
        make_timing_key(get_tactic("cpu/numpy_reformat"), "layer", s, (), "machine", "hot"),
        make_timing_key(tactic, "other", s, (), "machine", "hot"),
        make_timing_key(tactic, "layer", Signature((o,), (o,), ((0, 0),)), (), "machine", "hot"),
        make_timing_key(tactic, "layer", s, (("tile", 4),), "machine", "hot"),
        make_timing_key(tactic, "layer", s, (), "machine threads=1", "hot"),
        make_timing_key(tactic, "layer", s, (), "machine", "cold"),
    ]

    class Newer(type(tactic)):
        name = tactic.name

        def library_version(self):
            return "numpy 99"

    Newer.__module__ = type(tactic).__module__
    others.append(make_timing_key(Newer(), "layer", s, (), "machine", "hot"))
    assert len({base, *others}) == 8


def test_a_changed_source_file_anywhere_below_a_tactic_changes_its_digest(tmp_path, monkeypatch):
    package = tmp_path / "whet_copy"
    (package / "tactics" / "zz").mkdir(parents=True)
    for f in ("__init__.py", "tactics/__init__.py", "tactics/zz/__init__.py"):
        (package / f).write_text("")
    (package / "tactics" / "zz" / "mine.py").write_text("from whet.tactics.zz import _help\nclass Mine: pass\n")
    (package / "tactics" / "zz" / "_help.py").write_text("from whet.tactics.zz._deep import A\n")
    (package / "tactics" / "zz" / "_deep.py").write_text("A = 1\n")
    (package / "tactics" / "zz" / "mine.cu").write_text("first")
    monkeypatch.setattr(sys.modules["whet"], "__path__", [str(package)])

    def digest():
        for kept in (keys.compute_digest, keys.read_content, keys.list_imports):
            kept.cache_clear()
        return keys.compute_digest(("whet.tactics.zz.mine",))

    try:
        assert {m.rpartition(".")[2] for m in find_transitive_modules("whet.tactics.zz.mine")} >= {"mine", "_help", "_deep"}
        found = [digest()]
        inner = "if True:\n    try:\n        from whet.tactics.zz import _deeper\n    finally:\n        A = 2\n"
        (package / "tactics" / "zz" / "_deep.py").write_text(inner)
        (package / "tactics" / "zz" / "_deeper.py").write_text("B = 1\n")
        found.append(digest())
        (package / "tactics" / "zz" / "_deeper.py").write_text("B = 2\n")  # imported in a nested block
        found.append(digest())
        (package / "tactics" / "zz" / "mine.cu").write_text("second")
        found.append(digest())
        assert len(set(found)) == 4
    finally:
        monkeypatch.undo()
        digest()


def test_a_real_tactics_sources_include_its_library_binding():
    list_tactics("cpu")
    modules = find_transitive_modules("whet.tactics.cpu.onednn.onednn_conv")
    assert {"whet.tactics.cpu.onednn._kernel", "whet.tactics.cpu.onednn._api.primitive", "whet.backends.cpu.threads"} <= modules
    assert not any(m.startswith("whet.tactics.cuda") for m in modules)
    assert len(compute_source_digest(get_tactic("cpu/onednn_conv"))) == 64
    importlib.import_module("whet.tactics")


def option(net, layer, inplace, machine=None):
    s = Signature(tuple(Operand("linear", t.dtype) for t in layer.inputs), (Operand("linear", layer.outputs[0].dtype),), inplace)
    return Option(get_tactic("cpu/numpy_reference"), s, (), None, 0)


def test_in_place_pairs_need_bytes_that_nothing_else_reads():
    whet.tactics.load_tactics("cpu")
    net = parse_network(
        """network n lowered
        in %x: f32[4]
        const %c: f32[4] = seed(1)
        %a = Relu(%x)
        %b = Relu(%a)
        %d = Add(%a, %b)
        %e = Add(%d, %d)
        %f = Mul(%e, %x)
        %g = Add(%f, %c)
        %h = Relu(%g)
        out %h
        out %g
        """
    )
    at = {layer.name: layer for layer in net.layers}

    def reason(layer, *pairs):
        return explain_inplace_refusal(net, at[layer], option(net, at[layer], pairs))

    assert "which is an input" in reason("a", (0, 0))
    assert "which 'd' still reads" in reason("b", (0, 0))
    assert reason("d", (0, 0)) is None
    assert reason("d", (1, 0)) is None
    assert "reads a second time" in reason("e", (0, 0))
    assert "which is an input" in reason("f", (1, 0))
    assert "is an output" in reason("g", (0, 0))
    assert "is constant" in reason("g", (1, 0))
    assert "is an output" in reason("h", (0, 0))


def test_a_reformat_in_place_needs_the_old_bytes_to_be_dead():
    tactics = list_tactics("cpu")
    machine = get_backend("cpu")
    net = parse_network(
        """network n lowered
        in %x: f32[2,8,1,1]
        %a = Relu(%x)
        %b = Sigmoid(%a)
        %c = Tanh(%a)
        out %b
        out %c
        """
    )
    linear, last = Operand("linear", F32), Operand("nhwc", F32)

    def picked(*readers):
        made = {"a": Option(get_tactic("cpu/numpy_reference"), Signature((linear,), (linear,)), (), None, 0)}
        for name in ("b", "c"):
            o = last if name in readers else linear
            made[name] = Option(get_tactic("cpu/numpy_reference"), Signature((o,), (linear,)), (), None, 0)
        return made

    reformats = Reformats(tactics, machine, {}, None)
    one, chosen = with_reformats(net, picked("b"), reformats)  # c still reads the output of a
    assert [x.op for x in one.layers] == ["Relu", "Reformat", "Sigmoid", "Tanh"]
    assert not chosen["a_nhwc_f32"].signature.inplace
    both, chosen = with_reformats(net, picked("b", "c"), reformats)  # one reformat for both readers, no other reader of a
    assert [x.op for x in both.layers] == ["Relu", "Reformat", "Sigmoid", "Tanh"]
    assert chosen["a_nhwc_f32"].signature.inplace == ((0, 0),)
    assert both.layers[2].inputs[0] is both.layers[3].inputs[0]


def test_links_omit_constants_and_end_at_outputs():
    net = residual()
    found = list_links(net)
    assert all(not w.tensor.is_constant for w in found)
    assert [w.tensor.name for w in found if w.reader is None] == ["y"]
    assert [w.tensor.name for w in found if w.maker is None] == ["x"]


def test_caches_have_the_state_after_a_network_run():
    class Machine(Backend):
        capabilities, threads = Capabilities(cache_bytes={2: 1 << 20, 3: 32 << 20}), 2

    assert Conditions.of(Machine, 1 << 19).state == "hot"
    assert Conditions.of(Machine, 8 << 20) == Conditions("cold L2", 2 << 20)
    assert Conditions.of(Machine, 64 << 20) == Conditions(COLD, 48 << 20)
    assert Conditions.of(get_backend("null"), 1 << 40).state == "hot"


def test_a_large_last_cache_is_shared_with_others():
    """Two threads do not have 480 MiB of a server's cache for themselves."""

    class Machine(Backend):
        capabilities, threads = Capabilities(cache_bytes={2: 2 << 20, 3: 480 << 20}), 2

    assert Conditions.of(Machine, 32 << 20) == Conditions("cold L2", 4 << 20)
    assert Conditions.of(Machine, 33 << 20) == Conditions(COLD, 48 << 20)
    Machine.threads = 16
    assert Conditions.of(Machine, 33 << 20).state == "cold L2"


def test_timed_operands_hold_values_of_their_type():
    for dtype in (F32, BF16):
        raw = np.zeros(1 << 18, np.uint8)
        fill(raw, dtype)
        a = raw.view(dtype.numpy).astype("f4")
        assert 0.9 < a.std() < 1.1
    raw = np.ones(64, np.uint8)
    fill(np.zeros(64, np.uint8), I64)
    assert raw.all()


def test_multiply_adds():
    assert count_macs(conv(channels=8)) == 8 * 36 * 4 * 9
    net = Network("n")
    x = net.add_input("x", parse_type("f32[5,7]"))
    assert count_macs(net.add_layer("Gemm", (x, net.constant(np.ones((3, 7), "f4"), "w"), None), {"transB": 1})) == 5 * 3 * 7
    assert count_macs(net.add_layer("MatMul", (x, net.constant(np.ones((7, 2), "f4"), "v")))) == 5 * 2 * 7
    assert count_macs(net.add_layer("Relu", (x,))) == 0


def test_a_signature_that_leaves_a_computed_input_open_is_refused():
    class Careless(type(get_tactic("cpu/numpy_reference"))):
        fallback, name = False, "cpu/careless"

        def signatures(self, layer, machine):
            return [Signature((None, None), (Operand("linear", layer.outputs[0].dtype),))]

    layer = conv()
    found = list_candidates(layer, [Careless()], get_backend("cpu"), Permissions(frozenset()))
    assert found.options == []
    assert "does not say how it reads %xc" in found.refused[0].reason
    assert isinstance(layer.inputs[0], Tensor)


@pytest.mark.parametrize(("a", "b", "alike"), [(3, 7, True), (3, 0, False), (3, 255, False), (0, 0, True)])
def test_the_value_of_a_zero_point_does_not_change_the_text(a, b, alike):
    def text(zero):
        net = Network("n", "lowered")
        x = net.add_input("x", parse_type("f32[1,8]"))
        scale, offset = net.constant(np.float32(0.1), "s"), net.constant(np.uint8(zero), "z")
        net.mark_output(net.add("QuantizeLinear", x, scale, offset))
        return format_layer_text(net.layers[0])

    assert (text(a) == text(b)) == alike
