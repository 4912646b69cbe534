"""Depthwise convolutions in bf16, channels last, with any epilogue.

oneDNN's kernel converts each value once per tap; this one once per tile of pixels.

Measured: docs/notes/cpu_kernels.md (BF16 with AMX).
"""

from __future__ import annotations

import numpy as np

from whet.network import BF16, Layer, static_shape
from whet.tactics._base import Args, Packed, Signature, Stream, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias, outer_input
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu._llvm.kernel import CompiledKernel
from whet.tactics.cpu._llvm.packing import RTOL
from whet.tactics.cpu.conv._depthwise_small_ir import BLOCK, Form, emit_depthwise_small_ir, list_context_words
from whet.tactics.cpu.conv._small_float_tactic import SmallFloatTactic
from whet.tactics.cpu.onednn._kernel import to_f32

_WINDOWS = (3, 5, 7)
_TILES = {3: 7, 5: 7, 7: 5}  # window -> pixels whose accumulators, with a row of weights, fit the registers
_ITEMS = 8  # per thread, if there are as many


class DepthwiseKernel(CompiledKernel):
    """A planned convolution; the packed operand holds weights and biases."""

    serial_work = 1 << 17  # multiplications

    def __init__(self, layer: Layer, signature: Signature, chain: Chain, count: int) -> None:
        head = get_root_layer(layer)
        samples, channels, rows, columns = static_shape(layer.outputs[0].shape)
        height, width = static_shape(head.needs(0).shape)[2:]
        weights, bias = get_weight_and_bias(layer)
        window, stride = static_shape(weights.shape)[2], int((head.attrs.get("strides") or (1,))[0])
        super().__init__(layer, signature, samples * channels * rows * columns * window**2, count)
        stored = signature.outputs[0].dtype
        self.rtol = RTOL[stored]
        self.x, self.residual = get_source_index(layer), chain.residual
        pixels = choose_tile(columns, _TILES[window])
        whole = channels // BLOCK
        groups = min(max(1, whole), -(-_ITEMS * self.threads // (samples * rows))) if self.threads > 1 else 1
        group_blocks = max(1, -(-whole // groups))
        groups = max(1, -(-whole // group_blocks))
        self.items = samples * rows * groups
        self.threads = min(self.threads, self.items)
        self.form = Form(window, stride, pixels, channels % BLOCK, chain.steps, stored)
        pads = tuple(head.attrs.get("pads") or (0,) * 4)
        self.sizes = {
            "height": height, "width": width, "rows": rows, "columns": columns, "channels": channels, "groups": groups, "group_blocks": group_blocks,
            "pad_top": pads[0], "pad_left": pads[1], "tiles": -(-columns // pixels), "items": self.items,
        }  # fmt: skip
        digests = "|".join("" if t is None else t.constant().digest for t in (weights, bias))
        nbytes = -(-channels // BLOCK) * (window**2 + 1) * BLOCK * 4

        def pack() -> np.ndarray:
            w = to_f32(weights).reshape(channels, -1)
            b = np.zeros(channels, np.float32) if bias is None else to_f32(bias).reshape(channels)
            return pack_blocks(w, b, by_parity=stored == BF16).view(np.uint8)

        self.packed = (Packed(f"{digests}|depthwise {stored}", nbytes, pack, storable=True),)
        self.implementation = f"{BLOCK} channels x {pixels} pixels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {"source": ("input", self.x), "target": ("output", 0), **self.sizes}
        if self.residual is not None:
            operands["added"] = ("input", self.residual)
        words = [operands[name] for name in list_context_words(self.form.steps)[:-2]]
        self.launch(stream, jit.generate_lazily(emit_depthwise_small_ir, self.form), "depthwise", args, words, self.items)


@tactic
class DepthwiseBf16(SmallFloatTactic):
    ops = ("Conv",)

    def why_not_layer(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if any(i is None or not layer.needs(i).is_constant for t in head.inputs[1:] if t is not None for i in [outer_input(layer, t)]):
            return "the weights are computed at run time"
        w, a = head.needs(1), head.attrs
        if head.needs(0).type.rank != 4 or not a["group"] == w.shape[0] == head.needs(0).shape[1]:
            return "takes depthwise convolutions of images"
        square = len(set(w.shape[2:])) == 1 and len(set(a.get("strides") or (1,))) == 1 and set(a.get("dilations") or (1,)) == {1}
        window, pads = w.shape[2], tuple(a.get("pads") or (0,) * 4)
        if not square or window not in _WINDOWS or (a.get("strides") or (1,))[0] > 2 or max(pads) >= int(window):
            return "takes square windows of 3, 5 or 7, a stride of 1 or 2, pads smaller than the window"
        return None

    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> DepthwiseKernel:
        return DepthwiseKernel(layer, signature, chain, threads)


def choose_tile(columns: int, most: int) -> int:
    """Pixels of a tile, at most `most`: the fewest columns are computed twice, then the tiles are large."""
    return min(range(1, min(most, columns) + 1), key=lambda p: (-(-columns // p) * (p + 2), -p))


def pack_blocks(w: np.ndarray, bias: np.ndarray, by_parity: bool) -> np.ndarray:
    """[channel, tap] and biases as [block, tap or bias, channel], flat; in a block first the even channels if `by_parity`. Absent ones are zeros."""
    channels, taps = w.shape
    blocks = -(-channels // BLOCK)
    full = np.zeros((taps + 1, blocks * BLOCK), np.float32)
    full[:taps, :channels], full[taps, :channels] = w.T, bias
    if by_parity:
        return np.ascontiguousarray(full.reshape(taps + 1, blocks, LANES, 2).transpose(1, 0, 3, 2)).reshape(-1)
    return np.ascontiguousarray(full.reshape(taps + 1, blocks, BLOCK).transpose(1, 0, 2)).reshape(-1)
