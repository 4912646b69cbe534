"""A layer or root-mean-square normalization of rows and the matrix product that reads them in one launch: conv.cu with NORM.

With scales g and shifts b: norm(x) @ w = (x @ (g * w) - mean * sums(g * w)) / deviation + b @ w. The product reads x itself, and the warps that
multiply compute each row's mean and deviation from the tiles in shared memory. So the normalized rows never exist, and a launch is saved.

Not measured yet: the selections of an H200 were recorded before it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
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
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, RowNorm, View, count_bias_floats, pack_bias, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import SHARED_LIMIT, ConvConfig, list_configs_of_steps, pick_varied
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import as_config, from_config, launch_with_epilogue
from whet.tactics.cuda.gemm.gemm import get_gemm_shape

MAX_CONFIGS = 20
_KINDS = {"LayerNormalization": 1, "RMSNormalization": 2}  # NORM of conv.cu
_MORE_REGISTERS = 24  # sums of rows, a piece of a row


@dataclass(frozen=True)
class NormAndProduct:
    """Both layers unfused, the product's epilogue and sizes, and the indices of the fused layer's operands."""

    norm: Layer
    product: Layer
    epilogue: Epilogue
    x: int
    residual: int | None

    @property
    def shape(self) -> ConvShape:
        """The product as a convolution."""
        return get_gemm_shape(self.product)

    @property
    def kind(self) -> int:
        """NORM of conv.cu."""
        return _KINDS[self.norm.op]

    def scale(self) -> np.ndarray:
        """A factor for each channel, float32."""
        return _to_vector(self.norm.input(1), self.shape.c, 1.0)

    def matrix(self) -> np.ndarray:
        """The product's weights [columns, channels], float32, without the scales."""
        head = get_root_layer(self.product)
        given = np.asarray(get_weight_and_bias(self.product)[0].array(), np.float32)
        return given if head.op == "Gemm" and head.attrs.get("transB") else given.T

    def bias(self) -> np.ndarray:
        """The sum of the product's biases and of the shifts' products, float32."""
        shape = self.shape
        own = self.epilogue.bias(get_weight_and_bias(self.product)[1], shape.k)
        shift = _to_vector(self.norm.input(2), shape.c, 0.0)
        return own + (self.matrix().astype(np.float64) @ shift).astype(np.float32)

    @property
    def key(self) -> str:
        """Digests of all constants, for keys of packed weights."""
        parts = [*self.norm.inputs[1:], *get_weight_and_bias(self.product)]
        return "+".join(t.weight.digest for t in parts if t is not None and t.weight is not None) + self.epilogue.key


