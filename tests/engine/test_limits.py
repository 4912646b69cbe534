"""Limits of values in engine files, at the limit and one beyond it; small rules that random edits rarely hit."""

import hashlib
import json

import numpy as np
import pytest
from mutants import assemble, sections_of

from handmade import conv_net, make_plan
from whet.engine import codec, display_names, engine_bytes, read_engine, schema, weights
from whet.engine.check import check_plan
from whet.engine.file import SECTIONS
from whet.engine.json_data import LARGEST, Reader
from whet.engine.layout import ENTRY, HEAD, MAX_SECTIONS, VERSION, Section, read_sections, read_table_digests, write_sections
from whet.engine.packed import make_packed_sections as packed_sections
from whet.engine.probe import probe_differs
from whet.engine.text import read_text
from whet.engine.weights import Budget
from whet.errors import EngineError, WhetError
from whet.network import Network, parse_type


def written(*sections):
    data = bytearray()

    class Out:
        def write(self, piece):
            data.extend(piece)

    write_sections(sections, Out())
    return memoryview(bytes(data))


KNOWN = {"a": 1 << 20, "b": 1 << 20, "c": 1 << 20}


@pytest.mark.parametrize(("low", "high"), [(0, LARGEST), (-3, 5), (7, 7)])
def test_integers_include_both_limits(low, high):
    assert Reader(low, "x").integer(low, high) == low
    assert Reader(high, "x").integer(low, high) == high
    for wrong in (low - 1, high + 1, True, float(low), str(low), None):
        with pytest.raises(EngineError, match=f"an integer from {low} to {high}"):
            Reader(wrong, "x").integer(low, high)


@pytest.mark.parametrize("value", [-(1 << 62), -1, 0, 1 << 62])
def test_values_of_tuning_configs_have_63_bits(value):
    assert codec.decode_config(Reader([["tile", value]], "config")) == (("tile", value),)
    beyond = value + (1 if value >= 0 else -1) * (1 << 62)
    if abs(beyond) > 1 << 62:
        with pytest.raises(EngineError, match="an integer from"):
            codec.decode_config(Reader([["tile", beyond]], "config"))


def test_texts_may_have_their_longest_length():
    assert Reader("abc", "x").text(3) == "abc"
    with pytest.raises(EngineError, match="text of at most 2 characters"):
        Reader("abc", "x").text(2)


def test_a_budget_may_be_spent_to_the_last_byte():
    budget = Budget(100)
    budget.spend(60)
    budget.spend(40)
    with pytest.raises(EngineError, match="far more memory than the file has"):
        budget.spend(1)


def test_sections_are_read_back_with_their_digests():
    parts = {"a": b"x" * 100, "b": b"", "c": b"y" * 64}
    data = written(*(Section(name, [content]) for name, content in parts.items()))
    assert {k: bytes(v) for k, v in read_sections(data, KNOWN, frozenset()).items()} == parts
    assert {k: size for k, (size, _) in read_table_digests(data).items()} == {"a": 100, "b": 0, "c": 64}
    assert len({digest for _, digest in read_table_digests(data).values()}) == 3
    with pytest.raises(EngineError, match="section 'a' has 100 bytes, more than the allowed 99"):
        read_sections(data, KNOWN | {"a": 99}, frozenset())
    assert read_sections(data, KNOWN | {"a": 100}, frozenset())


ONNX = [b"\x08\x07\x12", b"\x08\x03\x3a"]
NO_ONNX = [b"\x08\x02\x12", b"\x08\x20\x12", b"\x07\x07\x12", b"\x08\x07"]


@pytest.mark.parametrize(("begins", "is_onnx"), [*((b, True) for b in ONNX), *((b, False) for b in NO_ONNX)])
def test_an_onnx_model_is_named_as_one(begins, is_onnx):
    with pytest.raises(EngineError) as e:
        read_sections(memoryview(begins), KNOWN, frozenset())
    assert ("but an ONNX model" in str(e.value)) == is_onnx


def test_packed_weights_lie_at_multiples_of_64():
    index, _ = packed_sections({"k1": np.zeros(65, np.uint8), "k0": np.zeros(1, np.uint8), "k2": np.zeros(3, np.uint8)})
    rows = Reader(json.loads(index.pieces[0]), "index").rows()
    assert [(r.value[0], r.value[1], r.value[2]) for r in rows] == [("k0", 0, 1), ("k1", 64, 65), ("k2", 192, 3)]


