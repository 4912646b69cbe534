"""Builds the LLVM IR of CPU kernels: typed values with operators, loops with carried values, conditions, vectors.

The builder manages basic blocks, phi instructions and names. No optimization pass runs on this IR, only code generation: the order of instructions,
the form of loops and the loop-carried values remain as written.

The IR is written as text: llvmlite.ir takes 20 microseconds per instruction, half as long as compiling it; this builder takes five.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import NamedTuple

LANES = 16  # floats per vector, and channels per block of the format nChw16c
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "i32": 4, "float": 4, "double": 8, "i64": 8}
_SUFFIX = {"half": "f16", "float": "f32", "double": "f64"}  # of intrinsics
_INTRINSIC_NAMES = {**_SUFFIX, "i8": "i8", "i16": "i16"}
_PACK = {"half": "e", "float": "f", "double": "d"}  # formats of struct
_ORDERED = {"<": "olt", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "one"}
_SIGNED = {"<": "slt", ">": "sgt", ">=": "sge", "==": "eq", "!=": "ne"}


class Type(NamedTuple):
    """`lanes` values of an element type ("float", "double", "half", "i1", "i8", "i16", "i32", "i64"); one lane is a scalar."""

    element: str
    lanes: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory."""
        return _BYTES[self.element]

    @property
    def is_float(self) -> bool:
        return self.element in _SUFFIX

    def __str__(self) -> str:
        return self.element if self.lanes == 1 else f"<{self.lanes} x {self.element}>"


FLOAT, DOUBLE, HALF, BIT, INT8, INT16, INT32, INT64 = (
    Type(element) for element in ("float", "double", "half", "i1", "i8", "i16", "i32", "i64")
)


def format_literal(numbers: Sequence[float], element: str) -> str:
    """A constant with one value per lane, rounded to the element type."""
    if element in _SUFFIX:
        return _format_float_literal(struct.pack(f"<{len(numbers)}{_PACK[element]}", *numbers), element)
    return str(int(numbers[0])) if len(numbers) == 1 else f"<{', '.join(f'{element} {int(n)}' for n in numbers)}>"


@cache
def _format_float_literal(packed: bytes, element: str) -> str:
    """LLVM writes an f32 literal as the bits of the equal f64 value, and an f16 literal as its own bits."""
    if element == "half":
        texts = [f"0xH{bits:04X}" for (bits,) in struct.iter_unpack("<H", packed)]
    else:
        texts = [f"0x{struct.unpack('<Q', struct.pack('<d', n))[0]:016X}" for (n,) in struct.iter_unpack(f"<{_PACK[element]}", packed)]
    return texts[0] if len(texts) == 1 else f"<{', '.join(f'{element} {t}' for t in texts)}>"


