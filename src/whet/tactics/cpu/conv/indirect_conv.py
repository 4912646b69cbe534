"""Convolutions of images, also depthwise ones, of all windows, strides, dilations and pads, f32 channels last: for CPUs without oneDNN."""

from __future__ import annotations

from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias, outer_input
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Problem, Window


@tactic
class IndirectConv(IndirectTactic):
    ops = ("Conv",)
    takes_groups = False  # of several output channels

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if any(not layer.needs(i).is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        if head.needs(0).type.rank != 4:
            return "takes images"
        if not self.takes_groups and 1 < head.attrs["group"] != head.needs(1).shape[0]:
            return "takes one group, or depthwise convolutions"
        return None

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> IndirectKernel:
        head = get_root_layer(layer)
        a = head.attrs
        samples, taken, height, width = static_shape(head.needs(0).shape)
        channels, _, *window = static_shape(head.needs(1).shape)
        groups = int(a["group"])
        rows, columns = static_shape(layer.outputs[0].shape)[2:]
        top, left = (int(n) for n in (a.get("pads") or (0, 0))[:2])
        down, across = (int(n) for n in a.get("strides") or (1, 1))
        step_y, step_x = (int(n) for n in a.get("dilations") or (1, 1))
        shape = Window((window[0], window[1]), (down, across), (step_y, step_x), (top, left))
        is_depthwise = groups == taken == channels
        if is_depthwise:
            problem = Problem(samples, (height, width), (rows, columns), 1, 1, channels, shape)
        else:
            problem = Problem(samples, (height, width), (rows, columns), groups, taken // groups, channels // groups, shape)
        kind = "channelwise" if is_depthwise else "product"
        return IndirectKernel(layer, signature, kind, problem, chain, get_source_index(layer), get_weight_and_bias(layer), False, threads)
