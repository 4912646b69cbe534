"""Convolutions of several groups on Hopper's tensor cores: a tile of output channels reads the window of input channels that its groups have.

Small groups share a tile, with a block-diagonal weight matrix; a large group has several tiles. The kernel is conv.cu, as for one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Args, Config, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, machine_has, make_packed_array, match_epilogue
from whet.tactics.cuda.conv._conv import ConvShape, Groups, View, refuses
from whet.tactics.cuda.conv._conv_config import ConvConfig, pick_varied, step_channels
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv._conv_tiles import list_conv_configs, why_not_config
from whet.tactics.cuda.conv.conv import (
    as_config,
    from_config,
    get_conv_shape,
    launch_with_epilogue,
    list_conv_signatures,
    make_packed_bias,
    why_not_conv,
)

MAX_CONFIGS = 30
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256)  # output channels of a tile, as in _conv_config


@tactic
class GroupConv(Tactic):
    """Two spatial axes, several groups of several channels; a multiple of 8 input channels in all groups together.

    A value that is not finite reaches the other groups of its tile, as a zero weight times infinity is NaN; the reference keeps it
    in its group.
    """

    ops = ("Conv",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        if head.attrs["group"] == 1:
            return "takes convolutions of several groups"
        return why_not_conv(layer, head)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        return list_conv_signatures(layer, "nhwc")

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        groups = get_groups(layer)
        if groups.c == groups.k == 1:
            return "takes several channels per group; depthwise tactics take one"
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        return epilogue if isinstance(epilogue, str) else refuses(get_conv_shape(layer), epilogue.residual is None)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        shape, groups = get_conv_shape(layer), get_groups(layer)
        configs = pick_varied(group_configs(shape, groups, backend.capabilities.multiprocessors), MAX_CONFIGS)
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        if not isinstance(epilogue, str):
            bf16, odd = signature.outputs[0].dtype.name == "bf16", shape.k % 8 != 0
            kind = epilogue.post_ops.activation[0]
            compile_ahead(
                backend, [emit_conv_source(c, Features(not shape.plain and not c.halo, kind, bf16, odd=odd, grouped=True)) for c in configs]
            )
        return [as_config(c) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        tile, groups = from_config(config), get_groups(layer)
        shape = tile_shape(get_conv_shape(layer), groups, tile.bn)
        whole = get_conv_shape(layer)
        reason = epilogue if isinstance(epilogue, str) else refuses(whole, epilogue.residual is None and tile.direct == 1)
        reason = reason or why_not_config(tile, shape)
        if reason or isinstance(epilogue, str):
            raise PlanRefused(str(reason))
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        dtype = signature.outputs[0].dtype
        packed = (
            make_packed_array(
                f"{weights.constant().digest}|groups {groups} {tile.bn} {tile.bk} {dtype}",
                shape.k * shape.steps(tile.bk) * tile.bk * 2,
                lambda: pack_groups(np.asarray(weights.array(), np.float32), groups, tile.bn, tile.bk, dtype.numpy),
            ),
            make_packed_bias(epilogue, own, shape.k),
        )

        def make(args: Args) -> list:
            view = View(args.inputs[x], groups.channels)
            return [launch_with_epilogue(tile, shape, view, args, epilogue, dtype, backend, layer.name, groups=groups)]

        return GpuKernel(layer, signature, make, implementation=f"wgmma groups {tile}", packed=packed)


def get_groups(layer: Layer) -> Groups:
    """The groups of a Conv."""
    head = get_root_layer(layer)
    group, channels = head.attrs["group"], static_shape(head.needs(0).shape)[1]
    return Groups(static_shape(head.needs(1).shape)[0] // group, channels // group, channels)


def tile_shape(shape: ConvShape, groups: Groups, bn: int) -> ConvShape:
    """The convolution as tiles of `bn` output channels see it: their window of input channels."""
    return replace(shape, c=groups.window(shape.k, bn))


def group_configs(shape: ConvShape, groups: Groups, multiprocessors: int) -> list[ConvConfig]:
    """Candidates: those of a convolution over the window that tiles of each width read, interleaved from the least work to the most."""
    by_width = []
    for bn in WIDTHS:
        seen = tile_shape(shape, groups, bn)
        if -(-seen.c // step_channels(seen.c, 2)) * step_channels(seen.c, 2) * -(-shape.k // bn) * bn > 4 * compute_least_work(shape, groups):
            continue  # more than four times the products of the best width
        configs = [c for c in list_conv_configs(seen, multiprocessors) if c.bn == bn]
        if shape.k % 8:  # only results stored directly from registers can have any address
            plain = (replace(c, direct=1, outs=1) for c in configs if c.sk == 1 and c.mi == 1 and c.bn <= 128)
            configs = list(dict.fromkeys(c for c in plain if c.valid() and why_not_config(c, seen) is None))
        if configs:
            by_width.append(configs)
    return [found[i] for i in range(max(map(len, by_width), default=0)) for found in by_width if i < len(found)]


def compute_least_work(shape: ConvShape, groups: Groups) -> int:
    """Multiply-adds of a pixel and filter tap at the width with the fewest."""
    return min(groups.window(shape.k, bn) * -(-shape.k // bn) * bn for bn in WIDTHS)


def pack_groups(weights: np.ndarray, groups: Groups, bn: int, bk: int, dtype: np.dtype) -> np.ndarray:
    """Filters [k, channels of a group, r, s] as rows [k][r][s][window], each at its group's place in the window of its tile; zeros elsewhere."""
    k, c, r, s = weights.shape
    out = np.zeros((k, r, s, -(-groups.window(k, bn) // bk) * bk), dtype)
    for row in range(k):
        at = row // groups.k * groups.c - groups.first(row // bn * bn)
        out[row, ..., at : at + c] = weights[row].transpose(1, 2, 0)
    return out
