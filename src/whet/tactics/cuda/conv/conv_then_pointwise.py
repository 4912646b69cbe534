"""A convolution of several taps and the following 1x1 in one launch, for few pixels: the value between stays in a cluster's shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, make_packed_array
from whet.tactics.cuda.conv._conv import pack_weights, refuses
from whet.tactics.cuda.conv._conv_then_pointwise import Tile, emit_product_source, list_product_tiles, make_product_launch, why_not_tile
from whet.tactics.cuda.conv._conv_then_pointwise_layer import Both, ConvAndProduct
from whet.tactics.cuda.conv.conv import make_packed_bias

MAX_CONFIGS = 24


@tactic
class ConvThenPointwise(ConvAndProduct):
    """Layers of the pass fuse_conv_then_pointwise: stride 1, no dilation, one group; channels of both in multiples of 64; 16-bit floats."""

    composites = ("ConvThenPointwise",)
    what = "a convolution and the product behind it"

    def why_not_pair(self, both: Both) -> str | None:
        return None if get_root_layer(both.first).attrs["group"] == 1 else "takes convolutions of one group"

    def why_not_sizes(self, both: Both, backend: Backend) -> str | None:
        if reason := refuses(both.shape):
            return reason
        if not list_product_tiles(both.shape, both.k, backend.capabilities.multiprocessors):
            return f"no cluster of blocks divides {both.shape.m} pixels, {both.shape.c}, {both.shape.k} and {both.k} channels"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        both = self.pair(layer)
        if isinstance(both, str):
            return []
        configs = list_product_tiles(both.shape, both.k, backend.capabilities.multiprocessors)[:MAX_CONFIGS]
        kinds, bf16 = (both.inner.post_ops.activation[0], both.epilogue.post_ops.activation[0]), signature.outputs[0].dtype.name == "bf16"
        compile_ahead(backend, [emit_product_source(t, both.shape, *kinds, bf16) for t in configs])
        return [as_config(t) for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        both, tile = self.pair(layer), Tile(**{k: int(v) for k, v in config})
        if isinstance(both, str):
            raise PlanRefused(both)
        s, k, dtype = both.shape, both.k, signature.outputs[0].dtype
        if reason := why_not_tile(tile, s, k):
            raise PlanRefused(reason)
        (filters, own_inner), (weights, own) = get_weight_and_bias(both.first), get_weight_and_bias(both.product)

        def packed_weights(t: Tensor, nbytes: int) -> Any:
            digest = t.constant().digest
            key = f"{digest}|conv krsc 16 {dtype}"
            return make_packed_array(key, nbytes, lambda: pack_weights(np.asarray(t.array(), np.float32), 16, dtype.numpy))

        packed = (
            packed_weights(filters, s.k * s.r * s.s * s.c * 2),
            make_packed_bias(both.inner, own_inner, s.k),
            packed_weights(weights, k * s.k * 2),
            make_packed_bias(both.epilogue, own, k),
        )

        def make(args: Args) -> list:
            filters, filters_bias, weights, weights_bias = args.packed
            addresses = (args.inputs[both.x], filters, filters_bias, weights, weights_bias, args.outputs[0])
            residual = 0 if both.residual is None else args.inputs[both.residual]
            inner, outer = both.inner.post_ops.activation, both.epilogue.post_ops
            return [make_product_launch(tile, s, k, addresses, residual, inner, outer, dtype.name == "bf16", layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"wgmma then wgmma {tile}", packed=packed)


def as_config(t: Tile) -> Config:
    """The engine's record of a tile."""
    return (("pixels", t.pixels), ("sk", t.sk), ("groups", t.groups), ("mi", t.mi), ("bk", t.bk), ("stages", t.stages))
