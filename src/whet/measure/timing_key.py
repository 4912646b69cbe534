"""Keys of times: everything that can change the time of a kernel, and nothing else.

A key omits a layer's name, its sources and its weights' values, so that a pruned or fine-tuned variant finds the times of unchanged layers.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.network.text import format_value
from whet.tactics import Config, Signature, Tactic

_SMALL_FLOATS, _SMALL_INTS = 4, 64  # the key has the values of constants up to this size: bounds, scales, axes


def format_layer_text(layer: Layer) -> str:
    """Op, attributes, fused body, shapes and types of a layer, with tensors numbered: equal work gives equal text."""
    numbers: dict[Tensor, int] = {}
    scales, zeros = _find_quantization_inputs(layer, 1), _find_quantization_inputs(layer, 2)

    def format_input(i: int, t: Tensor | None) -> str:
        if i in zeros and t is not None and t.weight is not None and _is_inner(t.weight.array):
            return f"{_format_operand(t, numbers, values=False)} inside"
        return _format_operand(t, numbers, values=i not in scales)

    return "\n".join(_format_lines(layer, numbers, "(" + ", ".join(format_input(i, t) for i, t in enumerate(layer.inputs)) + ")"))


def _find_quantization_inputs(layer: Layer, position: int) -> set[int]:
    """Inputs that are scales (position 1) or zero points (2) of Q/DQ layers. No kernel's time depends on a scale's value, or on a zero point's
    except that it is 0 or an extreme of its type, which saves a clamp."""
    if layer.op in ("QuantizeLinear", "DequantizeLinear"):
        return {position}
    if layer.op != "Fused":
        return set()
    body = layer.regions["body"]
    rounding = [x for x in body.layers if x.op in ("QuantizeLinear", "DequantizeLinear")]
    used = {x.inputs[position] for x in rounding if len(x.inputs) > position and x.inputs[position] is not None}
    return {i for i, t in enumerate(body.inputs) if t in used}


def _is_inner(zeros: np.ndarray) -> bool:
    """True if zero points are neither 0 nor an extreme of their type."""
    return zeros.dtype.kind in "iu" and not np.any(np.isin(zeros, (0, np.iinfo(zeros.dtype).min, np.iinfo(zeros.dtype).max)))


def _format_lines(layer: Layer, numbers: dict[Tensor, int], head: str) -> list[str]:
    attrs = " ".join(f"{k}={format_value(v)}" for k, v in sorted(layer.attrs.items()))
    outs = ", ".join(f"{t.type}" for t in layer.outputs)
    lines = [f"{layer.op} {head} [{attrs}] -> {outs}"]
    for name, region in sorted(layer.regions.items()):
        lines.append(f"region {name}")
        lines.extend("  " + line for line in _format_region(region, dict(numbers)))
    for t in layer.outputs:
        numbers[t] = len(numbers)
    return lines


def _format_region(net: Network, numbers: dict[Tensor, int]) -> list[str]:
    lines = ["in " + ", ".join(_format_operand(t, numbers) for t in net.inputs)]
    for layer in net.layers:
        lines.extend(_format_lines(layer, numbers, "(" + ", ".join(_format_operand(t, numbers) for t in layer.inputs) + ")"))
    lines.append("out " + ", ".join(_format_operand(t, numbers) for t in net.outputs))
    return lines


def _format_operand(t: Tensor | None, numbers: dict[Tensor, int], *, values: bool = True) -> str:
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


def make_timing_key(tactic: Tactic, layer: str, signature: Signature, config: Config, machine_key: str, state: str) -> str:
    """SHA-256 over everything that a timing depends on. `layer` is format_layer_text(); `state` is the state of the caches."""
    parts = [
        tactic.name,
        tactic.version,
        compute_source_digest(tactic),
        tactic.library_version(),
        str(signature),
        [list(c) for c in config],
        layer,
        machine_key,
        state,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def compute_source_digest(tactic: Tactic) -> str:
    """SHA-256 over the source files of a tactic: its module, the modules it imports from whet.tactics and whet.backends (a plugin's: from its own
    package too), and the kernel sources (.cu, .cuh) in the folders of these modules."""
    return compute_digest(tactic.source_modules())


@cache
def compute_digest(modules: tuple[str, ...]) -> str:
    """The digest of the source files of modules, of all modules that these import, and of the kernels beside them."""
    h, folders = hashlib.sha256(), set()
    for name in sorted({name for module in modules for name in find_transitive_modules(module)}):
        path = _find_file(name)
        if path is not None:
            h.update(f"{name} {read_content(path)}\0".encode())
            folders.add(path.parent)
    for path in sorted({p for folder in folders for p in folder.glob("*.cu*")}):
        h.update(f"{path.name} {read_content(path)}\0".encode())
    return h.hexdigest()


@cache
def read_content(path: Path) -> str:
    """A file's digest."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]+)|import[ \t]+([^\n]+))", re.MULTILINE)
_COMMENT = re.compile(r"#[^\n]*")


def find_transitive_modules(module: str) -> set[str]:
    """`module` and the modules under whet.tactics, whet.backends and, outside whet, its own package that it imports, directly or indirectly."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _find_file(name)
        if name in found or path is None:
            continue
        found.add(name)
        waiting.extend(list_imports(path, name.partition(".")[0]))
    return found


@cache
def list_imports(path: Path, package: str) -> tuple[str, ...]:
    """The names under whet.tactics, whet.backends and (if it is not whet) `package` imported by a source file: modules, and attributes that may be
    modules."""
    found: list[str] = []
    for source, names, plain in _IMPORT.findall(_COMMENT.sub("", path.read_text(encoding="utf-8"))):  # a parser takes five times as long
        listed = [n.split()[0] for n in (names or plain).strip("()").split(",") if n.strip()]
        found += [source, *(f"{source}.{n}" for n in listed)] if source else listed
    own = () if package == "whet" else (f"{package}.",)
    return tuple(n for n in found if n.startswith(("whet.tactics.", "whet.backends.", *own)))


def _find_file(module: str) -> Path | None:
    """The source file of a module, without importing it; None if there is none. A module outside a package (a script) has its own file."""
    top, *rest = module.split(".")
    package = sys.modules.get(top)
    if package is None or not hasattr(package, "__path__"):
        source = getattr(package, "__file__", None)
        return Path(source) if source and not rest else None
    return _find_in(next(iter(package.__path__)), tuple(rest))


@cache
def _find_in(folder: str, names: tuple[str, ...]) -> Path | None:
    path = Path(folder, *names)
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None