@tactic
class NormGemm(Tactic):
    """Layers of the pass fuse_norm_then_product: 16-bit floats, a multiple of 16 channels."""

    ops = ("*",)
    composites = ("NormThenProduct",)
    what = "a normalization and the product that reads it"

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        both = match_norm_and_product(layer)
        return both if isinstance(both, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or self.why_not(layer):
            return []
        both = match_norm_and_product(layer)
        assert not isinstance(both, str)
        places = [i for i in (both.x, both.residual) if i is not None]
        types = list_float_types([layer.inputs[both.x], layer.outputs[0]], FLOAT16_TYPES)
        return [make_stored_signature(layer, {i: Operand("linear", t) for i in places}, Operand("linear", t)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        both = match_norm_and_product(layer)
        if isinstance(both, str):
            return both
        shape = both.shape
        return f"rows of {shape.c} channels; takes a multiple of 16" if shape.c % 16 else refuses(shape)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        both = match_norm_and_product(layer)
        if isinstance(both, str):
            return []
        s, bk = both.shape, _step(both.shape.c)
        tiles = list_configs_of_steps(s.m, s.k, s.c // bk, bk, backend.capabilities.multiprocessors)
        tiles = pick_varied([c for c in tiles if why_not_tile(c, s, both.kind) is None], MAX_CONFIGS, each=6)
        features = Features(activation=both.epilogue.post_ops.activation[0], bf16=signature.outputs[0].dtype.name == "bf16", norm=both.kind)
        compile_ahead(backend, [emit_conv_source(c, features) for c in tiles])
        return [as_config(c) for c in tiles]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        both, tile = match_norm_and_product(layer), from_config(config)
        if isinstance(both, str):
            raise PlanRefused(both)
        if reason := why_not_tile(tile, both.shape, both.kind):
            raise PlanRefused(reason)
        shape, dtype = both.shape, signature.outputs[0].dtype

        def filters() -> np.ndarray:
            return pack_weights((both.matrix() * both.scale())[:, :, None, None], tile.bk, dtype.numpy)

        def sums() -> np.ndarray:  # of the rounded weights: a common offset of a row's channels then cancels
            return pack_bias(filters().reshape(shape.k, -1).astype(np.float64).sum(1).astype(np.float32), shape.k)

        count = count_bias_floats(shape.k) * 4
        packed = (
            make_packed_array(f"{both.key}|norm gemm {tile.bk} {dtype}", shape.k * shape.c * 2, filters),
            make_packed_array(f"{both.key}|norm gemm bias", count, lambda: pack_bias(both.bias(), shape.k)),
            make_packed_array(f"{both.key}|norm gemm sums {dtype}", count, sums),
        )

        def make(args: Args) -> list:
            norm = RowNorm(both.kind, args.packed[2], float(both.norm.attrs.get("epsilon", 1e-5)))
            epilogue = Epilogue()
            epilogue.post_ops, epilogue.residual = both.epilogue.post_ops, both.residual
            return [launch_with_epilogue(tile, shape, View(args.inputs[both.x], shape.c), args, epilogue, dtype, backend, layer.name, norm=norm)]

        return GpuKernel(layer, signature, make, implementation=f"norm and wgmma {tile}", packed=packed)


def match_norm_and_product(layer: Layer) -> NormAndProduct | str:
    """Both parts of a fused layer, or why the kernel does not take them."""
    body = layer.regions["body"]
    if len(body.layers) != 2 or body.layers[0].op not in _KINDS or body.outputs != [body.layers[1].outputs[0]]:
        return "the body is not a normalization and a product"
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    norm, product = (with_outer_inputs(x, outer) for x in body.layers)
    if reason := why_not_gemm(product):
        return reason
    epilogue = match_epilogue(product, find_epilogue_steps(product), product.outputs[0].type.rank - 1)
    if isinstance(epilogue, str):
        return epilogue
    x, rank = norm.inputs[0], norm.needs(0).type.rank
    if product.inputs[get_source_index(product)] is not norm.outputs[0] or int(norm.attrs["axis"]) % rank != rank - 1:
        return "the product does not read rows that are normalized over their last axis"
    if any(t is not None and not t.is_constant for t in norm.inputs[1:]):
        return "the normalization's scale is computed at run time"
    places = {t: i for i, t in enumerate(layer.inputs)}
    added = None if epilogue.residual is None else product.inputs[epilogue.residual]
    if x not in places or (added is not None and added not in places):
        return "the product has other inputs than the normalization"
    return NormAndProduct(norm, product, epilogue, places[x], None if added is None else places[added])


def why_not_tile(tile: ConvConfig, shape: ConvShape, kind: int) -> str | None:
    """Why the kernel cannot run a tile, or None."""
    if tile.halo or shape.c % tile.bk or tile.hold not in (0, shape.c // tile.bk) or tile.sk > shape.c // tile.bk:
        return f"{tile} is no tile of {shape.c} channels"
    if tile.registers + _MORE_REGISTERS + (tile.bn // 4 if tile.direct else 0) > tile.register_limit:
        return f"{tile} needs too many registers"
    need = Features(norm=kind).shared(tile)
    return f"{tile} needs {need} bytes of shared memory" if (need + 1024) * tile.blocks > SHARED_LIMIT + 1024 else None


def _step(channels: int) -> int:
    """Channels of a K step, which divide a row: padding would count as values of a row."""
    return next(n for n in (64, 32, 16) if channels % n == 0)


def _to_vector(t: Tensor | None, count: int, otherwise: float) -> np.ndarray:
    """A scale or shift as one value a channel."""
    if t is None or prod(static_shape(t.shape)) == 1:
        return np.full(count, otherwise if t is None else float(np.asarray(t.array()).reshape(-1)[0]), np.float32)
    return np.asarray(t.array(), np.float32).reshape(-1)
