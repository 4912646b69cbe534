"""Gemm, MatMul and 1x1 convolutions (channels last) with constant 2:4 weights, f32 or bf16: with few rows the time is that of reading weights.

Measured: benchmarks/results/cpu/sparse.json.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.backends import Backend
from whet.network import BF16, F32, DType, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics._two_four import compress, why_not_two_four
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import CompiledKernel
from whet.tactics.cpu.onednn._kernel import RTOL, is_static, list_runtime_tensors, to_f32
from whet.tactics.cpu.sparse._linear_layer import Epilogue, convert_to_matrix, get_matrix_sizes, match_epilogue, skip_zero_weights, why_not_linear
from whet.tactics.cpu.sparse._sparse_linear_ir import (
    CHUNK,
    GROUP,
    KEPT,
    Variant,
    count_item_words,
    count_lanes,
    emit_sparse_linear_ir,
    list_context_words,
)
from whet.tactics.cpu.sparse._two_four_tactic import TwoFourTactic, list_tile_configs, tile_of


class SparseLinearKernel(CompiledKernel):
    """A planned launch; its packed operand is described in _sparse_linear_ir.py."""

    serial_work = 1 << 17

    def __init__(self, layer: Layer, signature: Signature, blocks: int, rows: int, lanes: int, count: int) -> None:
        end = match_epilogue(layer, find_epilogue_steps(layer))
        assert isinstance(end, Epilogue)
        self.rows, self.inputs_of_row, self.channels = get_matrix_sizes(layer)
        super().__init__(layer, signature, self.rows * self.inputs_of_row * self.channels // KEPT, count)
        groups, unit = self.inputs_of_row // GROUP, lanes * blocks
        self.chunks, rest_groups = divmod(groups, CHUNK // GROUP)
        self.tiles, rest_rows = divmod(self.rows, rows)
        self.items = -(-self.channels // unit)
        has_avx512dq, stored = lanes == 16 and jit.has("avx512dq"), signature.outputs[0].dtype
        self.rtol, bf16 = RTOL[stored.name], stored == BF16
        self.variant = Variant(lanes, blocks, rows, rest_rows, rest_groups, self.channels % unit, tuple(end.steps), has_avx512dq, bf16)
        self.x, self.residual = get_source_index(layer), end.residual
        weights, bias = get_weight_and_bias(layer)
        biases = [t for t in (bias, *end.biases) if t is not None]
        channels = self.channels

        def pack() -> np.ndarray:
            total = sum((to_f32(t).reshape(-1) for t in biases), np.zeros(channels, np.float32))
            return pack_weights(convert_to_matrix(layer, to_f32(weights)), total, lanes, blocks, bf16).view(np.uint8)

        digests = "|".join(t.constant().digest for t in (weights, *biases))
        transposed = get_root_layer(layer).op != "Conv" and not get_root_layer(layer).attrs.get("transB")
        key = f"{digests}|sparse linear {transposed} {lanes} {blocks} {stored}"
        # storable: a position selects one of four inputs in a register, whatever its bits
        self.packed = (Packed(key, 4 * self.items * count_item_words(self.inputs_of_row, unit, bf16), pack, storable=True),)
        self.implementation = f"{unit} channels x {rows} rows" + (" bf16" if bf16 else "")

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {
            "x": ("input", self.x), "y": ("output", 0), "inputs": self.inputs_of_row, "channels": self.channels,
            "tiles": self.tiles, "chunks": self.chunks, "items": self.items,
        }  # fmt: skip
        if self.residual is not None:
            operands["added"] = ("input", self.residual)
        words = [operands[name] for name in list_context_words(self.variant.steps)[:-2]]
        self.launch(stream, emit_sparse_linear_ir(self.variant), "sparse_linear", args, words, self.items)


@tactic
class SparseLinear(TwoFourTactic):
    """Weights are 2:4 along the inputs. NaN or infinity in an input is not multiplied by a weight of zero; a dense product gives NaN there."""

    ops = ("Gemm", "MatMul", "Conv")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer) or why_not_linear(layer):
            return reason
        if {t.dtype for t in list_runtime_tensors(layer)} not in ({F32}, {BF16}):
            return "computes in 32-bit floating point or bf16"
        end = match_epilogue(layer, find_epilogue_steps(layer))
        if isinstance(end, str):
            return end
        return why_not_two_four(get_weight_and_bias(layer)[0], f"{self.name} {_order(layer)}", lambda: _get_filters(layer))

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or 0 in static_shape(layer.outputs[0].shape):
            return []
        end = match_epilogue(layer, find_epilogue_steps(layer))
        assert isinstance(end, Epilogue)
        name = "nhwc" if get_root_layer(layer).op == "Conv" else "linear"
        if not format_fits(name, layer.outputs[0].type.rank):
            return []
        operands = [i in (get_source_index(layer), end.residual) for i in range(len(layer.inputs))]
        stored = (Operand(name, t) for t in _list_storage_types(layer, backend))
        return [Signature(tuple(o if is_read else None for is_read in operands), (o,)) for o in stored]

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        rows, _, channels = get_matrix_sizes(layer)
        return list_tile_configs(rows, channels, count_vector_lanes())

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> SparseLinearKernel:
        lanes = count_vector_lanes()
        return SparseLinearKernel(layer, signature, *tile_of(config, lanes), lanes, backend.threads)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Callable]]:
        return [{get_root_layer(layer).op: skip_zero_weights}]


def _list_storage_types(layer: Layer, backend: Backend) -> list[DType]:
    """Types of the activations in memory. For f32 layers bf16 is an option where the other tactics of the CPU have it too."""
    if list_runtime_tensors(layer)[0].dtype == BF16:
        return [BF16]
    return [F32, BF16] if "avx512_bf16" in backend.capabilities.features else [F32]


def count_vector_lanes() -> int:
    """Floats of this CPU's longest vector."""
    return count_lanes(jit.has("avx512f"))


