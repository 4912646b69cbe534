"""Malicious engine files: excessive memory, excessive work, contradictions with valid checksums. Each is refused quickly, with its reason."""

import json
import time
import zlib

import pytest
from mutants import assemble, sections_of
from test_file import quantized_plan

from handmade import conv_net, make_plan
from whet.engine import engine_bytes, read_engine
from whet.errors import EngineError


@pytest.fixture(scope="module")
def good():
    return sections_of(engine_bytes(make_plan(conv_net())))


def edited(good, section, change):
    parts = dict(good)
    tree = json.loads(parts[section])
    change(tree)
    parts[section] = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    return assemble(parts)


def refused(data, text):
    start = time.process_time()
    with pytest.raises(EngineError, match=text):
        read_engine(data)
    assert time.process_time() - start < 5


def test_the_edit_without_a_change_opens(good):
    read_engine(edited(good, "index", lambda t: None))


def nodes(tree, *rows):
    """Replaces the expression of the first constant by the last of `rows`; node 0 stays conv1.weight, 1 bn1.weight."""
    assert [n[0] for n in tree["nodes"][:3]] == ["source", "source", "Add"]
    tree["nodes"] = tree["nodes"][:2] + list(rows)
    tree["constants"][0][2] = 1 + len(rows)
    for c in tree["constants"][1:]:
        c[2] = None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([["Pad", "", [0], [["pads", "(0, 0, 0, 0, 100000, 100000, 0, 0)"]], 0, []]], "far more memory than the file"),
        ([["Pad", "", [0], [["pads", "(0, 0, 0, 0, 4000000000000, 4000000000000, 0, 0)"]], 0, []]], "more than 2\\^40 elements"),
        ([["Concat", "", [k, k], [["axis", "0"]], 0, []] for k in (0, *range(2, 40))], "more than 64 operations"),
        ([["Concat", "", [0] * 40_000, [["axis", "0"]], 0, []]], "at most 1024 arguments"),
        ([["Expand", "", [0, 1], [], 0, []]], "Expand, which is not an exact operation"),
        ([["MatMul", "", [0, 1], [], 0, []]], "MatMul, which is not an exact operation"),
        ([["Nonsense", "", [0], [], 0, []]], "not an exact operation"),
        ([["Add", "", [0, 7], [], 0, []]], r"nodes\[2\].*integer from 0 to 1"),
        ([["Add", "", [2, 0], [], 0, []]], r"nodes\[2\].*integer from 0 to 1"),
        ([["Add", "", [0, 0], [], 0, []]], "a constant that has its type and digest"),
        ([["Add", "", [0, 1], [], 3, []]], "gives no weight 3"),
        ([["Add", "", [0, 0], [["n" * 201, "1"]], 0, []]], "at most 200"),
        ([["Add", "", [0, None], [], 0, []]], "gives no weight|a constant that has its type and digest|inconsistent|cannot be computed"),
        ([["Add", "", [0], [], 0, []]], "cannot be computed"),
        ([["Add", "", [0, None], [], 0, []]], "cannot be computed"),
        ([["Transpose", "", [0], [["perm", "((((" * 1000]], 0, []]], "an attribute's value"),
        ([["Transpose", "", [0], [["perm", "__import__('os')"]], 0, []]], "an attribute's value"),
        ([["Neg", "", [max(k - 1, 0) if k == 2 else k - 1], [], 0, []] for k in range(2, 100)], "more than 64 operations"),
        ([["literal", "", [], [["dtype", "f32"], ["shape", "(1000000000000,)"], ["values", "(1,)"]], 0, []]], "cannot be computed"),
    ],
)
def test_expressions(good, rows, text):
    refused(edited(good, "index", lambda t: nodes(t, *rows)), text)


