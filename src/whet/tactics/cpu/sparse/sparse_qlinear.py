"""Quantized Gemm, MatMul and 1x1 convolutions (channels last) with constant i8 2:4 weights: exact accumulators with AVX2, without VNNI.

Measured: benchmarks/results/cpu/sparse.json.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias
from whet.tactics._quantized import Parts, require_quantized
from whet.tactics._two_four import compress, why_not_two_four
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import CompiledKernel, get_integer_range
from whet.tactics.cpu.onednn._kernel import is_static, to_f32
from whet.tactics.cpu.onednn._quantized import QuantizedTactic, drop_implied_bounds
from whet.tactics.cpu.sparse._linear_layer import Epilogue, convert_to_matrix, get_matrix_sizes, match_epilogue, why_not_linear
from whet.tactics.cpu.sparse._sparse_linear_ir import CHUNK, GROUP, KEPT, count_lanes
from whet.tactics.cpu.sparse._sparse_qlinear_ir import HEADER, WORDS, QVariant, count_qitem_words, emit_sparse_qlinear_ir
from whet.tactics.cpu.sparse._two_four_tactic import TwoFourTactic, list_tile_configs, tile_of

_MOST_INPUTS = 1 << 16  # their products of 8-bit integers cannot overflow 32 bits


class SparseQLinearKernel(CompiledKernel):
    """A planned launch; its packed operand is described in _sparse_qlinear_ir.py."""

    serial_work = 1 << 18

    def __init__(self, layer: Layer, signature: Signature, parts: Parts, blocks: int, rows: int, lanes: int, count: int) -> None:
        view, end = parts.view, match_epilogue(parts.view, drop_implied_bounds(parts))
        assert isinstance(end, Epilogue)
        self.rows, self.inputs_of_row, self.channels = get_matrix_sizes(view)
        super().__init__(layer, signature, self.rows * self.inputs_of_row * self.channels // KEPT, count)
        self.x, w, _ = parts.operand_indices()
        groups, unit = self.inputs_of_row // GROUP, lanes * blocks
        self.chunks, rest_groups = divmod(groups, CHUNK // GROUP)
        self.tiles, rest_rows = divmod(self.rows, rows)
        self.items = -(-self.channels // unit)
        source, stores = parts.reads[self.x], parts.stores
        self.rtol = 0.0 if stores is not None else 1e-5
        has_avx512dq = lanes == 16 and jit.has("avx512dq")
        self.variant = QVariant(
            lanes, blocks, rows, rest_rows, rest_groups, self.channels % unit, tuple(end.steps), has_avx512dq,
            signed=source.dtype.name == "i8", stores_integers=stores is not None,
        )  # fmt: skip
        weights, bias = get_weight_and_bias(view)
        biases = [t for t in (bias, *end.biases) if t is not None]
        channels, zero = self.channels, source.zero + (128 if self.variant.signed else 0)
        factor = np.broadcast_to(source.number * parts.reads[w].scale.astype(np.float64), (channels,)).astype(np.float32)
        header = np.zeros(HEADER, np.float32)
        if stores is not None:
            header[:4] = 1 / stores.number, stores.zero, *get_integer_range(stores.dtype)

        def pack() -> np.ndarray:
            matrix = convert_to_matrix(view, weights.array())
            start = (-zero * matrix.sum(axis=1, dtype=np.int64)).astype(np.int32)
            total = sum((to_f32(t).reshape(-1) for t in biases), np.zeros(channels, np.float32))
            items = pack_integers(matrix, start, factor, total, lanes, blocks)
            return np.concatenate([header.view(np.uint8), items])

        head = get_root_layer(view)
        order = f"{head.op} {head.attrs.get('transB')} {lanes} {blocks} {zero} {source.key} {parts.reads[w].key} {header.tobytes().hex()}"
        digests = "|".join(t.constant().digest for t in (weights, *biases))
        # storable: a position selects one of four inputs in a register, whatever its bits
        nbytes = 4 * (HEADER + self.items * count_qitem_words(self.inputs_of_row, unit))
        self.packed = (Packed(f"{digests}|sparse qlinear {order}", nbytes, pack, storable=True),)
        self.implementation = f"{unit} channels x {rows} rows"

    def enqueue(self, args: Args, stream: Stream) -> None:
        sizes = (self.inputs_of_row, self.channels, self.tiles, self.chunks, self.items)
        words: list[tuple[str, int] | int] = [("input", self.x), ("output", 0), *sizes]
        assert len(words) == len(WORDS) - 2
        self.launch(stream, emit_sparse_qlinear_ir(self.variant), "sparse_qlinear", args, words, self.items)


@tactic
class SparseQLinear(QuantizedTactic, TwoFourTactic):
    """Weights are symmetric i8 and 2:4 along the inputs; inputs are u8 or i8, results 8-bit integers or f32."""

    ops = ("Gemm", "MatMul", "Conv")

    def why_not_parts(self, parts: Parts) -> str | None:
        if reason := why_not_linear(parts.view):
            return reason
        x, w, b = parts.operand_indices()
        if x not in parts.reads or w not in parts.reads or (b is not None and not parts.view.needs(b).is_constant):
            return "its input or its weights are not quantized, or its bias is computed at run time"
        if parts.reads[w].zero or parts.reads[w].dtype.name != "i8" or parts.reads[x].scale.size != 1 or x == w:
            return "takes symmetric i8 weights and one scale for the input"
        if parts.stores is not None and parts.stores.scale.size != 1:
            return "takes one scale for the result"
        if parts.stores is None and parts.view.outputs[0].dtype != F32:
            return "stores 8-bit integers or 32-bit floats"
        end = match_epilogue(parts.view, drop_implied_bounds(parts))
        if isinstance(end, str):
            return end
        if end.residual is not None or any(i not in (x, w) for i in parts.reads):
            return "adds no residual"
        weights = parts.view.needs(w)
        head = get_root_layer(parts.view)
        reason = why_not_two_four(weights, f"{self.name} {head.op} {head.attrs.get('transB')}", lambda: _get_filters(parts))
        return reason or (f"more than {_MOST_INPUTS} inputs" if max(map(int, weights.shape)) > _MOST_INPUTS else None)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or 0 in static_shape(layer.outputs[0].shape):
            return []
        parts = require_quantized(layer)
        x = parts.source_index()
        name = "nhwc" if parts.head.op == "Conv" else "linear"
        if not format_fits(name, layer.outputs[0].type.rank):
            return []
        inputs = tuple(Operand(name, parts.reads[x].dtype) if i == x else None for i in range(len(layer.inputs)))
        return [Signature(inputs, (Operand(name, F32 if parts.stores is None else parts.stores.dtype),))]

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        rows, _, channels = get_matrix_sizes(require_quantized(layer).view)
        return list_tile_configs(rows, channels, count_qvector_lanes())

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> SparseQLinearKernel:
        lanes = count_qvector_lanes()
        return SparseQLinearKernel(layer, signature, require_quantized(layer), *tile_of(config, lanes), lanes, backend.threads)


def count_qvector_lanes() -> int:
    """32-bit lanes of this CPU's longest vector with byte instructions."""
    return count_lanes(jit.has("avx512f") and jit.has("avx512bw"))


