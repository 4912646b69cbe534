"""LLVM IR of elementwise layers: a loop nest over the result, whose innermost axis is in vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from whet.network import BF16
from whet.tactics.cpu._llvm.builder import LANES, Function, Module, Value
from whet.tactics.cpu._llvm.packing import FloatPointer, make_float_pointer
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.elementwise._operations import OPERATIONS, STORAGES, Emitter


@dataclass(frozen=True)
class Step:
    """One op of a program: the indices of its operands among the values (None: absent), which are the program's operands, then the steps' results."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    operands: tuple[int | None, ...]


@dataclass(frozen=True)
class Program:
    """Steps over operands; the last step's result is the layer's. `dtypes`: of the operands, then of the result, as they are
    stored; values of bf16 and f16 are f32 in registers."""

    dtypes: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def operands(self) -> int:
        return len(self.dtypes) - 1


def list_context_words(operands: int, packed: int, outer: int) -> tuple[str, ...]:
    """The context: addresses of operands that are computed, the result's, rows, elements of a row, the sizes of the outer axes after the first, for
    each operand its strides along the outer axes; a thread's share, addresses of constant operands."""
    strides = [f"stride{k}_{axis}" for k in range(operands) for axis in range(outer)]
    return (
        *(f"operand{k}" for k in range(operands - packed)), "out", "rows", "width", *(f"size{axis}" for axis in range(1, outer)), *strides,
        "share", *(f"operand{k}" for k in range(operands - packed, operands)),
    )  # fmt: skip


@cache
def emit_elementwise_ir(program: Program, packed: int, steps: tuple[int, ...], uniform: tuple[bool, ...], outer: int, tail: int) -> str:
    """`elementwise(context)`. The last `packed` operands are constant. `steps`: each operand's stride along a row, 0 or 1. `uniform`: True for an
    operand that is one value. `outer`: axes outside of a row, 0 for one row that threads share. `tail`: elements after a row's whole vectors."""
    module = Module()
    with parallel_kernel(module, "elementwise", list_context_words(program.operands, packed, outer), "rows" if outer else "width") as (f, w):
        words = vars(w)
        emitter = Emitter(f)
        pointers = [_make_pointer(words[f"operand{k}"], d) for k, d in enumerate(program.dtypes[:-1])]
        target = _make_pointer(w.out, program.dtypes[-1])
        scalars = [pointers[k].load() if uniform[k] else None for k in range(program.operands)]
        if outer:
            _emit_rows(emitter, program, words, pointers, target, steps, scalars, outer, tail)
        else:
            row = _Row(emitter, program, pointers, target, steps, scalars)
            with f.loop(w.begin, w.end - (LANES - 1), step=LANES) as vectors:
                row.compute(vectors.index, LANES)
            with f.loop(vectors.index, w.end) as rest:
                row.compute(rest.index, 1)
    return str(module)


def _make_pointer(word: Value, dtype: str) -> FloatPointer:
    return make_float_pointer(word, BF16) if dtype == "bf16" else word.as_pointer(STORAGES[dtype].memory)


class _Row:
    """The program on parts of a row."""

    def __init__(
        self, emitter: Emitter, program: Program, pointers: Sequence[FloatPointer], target: FloatPointer, steps: Sequence[int],
        scalars: Sequence[Value | None],
    ) -> None:  # fmt: skip
        self._e, self._program, self._pointers, self._target, self._steps, self._scalars = emitter, program, pointers, target, steps, scalars

    @property
    def _f(self) -> Function:
        return self._e.f

    def compute(self, index: Value | int, lanes: int) -> None:
        """Computes and stores `lanes` elements from `index` on."""
        values: list[Value] = []
        for k, dtype in enumerate(self._program.dtypes[:-1]):
            scalar = self._scalars[k]
            if scalar is None:
                value = self._pointers[k].load(index, lanes)
            else:
                value = scalar.broadcast(lanes) if lanes > 1 else scalar
            values.append(self._e.to_register(value, dtype))
        for step in self._program.steps:
            operands: list[Any] = [None if i is None else values[i] for i in step.operands]
            values.append(OPERATIONS[step.op](self._e, dict(step.attrs), operands))
        self._target.store(self._e.to_memory(values[-1], self._program.dtypes[-1]), index)


def _emit_rows(
    emitter: Emitter, program: Program, words: dict[str, Any], pointers: Sequence[FloatPointer], target: FloatPointer, steps: Sequence[int],
    scalars: Sequence[Value | None], outer: int, tail: int,
) -> None:  # fmt: skip
    """A thread's rows; a row's number gives its indices along the outer axes."""
    f, width = emitter.f, words["width"]
    with f.loop(words["begin"], words["end"]) as rows:
        position: Value = rows.index
        offsets: list[Value | int] = [0] * program.operands
        for axis in reversed(range(outer)):
            index = position % words[f"size{axis}"] if axis else position
            position = position // words[f"size{axis}"] if axis else position
            for k in range(program.operands):
                if scalars[k] is None:
                    offsets[k] = index * words[f"stride{k}_{axis}"] + offsets[k]
        at = [p if s is not None else p.at(o) for p, o, s in zip(pointers, offsets, scalars, strict=True)]
        fixed = [s if s is not None else None if step else p.load() for s, p, step in zip(scalars, at, steps, strict=True)]
        row = _Row(emitter, program, at, target.at(rows.index * width), steps, fixed)
        whole = width - tail if tail else width
        with f.loop(0, whole, step=LANES) as vectors:
            row.compute(vectors.index, LANES)
        lanes, done = LANES // 2, 0
        while lanes:
            if tail & lanes:
                row.compute(whole + done, lanes)
                done += lanes
            lanes //= 2
