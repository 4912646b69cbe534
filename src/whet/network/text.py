"""The text form of a network: one line per input, constant, layer and output; parsing it gives an equal network.

    network resnet source
    in %x: f32[N,3,8,8]
    const %w: f32[4,3,3,3] = seed(1)
    %y: f32[N,4,6,6] = Conv(%x, %w, pads=(0, 0, 0, 0)) from "conv1"
    out %y

Types after `:` are optional when parsing (they are inferred, and compared if given). A constant is a list, `seed(k)`
(normal numbers from that seed) or `sha256:...` (looked up in the arrays given to `parse_network`).
A layer with regions ends with `{`, then for each `region <name>` its lines, then `}`.
"""

from __future__ import annotations

import ast
import re
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from math import prod
from typing import Any

import numpy as np

from whet.errors import NetworkError
from whet.network.dims import Expr, parse_dim
from whet.network.network import Layer, Network, Tensor
from whet.network.types import DTYPES, DType, TensorType, parse_type, static_shape
from whet.network.weight import Weight

VERSION = 2
_NAME = r"[\w./:$#+-]*[\w./$#+-]"  # a name that needs no quotes; it does not end in ':', which precedes a type
_PLAIN = re.compile(_NAME)
_WORD, _OP = re.compile(r"\w+"), re.compile(r"\w+(\.\w+)*")  # ops of plugins are <domain>.<op>
_SEED, _VALUE, _NOT_FINITE = re.compile(r"\d{1,18}"), re.compile(r"[-+\w.]+"), re.compile(r"-?(?:inf|nan)")
_TYPE, _DIM = re.compile(r"\w+\[[^\]]*\]"), re.compile(r"<[^>]*>")
_QUOTED, _STRING = re.compile(r'"(?:[^"\\]|\\.)*"'), re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_SMALL = 16  # constants up to this many elements are written as lists


def format_network(net: Network, *, types: bool = True) -> str:
    """The text form; `types=False` omits the types of layer outputs."""
    return "\n".join([f"network {_quote(net.name)} {net.stage}", *_iterate_body_lines(net, types)]) + "\n"


def format_layer(layer: Layer, *, types: bool = True) -> str:
    """One layer's line(s)."""
    return "\n".join(_iterate_layer_lines(layer, types))


def format_value(v: Any) -> str:
    """An attribute's value: ints, floats, strings, bools, None, types, dims, tuples of them."""
    match v:
        case Expr():
            return f"<{v}>"
        case DType():
            return v.name
        case bool() | int() | str() | None:
            return repr(v)
        case float():
            return repr(v) if np.isfinite(v) else f"float({str(v)!r})"
        case tuple() | list():
            return "(" + ", ".join(format_value(x) for x in v) + ("," if len(v) == 1 else "") + ")"
        case np.generic():
            return format_value(v.item())
    raise NetworkError(f"an attribute cannot hold a {type(v).__name__}: {v!r}"[:200])


def _iterate_body_lines(net: Network, types: bool) -> Iterator[str]:
    for t in net.inputs:
        yield f"in %{_quote(t.name)}: {t.type}"
    for t in net.constants.values():
        yield f"const %{_quote(t.name)}: {t.type} = {_format_constant(t)}"
    for layer in net.layers:
        yield from _iterate_layer_lines(layer, types)
    for t in net.outputs:
        yield f"out %{_quote(t.name)}"


def _format_constant(t: Tensor) -> str:
    is_small = t.dtype.name in ("f32", "f64", "i64", "i32", "bool") and prod(static_shape(t.constant().type.shape)) <= _SMALL
    if is_small and not _has_other_nan(a := t.array()):  # only the array of a small one is read: others may not be computed yet
        return "[" + ", ".join(format_value(v) for v in a.reshape(-1).tolist()) + "]"
    return f"sha256:{t.weight.digest}" if t.weight else ""


def _has_other_nan(a: np.ndarray) -> bool:
    """True for a NaN with a sign or payload, which its text `nan` would lose: sqrt(-1) gives one on x86."""
    nan = np.isnan(a) if a.dtype.kind == "f" else np.False_
    return bool(nan.any()) and a[nan].tobytes() != np.full(int(nan.sum()), np.nan, a.dtype).tobytes()


def _iterate_layer_lines(layer: Layer, types: bool) -> Iterator[str]:
    outs = ", ".join(f"%{_quote(t.name)}" + (f": {t.type}" if types else "") for t in layer.outputs)
    args = ["none" if t is None else f"%{_quote(t.name)}" for t in layer.inputs]
    args += [f"{k}={format_value(v)}" for k, v in sorted(layer.attrs.items())]
    line = f"{outs} = {layer.op}({', '.join(args)})"
    if not (len(layer.outputs) == 1 and layer.outputs[0].name == layer.name):
        line += f" named {_quote(layer.name)}"
    if layer.sources:
        line += " from " + ", ".join(f'"{_escape(s)}"' for s in layer.sources)
    if not layer.regions:
        yield line
        return
    yield line + " {"
    for name, region in layer.regions.items():
        yield f"  region {name}"
        for inner in _iterate_body_lines(region, types):
            yield f"    {inner}"
    yield "}"


