"""Primitive descriptors (which implementation, which layouts), primitives (compiled code, shared) and calls (bound arguments)."""

from __future__ import annotations

import ctypes as C
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import numpy as np

from whet.backends.cpu import threads
from whet.errors import BackendError
from whet.forks import cached_property, make_reentrant_lock
from whet.tactics.cpu.onednn._api.attributes import ARGS, MULTIPLE_SRC, SCALES, ZERO_POINTS, Attributes, Binary
from whet.tactics.cpu.onednn._api.library import Unimplemented, load_library, make_dims_array
from whet.tactics.cpu.onednn._api.memory import MemoryDesc, allocate_aligned, copy_borrowed, describe

_Q_IMPL, _Q_SCRATCHPAD, _Q_EXEC_ARG = 8, 136, 255
_LAST_IMPL = 4
NO_ATTRIBUTES = Attributes()
KEPT_PRIMITIVES = 512


class ExecArg(C.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = [("arg", C.c_int), ("memory", C.c_void_p)]


class Descriptor:
    """One implementation of one primitive: a dnnl_primitive_desc_t and the names of its operands."""

    def __init__(self, handle: int, operands: tuple[str, ...], vectors: Mapping[str, MemoryDesc], text: str) -> None:
        self.handle, self.operands, self.vectors, self.text = handle, operands, vectors, text
        self._free = weakref.finalize(self, load_library().lib.dnnl_primitive_desc_destroy, handle)
        self._walk: Iterator[Descriptor] | None = None
        self._found: list[Descriptor] = []

    @cached_property
    def name(self) -> str:
        """oneDNN's name of the implementation, such as brgconv:avx512_core."""
        text = C.c_char_p()
        load_library().call("primitive_desc_query", self.handle, _Q_IMPL, 0, C.byref(text))
        return (text.value or b"").decode("ascii", "replace")

    def md(self, operand: str) -> MemoryDesc:
        """Layout that the implementation wants or gives for an operand; packed weights are asked for here."""
        if operand in self.vectors:
            return self.vectors[operand]
        found = load_library().lib.dnnl_primitive_desc_query_md(self.handle, _Q_EXEC_ARG, get_arg_code(operand))
        extra = ""
        if operand == "weights":
            extra = f"{self.md('src').dtype} input" + (" with a zero point" if "zero:src" in self.vectors else "")
        return copy_borrowed(found, f"{operand} of {self.name} {self.text}", extra)

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of scratchpad that each call needs."""
        handle = load_library().lib.dnnl_primitive_desc_query_md(self.handle, _Q_SCRATCHPAD, 0)
        return int(load_library().lib.dnnl_memory_desc_get_size(handle)) if handle else 0

    def implementations(self) -> Iterator[Descriptor]:
        """Every implementation, in oneDNN's order of preference; names that come again are left out.

        Ask the descriptor that a function of this package returned: those that this yields know no others.
        """
        if self._walk is None:
            self._walk = _walk(self)
        for i in itertools.count():
            if i == len(self._found):
                found = next(self._walk, None)
                if found is None:
                    return
                self._found.append(found)
            yield self._found[i]

    def select(self, name: str) -> Descriptor:
        """The implementation of that name. Raises Unimplemented if this machine's oneDNN has it not for this primitive."""
        for found in self.implementations():
            if found.name == name:
                return found
        raise Unimplemented(f"oneDNN {load_library().version} has no implementation {name!r} of this primitive here")

    def primitive(self) -> Primitive:
        """Its compiled code: made once for equal descriptors and shared, the latest few hundred being kept.

        Sharing saves compile time, and oneDNN 3.2 loses 33 kB with every brgconv primitive that has a post-op.
        """
        key = f"{self.name} {self.text}"
        with _lock:
            primitive = _primitives.pop(key, None) or Primitive(self)
            _primitives[key] = primitive  # last: the most recently used
            if len(_primitives) > KEPT_PRIMITIVES:
                del _primitives[next(iter(_primitives))]
        return primitive


def _walk(first: Descriptor) -> Iterator[Descriptor]:
    """Clones of each implementation. Only the handle that was created can be walked (a clone has no list), so this moves it on."""
    lib, walker = load_library(), first.handle
    first.handle = lib.make("primitive_desc_clone", walker)
    first._free.detach()
    first._free = weakref.finalize(first, lib.lib.dnnl_primitive_desc_destroy, first.handle)
    end = weakref.finalize(first, lib.lib.dnnl_primitive_desc_destroy, walker)
    operands, vectors, text = first.operands, first.vectors, first.text
    del first
    seen: set[str] = set()
    while True:
        stop = Descriptor(lib.make("primitive_desc_clone", walker), operands, vectors, text)
        if stop.name not in seen:
            seen.add(stop.name)
            yield stop
        status = lib.lib.dnnl_primitive_desc_next_impl(walker)
        if status:
            end()
        if status == _LAST_IMPL:
            return
        if status:
            raise BackendError(f"oneDNN {lib.version}: dnnl_primitive_desc_next_impl gave status {status}; please report it.")


class Primitive:
    """Compiled code: immutable, used by any number of calls and threads."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.handle = load_library().make("primitive_create", descriptor.handle)
        self._free = weakref.finalize(self, load_library().lib.dnnl_primitive_destroy, self.handle)
        self._mds = {n: descriptor.md(n) for n in descriptor.operands}
        if descriptor.scratch_bytes:
            found = load_library().lib.dnnl_primitive_desc_query_md(descriptor.handle, _Q_SCRATCHPAD, 0)
            self._mds["scratchpad"] = copy_borrowed(found, "scratchpad")

    @property
    def operands(self) -> Mapping[str, MemoryDesc]:
        """Operands of a call in order, with their layouts; `scratchpad` is among them if it is needed."""
        return self._mds

    def call(self, addresses: Mapping[str, int] | None = None) -> Call:
        """Arguments for running it, each at an address (0 or absent: bound later)."""
        return Call(self, addresses or {})


_primitives: dict[str, Primitive] = {}
_lock = make_reentrant_lock()


class Call:
    """A primitive with its arguments, ready to run again and again: `call()`, or `call.step` from a compiled loop.

    Addresses can be changed with `bind` at the cost of one C call each; buffers must outlive the call. One thread at a time.
    """

    def __init__(self, primitive: Primitive, addresses: Mapping[str, int]) -> None:
        lib = load_library()
        self.primitive = primitive
        self.memories: dict[str, int] = {}
        self._free = weakref.finalize(self, _destroy_all, lib.lib.dnnl_memory_destroy, self.memories)
        for name, md in primitive.operands.items():
            self.memories[name] = lib.make("memory_create", md.handle, lib.engine, addresses.get(name) or None)
        pairs = [ExecArg(get_arg_code(n), m) for n, m in self.memories.items()]
        self.args = (ExecArg * len(pairs))(*pairs)
        self._step = (primitive.handle, lib.stream, len(pairs), C.addressof(self.args))
        self._run, self._set_data_handle = lib.lib.dnnl_primitive_execute, lib.lib.dnnl_memory_set_data_handle

    @property
    def step(self) -> tuple[int, int, int, int, int]:
        """(function address, primitive, stream, argument count, argument array address), as a compiled plan loop wants it:
        int32 function(void*, void*, int32, void*); 0 is success."""
        return (load_library().execute_address or 0, *self._step)

    def bind(self, operand: str, address: int) -> None:
        """Point an operand at another buffer. Called per run for users' memory, hence without `Library.call`. Raises BackendError."""
        status = self._set_data_handle(self.memories[operand], address or None)
        if status:
            raise BackendError(f"oneDNN {load_library().version}: dnnl_memory_set_data_handle failed, status {status}.")

    def __call__(self) -> None:
        """Run once and wait. Raises BackendError."""
        status = self._run(*self._step)
        if status:
            raise BackendError(f"oneDNN {load_library().version}: {self.primitive.descriptor.name} failed at run time, status {status}.")


def _destroy_all(destroy: Callable[[int], int], memories: dict[str, int]) -> None:
    for handle in memories.values():
        destroy(handle)


def build(function: str, operands: tuple[str, ...], attributes: Attributes, *args: object) -> Descriptor:
    """Call dnnl_<function>_primitive_desc_create(&pd, engine, *args, attr). Raises Unimplemented or BackendError.

    An argument is a number, a MemoryDesc, None, or a list of them: of MemoryDesc, of float, or of int (a dnnl_dims_t).
    """
    lib = load_library()
    with attributes.native() as attr:
        handle = lib.make(function + "_primitive_desc_create", lib.engine, *map(_convert_to_native, args), attr)
    text = f"{function}{args} {attributes} threads={threads.get_threads()}"
    return Descriptor(handle, (*operands, *attributes.operands()), attributes.vectors(), text)


def _convert_to_native(value: object) -> object:
    if isinstance(value, MemoryDesc):
        return value.handle
    if not isinstance(value, list):
        return value
    if isinstance(value[0], MemoryDesc):
        return (C.c_void_p * len(value))(*[m.handle for m in value])
    return (C.c_float * len(value))(*value) if isinstance(value[0], float) else make_dims_array(value)


@cache
def _find_post_op_base() -> int:
    """DNNL_ARG_ATTR_MULTIPLE_POST_OP_BASE, which changed within version 3: found by asking a primitive with one binary post-op."""
    md, lib = describe((2, 2), "f32"), load_library()
    with Attributes(post_ops=(Binary("add", md),)).native() as attr:
        probe = lib.make("binary_primitive_desc_create", lib.engine, 0x1FFF0, md.handle, md.handle, md.handle, attr)
    try:
        for base in (16384, 32768):
            found = lib.lib.dnnl_primitive_desc_query_md(probe, _Q_EXEC_ARG, base | ARGS["src1"])
            if found and lib.lib.dnnl_memory_desc_get_size(found):
                return base
    finally:
        lib.call("primitive_desc_destroy", probe)
    raise BackendError(f"oneDNN {lib.version} answers to no known number for a binary post-op's operand; use another version.")


@cache
def get_arg_code(operand: str) -> int:
    """The number of an operand in dnnl_exec_arg_t: src, weights, ..., multi<i> (of a concat), post<i>, prelu<i>, scale:x, zero:x."""
    if operand.startswith("post"):
        return _find_post_op_base() * (int(operand[4:]) + 1) | ARGS["src1"]
    if operand.startswith("prelu"):
        return _find_post_op_base() * (int(operand[5:]) + 1) | ARGS["weights"]
    if operand.startswith("multi"):
        return MULTIPLE_SRC + int(operand[5:])
    if operand.startswith("scale:"):
        return SCALES | get_arg_code(operand[6:])
    if operand.startswith("zero:"):
        return ZERO_POINTS | get_arg_code(operand[5:])
    return ARGS[operand]


def run(descriptor: Descriptor, **arrays: np.ndarray) -> np.ndarray:
    """Runs once on NumPy arrays in the descriptor's layouts (tests, packing); the bytes of dst (64-byte aligned).

    `dst` may be among the arrays (for Sum): then it is changed in place and returned.
    """
    primitive = descriptor.primitive()
    held = {n.replace("__", ":"): np.ascontiguousarray(a) for n, a in arrays.items()}
    for name in primitive.operands:
        held.setdefault(name, allocate_aligned(primitive.operands[name].nbytes))
    for name, array in held.items():
        if array.nbytes < primitive.operands[name].nbytes:
            raise BackendError(f"{name} has {array.nbytes} bytes, {descriptor.name} needs {primitive.operands[name].nbytes}")
    primitive.call({n: a.ctypes.data for n, a in held.items()})()
    return held["dst"]
