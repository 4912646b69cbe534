"""Packed weights in an engine file: optional, keyed, so that loading on the same machine does not pack again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from whet.engine.json_data import Reader, to_json
from whet.engine.layout import LazyArrays, Section, map_in_threads, pad_to_alignment, require_whole
from whet.errors import EngineError


def get_raw_bytes(a: np.ndarray) -> memoryview:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8).data if a.size else memoryview(b"")


def make_packed_sections(weights: Mapping[str, np.ndarray]) -> Iterator[Section]:
    """The two sections of packed weights, sorted by key."""
    rows, at = [], 0
    for key, a in sorted(weights.items()):
        rows.append([key, at, a.nbytes, hashlib.sha256(get_raw_bytes(a)).hexdigest()])
        at = pad_to_alignment(at + a.nbytes)
    index = to_json(rows)
    yield Section("packed_index", [index])
    yield Section("packed", [get_raw_bytes(a) for _, a in sorted(weights.items())], hashlib.sha256(index).digest())


def read(index: Reader, data: memoryview, digest: bytes, *, defer: bool = False) -> Mapping[str, np.ndarray]:
    """Arrays of bytes by key. Their digests are compared now, or with `defer` by the first access. Raises EngineError."""
    if hashlib.sha256(to_json(index.value)).digest() != digest:
        raise EngineError("section 'packed' is damaged: its digest does not match")
    arrays: dict[str, Callable[[], np.ndarray]] = {}
    at = end = 0
    for row in index.rows():
        key, offset, size, want = row.rows(4)
        if offset.integer() != at or at + size.integer() > len(data) or key.text(2000) in arrays:
            raise row.fail(f"a key and bytes at {at}, within the {len(data)} of the section")
        end = at + size.value
        arrays[key.value] = partial(_check, data[at:end], key.value, want.text(64))
        at = pad_to_alignment(end)
        if any(data[end : min(at, len(data))]):
            raise EngineError("the engine is damaged: bytes after a packed weight are not zero")
    if end != len(data):
        raise EngineError(f"the packed weights have {len(data)} bytes, their index says {end}")
    if defer:
        return LazyArrays(arrays)
    return dict(zip(arrays, map_in_threads(lambda check: check(), list(arrays.values())), strict=True))


def _check(raw: memoryview, key: str, digest: str) -> np.ndarray:
    require_whole(raw)
    if hashlib.sha256(raw).hexdigest() != digest:
        raise EngineError(f"the packed weight '{key[:60]}' is damaged: its digest does not match")
    return np.frombuffer(raw, np.uint8) if len(raw) else np.empty(0, np.uint8)
