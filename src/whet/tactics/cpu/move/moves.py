"""Data movement with arithmetic in one pass over memory, as in detector heads (composite Moves).

A row of the result is read along contiguous elements (for images, the channels of a pixel), computed 16 columns at a time and written.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, count_operand_bytes, tactic
from whet.tactics._moves_indices import Refused
from whet.tactics._moves_tree import BLOCKS, Moves
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.move._moves_ir import emit_moves_ir
from whet.tactics.cpu.onednn._kernel import is_static


class MovesKernel:
    """A planned launch; its packed operand holds the layer's constants."""

    serial_work = 1 << 13  # elements

    scratch, rtol, deterministic, implementation = 0, 1e-5, True, "rows"

    def __init__(self, layer: Layer, signature: Signature, moves: Moves, ir: str, count: int) -> None:
        self.sources, self.rows, self.ir = moves.sources, moves.rows, ir
        self.inputs = tuple(0 if t is None else count_operand_bytes(t, o) for t, o in zip(layer.inputs, signature.inputs, strict=True))
        self.outputs = (count_operand_bytes(layer.outputs[0], signature.outputs[0]),)
        numbers = moves.numbers
        key = "+".join(t.weight.digest for t in layer.inputs if t is not None and t.weight is not None)
        self.packed = (Packed(f"{key}|moves", numbers.nbytes, lambda: numbers.view(np.uint8)),)
        self.threads = min(count, moves.rows) if moves.rows * moves.columns > self.serial_work else 1

    def enqueue(self, args: Args, stream: Stream) -> None:
        context = [args.outputs[0], args.packed[0], *(args.inputs[i] for i in self.sources), self.rows, -(-self.rows // self.threads)]
        operands = {0: ("output", 0)} | {2 + k: ("input", i) for k, i in enumerate(self.sources)}
        stream.record(jit.ParallelCall(jit.load_function(self.ir, "moves"), context, operands, self.threads, self.implementation))


@tactic
class MovesTactic(CompiledTactic):
    ops = ("*",)
    composites = ("Moves",)

    def why_not(self, layer: Layer) -> str | None:
        if layer.composite not in self.composites:
            return f"computes moves with arithmetic between them, not {layer.composite or layer.op}"
        return self.unavailable()

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or len(layer.outputs) != 1:
            return []
        places = _list_sources(layer)
        if any(t.dtype != F32 for t in (layer.outputs[0], *(layer.needs(i) for i in places))):
            return []
        images = [i for i in places if layer.needs(i).type.rank == 4]
        targets = ("linear", "nhwc") if layer.outputs[0].type.rank == 4 else ("linear",)
        signatures = []
        block = get_registers().stored.format
        blocks = [] if any(layer.needs(i).shape[1] % BLOCKS[block] for i in images) else [block]
        for source in ("nhwc", *blocks, "linear") if images else ("linear",):
            stored = {i: Operand(source if i in images else "linear", F32) for i in places}
            inputs = tuple(stored.get(i) for i in range(len(layer.inputs)))
            signatures += [Signature(inputs, (Operand(target, F32),)) for target in targets]
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        try:
            _generate(layer, signature)
        except Refused as e:
            return str(e)
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> MovesKernel:
        try:
            moves, ir = _generate(layer, signature)
        except Refused as e:
            raise PlanRefused(str(e)) from None
        return MovesKernel(layer, signature, moves, ir, backend.threads)


def _list_sources(layer: Layer) -> list[int]:
    """Indices of the inputs that are computed at run time."""
    return [i for i, t in enumerate(layer.inputs) if t is not None and not t.is_constant]


def _generate(layer: Layer, signature: Signature) -> tuple[Moves, str]:
    """The layer's tree and its code. Raises Refused."""
    moves = Moves(layer, {i: signature.needs(i).format for i in _list_sources(layer)}, signature.outputs[0].format)
    return moves, emit_moves_ir(moves, jit.has("avx512dq"))
