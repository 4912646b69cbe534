"""1x1 convolutions of two concatenated tensors, or with two results, on f32 tensors in TF32 (conv_tf32.cu); `--noTF32` forbids it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, compile_ahead, list_float_types, machine_has, make_packed_array
from whet.tactics.cuda.conv import _tf32
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, SecondInput, SecondOutput, View, count_bias_floats, pack_bias
from whet.tactics.cuda.conv._tf32 import Tf32Config
from whet.tactics.cuda.conv._tf32_tactic import as_config
from whet.tactics.cuda.conv.concat_input_conv import match_concat_input
from whet.tactics.cuda.conv.conv_tf32 import ConvTf32
from whet.tactics.cuda.conv.dual_output_conv import OutputConv, match_dual_output

MAX_CONFIGS = 24


@dataclass(frozen=True)
class ConvsOfOneInput:
    """One product of one or two inputs and of the filters of one or two convolutions, and the indices of the layer's inputs."""

    ways: tuple[OutputConv, ...]
    images: tuple[int, ...]
    residual: int | None = None

    @property
    def shapes(self) -> list[ConvShape]:
        """Shapes of the product, by input."""
        first, k = self.ways[0], sum(w.shape.k for w in self.ways)
        return [replace(first.shape, c=c, k=k) for c in first.channels]

    @property
    def post_ops(self) -> PostOps:
        return self.ways[0].epilogue.post_ops

    @property
    def bk(self) -> int:
        """Channels of a K step."""
        return _tf32.step_channels(max(self.ways[0].channels))

    @property
    def steps(self) -> int:
        """K steps over all inputs."""
        return sum(s.steps(self.bk) for s in self.shapes)

    def source(self, tile: Tf32Config) -> str:
        """The kernel's complete text."""
        how = (self.shapes[0].k % 4 != 0, False, len(self.images) == 2, len(self.ways) == 2)
        return _tf32.emit_tf32_source(tile, False, self.post_ops.activation[0], *how)

    def packed(self) -> tuple[Packed, Packed]:
        """Weights of all filters below each other, and their biases."""
        first, k, row = self.ways[0], self.shapes[0].k, self.steps * self.bk
        digest = " ".join(w.weights.constant().digest for w in self.ways)
        biases = " ".join(f"{'' if w.bias is None else w.bias.constant().digest} {w.epilogue.key} {w.shape.k}" for w in self.ways)
        return (
            make_packed_array(
                f"{digest}|several tf32 {first.channels} {self.bk}",
                _tf32.count_padded_filters(k) * row * 4,
                lambda: _tf32.pack(np.concatenate([w.matrix(self.bk) for w in self.ways]).reshape(k, row), self.bk, 1),
            ),
            make_packed_array(
                f"bias {biases}",
                count_bias_floats(k) * 4,
                lambda: pack_bias(np.concatenate([w.epilogue.bias(w.bias, w.shape.k) for w in self.ways]), k),
            ),
        )


@tactic
class MultiTensorConvTf32(Tactic):
    """ConcatInputConv and DualOutputConv on f32 tensors. Input channels are multiples of 4; with two outputs, output channels are multiples of 16."""

    ops = ("*",)
    composites = ("ConcatInputConv", "DualOutputConv")
    what = "a convolution of joined images, or two of one image"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        convs = match_convs(layer) if all_static(layer) else "static"
        if isinstance(convs, str) or F32 not in list_float_types([layer.inputs[convs.images[0]], *layer.outputs], (F32,)):
            return []
        image, read = Operand("nhwc", F32), {*convs.images, convs.residual}
        return [Signature(tuple(image if i in read else None for i in range(len(layer.inputs))), (image,) * len(layer.outputs))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        convs = match_convs(layer)
        if isinstance(convs, str):
            return convs
        sizes, results = convs.ways[0].channels, [w.shape.k for w in convs.ways]
        if any(c % 4 for c in sizes) or (len(results) == 2 and any(k % 16 for k in results)):
            return f"{sizes} channels in and {results} out; takes a multiple of 4 inputs, and of 16 for each of two results"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        convs = match_convs(layer)
        if isinstance(convs, str):
            return []
        shape = convs.shapes[0]
        tiles = _tf32.list_configs_of_steps(shape.m, shape.k, convs.steps, convs.bk, 1, backend.capabilities.multiprocessors)[:MAX_CONFIGS]
        compile_ahead(backend, [convs.source(t) for t in tiles])
        return [as_config(t, "tf32") for t in tiles]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        convs, fields = match_convs(layer), dict(config)
        if isinstance(convs, str) or fields.pop("math", None) != "tf32":
            raise PlanRefused(convs if isinstance(convs, str) else "this tactic computes in tf32")
        tile, shapes = Tf32Config(**{k: int(v) for k, v in fields.items()}), convs.shapes
        if not tile.valid() or tile.bk != convs.bk:
            raise PlanRefused(f"{tile} is no tile of steps of {convs.bk} channels that a multiprocessor can hold")
        at, k = convs.ways[0].shape.k, shapes[0].k

        def make(args: Args) -> list:
            views = [View(args.inputs[i], s.c) for i, s in zip(convs.images, shapes, strict=True)]
            return [
                _tf32.launch(
                    tile,
                    shapes[0],
                    views[0],
                    args.packed[0],
                    args.packed[1],
                    View(args.outputs[0], at),
                    residual=None if convs.residual is None else View(args.inputs[convs.residual], k),
                    post_ops=convs.post_ops,
                    second=SecondInput(shapes[1], views[1]) if len(shapes) == 2 else None,
                    fork=SecondOutput(at, View(args.outputs[1], k - at)) if len(convs.ways) == 2 else None,
                    multiprocessors=backend.capabilities.multiprocessors,
                    label=layer.name,
                )
            ]

        name = f"wgmma tf32 {layer.composite} {tile}"
        return GpuKernel(layer, signature, make, implementation=name, packed=convs.packed(), rtol=ConvTf32.rtol)


@functools.lru_cache(maxsize=8)
def match_convs(layer: Layer) -> ConvsOfOneInput | str:
    """The convolutions of the layer, or the reason why the kernel cannot compute it."""
    if layer.composite == "DualOutputConv":
        forked = match_dual_output(layer)
        return forked if isinstance(forked, str) else ConvsOfOneInput(forked.ways, forked.images)
    concat_input = match_concat_input(layer)
    if isinstance(concat_input, str):
        return concat_input
    if concat_input.parts is not None:
        return "takes float convolutions"
    images = tuple(layer.needs(i) for i in concat_input.images)
    way = OutputConv(concat_input.weights, concat_input.bias, concat_input.epilogue, concat_input.shape, images)
    return ConvsOfOneInput((way,), concat_input.images, concat_input.residual)
