"""A 1x1 convolution of two concatenated tensors on Hopper's tensor cores: both are read in place, as consecutive channels of K.

In 16-bit floats, or in 8 bits as qconv: concatenated integers have one scale, so their products add up in one accumulator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_operand_indices, get_root_layer, is_quantized
from whet.tactics._quantized import Parts, match_quantized
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    RTOL,
    Epilogue,
    GpuKernel,
    all_static,
    compile_ahead,
    list_float_types,
    machine_has,
    make_packed_array,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, EightBitTypes, PostOps, SecondInput, View, pack_weights, pack_weights8
from whet.tactics.cuda.conv._conv_config import list_configs_of_steps, pick_varied, step_channels
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv.conv import as_config, from_config, get_conv_shape, make_packed_bias, why_not_packable
from whet.tactics.cuda.quantized._quantized import (
    INT8_TYPES,
    Factors,
    Output,
    compute_factors,
    fold_into_range,
    folds,
    get_quantized_conv_shape,
    get_weight_bytes,
    make_integer_scales,
    make_key,
    match_quantized_epilogue,
    pack_factors,
    why_not_weighted,
)

MAX_CONFIGS = 24


@dataclass(frozen=True)
class ConcatInput:
    """The convolution as an unfused layer, its epilogue and sizes, and the indices of the fused layer's two inputs and residual."""

    conv: Layer
    epilogue: Epilogue
    shape: ConvShape
    images: tuple[int, int]
    channels: tuple[int, int]
    residual: int | None
    weights: Tensor
    bias: Tensor | None
    parts: Parts | None  # of a quantized one

    @property
    def size(self) -> int:
        """Bytes of an input element."""
        return 2 if self.parts is None else 1

    @property
    def bk(self) -> int:
        return step_channels(max(self.channels), self.size)

    def shapes(self) -> tuple[ConvShape, ConvShape]:
        """The convolutions of the two inputs."""
        a, b = self.channels
        return replace(self.shape, c=a), replace(self.shape, c=b)

    def steps(self) -> int:
        """K steps over both."""
        return sum(-(-c // self.bk) for c in self.channels)

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """Weights [k, steps * bk, 1, 1]."""
        return pad_inputs(values.reshape(self.shape.k, -1), self.channels, self.bk)


@tactic
class ConcatInputConv(Tactic):
    """Layers of the pass fuse_concat_input_conv, in 16-bit floats or 8 bits; channels of each input are whole 16 bytes, results a multiple of 16."""

    ops = ("*",)
    composites = ("ConcatInputConv",)
    what = "a convolution of joined images"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        concat_input = match_concat_input(layer) if all_static(layer) else "static"
        if isinstance(concat_input, str):
            return []
        if concat_input.parts is None:
            kinds = list_float_types([layer.inputs[concat_input.images[0]], layer.outputs[0]], FLOAT16_TYPES)
            return [_make_signature(layer, concat_input, Operand("nhwc", t), Operand("nhwc", t)) for t in kinds]
        stores = concat_input.parts.stores
        image = layer.needs(concat_input.images[0]).dtype
        results = [stores.dtype] if stores is not None else []
        return [_make_signature(layer, concat_input, Operand("nhwc", image), Operand("nhwc", t)) for t in results]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        concat_input = match_concat_input(layer)
        if isinstance(concat_input, str):
            return concat_input
        if any(c * concat_input.size % 16 for c in concat_input.channels) or concat_input.shape.k % 16:
            channels = f"{concat_input.channels} channels of {concat_input.size} bytes"
            return f"{channels}, {concat_input.shape.k} results; takes whole 16 bytes and a multiple of 16 results"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        concat_input = match_concat_input(layer)
        if isinstance(concat_input, str):
            return []
        m, k, steps, processors = concat_input.shape.m, concat_input.shape.k, concat_input.steps(), backend.capabilities.multiprocessors
        good = list_configs_of_steps(m, k, steps, concat_input.bk, processors, concat_input.size)
        able = [c for c in good if (c.outs < 3 or concat_input.residual is not None) and (concat_input.parts is None or c.bn % 32 == 0)]
        order = pick_varied(able, MAX_CONFIGS)
        types8, _, post_ops = _describe_epilogue(concat_input, signature)[:3]
        bf16 = signature.outputs[0].dtype.name == "bf16"
        compile_ahead(backend, [emit_conv_source(c, Features(activation=post_ops.activation[0], bf16=bf16, types8=types8, pair=1)) for c in order])
        return [as_config(c) for c in order]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        concat_input, tile = match_concat_input(layer), from_config(config)
        if isinstance(concat_input, str):
            raise PlanRefused(concat_input)
        steps, dtype = concat_input.steps(), signature.outputs[0].dtype
        if tile.halo or tile.bk != concat_input.bk or tile.hold not in (0, steps):
            raise PlanRefused(f"{tile} is no tile of {steps} steps over two inputs")
        (a, b), (first, last) = concat_input.shapes(), concat_input.images
        types8, out, post_ops, numbers = _describe_epilogue(concat_input, signature)
        digest, k = concat_input.weights.constant().digest, concat_input.shape.k
        packed: tuple[Packed, ...]
        if numbers is None:

            def pack() -> np.ndarray:
                return pack_weights(concat_input.matrix(np.asarray(concat_input.weights.array(), np.float32)), tile.bk, dtype.numpy)

            weights = make_packed_array(f"{digest}|joined {concat_input.channels} {tile.bk} {dtype}", k * steps * tile.bk * 2, pack)
            packed = (weights, make_packed_bias(concat_input.epilogue, concat_input.bias, k))
        else:
            rows = -(-k // 32) * 32

            def pack_bytes() -> np.ndarray:
                return pack_weights8(concat_input.matrix(get_weight_bytes(concat_input.weights)), tile.bk)

            weights = make_packed_array(f"{digest}|joined 8 bits {concat_input.channels} {tile.bk}", rows * steps * tile.bk, pack_bytes)
            packed = (weights, *pack_factors(f"{numbers[0]}|joined {concat_input.shape}", concat_input.shape, 1, False, numbers[1]))

        def make(args: Args) -> list:
            residual = None if concat_input.residual is None else View(args.inputs[concat_input.residual], k)
            biases, scales = make_integer_scales(out, args.packed[1], args.packed[2], 1, k) if types8 else (args.packed[1], None)
            return [
                make_conv_launch(
                    tile,
                    ConvProblem(
                        shape=a,
                        input=View(args.inputs[first], a.c),
                        weights=args.packed[0],
                        bias=biases,
                        output=View(args.outputs[0], k),
                        residual=residual,
                        post_ops=post_ops,
                        bf16=dtype.name == "bf16",
                        types8=types8,
                        scales=scales,
                        second=SecondInput(b, View(args.inputs[last], b.c)),
                    ),
                    multiprocessors=backend.capabilities.multiprocessors,
                    label=layer.name,
                )
            ]

        name = f"wgmma {types8.source + ' ' if types8 else ''}joined {tile}"
        return GpuKernel(layer, signature, make, implementation=name, packed=packed, rtol=0.0 if types8 else RTOL[dtype.name])


def _make_signature(layer: Layer, concat_input: ConcatInput, image: Operand, result: Operand) -> Signature:
    """The inputs in the form `image`; a residual in its own integer type, or in the type of the result."""
    stored: dict[int, Operand] = dict.fromkeys(concat_input.images, image)
    if concat_input.residual is not None:
        own = layer.needs(concat_input.residual).dtype
        stored[concat_input.residual] = Operand("nhwc", own if own.name in INT8_TYPES else result.dtype)
    return Signature(tuple(stored.get(i) for i in range(len(layer.inputs))), (result,))


def _describe_epilogue(
    concat_input: ConcatInput, signature: Signature
) -> tuple[EightBitTypes | None, Output, PostOps, tuple[str, Callable[[], Factors]] | None]:
    """The epilogue: types, output scales, activation, and key and values of factors and biases; for floats the activation alone."""
    parts, epilogue = concat_input.parts, concat_input.epilogue
    if parts is None:
        return None, Output(), epilogue.post_ops, None
    stored = signature.outputs[0].dtype.name
    x = parts.source_index()
    other = "" if concat_input.residual is None else signature.needs(concat_input.residual).dtype.name
    fold, out, per, shift, post_ops = folds(epilogue, stored), Output.of(parts, epilogue), 1.0, 0.0, epilogue.post_ops
    if fold:
        per, shift, out, post_ops = fold_into_range(out, epilogue, stored)
    types8 = EightBitTypes(parts.reads[x].dtype.name, stored, other, False, fold)

    def make_factors() -> Factors:
        weights = get_weight_bytes(concat_input.weights).reshape(concat_input.shape.k, -1, 1, 1)
        return compute_factors(parts, epilogue, weights, concat_input.shape, concat_input.bias).times(per, shift)

    return types8, out, post_ops, (f"{make_key(parts, epilogue)} {per} {shift}", make_factors)


def pad_inputs(weights: np.ndarray, channels: Sequence[int], bk: int) -> np.ndarray:
    """Weights [k, c] of concatenated inputs with each input's channels padded with zeros to whole steps of `bk`, [k, steps * bk, 1, 1]."""
    ends = np.cumsum(channels)
    parts = [weights[:, end - c : end] for c, end in zip(channels, ends, strict=True)]
    return np.concatenate([np.pad(p, ((0, 0), (0, -p.shape[1] % bk))) for p in parts], axis=1)[:, :, None, None]


@functools.lru_cache(maxsize=8)
def match_concat_input(layer: Layer) -> ConcatInput | str:
    """The layer's convolution and inputs, or the reason why the kernel cannot compute it."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    if len(body.layers) != 2 or body.layers[0].op != "Concat" or len(body.layers[0].inputs) != 2:
        return "the body is not a Concat of two tensors followed by a convolution"
    joined, conv = body.layers[0], with_outer_inputs(body.layers[1], outer)
    parts: Parts | None = None
    if is_quantized(conv):
        apart = match_quantized(conv)
        if isinstance(apart, str):
            return apart
        epilogue, head, parts = match_quantized_epilogue(apart), apart.head, apart
        view = apart.view
        reason = why_not_weighted(apart)
        if apart.stores is None or apart.stores.dtype.name not in INT8_TYPES or apart.float8:
            reason = reason or "stores integers"
    else:
        epilogue, head, view = match_epilogue(conv, find_epilogue_steps(conv)), get_root_layer(conv), conv
        reason = why_not_packable(conv, head)
    if isinstance(epilogue, str) or reason:
        return reason or str(epilogue)
    if head.op != "Conv" or head.attrs["group"] != 1 or head.needs(0).type.rank != 4:
        return "takes convolutions of two spatial axes and one group"
    shape = get_quantized_conv_shape(parts) if parts is not None else get_conv_shape(conv)
    if not shape.plain:
        return "the convolution is not 1x1 with stride 1"
    x, w, b = parts.operand_indices() if parts is not None else get_operand_indices(view)
    if conv.inputs[x] is not joined.outputs[0]:
        return "the convolution does not read the Concat"
    images = [next((i for i, t in enumerate(layer.inputs) if t is outer.get(part)), None) for part in joined.required_inputs()]
    residual = None
    if epilogue.residual is not None:
        residual = next((i for i, t in enumerate(layer.inputs) if t is conv.inputs[epilogue.residual]), None)
        if residual is None:
            return "the residual is computed within the layer"
    first, second = images
    if first is None or second is None:
        return "an input is computed within the layer"
    channels = tuple(static_shape(part.shape)[1] for part in joined.required_inputs())
    bias = None if b is None else view.inputs[b]
    return ConcatInput(conv, epilogue, shape, (first, second), (channels[0], channels[1]), residual, view.needs(w), bias, parts)
