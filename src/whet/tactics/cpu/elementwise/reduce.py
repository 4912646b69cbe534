"""Reductions of f32, bf16 or f16 over any axes, in row-major and channels-last tensors.

For coverage: otherwise NumPy computes reductions that oneDNN does not take.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu._llvm.packing import RTOL, list_small_floats
from whet.tactics.cpu.elementwise._memory_axes import find_memory_shape, list_candidate_formats, merge_axes
from whet.tactics.cpu.elementwise._reduce_ir import KINDS, VECTORS, reduce_ir
from whet.tactics.cpu.onednn._axes import find_reduced_axes
from whet.tactics.cpu.onednn._kernel import is_static

_CHUNK = VECTORS * LANES
_POOL = "GlobalAveragePool"


class ReduceKernel(CompiledKernel):
    """A planned launch."""

    serial_work = 1 << 14  # elements

    def __init__(self, layer: Layer, signature: Signature, axes: tuple[int, ...], count: int) -> None:
        shape, form = static_shape(layer.needs(0).shape), signature.needs(0).format
        sizes = find_memory_shape(form, shape)
        assert sizes is not None
        super().__init__(layer, signature, prod(sizes), count)
        order = [0, *range(2, len(shape)), 1] if form == "nhwc" else list(range(len(shape)))
        if len(sizes) > len(shape):  # blocked channels
            order = [*range(len(shape)), 1]
        marks = [axis in axes for axis in order]
        dense = [prod(sizes[k + 1 :]) for k in range(len(sizes))]
        merged_sizes, (strides,), reduced = merge_axes(sizes, [dense], marks)
        self.stored = signature.outputs[0].dtype
        self.rtol = RTOL[self.stored]
        self.op, self.inner_reduced, self.width = "ReduceMean" if layer.op == _POOL else layer.op, bool(reduced[-1]), merged_sizes[-1]
        pairs = list(zip(merged_sizes, strides, reduced, strict=True))[:-1]
        self.kept, self.reduced = [(n, s) for n, s, r in pairs if not r], [(n, s) for n, s, r in pairs if r]
        self.count = prod(n for n, _, r in zip(merged_sizes, strides, reduced, strict=True) if r)
        factor = np.array([1 / self.count], np.float32)
        self.packed = (Packed(f"factor|{self.count}", 4, lambda: factor.view(np.uint8)),)
        self.implementation = "reduced rows" if self.inner_reduced else "kept rows"

    def enqueue(self, args: Args, stream: Stream) -> None:
        rows = prod(n for n, _ in self.kept)
        chunks = 1 if self.inner_reduced else -(-self.width // _CHUNK)
        tail = self.width % (LANES if self.inner_reduced else _CHUNK)
        words: list[tuple[str, int] | int] = [("input", 0), ("output", 0), rows * chunks, self.width, chunks]
        words += [w for axis in (*self.kept, *self.reduced) for w in axis]
        ir = reduce_ir(self.op, len(self.kept), len(self.reduced), self.inner_reduced, tail, self.stored)
        self.launch(stream, ir, "reduce", args, words, rows * chunks)


@tactic
class Reduce(CompiledTactic):
    ops = (*KINDS, _POOL)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if layer.needs(0).dtype != F32:
            return f"computes in f32, not {layer.needs(0).dtype}"
        if layer.needs(0).is_constant:
            return "its input is constant"
        return None if _find_axes(layer) else "there are no axes, or they are known only at run time"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        shape = static_shape(layer.needs(0).shape)
        axes = _find_axes(layer) or ()
        forms = ["linear"]
        if layer.outputs[0].type.rank == len(shape):
            forms = [f for f in list_candidate_formats(shape) if not f.startswith("nChw") or 1 not in axes]
        rest = (None,) * (len(layer.inputs) - 1)
        stored = [F32, *list_small_floats(backend.capabilities.features)]
        return [Signature((Operand(f, d), *rest), (Operand(f, d),)) for d in stored for f in forms]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> ReduceKernel:
        return ReduceKernel(layer, signature, _find_axes(layer) or (), backend.threads)


def _find_axes(layer: Layer) -> tuple[int, ...] | None:
    """The reduced axes, counted from the first; None if there are none, or they are known only at run time."""
    return tuple(range(2, layer.needs(0).type.rank)) if layer.op == _POOL else find_reduced_axes(layer)
