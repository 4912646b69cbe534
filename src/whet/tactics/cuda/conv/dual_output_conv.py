"""Two 1x1 convolutions of the same input, or of the same two concatenated ones, on Hopper's tensor cores: one product with two results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias, is_quantized
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    Epilogue,
    GpuKernel,
    all_static,
    compile_ahead,
    list_float_types,
    machine_has,
    make_packed_array,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, SecondInput, SecondOutput, View, count_bias_floats, pack_bias, pack_weights
from whet.tactics.cuda.conv._conv_config import ConvConfig, list_configs_of_steps, pick_varied, step_channels
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv.concat_input_conv import match_concat_input, pad_inputs
from whet.tactics.cuda.conv.conv import as_config, from_config, get_conv_shape, why_not_conv

MAX_CONFIGS = 24


@dataclass(frozen=True)
class OutputConv:
    """One of the two convolutions: its filters, bias and epilogue, its sizes, and which tensors it reads."""

    weights: Tensor
    bias: Tensor | None
    epilogue: Epilogue
    shape: ConvShape
    images: tuple[Tensor, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of each input."""
        return tuple(int(t.shape[1]) for t in self.images)

    def matrix(self, bk: int) -> np.ndarray:
        """Weights [k, steps * bk, 1, 1]: each input's channels padded with zeros to whole steps."""
        return pad_inputs(np.asarray(self.weights.array(), np.float32).reshape(self.shape.k, -1), self.channels, bk)


@dataclass(frozen=True)
class DualOutput:
    """Both ways, and the sizes of the product of both."""

    ways: tuple[OutputConv, OutputConv]
    images: tuple[int, ...]  # places among the layer's inputs

    @property
    def shapes(self) -> list[ConvShape]:
        """Shapes of the product, by input."""
        first, k = self.ways[0], sum(w.shape.k for w in self.ways)
        return [replace(first.shape, c=c, k=k) for c in first.channels]

    @property
    def at(self) -> int:
        """The first channel of the second result."""
        return self.ways[0].shape.k

    @property
    def post_ops(self) -> PostOps:
        return self.ways[0].epilogue.post_ops

    @property
    def bk(self) -> int:
        """Channels of a K step."""
        return step_channels(max(self.ways[0].channels), 2)

    @property
    def steps(self) -> int:
        """K steps over all inputs."""
        return sum(s.steps(self.bk) for s in self.shapes)

    def source(self, tile: ConvConfig, bf16: bool) -> str:
        """The kernel's complete text."""
        return emit_conv_source(
            tile, Features(activation=self.post_ops.activation[0], bf16=bf16, pair=int(len(self.images) == 2), fork=SecondOutput.panel(self.at, tile))
        )

    def packed(self, dtype: Any) -> tuple[Packed, Packed]:
        """Weights of both below each other, and their biases."""
        first, k = self.ways[0], self.shapes[0].k
        row = self.steps * self.bk
        digest = " ".join(w.weights.constant().digest for w in self.ways)
        biases = " ".join(f"{'' if w.bias is None else w.bias.constant().digest} {w.epilogue.key} {w.shape.k}" for w in self.ways)
        return (
            make_packed_array(
                f"{digest}|forked {first.channels} {self.bk} {dtype}",
                k * row * 2,
                lambda: pack_weights(np.concatenate([w.matrix(self.bk) for w in self.ways]), self.bk, dtype.numpy),
            ),
            make_packed_array(
                f"bias {biases}",
                count_bias_floats(k) * 4,
                lambda: pack_bias(np.concatenate([w.epilogue.bias(w.bias, w.shape.k) for w in self.ways]), k),
            ),
        )


