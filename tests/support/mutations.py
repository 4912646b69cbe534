"""Mutations of files by a seeded generator: bytes, text, JSON values, and fields of protobuf messages."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from google.protobuf.message import Message

NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 64, 255, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e30, -1e30, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "x", "N", "\0", "é\u2028", "../../etc/passwd", "/dev/zero", "A" * 5000, "NOTSET", "1e999", "true", "[" * 500]
VALUES: list[Any] = [*NUMBERS, 10**30, *FLOATS, *TEXTS, None, True, False, [], {}, [[]], [None], [0] * 5000, {"a": {"b": {}}}]
TOKENS = [
    "-1", "0", "99999999999999999999", "1e999", "nan", "&a *a", "*a", "{", "}", "[", "]", ":", "\t", "\n", "!!python/object:os.system", '"', "~",
]  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flips, removes, repeats, inserts and overwrites bytes; 1 to 16 edits."""
    b = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, n = (rng.randrange(len(b)), rng.randrange(1, 64)) if b else (0, 1)
        match rng.randrange(7):
            case 0:
                b[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del b[at:]
            case 2:
                del b[at : at + rng.randrange(1, 9)]
            case 3:
                b[at:at] = b[max(at - n, 0) : at]
            case 4:
                b[at : at + 9] = rng.choice((b"\xff" * 9 + b"\x01", bytes(9), b"\x80" * 9, b"\xff\xff\xff\xff\x7f"))
            case 5:
                b[at : at + n] = rng.randbytes(n)
            case _:
                b[at : at + 1] = bytes([b[at] ^ (1 << rng.randrange(8))]) if b else b""
    return bytes(b)


def mutate_text(rng: random.Random, text: str) -> str:
    """Removes, repeats, swaps and replaces lines and tokens."""
    lines = text.splitlines(keepends=True) or [""]
    for _ in range(rng.choice((1, 1, 2, 4))):
        k = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                lines[k] = ""
            case 1:
                lines.insert(k, lines[rng.randrange(len(lines))] * rng.choice((1, 2, 50)))
            case 2:
                j = rng.randrange(len(lines))
                lines[k], lines[j] = lines[j], lines[k]
            case 3:
                del lines[k + 1 :]
            case _:
                words = lines[k].split(" ")
                words[rng.randrange(len(words))] = rng.choice([*TOKENS, str(rng.choice(VALUES))[:6000]])
                lines[k] = " ".join(words) + ("" if words[-1].endswith("\n") else "\n")
    return "".join(lines)


def mutate_json(rng: random.Random, tree: Any) -> str:
    """The text of `tree` with 1 to 4 values replaced, removed, moved or nested."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder, key = _place(rng, tree)
        if holder is None:
            return json.dumps(rng.choice(VALUES))
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1:
                other, at = _place(rng, tree)
                holder[key] = copy.deepcopy(other[at]) if other is not None else None
            case 2 if isinstance(holder, dict):
                holder[rng.choice([t for t in TEXTS if t])] = holder.pop(key)
            case 3:
                holder[key] = [holder[key]]
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(tree)


def _place(rng: random.Random, tree: Any) -> tuple[Any, Any]:
    """A random container in the tree and a key of it; (None, None) for an empty tree."""
    holder, key = None, None
    while isinstance(tree, dict | list) and tree:
        holder, key = tree, (rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree)))
        tree = holder[key]
        if rng.randrange(4) == 0:
            break
    return holder, key


def mutate_message(rng: random.Random, message: Message) -> Message:
    """A copy of the message with 1 to 4 fields, at any depth, cleared, set to odd values, repeated, swapped or copied from elsewhere."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.choice((1, 1, 2, 4))):
        _mutate_field(rng, changed)
    return changed


def _mutate_field(rng: random.Random, message: Any) -> None:
    inner = message
    while True:  # walks down, entering a submessage with probability 4/5
        fields = [f for f, _ in inner.ListFields()]
        below = [f for f in fields if f.message_type is not None and not f.message_type.GetOptions().map_entry]
        if not below or rng.randrange(5) == 0:
            break
        f = rng.choice(below)
        inner = rng.choice(list(getattr(inner, f.name))) if _is_repeated(f) else getattr(inner, f.name)
    descriptor = rng.choice(list(inner.DESCRIPTOR.fields) if rng.randrange(4) == 0 or not fields else fields)
    if descriptor.message_type is not None:
        _mutate_submessage(rng, inner, descriptor)
        return
    if rng.randrange(6) == 0:
        inner.ClearField(descriptor.name)
        return
    try:
        if _is_repeated(descriptor):
            values = getattr(inner, descriptor.name)
            if len(values) and rng.randrange(2):
                values[rng.randrange(len(values))] = _value(rng, descriptor, values)
            else:
                values.extend([_value(rng, descriptor, values) for _ in range(rng.choice((1, 1, 3, 1000)))])
        else:
            setattr(inner, descriptor.name, _value(rng, descriptor, (getattr(inner, descriptor.name),)))
    except (ValueError, TypeError):
        inner.ClearField(descriptor.name)  # a value that the field's type cannot hold


def _mutate_submessage(rng: random.Random, inner: Any, f: Any) -> None:
    if not _is_repeated(f):
        if rng.randrange(2):
            inner.ClearField(f.name)
        else:
            getattr(inner, f.name).SetInParent()
        return
    items = getattr(inner, f.name)
    if f.message_type.GetOptions().map_entry or not len(items):
        inner.ClearField(f.name)
        return
    a, b = rng.randrange(len(items)), rng.randrange(len(items))
    match rng.randrange(4):
        case 0:
            del items[a]
        case 1:
            items.add().CopyFrom(items[a])
        case 2:
            items[a].CopyFrom(copy.deepcopy(items[b]))
        case _:
            first, second = copy.deepcopy(items[a]), copy.deepcopy(items[b])
            items[a].CopyFrom(second)
            items[b].CopyFrom(first)


def _value(rng: random.Random, f: Any, present: Any) -> Any:
    """A value for a field: odd, or one that it has elsewhere."""
    if len(present) and rng.randrange(4) == 0:
        return rng.choice(list(present))
    if f.cpp_type in (f.CPPTYPE_FLOAT, f.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if f.cpp_type == f.CPPTYPE_BOOL:
        return bool(rng.randrange(2))
    if f.cpp_type == f.CPPTYPE_ENUM:
        return rng.choice([v.number for v in f.enum_type.values])
    if f.cpp_type == f.CPPTYPE_STRING:
        if f.type == f.TYPE_BYTES:
            return mutate_bytes(rng, present[0]) if len(present) and present[0] else rng.randbytes(rng.choice((0, 1, 8, 4096)))
        return rng.choice(TEXTS)
    return rng.choice(NUMBERS)


def _is_repeated(f: Any) -> bool:
    return f.is_repeated if hasattr(f, "is_repeated") else f.label == f.LABEL_REPEATED
