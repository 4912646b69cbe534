"""Null matrix products: row-major."""

from __future__ import annotations

from whet.network import Layer
from whet.tactics._base import Config, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps
from whet.tactics.null._cost import NullKernel, count_product_macs, find_uniform_signature


@tactic
class NullProduct(Tactic):
    ops = ("Gemm", "MatMul")

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        return [s for s in [find_uniform_signature(layer, "linear")] if s is not None]

    def refuses(self, layer: Layer, signature: Signature, backend) -> str | None:
        return "what follows the product is no chain" if find_epilogue_steps(layer) is None else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> NullKernel:
        return NullKernel(layer, signature, "null_product", count_product_macs(layer))
