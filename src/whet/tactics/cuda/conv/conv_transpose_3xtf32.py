"""ConvTranspose of f32 tensors on tensor cores, each value as two of TF32: a product computes all contributions, a second kernel adds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import F32
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import GpuKernel, compile_ahead, machine_has, make_packed_array
from whet.tactics.cuda.conv import _tf32
from whet.tactics.cuda.conv._conv import View, pack_bias
from whet.tactics.cuda.conv._conv_transpose import Transposed, TransposedTactic, make_transposed_launch, match_transposed_epilogue
from whet.tactics.cuda.conv._tf32 import Tf32Config
from whet.tactics.cuda.conv._tf32_tactic import as_config
from whet.tactics.cuda.conv.conv import make_packed_bias
from whet.tactics.cuda.conv.conv_transpose import convert_to_tap_rows, get_product_shape

MAX_CONFIGS = 8
_MATH = "f32 by three"


@tactic
class ConvTranspose3xtf32(TransposedTactic):
    """One group, two spatial axes, a multiple of 4 input channels; any kernel, stride, padding and dilation."""

    kinds = (F32,)

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, t = match_transposed_epilogue(layer), Transposed.of(layer)
        if isinstance(epilogue, str):
            return epilogue
        return "takes convolutions of one group" if t.group != 1 else _tf32.refuses(get_product_shape(t))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s = get_product_shape(Transposed.of(layer))
        configs = _tf32.list_configs(s.m, s.k, s.c, 1, 3, backend.capabilities.multiprocessors)[:MAX_CONFIGS]
        compile_ahead(backend, [_tf32.emit_tf32_source(c, False, "clip", s.k % 4 != 0) for c in configs])
        return [as_config(c, _MATH) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, t, fields = match_transposed_epilogue(layer), Transposed.of(layer), dict(config)
        if isinstance(epilogue, str) or fields.pop("math", None) != _MATH:
            raise PlanRefused(epilogue if isinstance(epilogue, str) else f"this tactic computes in {_MATH}")
        shape, tile = get_product_shape(t), Tf32Config(**{k: int(v) for k, v in fields.items()}, terms=3)
        if not tile.valid() or tile.bk != _tf32.step_channels(shape.c):
            raise PlanRefused(f"{tile} does not fit a multiprocessor, or {shape.c} channels")
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        inner = shape.steps(tile.bk) * tile.bk

        def rows() -> np.ndarray:
            given = convert_to_tap_rows(np.asarray(weights.array(), np.float32))
            return _tf32.pack(np.pad(given, ((0, 0), (0, inner - shape.c))), tile.bk, tile.terms)

        packed = (
            make_packed_array(
                f"{weights.constant().digest}|transposed f32 permuted {tile.bk}", 2 * _tf32.count_padded_filters(shape.k) * inner * 4, rows
            ),
            make_packed_array(f"no bias {shape.k}", pack_bias(None, shape.k).nbytes, lambda: pack_bias(None, shape.k)),
            make_packed_bias(epilogue, own, t.k),
        )

        def make(args: Args) -> list:
            columns = -(-args.scratch // 128) * 128
            source = View(args.inputs[x], t.c)
            target = View(columns, shape.k)
            product = _tf32.launch(
                tile, shape, source, args.packed[0], args.packed[1], target, multiprocessors=backend.capabilities.multiprocessors, label=layer.name
            )
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            return [product, make_transposed_launch("gather", t, columns, 0, args.packed[2], residual, args.outputs[0], epilogue, F32, layer.name)]

        scratch = shape.m * shape.k * 4 + 128
        return GpuKernel(layer, signature, make, implementation=f"wgmma taps {tile}", packed=packed, scratch=scratch)
