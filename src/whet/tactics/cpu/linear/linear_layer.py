"""Gemm and MatMul with a constant matrix on the right, f32.

For coverage: CPUs without oneDNN. It is also timed against oneDNN: oneDNN's products for AVX2 can be slower (docs/notes/cpu_kernels.md).
"""

from __future__ import annotations

from math import prod

from whet.network import F32, Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Problem


@tactic
class LinearLayer(IndirectTactic):
    ops = ("Gemm", "MatMul")
    operand = Operand("linear", F32)
    opt_in, instead_of = False, ""

    def why_not_layer(self, layer: Layer) -> str | None:
        return why_not_gemm(layer)

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> IndirectKernel:
        head = get_root_layer(layer)
        *leading, channels = static_shape(layer.outputs[0].shape)
        taken, transposed = static_shape(head.needs(0).shape)[-1], not (head.op == "Gemm" and head.attrs.get("transB"))
        rows = prod(leading)
        problem = Problem(1, (1, rows), (1, rows), 1, taken, channels)
        return IndirectKernel(layer, signature, "product", problem, chain, get_source_index(layer), get_weight_and_bias(layer), transposed, threads)
