"""The names of TensorRT's Python API: which are served, and why the others are not."""

from __future__ import annotations

import dis
import importlib
from collections.abc import Iterator

from whet.trt.refused import REFUSED


def coverage() -> dict[str, str]:
    """Prints and returns TensorRT's names, `Class.name` for members, with "served" or the reason for which they are not."""
    package = importlib.import_module("whet.trt")
    table: dict[str, str] = {}
    for name in package.__all__:
        table[name] = "served"
        found = getattr(package, name)
        if isinstance(found, type):
            table |= {f"{name}.{member}": "served" for member in _iterate_members(found)}
    table |= {name: f"not served: {why}" for name, why in REFUSED.items()}
    for name, state in sorted(table.items()):
        print(f"{name:60} {state}")
    return table


def _iterate_members(cls: type) -> Iterator[str]:
    """The public attributes of a class, and those that its methods give to instances."""
    for base in cls.__mro__:
        if base.__module__.startswith("whet."):
            for name, value in vars(base).items():
                if not name.startswith("_"):
                    yield name
                if code := getattr(value, "__code__", None):
                    stored = (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
                    yield from (n for n in stored if not n.startswith("_"))
