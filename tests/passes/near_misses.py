"""Networks that differ in one place from those of the golden cases: another attribute, operand, constant or op, one more reader or output."""

from __future__ import annotations

import re
from collections.abc import Iterator

LAYER = re.compile(r"^(?P<outs>%\S[^=]*?) = (?P<op>[\w.]+)\((?P<args>.*)\)(?P<rest>.*)$")
CONSTANT = re.compile(r"^const (?P<name>%\S+): (?P<type>\S+) = \[(?P<values>[^\]]*)\](?P<rest>.*)$")
#: ops with the same operands and the same shape of the result
SIBLINGS = {
    "Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "Relu": "Neg", "Sigmoid": "Tanh", "Tanh": "Sigmoid", "Erf": "Tanh", "Sqrt": "Abs",
    "Softmax": "LogSoftmax", "MaxPool": "AveragePool", "AveragePool": "MaxPool", "ReduceMean": "ReduceSum", "ReduceSum": "ReduceMean", "Max": "Min",
    "Min": "Max", "Less": "Greater", "Greater": "Less", "And": "Or", "Or": "And", "Exp": "Abs", "Neg": "Abs", "Pow": "Mul",
    "GlobalAveragePool": "GlobalMaxPool", "GlobalMaxPool": "GlobalAveragePool", "HardSigmoid": "Sigmoid", "Reciprocal": "Neg", "Softplus": "Tanh",
}  # fmt: skip


def list_edits(text: str) -> Iterator[tuple[str, str]]:
    """Texts of networks that differ from `text` in one place, each after a description of the difference."""
    lines = [re.sub(r"^(%\S+): \S+ = ", r"\1 = ", x) for x in text.splitlines() if not x.startswith("#")]  # types follow from the layers
    outputs = {x.split()[1] for x in lines if x.startswith("out ")}
    for i, line in enumerate(lines):
        if c := CONSTANT.match(line):
            for where, values in _change_values(c["values"].split(",")):
                yield f"{c['name']} {where}", _join(lines, i, f"const {c['name']}: {c['type']} = [{values}]{c['rest']}")
        if not (m := LAYER.match(line)):
            continue
        outs = re.findall(r"%[^\s,:]+", m["outs"])
        for out in outs:
            if out not in outputs:
                yield f"out {out}", "\n".join([*lines, f"out {out}", ""])
                yield f"reader of {out}", "\n".join([*lines, f"%nm = Neg({out})", "out %nm", ""])
        args = _split(m["args"])
        tensors = [k for k, a in enumerate(args) if a.startswith("%")]
        if len(tensors) > 1:
            a, b = tensors[:2]
            swapped = [args[b] if k == a else args[a] if k == b else x for k, x in enumerate(args)]
            yield f"{outs[0]} swapped", _join(lines, i, _layer(m, swapped))
            yield f"{outs[0]} twice", _join(lines, i, _layer(m, [args[a] if k == b else x for k, x in enumerate(args)]))
            yield f"{outs[0]} shorter", _join(lines, i, _layer(m, [x for k, x in enumerate(args) if k != tensors[-1]]))
        for k in tensors:
            changed = [*lines[:i], f"%nm = Neg({args[k]})", _layer(m, [*args[:k], "%nm", *args[k + 1 :]]), *lines[i + 1 :], ""]
            yield f"{outs[0]} reads -{args[k]}", "\n".join(changed)
        if m["op"] in SIBLINGS:
            yield f"{outs[0]} is {SIBLINGS[m['op']]}", _join(lines, i, _layer(m, args, SIBLINGS[m["op"]]))
        for k, a in enumerate(args):
            key, equals, value = a.partition("=")
            if equals and not a.startswith("%"):
                for where, other in _change_attribute(value):
                    yield f"{outs[0]} {key} {where}", _join(lines, i, _layer(m, [*args[:k], f"{key}={other}", *args[k + 1 :]]))
                yield f"{outs[0]} no {key}", _join(lines, i, _layer(m, [*args[:k], *args[k + 1 :]]))


def _layer(m: re.Match[str], args: list[str], op: str = "") -> str:
    return f"{m['outs']} = {op or m['op']}({', '.join(args)}){m['rest']}"


def _join(lines: list[str], i: int, line: str) -> str:
    return "\n".join([*lines[:i], line, *lines[i + 1 :], ""])


def _split(text: str) -> list[str]:
    """Arguments at commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def _change_values(values: list[str]) -> Iterator[tuple[str, str]]:
    """The first, then the last value changed."""
    for k in sorted({0, len(values) - 1}):
        v = values[k].strip()
        other = {"True": "False", "False": "True"}.get(v) or _another(v)
        if other is not None:
            yield f"[{k}]={other}", ",".join([*values[:k], other, *values[k + 1 :]])


def _change_attribute(value: str) -> Iterator[tuple[str, str]]:
    inner = value.strip("[]()")
    if inner != value and inner:
        parts = inner.split(",")
        for k in sorted({0, len(parts) - 1}):
            if (other := _another(parts[k].strip())) is not None:
                yield f"[{k}]={other}", f"{value[0]}{','.join([*parts[:k], other, *parts[k + 1 :]])}{value[-1]}"
    elif (other := _another(value)) is not None:
        yield other, other


def _another(number: str) -> str | None:
    try:
        return str(int(number) + 1)
    except ValueError:
        try:
            return repr(float(number) * 2 + 1)
        except ValueError:
            return None
