"""Typed records as JSON data and back: the types of a dataclass's fields are the schema.

A field's type is str, bool, int, float, a list, tuple, NamedTuple or dict (with text keys) of these, another dataclass, or a union of
scalars and None. Fields with their default value are not written; a field without a default is required. A `float` field has a
finite value; `float | None` is for values that may be missing or not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from whet.engine.json_data import LARGEST, Reader, to_json_data

LONGEST_TEXT = 1 << 26  # characters: the size of the largest section with records
_T = TypeVar("_T")
_Decode = Callable[[Reader], Any]


def encode(value: Any) -> Any:
    """A record, or a list or dict of records, as JSON data; fields with their default value are omitted."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(v) for f in fields(value) if (v := getattr(value, f.name)) != _get_default(f)}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    return to_json_data(value)


def decode(kind: type[_T], data: Reader) -> _T:
    """The value of type `kind` that `encode` wrote. Raises EngineError, with the path of the error, for any other data."""
    read: _Decode = _make_decoder(kind)  # type: ignore[arg-type]  # mypy: a class is hashable
    decoded: _T = read(data)
    return decoded


def _get_default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


@cache
def _make_decoder(kind: Any) -> _Decode:
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is list:
        item = _make_decoder(args[0])
        return lambda r: [item(x) for x in r.rows()]
    if origin is dict:
        item = _make_decoder(args[1])
        return lambda r: {k: item(v) for k, v in r.items()}
    if origin is tuple and args[-1] is Ellipsis:
        item = _make_decoder(args[0])
        return lambda r: tuple(item(x) for x in r.rows())
    if origin is tuple:
        items = [_make_decoder(a) for a in args]
        return lambda r: tuple(read(x) for read, x in zip(items, r.rows(len(items)), strict=True))
    if is_dataclass(kind):
        return _record(kind)
    named = [_make_decoder(t) for t in get_type_hints(kind).values()]  # a NamedTuple: a list of its fields' values
    return lambda r: kind(*(read(x) for read, x in zip(named, r.rows(len(named)), strict=True)))


def _union(kinds: tuple[Any, ...]) -> _Decode:
    others = {k: _make_decoder(k) for k in kinds if k is not NoneType}
    optional = len(others) < len(kinds)

    def read(r: Reader) -> Any:
        if r.value is None and optional:
            return None
        if len(others) == 1:
            return next(iter(others.values()))(r)
        if type(r.value) not in others:
            raise r.fail(" or ".join(k.__name__ for k in others))
        return others[type(r.value)](r)

    return read


def _record(kind: Any) -> _Decode:
    hints = get_type_hints(kind)
    known = {f.name: _make_decoder(hints[f.name]) for f in fields(kind)}
    required = [f.name for f in fields(kind) if _get_default(f) is MISSING]

    def read(r: Reader) -> Any:
        given = dict(r.items())
        if unknown := sorted(given.keys() - known.keys()):
            raise r.fail(f"an object without the unknown key {unknown[0][:60]!r}")
        if missing := [n for n in required if n not in given]:
            raise r.fail(f"an object with the key {missing[0]!r}")
        return kind(**{n: known[n](v) for n, v in given.items()})

    return read


_SCALARS: dict[Any, _Decode] = {
    str: lambda r: r.text(LONGEST_TEXT),
    bool: Reader.flag,
    int: lambda r: r.integer(-LARGEST),
    float: Reader.number,
}
