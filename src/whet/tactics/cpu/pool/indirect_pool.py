"""Max, average and global pooling of lines, images and volumes, f32 channels last (maxima also of 8-bit integers): for CPUs without oneDNN.

With all windows, strides, dilations and pads. A block of channels of a sample is stored like a sample with few channels.
"""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.network.formats import find_block
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu.conv._indirect_kernel import IndirectKernel, IndirectTactic, Parts, Problem, Window, as_image
from whet.tactics.cpu.onednn._kernel import list_image_formats

_GLOBAL = ("GlobalAveragePool", "GlobalMaxPool")


@tactic
class IndirectPool(IndirectTactic):
    ops: tuple[str, ...] = ("AveragePool", "MaxPool", *_GLOBAL)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        rank = head.needs(0).type.rank
        if len(layer.outputs) != 1 or len(head.outputs) != 1 or rank < 3 or (rank > 5 and head.op not in _GLOBAL):
            return "takes lines, images and volumes, without indices of the maxima"
        a = head.attrs
        if head.op not in _GLOBAL and (a.get("auto_pad", "NOTSET") not in ("NOTSET", "") or (a.get("ceil_mode") and a.get("count_include_pad"))):
            return "takes explicit pads, and no ceil_mode where pads are counted"
        return None

    def split(self, layer: Layer) -> Parts | str:
        x = layer.needs(0)
        if layer.op != "Fused" and "Max" in layer.op and x.dtype.name in ("i8", "u8"):
            return self.why_not_layer(layer) or Parts(layer, Chain())
        return super().split(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        """Also in blocks of channels, if nothing follows the pooling: padding channels stay zeros."""
        signatures = super().signatures(layer, backend)
        if not signatures or layer.op == "Fused" or layer.needs(0).dtype != F32:
            return signatures
        blocked = [Operand(f, F32) for f in list_image_formats(layer.outputs[0].type.rank) if find_block(f) > 1]
        return [*signatures, *(Signature((o,), (o,)) for o in blocked)]

    def plan_kernel(self, parts: Parts, signature: Signature, threads: int) -> IndirectKernel:
        layer, head = parts.view, get_root_layer(parts.view)
        samples, channels, *image = static_shape(head.needs(0).shape)
        block = find_block(signature.outputs[0].format)
        if block > 1:
            samples, channels = samples * -(-channels // block), block
        result, a = static_shape(layer.outputs[0].shape)[2:], head.attrs
        if head.op in _GLOBAL:
            sides: tuple[tuple[int, ...], tuple[int, ...]] = (1, prod(image)), (1, 1)
            shape = Window(sides[0])
        else:
            sides, rank = (as_image(image), as_image(result)), len(image)
            strides, dilations = (as_image(a.get(name) or (1,) * rank) for name in ("strides", "dilations"))
            shape = Window(as_image(a["kernel_shape"]), strides, dilations, as_image((a.get("pads") or (0,) * rank)[:rank], 0))
        kind = "max" if "Max" in head.op else "padded_mean" if a.get("count_include_pad") else "mean"
        problem, x = Problem(samples, *sides, 1, 1, channels, shape), get_source_index(layer)
        return IndirectKernel(layer, signature, kind, problem, parts.chain, x, None, threads, parts.integers)