def _quote(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f'"{_escape(name)}"'


def _escape(s: str) -> str:
    return s.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# reading


def parse_value(text: str) -> Any:
    """Parses an attribute value written by `format_value`. Raises NetworkError."""
    s = _Scanner(text, 1)
    value = s.value()
    s.end()
    return value


def parse_network(text: str, arrays: Mapping[str, np.ndarray | Weight] | None = None) -> Network:
    """Reads the text form back. `arrays` maps "sha256:..." or constant names to values.

    Raises NetworkError naming the line.
    """
    lines = deque((i + 1, line.strip()) for i, line in enumerate(text.split("\n")) if line.strip() and not line.strip().startswith("#"))
    name, stage = "network", "source"
    if lines and lines[0][1].startswith("network "):
        s = _Scanner(lines[0][1][8:], lines[0][0])
        name, stage = s.name(), s.word()
        lines.popleft()
    net = Network(name, stage)
    rest = _read_body(net, lines, {}, arrays or {})
    if rest:
        raise NetworkError(f"line {rest[0][0]}: unexpected {rest[0][1]!r}")
    return net


def _read_body(net: Network, lines: deque, outer: MutableMapping[str, Tensor], arrays, arguments: Sequence[Tensor | None] = ()) -> deque:
    """Reads the lines of a network or region. `arguments` are the tensors that a fused body's inputs stand for: known sizes carry over."""
    known: ChainMap[str, Tensor] = ChainMap({}, outer)  # a region extends the outer names without copying them
    layer_names: set[str] = set()
    while lines:
        number, line = lines[0]
        if line == "}" or line.startswith("region "):
            return lines
        lines.popleft()
        s = _Scanner(line, number)
        try:
            if line.startswith("in %"):
                s.take("in")
                n = s.tensor_name()
                s.take(":")
                known[n] = net.add_input(n, s.type())
                argument = arguments[len(net.inputs) - 1] if len(net.inputs) <= len(arguments) else None
                if argument is not None and argument.type == known[n].type:
                    known[n].shape_value = argument.shape_value
            elif line.startswith("const %"):
                s.take("const")
                n = s.tensor_name()
                s.take(":")
                type_ = s.type()
                s.take("=")
                if n in known.maps[0]:
                    raise NetworkError(f"the name %{n} is given twice")
                known[n] = net.constant(_read_constant(s, n, type_, arrays), n)
                if known[n].type != type_:
                    raise NetworkError(f"%{n} is declared {type_} but its values are {known[n].type}")
            elif line.startswith("out %"):
                s.take("out")
                net.outputs.append(_find_tensor(known, s.tensor_name()))
            else:
                _read_layer(net, s, lines, known, layer_names, arrays)
            s.end()
        except NetworkError as e:
            raise e if str(e).startswith("line ") else NetworkError(f"line {number}: {e}") from e
    return lines


def _read_layer(net: Network, s: _Scanner, lines: deque, known: ChainMap[str, Tensor], layer_names: set[str], arrays) -> None:
    outs: list[tuple[str, TensorType | None]] = []
    while True:
        n = s.tensor_name()
        outs.append((n, s.type() if s.accept(":") else None))
        if not s.accept(","):
            break
    s.take("=")
    op = s.match(_OP, "an op")
    s.take("(")
    inputs: list[Tensor | None] = []
    attrs: dict[str, Any] = {}
    while not s.accept(")"):
        if s.peek() == "%":
            inputs.append(_find_tensor(known, s.tensor_name()))
        else:
            word = s.word()
            if word == "none" and s.peek() != "=":
                inputs.append(None)
            else:
                s.take("=")
                attrs[word] = s.value()
        s.accept(",")
    name = s.name() if s.accept("named ") else outs[0][0]
    sources = []
    if s.accept("from "):
        sources.append(s.string())
        while s.accept(","):
            sources.append(s.string())
    regions: dict[str, Network] = {}
    if s.accept("{"):
        while lines and lines[0][1] != "}":
            if not lines[0][1].startswith("region "):
                raise NetworkError(f"line {lines[0][0]}: expected 'region <name>' or '}}'")
            key = lines[0][1][7:].strip()
            regions[key] = Network(key, net.stage)
            lines.popleft()
            _read_body(regions[key], lines, known, arrays, inputs if op == "Fused" else ())
        if not lines:
            raise NetworkError("a '{' is never closed")
        lines.popleft()
    layer = net.add_layer(op, inputs, attrs, name=name, outputs=[o for o, _ in outs], regions=regions, sources=sources)
    if len(layer.outputs) != len(outs):
        raise NetworkError(f"{op} makes {len(layer.outputs)} outputs, {len(outs)} are named")
    if name in layer_names:
        raise NetworkError(f"two layers are called '{name}'")
    layer_names.add(name)
    layer.name = name  # a layer may be called like a tensor of another layer: their names are independent
    for (n, type_), t in zip(outs, layer.outputs, strict=True):
        if type_ is not None and type_ != t.type:
            raise NetworkError(f"%{n} is declared {type_}, but {op} makes {t.type}")
        t.name = n
        _define(known, t)
    net.reserve(name, *(n for n, _ in outs))


def _define(known: ChainMap[str, Tensor], t: Tensor) -> None:
    """Makes `t` known by its name. Raises NetworkError if the network or region has another tensor of that name."""
    if t.name in known.maps[0]:
        raise NetworkError(f"the name %{t.name} is given twice")
    known[t.name] = t


def _find_tensor(known: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in known:
        raise NetworkError(f"%{name} is used before it is computed")
    return known[name]


def _read_constant(s: _Scanner, name: str, type_: TensorType, arrays) -> np.ndarray | Weight:
    shape = tuple(int(d) for d in type_.shape if isinstance(d, int))
    if len(shape) != type_.rank or min(shape, default=0) < 0:
        raise NetworkError(f"constant %{name} needs a static shape, not {type_}")
    if s.accept("sha256:"):
        digest = "sha256:" + s.word()
        array = arrays.get(digest, arrays.get(name))
        if array is None:
            raise NetworkError(f"the values of %{name} ({digest[:19]}...) were not given")
        return array
    if s.accept("seed("):
        k = int(s.match(_SEED, "a whole number"))
        s.take(")")
        return np.random.default_rng(k).standard_normal(shape).astype(type_.dtype.numpy)
    values = s.value()
    if not isinstance(values, tuple) or len(values) != int(np.prod(shape, dtype=np.int64)):
        raise NetworkError(f"constant %{name} needs {int(np.prod(shape, dtype=np.int64))} values")
    try:
        return np.array(values, dtype=type_.dtype.numpy).reshape(shape)
    except (ValueError, TypeError, OverflowError) as e:
        raise NetworkError(f"constant %{name} has values that are not {type_.dtype}: {e}") from e


class _Scanner:
    """Reads one line from left to right."""

    def __init__(self, text: str, line: int):
        self.text, self.at, self.line = text, 0, line

    def fail(self, expected: str) -> NetworkError:
        return NetworkError(f"line {self.line}: expected {expected} at {self.text[self.at : self.at + 40]!r}")

    def skip(self) -> None:
        while self.text.startswith(" ", self.at):
            self.at += 1

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def accept(self, s: str) -> bool:
        if not self.text.startswith(s, self.at):
            self.skip()
            if not self.text.startswith(s, self.at):
                return False
        self.at += len(s)
        return True

    def take(self, s: str) -> None:
        if not self.accept(s):
            raise self.fail(repr(s))

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        self.skip()
        m = pattern.match(self.text, self.at)
        if not m:
            raise self.fail(expected)
        self.at = m.end()
        return m[0]

    def word(self) -> str:
        return self.match(_WORD, "a word")

    def name(self) -> str:
        return self.string() if self.peek() == '"' else self.match(_PLAIN, "a name")

    def string(self) -> str:
        raw = self.match(_QUOTED, "a quoted string")[1:-1]
        return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], raw)

    def tensor_name(self) -> str:
        self.take("%")
        return self.name()

    def type(self) -> TensorType:
        return parse_type(self.match(_TYPE, "a type such as f32[N,3]"))

    def value(self) -> Any:
        ch = self.peek()
        if ch in ("(", "["):
            close = ")" if ch == "(" else "]"
            self.take(ch)
            items = []
            while not self.accept(close):
                items.append(self.value())
                if not self.accept(","):
                    self.take(close)
                    break
            return tuple(items)
        if ch == "<":
            return parse_dim(self.match(_DIM, "a dimension")[1:-1])
        if ch in ("'", '"'):
            raw = self.match(_STRING, "a string")
            try:
                return ast.literal_eval(raw)
            except (SyntaxError, ValueError):  # a null byte, an unknown escape
                raise self.fail("a string") from None
        if self.accept("float('"):
            v = float(self.match(_NOT_FINITE, "inf or nan"))
            self.take("')")
            return v
        token = self.match(_VALUE, "a value")
        if token in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[token]
        if token in DTYPES:
            return DTYPES[token]
        try:
            return int(token)
        except ValueError:
            pass
        try:
            return float(token)
        except ValueError:
            raise self.fail("a value") from None

    def end(self) -> None:
        self.skip()
        if self.at != len(self.text):
            raise self.fail("the end of the line")
