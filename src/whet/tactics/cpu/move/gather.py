"""Gather, GatherElements and GatherND of any element type: table rows (embeddings), and entries at computed indices.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.backends.cpu.fault import FaultCall
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Stream, tactic
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.generic._loops import pack_array
from whet.tactics.cpu.move._gather_ir import AXES, emit_gather_ir
from whet.tactics.cpu.onednn._kernel import is_static

_VECTOR = 32  # bytes
_ELEMENTS = {8: "i8", 16: "i16", 32: "i32", 64: "i64"}


@dataclass(frozen=True)
class Rows:
    """Which rows of the source a gather copies; the words of _gather_ir.py of the same names."""

    count: int
    per: int
    index_step: int
    lines: int
    batch_step: int
    width: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


def find_rows(layer: Layer) -> Rows | str:
    """The rows of a layer with static shapes, or why it has none."""
    shape, at = static_shape(layer.needs(0).shape), static_shape(layer.needs(1).shape)
    if layer.op == "GatherND":
        shared, count = int(layer.attrs["batch_dims"]), at[-1]
        if count > AXES:
            return f"at most {AXES} axes are indexed, here {count}"
        sizes, rows = shape[shared : shared + count], prod(at[:-1])
        per = prod(at[shared:-1])
        steps = tuple(prod(sizes[k + 1 :]) for k in range(count))
        return Rows(rows, per, per, 1, prod(sizes), prod(shape[shared + count :]), sizes, steps)
    axis = int(layer.attrs["axis"]) % len(shape)
    inner = prod(shape[axis + 1 :])
    if layer.op == "Gather":
        per = prod(at)
        return Rows(prod(shape[:axis]) * per, per, 0, 1, shape[axis], inner, (shape[axis],), (1,))
    if any(a != b for i, (a, b) in enumerate(zip(shape, at, strict=True)) if i != axis):
        return "the indices cover a part of the data"
    per = at[axis] * inner
    return Rows(prod(at), per, per, inner, shape[axis] * inner, 1, (shape[axis],), (inner,))


class GatherKernel(CompiledKernel):
    """A planned launch; a constant operand is the packed one."""

    serial_work = 1 << 14  # elements
    implementation = "rows"

    def __init__(self, layer: Layer, signature: Signature, rows: Rows, count: int) -> None:
        super().__init__(layer, signature, rows.count * rows.width, count)
        self.rows = rows
        given = dict(zip(("x", "at"), layer.required_inputs(), strict=True))
        constant = next((name for name, t in given.items() if t.is_constant), "")
        if constant:
            self.packed = (pack_array(given[constant]),)
        bits = layer.outputs[0].dtype.bits
        self.ir = emit_gather_ir(_ELEMENTS[bits], 8 * _VECTOR // bits, given["at"].dtype.name, len(rows.sizes), constant)
        self.operands: list[tuple[str, int] | int] = [0 if t.is_constant else ("input", i) for i, t in enumerate(given.values())]
        self.failure = (
            f"{layer.op} '{layer.name}': an index is outside of the {' x '.join(map(str, rows.sizes))} entries of %{layer.needs(0).name}: "
            f"{layer.needs(0).type}. Check the values of %{layer.needs(1).name}, such as token ids above the vocabulary."
        )

    def enqueue(self, args: Args, stream: Stream) -> None:
        r, check = self.rows, FaultCall(self.failure, self.implementation)
        spare = (0,) * (AXES - len(r.sizes))
        words: list[tuple[str, int] | int] = [*self.operands, ("output", 0), check.address]
        words += [r.count, r.per, r.index_step, r.lines, r.batch_step, r.width, *r.sizes, *spare, *r.steps, *spare]
        self.launch(stream, self.ir, "gather", args, words, r.count)
        stream.record(check)


@tactic
class Gather(CompiledTactic):
    ops = ("Gather", "GatherElements", "GatherND")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        x, at = layer.required_inputs()
        if x.is_constant and at.is_constant:
            return "the data and the indices are constant"
        if x.dtype.bits not in _ELEMENTS or at.dtype.name not in ("i32", "i64"):
            return "takes elements of 1, 2, 4 or 8 bytes at indices of 4 or 8"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        stored = tuple(None if t.is_constant else Operand("linear", t.dtype) for t in layer.required_inputs())
        return [Signature(stored, (Operand("linear", layer.outputs[0].dtype),))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if reason := self.unavailable():
            return reason
        if any(0 in static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0])):
            return "a tensor is empty"
        rows = find_rows(layer)
        return rows if isinstance(rows, str) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GatherKernel:
        if reason := self.why_not(layer) or self.refuses(layer, signature, backend):
            raise PlanRefused(reason)
        rows = find_rows(layer)
        assert isinstance(rows, Rows)
        return GatherKernel(layer, signature, rows, backend.threads)
