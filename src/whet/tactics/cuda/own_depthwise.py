"""Depthwise convolution, channels last: a thread slides over neighbouring pixels of eight channels; bias, residual, activation fused."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Layer
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, PlanRefused, Signature, Tactic, anchor, epilogue, outer_input, tactic
from whet.tactics.cuda._kernel import ACTIVATIONS, TYPE, GpuKernel, all_static, blocks_of, ending, launch, packed_array
from whet.tactics.cuda.own_conv import constant_weights, conv_shape, conv_signatures, packed_bias


@tactic
class OwnDepthwise(Tactic):
    """As many groups as channels, one filter each; kernels up to 7 x 7."""

    ops = ("Conv",)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        head = anchor(layer)
        x, w = head.inputs[0], head.inputs[1]
        if x.type.rank != 4 or w.shape[1] != 1 or head.attrs["group"] != w.shape[0]:  # type: ignore[union-attr]
            return "is for depthwise convolutions of two spatial axes"
        return constant_weights(layer, head) or (None if epilogue(layer) is not None else "what is fused to it is not a chain")

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        return conv_signatures(layer, "nhwc", (F16, BF16, F32))

    def refuses(self, layer: Layer, signature: Signature, machine: Any) -> str | None:
        made, s = ending(layer, epilogue(layer)), conv_shape(layer)
        if isinstance(made, str):
            return made
        if s.c % 8:
            return f"{s.c} channels are no multiple of 8"
        if s.m * s.c // 8 >= 2**31:
            return "more than 2**31 groups of eight values"
        return "kernels above 7 x 7" if max(s.r, s.s) > 7 else None

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> list[Config]:
        s = conv_shape(layer)
        found: list[Config] = []
        for wide, tall in ((1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (2, 8)):
            threads = s.n * -(-s.p // tall) * -(-s.q // wide) * (s.c // 8)
            large = s.r * s.s > 9 and (tall > 1 or wide > 2)  # would not fit the registers
            if not large and (tall == 1 or threads >= 256 * machine.multiprocessors):
                found.append((("wide", wide), ("tall", tall)))
        return found

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> GpuKernel:
        made = ending(layer, epilogue(layer))
        if isinstance(made, str):
            raise PlanRefused(made)
        s, head, wide = conv_shape(layer), anchor(layer), int(dict(config)["wide"])
        tall = int(dict(config)["tall"])
        x, w, b = (outer_input(layer, t) for t in (*head.inputs, None)[:3])
        weights, own = layer.inputs[w], None if b is None else layer.inputs[b]  # type: ignore[index]
        assert weights is not None
        kind, low, high = made.finish.activation
        constants = {
            "TYPE": TYPE[signature.outputs[0].dtype.name],
            "R": s.r,
            "S": s.s,
            "STRIDE": s.stride[1],
            "WIDE": wide,
            "TALL": tall,
            "ACT": ACTIVATIONS[kind],
        }
        packed = (
            packed_array(
                f"{weights.weight.digest}|depthwise rsc f32",  # type: ignore[union-attr]
                s.r * s.s * s.c * 4,
                lambda: np.asarray(weights.array(), np.float32).reshape(s.c, s.r * s.s).T,
            ),
            packed_bias(made, own, s.c),
        )
        grid = (blocks_of(s.n * -(-s.p // tall) * -(-s.q // wide) * (s.c // 8), 128), 1, 1)

        def make(args: Args) -> list:
            residual = 0 if made.residual is None else args.inputs[made.residual]
            addresses = (args.inputs[x], *args.packed, residual, args.outputs[0])  # type: ignore[index]
            sizes = (s.n, s.h, s.w, s.c, s.p, s.q, s.stride[0], s.pad[0], s.pad[1], *s.dilation, made.finish.residual)
            return [launch("depthwise.cu", "depthwise", constants, grid, 128, "<5Q12i2f", *addresses, *sizes, low, high)]

        return GpuKernel(layer, signature, make, implementation=f"own depthwise {tall}x{wide}", packed=packed)
