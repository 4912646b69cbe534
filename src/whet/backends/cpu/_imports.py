"""Replacing functions that a loaded shared library imports: the addresses in its table of imported functions (ELF, Linux)."""

from __future__ import annotations

import ctypes as C
import mmap
from collections.abc import Mapping

_STRINGS, _SYMBOLS, _JUMPS, _JUMP_BYTES = 5, 6, 23, 2  # DT_STRTAB, DT_SYMTAB, DT_JMPREL, DT_PLTRELSZ
_SYMBOL, _RELOCATION = 24, 24  # bytes of Elf64_Sym and Elf64_Rela
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def replace_imports(library: C.CDLL, addresses: Mapping[str, int], kept: tuple[str, ...]) -> bool:
    """Makes the library's calls of the functions in `addresses` go there. True if its table names all functions that it imports with the prefixes of
    these names (up to the first "_"), apart from those `kept`; otherwise nothing changes."""
    slots = list_import_slots(library)
    prefixes = {name.partition("_")[0] + "_" for name in addresses}
    ours = {name: slot for name, slot in slots.items() if name.startswith(tuple(prefixes)) and name not in kept}
    if not ours or not set(ours) <= set(addresses):
        return False
    protect = C.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [C.c_void_p, C.c_size_t, C.c_int]
    for name, slot in ours.items():
        page = slot // mmap.PAGESIZE * mmap.PAGESIZE
        if protect(page, slot + 8 - page, _READ_WRITE):  # read-only after relocation
            return False
        C.c_uint64.from_address(slot).value = addresses[name]
    return True


def list_import_slots(library: C.CDLL) -> dict[str, int]:
    """The address of each imported function's entry in the table, by name."""
    base, _, dynamic = (C.c_uint64 * 3).from_address(library._handle)  # struct link_map: l_addr, l_name, l_ld
    found: dict[int, int] = {}
    while tag := C.c_uint64.from_address(dynamic).value:
        found[tag] = C.c_uint64.from_address(dynamic + 8).value
        dynamic += 16
    if not {_STRINGS, _SYMBOLS, _JUMPS, _JUMP_BYTES} <= set(found):
        return {}
    slots = {}
    for at in range(found[_JUMPS], found[_JUMPS] + found[_JUMP_BYTES], _RELOCATION):
        offset, info = (C.c_uint64 * 2).from_address(at)
        name = C.string_at(found[_STRINGS] + C.c_uint32.from_address(found[_SYMBOLS] + _SYMBOL * (info >> 32)).value).decode()
        slots[name] = base + offset
    return slots
