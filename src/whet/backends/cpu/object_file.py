"""Loading compiled objects (ELF, x86-64) without LLVM, whose library takes 60 MiB of memory and a tenth of a second to load.

LLVM compiles kernels for the large code model: all addresses in their code are absolute 64-bit words.
"""

from __future__ import annotations

import ctypes as C
import mmap
import platform
import struct
import sys
from dataclasses import dataclass

_X86_64, _ABSOLUTE = 62, 1  # e_machine; R_X86_64_64
SYMBOLS, RELOCATIONS, NO_BITS = 2, 4, 8  # sh_type
_WRITE, ALLOCATED, _THREAD_LOCAL = 1, 2, 0x400  # sh_flags
_UNDEFINED, _RESERVED = 0, 0xFF00  # sections of symbols
UNWIND = ".eh_frame"  # kernels raise no exceptions


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    section: int
    value: int


class UnsupportedObject(Exception):
    """The object needs more than absolute addresses, or a function that the process does not have."""


def can_load() -> bool:
    return sys.platform == "linux" and platform.machine().lower() in ("x86_64", "amd64")


def load_object(code: bytes) -> dict[str, int]:
    """Maps the object's code into memory, for as long as the process lives, and returns the addresses of its functions.

    Raises UnsupportedObject.
    """
    try:
        return _load(code)
    except (struct.error, IndexError, ValueError) as error:
        raise UnsupportedObject(f"damaged: {error}") from None


def _load(code: bytes) -> dict[str, int]:
    if not can_load() or code[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", code, 18)[0] != _X86_64:
        raise UnsupportedObject("not an object for this machine")
    sections = list_sections(code)
    symbols = next((list_symbols(code, sections, s) for s in sections if s.kind == SYMBOLS), [])
    loaded = {k: s for k, s in enumerate(sections) if s.flags & ALLOCATED and s.name != UNWIND and s.size}
    if any(s.flags & _THREAD_LOCAL for s in loaded.values()):
        raise UnsupportedObject("thread-local data")
    fixed, fixed_bytes = place_sections({k: s for k, s in loaded.items() if not s.flags & _WRITE})
    written, written_bytes = place_sections({k: s for k, s in loaded.items() if s.flags & _WRITE})
    libc = C.CDLL(None, use_errno=True)
    libc.mmap.argtypes, libc.mmap.restype = [C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long], C.c_void_p
    libc.mprotect.argtypes = [C.c_void_p, C.c_size_t, C.c_int]
    base = libc.mmap(None, fixed_bytes + written_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base in (None, C.c_void_p(-1).value):
        raise MemoryError("no memory for a kernel's code")
    at = {k: base + offset for k, offset in fixed.items()} | {k: base + fixed_bytes + offset for k, offset in written.items()}
    for k, s in loaded.items():
        if s.kind != NO_BITS:
            C.memmove(at[k], code[s.offset : s.offset + s.size], s.size)
    for s in sections:
        if s.kind == RELOCATIONS and s.info in at:
            _relocate(code, s, at, symbols, C.CDLL(None))
    if libc.mprotect(base, fixed_bytes, mmap.PROT_READ | mmap.PROT_EXEC):
        raise UnsupportedObject("the system does not let memory become code")
    return {s.name: at[s.section] + s.value for s in symbols if s.name and s.section in at}


def list_sections(code: bytes) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", code, 0x28)
    count, names = struct.unpack_from("<HH", code, 0x3C)
    rows = [struct.unpack_from("<IIQQQQIIQQ", code, start + 64 * k) for k in range(count)]
    return [
        _Section(_read_name(code, rows[names][4] + r[0]), r[1], r[2], r[4], r[5], r[6], r[7], max(r[8], 1))
        for r in rows
    ]  # fmt: skip


def list_symbols(code: bytes, sections: list[_Section], table: _Section) -> list[_Symbol]:
    strings = sections[table.link].offset
    rows = (struct.unpack_from("<IBBHQQ", code, table.offset + 24 * k) for k in range(table.size // 24))
    return [_Symbol(_read_name(code, strings + r[0]), r[3], r[4]) for r in rows]


def _read_name(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()


def place_sections(sections: dict[int, _Section]) -> tuple[dict[int, int], int]:
    """The offset of each section, and the bytes of all of them in whole pages."""
    offsets, end = {}, 0
    for k, s in sections.items():
        offsets[k] = -(-end // s.alignment) * s.alignment
        end = offsets[k] + s.size
    return offsets, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def _relocate(code: bytes, table: _Section, at: dict[int, int], symbols: list[_Symbol], process: C.CDLL) -> None:
    """Writes the addresses of symbols into a section."""
    for k in range(table.size // 24):
        offset, info, addend = struct.unpack_from("<QQq", code, table.offset + 24 * k)
        if info & 0xFFFFFFFF != _ABSOLUTE:
            raise UnsupportedObject(f"relocation {info & 0xFFFFFFFF}")
        symbol = symbols[info >> 32]
        if symbol.section in at:
            address = at[symbol.section] + symbol.value
        elif symbol.section == _UNDEFINED and hasattr(process, symbol.name):
            address = C.cast(getattr(process, symbol.name), C.c_void_p).value or 0
        else:
            raise UnsupportedObject(f"symbol {symbol.name!r}")
        C.c_uint64.from_address(at[table.info] + offset).value = address + addend
