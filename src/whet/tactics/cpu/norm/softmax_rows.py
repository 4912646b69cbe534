"""Softmax and LogSoftmax of f32 along the innermost axis in memory: for CPUs without oneDNN."""

from __future__ import annotations

from whet.tactics._base import Args, Stream, tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu.norm._softmax_rows_ir import emit_softmax_rows_ir
from whet.tactics.cpu.norm.softmax_columns import SoftmaxColumns, SoftmaxColumnsKernel


class SoftmaxRowsKernel(SoftmaxColumnsKernel):
    """A planned launch over rows."""

    implementation = "rows"

    def enqueue(self, args: Args, stream: Stream) -> None:
        ir = emit_softmax_rows_ir(self.length % LANES, self.is_log)
        self.launch(stream, ir, "softmax_rows", args, [("input", 0), ("output", 0), self.outer, self.length], self.outer)


@tactic
class SoftmaxRows(SoftmaxColumns):
    opt_in, instead_of = True, "ONEDNN"
    kernel = SoftmaxRowsKernel

    def takes(self, columns: int) -> bool:
        return columns == 1
