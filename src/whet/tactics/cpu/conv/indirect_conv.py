"""Convolutions of lines, images and volumes, also depthwise ones, of all windows, strides, dilations and pads, f32 channels last.

For CPUs without oneDNN."""

from __future__ import annotations

from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias, outer_input
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Parts, Problem, Weights, Window, as_image


@tactic
class IndirectConv(IndirectTactic):
    ops = ("Conv",)
    takes_groups = False  # of several output channels

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if any(not layer.needs(i).is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        if head.needs(0).type.rank not in (3, 4, 5):
            return "takes lines, images and volumes"
        if not self.takes_groups and 1 < head.attrs["group"] != head.needs(1).shape[0]:
            return "takes one group, or depthwise convolutions"
        return None

    def plan_kernel(self, parts: Parts, signature: Signature, threads: int) -> IndirectKernel:
        layer, head = parts.view, get_root_layer(parts.view)
        a = head.attrs
        samples, taken, *image = static_shape(head.needs(0).shape)
        channels, _, *window = static_shape(head.needs(1).shape)
        groups, rank = int(a["group"]), len(image)
        result = static_shape(layer.outputs[0].shape)[2:]
        strides, dilations = (as_image(a.get(name) or (1,) * rank) for name in ("strides", "dilations"))
        shape = Window(as_image(window), strides, dilations, as_image((a.get("pads") or (0,) * rank)[:rank], 0))
        sides = as_image(image), as_image(result)
        is_depthwise = groups == taken == channels
        if is_depthwise:
            problem = Problem(samples, *sides, 1, 1, channels, shape)
        else:
            problem = Problem(samples, *sides, groups, taken // groups, channels // groups, shape)
        kind, weights = "channelwise" if is_depthwise else "product", Weights(*get_weight_and_bias(layer))
        return IndirectKernel(layer, signature, kind, problem, parts.chain, get_source_index(layer), weights, threads, parts.integers)
