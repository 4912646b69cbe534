"""Convolutions in bf16, channels last, by AMX tiles. Images of windows are copied with their padding first.

Measured: docs/notes/cpu_kernels.md (BF16 with AMX).
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics._fused import get_root_layer, get_weight_and_bias, outer_input
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu.conv._amx_kernel import AmxKernel, AmxTactic, Window, choose_step

_LEAST_ROWS = 4  # below, reading the weights takes longer than multiplying


@tactic
class AmxConv(AmxTactic):
    ops = ("Conv",)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if any(i is None or not layer.needs(i).is_constant for t in head.inputs[1:] if t is not None for i in [outer_input(layer, t)]):
            return "the weights are computed at run time"
        a, x, w = head.attrs, head.needs(0), head.needs(1)
        if x.type.rank != 4 or a["group"] != 1 or set(a.get("dilations") or (1,)) != {1}:
            return "takes convolutions of images with one group, no dilations"
        if not x.type.static or w.shape[2] != w.shape[3] or len(set(a.get("strides") or (1,))) != 1:
            return "takes square windows, and one stride for both axes"
        window = _make_window(head)
        if window.samples * window.product_rows < _LEAST_ROWS:
            return f"takes {_LEAST_ROWS} pixels or more"
        return None if choose_step(int(w.shape[1])) else "takes an even number of channels"

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> AmxKernel:
        head = get_root_layer(layer)
        window = _make_window(head)
        if window.side == window.stride == 1 and not any(head.attrs.get("pads") or (0,)):
            pixels = window.samples * window.product_rows
            return AmxKernel(layer, signature, chain, pixels, *get_weight_and_bias(layer), flatten_taps, threads)
        return AmxKernel(layer, signature, chain, window.product_rows, *get_weight_and_bias(layer), flatten_taps, threads, window)


def _make_window(head: Layer) -> Window:
    samples, _, height, width = static_shape(head.needs(0).shape)
    rows, columns = static_shape(head.outputs[0].shape)[2:]
    pads = tuple(head.attrs.get("pads") or (0,) * 4)
    stride = int((head.attrs.get("strides") or (1,))[0])
    return Window(static_shape(head.needs(1).shape)[2], stride, (pads[0], pads[1]), samples, height, width, rows, columns)


def flatten_taps(w: np.ndarray) -> np.ndarray:
    """[tap, channel] by results, from [result, channel, row, column]."""
    return w.transpose(2, 3, 1, 0).reshape(-1, len(w))
