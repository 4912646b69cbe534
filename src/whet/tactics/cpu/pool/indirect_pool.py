"""Max, average and global pooling of images, f32 channels last, with all windows, strides, dilations and pads: for CPUs without oneDNN."""

from __future__ import annotations

from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Problem, Window

_GLOBAL = ("GlobalAveragePool", "GlobalMaxPool")


@tactic
class IndirectPool(IndirectTactic):
    ops = ("AveragePool", "MaxPool", *_GLOBAL)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if len(layer.outputs) != 1 or len(head.outputs) != 1 or head.needs(0).type.rank != 4:
            return "takes images, without indices of the maxima"
        a = head.attrs
        if head.op not in _GLOBAL and (a.get("auto_pad", "NOTSET") not in ("NOTSET", "") or (a.get("ceil_mode") and a.get("count_include_pad"))):
            return "takes explicit pads, and no ceil_mode where pads are counted"
        return None

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> IndirectKernel:
        head = get_root_layer(layer)
        samples, channels, height, width = static_shape(head.needs(0).shape)
        rows, columns = static_shape(layer.outputs[0].shape)[2:]
        a, shape = head.attrs, Window((height, width))
        if head.op not in _GLOBAL:
            (high, wide), (top, left) = a["kernel_shape"], (a.get("pads") or (0, 0))[:2]
            (down, across), (step_y, step_x) = a.get("strides") or (1, 1), a.get("dilations") or (1, 1)
            shape = Window((int(high), int(wide)), (int(down), int(across)), (int(step_y), int(step_x)), (int(top), int(left)))
        kind = "max" if "Max" in head.op else "padded_mean" if a.get("count_include_pad") else "mean"
        problem = Problem(samples, (height, width), (rows, columns), 1, 1, channels, shape)
        return IndirectKernel(layer, signature, kind, problem, chain, get_source_index(layer), None, False, threads)