class Value:
    """A value of a function under construction. Operators emit instructions; Python numbers become constants of the value's type.

    Integers compare as signed; `//` and `%` are unsigned. Integer + 0 and * 1 emit nothing.
    """

    __slots__ = ("function", "name", "type")

    def __init__(self, function: Function, type: Type, name: str) -> None:
        self.function, self.type, self.name = function, type, name

    def __str__(self) -> str:
        """The operand with its type, in IR syntax."""
        return f"{self.type} {self.name}"

    @property
    def lanes(self) -> int:
        return self.type.lanes

    def __add__(self, other: Value | float) -> Value:
        return self if _is_int(other, 0) else self._arithmetic("add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self if _is_int(other, 0) else self._arithmetic("sub", other)

    def __rsub__(self, other: int) -> Value:
        return self.function.value(other, self.type) - self

    def __mul__(self, other: Value | float) -> Value:
        return self if _is_int(other, 1) else self._arithmetic("mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary("fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self if _is_int(other, 1) else self._binary("udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("urem", other)

    def __lshift__(self, other: int) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: int) -> Value:
        """Logical shift."""
        return self._binary("lshr", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", other)

    def __neg__(self) -> Value:
        """Floats only."""
        return self.function.emit(self.type, f"fneg {self}", self)

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | int) -> Value:
        return self._compare("==", other)

    def differs(self, other: Value | int) -> Value:
        return self._compare("!=", other)

    def is_nan(self) -> Value:
        """i1 per lane."""
        return self.function.emit(Type("i1", self.lanes), f"fcmp uno {self}, {self.name}", self)

    def convert(self, opcode: str, to: Type) -> Value:
        """Converts each lane to the element type of `to` by LLVM's `opcode` (bitcast, sext, zext, trunc, fpext, fptrunc, sitofp,
        fptosi)."""
        type = Type(to.element, self.lanes)
        return self.function.emit(type, f"{opcode} {self} to {type}", self)

    def broadcast(self, lanes: int = LANES) -> Value:
        """This scalar in every lane."""
        type = Type(self.type.element, lanes)
        one = self.function.emit(type, f"insertelement {type} undef, {self}, i32 0", self)
        return self.function.emit(type, f"shufflevector {one}, {type} undef, <{lanes} x i32> zeroinitializer", one)

    def as_pointer(self, element: Type) -> Pointer:
        """This i64 as an address."""
        return self.function.emit_pointer(element, f"inttoptr {self} to {element}*", self)

    def _arithmetic(self, opcode: str, other: Value | float) -> Value:
        return self._binary(f"f{opcode}" if self.type.is_float else opcode, other)

    def _binary(self, opcode: str, other: Value | float) -> Value:
        right = self.function.value(other, self.type)
        return self.function.emit(self.type, f"{opcode} {self}, {right.name}", self, right)

    def _compare(self, relation: str, other: Value | float) -> Value:
        right = self.function.value(other, self.type)
        how = f"fcmp {_ORDERED[relation]}" if self.type.is_float else f"icmp {_SIGNED[relation]}"
        return self.function.emit(Type("i1", self.lanes), f"{how} {self}, {right.name}", self, right)


class Pointer(Value):
    """An address of elements of one type. Offsets count elements; accesses are aligned to one element."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.type}* {self.name}"

    def at(self, offset: Value | int) -> Pointer:
        """The address plus `offset` elements."""
        if _is_int(offset, 0):
            return self
        index = self.function.value(offset)
        return self.function.emit_pointer(self.type, f"getelementptr {self.type}, {self}, {index}", self, index)

    def load(self, offset: Value | int = 0, lanes: int = 1) -> Value:
        address, type = self._vector(offset, lanes), Type(self.type.element, lanes)
        return self.function.emit(type, f"load {type}, {address}, align {self._alignment}", address)

    def load_vector(self, offset: Value | int = 0) -> Value:
        return self.load(offset, LANES)

    def store(self, value: Value | int, offset: Value | int = 0) -> None:
        stored = self.function.value(value, self.type)
        address = self._vector(offset, stored.lanes)
        self.function.emit(None, f"store {stored}, {address}, align {self._alignment}", stored, address)

    def gather(self, offsets: Value) -> Value:
        """The element at each offset (f32)."""
        f, lanes = self.function, offsets.lanes
        if lanes == 1:
            return self.load(offsets)
        addresses = f.emit(self.type, f"getelementptr {self.type}, {self}, {offsets}", self, offsets)
        operands = f"<{lanes} x {self.type}*> {addresses.name}, i32 {self._alignment}, {f.mask([True] * lanes)}, <{lanes} x {self.type}> undef"
        name = f"llvm.masked.gather.v{lanes}{_INTRINSIC_NAMES[self.type.element]}.v{lanes}p0{_INTRINSIC_NAMES[self.type.element]}"
        result = Type(self.type.element, lanes)
        f.module.declarations[name] = f"declare {result} @{name}(<{lanes} x {self.type}*>, i32, <{lanes} x i1>, {result})"
        return f.emit(result, f"call {result} @{name}({operands})", addresses)

    def load_masked(self, mask: Sequence[bool] | Value, others: Value) -> Value:
        """Loads the lanes of `mask`; the other lanes come from `others`, and their memory is not accessed."""
        f = self.function
        chosen = mask if isinstance(mask, Value) else f.mask(mask)
        lanes = chosen.lanes
        operands = self._vector(0, lanes), f.value(self._alignment, INT32), chosen, others
        kind = f"v{lanes}{_INTRINSIC_NAMES[self.type.element]}"
        return f.call_external(f"llvm.masked.load.{kind}.p0{kind}", others.type, *operands)

    def store_masked(self, value: Value, mask: Sequence[bool]) -> None:
        """Stores the lanes of `mask`; the memory of other lanes is not accessed.

        One lane is stored as a scalar: of a truncated vector, LLVM 22 writes four bytes for the first lane on AVX-512 (vmovss).
        """
        lanes, f = len(mask), self.function
        if sum(mask) == 1:
            lane = list(mask).index(True)
            self.store(f.emit(Type(value.type.element), f"extractelement {value}, i32 {lane}", value), lane)
            return
        operands = value, self._vector(0, lanes), f.value(self._alignment, INT32), f.mask(mask)
        kind = f"v{lanes}{_INTRINSIC_NAMES[self.type.element]}"
        f.call_external(f"llvm.masked.store.{kind}.p0{kind}", None, *operands)

    def prefetch(self, offset: Value | int = 0, to_second_cache: bool = False) -> None:
        """Prefetches the cache line into L1 or L2; the address need not be valid."""
        f, address = self.function, self.at(offset)
        line = f.emit_pointer(INT8, f"bitcast {address} to i8*", address)
        read, locality, data = (f.value(n, INT32) for n in (0, 2 if to_second_cache else 3, 1))
        f.call_external("llvm.prefetch.p0i8", None, line, read, locality, data)

    def as_integer(self) -> Value:
        return self.function.emit(INT64, f"ptrtoint {self} to i64", self)

    @property
    def _alignment(self) -> int:
        return _BYTES[self.type.element]

    def _vector(self, offset: Value | int, lanes: int) -> Pointer:
        address, type = self.at(offset), Type(self.type.element, lanes)
        return address if lanes == 1 else self.function.emit_pointer(type, f"bitcast {address} to {type}*", address)


class Loop:
    """A loop: its carried values while the body is emitted, its results afterwards."""

    def __init__(self, index: Value | None, values: list[Value]) -> None:
        self.values, self.results = values, values
        """The carried values of the current iteration; after the loop, of the last one."""
        self._index = index
        self.next: list[Value] = []
        self.again: Value | None = None
        self.inverted = False

    @property
    def index(self) -> Value:
        assert self._index is not None
        return self._index

    def carry(self, *values: Value) -> None:
        """Sets the carried values of the next iteration."""
        self.next = list(values)

    def repeat_if(self, condition: Value, *values: Value) -> None:
        """Ends an iteration of `Function.repeat`; `values` are carried to the next one."""
        self.again, self.next = condition, list(values)

    def repeat_unless(self, condition: Value, *values: Value) -> None:
        """Like `repeat_if` with the negated condition."""
        self.repeat_if(condition, *values)
        self.inverted = True


class Module:
    """An LLVM module."""

    def __init__(self) -> None:
        self.declarations: dict[str, str] = {}
        self._functions: list[Function] = []

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(self.declarations.values()), *map(str, self._functions)])

    @contextmanager
    def function(self, name: str, parameters: Sequence[str], internal: bool = True) -> Iterator[Function]:
        """Defines a void function. Parameters are "i64", "i32", or pointers: "float*", "i64*". Internal functions are not inlined."""
        function = Function(self, name, parameters, internal)
        self._functions.append(function)
        yield function
        if not function.is_terminated:
            function.returns()


class _Instruction:
    """One instruction of a block; `name` is its result's name, or ""."""

    __slots__ = ("code", "name", "operands")

    def __init__(self, name: str, code: str, operands: tuple[Value, ...] = ()) -> None:
        self.name, self.code, self.operands = name, code, operands

    def __str__(self) -> str:
        return f"  {self.name} = {self.code}" if self.name else f"  {self.code}"


class _Block:
    def __init__(self, label: str) -> None:
        self.label, self.instructions = label, list[_Instruction]()


class Function:
    """A function under construction; instructions are appended to the current block."""

    def __init__(self, module: Module, name: str, parameters: Sequence[str], internal: bool) -> None:
        self.module, self.name, self._internal = module, name, internal
        self._blocks: list[_Block] = []
        self._count = 0
        types = [(p.endswith("*"), Type(p.rstrip("*"))) for p in parameters]
        self.arguments = [(Pointer if is_pointer else Value)(self, t, f"%a{k}") for k, (is_pointer, t) in enumerate(types)]
        self._enter(self._block("entry"))

    def __str__(self) -> str:
        arguments = ", ".join(map(str, self.arguments))
        before, after = ("internal ", " noinline") if self._internal else ("", "")
        blocks = (f"{b.label}:\n" + "\n".join(map(str, b.instructions)) for b in self._blocks)
        return "\n".join([f"define {before}void @{self.name}({arguments}){after} {{", *blocks, "}"])

    @property
    def size(self) -> int:
        """The number of instructions."""
        return sum(len(block.instructions) for block in self._blocks)

    @property
    def is_terminated(self) -> bool:
        instructions = self._blocks[-1].instructions
        return bool(instructions) and instructions[-1].code.startswith(("br ", "ret "))

    # Values

    def value(self, number: Value | float, type: Type = INT64) -> Value:
        """A Python number as a constant in every lane; a Value is returned unchanged."""
        return number if isinstance(number, Value) else Value(self, type, format_literal([number] * type.lanes, type.element))

    def vector(self, numbers: Sequence[float], element: Type = FLOAT) -> Value:
        """A constant with one number per lane."""
        return Value(self, Type(element.element, len(numbers)), format_literal(numbers, element.element))

    def mask_of_bits(self, bits: Value, lanes: int) -> Value:
        """A mask of i1 from the bits of an integer of `lanes` bits."""
        type = Type("i1", lanes)
        return self.emit(type, f"bitcast {bits} to {type}", bits)

    def mask(self, lanes: Sequence[bool]) -> Value:
        """A constant mask of i1."""
        return self.vector(lanes, Type("i1"))

    def undefined(self, type: Type) -> Value:
        """An undef value."""
        return Value(self, type, "undef")

    def emit(self, type: Type | None, code: str, *operands: Value) -> Value:
        """Appends one instruction with a result of `type`, or without a result (None)."""
        name = "" if type is None else self._name()
        self._blocks[-1].instructions.append(_Instruction(name, code, operands))
        return Value(self, type or INT64, name)

    def emit_pointer(self, type: Type, code: str, *operands: Value) -> Pointer:
        """Appends one instruction with a pointer to `type` as result."""
        return Pointer(self, type, self.emit(type, code, *operands).name)

    def allocate(self, type: Type, count: int) -> Pointer:
        """Memory of `count` elements on the stack, aligned to a cache line, for the rest of the function: not to be called in a loop."""
        return self.emit_pointer(type, f"alloca {type}, i64 {count}, align 64")

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z with a single rounding."""
        return self.math("fma", x, y, z)

    def math(self, name: str, *operands: Value) -> Value:
        """Calls LLVM's intrinsic `name` of f16, f32 or f64: fma, fabs, copysign, floor, ceil, sqrt, rint."""
        type, lanes = operands[0].type, operands[0].lanes
        return self.call_external(f"llvm.{name}.{f'v{lanes}' if lanes > 1 else ''}{_SUFFIX[type.element]}", type, *operands)

    def select(self, condition: Value, yes: Value | float, no: Value | float) -> Value:
        type = yes.type if isinstance(yes, Value) else no.type if isinstance(no, Value) else INT64
        a, b = self.value(yes, type), self.value(no, type)
        return self.emit(type, f"select {condition}, {a}, {b}", condition, a, b)

    def select_pointer(self, condition: Value, yes: Pointer, no: Pointer) -> Pointer:
        return self.emit_pointer(yes.type, f"select {condition}, {yes}, {no}", condition, yes, no)

    def minimum(self, x: Value, y: Value | float) -> Value:
        """For floats, y if x is NaN."""
        other = self.value(y, x.type)
        return self.select(x < other, x, other)

    def maximum(self, x: Value, y: Value | float) -> Value:
        """For floats, y if x is NaN."""
        other = self.value(y, x.type)
        return self.select(x > other, x, other)

    def shuffle(self, first: Value, second: Value, order: Sequence[int]) -> Value:
        """Selects lanes by index in the concatenation of both vectors."""
        indices = self.vector(order, INT32)
        return self.emit(Type(first.type.element, len(order)), f"shufflevector {first}, {second}, {indices}", first, second)

    def call_external(self, name: str, result: Type | None, *operands: Value) -> Value:
        """Calls an external function, declared with the operands' types."""
        returned = "void" if result is None else str(result)
        if name not in self.module.declarations:
            types = ", ".join(f"{x.type}*" if isinstance(x, Pointer) else str(x.type) for x in operands)
            self.module.declarations[name] = f"declare {returned} @{name}({types})"
        return self.emit(result, f"call {returned} @{name}({', '.join(map(str, operands))})", *operands)

    def call_per_lane(self, name: str, x: Value, *more: Value) -> Value:
        """Calls the C function `float name(float, ...)` for each lane."""
        operands = (x, *more)
        if x.lanes == 1:
            return self.call_external(name, x.type, *operands)
        result = self.undefined(x.type)
        for lane in range(x.lanes):
            one = [self.emit(Type(v.type.element), f"extractelement {v}, i32 {lane}", v) for v in operands]
            y = self.call_external(name, one[0].type, *one)
            result = self.emit(x.type, f"insertelement {result}, {y}, i32 {lane}", result, y)
        return result

    def call(self, function: Function | str, *operands: Value | int) -> None:
        """Calls a void function of the module, given by name if it is not built here."""
        values = [self.value(x) for x in operands]
        name = function if isinstance(function, str) else function.name
        self.emit(None, f"call void @{name}({', '.join(map(str, values))})", *values)

    def call_address(self, address: Value, result: Type | None, *operands: Value) -> Value:
        """Calls the function at an address (i64)."""
        signature = f"{result or 'void'} ({', '.join(str(x.type) for x in operands)})"
        function = self.emit(INT64, f"inttoptr {address} to {signature}*", address)
        return self.emit(result, f"call {result or 'void'} {function.name}({', '.join(map(str, operands))})", function, *operands)

    def opaque(self, value: Value) -> Value:
        """The value through an empty asm statement, which prevents strength reduction: LLVM would carry derived values through the loop and spill
        accumulators."""
        return self.emit(value.type, f'call {value.type} asm "", "=r,0"({value})', value)

    def opaque_pointer(self, value: Pointer) -> Pointer:
        """The address in one register: an indexed address operand costs an FMA an issue slot (1x1 convolutions with one block: 5 %)."""
        return self.emit_pointer(value.type, f'call {value.type}* asm "", "=r,0"({value})', value)

    def scheduling_barrier(self) -> None:
        """Prevents LLVM from reordering memory accesses. Without a barrier after each broadcast it hoists loads and spills accumulators."""
        self.emit(None, 'call void asm sideeffect "", "~{memory}"()')

    def atomic_load(self, pointer: Pointer) -> Value:
        return self.emit(pointer.type, f"load atomic {pointer.type}, {pointer} monotonic, align {_BYTES[pointer.type.element]}", pointer)

    def compare_and_swap(self, pointer: Pointer, expected: Value, new: Value) -> Value:
        """Atomically replaces `expected` by `new`; the i1 result is true on success."""
        pair = self.emit(INT64, f"cmpxchg {pointer}, {expected}, {new} monotonic monotonic", pointer, expected, new)
        return self.emit(Type("i1"), f"extractvalue {{ {pointer.type}, i1 }} {pair.name}, 1", pair)

    # Control flow

    def returns(self) -> None:
        self.emit(None, "ret void")

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Emits code that runs if the condition holds."""
        body, after = self._block("then"), self._block("after")
        self._branch_if(condition, body, after)
        self._enter(body)
        yield
        if not self.is_terminated:
            self._branch(after)
        self._enter(after)

    def choose(self, cases: Sequence[tuple[Value | None, Callable[[], Sequence[Value]]]]) -> list[Value]:
        """Emits an if / else-if chain and returns the taken case's results, of the same types in all cases. The last case has no condition."""
        after = self._block("chosen")
        ends: list[tuple[_Block, Sequence[Value]]] = []
        for condition, emit_case in cases:
            other = self._block("otherwise")
            if condition is not None:
                body = self._block("case")
                self._branch_if(condition, body, other)
                self._enter(body)
            results = emit_case()
            ends.append((self._blocks[-1], results))
            self._branch(after)
            if condition is not None:
                self._enter(other)
        self._enter(after)
        columns = zip(*(results for _, results in ends), strict=True)
        return [self._phi([(value, block) for value, (block, _) in zip(values, ends, strict=True)])[0] for values in columns]

    @contextmanager
    def loop(self, start: Value | int, end: Value | int, step: int = 1, carried: Sequence[Value] = (), at_least_once: bool = False) -> Iterator[Loop]:
        """A loop over [start, end). `at_least_once`: the condition is only tested after the body."""
        if at_least_once:
            with self.repeat(self.value(start), *carried) as repeated:
                index, *values = repeated.values
                loop = Loop(index, values)
                yield loop
                following = index + step
                repeated.repeat_if(following < end, following, *loop.next)
            loop.results = repeated.results[1:]
            return
        before, header, body, after = self._blocks[-1], self._block("loop"), self._block("body"), self._block("after")
        self._branch(header)
        self._enter(header)
        phis = [self._phi([(x, before)]) for x in (self.value(start), *carried)]
        loop = Loop(phis[0][0], [value for value, _ in phis[1:]])
        self._branch_if(loop.index < end, body, after)
        self._enter(body)
        yield loop
        self._close(phis, [loop.index + step, *loop.next])
        self._branch(header)
        self._enter(after)

    @contextmanager
    def repeat(self, *carried: Value) -> Iterator[Loop]:
        """A do-while loop; `repeat_if` or `repeat_unless` ends the body."""
        before, body, after = self._blocks[-1], self._block("loop"), self._block("after")
        self._branch(body)
        self._enter(body)
        phis = [self._phi([(x, before)]) for x in carried]
        loop = Loop(None, [value for value, _ in phis])
        yield loop
        assert loop.again is not None, "repeat_if ends an iteration"
        self._close(phis, loop.next)
        self._branch_if(loop.again, *((after, body) if loop.inverted else (body, after)))
        self._enter(after)
        loop.results = loop.next

    @contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """An endless loop; the yielded function leaves it unless its condition holds."""
        body, after = self._block("loop"), self._block("after")
        self._branch(body)
        self._enter(body)

        def leave_unless(condition: Value) -> None:
            rest = self._block("body")
            self._branch_if(condition, rest, after)
            self._enter(rest)

        yield leave_unless
        self._branch(body)
        self._enter(after)

    @contextmanager
    def interleaved(self) -> Iterator[Callable[[], None]]:
        """Interleaves the instructions of parts of straight-line code, for instruction-level parallelism. The yielded function begins a part."""
        block = self._blocks[-1]
        first, starts = len(block.instructions), list[int]()
        yield lambda: starts.append(len(block.instructions))
        assert self._blocks[-1] is block, "interleaved code has no branches"
        bounds = [first, *starts, len(block.instructions)]
        shared, *parts = (block.instructions[a:b] for a, b in pairwise(bounds))
        block.instructions[first:] = [*shared, *_interleave(parts)]

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _block(self, label: str) -> _Block:
        """Creates a basic block; `_enter` adds it to the function, so that blocks are in code order."""
        self._count += 1
        return _Block(f"{label}{self._count}")

    def _enter(self, block: _Block) -> None:
        self._blocks.append(block)

    def _branch(self, to: _Block) -> None:
        self.emit(None, f"br label %{to.label}")

    def _branch_if(self, condition: Value, yes: _Block, no: _Block) -> None:
        self.emit(None, f"br {condition}, label %{yes.label}, label %{no.label}", condition)

    def _phi(self, incoming: Sequence[tuple[Value, _Block]]) -> tuple[Value, _Instruction]:
        type = incoming[0][0].type
        phi = self.emit(type, f"phi {type} " + ", ".join(f"[ {x.name}, %{block.label} ]" for x, block in incoming))
        return phi, self._blocks[-1].instructions[-1]

    def _close(self, phis: Sequence[tuple[Value, _Instruction]], values: Sequence[Value]) -> None:
        assert len(phis) == len(values), "the number of carried values is constant"
        for (_, instruction), value in zip(phis, values, strict=True):
            instruction.code += f", [ {value.name}, %{self._blocks[-1].label} ]"


def _interleave(parts: Sequence[list[_Instruction]]) -> list[_Instruction]:
    """Takes one instruction of each part in turn, after its operands are defined."""
    waiting = {x.name for part in parts for x in part if x.name}
    positions, ordered = [0] * len(parts), list[_Instruction]()
    while any(n < len(part) for n, part in zip(positions, parts, strict=True)):
        for k, part in enumerate(parts):
            if positions[k] < len(part) and waiting.isdisjoint(x.name for x in part[positions[k]].operands):
                ordered.append(part[positions[k]])
                waiting.discard(part[positions[k]].name)
                positions[k] += 1
    return ordered


def _is_int(x: object, number: int) -> bool:
    return isinstance(x, int) and x == number
