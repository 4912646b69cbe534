"""Base classes of tactics that compute a single op in row-major order: a tactic describes its launches, and this module binds their operands."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.backends.cpu.fault import FaultCall
from whet.network import DType, Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import DOUBLE, FLOAT, INT8, INT16, INT32, INT64, Type
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.onednn._kernel import is_static

VECTOR = 32  # bytes
NUMBERS = {"f32": FLOAT, "f64": DOUBLE, "i8": INT8, "i16": INT16, "i32": INT32, "i64": INT64}
"""Types whose values kernels compare and add, as LLVM has them."""
_MOVED = {8: INT8, 16: INT16, 32: INT32, 64: INT64}

Place = tuple[str, int]
"""The memory that a word of a context addresses: ("input" | "output" | "table", index), ("scratch", offset in bytes), or ("fault", 0)."""


def get_moved_type(dtype: DType) -> Type | None:
    """An integer type as long as the values; None for values that are not of 1, 2, 4 or 8 bytes."""
    return _MOVED.get(dtype.bits)


def count_lanes(element: Type) -> int:
    """Values of a vector."""
    return VECTOR // element.bytes


@dataclass(frozen=True)
class Launch:
    """One launch of `function` of `ir` over `items`, which threads share in multiples of `step`.

    Its context holds the addresses of `places`, `items`, `numbers`, and a thread's share. `work`: elements that it reads or computes.
    """

    function: str
    ir: str
    places: tuple[Place, ...]
    items: int
    numbers: tuple[int, ...] = ()
    step: int = 1
    work: int = 0


def list_context_words(places: Sequence[str], numbers: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the words of a launch's context."""
    return (*places, "items", *numbers, "share")


@dataclass(frozen=True)
class Loops:
    """The launches of a layer, in order. `tables`: arrays that they read. `failure`: the message if one of them sets the fault word."""

    launches: tuple[Launch, ...]
    tables: tuple[np.ndarray, ...] = ()
    scratch: int = 0
    failure: str = ""
    rtol: float = 0.0


class LoopKernel(CompiledKernel):
    """The planned launches of a layer. Constant inputs are packed operands in row-major order."""

    serial_work = 1 << 14  # elements

    def __init__(self, layer: Layer, signature: Signature, loops: Loops, count: int) -> None:
        super().__init__(layer, signature, 0, count)
        self.loops, self.team = loops, count
        self.implementation = "+".join(dict.fromkeys(x.function for x in loops.launches))
        self.scratch, self.rtol = loops.scratch, loops.rtol
        read = sorted({i for x in loops.launches for kind, i in x.places if kind == "input" and layer.needs(i).is_constant})
        tables = [(("table", k), _pack_table(a)) for k, a in enumerate(loops.tables)]
        self.constants: dict[Place, int] = {}
        for k, (place, _) in enumerate(packed := [*((("input", i), pack_array(layer.needs(i))) for i in read), *tables]):
            self.constants[place] = k
        self.packed = tuple(p for _, p in packed)

    def enqueue(self, args: Args, stream: Stream) -> None:
        check = FaultCall(self.loops.failure, self.implementation) if self.loops.failure else None
        for launch in self.loops.launches:
            threads = min(self.team, -(-launch.items // launch.step)) if launch.work > self.serial_work else 1
            addresses, operands = [], {}
            for word, (kind, index) in enumerate(launch.places):
                if (kind, index) in self.constants:
                    addresses.append(args.packed[self.constants[kind, index]])
                elif kind == "scratch":
                    addresses.append(args.scratch + index)
                elif kind == "fault":
                    assert check is not None
                    addresses.append(check.address)
                else:
                    addresses.append((args.inputs if kind == "input" else args.outputs)[index])
                    operands[word] = (kind, index)
            share = -(-launch.items // (threads * launch.step)) * launch.step
            context = [*addresses, launch.items, *launch.numbers, share]
            function = jit.load_function(launch.ir, launch.function)
            stream.record(jit.ParallelCall(function, context, operands, threads, launch.function, step=launch.step))
        if check is not None:
            stream.record(check)


class LoopTactic(CompiledTactic):
    """A tactic for single layers with static shapes; a subclass names the inputs that its kernels read, and describes its launches."""

    formats: tuple[str, ...] = ("linear",)  # of every operand; those besides linear for images of rank 4
    inplace: tuple[tuple[int, int], ...] = ()  # pairs that may share their bytes

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        """Indices of the inputs that its kernels read; the others are sizes and axes that are known."""
        return (0,)

    @abstractmethod
    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        """The launches for operands in format `form`, or why there are none. `inplace`: the pairs of the tactic share their bytes."""

    def refuses_types(self, layer: Layer) -> str | None:
        """Reason why it does not compute the layer's element types or attributes; shapes may be symbolic."""
        return None

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        return self.refuses_types(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        listed, reads = [], self.list_reads(layer)
        for form in self.formats:
            if form != "linear" and (layer.needs(0).is_constant or any(t.type.rank != 4 for t in (layer.needs(0), *layer.outputs))):
                continue
            stored = tuple(
                None if i not in reads or t is None or t.is_constant else Operand(form if t.type.rank == 4 else "linear", t.dtype)
                for i, t in enumerate(layer.inputs)
            )
            signature = Signature(stored, tuple(Operand(form, t.dtype) for t in layer.outputs))
            listed.append(signature)
            shared = [(i, j) for i, j in self.inplace if stored[i] is not None and list(layer.inputs).count(layer.inputs[i]) == 1]
            if shared:
                listed.insert(len(listed) - 1, Signature(stored, signature.outputs, tuple(shared)))
        return listed

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        loops = self._find_loops(layer, signature)
        return loops if isinstance(loops, str) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> LoopKernel:
        loops = self._find_loops(layer, signature)
        if isinstance(loops, str):
            raise PlanRefused(loops)
        return LoopKernel(layer, signature, loops, backend.threads)

    def _find_loops(self, layer: Layer, signature: Signature) -> Loops | str:
        if reason := self.unavailable() or self.why_not(layer):
            return reason
        read = [layer.input(i) for i in self.list_reads(layer)]
        if any(t is not None and 0 in static_shape(t.shape) for t in (*read, *layer.outputs)):
            return "a tensor is empty"
        return self.describe(layer, signature.outputs[0].format, bool(signature.inplace))


def split_axes(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """(elements outside of an axis, of the axis, inside of it)."""
    axis %= len(shape)
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def pack_array(t: Tensor) -> Packed:
    """A constant in row-major order as a packed operand."""
    key, count = t.constant().digest, prod(static_shape(t.shape)) * t.dtype.bits // 8
    return Packed(f"{key}|rows", count, lambda: np.ascontiguousarray(t.array()).reshape(-1).view(np.uint8))


def _pack_table(a: np.ndarray) -> Packed:
    flat = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    return Packed(f"table|{hashlib.sha256(flat.tobytes()).hexdigest()}", flat.nbytes, lambda: flat)

