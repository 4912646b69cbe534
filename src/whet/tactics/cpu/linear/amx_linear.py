"""Gemm and MatMul with a constant matrix on the right, in bf16, by AMX tiles.

Measured: docs/notes/cpu_kernels.md (BF16 with AMX).
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu.conv._amx_kernel import AmxKernel, AmxTactic, choose_step

_LEAST_ROWS = 4  # below, reading the weights takes longer than multiplying


@tactic
class AmxLinear(AmxTactic):
    ops = ("Gemm", "MatMul")
    format = "linear"

    def why_not_layer(self, layer: Layer) -> str | None:
        if reason := why_not_gemm(layer):
            return reason
        *leading, inner = static_shape(get_root_layer(layer).needs(0).shape)
        if prod(leading) < _LEAST_ROWS:
            return f"takes {_LEAST_ROWS} rows or more"
        return None if choose_step(inner) else "takes an even inner dimension"

    def find_chain(self, layer: Layer) -> Chain | str:
        has_bias = get_root_layer(layer).input(2) is not None  # of a Gemm
        return match_chain(layer, takes_bias=not has_bias)

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> AmxKernel:
        head = get_root_layer(layer)
        to_matrix = transpose_matrix if head.op == "Gemm" and head.attrs.get("transB") else keep_matrix
        rows = prod(static_shape(head.needs(0).shape)[:-1])
        weights, bias = get_weight_and_bias(layer)
        return AmxKernel(layer, signature, chain, rows, weights, bias or chain.bias, to_matrix, threads)


def keep_matrix(w: np.ndarray) -> np.ndarray:
    return w


def transpose_matrix(w: np.ndarray) -> np.ndarray:
    """[inner, results] from [results, inner]."""
    return w.T
