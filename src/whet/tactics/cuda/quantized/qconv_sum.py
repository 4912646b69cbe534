"""The sum of two quantized convolutions in one launch: the first result is quantized in registers and added to the second accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, machine_has, make_packed_array, make_stored_signature
from whet.tactics.cuda.conv._conv import Between, EightBitTypes, Scales, SecondInput, View, count_bias_floats, pack_weights8, refuses
from whet.tactics.cuda.conv._conv_config import ConvConfig, estimate_us, list_large_batch_configs, pick_varied, step_channels
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv.conv import as_config, from_config
from whet.tactics.cuda.quantized._qconv_then_pointwise_layer import Half, split_halves
from whet.tactics.cuda.quantized._quantized import get_weight_bytes, has_border

MAX_CONFIGS = 24


@dataclass(frozen=True)
class _Sum:
    """The two convolutions and which inputs of the whole they read."""

    first: Half
    last: Half
    x: int
    y: int

    def bk(self) -> int:
        return step_channels(max(self.first.shape.c, self.last.shape.c), 1)

    def steps(self, bk: int) -> int:
        """K steps of both."""
        return self.first.shape.steps(bk) + self.last.shape.steps(bk)

    def types8(self) -> EightBitTypes:
        """Types of the product; the first convolution's integers are the residual."""
        source = self.last.reads
        assert source is not None
        return EightBitTypes(source.dtype.name, self.last.stored, self.first.stored, False, True)

    def weights(self, bk: int) -> np.ndarray:
        """Rows of the first convolution; those of the second follow."""
        rows = [pack_weights8(get_weight_bytes(h.parts.view.needs(h.parts.operand_indices()[1])), bk) for h in (self.first, self.last)]
        count = -(-self.last.shape.k // 32) * 32
        return np.concatenate([r.reshape(count, -1) for r in rows], axis=1)


@tactic
class QConvSum(Tactic):
    """Layers of the pass fuse_quantized_sum: one group, a multiple of 16 input channels and of 32 results, one input type."""

    ops = ("*",)
    composites = ("QuantizedSum",)
    what = "the sum of two quantized convolutions"

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        conv_sum = _sum_of(layer)
        return conv_sum if isinstance(conv_sum, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        conv_sum = _sum_of(layer) if all_static(layer) else "static"
        if isinstance(conv_sum, str):
            return []
        stores = conv_sum.last.parts.stores
        assert stores is not None
        return [
            make_stored_signature(layer, {i: Operand("nhwc", layer.needs(i).dtype) for i in (conv_sum.x, conv_sum.y)}, Operand("nhwc", stores.dtype))
        ]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        conv_sum = _sum_of(layer)
        if isinstance(conv_sum, str):
            return conv_sum
        a, b = conv_sum.first.shape, conv_sum.last.shape
        return f"{b.k} results; takes a multiple of 32" if b.k % 32 else refuses(a, size=1) or refuses(b, size=1)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        conv_sum = _sum_of(layer)
        if isinstance(conv_sum, str):
            return []
        s, bk, processors = conv_sum.last.shape, conv_sum.bk(), backend.capabilities.multiprocessors
        steps = conv_sum.steps(bk)
        every = (c for c in list_large_batch_configs(s.k, steps, bk, 1) if _supports_two_accumulators(c))
        order = pick_varied(sorted(every, key=lambda c: (estimate_us(c, s.m, s.k, steps, processors), c)), MAX_CONFIGS)
        kind, post_ops = SecondInput.kind(s), conv_sum.last.folded_epilogue()[3]
        how = Features(im2col=not conv_sum.first.shape.plain, activation=post_ops.activation[0], types8=conv_sum.types8(), pair=kind, between=True)
        compile_ahead(backend, [emit_conv_source(c, how) for c in order])
        return [as_config(c) for c in order]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        conv_sum, tile = _sum_of(layer), from_config(config)
        if isinstance(conv_sum, str):
            raise PlanRefused(conv_sum)
        a, b, steps = conv_sum.first.shape, conv_sum.last.shape, conv_sum.steps(tile.bk)
        if not _supports_two_accumulators(tile) or tile.hold not in (0, steps):
            raise PlanRefused(f"{tile} is no tile of {steps} steps over two inputs with separate accumulators")
        (_, _, inner, _), (_, _, out, post_ops) = conv_sum.first.folded_epilogue(), conv_sum.last.folded_epilogue()
        key = "+".join(h.parts.view.needs(h.parts.operand_indices()[1]).constant().digest for h in (conv_sum.first, conv_sum.last))
        rows = -(-b.k // 32) * 32 * steps * tile.bk
        packed = (
            make_packed_array(f"{key}|pair 8 bits {tile.bk}", rows, lambda: conv_sum.weights(tile.bk)),
            conv_sum.first.packed()[1],
            conv_sum.last.packed()[1],
        )

        def make(args: Args) -> list:
            weights, early, numbers = args.packed
            between = Between(early, conv_sum.first.factor(early), inner.per_step, inner.zero)
            return [
                make_conv_launch(
                    tile,
                    ConvProblem(
                        shape=a,
                        input=View(args.inputs[conv_sum.x], a.c),
                        weights=weights,
                        bias=numbers,
                        output=View(args.outputs[0], b.k),
                        post_ops=post_ops,
                        types8=conv_sum.types8(),
                        scales=Scales(conv_sum.last.factor(numbers), 0, out.per_step, out.zero, out.add_step, out.add_shift, count_bias_floats(b.k)),
                        second=SecondInput(b, View(args.inputs[conv_sum.y], b.c), between),
                    ),
                    multiprocessors=backend.capabilities.multiprocessors,
                    label=layer.name,
                )
            ]

        return GpuKernel(layer, signature, make, implementation=f"wgmma {conv_sum.types8().source} pair {tile}", packed=packed, rtol=0.0)


def _supports_two_accumulators(tile: ConvConfig) -> bool:
    """True if conv.cu supports two accumulators in this tile: no cluster, outputs in 32s, no prefetched residual, one row of 64 (two spill)."""
    return tile.sk == 1 and not tile.halo and not tile.once and tile.bn % 32 == 0 and tile.outs < 3 and tile.mi == 1


def _sum_of(layer: Layer) -> _Sum | str:
    """The two convolutions, or the reason why the kernel cannot compute the layer."""
    halves = split_halves(layer)
    if isinstance(halves, str):
        return halves
    (first, last), body, fed = halves, layer.regions["body"], {t: i for i, t in enumerate(layer.inputs)}
    if last.added is not body.layers[0].outputs[0] or first.added is not None or first.reads not in fed or last.reads not in fed:
        return "the second convolution does not add the first, or reads it"
    if first.epilogue.post_ops.activation[0] != "clip" or has_border(first.parts, first.shape):
        return "the first has an activation, or padding other than the integer 0"
    s = last.shape
    if (s.r, s.s, *s.pad) != (1, 1, 0, 0, 0, 0):
        return "the second convolution is not 1x1 without padding"
    if first.reads.dtype != last.reads.dtype:
        return f"the first reads {first.reads.dtype}, the second {last.reads.dtype}: takes one type of integers for both products"
    return _Sum(first, last, fed[first.reads], fed[last.reads])
