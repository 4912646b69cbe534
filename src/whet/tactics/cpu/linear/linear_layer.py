"""Gemm and MatMul with a constant matrix on the right, f32.

For coverage: CPUs without oneDNN. It is also timed against oneDNN: oneDNN's products for AVX2 can be slower (docs/notes/cpu_kernels.md).
"""

from __future__ import annotations

from math import prod

from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Parts, Problem, Weights


@tactic
class LinearLayer(IndirectTactic):
    ops = ("Gemm", "MatMul")
    form = "linear"
    opt_in, instead_of = False, ""

    def why_not_layer(self, layer: Layer) -> str | None:
        return why_not_gemm(layer)

    def may_add_row(self, layer: Layer) -> bool:
        return get_root_layer(layer).input(2) is None

    def plan_kernel(self, parts: Parts, signature: Signature, threads: int) -> IndirectKernel:
        layer, head = parts.view, get_root_layer(parts.view)
        *leading, channels = static_shape(layer.outputs[0].shape)
        taken, transposed = static_shape(head.needs(0).shape)[-1], not (head.op == "Gemm" and head.attrs.get("transB"))
        rows = prod(leading)
        problem, (matrix, bias) = Problem(1, (1, rows), (1, rows), 1, taken, channels), get_weight_and_bias(layer)
        weights = Weights(matrix, bias or parts.chain.bias, transposed)
        return IndirectKernel(layer, signature, "product", problem, parts.chain, get_source_index(layer), weights, threads, parts.integers)