def _get_filters(parts: Parts) -> np.ndarray:
    return convert_to_matrix(parts.view, get_weight_and_bias(parts.view)[0].array())[:, :, None, None]


def pack_integers(matrix: np.ndarray, start: np.ndarray, factor: np.ndarray, bias: np.ndarray, lanes: int, blocks: int) -> np.ndarray:
    """The items of the packed operand, as bytes: see _sparse_qlinear_ir.py. matrix: i8 [channel, input]; `start` i32, `factor` and `bias` f32
    [channel]. Absent channels are zeros."""
    channels, inputs = matrix.shape
    unit, per_chunk = lanes * blocks, CHUNK // GROUP
    items, groups = -(-channels // unit), inputs // GROUP
    chunks = -(-groups // per_chunk)
    compressed = compress(np.ascontiguousarray(matrix, np.int8))
    values = np.zeros((items * unit, groups, KEPT), np.int8)
    values[:channels] = compressed.values.reshape(channels, groups, KEPT)
    positions = np.zeros((items * unit, chunks * per_chunk), np.uint32)
    positions[:channels, :groups] = compressed.metadata & 3 | (compressed.metadata >> 2).astype(np.uint32) << 16
    words = np.bitwise_or.reduce(positions.reshape(-1, chunks, per_chunk) << (np.arange(per_chunk, dtype=np.uint32) * 2), axis=-1)
    parts = []
    for array in (start.astype(np.int32), factor.astype(np.float32), bias.astype(np.float32)):
        padded = np.zeros(items * unit, array.dtype)
        padded[:channels] = array
        parts.append(padded.view(np.uint8).reshape(items, -1))
    for c in range(chunks):
        parts.append(np.ascontiguousarray(words[:, c], np.uint32).view(np.uint8).reshape(items, -1))
        chunk = values[:, c * per_chunk : (c + 1) * per_chunk].reshape(items, unit, -1, KEPT).transpose(0, 2, 1, 3)
        parts.append(np.ascontiguousarray(chunk).view(np.uint8).reshape(items, -1))
    return np.ascontiguousarray(np.concatenate(parts, axis=1)).reshape(-1)
