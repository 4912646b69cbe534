"""MatMulInteger with constant 8-bit weights, as dynamic quantization writes it: exact.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.onednn._kernel import is_static
from whet.tactics.cpu.quantized._integer_matmul_ir import COLUMNS, emit_integer_matmul_ir

_MAX_SIZE = 2**31 // (255 * 255)  # products that one 32-bit accumulator holds


class IntegerMatMulKernel(CompiledKernel):
    """Two planned launches: A in 16 bits, the product."""

    serial_work = 1 << 14  # multiplications

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        self.layer = layer
        self.size, self.columns = static_shape(layer.needs(1).shape)
        self.rows = prod(static_shape(layer.needs(0).shape)[:-1])
        self.padded_size = -(-self.size // 2) * 2
        self.blocks = -(-self.columns // COLUMNS)
        super().__init__(layer, signature, self.rows * self.size * self.columns, count)
        self.has_avx2 = jit.has("avx2")
        self.implementation = "avx2 vpmaddwd" if self.has_avx2 else "pairs of products"
        self.scratch = 2 * self.rows * self.padded_size
        b_zero, a_zero = layer.input(3), layer.input(2)
        key = layer.needs(1).constant().digest + "|" + ("" if b_zero is None else b_zero.constant().digest)
        self.packed = (
            Packed(f"{key}|16-bit pairs", 2 * self.blocks * COLUMNS * self.padded_size, self._pairs, storable=True),
            Packed(f"{key}|column sums", 4 * self.blocks * COLUMNS, self._sums, storable=True),
        )
        if a_zero is not None and a_zero.is_constant:
            zero = np.asarray(a_zero.array()).reshape(1)
            self.packed += (Packed(f"zero|{a_zero.constant().digest}", 1, lambda: zero.view(np.uint8)),)

    def _centred(self) -> np.ndarray:
        """B less its zero point [padded size, padded columns], exact in 16 bits."""
        zero = self.layer.input(3)
        b = np.asarray(self.layer.needs(1).array(), np.int16) - (0 if zero is None else np.asarray(zero.array(), np.int16).reshape(1, -1))
        padded = np.zeros((self.padded_size, self.blocks * COLUMNS), np.int16)
        padded[: self.size, : self.columns] = b
        return padded

    def _pairs(self) -> np.ndarray:
        pairs = self._centred().reshape(self.padded_size // 2, 2, self.blocks, COLUMNS).transpose(2, 0, 3, 1)
        return np.ascontiguousarray(pairs).reshape(-1).view(np.uint8)

    def _sums(self) -> np.ndarray:
        return self._centred().sum(axis=0, dtype=np.int32).view(np.uint8)

    def enqueue(self, args: Args, stream: Stream) -> None:
        zero = self.layer.input(2)
        is_signed = self.layer.needs(0).dtype.name == "i8"
        ir = emit_integer_matmul_ir(is_signed, zero is not None, self.columns % COLUMNS, self.size % LANES, self.has_avx2)
        a_zero: tuple[str, int] | int = 0 if zero is None else args.packed[2] if zero.is_constant else ("input", 2)
        operands = Args(args.inputs, args.outputs, args.packed[:2], args.scratch)
        widened: list[tuple[str, int] | int] = [("input", 0), args.scratch, self.rows, self.size, self.padded_size]
        self.launch(stream, ir, "widen", operands, widened, self.rows)
        product = [args.scratch, a_zero, ("output", 0), self.blocks, self.rows, self.columns, self.padded_size]
        self.launch(stream, ir, "product", operands, product, self.blocks)


@tactic
class IntegerMatMul(CompiledTactic):
    ops = ("MatMulInteger",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        b = layer.needs(1)
        if layer.needs(0).is_constant or not b.is_constant or b.type.rank != 2:
            return "takes constant matrices as weights"
        a_zero, b_zero = layer.input(2), layer.input(3)
        if a_zero is not None and not (a_zero.type.static and prod(static_shape(a_zero.shape)) == 1):
            return "each row has a zero point of its own"
        if b_zero is not None and not b_zero.is_constant:
            return "the weights' zero point is computed at run time"
        return "its sums may exceed 32 bits" if static_shape(b.shape)[0] > _MAX_SIZE else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        inputs = tuple(None if t is None or t.is_constant else Operand("linear", t.dtype) for t in layer.inputs)
        return [Signature(inputs, (Operand("linear", layer.outputs[0].dtype),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> IntegerMatMulKernel:
        return IntegerMatMulKernel(layer, signature, backend.threads)
