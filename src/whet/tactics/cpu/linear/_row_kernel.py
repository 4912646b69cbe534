"""Planned launches of _row_ir.py, and the base class of their tactics."""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np

from whet.backends import Backend
from whet.network import BF16, F32, DType, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias, outer_input
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.conv._indirect_kernel import count_lanes
from whet.tactics.cpu.linear._row_ir import Form, emit_row_ir, list_context_words
from whet.tactics.cpu.onednn._kernel import RTOL, is_static, list_runtime_tensors, to_f32

MOST_ROWS = 3
_STRIPS = (16, 32)  # results of a strip; the longer ones where each thread has MANY_STRIPS of them
MANY_STRIPS = 32


class RowKernel(CompiledKernel):
    """A planned product of `rows` rows; the packed operand has the weights, and the biases after them."""

    serial_work = 1 << 15  # multiplications

    def __init__(self, layer: Layer, signature: Signature, chain: Chain, rows: int, count: int) -> None:
        self.x, self.residual = get_source_index(layer), chain.residual
        weights, own_bias = get_weight_and_bias(layer)
        bias, head = own_bias or chain.bias, get_root_layer(layer)
        is_bf16, is_turned = signature.outputs[0].dtype == BF16, head.op == "Conv" or bool(head.attrs.get("transB"))
        lanes = LANES if is_bf16 else count_lanes()
        channels = static_shape(weights.shape)[0 if is_turned else 1]
        inputs = prod(static_shape(weights.shape)) // channels
        super().__init__(layer, signature, rows * inputs * channels, count)
        self.rtol = RTOL["bf16" if is_bf16 else "f32"]
        strip = _STRIPS[channels >= _STRIPS[1] * MANY_STRIPS * count]
        whole, rest = divmod(channels, strip)
        last = (-(-rest // lanes), (rest - 1) % lanes + 1) if rest else (0, 0)
        self.form, self.strips = Form(is_bf16, lanes, rows, strip // lanes, last, chain.steps), whole + bool(rest)
        self.threads = min(self.threads, self.strips)
        element = 2 if is_bf16 else 4
        strip_bytes, bias_at = inputs * strip * element, inputs * (whole * strip + last[0] * lanes) * element
        self.sizes = {
            "inputs": inputs // (2 if is_bf16 else 1), "channels": channels, "whole": whole, "strip_bytes": strip_bytes, "bias": bias_at,
            "strips": self.strips,
        }  # fmt: skip
        nbytes = bias_at + self.strips * strip * 4

        def pack() -> np.ndarray:
            matrix, out = to_f32(weights).reshape(static_shape(weights.shape)[:2]), np.zeros(nbytes, np.uint8)
            out[:bias_at] = pack_strips(matrix.T if is_turned else matrix, strip, lanes, is_bf16).view(np.uint8)
            if bias is not None:
                out[bias_at:].view(np.float32)[:channels] = to_f32(bias).reshape(-1)
            return out

        digests = "|".join("" if t is None else t.constant().digest for t in (weights, bias))
        self.packed = (Packed(f"{digests}|rows {is_bf16} {is_turned} {strip} {lanes}", nbytes, pack, storable=True),)
        self.implementation = f"{rows} rows, strips of {strip} results"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {"source": ("input", self.x), "target": ("output", 0), **self.sizes}
        if self.residual is not None:
            operands["added"] = ("input", self.residual)
        words = [operands[name] for name in list_context_words(self.form)[:-2]]
        self.launch(stream, jit.generate_lazily(emit_row_ir, self.form), "rows", args, words, self.strips)


def pack_strips(matrix: np.ndarray, strip: int, lanes: int, is_bf16: bool) -> np.ndarray:
    """[inputs, results] as strips of `strip` results, flat; the last strip has the vectors that it needs, with zeros after the last result."""
    inputs, results = matrix.shape
    whole = results // strip
    rest = results - whole * strip
    width = -(-rest // lanes) * lanes
    last = np.zeros((inputs, width), np.float32)
    last[:, :rest] = matrix[:, whole * strip :]
    parts = [matrix[:, : whole * strip].reshape(inputs, whole, strip).transpose(1, 0, 2), last[None]]
    if is_bf16:
        parts = [p.astype(ml_dtypes.bfloat16).reshape(len(p), inputs // 2, 2, p.shape[-1]).transpose(0, 1, 3, 2) for p in parts]
    return np.concatenate([np.ascontiguousarray(p).reshape(-1) for p in parts])


class RowTactic(CompiledTactic):
    """Products of few rows, in one storage type."""

    ops = ("Conv", "Gemm", "MatMul")
    needs_all_shapes = True

    stored: DType
    """The type of weights, inputs and results."""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        if reason := _why_not_pixel(layer) if head.op == "Conv" else why_not_gemm(layer):
            return reason
        if not is_static(layer):
            return None
        if not 0 < _count_rows(head) <= MOST_ROWS:
            return f"takes 1 to {MOST_ROWS} rows"
        if any(t.dtype not in (F32, self.stored) for t in list_runtime_tensors(layer)):
            return f"computes in {self.stored}"
        if self.stored == BF16 and static_shape(head.needs(0).shape)[1 if head.op == "Conv" else -1] % 2:
            return "takes an even number of inputs"
        chain = _find_chain(layer)
        return chain if isinstance(chain, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.unavailable() or self.why_not(layer) or not is_static(layer) or 0 in static_shape(layer.outputs[0].shape):
            return []
        chain = _find_chain(layer)
        assert isinstance(chain, Chain), "why_not refuses other layers"
        operand, read = Operand("nhwc" if get_root_layer(layer).op == "Conv" else "linear", self.stored), (get_source_index(layer), chain.residual)
        return [Signature(tuple(operand if i in read else None for i in range(len(layer.inputs))), (operand,))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> RowKernel:
        if reason := self.unavailable() or self.why_not(layer):
            raise PlanRefused(reason)
        chain = _find_chain(layer)
        assert isinstance(chain, Chain), "why_not refuses other layers"
        return RowKernel(layer, signature, chain, _count_rows(get_root_layer(layer)), backend.threads)


def _count_rows(head: Layer) -> int:
    shape = static_shape(head.needs(0).shape)
    return shape[0] if head.op == "Conv" else prod(shape[:-1])


def _find_chain(layer: Layer) -> Chain | str:
    head = get_root_layer(layer)
    return match_chain(layer, takes_bias=head.op != "Conv" and head.input(2) is None)


def _why_not_pixel(layer: Layer) -> str | None:
    """Why a convolution is no product of each image's only pixel with a constant matrix, or None."""
    head = get_root_layer(layer)
    if any(i is None or not layer.needs(i).is_constant for t in head.inputs[1:] if t is not None for i in [outer_input(layer, t)]):
        return "the weights are computed at run time"
    pixels = (*head.needs(0).shape[2:], *head.needs(1).shape[2:], *head.outputs[0].shape[2:])
    if head.needs(0).type.rank != 4 or any(n != 1 for n in pixels) or head.attrs["group"] != 1:
        return "takes convolutions of one pixel by one, without groups"
    return "its image is padded" if any(head.attrs.get("pads") or (0,)) else None
