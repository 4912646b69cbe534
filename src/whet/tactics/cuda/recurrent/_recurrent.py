"""Shared by the tactics of recurrent layers: the layers they take, signatures, and the constants of a layer's cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.backends import Backend
from whet.network import Layer
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Operand, Signature
from whet.tactics.cuda._device.kernel import all_static, list_float_types
from whet.tactics.cuda._device.plain_layer import UnfusedTactic
from whet.tactics.cuda.elementwise.elementwise import format_number

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
Expressions = Mapping[str, tuple[str, tuple[float, ...]]]
#: expressions over x with alpha and beta, and the defaults of these
ACTIVATIONS: Expressions = {
    "sigmoid": ("1.f / (1.f + expf(-x))", ()),
    "tanh": ("tanhf(x)", ()),
    "relu": ("max_nan(x, 0.f)", ()),
    "affine": ("{0} * x + {1}", (1.0, 0.0)),
    "leakyrelu": ("(x >= 0.f ? x : {0} * x)", (0.01,)),
    "hardsigmoid": ("min_nan(max_nan({0} * x + {1}, 0.f), 1.f)", (0.2, 0.5)),
    "softsign": ("x / (1.f + fabsf(x))", ()),
    "softplus": ("(x > 20.f ? x : log1pf(expf(x)))", ()),
}


class RecurrentTactic(UnfusedTactic):
    """Row-major operands; accumulators, gates and the cell in f32."""

    ops = tuple(GATES)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if any(t is not None and not t.is_constant for i in (1, 2, 3, 7) if (t := layer.input(i)) is not None):
            return "takes constant weights"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        signatures = []
        for kind in list_float_types([layer.inputs[0], *layer.outputs], (F16, BF16, F32)):
            ins: list[Operand | None] = [Operand("linear", kind), None, None, None, None, None, None, None][: len(layer.inputs)]
            for i in (4, 5, 6):
                if (t := layer.input(i)) is not None:
                    ins[i] = Operand("linear", t.dtype if i == 4 else kind)
            signatures.append(Signature(tuple(ins), (Operand("linear", kind),) * len(layer.outputs)))
        return signatures


def list_activation_names(layer: Layer) -> list[str]:
    """Its activations in lower case, those of the first direction first."""
    directions = 2 if layer.attrs["direction"] == "bidirectional" else 1
    return [n.lower() for n in layer.attrs.get("activations") or DEFAULTS[layer.op] * directions]


def make_cell_constants(layer: Layer, table: Expressions = ACTIVATIONS) -> dict[str, Any]:
    """The constants of cell.cuh and those of its model, with activations from `table`."""
    attrs = layer.attrs
    return {
        "MODEL": list(GATES).index(layer.op), "BATCH_FIRST": int(bool(attrs["layout"])), "BACKWARDS": int(attrs["direction"] == "reverse"),
        "LINEAR_BEFORE_RESET": int(bool(attrs.get("linear_before_reset"))), "INPUT_FORGET": int(bool(attrs.get("input_forget"))),
        "CLIP": format_number(attrs.get("clip") or 0.0), "PEEPHOLES": int(has_peepholes(layer)),
        **{f"ACT{i}": text for i, text in enumerate(_list_expressions(layer, table))},
    }  # fmt: skip


def has_peepholes(layer: Layer) -> bool:
    """True for an LSTM with peepholes: its gates also read the cell."""
    return layer.op == "LSTM" and layer.input(7) is not None


def _list_expressions(layer: Layer, table: Expressions) -> list[str]:
    """Three expressions over x, and over the direction d if the directions differ."""
    each = len(DEFAULTS[layer.op])
    alphas, betas = (iter(layer.attrs.get(k) or ()) for k in ("activation_alpha", "activation_beta"))
    texts = []
    for name in list_activation_names(layer):
        text, defaults = table[name]
        values = [next(given, default) for given, default in zip((alphas, betas), defaults, strict=False)]
        texts.append(text.format(*map(format_number, values)))
    expressions = []
    for i in range(each):
        own: Sequence[str] = texts[i::each]
        expressions.append(own[0] if len(set(own)) == 1 else f"d ? {own[1]} : {own[0]}")
    return [*expressions, *["x"] * (3 - each)]