def _order(layer: Layer) -> str:
    head = get_root_layer(layer)
    return f"{head.op} {head.attrs.get('transB')}"


def _get_filters(layer: Layer) -> np.ndarray:
    return convert_to_matrix(layer, get_weight_and_bias(layer)[0].array())[:, :, None, None]


def pack_weights(matrix: np.ndarray, bias: np.ndarray, lanes: int, blocks: int, bf16: bool = False) -> np.ndarray:
    """The packed operand of 2:4 weights [channel, input] and biases [channel] in f32, as flat 32-bit words: see _sparse_linear_ir.py. Absent channels
    are zeros; with `bf16` the kept weights are rounded to it."""
    channels, inputs = matrix.shape
    unit, per_chunk = lanes * blocks, CHUNK // GROUP
    items, groups = -(-channels // unit), inputs // GROUP
    chunks = -(-groups // per_chunk)
    compressed = compress(matrix)
    values = np.zeros((items * unit, groups * KEPT), np.float32)
    values[:channels] = compressed.values
    positions = np.zeros((items * unit, chunks * per_chunk), np.uint32)
    positions[:channels, :groups] = compressed.metadata
    words = np.bitwise_or.reduce(positions.reshape(-1, chunks, per_chunk) << (np.arange(per_chunk, dtype=np.uint32) * 4), axis=-1)
    biases = np.zeros(items * unit, np.float32)
    biases[:channels] = bias
    parts = [biases.reshape(items, unit)]
    for c in range(chunks):
        parts.append(words[:, c].astype(np.uint32).view(np.float32).reshape(items, unit))
        chunk = values[:, c * per_chunk * KEPT : (c + 1) * per_chunk * KEPT]
        ordered = np.ascontiguousarray(chunk.reshape(items, unit, -1).transpose(0, 2, 1).reshape(items, -1))
        parts.append(ordered.astype(BF16.numpy).view(np.float32) if bf16 else ordered)
    return np.ascontiguousarray(np.concatenate(parts, axis=1)).reshape(-1)
