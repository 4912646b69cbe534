"""A quantized convolution of several taps and the following 1x1 in one launch: the integers between stay in a cluster's shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, machine_has, make_stored_signature
from whet.tactics.cuda.conv._conv import refuses
from whet.tactics.cuda.conv._conv_then_pointwise import (
    Integers,
    IntegerScales,
    Tile,
    emit_product_source,
    list_product_tiles,
    make_product_launch,
    why_not_tile,
)
from whet.tactics.cuda.conv.conv_then_pointwise import MAX_CONFIGS, as_config
from whet.tactics.cuda.quantized._qconv_then_pointwise_layer import Both8, match_halves


@tactic
class QConvThenPointwise(Tactic):
    """Quantized ConvThenPointwise: stride 1, no dilation, one group; channels of both in multiples of 64; u8 or i8 by i8."""

    ops = ("*",)
    composites = ("ConvThenPointwise",)
    what = "a quantized convolution and the product behind it"

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        both = match_halves(layer)
        return both if isinstance(both, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or isinstance(both := match_halves(layer), str):
            return []
        assert both.product.parts.stores is not None
        places = [i for i in (both.x, both.residual) if i is not None]
        return [
            make_stored_signature(layer, {i: Operand("nhwc", layer.needs(i).dtype) for i in places}, Operand("nhwc", both.product.parts.stores.dtype))
        ]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        both = match_halves(layer)
        if isinstance(both, str):
            return both
        s, k = both.first.shape, both.product.shape.k
        if reason := refuses(s, size=1):
            return reason
        if not list_product_tiles(s, k, backend.capabilities.multiprocessors, 1):
            return f"no cluster of blocks divides {s.m} pixels, {s.c}, {s.k} and {k} channels"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        both = match_halves(layer)
        if isinstance(both, str):
            return []
        configs = list_product_tiles(both.first.shape, both.product.shape.k, backend.capabilities.multiprocessors, 1)[:MAX_CONFIGS]
        inner, last = (h.epilogue.post_ops.activation[0] for h in (both.first, both.product))
        compile_ahead(backend, [emit_product_source(t, both.first.shape, inner, last, False, _get_types(both)) for t in configs])
        return [as_config(t) for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        both, tile = match_halves(layer), Tile(**{k: int(v) for k, v in config}, size=1)
        if isinstance(both, str):
            raise PlanRefused(both)
        s, k = both.first.shape, both.product.shape.k
        if reason := why_not_tile(tile, s, k):
            raise PlanRefused(reason)
        (_, _, inner, between), (_, _, out, post_ops) = both.first.folded_epilogue(), both.product.folded_epilogue()

        def make(args: Args) -> list:
            weights, numbers, weights2, numbers2 = args.packed
            factors = (both.first.factor(numbers), both.product.factor(numbers2))
            scales = IntegerScales(*factors, inner.per_step, inner.zero, out.per_step, out.zero, out.add_step)
            integers = replace(_get_types(both), scales=scales)
            residual = 0 if both.residual is None else args.inputs[both.residual]
            addresses = (args.inputs[both.x], weights, numbers, weights2, numbers2, args.outputs[0])
            return [make_product_launch(tile, s, k, addresses, residual, between.activation, post_ops, False, layer.name, integers)]

        packed = (*both.first.packed(), *both.product.packed())
        return GpuKernel(layer, signature, make, implementation=f"wgmma then wgmma {both.first.stored} {tile}", packed=packed, rtol=0.0)


def _get_types(both: Both8) -> Integers:
    added = both.product.added
    return Integers(both.first.stored, both.product.stored if added is None else added.dtype.name)
