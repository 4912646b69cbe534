"""The container of an engine file: magic, versions, a table of sections with digests, sections aligned to 64 bytes. Everything is validated.

    0   8   magic b"whet-eng"
    8   4   format version                      all integers are little-endian and unsigned
    12  4   number of sections
    16  8   bytes of the whole file
    24  8   zero
    32  32  SHA-256 of bytes 0 to 32 and of the table
    64      the table: 96 bytes a section: name (24, zero-padded), offset (8), size (8), SHA-256 (32), zero (24)
            then the sections, in the table's order, each at the next multiple of 64; the bytes between them are zero

The digest of a section covers its bytes, except for `deep` sections, whose reader checks every byte itself.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from whet.errors import EngineError
from whet.file_kinds import name_kind

T = TypeVar("T")
R = TypeVar("R")

MAGIC = b"whet-eng"
VERSION = 4
ALIGNMENT = 64
MAX_SECTIONS = 32
HEAD = struct.Struct("<8sIIQ8s32s")
ENTRY = struct.Struct("<24sQQ32s24s")


class Sink(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True)
class Section:
    """A section to write: its bytes in pieces (each at the next multiple of 64), or a digest in place of the bytes' own."""

    name: str
    pieces: Sequence[bytes | memoryview]
    digest: bytes = b""

    @property
    def size(self) -> int:
        at = 0
        for p in self.pieces:
            at = pad_to_alignment(at) + len(p)
        return at

    def content_digest(self) -> bytes:
        """The digest for the table."""
        if self.digest:
            return self.digest
        h, at = hashlib.sha256(), 0
        for p in self.pieces:
            h.update(bytes(pad_to_alignment(at) - at))
            h.update(p)
            at = pad_to_alignment(at) + len(p)
        return h.digest()


