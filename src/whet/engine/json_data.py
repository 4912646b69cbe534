"""Canonical JSON of an engine file: writing it, and reading it with every key, type and range checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from whet.errors import EngineError

LARGEST = 1 << 62  # bytes, offsets
_DEEPEST = 24  # nesting levels of unstructured data


def to_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, no NaN."""
    return _dump(to_json_data(value))


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def to_json_data(value: Any) -> Any:
    """Dataclasses, tuples and NumPy scalars as JSON data; non-finite numbers become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json_data({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(k): to_json_data(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [to_json_data(v) for v in items]
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "item") and not isinstance(value, float):  # NumPy scalars
        return to_json_data(value.item())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


def from_json(data: memoryview, subject: str) -> Any:
    """Parses JSON data without duplicate keys or NaN. Raises EngineError."""

    def make_dict(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            raise EngineError(f"{subject}: it has a duplicate key")
        return made

    def refuse_constant(name: str) -> float:
        raise EngineError(f"{subject}: {name} is not allowed as a number")

    text = bytes(data)
    try:
        parsed = json.loads(text, object_pairs_hook=make_dict, parse_constant=refuse_constant)
        again = _dump(parsed)
    except (ValueError, RecursionError, MemoryError) as e:
        raise EngineError(f"{subject} cannot be read: {str(e)[:200]}") from e
    if again != text:
        raise EngineError(f"{subject} is not in canonical form: sorted keys, no spaces, numbers in their shortest form")
    return parsed


class Reader:
    """A value of parsed JSON with its path, for error messages."""

    __slots__ = ("key", "parent", "value")

    def __init__(self, value: Any, key: Any, parent: Reader | None = None):
        self.value, self.key, self.parent = value, key, parent

    @property
    def path(self) -> str:
        """`info.report.candidates['conv1'][3]`: built only for error messages."""
        if self.parent is None:
            return str(self.key)
        if isinstance(self.key, str) and self.key.isidentifier():
            return f"{self.parent.path}.{self.key}"
        return f"{self.parent.path}[{self.key if isinstance(self.key, int) else repr(self.key[:60])}]"

    def fail(self, expected: str) -> EngineError:
        return EngineError(f"{self.path} should be {expected}, it is {str(self.value)[:60]!r}: the engine is damaged or inconsistent")

    def object(self, *keys: str) -> Reader:
        """Checks that this is an object with exactly these keys."""
        if not isinstance(self.value, dict) or (keys and set(self.value) != set(keys)):
            raise self.fail(f"an object with {', '.join(keys)}" if keys else "an object")
        return self

    def __getitem__(self, key: str) -> Reader:
        return Reader(self.value[key], key, self)

    def items(self) -> list[tuple[str, Reader]]:
        self.object()
        return [(k, Reader(v, k, self)) for k, v in self.value.items()]

    def rows(self, length: int | None = None) -> list[Reader]:
        if not isinstance(self.value, list) or (length is not None and len(self.value) != length):
            raise self.fail("a list" if length is None else f"a list of {length}")
        return [Reader(v, i, self) for i, v in enumerate(self.value)]

    def integer(self, low: int = 0, high: int = LARGEST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.fail(f"an integer from {low} to {high}")
        return self.value

    def text(self, longest: int = 1 << 16) -> str:
        if not isinstance(self.value, str) or len(self.value) > longest:
            raise self.fail(f"text of at most {longest} characters")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not abs(self.value) < 1e300:
            raise self.fail("a number")
        return float(self.value)

    def free(self) -> dict[str, Any]:
        """An object of any content, at most 24 levels deep."""
        level = [self.object().value]
        for _ in range(_DEEPEST):
            level = [v for x in level for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, dict | list)]
        if level:
            raise self.fail(f"data of at most {_DEEPEST} levels")
        return self.value

    def optional(self, read: Callable[[Reader], Any]) -> Any:
        return None if self.value is None else read(self)
