"""A depthwise convolution and the following 1x1 convolution in one launch: the value between never leaves the multiprocessor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, make_packed_array
from whet.tactics.cuda.conv._conv import pack_weights
from whet.tactics.cuda.conv._conv_then_pointwise_layer import Both, ConvAndProduct
from whet.tactics.cuda.conv.conv import as_config, from_config, make_packed_bias
from whet.tactics.cuda.depthwise._depthwise_then_pointwise import (
    emit_launch_source,
    list_configs,
    make_depthwise_launch,
    pack_depthwise,
    why_not_config,
)

MAX_CONFIGS = 24
_MOST_TAPS = 25


@tactic
class DepthwiseThenPointwise(ConvAndProduct):
    """Layers of the pass fuse_depthwise_then_pointwise: as many groups as channels, stride 1 or 2, no dilation; 16-bit floats."""

    composites = ("DepthwiseThenPointwise",)
    what = "a depthwise convolution and the product behind it"

    def why_not_pair(self, both: Both) -> str | None:
        s = both.shape
        depthwise = get_root_layer(both.first).attrs["group"] == s.c == s.k
        return None if depthwise else "takes a depthwise convolution followed by a 1x1"

    def why_not_sizes(self, both: Both, backend: Backend) -> str | None:
        s = both.shape
        if s.c % 8 or both.k % 8:
            return f"{s.c} channels inside and {both.k} out; takes multiples of 8"
        if s.stride not in ((1, 1), (2, 2)) or s.dilation != (1, 1) or s.r * s.s > _MOST_TAPS:
            return f"stride {s.stride}, dilation {s.dilation}, filter {s.r} x {s.s}; takes 1 or 2, none, at most {_MOST_TAPS} taps"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        both = self.pair(layer)
        if isinstance(both, str):
            return []
        processors = backend.capabilities.multiprocessors
        configs = list_configs(both.shape, both.k, processors)[:MAX_CONFIGS]
        kinds, bf16 = (both.inner.post_ops.activation[0], both.epilogue.post_ops.activation[0]), signature.outputs[0].dtype.name == "bf16"
        compile_ahead(backend, [emit_launch_source(c, both.shape, both.k, processors, *kinds, bf16) for c in configs])
        return [as_config(c) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        both, tile = self.pair(layer), from_config(config)
        if isinstance(both, str):
            raise PlanRefused(both)
        if reason := why_not_config(tile, both.shape, both.k, backend.capabilities.multiprocessors):
            raise PlanRefused(reason)
        s, k, dtype = both.shape, both.k, signature.outputs[0].dtype
        taps, own_inner = get_weight_and_bias(both.first)
        weights, own = get_weight_and_bias(both.product)
        steps = -(-s.c // tile.bk)
        inner_key = f"{taps.constant().digest} {own_inner.constant().digest if own_inner else ''} {both.inner.key}"
        packed = (
            make_packed_array(
                f"{inner_key}|depthwise steps {tile.bk}",
                steps * (s.r * s.s + 1) * tile.bk * 4,
                lambda: pack_depthwise(np.asarray(taps.array(), np.float32), both.inner.bias(own_inner, s.c), tile.bk),
            ),
            make_packed_array(
                f"{weights.constant().digest}|conv krsc {tile.bk} {dtype}",
                k * steps * tile.bk * 2,
                lambda: pack_weights(np.asarray(weights.array(), np.float32), tile.bk, dtype.numpy),
            ),
            make_packed_bias(both.epilogue, own, k),
        )

        def make(args: Args) -> list:
            taps, weights, bias = args.packed
            addresses = (args.inputs[both.x], taps, weights, bias, args.outputs[0])
            residual = 0 if both.residual is None else args.inputs[both.residual]
            endings = (both.inner.post_ops.activation, both.epilogue.post_ops)
            blocks = backend.capabilities.multiprocessors
            return [make_depthwise_launch(tile, s, k, addresses, residual, *endings, dtype.name == "bf16", blocks, layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"depthwise and wgmma {tile}", packed=packed)
