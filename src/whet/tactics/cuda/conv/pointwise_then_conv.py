"""A 1x1 convolution and the following convolution of several taps in one launch, for few channels: the value between stays in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias
from whet.tactics.cuda._device.kernel import FLOAT16_TYPES, GpuKernel, all_static, compile_ahead, list_float_types, machine_has, make_stored_signature
from whet.tactics.cuda.conv._conv_then_pointwise_layer import Pair, match_pair
from whet.tactics.cuda.conv._few_channel import (
    FewChannelTile,
    Front,
    is_halved,
    list_few_channel_tiles,
    make_few_channel_launch,
    pack_few_channel_filters,
    why_not_few_channel,
)
from whet.tactics.cuda.conv.conv import get_conv_shape, make_packed_bias


@tactic
class PointwiseThenConv(Tactic):
    """Layers of the pass fuse_pointwise_then_conv, with 16, 32 or 64 channels from the input to the second convolution; 16-bit floats."""

    ops = ("*",)
    composites = ("PointwiseThenConv",)
    what = "a 1x1 convolution and the one behind it"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        pair = _match_pair(layer)
        if not all_static(layer) or isinstance(pair, str):
            return []
        places = [i for i in (pair.x, pair.residual) if i is not None]
        types = list_float_types([layer.inputs[pair.x], layer.outputs[0]], FLOAT16_TYPES)
        return [make_stored_signature(layer, {i: Operand("nhwc", t) for i in places}, Operand("nhwc", t)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        pair = _match_pair(layer)
        return pair if isinstance(pair, str) else why_not_few_channel(get_conv_shape(pair.second), front=True)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        pair = _match_pair(layer)
        if isinstance(pair, str):
            return []
        s, bf16 = get_conv_shape(pair.second), signature.outputs[0].dtype.name == "bf16"
        configs = list_few_channel_tiles(s, backend.capabilities.multiprocessors, front=True)
        compile_ahead(backend, [t.source(s, pair.epilogue.post_ops, bf16, pair.inner.post_ops.activation, pair.residual == pair.x) for t in configs])
        return [t.config for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        pair, tile = _match_pair(layer), FewChannelTile.of(config, front=True)
        if isinstance(pair, str):
            raise PlanRefused(pair)
        s, dtype = get_conv_shape(pair.second), signature.outputs[0].dtype
        if reason := why_not_few_channel(s, front=True) or tile.why_not(s):
            raise PlanRefused(reason)
        (filters, own_inner), (weights, own) = get_weight_and_bias(pair.first), get_weight_and_bias(pair.second)
        ends, inner = pair.epilogue.post_ops, pair.inner.post_ops
        packed = (
            pack_few_channel_filters(weights, dtype, ends, tile.permuted),
            make_packed_bias(pair.epilogue, own, s.k, is_halved(ends)),
            pack_few_channel_filters(filters, dtype, inner),
            make_packed_bias(pair.inner, own_inner, s.c, is_halved(inner)),
        )

        def make(args: Args) -> list:
            residual = 0 if pair.residual is None else args.inputs[pair.residual]
            front = Front(args.packed[2], args.packed[3], pair.inner.post_ops.activation, pair.residual == pair.x)
            addresses = (args.inputs[pair.x], args.packed[0], args.packed[1], residual, args.outputs[0])
            multiprocessors = backend.capabilities.multiprocessors
            return [make_few_channel_launch(tile, s, addresses, pair.epilogue.post_ops, dtype.name, multiprocessors, layer.name, front)]

        return GpuKernel(layer, signature, make, implementation=f"wgmma then narrow wgmma {tile}", packed=packed)


def _match_pair(layer: Layer) -> Pair | str:
    """The two convolutions, or the reason why the kernel cannot compute them."""
    pair = match_pair(layer)
    if isinstance(pair, str):
        return pair
    front = get_conv_shape(pair.first)
    if get_root_layer(pair.first).attrs["group"] != 1:
        return "takes convolutions of one group"
    if not front.plain or front.c != front.k:
        return f"the first convolution, of {front.c} to {front.k} channels, is not 1x1 without stride, padding and a change of channels"
    return pair
