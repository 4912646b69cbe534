"""Convolutions with weights that are computed at run time (StyleGAN's modulation, hypernetworks) by oneDNN, which packs them at every run.

For coverage: otherwise NumPy computes them.
"""

from __future__ import annotations

from dataclasses import replace

from whet.backends import Backend
from whet.network import F32, Layer, compute_strides, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, tactic
from whet.tactics._fused import get_operand_indices, get_root_layer
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnKernel, planned_threads
from whet.tactics.cpu.onednn.onednn_conv import OneDnnConv, get_grouped_shape

_LINE = 64  # bytes


class PackAndConvolve:
    """A reorder of the weights into scratch memory, and the convolution, whose last packed operand they are."""

    deterministic = True

    def __init__(self, pack: OneDnnKernel, convolution: OneDnnKernel) -> None:
        self.parts = (pack, convolution)
        self.inputs, self.outputs, self.implementation = convolution.inputs, convolution.outputs, convolution.implementation
        self.rtol, self.packed = convolution.rtol, convolution.packed
        self._weights_at = -(-max(pack.scratch, convolution.scratch) // _LINE) * _LINE
        self.scratch = self._weights_at + pack.descriptor.md("dst").nbytes

    def enqueue(self, args: Args, stream: Stream) -> None:
        weights = args.scratch + self._weights_at
        pack, convolution = self.parts
        pack.enqueue(Args(args.inputs, args.outputs, (weights,), args.scratch), stream)
        convolution.enqueue(Args(args.inputs, args.outputs, (*args.packed, weights), args.scratch), stream)


@tactic
class OneDnnComputedConv(OneDnnConv):
    def refuses_weights(self, layer: Layer, weights: list[int | None]) -> str | None:
        if any(i is None for i in weights):
            return "the weights are computed inside of the layer"
        w = layer.needs(weights[0] or 0)
        if w.is_constant:
            return "the weights are constant"
        return None if w.dtype == F32 else f"takes weights in f32, not {w.dtype}"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        computed = [i for i in get_operand_indices(layer)[1:] if i is not None and not layer.needs(i).is_constant] if not self.why_not(layer) else []
        listed = []
        for s in super().signatures(layer, backend):
            if s.outputs[0].dtype == F32:
                stored = tuple(Operand("linear", F32) if i in computed else o for i, o in enumerate(s.inputs))
                listed.append(replace(s, inputs=stored))
        return listed

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> PackAndConvolve:
        convolution = super().plan(layer, signature, config, backend)
        assert isinstance(convolution, OneDnnKernel)
        _, w, _ = get_operand_indices(layer)
        wanted, own = convolution.descriptor.md("weights"), _describe_weights(layer, w)
        with planned_threads(layer, backend) as count:
            try:
                move = dnn.reorder(own, wanted)
            except dnn.Unimplemented as error:
                raise PlanRefused(str(error)) from None
        absent: tuple[Packed, ...] = ()
        pack = OneDnnKernel(layer, signature, move, {"src": ("input", w), "dst": ("packed", 0)}, absent, 0.0)
        pack.team = backend.threads if count < backend.threads else 1
        convolution.places["weights"] = ("packed", len(convolution.packed))
        return PackAndConvolve(pack, convolution)


def _describe_weights(layer: Layer, w: int) -> dnn.MemoryDesc:
    """The layout of row-major weights in the axes of `get_grouped_shape`."""
    head, own = get_root_layer(layer), static_shape(layer.needs(w).shape)
    group, transposed = head.attrs["group"], head.op == "ConvTranspose"
    shape, steps = get_grouped_shape(own, group, transposed), list(compute_strides("linear", own))
    if transposed:
        steps[:2] = steps[1], steps[0]
    if group > 1:
        steps.insert(0, steps[1] * own[0] // group if transposed else steps[0] * own[0] // group)
    return dnn.describe(shape, "f32", strides=steps)
