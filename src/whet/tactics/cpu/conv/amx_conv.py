"""1x1 convolutions in bf16, channels last, by AMX tiles.

Not measured yet: BF16 engines on CPUs with AMX.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias, outer_input
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu.conv._amx_kernel import AmxKernel, AmxTactic, choose_step

_LEAST_ROWS = 4  # below, reading the weights takes longer than multiplying


@tactic
class AmxConv(AmxTactic):
    ops = ("Conv",)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if any(i is None or not layer.needs(i).is_constant for t in head.inputs[1:] if t is not None for i in [outer_input(layer, t)]):
            return "the weights are computed at run time"
        a, x = head.attrs, head.needs(0)
        plain = a["group"] == 1 and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or (0,))
        if x.type.rank != 4 or tuple(head.needs(1).shape[2:]) != (1, 1) or not plain:
            return "takes 1x1 convolutions of images with one group, no strides, no pads"
        if not x.type.static or _count_pixels(head) < _LEAST_ROWS:
            return f"takes {_LEAST_ROWS} pixels or more"
        return None if choose_step(int(head.needs(1).shape[1])) else "takes an even number of channels"

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> AmxKernel:
        return AmxKernel(layer, signature, chain, _count_pixels(get_root_layer(layer)), *get_weight_and_bias(layer), flatten_taps, threads)


def _count_pixels(head: Layer) -> int:
    """Pixels of all samples."""
    samples, _, *sides = static_shape(head.needs(0).shape)
    return samples * prod(sides)


def flatten_taps(w: np.ndarray) -> np.ndarray:
    """[channels, results] from 1x1 weights."""
    return w.reshape(len(w), -1).T
