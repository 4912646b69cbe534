"""Gemm and MatMul with a constant matrix on the right, f32.

Without AVX-512 it is often faster than oneDNN's products (197x3072 by 3072x768 on Zen 3: 1.2 times), so it is timed where oneDNN is too.
"""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Config, Operand, PlanRefused, Signature, tactic
from whet.tactics._fused import root_layer, source_index, weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Problem
from whet.tactics.cpu.onednn._kernel import runtime_tensors, static

_ROWS = Operand("linear", F32)


@tactic
class LinearLayer(IndirectTactic):
    ops = ("Gemm", "MatMul")
    opt_in, instead_of = False, ""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer) or why_not_gemm(layer):
            return reason
        if any(t.dtype != F32 for t in runtime_tensors(layer)):
            return "computes in 32-bit floating point"
        chain = match_chain(layer)
        return chain if isinstance(chain, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        chain = match_chain(layer)
        if self.why_not(layer) or not static(layer) or 0 in static_shape(layer.outputs[0].shape) or isinstance(chain, str):
            return []
        read = (source_index(layer), chain.residual)
        return [Signature(tuple(_ROWS if i in read else None for i in range(len(layer.inputs))), (_ROWS,))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> IndirectKernel:
        if said := self.why_not(layer):
            raise PlanRefused(said)
        head, chain = root_layer(layer), match_chain(layer)
        assert isinstance(chain, Chain), "why_not refuses other layers"
        *leading, channels = static_shape(layer.outputs[0].shape)
        taken, transposed = static_shape(head.needs(0).shape)[-1], not (head.op == "Gemm" and head.attrs.get("transB"))
        rows = prod(leading)
        problem = Problem(1, (1, rows), (1, rows), 1, taken, channels)
        return IndirectKernel(layer, signature, "product", problem, chain, source_index(layer), weight_and_bias(layer), transposed, backend.threads)
