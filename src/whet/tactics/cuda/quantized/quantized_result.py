"""A normalization or attention that stores its result in 8 bits, by the kernels that store it in floating point otherwise.

Measured: benchmarks/results/h100/transformers_quantized.json: INT8 engines of BERT-base select it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.fused_body import with_outer_inputs
from whet.tactics.cuda._device.kernel import GpuKernel, all_static
from whet.tactics.cuda._device.quantized_store import QuantizedStore
from whet.tactics.cuda.attention.attention_fused import AttentionFused
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.norm.normalize import Normalize
from whet.tactics.cuda.quantized._quantized import BYTES, FLOAT8

_KERNELS = (Normalize(), AttentionFused())


@dataclass(frozen=True)
class _Match:
    """The layer before quantization, the tactic that computes it, the indices of its inputs among the fused layer's, and how its result is stored."""

    inner: Layer
    kernel: Normalize | AttentionFused
    places: tuple[int | None, ...]
    stored: QuantizedStore

    def inner_signature(self, signature: Signature) -> Signature:
        """The signature of the layer before quantization: its result has the type of its data."""
        inputs = tuple(None if i is None else signature.inputs[i] for i in self.places)
        data = next(o for o in inputs if o is not None)
        return Signature(inputs, (Operand("linear", data.dtype),))


@tactic
class QuantizedResult(Tactic):
    """Layers of the pass fuse_quantized_result: a norm over the last axis, which may be stored in floating point too, and attention on Hopper."""

    ops = ("*",)
    composites = ("QuantizedResult",)
    what = "a normalization or attention with a result in 8 bits"

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        match = _match(layer)
        return match if isinstance(match, str) else match.kernel.why_not(match.inner)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        match = _match(layer)
        assert isinstance(match, _Match), match
        signatures = []
        for inner in match.kernel.signatures(match.inner, backend):
            inputs: list[Operand | None] = [None] * len(layer.inputs)
            for i, o in zip(match.places, inner.inputs, strict=True):
                if i is not None:
                    inputs[i] = o
            floats = inner.outputs if match.stored.keeps else ()
            signatures.append(Signature(tuple(inputs), (*floats, Operand("linear", layer.outputs[-1].dtype))))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        match = _match(layer)
        return match if isinstance(match, str) else match.kernel.refuses(match.inner, match.inner_signature(signature), backend)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        match = _match(layer)
        if isinstance(match, str):
            return []
        inner = match.inner_signature(signature)
        if isinstance(match.kernel, AttentionFused):
            return match.kernel.list_quantized_configs(match.inner, inner, backend, match.stored)
        return match.kernel.configs(match.inner, inner, backend)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        match = _match(layer)
        if isinstance(match, str):
            raise PlanRefused(match)
        kernel = match.kernel.plan_quantized(match.inner, match.inner_signature(signature), config, backend, match.stored)

        def make(args: Args) -> list:
            inputs = tuple(0 if i is None else args.inputs[i] for i in match.places)
            return list(kernel.launches(replace(args, inputs=inputs)))

        rtol = kernel.rtol  # of the values that are rounded to 8 bits
        return GpuKernel(layer, signature, make, implementation=kernel.implementation, packed=kernel.packed, rtol=rtol)


def _match(layer: Layer) -> _Match | str:
    """The parts of the fused layer, or why no kernel takes them."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    if len(body.layers) != 2 or body.layers[1].op != "QuantizeLinear" or body.layers[1].inputs[0] is not body.layers[0].outputs[0]:
        return "the body is not a layer and the quantization of its result"
    inner, quantize = (with_outer_inputs(x, outer) for x in body.layers)
    kernel = next((k for k in _KERNELS if k.why_not(inner) is None), None)
    if kernel is None:
        return "; ".join(dict.fromkeys(str(k.why_not(inner)) for k in _KERNELS))
    if len(inner.outputs) != 1 or inner.op in ("GroupNormalization", "InstanceNormalization", "Softmax", "LogSoftmax"):
        return f"takes norms over the last axis and attention, not {inner.op}"
    scale, zero = quantize.inputs[1], quantize.input(2)
    if any(t is not None and not t.is_constant for t in quantize.inputs[1:]) or scale is None or np.size(scale.array()) != 1:
        return "the result does not have one constant scale"
    kind = layer.outputs[-1].dtype.name
    if kind not in BYTES or not quantize.attrs.get("saturate", 1):
        return f"stores {', '.join(BYTES)} that saturate, not {kind}"
    zeros = np.zeros(1, np.float32) if zero is None else np.asarray(zero.array(), np.float32).reshape(-1)
    if kind == FLOAT8 and zeros.any():
        return "e4m3 has no zero point"
    keeps = len(layer.outputs) > 1
    if keeps and isinstance(kernel, AttentionFused):
        return "attention stores its result once"
    places = tuple(None if t is None else layer.inputs.index(t) for t in inner.inputs)
    step = float(np.asarray(scale.array(), np.float32).reshape(-1)[0])
    return _Match(inner, kernel, places, QuantizedStore(TYPES[kind], 1.0 / step, float(zeros[0]), keeps))
