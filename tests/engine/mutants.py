"""Damaged and hostile engine files derived from good ones, by seed: raw damage, and edits with valid checksums that reach deeper checks."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import Any

from whet.engine.file import SECTIONS, compress_info, decompress_info
from whet.engine.layout import ENTRY, HEAD, Section, read_sections, write_sections
from whet.ops import OPS

_DEEP = frozenset({"weights", "packed"})
NUMBERS = [-1, 0, 1, 2, 3, 7, 64, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**18, 10**30]
NUMBERS += [10**400]
FORMATS = ["linear", "nhwc", "nChw8c", "nChw16c"]
TYPES = ["f64", "f32", "f16", "bf16", "f8e4m3", "i64", "i32", "i8", "i4", "u8", "bool", "string"]
MARK = "1\n__device__ void injected() {}\n#include \"/etc/passwd\""  # text that no kernel source may contain
VALUES: list[Any] = [
    *NUMBERS, 0.5, -0.0, 1e308, 1e-300, True, False, None, "", "x", "cpu", "cuda", "../../etc/passwd", "\0", "é\u2028", "A" * 100_000,
    [], {}, [[]], [None], [0] * 10_000, {"a": {"b": {}}}, *FORMATS, *TYPES,
    "cpu/onednn_conv", "cpu/onednn_matmul", "cpu/onednn_pool", "cpu/onednn_reformat", "cpu/view", "cpu/numpy_reference",
    "cpu/numpy_reformat", "cpu/none", "cuda/gemm", MARK,
]  # fmt: skip


def sections_of(data: bytes) -> dict[str, bytes]:
    """The sections of a good file, `info` decompressed."""
    parts = read_sections(memoryview(data), SECTIONS, _DEEP)
    return {n: decompress_info(v) if n == "info" else bytes(v) for n, v in parts.items()}


class _Bytes(list):
    def write(self, data) -> None:
        self.append(bytes(data))


def assemble(parts: dict[str, bytes]) -> bytes:
    """A file of these sections with valid checksums."""
    out = _Bytes()
    digests = {"weights": parts.get("index"), "packed": parts.get("packed_index")}
    made = []
    for name, body in parts.items():
        of = digests.get(name)
        stored = compress_info(body) if name == "info" else body
        made.append(Section(name, [stored], hashlib.sha256(of).digest() if of is not None else b""))
    write_sections(made, out)
    return b"".join(out)


# raw damage: none of these files may open


def flip(rng: random.Random, data: bytes) -> bytes:
    bad = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice([rng.randrange(len(data)), rng.randrange(1024), len(data) - 1 - rng.randrange(256)])]


def extend(rng: random.Random, data: bytes) -> bytes:
    tail = rng.choice([bytes(rng.randrange(1, 200)), rng.randbytes(rng.randrange(1, 4096)), data])
    return data + tail


def overwrite(rng: random.Random, data: bytes) -> bytes:
    at, n = rng.randrange(len(data)), rng.randrange(1, 512)
    fresh = rng.choice([rng.randbytes(n), bytes(n), b"\xff" * n, data[:n]])
    return data[:at] + fresh + data[at + n :]


# edits of the table, with a valid checksum


def table(rng: random.Random, data: bytes) -> bytes:
    magic, version, count, size, zero, _ = HEAD.unpack(data[: HEAD.size])
    rows = [list(ENTRY.unpack(data[HEAD.size + k * ENTRY.size :][: ENTRY.size])) for k in range(count)]
    k = rng.randrange(count)
    match rng.randrange(9):
        case 0:
            rows[k][1] = _u64(rng, rows[k][1])
        case 1:
            rows[k][2] = _u64(rng, rows[k][2])
        case 2:
            rows[k][0] = rng.choice([b"network", b"x", b"\xff" * 24, rows[rng.randrange(count)][0]]).ljust(24, b"\0")
        case 3:
            j = rng.randrange(count)
            rows[k][1:4], rows[j][1:4] = rows[j][1:4], rows[k][1:4]
        case 4:
            rows[k], rows[rng.randrange(count)] = rows[rng.randrange(count)], rows[k]
        case 5:
            rows[k][4] = rng.randbytes(24)
        case 6:
            size = _u64(rng, size)
        case 7:
            version = rng.randrange(1 << 32)
        case 8:
            count = rng.choice([0, count - 1, count + 1, 31, 33, 2**31, 2**32 - 1])
    body = b"".join(ENTRY.pack(*r) for r in rows)
    start = HEAD.pack(magic, version, count, size, zero, b"")[:32]
    claimed = (body + data[HEAD.size + len(body) :])[: min(count * ENTRY.size, len(data))]
    return start + hashlib.sha256(start + claimed).digest() + body + data[HEAD.size + len(body) :]


def _u64(rng: random.Random, old: int) -> int:
    return rng.choice([0, 1, 63, 64, old + 64, max(old - 64, 0), old + 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**64 - 64, rng.randrange(2**64)])


def swap(rng: random.Random, data: bytes) -> bytes:
    """Sections omitted, exchanged, repeated under another name, reordered."""
    parts = sections_of(data)
    a, b = rng.sample(list(parts), 2)
    match rng.randrange(4):
        case 0:
            del parts[a]
        case 1:
            parts[a], parts[b] = parts[b], parts[a]
        case 2:
            parts[a] = parts[b]
        case 3:
            order = list(parts)
            rng.shuffle(order)
            parts = {n: parts[n] for n in order}
    return assemble(parts)


# edits of the content, with valid checksums


def json_value(rng: random.Random, data: bytes) -> bytes:
    """Some values of a JSON section replaced, removed, added or exchanged."""
    parts = sections_of(data)
    name = rng.choice([n for n in ("header", "choices", "arenas", "further", "index", "info", "packed_index") if n in parts])
    tree = json.loads(parts[name])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _edit(rng, tree)
    parts[name] = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    return assemble(parts)


def _edit(rng: random.Random, tree: Any) -> None:
    places = list(_places(tree))
    if not places:
        return
    holder, key = rng.choice(places)
    match rng.randrange(7):
        case 0 | 1 | 2:
            holder[key] = _value(rng)
        case 3:
            if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += rng.choice([-65, -64, -1, 1, 2, 64, 4096])
            elif isinstance(holder[key], str):
                holder[key] = holder[key][::-1]
        case 4:
            del holder[key]
        case 5:
            if isinstance(holder, list):
                holder.insert(rng.randrange(len(holder) + 1), _value(rng))
            else:
                holder[rng.choice(["extra", "x", key + "_"])] = _value(rng)
        case 6:
            other, k = rng.choice(places)
            if not isinstance(holder, list) or key < len(holder):
                holder[key], other[k] = json.loads(json.dumps(other[k])), json.loads(json.dumps(holder[key]))


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))  # a copy: later edits of this file must not change the next one


def _places(tree: Any):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def json_text(rng: random.Random, data: bytes) -> bytes:
    """Damage to the text of a JSON section."""
    parts = sections_of(data)
    name = rng.choice([n for n in ("header", "choices", "arenas", "further", "index", "info") if n in parts])
    body, at = parts[name], rng.randrange(len(parts[name]))
    fresh = rng.choice([
        b"NaN", b"Infinity", b"1e999", b"[" * 100_000, b'{"a":' * 5000, b'"' * 3, b"\xff\xfe", b"1" * 5000, b",", b"",
        b'"a":1,"a":2', b"\\u0000",
        rng.randbytes(4), b"-", b"/**/", b"[" * 900 + b"]" * 900, b" ",
    ])  # fmt: skip
    parts[name] = body[:at] + fresh + body[at + rng.choice([0, 1, len(fresh)]) :]
    return assemble(parts)


def text(rng: random.Random, data: bytes) -> bytes:
    """Edits of the network's text, or of that of a further profile."""
    parts = sections_of(data)
    further = json.loads(parts.get("further", b"[]"))
    of = rng.randrange(len(further)) if further and rng.randrange(2) else None
    lines = (parts["network"].decode() if of is None else further[of]["network"]).split("\n")
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        _edit_line(rng, lines)
    if of is None:
        parts["network"] = "\n".join(lines).encode(errors="replace")
    else:
        further[of]["network"] = "\n".join(lines)
        parts["further"] = json.dumps(further, sort_keys=True, separators=(",", ":")).encode(errors="replace")
    return assemble(parts)