def pad_to_alignment(n: int) -> int:
    """The next multiple of 64."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def write_sections(sections: Sequence[Section], out: Sink) -> None:
    """Writes a whole file."""
    at = pad_to_alignment(HEAD.size + ENTRY.size * len(sections))
    table = b""
    for s in sections:
        table += ENTRY.pack(s.name.encode(), at, s.size, s.content_digest(), b"")
        at = pad_to_alignment(at + s.size)
    total = at
    start = HEAD.pack(MAGIC, VERSION, len(sections), total, b"", b"")[:32]
    head = start + hashlib.sha256(start + table).digest() + table
    out.write(head + bytes(pad_to_alignment(len(head)) - len(head)))
    for s in sections:
        done = 0
        for p in s.pieces:
            out.write(bytes(pad_to_alignment(done) - done))
            out.write(p)
            done = pad_to_alignment(done) + len(p)
        out.write(bytes(pad_to_alignment(done) - done))


def read_sections(data: memoryview, known: Mapping[str, int], deep: frozenset[str]) -> dict[str, memoryview]:
    """Sections by name, each checked. `known` maps names to the largest size allowed; `deep` ones are hashed by their own reader.

    Raises EngineError for any deviation from the output of `write_sections`.
    """
    if bytes(data[: len(MAGIC)]) != MAGIC and (kind := "an ONNX model" if _looks_like_onnx(data) else name_kind(data)):
        raise EngineError(f"this is not an engine of whet, but {kind}: `whet exec --onnx=MODEL --saveEngine=FILE` writes engines")
    if len(data) < HEAD.size:
        raise EngineError(f"this is not an engine: {len(data)} bytes are fewer than the {HEAD.size} of a header")
    magic, version, count, size, zero, digest = HEAD.unpack(data[: HEAD.size])
    if magic != MAGIC:
        raise EngineError("this is not an engine of whet: it does not begin with 'whet-eng'")
    if version != VERSION:
        raise EngineError(f"the engine has format version {version}, this whet reads {VERSION}: build it again, or open it with that whet")
    if size != len(data):
        raise EngineError(f"the engine should have {size} bytes, it has {len(data)}: it was truncated or extended")
    end = HEAD.size + ENTRY.size * count
    if not 0 < count <= MAX_SECTIONS or end > len(data) or any(zero):
        raise EngineError(f"the engine is damaged: {count} sections in {len(data)} bytes")
    table = data[HEAD.size : end]
    if hashlib.sha256(bytes(data[:32]) + bytes(table)).digest() != digest:
        raise EngineError("the engine is damaged: the digest of its section table does not match")
    sections: dict[str, memoryview] = {}
    at, last = pad_to_alignment(end), 0
    _all_zero(data[end:at], "after the table")
    for k in range(count):
        raw, offset, size, digest, zero = ENTRY.unpack(table[k * ENTRY.size : (k + 1) * ENTRY.size])
        name = raw.rstrip(b"\0").decode("ascii", "replace")
        if name not in known or name in sections or any(zero) or raw != name.encode("ascii", "replace").ljust(24, b"\0"):
            raise EngineError(f"the engine has a section '{name}' that is unknown or duplicated: it is damaged or from a newer whet")
        if offset != at or size > len(data) - at:
            raise EngineError(f"section '{name}' is at {offset} with {size} bytes; it should begin at {at} and end within {len(data)}")
        if list(known).index(name) < last:
            raise EngineError(f"section '{name}' is at a wrong offset: the engine is damaged")
        last = list(known).index(name)
        if size > known[name]:
            raise EngineError(f"section '{name}' has {size} bytes, more than the allowed {known[name]}")
        part = data[offset : offset + size]
        if name not in deep and hashlib.sha256(part).digest() != digest:
            raise EngineError(f"section '{name}' is damaged: its digest does not match")
        at = pad_to_alignment(offset + size)
        if at > len(data):
            raise EngineError(f"the engine is truncated after section '{name}'")
        _all_zero(data[offset + size : at], f"after section '{name}'")
        sections[name] = part
    if at != len(data):
        raise EngineError(f"the engine has {len(data) - at} bytes after its last section")
    return sections


def require_whole(data: memoryview) -> None:
    """Raises EngineError if the mapped file that holds `data` has become shorter: reading bytes that it no longer has ends the process (SIGBUS)."""
    mapped = data.obj
    if isinstance(mapped, mmap.mmap) and mapped.size() < len(mapped):
        raise EngineError("the engine's file became shorter while it was open: replace engine files by renaming new ones, do not write into them")


def read_table_digests(data: memoryview) -> dict[str, tuple[int, bytes]]:
    """(size, digest) per section of data accepted by `read_sections`."""
    count = HEAD.unpack(data[: HEAD.size])[2]
    digests = {}
    for k in range(count):
        raw, _, size, digest, _ = ENTRY.unpack(data[HEAD.size + k * ENTRY.size : HEAD.size + (k + 1) * ENTRY.size])
        digests[raw.rstrip(b"\0").decode()] = (size, digest)
    return digests


class LazyArrays(Mapping[str, np.ndarray]):
    """Arrays by name; the first access of each computes it, and raises EngineError if the file is damaged."""

    def __init__(self, compute: Mapping[str, Callable[[], np.ndarray]]):
        self._compute = dict(compute)
        self._computed: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._computed:
            self._computed[name] = self._compute[name]()
        return self._computed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._compute

    def __iter__(self) -> Iterator[str]:
        return iter(self._compute)

    def __len__(self) -> int:
        return len(self._compute)


def map_in_threads(function: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """Results for all values, in their order, computed by up to four threads: hashing releases the GIL."""
    count = min(4, os.cpu_count() or 1, len(values))
    if count < 2:
        return [function(v) for v in values]
    from concurrent.futures import ThreadPoolExecutor  # with logging: 8 ms

    with ThreadPoolExecutor(count, thread_name_prefix="whet-digests") as pool:
        return list(pool.map(function, values))


def _all_zero(gap: memoryview, where: str) -> None:
    if any(gap):
        raise EngineError(f"the engine is damaged: bytes {where} are not zero")


def _looks_like_onnx(data: memoryview) -> bool:
    """True if the data begin with an ONNX ir_version (field 1, 3 to 31) and another field of a ModelProto (opset_import, graph, strings)."""
    return len(data) > 2 and data[0] == 0x08 and 3 <= data[1] < 32 and data[2] in (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42)