@tactic
class DualOutputConv(Tactic):
    """Layers of the pass fuse_dual_output_conv, in 16-bit floats; a multiple of 8 input channels and of 16 output channels."""

    ops = ("*",)
    composites = ("DualOutputConv",)
    what = "two convolutions of one image"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        dual_output = match_dual_output(layer) if all_static(layer) else "static"
        if isinstance(dual_output, str):
            return []
        signatures = []
        for dtype in list_float_types([layer.inputs[dual_output.images[0]], *layer.outputs], FLOAT16_TYPES):
            image = Operand("nhwc", dtype)
            signatures.append(Signature(tuple(image if i in dual_output.images else None for i in range(len(layer.inputs))), (image, image)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        dual_output = match_dual_output(layer)
        if isinstance(dual_output, str):
            return dual_output
        sizes, results = dual_output.ways[0].channels, [w.shape.k for w in dual_output.ways]
        if any(c % 8 for c in sizes) or any(k % 16 for k in results):
            return f"{sizes} channels in and {results} out; takes a multiple of 8 inputs and of 16 outputs"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        dual_output = match_dual_output(layer)
        if isinstance(dual_output, str):
            return []
        shape, bf16 = dual_output.shapes[0], signature.outputs[0].dtype.name == "bf16"
        able = list_configs_of_steps(shape.m, shape.k, dual_output.steps, dual_output.bk, backend.capabilities.multiprocessors)
        tiles = pick_varied([c for c in able if c.outs < 3 and SecondOutput.panel(dual_output.at, c)], MAX_CONFIGS)
        compile_ahead(backend, [dual_output.source(c, bf16) for c in tiles])
        return [as_config(c) for c in tiles]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        dual_output, tile = match_dual_output(layer), from_config(config)
        if isinstance(dual_output, str):
            raise PlanRefused(dual_output)
        shapes, dtype = dual_output.shapes, signature.outputs[0].dtype
        if tile.halo or tile.bk != dual_output.bk or tile.hold not in (0, dual_output.steps) or not SecondOutput.panel(dual_output.at, tile):
            raise PlanRefused(f"{tile} is no tile of {dual_output.steps} steps that divides the channels at {dual_output.at}")

        def make(args: Args) -> list:
            views = [View(args.inputs[i], s.c) for i, s in zip(dual_output.images, shapes, strict=True)]
            return [
                make_conv_launch(
                    tile,
                    ConvProblem(
                        shape=shapes[0],
                        input=views[0],
                        weights=args.packed[0],
                        bias=args.packed[1],
                        output=View(args.outputs[0], dual_output.at),
                        post_ops=dual_output.post_ops,
                        bf16=dtype.name == "bf16",
                        second=SecondInput(shapes[1], views[1]) if len(shapes) == 2 else None,
                        fork=SecondOutput(dual_output.at, View(args.outputs[1], shapes[0].k - dual_output.at)),
                    ),
                    multiprocessors=backend.capabilities.multiprocessors,
                    label=layer.name,
                )
            ]

        return GpuKernel(layer, signature, make, implementation=f"wgmma forked {tile}", packed=dual_output.packed(dtype))


@functools.lru_cache(maxsize=8)
def match_dual_output(layer: Layer) -> DualOutput | str:
    """The two convolutions, or the reason why the kernel cannot compute the layer."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    if len(body.layers) != 2 or len(layer.outputs) != 2:
        return "the body is not a pair of convolutions"
    ways = [_match_output(with_outer_inputs(part, outer)) for part in body.layers]
    for way in ways:
        if isinstance(way, str):
            return way
    first, second = ways
    assert isinstance(first, OutputConv)
    assert isinstance(second, OutputConv)
    if first.images != second.images or first.epilogue.post_ops != second.epilogue.post_ops:
        return "the two convolutions have different inputs or epilogues"
    images = [next((i for i, t in enumerate(layer.inputs) if t is x), None) for x in first.images]
    if None in images:
        return "an input is computed within the layer"
    return DualOutput((first, second), tuple(i for i in images if i is not None))


def _match_output(part: Layer) -> OutputConv | str:
    if part.composite == "ConcatInputConv":
        concat_input = match_concat_input(part)
        if isinstance(concat_input, str):
            return concat_input
        if concat_input.parts is not None or concat_input.residual is not None:
            return "takes float convolutions without a residual"
        images = tuple(part.needs(i) for i in concat_input.images)
        return OutputConv(concat_input.weights, concat_input.bias, concat_input.epilogue, concat_input.shape, images)
    head = get_root_layer(part)
    if head.op != "Conv" or head.attrs["group"] != 1 or is_quantized(part):
        return "takes float convolutions of one group"
    epilogue, reason = match_epilogue(part, find_epilogue_steps(part)), why_not_conv(part, head)
    if isinstance(epilogue, str) or reason:
        return reason or str(epilogue)
    shape = get_conv_shape(part)
    if not shape.plain or epilogue.residual is not None:
        return "takes 1x1 convolutions with stride 1 and without a residual"
    weights, bias = get_weight_and_bias(part)
    return OutputConv(weights, bias, epilogue, shape, (part.needs(get_source_index(part)),))
