"""ConvTranspose on Hopper's tensor cores: a product computes all contributions, a second kernel adds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import FLOAT16_TYPES, GpuKernel, compile_ahead, machine_has, make_packed_array
from whet.tactics.cuda.conv._conv import ConvShape, View, pack_bias, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import list_configs, pick_varied
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv._conv_transpose import Transposed, TransposedTactic, make_transposed_launch, match_transposed_epilogue
from whet.tactics.cuda.conv.conv import as_config, from_config, make_packed_bias

MAX_CONFIGS = 12


@tactic
class ConvTranspose(TransposedTactic):
    """One group, two spatial axes, a multiple of 8 input channels; any kernel, stride, padding and dilation."""

    kinds = FLOAT16_TYPES

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, t = match_transposed_epilogue(layer), Transposed.of(layer)
        if isinstance(epilogue, str):
            return epilogue
        return "takes convolutions of one group" if t.group != 1 else refuses(get_product_shape(t))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s = get_product_shape(Transposed.of(layer))
        configs = pick_varied(list_configs(s.m, s.k, s.c, 1, backend.capabilities.multiprocessors), MAX_CONFIGS, each=5)
        compile_ahead(backend, [emit_conv_source(c, Features(bf16=signature.outputs[0].dtype.name == "bf16")) for c in configs])
        return [as_config(c) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, t, tile = match_transposed_epilogue(layer), Transposed.of(layer), from_config(config)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        shape, dtype = get_product_shape(t), signature.outputs[0].dtype
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        packed = (
            make_packed_array(
                f"{weights.constant().digest}|transposed {tile.bk} {dtype}",
                shape.k * shape.steps(tile.bk) * tile.bk * 2,
                lambda: pack_weights(convert_to_tap_rows(np.asarray(weights.array(), np.float32))[:, :, None, None], tile.bk, dtype.numpy),
            ),
            make_packed_array(f"no bias {shape.k}", pack_bias(None, shape.k).nbytes, lambda: pack_bias(None, shape.k)),
            make_packed_bias(epilogue, own, t.k),
        )

        def make(args: Args) -> list:
            columns = -(-args.scratch // 128) * 128
            product = make_conv_launch(
                tile,
                ConvProblem(
                    shape=shape,
                    input=View(args.inputs[x], t.c),
                    weights=args.packed[0],
                    bias=args.packed[1],
                    output=View(columns, shape.k),
                    bf16=dtype.name == "bf16",
                ),
                multiprocessors=backend.capabilities.multiprocessors,
                label=layer.name,
            )
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            return [product, make_transposed_launch("gather", t, columns, 0, args.packed[2], residual, args.outputs[0], epilogue, dtype, layer.name)]

        scratch = shape.m * shape.k * 2 + 128
        return GpuKernel(layer, signature, make, implementation=f"wgmma taps {tile}", packed=packed, scratch=scratch)


def get_product_shape(t: Transposed) -> ConvShape:
    """The product: all input pixels by all taps of all output channels."""
    return ConvShape(1, 1, t.n * t.h * t.w, t.c, t.r * t.s * t.k)


def convert_to_tap_rows(weights: np.ndarray) -> np.ndarray:
    """Weights [c, k, r, s] as rows [(r, s, k)][c]."""
    return weights.transpose(2, 3, 1, 0).reshape(-1, weights.shape[0])
