"""Elementwise ops as LLVM IR: one function per op, of values with any number of lanes.

Values in registers are f32, i32 (also for integers of 8 and 16 bits, which are stored truncated), i64, and i1 for booleans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.network import Layer
from whet.tactics.cpu._llvm.builder import BIT, FLOAT, HALF, INT8, INT16, INT32, INT64, Function, Type, Value
from whet.tactics.cpu._llvm.math import Math


@dataclass(frozen=True)
class Storage:
    """How an element type is stored and computed: the type in memory, the one in registers, the conversions to and from registers."""

    memory: Type
    register: Type
    load: str = ""
    store: str = ""


STORAGES = {
    "f32": Storage(FLOAT, FLOAT),
    "f16": Storage(HALF, FLOAT, "fpext", "fptrunc"),
    "i64": Storage(INT64, INT64),
    "i32": Storage(INT32, INT32),
    "i16": Storage(INT16, INT32, "sext", "trunc"),
    "u16": Storage(INT16, INT32, "zext", "trunc"),
    "i8": Storage(INT8, INT32, "sext", "trunc"),
    "u8": Storage(INT8, INT32, "zext", "trunc"),
    "bool": Storage(INT8, BIT, "bool", "zext"),
}
_BOUNDS = {"i8": (-128, 127), "u8": (0, 255), "i16": (-32768, 32767), "u16": (0, 65535)}

Attrs = Mapping[str, Any]
Emit = Callable[["Emitter", Attrs, list[Any]], Value]


class Emitter:
    """Emits elementwise ops into a function."""

    def __init__(self, f: Function) -> None:
        self.f, self.math = f, Math(f)

    def number(self, x: Value, number: float) -> Value:
        return self.f.value(number, x.type)

    def to_register(self, value: Value, dtype: str) -> Value:
        """A value as it is in memory, converted for registers. Loads and stores of bf16 convert."""
        if dtype == "bf16":
            return value
        storage = STORAGES[dtype]
        if storage.load == "bool":
            return value.differs(0)
        return value.convert(storage.load, storage.register) if storage.load else value

    def to_memory(self, value: Value, dtype: str) -> Value:
        if dtype == "bf16":
            return value
        storage = STORAGES[dtype]
        return value.convert(storage.store, storage.memory) if storage.store else value

    def cast(self, x: Value, to: str) -> Value:
        """As NumPy converts: floats are truncated, nonzero values and NaN are true."""
        f, source, target = self.f, x.type.element, STORAGES[to].register
        if to == "bool":
            if source == "float":
                return f.emit(Type("i1", x.lanes), f"fcmp une {x}, {self.number(x, 0.0).name}", x)
            return x if source == "i1" else x.differs(0)
        if target == FLOAT:
            return x if source == "float" else x.convert("uitofp" if source == "i1" else "sitofp", FLOAT)
        if source == "float":
            x = x.convert("fptosi", INT64 if target == INT64 else INT32)
        elif source != target.element:
            opcode = "zext" if source == "i1" else "sext" if target == INT64 else "trunc"
            x = x.convert(opcode, target)
        storage = STORAGES[to]
        return x.convert("trunc", storage.memory).convert(storage.load, INT32) if storage.store else x  # wraps like the type

    def quantize(self, x: Value, scale: Value, zero: Value | None, to: str) -> Value:
        """round(x / scale) + zero point, saturated; NaN gives 0."""
        f, (low, high) = self.f, _BOUNDS[to]
        y = f.math("rint", x / scale)
        if zero is not None:
            y = y + zero.convert("sitofp", FLOAT)
        y = f.select(y.is_nan(), self.number(y, 0.0), y)
        y = f.select(y < float(low), self.number(y, float(low)), y)
        return f.select(y > float(high), self.number(y, float(high)), y).convert("fptosi", INT32)


def _compare(relation: Callable[[Value, Value], Value]) -> Emit:
    return lambda e, a, v: relation(v[0], v[1])


def _clip(e: Emitter, attrs: Attrs, v: list[Any]) -> Value:
    x: Value = v[0]
    for bound, limit in zip(v[1:], (e.math.maximum, e.math.minimum), strict=False):
        x = x if bound is None else limit(x, bound)
    return x


def _fold(combine: Callable[[Emitter, Value, Value], Value]) -> Emit:
    def emit(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
        y = v[0]
        for x in v[1:]:
            y = combine(e, y, x)
        return y

    return emit


def _emit_gelu(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    (x,) = v
    if attrs.get("approximate", "none") == "tanh":
        inner = (x + x * x * x * 0.044715) * 0.7978845608028654
        return x * 0.5 * (e.math.tanh(inner) + 1.0)
    return x * 0.5 * (e.math.erf(x * 0.7071067811865476) + 1.0)


def _sign(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    (x,) = v
    one, minus = (e.number(x, -n if x.type.element != "float" else -float(n)) for n in (-1, 1))
    return e.f.select(x > 0, one, e.f.select(x < 0, minus, x))


def _emit_abs(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    (x,) = v
    return e.f.math("fabs", x) if x.type.element == "float" else e.f.select(x < 0, 0 - x, x)


def _emit_pow(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    x, exponent = v[0], attrs["exponent"]
    if exponent is None:
        return e.f.call_per_lane("powf", x, v[1])
    if abs(exponent) == 0.5:
        y = e.f.math("sqrt", x)
    else:
        y = e.math.power(x, int(abs(exponent)))
    return e.number(x, 1.0) / y if exponent < 0 else y


def _divide_integers(e: Emitter, a: Value, b: Value) -> tuple[Value, Value]:
    """(quotient, remainder) truncated to zero; both are 0 for the divisor 0, and the highest negative number over -1 wraps: neither traps."""
    f = e.f
    zero, minus = b.equals(0), b.equals(-1)
    divisor = f.select(zero | minus, e.number(b, 1), b)
    quotient = f.emit(a.type, f"sdiv {a}, {divisor.name}", a, divisor)
    remainder = f.emit(a.type, f"srem {a}, {divisor.name}", a, divisor)
    return f.select(zero, e.number(a, 0), f.select(minus, 0 - a, quotient)), remainder


def _emit_div(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    a, b = v
    return a / b if a.type.is_float else _divide_integers(e, a, b)[0]


def _emit_mod(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    a, b = v
    remainder = e.f.call_per_lane("fmodf", a, b) if a.type.is_float else _divide_integers(e, a, b)[1]
    if attrs["fmod"]:
        return remainder
    zero = e.number(a, 0)
    other_sign = remainder.differs(zero) & ((remainder < zero) ^ (b < zero))
    return e.f.select(other_sign, remainder + b, remainder)


def _emit_shrink(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    (x,), bias, bound = v, attrs["bias"], attrs["lambd"]
    return e.f.select(x < -bound, x + bias, e.f.select(x > bound, x - bias, e.number(x, 0.0)))


def _make_lane_emitter(name: str) -> Emit:
    return lambda e, a, v: e.f.call_per_lane(name, v[0])


def _is_inf(e: Emitter, attrs: Attrs, v: list[Value]) -> Value:
    (x,) = v
    signs = [s for s, key in ((float("inf"), "detect_positive"), (float("-inf"), "detect_negative")) if attrs[key]]
    found = [x.equals(e.number(x, s)) for s in signs] or [x.differs(x)]
    return found[0] if len(found) == 1 else found[0] | found[1]


OPERATIONS: dict[str, Emit] = {
    "Abs": _emit_abs,
    "Acos": _make_lane_emitter("acosf"),
    "Acosh": _make_lane_emitter("acoshf"),
    "Add": lambda e, a, v: v[0] + v[1],
    "And": lambda e, a, v: v[0] & v[1],
    "BitwiseAnd": lambda e, a, v: v[0] & v[1],
    "BitwiseNot": lambda e, a, v: v[0] ^ -1,
    "BitwiseOr": lambda e, a, v: v[0] | v[1],
    "BitwiseXor": lambda e, a, v: v[0] ^ v[1],
    "Cast": lambda e, a, v: e.cast(v[0], a["to"]),
    "Asin": _make_lane_emitter("asinf"),
    "Asinh": _make_lane_emitter("asinhf"),
    "Atan": _make_lane_emitter("atanf"),
    "Atanh": _make_lane_emitter("atanhf"),
    "Ceil": lambda e, a, v: e.f.math("ceil", v[0]),
    "Celu": lambda e, a, v: e.f.select(v[0] < 0.0, e.math.expm1(v[0] / a["alpha"]) * a["alpha"], v[0]),
    "Clip": _clip,
    "Cos": _make_lane_emitter("cosf"),
    "Cosh": _make_lane_emitter("coshf"),
    "Div": _emit_div,
    "Elu": lambda e, a, v: e.f.select(v[0] < 0.0, e.math.expm1(v[0]) * a["alpha"], v[0]),
    "Equal": _compare(lambda x, y: x.equals(y)),
    "Erf": lambda e, a, v: e.math.erf(v[0]),
    "Exp": lambda e, a, v: e.math.exp(v[0]),
    "Expand": lambda e, a, v: v[0],
    "Floor": lambda e, a, v: e.f.math("floor", v[0]),
    "Gelu": _emit_gelu,
    "Greater": _compare(lambda x, y: x > y),
    "GreaterOrEqual": _compare(lambda x, y: x >= y),
    "HardSigmoid": lambda e, a, v: e.math.clamp(v[0] * a["alpha"] + a["beta"], 0.0, 1.0),
    "HardSwish": lambda e, a, v: v[0] * e.math.clamp(v[0] * (1 / 6) + 0.5, 0.0, 1.0),
    "IsInf": _is_inf,
    "IsNaN": lambda e, a, v: v[0].is_nan(),
    "LeakyRelu": lambda e, a, v: e.f.select(v[0] < 0.0, v[0] * a["alpha"], v[0]),
    "Less": _compare(lambda x, y: x < y),
    "LessOrEqual": _compare(lambda x, y: y >= x),
    "Log": lambda e, a, v: e.math.log(v[0]),
    "Max": _fold(lambda e, x, y: e.math.maximum(x, y)),
    "Mean": lambda e, a, v: _fold(lambda e, x, y: x + y)(e, a, v) / float(len(v)),
    "Min": _fold(lambda e, x, y: e.math.minimum(x, y)),
    "Mish": lambda e, a, v: v[0] * e.math.tanh(e.math.softplus(v[0])),
    "Mod": _emit_mod,
    "Mul": lambda e, a, v: v[0] * v[1],
    "Neg": lambda e, a, v: -v[0] if v[0].type.element == "float" else 0 - v[0],
    "Not": lambda e, a, v: v[0] ^ 1,
    "Or": lambda e, a, v: v[0] | v[1],
    "PRelu": lambda e, a, v: e.f.select(v[0] >= 0.0, v[0], v[0] * v[1]),
    "Pow": _emit_pow,
    "Reciprocal": lambda e, a, v: e.number(v[0], 1.0) / v[0],
    "Relu": lambda e, a, v: e.f.select(v[0] < e.number(v[0], 0), e.number(v[0], 0), v[0]),
    "Round": lambda e, a, v: e.f.math("rint", v[0]),
    "Selu": lambda e, a, v: e.f.select(v[0] < 0.0, e.math.expm1(v[0]) * (a["alpha"] * a["gamma"]), v[0] * a["gamma"]),
    "Shrink": _emit_shrink,
    "Sigmoid": lambda e, a, v: e.math.sigmoid(v[0]),
    "Sign": _sign,
    "Sin": _make_lane_emitter("sinf"),
    "Sinh": _make_lane_emitter("sinhf"),
    "Softplus": lambda e, a, v: e.math.softplus(v[0]),
    "Softsign": lambda e, a, v: v[0] / (e.f.math("fabs", v[0]) + 1.0),
    "Sqrt": lambda e, a, v: e.f.math("sqrt", v[0]),
    "Sub": lambda e, a, v: v[0] - v[1],
    "Sum": _fold(lambda e, x, y: x + y),
    "Swish": lambda e, a, v: v[0] * e.math.sigmoid(v[0] * a["alpha"]),
    "Tan": _make_lane_emitter("tanf"),
    "Tanh": lambda e, a, v: e.math.tanh(v[0]),
    "ThresholdedRelu": lambda e, a, v: e.f.select(v[0] > a["alpha"], v[0], e.number(v[0], 0.0)),
    "Where": lambda e, a, v: e.f.select(v[0], v[1], v[2]),
    "Xor": lambda e, a, v: v[0] ^ v[1],
    "QuantizeLinear": lambda e, a, v: e.quantize(v[0], v[1], v[2] if len(v) > 2 else None, a["to"]),
    "DequantizeLinear": lambda e, a, v: (v[0] if len(v) < 3 else v[0] - v[2]).convert("sitofp", FLOAT) * v[1],
}
_INTEGERS = {
    "Abs", "Add", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Clip", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "Max", "Min", "Mod", "Mul", "Neg", "Relu", "Sign", "Sub", "Sum",
}  # fmt: skip
_ANY = {"Cast", "Where", "Expand"}
_BOOLEANS = {"And", "Or", "Xor", "Not", "Equal"}
_ONLY_INTEGERS = {"BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"}
_MAX_POWER = 8


def why_not_elementwise(layer: Layer) -> str | None:
    """The reason why an elementwise layer cannot be emitted, or None."""
    if layer.op not in OPERATIONS:
        return f"computes elementwise ops, not {layer.op}"
    tensors = [t for t in (*layer.inputs, *layer.outputs) if t is not None]
    if layer.op == "Expand":
        tensors = [layer.needs(0), layer.outputs[0]]
    if other := next((t.dtype for t in tensors if t.dtype.name not in STORAGES), None):
        return f"has no kernel for {other}"
    x = layer.needs(0).dtype
    if layer.op in ("QuantizeLinear", "DequantizeLinear"):
        return _quantize_refusal(layer)
    if layer.op == "Pow":
        return None if layer.needs(0).dtype.name == layer.needs(1).dtype.name == "f32" else "computes powers in f32"
    if x.name == "f16" and layer.op != "Cast":
        return "computes in f32"
    if layer.op == "Cast" and not layer.attrs.get("saturate", 1):
        return None
    if layer.op in _ANY or (x.name == "bool" and layer.op in _BOOLEANS):
        return None
    if layer.op in _ONLY_INTEGERS and x.name in ("f32", "bool"):
        return f"computes {layer.op} of integers, not {x}"
    if x.name == "f32":
        return f"{layer.op} takes booleans" if layer.op in _BOOLEANS - {"Equal"} else None
    return None if layer.op in _INTEGERS and x.name != "bool" else f"computes {layer.op} in f32, not {x}"


def _quantize_refusal(layer: Layer) -> str | None:
    if layer.attrs["block_size"]:
        return "takes one scale, or one per entry of an axis"
    integers = layer.outputs[0].dtype if layer.op == "QuantizeLinear" else layer.needs(0).dtype
    floats = layer.needs(0).dtype if layer.op == "QuantizeLinear" else layer.outputs[0].dtype
    if floats.name != "f32" or layer.needs(1).dtype.name != "f32":
        return f"computes in f32, not {floats}"
    if integers.name not in _BOUNDS and (layer.op == "QuantizeLinear" or integers.name != "i32"):
        return f"has no kernel for {integers}"
    return None


def find_exponent(layer: Layer) -> float | None:
    """The exponent of a Pow if it is a constant and the power is a few products or a root."""
    exponent = layer.needs(1)
    if layer.needs(0).dtype.name != "f32" or not exponent.is_constant or exponent.array().size != 1 or exponent.type.rank > layer.needs(0).type.rank:
        return None
    value = float(exponent.array().reshape(()))
    if value == 0.5 or (value == int(value) and value != 0 and abs(value) <= _MAX_POWER):
        return value
    return None


def read_attributes(layer: Layer) -> tuple[tuple[str, Any], ...]:
    """The attributes that `OPERATIONS` reads, hashable."""
    if layer.op == "Pow":
        return (("exponent", find_exponent(layer)),)
    if layer.op in ("Cast", "QuantizeLinear"):
        return (("to", layer.outputs[0].dtype.name),)
    return tuple(sorted((k, v) for k, v in layer.attrs.items() if isinstance(v, int | float | str)))


def list_read_inputs(layer: Layer) -> Sequence[int]:
    """The inputs that the kernel reads."""
    if layer.op == "Expand" or (layer.op == "Pow" and find_exponent(layer) is not None):
        return (0,)
    return range(len(layer.inputs))
