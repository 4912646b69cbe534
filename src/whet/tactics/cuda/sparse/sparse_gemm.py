"""Gemm and MatMul with constant 2:4 weights on Hopper's sparse tensor cores: the sparse convolution with one row as one pixel."""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Signature, get_tactic, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.gemm.gemm import get_gemm_shape
from whet.tactics.cuda.sparse.sparse_conv import SparseTactic


@tactic
class SparseGemm(SparseTactic):
    """Row-major 16-bit operands and results; weights are 2:4 along the inner dimension."""

    ops = ("Gemm", "MatMul")

    def why_not_kind(self, layer: Layer) -> str | None:
        return why_not_gemm(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer):
            return []
        return [s for s in get_tactic("cuda/gemm").signatures(layer, backend) if s.outputs[0].dtype.bits == 16]

    def filters(self, layer: Layer) -> np.ndarray:
        head, weights = get_root_layer(layer), np.asarray(get_weight_and_bias(layer)[0].array(), np.float32)
        transposed = head.op == "MatMul" or not head.attrs.get("transB")
        return (weights.T if transposed else weights)[:, :, None, None]

    def shape(self, layer: Layer) -> ConvShape:
        return get_gemm_shape(layer)

    def channel_axis(self, layer: Layer) -> int:
        return layer.outputs[0].type.rank - 1
