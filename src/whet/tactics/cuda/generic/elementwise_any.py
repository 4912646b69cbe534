"""Elementwise layers that no faster kernel takes: any broadcast of any number of operands, f64, all integers, bounds computed at run time."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, emit_coordinates, emit_flat_index, get_number_type

_FOLDED = {"Add": "a + b", "Sum": "a + b", "Mean": "a + b", "Mul": "a * b", "Max": "(a != a || a > b ? a : b)", "Min": "(a != a || a < b ? a : b)"}
_TEXT = {
    "Sub": "a - b", "Equal": "a == b", "Less": "a < b", "LessOrEqual": "a <= b", "Greater": "a > b", "GreaterOrEqual": "a >= b",
    "And": "a != 0 && b != 0", "Or": "a != 0 || b != 0", "Xor": "(a != 0) != (b != 0)", "Not": "a == 0", "Where": "a != 0 ? b : c",
    "PRelu": "a >= 0 ? a : a * b", "IsNaN": "a != a", "Abs": "a < 0 ? -a : a", "Neg": "-a", "Sign": "a > 0 ? 1 : a < 0 ? -1 : a",
    "Relu": "a != a || a > 0 ? a : 0", "LeakyRelu": "a >= 0 ? a : {alpha} * a", "ThresholdedRelu": "a > {alpha} ? a : 0",
    "Shrink": "a < -{lambd} ? a + {bias} : a > {lambd} ? a - {bias} : 0", "HardSigmoid": "unit({alpha} * a + {beta})",
    "HardSwish": "a * unit(a / 6 + (Number)0.5)",
}  # fmt: skip
_FUNCTIONS = (
    "Exp", "Log", "Sqrt", "Erf", "Floor", "Ceil", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Tanh",
)  # fmt: skip
#: of floats alone
_FLOAT_TEXT = {
    **{op: f"{op.lower()}(a)" for op in _FUNCTIONS},
    "Round": "rint(a)", "Reciprocal": "1 / a", "Softsign": "a / (1 + fabs(a))", "Softplus": "softplus(a)", "Sigmoid": "1 / (1 + exp(-a))",
    "Swish": "a / (1 + exp(-{alpha} * a))", "Mish": "a * tanh(softplus(a))", "Elu": "a >= 0 ? a : {alpha} * expm1(a)",
    "Celu": "a >= 0 ? a : {alpha} * expm1(a / {alpha})", "Selu": "{gamma} * (a > 0 ? a : {alpha} * expm1(a))", "Div": "a / b", "Pow": "pow(a, b)",
}  # fmt: skip
_INTEGER_TEXT = {
    "BitwiseAnd": "a & b", "BitwiseOr": "a | b", "BitwiseXor": "a ^ b", "BitwiseNot": "~a", "Div": "quotient(a, b)", "Pow": "power(a, b)",
}  # fmt: skip
_GELU = {
    "none": "a * (Number)0.5 * (1 + erf(a * (Number)0.7071067811865476))",
    "tanh": "a * (Number)0.5 * (1 + tanh((Number)0.7978845608028654 * (a + (Number)0.044715 * a * a * a)))",
}
_WORDS = {8: "u8", 16: "u16", 32: "u32", 64: "u64"}
#: helpers, in front of the statements of layers that use them
_HELPERS = {
    "unit": "auto unit = [](Number v) { return v != v ? v : v < 0 ? (Number)0 : v > 1 ? (Number)1 : v; };",
    "softplus": "auto softplus = [](Number v) { return v > 20 ? v : log1p(exp(v)); };",
    "quotient": "auto quotient = [](Number x, Number y) -> Number { return y == 0 ? 0 : x / y; };",
    "power": "auto power = [](Number x, Number y) { Number r = y < 0 && x != 1 && x != -1 ? 0 : 1;"
    " for (Number n = y < 0 ? -y : y; n; n /= 2) { if (n % 2) r *= x; x *= x; } return r; };",
}
#: whose results can change much if an operand is rounded
_ORDERED = frozenset({
    "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "And", "Or", "Xor", "Not", "Floor", "Ceil", "Round", "Sign",
    "ThresholdedRelu", "Shrink", "Mod", "Cast", "BitCast",
})  # fmt: skip


@tactic
class ElementwiseAny(PerValueTactic):
    """Row-major."""

    ops = tuple(dict.fromkeys((
        *_FOLDED, *_TEXT, *_FLOAT_TEXT, *_INTEGER_TEXT, "Gelu", "Silu", "Clip", "Mod", "BitShift", "IsInf", "BitCast", "Cast", "CastLike",
    )))  # fmt: skip

    def allows_16_bits(self, layer: Layer) -> bool:
        return layer.op not in _ORDERED

    def why_no_code(self, layer: Layer) -> str | None:
        found = _emit_expression(layer)
        return None if found else f"the kernel has no {layer.op} of {', '.join(str(t.dtype) for t in layer.inputs if t is not None)}"

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        y, text = static_shape(layer.outputs[0].shape), _emit_expression(layer) or ""
        if layer.op == "BitCast":
            word = _WORDS[layer.outputs[0].dtype.bits]
            return [(f"reinterpret_cast<{word}*>(p.output[0])[i] = reinterpret_cast<const {word}*>(p.input[0])[i];", prod(y))]
        places, values = emit_coordinates(y), ""
        for k, t in enumerate(layer.inputs):
            if t is not None:
                shape = static_shape(t.shape)
                own = [p if n > 1 else "0" for p, n in zip(places[len(y) - len(shape) :], shape, strict=True)]
                values += f"const Number {'abcdefgh'[k]} = in{k}({emit_flat_index(own, shape)}); "
        if layer.op == "CastLike":
            values = "const Number a = in0(i);"
        helpers = " ".join(code for name, code in _HELPERS.items() if f"{name}(" in text)
        return [(f"{helpers} {values} put0(i, (Number)({text}));", prod(y))]


def _emit_expression(layer: Layer) -> str | None:
    """The result over the operands a, b, c ...; None if there is none."""
    floats, op, a = get_number_type(layer) in ("float", "double"), layer.op, layer.attrs
    if op in _FOLDED:
        text = _fold(_FOLDED[op], len(layer.inputs))
        return f"({text}) / (Number){len(layer.inputs)}" if op == "Mean" else text
    match op:
        case "Gelu":
            return _GELU[a["approximate"]]
        case "Silu":
            return "a / (1 + exp(-a))"
        case "Clip":
            text = "a"
            for k, (name, test) in enumerate((("b", "<"), ("c", ">")), 1):
                if layer.input(k) is not None:
                    text = f"({text} {test} {name} ? {name} : {text})"
            return text
        case "Mod":
            if not floats:
                return "b == 0 ? 0 : a % b" if a["fmod"] else "b == 0 ? 0 : (a % b + b) % b"
            return "fmod(a, b)" if a["fmod"] else "a - b * floor(a / b)"
        case "BitShift":
            bits = layer.needs(0).dtype.bits
            return f"(u64)b >= {bits} ? 0 : {'(Number)((u64)a << b)' if a['direction'] == 'LEFT' else '(Number)((u64)a >> b)'}"
        case "IsInf":
            tests = [f"a == {sign}(Number)(1. / 0.)" for sign, key in (("", "detect_positive"), ("-", "detect_negative")) if a[key]]
            return " || ".join(tests) or "false"
        case "Cast" | "CastLike":
            return "a"
        case "BitCast":
            return "a" if layer.needs(0).dtype.bits == layer.outputs[0].dtype.bits else None
    form = _TEXT.get(op) or (_FLOAT_TEXT if floats else _INTEGER_TEXT).get(op)
    return form and form.format(**{k: f"(Number){float(v)!r}" for k, v in a.items() if isinstance(v, float)})


def _fold(body: str, count: int) -> str:
    """The left fold of `body`, over a and b, over the first `count` operands."""
    text = "a"
    for name in "bcdefgh"[: count - 1]:
        text = body.replace("a", "\0").replace("b", name).replace("\0", f"({text})")
    return text