def _edit_line(rng: random.Random, lines: list[str]) -> None:
    k = rng.randrange(len(lines))
    line = lines[k]
    match rng.randrange(13):
        case 0:
            numbers = list(re.finditer(r"-?\d+", line))
            if numbers:
                m = rng.choice(numbers)
                lines[k] = line[: m.start()] + str(rng.choice(NUMBERS)) + line[m.end() :]
        case 1:
            lines[k] = re.sub(r"= (\w+)\(", lambda m: f"= {rng.choice(sorted(OPS))}(", line, count=1)
        case 2:
            del lines[k]
        case 3:
            lines.insert(k, rng.choice(lines))
        case 4:
            j = rng.randrange(len(lines))
            lines[k], lines[j] = lines[j], lines[k]
        case 5:
            lines[k] = re.sub(r": \w+\[", lambda m: f": {rng.choice(TYPES)}[", line, count=1)
        case 6:
            long = ["*".join(["(a+b+c)"] * 30), "9" * 3000, "N*" * 600 + "N", "min(" * 100 + "N" + ",2)" * 100]
            dim = rng.choice(["N", "(N+1)*(N+2)", "N//0", "min(N,4)", "-5", "0", "max(N", *long])
            lines[k] = re.sub(r"\[(\w+)", lambda m: f"[{dim}", line, count=1)
        case 7:
            const = rng.choice(["seed(1)", "[1, 2]", "sha256:" + "0" * 64, "[" + "1, " * 1000 + "]", "((((" * 500, "float('nan')"])
            lines.insert(k, f"const %new{rng.randrange(99)}: f32[{rng.choice(['100000,100000', '2', '0', '', '1000000000000'])}] = {const}")
        case 8:
            names = re.findall(r"%[\w./:]+", "\n".join(lines))
            if names:
                lines[k] = re.sub(r"%[\w./:]+", lambda m: rng.choice(names), line, count=1)
        case 9:
            attr = rng.choice("axis pads strides group kernel_shape perm shape num_outputs repeats composite to split".split())
            value = rng.choice(["7", "-1", "(1, 1)", "(0, 0, 0, 0)", "1000000000", "(1000000000, 1000000000)", "'x'", "f32", "(" * 400])
            lines[k] = line.replace(")", f", {attr}={value})", 1)
        case 10:
            lines[k] = line + rng.choice([" {", " }", " named x", ' from "', "\x00", " \u2028", " from " + '"a", ' * 20_000 + '"b"'])
        case 11:
            lines[k:k] = ["%deep = Fused(composite='x') {", "  region body"] * rng.choice([1, 5, 50, 2000])
        case 12:
            at = rng.randrange(len(line) + 1)
            lines[k] = line[:at] + chr(rng.choice([0, 9, 34, 37, 40, 61, 92, 125, 200, 0x2028, 0x1F600])) + line[at:]


