"""Reads plain data (YAML, JSON) into frozen dataclasses. Every error names the key; for an unknown key it suggests the nearest known one.

A field's reader is in its metadata: `key(kind, ...)`, where `read_value(value, where)` returns the value or raises UsageError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from whet.errors import UsageError
from whet.registry import suggest_name

T = TypeVar("T")
Kind = Callable[[Any, str], Any]
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_MS = {"": 1.0, "ms": 1.0, "us": 1e-3, "s": 1e3}
_BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_MJ = {"": 1.0, "mj": 1.0, "j": 1e3, "uj": 1e-3}
_RATE = {"": 1.0, "/s": 1.0}


@dataclass(frozen=True)
class Amount:
    """A value in base units, or (`relative`) a multiple of the original's value."""

    value: float
    relative: bool = False

    def of(self, original: float | None) -> float | None:
        """The absolute value; None if it is relative to a missing measurement."""
        if not self.relative:
            return self.value
        return None if original is None else self.value * original

    def to_plain(self) -> Any:
        """Plain data that `amount` reads back."""
        return f"{self.value:g}x" if self.relative else self.value


def make_field(kind: Kind, default: Any = dataclasses.MISSING, factory: Any = dataclasses.MISSING) -> Any:
    """A dataclass field read by `kind`."""
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata={"kind": kind})
    return dataclasses.field(default=default, metadata={"kind": kind})


def read(cls: type[T], data: Any, where: str = "") -> T:
    """Reads `cls` from a mapping. Raises UsageError naming the key that is unknown (with the nearest known one), missing, or has a bad value."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{where or 'the recipe'}: expected keys with values, not {_format_value(data)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # type[T] cannot say that T is a dataclass
    for name in data:
        if name not in fields:
            raise UsageError(f"unknown key '{_join_names(where, str(name))}'.{suggest_name(str(name), fields)} Known keys: {', '.join(fields)}.")
    values = {}
    for name, f in fields.items():
        at = _join_names(where, name)
        if name in data:
            values[name] = f.metadata["kind"](data[name], at)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UsageError(f"the key '{at}' is missing")
    return cls(**values)


def make_section_reader(cls: type[T], off: Any = dataclasses.MISSING) -> Kind:
    """Reader of a mapping with the keys of `cls`; if `off` is given, `false` reads as `off` and `true` as the defaults."""

    def read_value(value: Any, where: str) -> Any:
        if off is not dataclasses.MISSING and isinstance(value, bool):
            return read(cls, {}, where) if value else off
        return read(cls, {} if value is None else value, where)

    return read_value


def read_string(value: Any, where: str) -> str:
    """Reads a non-empty string."""
    if callable(value):
        raise UsageError(f"'{where}': a function is given as python:MODULE:FUNCTION, since trials run in child processes; put it into a module")
    if not isinstance(value, str) or not value:
        raise UsageError(f"'{where}' is a string, not {_format_value(value)}")
    if "\0" in value:
        raise UsageError(f"'{where}' has a null character, which no path or name can have")
    return value


def flag(value: Any, where: str) -> bool:
    """Reads true or false."""
    if not isinstance(value, bool):
        raise UsageError(f"'{where}' is true or false, not {_format_value(value)}")
    return value


def make_choice_reader(*choices: str) -> Kind:
    """Reader of one of `choices`; the error suggests the nearest."""

    def read_value(value: Any, where: str) -> str:
        if value not in choices:
            raise UsageError(f"'{where}' is one of {', '.join(choices)}, not {_format_value(value)}.{suggest_name(str(value), choices)}")
        return str(value)

    return read_value


def make_integer_reader(low: int) -> Kind:
    """Reader of an integer of at least `low`."""

    def read_value(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UsageError(f"'{where}' is an integer of at least {low}, not {_format_value(value)}")
        return value

    return read_value


def make_number_reader(low: float, high: float = float("inf"), *, open_low: bool = False) -> Kind:
    """Reader of a number from `low` to `high`; with `open_low` strictly above `low`."""

    def read_value(value: Any, where: str) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high and not (open_low and value == low)
        if not good:
            limit = "" if high == float("inf") else f" and at most {high:g}"
            raise UsageError(f"'{where}' is a number {'above' if open_low else 'of at least'} {low:g}{limit}, not {_format_value(value)}")
        return float(value)

    return read_value


def make_list_reader(kind: Kind) -> Kind:
    """Reader of a list of distinct values; a single value counts as a list of one."""

    def read_values(value: Any, where: str) -> tuple:
        values = value if isinstance(value, list | tuple) else [value]
        parsed = tuple(kind(v, f"{where}[{i}]" if len(values) > 1 else where) for i, v in enumerate(values))
        if not parsed or len(set(parsed)) != len(parsed):
            raise UsageError(f"'{where}' is a list of different values, at least one, not {_format_value(value)}")
        return parsed

    return read_values


def make_amount_reader(units: Mapping[str, float], subject: str, *, relative: bool = True) -> Kind:
    """Reader of a number with a unit of `units` (factor to the base unit), or of `0.5x`, a multiple of the original's value."""

    def read_value(value: Any, where: str) -> Amount:
        match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-zA-Z/]*)\s*", str(value)) if not isinstance(value, bool) else None
        unit = match[2].lower() if match else ""
        if match and unit == "x" and relative:
            result = Amount(float(match[1]), True)
        elif match and unit in units:
            result = Amount(float(match[1]) * units[unit])
        else:
            raise UsageError(f"'{where}' is {subject}, not {_format_value(value)}")
        if result.value <= 0:
            raise UsageError(f"'{where}' is above zero, not {_format_value(value)}")
        return result

    return read_value


def read_shapes(value: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Reads shapes by input name: `1x3x224x224` or a list."""
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f"'{where}' is shapes by input name, such as `input: 1x3x224x224`, not {_format_value(value)}")
    result = {}
    for name, shape in value.items():
        dims = str(shape).split("x") if isinstance(shape, str | int) else list(shape) if isinstance(shape, list | tuple) else []
        if not dims or not all(str(d).isdigit() and int(d) > 0 for d in dims):
            raise UsageError(f"'{where}.{name}' is a shape such as 1x3x224x224, not {_format_value(shape)}")
        result[str(name)] = tuple(int(d) for d in dims)
    return result


def read_seconds(value: Any, where: str) -> float:
    """Reads a time such as `90`, `90 s`, `15 min`, `2 h` in seconds."""
    return make_amount_reader(_SECONDS, "a time such as 90 s, 15 min or 2 h", relative=False)(value, where).value


latency = make_amount_reader(_MS, "a time such as 3 ms, or a multiple of the original's such as 0.5x")
throughput = make_amount_reader(_RATE, "samples per second such as 200, or a multiple of the original's such as 2x")
size = make_amount_reader(_BYTES, "a size such as 5 MiB, or a multiple of the original's such as 0.5x")
energy = make_amount_reader(_MJ, "an energy such as 10 mJ, or a multiple of the original's such as 0.5x")


def _join_names(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _format_value(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:80]
