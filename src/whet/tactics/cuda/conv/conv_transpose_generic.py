"""ConvTranspose that no tensor-core kernel takes (f32, groups, odd channel counts): one thread a value. Slow, always there.

For coverage: no other kernel computes these layers.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.kernel import GpuKernel, make_packed_array
from whet.tactics.cuda.conv._conv_transpose import Transposed, TransposedTactic, make_transposed_launch, match_transposed_epilogue
from whet.tactics.cuda.conv.conv import make_packed_bias


@tactic
class ConvTransposeGeneric(TransposedTactic):
    """Two spatial axes, any groups."""

    kinds = (F16, BF16, F32)
    fallback = True

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        epilogue = match_transposed_epilogue(layer)
        return epilogue if isinstance(epilogue, str) else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, t = match_transposed_epilogue(layer), Transposed.of(layer)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        kind = signature.outputs[0].dtype
        packed = (
            make_packed_array(
                f"{weights.constant().digest}|transposed direct {t.group}",
                int(np.prod(weights.shape)) * 4,
                lambda: order_by_taps(np.asarray(weights.array(), np.float32), t.group),
            ),
            make_packed_bias(epilogue, own, t.k),
        )

        def make(args: Args) -> list:
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            weights_at, bias_at = args.packed
            source: int = args.inputs[x]
            return [make_transposed_launch("direct", t, source, weights_at, bias_at, residual, args.outputs[0], epilogue, kind, layer.name)]

        return GpuKernel(layer, signature, make, implementation="direct transposed", packed=packed)


def order_by_taps(weights: np.ndarray, group: int) -> np.ndarray:
    """Weights [c, k of a group, r, s] as [r][s][channel of a group][k of all groups]."""
    c, k, r, s = weights.shape
    return weights.reshape(group, c // group, k, r, s).transpose(3, 4, 1, 0, 2).reshape(r, s, c // group, group * k)