def weights(rng: random.Random, data: bytes) -> bytes:
    """Changed values in a stored array with valid digests: a good engine with unusual weights."""
    parts = sections_of(data)
    index, raw = json.loads(parts["index"]), bytearray(parts["weights"])
    if not index["weights"]:
        return choice(rng, data)
    row = rng.choice(index["weights"])
    _, type_text, at, size, digest = row
    if size:
        fresh = rng.choice([rng.randbytes(size), bytes(size), b"\xff" * size, b"\x00\x00\x80\x7f" * (size // 4) + bytes(size % 4)])
        raw[at : at + size] = fresh
        now = hashlib.sha256(type_text.encode() + fresh).hexdigest()
        parts["index"] = json.dumps(index, sort_keys=True, separators=(",", ":")).replace(digest, now).encode()
        parts["network"] = parts["network"].replace(digest.encode(), now.encode())
        parts["weights"] = bytes(raw)
    return assemble(parts)


def choice(rng: random.Random, data: bytes) -> bytes:
    """Plausible changes of tactics, formats, types, configs and in-place pairs: the loader plans them."""
    parts = sections_of(data)
    choices = json.loads(parts["choices"])
    for _ in range(rng.choice([1, 1, 2, 5])):
        c = choices[rng.choice(sorted(choices))]
        match rng.randrange(6):
            case 0:
                c["tactic"] = rng.choice([v for v in VALUES if isinstance(v, str) and "/" in v])
            case 1:
                operands = [o for o in (*c["inputs"], *c["outputs"]) if o]
                rng.choice(operands)[rng.randrange(2)] = rng.choice(FORMATS + TYPES)
            case 2:
                c["config"] = rng.choice([[], [["impl", "ref:any"]], [["impl", 7]], [["x", "y"]], [["impl", "jit:avx512_core"]] * 2])
            case 3:
                c["inplace"] = rng.choice([[], [[0, 0]], [[1, 0]], [[0, 0], [0, 0]]])
            case 4:
                c["inputs"] = [rng.choice([None, ["linear", "f32"], ["nhwc", "f32"]]) for _ in c["inputs"]]
            case 5:
                c["rtol"] = rng.choice([0.0, -1.0, 1e9])
    parts["choices"] = json.dumps(choices, sort_keys=True, separators=(",", ":")).encode()
    return assemble(parts)


def config(rng: random.Random, data: bytes) -> bytes:
    """Values of tuning configs: source text, extreme and mistyped numbers, further and missing pairs."""
    parts = sections_of(data)
    choices = json.loads(parts["choices"])
    for _ in range(rng.choice([1, 1, 2])):
        pairs = choices[rng.choice(sorted(choices))]["config"]
        match rng.randrange(4) if pairs else 1:
            case 0:
                rng.choice(pairs)[1] = rng.choice([MARK, *NUMBERS, True, 4, 8, 16, 24, 0.5, "ref:any"])
            case 1:
                pairs.append([rng.choice(["bulk", "wide", "tall", "impl", "blocks", "pixels", "tile", "x"]), rng.choice([MARK, 1, 2, 10**9, -1])])
            case 2:
                pair = rng.choice(pairs)
                if isinstance(pair[1], int):
                    pair[1] += rng.choice([-1, 1, 2, 8, pair[1]])
                else:
                    pair[1] = f"{pair[1]}{MARK}"
            case 3:
                pairs.remove(rng.choice(pairs))
    parts["choices"] = _canonical(choices)
    return assemble(parts)


def arena(rng: random.Random, data: bytes) -> bytes:
    """Offsets, sizes, scratch and lanes of arenas: shifted, exchanged, equal, outside."""
    parts = sections_of(data)
    arenas = json.loads(parts["arenas"])
    a = rng.choice(arenas)
    names = sorted(a["offsets"])
    for _ in range(rng.choice([1, 1, 2, 4])):
        one, other = rng.choice(names), rng.choice(names)
        match rng.randrange(8):
            case 0:
                a["offsets"][one] += rng.choice([-64, 64, 128, 4096, -a["offsets"][one], 4, 1])
            case 1:
                a["offsets"][one], a["offsets"][other] = a["offsets"][other], a["offsets"][one]
            case 2:
                a["offsets"][one] = a["offsets"][other]
            case 3:
                a["sizes"][one] += rng.choice([-64, -1, 1, 64])
            case 4:
                a["total"] += rng.choice([-64, 64, 1 << 16, 1 << 40])
            case 5:
                a["scratch_offset"] = rng.choice([0, a["offsets"][one], a["total"]])
            case 6:
                a["scratch_bytes"] = rng.choice([0, 64, a["scratch_bytes"] * 2, 1 << 40])
            case 7:
                a["lanes"] = rng.choice([0, 1, 2, 3, 4096])
    parts["arenas"] = _canonical(arenas)
    return assemble(parts)


def types(rng: random.Random, data: bytes) -> bytes:
    """Storage types and formats, replaced in one choice, or everywhere in choices and network alike, so that they agree."""
    parts = sections_of(data)
    if rng.randrange(2):
        old, new = rng.sample(TYPES, 2) if rng.randrange(2) else rng.sample(FORMATS, 2)
        for name in ("choices", "network", "header"):
            if rng.randrange(3):
                parts[name] = parts[name].replace(old.encode(), new.encode())
        return assemble(parts)
    choices = json.loads(parts["choices"])
    for _ in range(rng.choice([1, 2, 2, 3])):
        c = choices[rng.choice(sorted(choices))]
        operands = [o for o in (*c["inputs"], *c["outputs"]) if o]
        k = rng.randrange(2)
        rng.choice(operands)[k] = rng.choice(TYPES if k else FORMATS)
    parts["choices"] = _canonical(choices)
    return assemble(parts)


def expression(rng: random.Random, data: bytes) -> bytes:
    """Expressions of dims in the network's text, and of constants in the index."""
    parts = sections_of(data)
    if rng.randrange(2) and b"N" in parts["network"]:
        dims = ["N+1", "N-1", "2*N", "8-N", "N*N", "N//2", "max(N,3)", "N*0+4", "M", "N*1000000", "(N+1)//2*2"]
        parts["network"] = re.sub(rb"\[N,", f"[{rng.choice(dims)},".encode(), parts["network"], count=rng.choice([0, 0, 1]))
        return assemble(parts)
    index = json.loads(parts["index"])
    if index["nodes"]:
        node = rng.choice(index["nodes"])
        match rng.randrange(4):
            case 0:
                node[0] = rng.choice("Add Mul Pad Concat Gather Cast Transpose Expand Tile literal Div Slice source".split())
            case 1 if node[2]:
                node[2][rng.randrange(len(node[2]))] = rng.randrange(len(index["nodes"]))
            case 2:
                value = rng.choice(["(9999999999,)", "-7", "(1, 0)", "f16", "'x'", "10**9"])
                node[3] = [[rng.choice(["axis", "pads", "perm", "to", "shape"]), value]]
            case _:
                index["nodes"].append(node)
        parts["index"] = _canonical(index)
    return assemble(parts)


def packed(rng: random.Random, data: bytes) -> bytes:
    """Values and keys of packed weights, their digests right: they are probed, or packed again."""
    parts = sections_of(data)
    if "packed" not in parts:
        return choice(rng, data)
    index, raw = json.loads(parts["packed_index"]), bytearray(parts["packed"])
    for _ in range(rng.choice([1, 1, 3])):
        row = rng.choice(index)
        _, at, size, _ = row
        if not size or rng.randrange(5) == 0:
            row[0] = rng.choice(index)[0] if rng.randrange(2) else MARK
            continue
        first, n = (0, size) if rng.randrange(2) else (rng.randrange(size), 64)
        n = min(n, size - first)
        indices = (10**9).to_bytes(4, "little") * (n // 4) + bytes(n % 4)
        raw[at + first : at + first + n] = rng.choice([rng.randbytes(n), bytes(n), b"\xff" * n, indices])
        row[3] = hashlib.sha256(raw[at : at + size]).hexdigest()
    parts["packed_index"], parts["packed"] = _canonical(index), bytes(raw)
    return assemble(parts)


def _canonical(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


RAW: dict[str, Callable[[random.Random, bytes], bytes]] = {"flip": flip, "cut": cut, "extend": extend, "overwrite": overwrite}
EDITS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "table": table, "swap": swap, "json_value": json_value, "json_text": json_text, "text": text, "weights": weights, "choice": choice,
    "config": config, "arena": arena, "types": types, "expression": expression, "packed": packed,
}  # fmt: skip


#: mutants of these kinds compute the same as the good engine, if they open at all: they do not edit the network or its source weights
SAME_ANSWERS = frozenset({*RAW, "table", "choice", "config", "arena", "packed"})


def mutant(seed: int, bases: list[bytes]) -> tuple[str, bytes, bytes]:
    """(kind, mutated file, original file) for a seed."""
    rng = random.Random(seed)
    base = bases[rng.randrange(len(bases))]
    kinds = {**RAW, **EDITS}
    weight = {"json_value": 4, "text": 5, "choice": 3, "config": 3, "arena": 3, "types": 3, "expression": 2, "packed": 2}
    kind = rng.choices(list(kinds), [weight.get(k, 1) for k in kinds])[0]
    return kind, kinds[kind](rng, base), base
