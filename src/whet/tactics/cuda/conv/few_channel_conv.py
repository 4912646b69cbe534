"""Convolutions of 16, 32 or 64 channels by image tiles: a tile loads each input pixel once, whatever the filter and its stride."""

from __future__ import annotations

from collections.abc import Sequence

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, machine_has, match_epilogue
from whet.tactics.cuda.conv._few_channel import (
    FewChannelTile,
    is_halved,
    list_few_channel_tiles,
    make_few_channel_launch,
    pack_few_channel_filters,
    why_not_few_channel,
)
from whet.tactics.cuda.conv.conv import Conv, get_conv_shape, make_packed_bias


@tactic
class FewChannelConv(Conv):
    """One group, filters of several taps, strides up to 2, no dilation; a multiple of 8 output channels."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        return epilogue if isinstance(epilogue, str) else why_not_few_channel(get_conv_shape(layer))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s, epilogue = get_conv_shape(layer), match_epilogue(layer, find_epilogue_steps(layer))
        configs = list_few_channel_tiles(s, backend.capabilities.multiprocessors)
        if not isinstance(epilogue, str):
            bf16 = signature.outputs[0].dtype.name == "bf16"
            compile_ahead(backend, [t.source(s, epilogue.post_ops, bf16) for t in configs])
        return [t.config for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, s, tile = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer), FewChannelTile.of(config)
        reason = epilogue if isinstance(epilogue, str) else why_not_few_channel(s) or tile.why_not(s)
        if isinstance(epilogue, str) or reason:
            raise PlanRefused(str(reason))
        x, dtype = get_source_index(layer), signature.outputs[0].dtype
        weights, own = get_weight_and_bias(layer)

        def make(args: Args) -> list:
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            addresses = (args.inputs[x], args.packed[0], args.packed[1], residual, args.outputs[0])
            return [make_few_channel_launch(tile, s, addresses, epilogue.post_ops, dtype.name, backend.capabilities.multiprocessors, layer.name)]

        filters = pack_few_channel_filters(weights, dtype, epilogue.post_ops, tile.permuted)
        packed = (filters, make_packed_bias(epilogue, own, s.k, is_halved(epilogue.post_ops)))
        return GpuKernel(layer, signature, make, implementation=f"narrow wgmma {tile}", packed=packed)
