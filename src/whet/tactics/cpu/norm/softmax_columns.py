"""Softmax and LogSoftmax of f32 along an axis that is not the innermost one in memory."""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.elementwise._memory_axes import find_memory_shape, list_candidate_formats
from whet.tactics.cpu.norm._softmax_columns_ir import CHUNK, emit_softmax_columns_ir
from whet.tactics.cpu.onednn._kernel import is_static


class SoftmaxColumnsKernel(CompiledKernel):
    """A planned launch."""

    serial_work = 1 << 13  # elements
    rtol, implementation = 1e-5, "columns"

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        self.outer, self.length, self.columns = _get_extents(layer, signature.needs(0).format)
        super().__init__(layer, signature, self.outer * self.length * self.columns, count)
        self.chunks = -(-self.columns // CHUNK)
        self.items, self.is_log = self.outer * self.chunks, layer.op == "LogSoftmax"

    def enqueue(self, args: Args, stream: Stream) -> None:
        words: list[tuple[str, int] | int] = [("input", 0), ("output", 0), self.items, self.length, self.columns, self.chunks]
        self.launch(stream, emit_softmax_columns_ir(self.columns % CHUNK, self.is_log), "softmax_columns", args, words, self.items)


def _get_extents(layer: Layer, form: str) -> tuple[int, int, int]:
    """(groups of columns, elements of a column, columns of a group) in memory."""
    shape = static_shape(layer.outputs[0].shape)
    axis = layer.attrs["axis"] % len(shape)
    sizes = find_memory_shape(form, shape)
    assert sizes is not None
    if form == "nhwc":
        axis = {0: 0, 1: len(shape) - 1}.get(axis, axis - 1)
    return prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])


@tactic
class SoftmaxColumns(CompiledTactic):
    ops = ("Softmax", "LogSoftmax")
    kernel: type[SoftmaxColumnsKernel] = SoftmaxColumnsKernel

    def takes(self, columns: int) -> bool:
        """True if the kernel computes groups of so many adjacent columns."""
        return columns > 1

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        return None if layer.needs(0).dtype == F32 and not layer.needs(0).is_constant else "computes in f32"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        listed: list[Signature] = []
        for form in list_candidate_formats(static_shape(layer.outputs[0].shape)):
            if not form.startswith("nChw") and self.takes(_get_extents(layer, form)[2]):
                operand = Operand(form, F32)
                listed += [Signature((operand,), (operand,), ((0, 0),)), Signature((operand,), (operand,))]
        return listed

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> SoftmaxColumnsKernel:
        return self.kernel(layer, signature, backend.threads)