def test_doubling_shared_expressions_costs_one_evaluation_each(good):
    """Node k adds node k-1 to itself: 2^60 paths but 60 nodes; the count of operations is checked before evaluation."""
    rows = [["Add", "", [k, k], [], 0, []] for k in range(1, 60)]
    refused(edited(good, "index", lambda t: nodes(t, *rows)), "more than 64 operations")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: rows[0].__setitem__(2, 64), "an array of"),
        (lambda rows: rows[0].__setitem__(3, 10**15), "an array of"),
        (lambda rows: rows[0].__setitem__(1, "f32[1000000000,1000000000]"), "an array of"),
        (lambda rows: rows[0].__setitem__(1, "f32[N]"), "a static tensor type"),
        (lambda rows: rows[0].__setitem__(1, "f32[-4,-27]"), "a static tensor type"),
        (lambda rows: rows[0].__setitem__(1, "string[4]"), "a static tensor type"),
        (lambda rows: rows[0].__setitem__(4, "0" * 64), "digest does not match"),
        (lambda rows: rows.append(rows[0]), "an array of"),
        (lambda rows: rows.clear(), "their index says otherwise"),
        (lambda rows: rows[0].__setitem__(1, "f32[" + ",".join(["1"] * 31 + ["4"]) + "]"), "digest does not match"),  # 32 axes
        (lambda rows: rows[0].__setitem__(1, "f32[" + ",".join(["1"] * 32 + ["4"]) + "]"), "a static tensor type"),
        (lambda rows: rows[0].__setitem__(1, "f32[" + ",".join(["1"] * 40 + ["4", "3", "3", "3"]) + "]"), "a static tensor type"),
    ],
)
def test_arrays(good, change, text):
    refused(edited(good, "index", lambda t: change(t["weights"])), text)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("in %x", "const %boom: f32[100000,100000] = seed(1)\nin %x", "not a constant with values or digest"),
        ("in %x", "const %boom: f32[1000000000000] = [1]\nin %x", "needs 1000000000000 values"),
        ("f32[N,3,8,8]", f"f32[{'*'.join(['(a+b+c+d)'] * 40)},3,8,8]", "more than 4096 terms"),
        ("f32[N,3,8,8]", f"f32[{'9' * 5000},3,8,8]", "more than 19 digits"),
        ("f32[N,3,8,8]", "f32[N//0,3,8,8]", "cannot be read"),
        ("Relu(", "Relu(" + "(" * 5000, "cannot be read"),
        ("network", "%d = Fused(composite='x') {\n  region body\n" * 5000 + "network", "regions are nested more than 34 deep"),
        ("pads=(1, 1, 1, 1)", "pads='\0'", "expected a string"),
        ("Relu(", "Sigmoid(", "not in canonical form|inconsistent|no layer"),
        ("Relu(%c1)", "Relu(%c1, %c1)", "takes at most 1 input; it has %c1, %c1"),
        ("out %y\n", "", "no outputs"),
        ("out %y\n", "out %y\nout %y\n", ""),
        ("lowered", "source", "lowered"),
        ('from "/relu1/Relu"', 'from "a\\nb"', ""),
        ("pads=(1, 1, 1, 1)", "pads=(1, 1, 1, 1000000000000000000)", ""),
        ("\n", "\n\n", "not in canonical form"),
        ("\n", "\n# a comment\n", "not in canonical form"),
    ],
)
def test_texts(good, old, new, text):
    body = good["network"].decode()
    assert old in body
    parts = {**good, "network": body.replace(old, new, 1).encode()}
    start = time.process_time()
    if (old == "Relu(" and new == "Sigmoid(") or not text:
        try:
            read_engine(assemble(parts))  # another good engine, or a refusal
        except EngineError:
            pass
    else:
        refused(assemble(parts), text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.update(threads=-1), r"header.threads should be an integer"),
        (lambda t: t.update(threads=True), r"header.threads should be an integer"),
        (lambda t: t.update(backend=7), r"header.backend should be text"),
        (lambda t: t.update(extra=1), "header should be an object with"),
        (lambda t: t.pop("probe"), "header should be an object with"),
        (lambda t: t.update(text_version=3), "text has version 3, this whet reads 2"),
        (lambda t: t["profiles"][0]["x"][0].__setitem__(0, -1), r"header.profiles\[0\].x\[0\]\[0\]"),
        (lambda t: t["profiles"][0]["x"][2].__setitem__(0, 2**40), "takes .* bytes, the engine says"),
        (lambda t: [shape.append(1) for shape in t["profiles"][0]["x"]], "its shapes of 'x' are not of rank 4"),
        (lambda t: t["profiles"].append(t["profiles"][0]), "2 profiles and 1 arenas"),
        (lambda t: t.update(name="other"), "the header says 'other'"),
        (lambda t: t["machine"].update(libraries=["x"]), "header.machine.libraries should be an object"),
        (lambda t: t.update(machine=deep(40)), "at most 24 levels"),
    ],
)
def test_headers(good, change, text):
    refused(edited(good, "header", change), text)


def deep(n):
    return {"a": deep(n - 1)} if n else {}


def test_noncanonical_json_is_refused(good):
    parts = {**good, "arenas": json.dumps(json.loads(good["arenas"])).encode()}
    refused(assemble(parts), "arenas is not in canonical form")
    refused(assemble({**good, "arenas": b'[{"a":1,"a":2}]'}), "duplicate key")
    refused(assemble({**good, "arenas": b"[NaN]"}), "NaN is not allowed as a number")
    refused(assemble({**good, "arenas": b"[" * 200_000}), "arenas cannot be read")
    refused(assemble({**good, "arenas": b"[1e999]"}), "arenas cannot be read")
    refused(assemble({**good, "arenas": b"1" * 10_000}), "arenas cannot be read")


@pytest.mark.parametrize("change", [
    lambda index: index["values"].append(index["values"][0]),
    lambda index: index["values"][0].__setitem__(0, len(index["nodes"])),
    lambda index: index["values"][0].__setitem__(0, next(k for k, n in enumerate(index["nodes"]) if n[0] == "source")),
    lambda index: index["values"][0].__setitem__(1, "0" * 64),
    lambda index: index["values"][0].__setitem__(0, len(index["nodes"]) - 1),
    lambda index: index.pop("values"),
])  # fmt: skip
def test_damaged_values_of_operations_are_refused(change):
    whole = sections_of(engine_bytes(quantized_plan()[0]))
    read_engine(edited(whole, "index", lambda index: None))
    with pytest.raises(EngineError):
        read_engine(edited(whole, "index", change))


@pytest.mark.parametrize(("section", "text"), [
    (zlib.compress(bytes(1 << 27)), "damaged or too large"),
    (zlib.compress(b"{}")[:-1], "damaged or too large"),
    (zlib.compress(b"{}") + b"x", "damaged or too large"),
    (b"{}", "section 'info' is damaged"),
])  # fmt: skip
def test_a_report_is_decompressed_up_to_a_limit(good, section, text, monkeypatch):
    monkeypatch.setattr("mutants.compress_info", lambda body: section)
    refused(assemble(good), text)
