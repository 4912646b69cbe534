"""A matrix product and the Mul of its result by another tensor (SwiGLU) in one launch: conv.cu with GATED.

The gate is read as a residual is, by the epilogue, and multiplied instead of added. So the product's own result is neither stored nor read.

Not measured yet: the selections of an H200 were recorded before it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    Epilogue,
    GpuKernel,
    all_static,
    compile_ahead,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, View, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import list_configs, pick_varied
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import as_config, from_config, launch_with_epilogue, make_packed_bias
from whet.tactics.cuda.gemm.gemm import MAX_CONFIGS, get_gemm_shape


@dataclass(frozen=True)
class ProductAndGate:
    """The product by itself, its epilogue with the gate as residual, and the indices of the fused layer's operands."""

    product: Layer
    epilogue: Epilogue
    x: int
    gate: int

    @property
    def shape(self) -> ConvShape:
        """The product as a convolution."""
        return get_gemm_shape(self.product)

    def features(self, dtype: str) -> Features:
        """Macros of the kernel for operands of a type."""
        return Features(activation=self.epilogue.post_ops.activation[0], bf16=dtype == "bf16", gated=True)


@tactic
class GatedGemm(Tactic):
    """Layers of the pass fuse_gated_product: row-major 16-bit floats."""

    ops = ("*",)
    composites = ("GatedProduct",)
    what = "a product and its gate"

    def why_not(self, layer: Layer) -> str | None:
        if said := super().why_not(layer):
            return said
        both = match_product_and_gate(layer)
        return both if isinstance(both, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        both = match_product_and_gate(layer) if all_static(layer) and not self.why_not(layer) else ""
        if isinstance(both, str):
            return []
        types = list_float_types([layer.inputs[both.x], layer.outputs[0]], FLOAT16_TYPES)
        return [make_stored_signature(layer, {i: Operand("linear", t) for i in (both.x, both.gate)}, Operand("linear", t)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        both = match_product_and_gate(layer)
        return both if isinstance(both, str) else refuses(both.shape)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        both = match_product_and_gate(layer)
        if isinstance(both, str):
            return []
        s = both.shape
        tiles = pick_varied(list_configs(s.m, s.k, s.c, 1, backend.capabilities.multiprocessors), MAX_CONFIGS, each=5)
        compile_ahead(backend, [emit_conv_source(c, both.features(signature.outputs[0].dtype.name)) for c in tiles])
        return [as_config(c) for c in tiles]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        both, tile = match_product_and_gate(layer), from_config(config)
        if isinstance(both, str):
            raise PlanRefused(both)
        shape, dtype, epilogue = both.shape, signature.outputs[0].dtype, both.epilogue
        head = get_root_layer(both.product)
        weights, bias = get_weight_and_bias(both.product)
        transposed = head.op == "MatMul" or not head.attrs.get("transB")

        def filters() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32)
            return pack_weights((given.T if transposed else given)[:, :, None, None], tile.bk, dtype.numpy)

        packed = (
            make_packed_array(
                f"{weights.constant().digest}|gemm {transposed} {tile.bk} {dtype}", shape.k * shape.steps(tile.bk) * tile.bk * 2, filters
            ),
            make_packed_bias(epilogue, bias, shape.k),
        )

        def make(args: Args) -> list:
            x = View(args.inputs[both.x], shape.c)
            return [launch_with_epilogue(tile, shape, x, args, epilogue, dtype, backend, layer.name, gated=True)]

        return GpuKernel(layer, signature, make, implementation=f"gated wgmma {tile}", packed=packed)


def match_product_and_gate(layer: Layer) -> ProductAndGate | str:
    """Both parts of a fused layer, or why the kernel does not take them."""
    body = layer.regions["body"]
    if len(body.layers) != 2 or body.layers[1].op != "Mul" or body.outputs != [body.layers[1].outputs[0]]:
        return "the body is not a product and a Mul"
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    product, multiply = (with_outer_inputs(x, outer) for x in body.layers)
    if reason := why_not_gemm(product):
        return reason
    epilogue = match_epilogue(product, find_epilogue_steps(product), product.outputs[0].type.rank - 1)
    if isinstance(epilogue, str):
        return epilogue
    if epilogue.residual is not None:
        return "reads one tensor in its epilogue: the gate"
    gates = [t for t in multiply.inputs if t is not None and t is not product.outputs[0]]
    x, places = product.inputs[get_source_index(product)], {t: i for i, t in enumerate(layer.inputs)}
    if len(gates) != 1 or gates[0] not in places or x not in places or gates[0].shape != product.outputs[0].shape:
        return "the product is not multiplied by an input of its own shape"
    epilogue.residual, epilogue.post_ops = places[gates[0]], PostOps(epilogue.post_ops.activation, 2)
    return ProductAndGate(product, epilogue, places[x], places[gates[0]])
