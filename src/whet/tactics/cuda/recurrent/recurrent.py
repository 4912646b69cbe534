"""LSTM, GRU and RNN with constant weights: the inputs of all steps are multiplied at once, then a block per direction and sequence runs the steps.

For coverage: no other kernel computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, ConstIntPointer, ConstPointer, FloatPointer, Pointer
from whet.tactics.cuda._device.kernel import RTOL, TYPE, GpuKernel, all_static, blocks_of, float_types, launch, packed_array
from whet.tactics.cuda._device.plain_layer import UnfusedTactic
from whet.tactics.cuda.elementwise.elementwise import number_text

_GATES, _DEFAULTS = {"RNN": 1, "GRU": 3, "LSTM": 4}, {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
#: expressions over x with alpha and beta, and the defaults of these
_ACTIVATIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "sigmoid": ("1.f / (1.f + expf(-x))", ()),
    "tanh": ("tanhf(x)", ()),
    "relu": ("max_nan(x, 0.f)", ()),
    "affine": ("{0} * x + {1}", (1.0, 0.0)),
    "leakyrelu": ("(x >= 0.f ? x : {0} * x)", (0.01,)),
    "hardsigmoid": ("min_nan(max_nan({0} * x + {1}, 0.f), 1.f)", (0.2, 0.5)),
    "softsign": ("x / (1.f + fabsf(x))", ()),
    "softplus": ("(x > 20.f ? x : log1pf(expf(x)))", ()),
}
_SHARED = 48 << 10  # bytes


@dataclass(frozen=True, kw_only=True)
class RecurrentArguments(Arguments, kernel="recurrent.cu"):
    """Arguments of recurrent.cu; 0 for what is absent."""

    x: ConstPointer
    w: ConstPointer
    r: ConstPointer
    bias: ConstFloatPointer  # [direction][of W, of R][row]
    peepholes: ConstFloatPointer
    lengths: ConstIntPointer
    first_h: ConstPointer
    first_c: ConstPointer
    projected: FloatPointer
    y: Pointer
    last_h: Pointer
    last_c: Pointer


@tactic
class Recurrent(UnfusedTactic):
    """Row-major; accumulators, gates and the cell in f32."""

    ops = tuple(_GATES)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        if any(t is not None and not t.is_constant for i in (1, 2, 3, 7) if (t := layer.input(i)) is not None):
            return "takes constant weights"
        gates, h = _GATES[layer.op], layer.needs(2).shape[-1]
        return None if isinstance(h, int) and (gates + 3) * h * 4 <= _SHARED else f"takes states and gates of up to {_SHARED} bytes"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        signatures = []
        for kind in float_types([layer.inputs[0], *layer.outputs], (F16, BF16, F32)):
            ins: list[Operand | None] = [Operand("linear", kind), None, None, None, None, None, None, None][: len(layer.inputs)]
            for i in (4, 5, 6):
                if (t := layer.input(i)) is not None:
                    ins[i] = Operand("linear", t.dtype if i == 4 else kind)
            signatures.append(Signature(tuple(ins), (Operand("linear", kind),) * len(layer.outputs)))
        return signatures

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        kind, gates, attrs = signature.outputs[0].dtype, _GATES[layer.op], layer.attrs
        x, (directions, _, h) = static_shape(layer.needs(0).shape), static_shape(layer.needs(2).shape)
        steps, sequences = (x[1], x[0]) if attrs["layout"] else (x[0], x[1])
        rows = gates * h

        def transposed(i: int):
            size = prod(static_shape(layer.needs(i).shape)) * kind.numpy.itemsize
            key = f"{layer.needs(i).constant().digest}|recurrent {kind}"
            return packed_array(key, size, lambda: np.asarray(layer.needs(i).array(), np.float32).transpose(0, 2, 1).astype(kind.numpy))

        def constant(i: int, shape: tuple[int, ...]):
            t = layer.input(i)
            key = "recurrent zeros" if t is None else f"{t.constant().digest}|recurrent f32"
            return packed_array(key, prod(shape) * 4, lambda: np.zeros(shape, np.float32) if t is None else np.asarray(t.array(), np.float32))

        holes = layer.op == "LSTM" and layer.input(7) is not None
        packed = [transposed(1), transposed(2), constant(3, (directions, 2 * rows)), *([constant(7, (directions, 3 * h))] if holes else [])]
        block = min(1024, max(32, -(-rows // 32) * 32))
        acts = _activations(layer, directions)
        constants = {
            "DIRECTIONS": directions, "STEPS": steps, "SEQUENCES": sequences, "INPUTS": x[2], "UNITS": h, "GATES": gates,
            "TYPE": TYPE[kind.name], "WEIGHTS": TYPE[kind.name],
            "MODEL": list(_GATES).index(layer.op), "BATCH_FIRST": int(bool(attrs["layout"])), "BACKWARDS": int(attrs["direction"] == "reverse"),
            "LINEAR_BEFORE_RESET": int(bool(attrs.get("linear_before_reset"))), "INPUT_FORGET": int(bool(attrs.get("input_forget"))),
            "CLIP": number_text(attrs.get("clip") or 0.0), "PEEPHOLES": int(holes), "BLOCK": block, **{f"ACT{i}": a for i, a in enumerate(acts)},
        }  # fmt: skip
        states = 2 if layer.op == "LSTM" else 1

        def make(args: Args) -> list:
            given = (*args.inputs, *(0,) * 8)
            last = (*args.outputs[1:], 0, 0)
            arguments = RecurrentArguments(
                x=given[0], w=args.packed[0], r=args.packed[1], bias=args.packed[2], peepholes=args.packed[3] if holes else 0, lengths=given[4],
                first_h=given[5], first_c=given[6] if states == 2 else 0, projected=args.scratch, y=args.outputs[0], last_h=last[0], last_c=last[1],
            )  # fmt: skip
            count = directions * steps * sequences * rows
            if not count:
                return []
            return [
                launch("project", arguments, constants, (blocks_of(count, 256), 1, 1), 256),
                launch("recur", arguments, constants, (directions * sequences, 1, 1), block),
            ]

        scratch = directions * steps * sequences * rows * 4
        # the state stays f32 over all steps, whose rounding accumulates; results are rounded once
        rtol = max(RTOL[kind.name], 4 * RTOL["f32"])
        return GpuKernel(layer, signature, make, implementation="steps of a block", packed=packed, scratch=scratch, rtol=rtol)


def _activations(layer: Layer, directions: int) -> list[str]:
    """Three expressions over x, and over the direction d where they differ."""
    each = len(_DEFAULTS[layer.op])
    names = [n.lower() for n in layer.attrs.get("activations") or _DEFAULTS[layer.op] * directions]
    alphas, betas = (iter(layer.attrs.get(k) or ()) for k in ("activation_alpha", "activation_beta"))
    texts = []
    for name in names:
        text, defaults = _ACTIVATIONS[name]
        values = [next(given, default) for given, default in zip((alphas, betas), defaults, strict=False)]
        texts.append(text.format(*map(number_text, values)))
    expressions = []
    for i in range(each):
        own: Sequence[str] = texts[i::each]
        expressions.append(own[0] if len(set(own)) == 1 else f"d ? {own[1]} : {own[0]}")
    return [*expressions, *["x"] * (3 - each)]