def test_a_probe_compares_where_values_are_finite():
    want = {"outputs": {"y": {"shape": [3], "values": [1.0, None, 2.0]}}, "rtol": 1e-3}
    assert probe_differs(want, {"y": np.array([1.0, np.nan, 2.0])}) is None
    assert probe_differs(want, {"y": np.array([1.0, np.inf, 2.0])}) is None
    assert "NaN or infinite values at other indices" in probe_differs(want, {"y": np.array([1.0, 0.0, 2.0])})
    assert "NaN or infinite values at other indices" in probe_differs(want, {"y": np.array([np.nan, np.nan, 2.0])})
    assert "differs by" in probe_differs(want, {"y": np.array([1.0, np.nan, 2.01])})
    assert "has shape" in probe_differs(want, {"y": np.zeros(4)})


@pytest.mark.parametrize(("rtol", "got", "differs"), [(0.0, 2.0, False), (0.0, 2.0 + 1e-12, True), (0.5, 3.0, False), (0.25, 3.0, True)])
def test_a_probe_allows_its_bound_and_no_more(rtol, got, differs):
    """Of deterministic engines the bound is zero: equal outputs must pass it."""
    want = {"outputs": {"y": {"shape": [1], "values": [2.0]}}, "rtol": rtol}
    assert (probe_differs(want, {"y": np.array([got])}) is not None) == differs


HEADER_TEXTS = {"backend": 60, "model_digest": 200, "plugins": 200}


@pytest.mark.parametrize("key", HEADER_TEXTS)
def test_texts_of_the_header_may_have_their_longest_length(key):
    good = engine_bytes(make_plan(conv_net()))

    def refusal(length):
        parts = sections_of(good)
        header = json.loads(parts["header"])
        header[key] = {"p": "1" * length} if key == "plugins" else "x" * length
        parts["header"] = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        try:
            read_engine(assemble(parts))
        except WhetError as e:
            return str(e)
        return ""

    limit = HEADER_TEXTS[key]
    assert "text of at most" not in refusal(limit)
    assert f"text of at most {limit} characters" in refusal(limit + 1)


def test_records_may_have_texts_as_long_as_the_largest_section_with_records():
    assert schema.LONGEST_TEXT == max(SECTIONS[n] for n in SECTIONS if n not in ("weights", "packed"))


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("part", ["reserved", "after the name"])
def test_reserved_bytes_of_the_section_table_must_be_zero(row, part):
    """A reader that ignored them would let two files with other bytes have one digest, and a later format could not use them."""
    data = bytearray(written(*(Section(n, [b"x"]) for n in KNOWN)))
    at = HEAD.size + row * ENTRY.size + (ENTRY.size - 1 if part == "reserved" else 20)
    data[at] = 1
    table = data[HEAD.size : HEAD.size + len(KNOWN) * ENTRY.size]
    data[32:64] = hashlib.sha256(bytes(data[:32]) + bytes(table)).digest()
    with pytest.raises(EngineError, match="unknown or duplicated"):
        read_sections(memoryview(bytes(data)), KNOWN, frozenset())


@pytest.mark.parametrize(("count", "shortened"), [(12, False), (13, True)])
def test_names_of_more_than_twelve_source_nodes_are_shortened(count, shortened):
    net = Network("n", "lowered")
    x = net.add_input("x", parse_type("f32[2]"))
    y = net.add("Relu", x, name="layer")
    net.layers[0].sources = tuple(f"s{i}" for i in range(count))
    net.mark_output(y)
    (name,) = display_names(net).values()
    assert name == ("s0 + s1 + s2 + s3 + s4 + ... 7 more + s12" if shortened else " + ".join(f"s{i}" for i in range(12)))


def test_scratch_may_end_before_the_arena_and_not_behind_it():
    plan = make_plan(conv_net())
    arena = plan.arenas[0]
    end = arena.total
    arena.total, arena.scratch_offset, arena.scratch_bytes = end + 128, end, 64
    check_plan(plan)
    arena.scratch_bytes = 128
    check_plan(plan)
    arena.scratch_bytes = 129
    with pytest.raises(EngineError, match="the scratch is outside"):
        check_plan(plan)


def header(count, table, size=None, rest=b""):
    """A file with this section table, a valid digest, and `rest` after it."""
    start = HEAD.pack(b"whet-eng", VERSION, count, HEAD.size + len(table) + len(rest) if size is None else size, b"", b"")[:32]
    return memoryview(start + hashlib.sha256(start + table).digest() + table + rest)


@pytest.mark.parametrize(("count", "entries", "said"), [
    (0, 0, "0 sections in 64 bytes"), (1, 0, "1 sections in 64 bytes"), (2, 1, "2 sections in"),
    (MAX_SECTIONS, MAX_SECTIONS, "unknown or duplicated"),
    (MAX_SECTIONS + 1, MAX_SECTIONS + 1, f"{MAX_SECTIONS + 1} sections in"),
])  # fmt: skip
def test_numbers_of_sections(count, entries, said):
    with pytest.raises(EngineError, match=said):
        read_sections(header(count, bytes(ENTRY.size * entries)), KNOWN, frozenset())


