"""Keys of timings: everything that can change how long a kernel takes, and nothing that cannot.

A key does not hold a layer's name, its sources or its weights' values, so a pruned or fine-tuned variant finds what is unchanged.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.network.text import value_text
from whet.tactics import Config, Signature, Tactic

_SMALL_FLOATS, _SMALL_INTS = 4, 64  # constants up to this size stand in the key with their values: bounds, scales, axes


def layer_text(layer: Layer) -> str:
    """Op, attributes, fused body, shapes and types of a layer, with tensors numbered: equal work gives equal text."""
    numbers: dict[Tensor, int] = {}
    scales, zeros = _inputs_of_rounding(layer, 1), _inputs_of_rounding(layer, 2)

    def shown(i: int, t: Tensor | None) -> str:
        if i in zeros and t is not None and t.weight is not None and _inner(t.weight.array):
            return f"{_operand(t, numbers, values=False)} inside"
        return _operand(t, numbers, values=i not in scales)

    return "\n".join(_lines(layer, numbers, "(" + ", ".join(shown(i, t) for i, t in enumerate(layer.inputs)) + ")"))


def _inputs_of_rounding(layer: Layer, place: int) -> set[int]:
    """Inputs that are scales (place 1) or zero points (2) of integers. No kernel's time depends on a scale's value; on a zero point's only by
    whether there is one, and whether it is the integer at an end, which saves a bound."""
    if layer.op in ("QuantizeLinear", "DequantizeLinear"):
        return {place}
    if layer.op != "Fused":
        return set()
    body = layer.regions["body"]
    rounding = [x for x in body.layers if x.op in ("QuantizeLinear", "DequantizeLinear")]
    used = {x.inputs[place] for x in rounding if len(x.inputs) > place and x.inputs[place] is not None}
    return {i for i, t in enumerate(body.inputs) if t in used}


def _inner(zeros: np.ndarray) -> bool:
    """Whether zero points of 8 bits are neither 0 nor at an end of their type."""
    return zeros.dtype.kind in "iu" and not np.any(np.isin(zeros, (0, np.iinfo(zeros.dtype).min, np.iinfo(zeros.dtype).max)))


def _lines(layer: Layer, numbers: dict[Tensor, int], head: str) -> list[str]:
    attrs = " ".join(f"{k}={value_text(v)}" for k, v in sorted(layer.attrs.items()))
    outs = ", ".join(f"{t.type}" for t in layer.outputs)
    lines = [f"{layer.op} {head} [{attrs}] -> {outs}"]
    for name, region in sorted(layer.regions.items()):
        lines.append(f"region {name}")
        lines.extend("  " + line for line in _region(region, dict(numbers)))
    for t in layer.outputs:
        numbers[t] = len(numbers)
    return lines


def _region(net: Network, numbers: dict[Tensor, int]) -> list[str]:
    lines = ["in " + ", ".join(_operand(t, numbers) for t in net.inputs)]
    for layer in net.layers:
        lines.extend(_lines(layer, numbers, "(" + ", ".join(_operand(t, numbers) for t in layer.inputs) + ")"))
    lines.append("out " + ", ".join(_operand(t, numbers) for t in net.outputs))
    return lines


def _operand(t: Tensor | None, numbers: dict[Tensor, int], *, values: bool = True) -> str:
    if t is None:
        return "none"
    known = t in numbers
    number = numbers.setdefault(t, len(numbers))
    if known:
        return f"%{number}"
    text = f"%{number}:{t.type}"
    if t.weight is None:
        return text
    if not values:
        return f"{text} const"
    a = t.weight.array
    small = a.size <= (_SMALL_INTS if a.dtype.kind in "iub" else _SMALL_FLOATS)
    shown = f"={np.array2string(a.reshape(-1), threshold=_SMALL_INTS, floatmode='unique')}" if small else ""
    assumes = f" {sorted(t.weight.origin.assumes)}" if t.weight.origin.assumes else ""
    return f"{text} const{shown}{assumes}"


def timing_key(tactic: Tactic, layer: str, signature: Signature, config: Config, machine_key: str, state: str) -> str:
    """SHA-256 over everything that a timing depends on. `layer` is layer_text(); `state` says in which cache state it was timed."""
    parts = [
        tactic.name,
        tactic.version,
        source_digest(tactic),
        tactic.library_version(),
        str(signature),
        [list(c) for c in config],
        layer,
        machine_key,
        state,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def source_digest(tactic: Tactic) -> str:
    """SHA-256 over the source files that a tactic is made of: its module and what that imports of whet's tactics and backends, and the
    kernel texts (.cu, .cuh) in the folders of those modules."""
    return _digest(type(tactic).__module__)


@cache
def _digest(module: str) -> str:
    h, folders = hashlib.sha256(), set()
    for name in sorted(transitive_modules(module)):
        path = _file(name)
        if path is not None:
            h.update(f"{name} {_content(path)}\0".encode())
            folders.add(path.parent)
    for path in sorted({p for folder in folders for p in folder.glob("*.cu*")}):
        h.update(f"{path.name} {_content(path)}\0".encode())
    return h.hexdigest()


@cache
def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def transitive_modules(module: str) -> set[str]:
    """`module` and the modules under whet.tactics and whet.backends that it imports, directly or not; packages' data stays out."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in found or path is None:
            continue
        found.add(name)
        waiting.extend(_imports(path))
    return found


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The names under whet.tactics and whet.backends that a source file imports: modules, and what may be modules."""
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:  # statements alone: expressions, which are most of a tree, import nothing
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += (node.module, *(f"{node.module}.{a.name}" for a in node.names))
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            waiting += inner if isinstance(inner, list) else ()
    return tuple(n for n in found if n.startswith(("whet.tactics.", "whet.backends.")))


def _file(module: str) -> Path | None:
    """The source file of a module, without importing it; None when there is none of that name."""
    root = Path(sys.modules["whet"].__path__[0])
    path = root.joinpath(*module.split(".")[1:])
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None
