"""Squeeze-and-excitation layers as the kernels see them: sizes, weights and epilogues of both products, and the base of their tactics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Operand, Packed, Signature, Tactic
from whet.tactics._fused import find_epilogue_steps, get_weight_and_bias
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    Epilogue,
    all_static,
    list_float_types,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import Activation
from whet.tactics.cuda.conv.conv import make_packed_bias


@dataclass(frozen=True)
class Gate:
    """Samples, channels, pixels, hidden values; weights, biases and epilogues of both products; the index of the image."""

    n: int
    c: int
    pixels: int
    hidden: int
    weights: tuple[Tensor, Tensor]
    biases: tuple[tuple[Epilogue, Tensor | None], tuple[Epilogue, Tensor | None]]
    activations: tuple[Activation, Activation]
    x: int

    def pack(self, dtype: np.dtype, blocks: int, own: int) -> tuple[Packed, ...]:
        """Both weights as [blocks, hidden, own] (`own` channels of a block; those beyond the last channel are zeros) and both biases."""

        def pack_weights(t: Tensor, transposed: bool) -> Packed:
            def make() -> np.ndarray:
                given = np.asarray(t.array(), np.float32)[:, :, 0, 0]
                rows = given.T if transposed else given  # [hidden, channels]
                padded = np.pad(rows, ((0, 0), (0, blocks * own - self.c)))
                return padded.reshape(self.hidden, blocks, own).transpose(1, 0, 2).astype(dtype)

            key = f"{t.constant().digest}|squeeze {transposed} {blocks} {own} {dtype.name}"
            return make_packed_array(key, blocks * own * self.hidden * 2, make)

        (w1, w2), ((end1, own1), (end2, own2)) = self.weights, self.biases
        biases = make_packed_bias(end1, own1, self.hidden), make_packed_bias(end2, own2, self.c)
        return pack_weights(w1, False), pack_weights(w2, True), *biases


class SqueezeExciteTactic(Tactic):
    """Base of the tactics for layers of the pass fuse_squeeze_excite: 16-bit floats, channels last."""

    ops = ("*",)
    composites = ("SqueezeExcite",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        gate = match_gate(layer) if all_static(layer) else None
        return gate if isinstance(gate, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or isinstance(gate := match_gate(layer), str):
            return []
        types = list_float_types([layer.inputs[gate.x], layer.outputs[0]], FLOAT16_TYPES)
        return [make_stored_signature(layer, {gate.x: Operand("nhwc", t)}, Operand("nhwc", t)) for t in types]


def match_gate(layer: Layer) -> Gate | str:
    """The parts of a layer of fuse_squeeze_excite: pooling, both convolutions, the product with the image."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    pool, *convs = body.layers[:-1]
    x = pool.needs(0)
    n, c, h, w = static_shape(x.shape)
    made = []
    for conv in convs:
        view = with_outer_inputs(conv, outer)
        end = match_epilogue(view, find_epilogue_steps(view))
        if isinstance(end, str):
            return end
        if end.residual is not None:
            return "a product of the means adds something other than a bias"
        made.append((end, *get_weight_and_bias(view)))
    (end1, w1, b1), (end2, w2, b2) = made
    place = next(i for i, t in enumerate(layer.inputs) if t is outer[x])
    ends = (end1.post_ops.activation, end2.post_ops.activation)
    return Gate(n, c, h * w, static_shape(w1.shape)[0], (w1, w2), ((end1, b1), (end2, b2)), ends, place)
