"""Kernel arguments and shared memory, each described once: the C text of the kernel and the bytes of a launch come from one description.

A kernel takes one structure by value. Its description is a frozen dataclass with fields of the types below, in the structure's order:

    @dataclass(frozen=True, kw_only=True)
    class GatherArguments(Arguments, kernel="gather.cu"):
        input: ConstPointer
        output: Pointer
        count: Int64  # elements of the result
        factor: Annotated[ConstFloatPointer | None, When("IN8")] = None  # a member of instances with IN8 alone

`source` puts `struct Args { ... };` in place of `#include "arguments"` in gather.cu, and `GatherArguments(...).pack()` gives the bytes.
A field of a `Fields` dataclass is expanded in place: several structures can share members, or make a group of them optional.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from whet.errors import BackendError


@dataclass(frozen=True)
class CType:
    """A type of CUDA C++: its name, its code in the module `struct`, its alignment in bytes, and the length of an array (0: no array)."""

    name: str
    code: str
    alignment: int
    count: int = 0

    @property
    def size(self) -> int:
        """Bytes of a member."""
        return struct.calcsize(f"<{self.code}") * (self.count or 1)

    def pack(self, value: Any) -> bytes:
        """The bytes of a value; of a sequence for arrays and for types of several elements."""
        several = len(self.code) > 1 and self.code[-1] != "s"
        values = [n for item in value for n in item] if self.count and several else value if self.count or several else (value,)
        return struct.pack("<" + self.code * (self.count or 1), *values)


@dataclass(frozen=True)
class When:
    """Marks a member that only instances with a nonzero macro have."""

    macro: str


def make_pointer_type(to: str) -> CType:
    """A pointer to device memory."""
    return CType(f"{to}*", "Q", 8)


def make_array_type(of: str, count: int) -> CType:
    """An array of `count` values, "int" for example."""
    return dataclasses.replace(_NUMBERS[of] if of in _NUMBERS else make_pointer_type(of.removesuffix("*")), count=count)


_NUMBERS = {"int": CType("int", "i", 4), "u32": CType("u32", "I", 4), "long long": CType("long long", "q", 8), "float": CType("float", "f", 4)}
Int32 = Annotated[int, _NUMBERS["int"]]
UInt32 = Annotated[int, _NUMBERS["u32"]]
Int64 = Annotated[int, _NUMBERS["long long"]]
UInt64 = Annotated[int, CType("u64", "Q", 8)]
Float32 = Annotated[float, _NUMBERS["float"]]
Pointer = Annotated[int, make_pointer_type("u8")]
ConstPointer = Annotated[int, make_pointer_type("const u8")]
FloatPointer = Annotated[int, make_pointer_type("float")]
ConstFloatPointer = Annotated[int, make_pointer_type("const float")]
ConstIntPointer = Annotated[int, make_pointer_type("const int")]
ConstU16Pointer = Annotated[int, make_pointer_type("const u16")]
Uint4Pointer = Annotated[int, make_pointer_type("uint4")]
ConstUint4Pointer = Annotated[int, make_pointer_type("const uint4")]
TensorMap = Annotated[bytes, CType("TensorMap", "128s", 64)]
ActivationParameters = Annotated[tuple[float, float], CType("Act", "2f", 4)]


@dataclass(frozen=True)
class Member:
    """A member of the structure: C type, and the macros that must not be 0 for it to be there."""

    name: str
    ctype: CType
    macros: tuple[str, ...]

    def declaration(self) -> str:
        """The member in C."""
        extent = f"[{self.ctype.count}]" if self.ctype.count else ""
        return f"{self.ctype.name} {self.name}{extent};"


@dataclass(frozen=True)
class Fields:
    """Members that several structures have, or that are optional together; subclasses are frozen dataclasses."""

    @classmethod
    def members(cls) -> tuple[Member, ...]:
        """All members in order, those of optional parts included."""
        members: list[Member] = []
        for name, part, ctype, macros in _list_fields(cls):
            if part is not None:
                members += [dataclasses.replace(m, macros=(*macros, *m.macros)) for m in part.members()]
            elif ctype is not None:
                members.append(Member(name, ctype, macros))
        return tuple(members)

    def values(self) -> Iterator[tuple[Member, Any]]:
        """The members that are there, with their values; in the order of `members`."""
        for field, part, ctype, macros in _list_fields(type(self)):
            value = getattr(self, field)
            if value is None:
                continue
            if part is None:
                assert ctype is not None
                yield Member(field, ctype, macros), value
            else:
                for member, inner in value.values():
                    yield dataclasses.replace(member, macros=(*macros, *member.macros)), inner


class Arguments(Fields):
    """The arguments of the functions of one kernel file; `struct` is the structure's name there (class arguments)."""

    kernel_file: ClassVar[str] = ""
    struct_name: ClassVar[str] = ""

    def __init_subclass__(cls, kernel: str = "", struct: str = "Args", text: str = "", **options: Any) -> None:
        """`text` is the kernel's text if it has no file of its own."""
        super().__init_subclass__(**options)
        if text:
            KERNEL_TEXTS[kernel] = text
        if kernel:
            cls.kernel_file, cls.struct_name = kernel, struct
            described = STRUCTURES.setdefault(kernel, {})
            if described.get(struct, cls).__qualname__ != cls.__qualname__:
                raise BackendError(
                    f"{kernel} has two descriptions of its structure {struct}: {described[struct].__qualname__} and {cls.__qualname__}"
                )
            described[struct] = cls

    @classmethod
    @functools.cache
    def c_struct(cls) -> str:
        """The structure in C; optional members between #if and #endif."""
        lines, open_macros = [f"struct {cls.struct_name} {{"], tuple[str, ...]()
        for m in cls.members():
            shared = 0
            while shared < min(len(open_macros), len(m.macros)) and open_macros[shared] == m.macros[shared]:
                shared += 1
            lines += ["#endif"] * (len(open_macros) - shared) + [f"#if {macro}" for macro in m.macros[shared:]]
            lines.append(f"    {m.declaration()}")
            open_macros = m.macros
        return "\n".join([*lines, *["#endif"] * len(open_macros), "};"])

    @classmethod
    def macros(cls) -> tuple[str, ...]:
        """The macros that optional members depend on, each once."""
        return tuple(dict.fromkeys(macro for m in cls.members() for macro in m.macros))

    @classmethod
    def layout(cls, macros: Sequence[str] = ()) -> tuple[dict[str, int], int]:
        """Offsets of the members by name and the size of the structure, for instances with these macros nonzero."""
        offsets, end, alignment = {}, 0, 1
        for m in cls.members():
            if set(m.macros) <= set(macros):
                offsets[m.name] = -(-end // m.ctype.alignment) * m.ctype.alignment
                end, alignment = offsets[m.name] + m.ctype.size, max(alignment, m.ctype.alignment)
        return offsets, -(-end // alignment) * alignment

    def pack(self) -> bytes:
        """The structure's bytes."""
        packed, alignment = bytearray(), 1
        for member, value in self.values():
            alignment = max(alignment, member.ctype.alignment)
            packed += bytes(-len(packed) % member.ctype.alignment) + member.ctype.pack(value)
        return bytes(packed + bytes(-len(packed) % alignment))

    def check(self, constants: Mapping[str, Any]) -> None:
        """Raises BackendError if an instance with these constants has other members than these arguments."""
        present = {macro for member, _ in self.values() for macro in member.macros}
        for macro in self.macros():
            if bool(constants.get(macro, 0)) != (macro in present):
                state = "are missing" if macro not in present else "were given"
                raise BackendError(
                    f"{self.kernel_file}: the arguments of {macro}={constants.get(macro, 0)} {state}. This is a mistake in whet: please report it."
                )


STRUCTURES: dict[str, dict[str, type[Arguments]]] = {}
"""Descriptions by kernel file and name of the structure."""
KERNEL_TEXTS: dict[str, str] = {}
"""Kernels whose text is in the module of their tactic, by name."""


def emit_c_structs(kernel: str) -> str:
    """All structures of a kernel file in C. Raises BackendError if none is described."""
    if kernel not in STRUCTURES:  # its tactic has not been imported yet
        from whet.tactics import load_tactics

        load_tactics("cuda")
    if kernel not in STRUCTURES:
        raise BackendError(f"{kernel} includes its arguments, but no class describes them (class ...(Arguments, kernel={kernel!r}))")
    return "\n".join(described.c_struct() for described in STRUCTURES[kernel].values())


_Field = tuple[str, "type[Fields] | None", CType | None, tuple[str, ...]]
_known_fields: dict[type[Fields], tuple[_Field, ...]] = {}


def _list_fields(cls: type[Fields]) -> tuple[_Field, ...]:
    """Of each field: its name, the part that is put in line or the C type, and its macros."""
    if cls in _known_fields:
        return _known_fields[cls]
    hints = get_type_hints(cls, include_extras=True)
    fields = []
    for field in dataclasses.fields(cls):
        hint, macros, ctype = hints[field.name], tuple[str, ...](), None
        while get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
            macros += tuple(mark.macro for mark in marks if isinstance(mark, When))
            ctype = next((mark for mark in marks if isinstance(mark, CType)), ctype)
            if get_origin(hint) in (Union, types.UnionType):
                hint = next(part for part in get_args(hint) if part is not type(None))
        part = hint if isinstance(hint, type) and issubclass(hint, Fields) else None
        if part is None and ctype is None:
            raise BackendError(f"{cls.__qualname__}.{field.name} has no C type: use a type of arguments.py")
        fields.append((field.name, part, ctype, macros))
    return _known_fields.setdefault(cls, tuple(fields))


class SharedMemory:
    """The dynamic shared memory of a block: named regions in order, each at a multiple of its alignment.

    The kernel gets `SHARED_<NAME>` (bytes from its aligned base to a region) and `SHARED_END` as constants; the launch asks for `nbytes`.
    """

    def __init__(self, base_alignment: int = 1024) -> None:
        self.base_alignment = base_alignment
        self.offsets: dict[str, int] = {}
        self.end = 0

    def region(self, name: str, nbytes: int, alignment: int = 1) -> SharedMemory:
        """Appends a region; returns the description."""
        if name in self.offsets:
            raise BackendError(f"shared memory has two regions called {name}")
        self.offsets[name] = -(-self.end // alignment) * alignment
        self.end = self.offsets[name] + nbytes
        return self

    @property
    def nbytes(self) -> int:
        """Bytes to request: the regions, and the padding that aligning the base may need."""
        return self.end + self.base_alignment

    def constants(self) -> dict[str, int]:
        """Macros of the kernel."""
        return {**{f"SHARED_{name.upper()}": offset for name, offset in self.offsets.items()}, "SHARED_END": self.end}
