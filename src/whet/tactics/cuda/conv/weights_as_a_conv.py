"""Convolutions of 64 channels by filters of several taps for many pixels, weights as operand A: products read less than they multiply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, machine_has, make_packed_array, match_epilogue
from whet.tactics.cuda.conv._weights_as_a_conv import (
    WeightsAsATile,
    emit_source,
    list_weights_as_a_tiles,
    make_constants,
    make_launch,
    pack_weights_as_a,
    why_not_shape,
)
from whet.tactics.cuda.conv.conv import Conv, get_conv_shape, make_packed_bias


@tactic
class WeightsAsAConv(Conv):
    """64 to at most 64 channels, stride 1, no dilation, one group, an even number of results per row; 16-bit floats, channels last."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        return epilogue if isinstance(epilogue, str) else why_not_shape(get_conv_shape(layer))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        epilogue, s, bf16 = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer), signature.outputs[0].dtype.name == "bf16"
        if isinstance(epilogue, str):
            return []
        configs = list_weights_as_a_tiles(s, epilogue.residual is not None)
        compile_ahead(backend, [emit_source(make_constants(t, s, epilogue.post_ops, bf16)) for t in configs])
        return [t.config for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, s, tile = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer), WeightsAsATile(**{k: int(v) for k, v in config})
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        if not tile.fits(s, epilogue.residual is not None):
            raise PlanRefused(why_not_shape(s) or f"{tile} is no tile of {s}")
        x, (weights, own), dtype = get_source_index(layer), get_weight_and_bias(layer), signature.outputs[0].dtype
        packed = (
            make_packed_array(
                f"{weights.constant().digest}|upright {dtype}",
                s.r * s.s * 64 * 64 * 2,
                lambda: pack_weights_as_a(np.asarray(weights.array(), np.float32), dtype.numpy),
            ),
            make_packed_bias(epilogue, own, s.k),
        )

        def make(args: Args) -> list:
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            addresses = (args.inputs[x], *args.packed, residual, args.outputs[0])
            bf16, multiprocessors = dtype.name == "bf16", backend.capabilities.multiprocessors
            return [make_launch(tile, s, addresses, epilogue.post_ops, bf16, multiprocessors, layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"wgmma upright {tile.rows} rows s{tile.slots}", packed=packed)
