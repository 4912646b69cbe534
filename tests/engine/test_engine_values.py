"""Parts of engine files on small cases: names, digests, tables of bytes, canonical JSON, required sections."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from handmade import conv_net, make_plan
from whet.engine import codec, engine_bytes, file, host_tail, packed, read_engine, weights
from whet.engine.json_data import Reader, from_json
from whet.engine.layout import Section
from whet.engine.names import display_names, find_root, profile_suffix
from whet.engine.report import BuildReport
from whet.errors import EngineError, WhetError
from whet.network import Network, Origin, Weight, parse_network
from whet.ops._origin import express, make_literal
from whet.precision.histogram import compute_bin_centres
from whet.tactics.host_layers import HostLayers


def layer(name, *sources, op="Conv", **more):
    return SimpleNamespace(name=name, op=op, sources=sources, inputs=[], attrs={}, regions={}, composite=None, **more)


def test_display_names_are_unique():
    net = SimpleNamespace(layers=[layer("a", "s"), layer("b", "s"), layer("c", "s"), layer("d"), layer("e", "s (2)"), layer("f", "s", "t", "s")])
    assert list(display_names(net).values()) == ["s", "s (2)", "s (3)", "d", "s (2) (2)", "s + t"]
    assert [profile_suffix(n) for n in range(3)] == ["", " [profile 1]", " [profile 2]"]


@pytest.mark.parametrize(("count", "name"), [(12, " + ".join(f"n{i}" for i in range(12))), (13, "n0 + n1 + n2 + n3 + n4 + ... 7 more + n12")])
def test_long_display_names_are_shortened(count, name):
    assert display_names(SimpleNamespace(layers=[layer("a", *(f"n{i}" for i in range(count)))])) == {"a": name}


def test_reformats_are_named_after_their_input_and_target():
    x = layer("r", op="Reformat")
    x.inputs, x.attrs = [SimpleNamespace(name="x")], {"dtype": "f16", "format": "nhwc"}
    assert display_names(SimpleNamespace(layers=[x])) == {"r": "Reformat x to f16:nhwc"}


@pytest.mark.parametrize(
    ("ops", "composite", "root"),
    [
        (["Abs", "Conv", "Softmax", "Softmax"], "Softmax", 2),
        (["Abs", "Conv", "MatMul"], "Softmax", 1),
        (["Abs", "Relu"], "Softmax", None),
        (["Abs", "Gemm"], None, 1),
        (["Add", "ConvTranspose"], None, 1),
    ],
)
def test_the_root_of_a_fused_layer(ops, composite, root):
    leaves = [layer(op, op=op) for op in ops]
    inner = layer("inner", op="Fused")
    inner.regions["body"] = SimpleNamespace(layers=leaves[1:])
    fused = layer("fused", op="Fused")
    fused.composite, fused.regions["body"] = composite, SimpleNamespace(layers=[leaves[0], inner])
    assert find_root(fused) is (None if root is None else leaves[root])
    assert find_root(leaves[0]) is None


def test_the_digest_of_a_section_is_that_of_its_bytes_with_padding():
    section = Section("s", [b"a" * 3, b"b" * 64, b"c"])
    assert section.size == 64 + 64 + 1
    assert section.content_digest() == hashlib.sha256(b"aaa" + bytes(61) + b"b" * 64 + b"c").digest()
    assert Section("s", [b"a"], b"given").content_digest() == b"given"
    assert (Section("s", []).size, Section("s", []).content_digest()) == (0, hashlib.sha256().digest())


@pytest.mark.parametrize("text", [b"[1.0e0]", b'{"a": 1}', b"[1 ]", b'{"b":1,"a":2}', b"[1.50]", b'["\\u0041"]'])
def test_json_of_another_form_is_refused(text):
    with pytest.raises(EngineError, match="not in canonical form"):
        from_json(text, "part")


def test_canonical_json_is_read():
    assert from_json(b'{"a":[1.5,"A",null],"b":2}', "part") == {"a": [1.5, "A", None], "b": 2}
    for text in (b'{"a":1,"a":1}', b"[NaN]", b"[", b""):
        with pytest.raises(EngineError, match="part"):
            from_json(text, "part")


@pytest.mark.parametrize(("more", "refused"), [((), False), (("packed", "packed_index"), False), (("packed",), True), (("packed_index",), True)])
def test_sections_that_belong_together(more, refused):
    parts = dict.fromkeys((*file.REQUIRED, *more), memoryview(b""))
    if not refused:
        file.require_sections(parts)
    else:
        with pytest.raises(EngineError, match="no section 'packed'"):
            file.require_sections(parts)


@pytest.mark.parametrize("name", file.REQUIRED)
def test_a_missing_section_is_named(name):
    with pytest.raises(EngineError, match=f"no section '{name}'"):
        file.require_sections(dict.fromkeys((n for n in file.REQUIRED if n != name), memoryview(b"")))


def stored(*rows):
    """Reads packed weights of these rows (key, offset, size) out of 3 bytes, padding and 2 bytes."""
    from whet.engine.json_data import to_json

    data = b"abc" + bytes(61) + b"de"
    index = [[k, at, n, hashlib.sha256(data[at : at + n]).hexdigest()] for k, at, n in rows]
    return packed.read(Reader(index, "index"), memoryview(data), hashlib.sha256(to_json(index)).digest())


def test_packed_weights_are_read():
    found = stored(("a", 0, 3), ("b", 64, 2))
    assert {k: v.tobytes() for k, v in found.items()} == {"a": b"abc", "b": b"de"}
    assert found["a"].dtype == np.uint8
    empty = stored(("a", 0, 3), ("b", 64, 0), ("c", 64, 2))
    assert [v.tobytes() for v in empty.values()] == [b"abc", b"", b"de"]


@pytest.mark.parametrize(
    "rows",
    [
        [("a", 0, 3), ("b", 64, 3)],
        [("a", 0, 3), ("b", 63, 2)],
        [("a", 1, 2), ("b", 64, 2)],
        [("a", 0, 3), ("a", 64, 2)],
        [("a", 0, 3)],
        [("a", 0, 2), ("b", 64, 2)],
        [("a", 0, 3), ("b", 64, 1)],
        [],
    ],
)
def test_tables_of_packed_weights_that_do_not_fit_are_refused(rows):
    with pytest.raises(EngineError):
        stored(*rows)


def test_centres_of_bins():
    centre, high = compute_bin_centres()
    one = 0x3F80  # upper bits of 1.0
    assert high[one] == pytest.approx(1 + 2**-7 - 2**-23, abs=0)
    assert centre[one] == (1.0 + high[one]) / 2
    assert (centre[0] * 2, len(centre)) == (high[0], 1 << 15)


def probed(shapes, outputs):
    net = SimpleNamespace(inputs=[SimpleNamespace(name="x", shape=(2, 3))], outputs=[SimpleNamespace(name="y"), SimpleNamespace(name="z")])
    profile = SimpleNamespace(shapes={"x": [(1, 3), (2, 3), (4, 3)]})
    return SimpleNamespace(network=net, profiles=[profile], probe={"shapes": shapes, "outputs": dict.fromkeys(outputs)})


@pytest.mark.parametrize(
    ("shapes", "outputs", "text"),
    [
        ({"x": [2, 3]}, "yz", None),
        ({"x": [2, 3]}, "y", "other inputs or outputs"),
        ({"x": [2, 3]}, "yzw", "other inputs or outputs"),
        ({"x": [2, 3]}, "yw", "other inputs or outputs"),
        ({"x": [2, 3], "v": [1]}, "yz", "other inputs or outputs"),
        ({"x": [1, 3]}, "yz", "the probe's shape of 'x' is not the opt shape"),
        ({"x": [4, 3]}, "yz", "the probe's shape of 'x' is not the opt shape"),
        ({}, "yz", "the probe's shape of 'x' is not the opt shape"),
    ],
)
def test_probes_have_the_networks_inputs_and_outputs(shapes, outputs, text):
    if text is None:
        file.check_probe(probed(shapes, outputs))
    else:
        with pytest.raises(EngineError, match=text):
            file.check_probe(probed(shapes, outputs))


def test_a_probe_without_profiles_has_the_static_shape():
    plan = probed({"x": [2, 3]}, "yz")
    plan.profiles = []
    file.check_probe(plan)
    plan.probe = None
    file.check_probe(plan)


def test_sources_are_the_weights_that_constants_use_unchanged():
    net = parse_network("""network n source
        in %x: f32[2]
        const %a: f32[2] = [1.0, 2.0]
        const %b: f32[2] = [3.0, 4.0]
        %y = Add(%x, %a)
        %z = Add(%y, %b)
        out %z
        """)
    b = net.constants["b"]
    b.weight = express("Neg", b.weight)
    assert {name: a.tolist() for name, a in weights.get_plain_sources(net).items()} == {"a": [1, 2]}


def test_an_operation_on_weights_has_only_the_results_of_its_type():
    x = np.float32([1, -2, 3])
    args, attrs = [x], {}
    np.testing.assert_array_equal(weights.apply_op("Neg", args, attrs, 0, weights.Budget(1 << 10)), -x)
    for output in (1, 2, -1):
        with pytest.raises(EngineError):
            weights.apply_op("Neg", args, attrs, output, weights.Budget(1 << 10))


@pytest.mark.parametrize(
    ("pair", "fits"), [((0, 0), True), ((10**6, 10**6), True), ((10**6 + 1, 0), False), ((0, 10**6 + 1), False), ((-1, 0), False)]
)
def test_the_largest_indices_of_operands_computed_in_place(pair, fits):
    data = {
        "tactic": "t", "config": [], "inputs": [], "outputs": [], "inplace": [list(pair)], "implementation": "i", "rtol": 0.5, "deterministic": True,
    }  # fmt: skip
    if fits:
        assert codec.decode_choice(Reader(data, "choice")).inplace == (pair,)
    else:
        with pytest.raises(EngineError, match="inplace"):
            codec.decode_choice(Reader(data, "choice"))


@pytest.mark.parametrize(("op", "is_exact"), [("Neg", True), ("Exp", False), ("com.microsoft.Gelu", False), ("plugin.Scale", False)])
def test_sources_of_an_expression_are_listed_for_exact_operations_only(op, is_exact):
    a = np.float32([1, 2])
    origin = Origin.of_operation("Mul", (Origin.of_operation(op, (Origin("source", "a"),), (), 0, name="t"), make_literal(a).origin), (), 0, name="u")
    assert list(weights.list_sources(origin, {"a": a, "b": a})) == (["a"] if is_exact else [])
    assert weights.list_sources(origin, {"b": a}) == {}


@pytest.mark.parametrize(("steps", "stored"), [(1, False), (16, False), (17, True), (33, True)])
def test_an_expression_that_takes_much_more_memory_than_the_file_is_stored_by_value(steps, stored):
    """Each step takes 1 MiB: a reader grants 16 MiB and 16 times the file of 1 MiB, a writer uses half of it."""
    source = w = Weight(np.ones(1 << 18, np.float32), Origin("source", "s"))
    for _ in range(steps):
        w = express("Neg", w)
    net = Network("n")
    net.mark_output(net.add("Abs", net.constant(w, "c")), "y")
    ((digest, _, number, own),) = weights.collect([net], {"s": source.array}).constants
    assert number is not None
    assert own == (digest if stored else None)


def tail(text, *outputs):
    return host_tail.HostTail(parse_network("network tail lowered\n" + text), outputs)


@pytest.mark.parametrize(
    ("outputs", "accepted"),
    [(("y", "z"), True), (("z", "y"), True), (("z",), True), ((), False), (("z", "z"), False), (("y", "w"), False), (("x",), False)],
)
def test_the_outputs_of_layers_on_the_host(outputs, accepted):
    network = parse_network("network n lowered\nin %x: f32[2]\n%y = Relu(%x)\nout %y\n")
    rest = tail("in %y: f32[2]\n%z = Abs(%y)\nout %z\n", *outputs)
    if accepted:
        host_tail.check_tail(rest, network)
        assert list(rest.types(network)) == list(outputs)
        values = rest.run(network, {"x": np.float32([1, -2])}, {"y": np.float32([1, 0])}, HostLayers())
        assert {n: a.tolist() for n, a in values.items()} == {n: [1, 0] for n in outputs}
    else:
        with pytest.raises(EngineError, match="inconsistent"):
            host_tail.check_tail(rest, network)


@pytest.mark.parametrize("text", ["", "network", "network n", "\n", "n lowered"])
def test_a_text_of_layers_on_the_host_that_is_cut_off(text):
    with pytest.raises(EngineError):
        host_tail.from_data(Reader({"network": text, "constants": 0, "outputs": ["y"]}, "tail"), [])


def test_layers_on_the_host_are_read_as_written():
    rest = tail("in %y: f32[2]\n%z = Abs(%y)\nout %z\n", "z")
    again = host_tail.from_data(Reader(host_tail.to_data(rest), "tail"), [])
    assert (again.digest, again.network.name, again.outputs) == (rest.digest, "tail", ("z",))


@pytest.mark.parametrize("error", [WhetError, ValueError, TypeError, KeyError, IndexError, OverflowError, SyntaxError, MemoryError, RecursionError])
def test_any_error_while_a_file_is_read_names_the_file_and_the_error(error, monkeypatch, tmp_path):
    path = tmp_path / "net.engine"
    path.write_bytes(engine_bytes(make_plan(conv_net())))

    def fail(*_):
        raise error("said")

    monkeypatch.setattr(file, "require", fail)
    with pytest.raises(EngineError, match=rf"net\.engine: it cannot be read: {error.__name__}: .*said"):
        read_engine(path)


def test_a_report_without_records_has_taken_no_time():
    empty = BuildReport()
    assert (empty.build_seconds, empty.latency_ms, empty.phase_seconds, empty.candidates) == (0.0, None, {}, {})