def test_a_section_ends_within_the_file_and_the_last_one_at_its_end():
    content, at = b"x" * 64, 192
    for size, said in ((64, None), (65, "should begin at 192 and end within 256"), (256, "should begin at 192 and end within 256")):
        table = ENTRY.pack(b"a", at, size, hashlib.sha256(content).digest(), b"")
        data = header(1, table, rest=bytes(at - HEAD.size - ENTRY.size) + content)
        assert len(data) == 256
        if said is None:
            assert bytes(read_sections(data, KNOWN, frozenset())["a"]) == content
        else:
            with pytest.raises(EngineError, match=said):
                read_sections(data, KNOWN, frozenset())
    for more in (1, 64, 100, 1000):
        table = ENTRY.pack(b"a", at, 64, hashlib.sha256(content).digest(), b"")
        with pytest.raises(EngineError, match=f"the engine has {more} bytes after its last section"):
            read_sections(header(1, table, rest=bytes(at - HEAD.size - ENTRY.size) + content + bytes(more)), KNOWN, frozenset())


def test_a_constant_names_an_expression_that_exists():
    rows = Reader([["d", "f32[2]", 1, None]], "constants")
    for nodes in (["n"], []):
        with pytest.raises(EngineError, match="constants"):
            list(weights.read_constants(rows, nodes, {}))
    with pytest.raises(EngineError, match="an integer from 0 to 0, it is '1'"):
        list(weights.read_constants(rows, ["n"], {}))
    (constant,) = weights.read_constants(rows, ["n", "m"], {})
    assert constant.node == 1


@pytest.mark.parametrize(("size", "have"), [(16, 8), (16, 15), (16, 0)])
def test_an_array_ends_within_the_weights(size, have):
    with pytest.raises(EngineError, match=f"an array of {size} bytes at 0, within the {have} of the weights"):
        weights.read_arrays(Reader([["w", "f32[4]", 0, size, "d"]], "index"), memoryview(bytes(have)))
    _, types = weights.read_arrays(Reader([["w", "f32[4]", 0, 16, "d"]], "index"), memoryview(bytes(16)))
    assert [str(t) for t in types.values()] == ["f32[4]"]


def test_a_source_may_have_a_name_of_ten_thousand_letters():
    def read(length):
        return weights.read_nodes(Reader([["source", "n" * length, [], "d", 0, []]], "nodes"), {})

    assert read(10_000)[0][0].name == "n" * 10_000
    with pytest.raises(EngineError, match="text of at most 10000 characters"):
        read(10_001)


def test_sections_keep_their_largest_sizes():
    """A file that an earlier version could write stays readable (docs/design/engine_file.md has the sizes)."""
    sizes = {"header": 4, "choices": 16, "arenas": 16, "packed_index": 16, "network": 64, "further": 64, "tail": 64, "index": 64, "info": 64}
    assert {name: SECTIONS[name] >> 20 for name in sizes} == sizes
    assert SECTIONS["weights"] == SECTIONS["packed"] == 1 << 46


@pytest.mark.parametrize("name", ["", "named"])
def test_the_cost_of_an_expression_is_its_number_of_operations(name):
    """With a name a row is read piece by piece, without one at once."""
    rows = [["source", "s", [], "d", 0, []], *(["Neg", name, [k], [], 0, []] for k in range(5)), ["Add", name, [3, 3], [], 0, []]]
    assert [node[3] for node in weights.read_nodes(Reader(rows, "nodes"), {})] == [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize(
    ("layer", "said"),
    [("Relu(none)", "needs its first 1 inputs"), ("MatMul(%x)", "needs its first 2 inputs"), ("Relu(%x, %x)", "takes at most 1 input")],
)
def test_a_layer_with_other_numbers_of_operands_is_refused(layer, said):
    text = f"network n lowered\nin %x: f32[2,2]\n%y: f32[2,2] = {layer}\nout %y\n"
    with pytest.raises(EngineError, match=rf"the network cannot be read: .*'y' {said}"):
        read_text(memoryview(text.encode()), (), "n", {})


@pytest.mark.parametrize(("length", "accepted"), [(200, True), (201, False)])
def test_names_of_attributes_are_limited_wherever_their_value_was_read_before(length, accepted):
    rows = [["source", "s", [], "d", 0, []], ["Neg", "", [0], [["a", "1"]], 0, []], ["Neg", "", [1], [["k" * length, "1"]], 0, []]]
    if accepted:
        assert weights.read_nodes(Reader(rows, "nodes"), {})[2][0].attrs == (("k" * length, 1),)
    else:
        with pytest.raises(EngineError, match="text of at most 200 characters"):
            weights.read_nodes(Reader(rows, "nodes"), {})
