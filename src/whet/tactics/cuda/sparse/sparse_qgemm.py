"""Quantized Gemm and MatMul with constant 2:4 weights on Hopper's sparse tensor cores.

The counterpart of sparse_gemm for INT8: it reads fewer bytes of weights than qgemm.

Measured: benchmarks/results/h200/sparsity_crossover.json.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Layer
from whet.tactics._base import tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.quantized.qgemm import get_row_shape, why_not_rows
from whet.tactics.cuda.sparse.sparse_qconv import SparseQuantizedTactic


@tactic
class SparseQGemm(SparseQuantizedTactic):
    """Row-major operands, inner size in sixteens; weights are 2:4 along the inner dimension."""

    ops = ("Gemm", "MatMul")

    def filters(self, parts: Parts) -> np.ndarray:
        weights = parts.view.needs(parts.operand_indices()[1]).array()
        transposed = parts.head.op == "MatMul" or not parts.head.attrs.get("transB")
        return (weights.T if transposed else weights)[:, :, None, None]

    def shape(self, parts: Parts) -> ConvShape:
        return get_row_shape(parts)

    def channels(self, parts: Parts) -> tuple[Any, Any]:
        return parts.head.needs(0).shape[-1], parts.head.outputs[0].shape[-1]

    def why_not_kind(self, parts: Parts) -> str | None:
        return why_not_rows(parts)

    def channel_axis(self, layer: Layer) -> int:
        return layer.outputs[0].type.rank - 1
