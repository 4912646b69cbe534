"""Damaged JSON: a document with one value removed or replaced by an invalid one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

WRONG = [None, True, 3, -1, 1.5, "x", "", [], {}, [[1]], [None], {"a": 1}, 10**30, float("nan")]
_AHEAD = 2  # damaged items per list; the others have the same structure


def damaged(document: Any, every: int = 1) -> Iterator[tuple[str, Any]]:
    """(description, damaged copy) of each `every`-th case."""
    cases = (case for place in _places(document) for case in ([(place, _DROPPED)] if place else []) + [(place, v) for v in WRONG])
    for i, (place, value) in enumerate(cases):
        if i % every == 0:
            where = "/".join(map(str, place))
            yield (f"{where} dropped" if value is _DROPPED else f"{where} = {value!r}"), _with(document, place, value)


_DROPPED = object()


def _places(document: Any, place: tuple = ()) -> Iterator[tuple]:
    yield place
    if isinstance(document, dict):
        for k in document:
            yield from _places(document[k], (*place, k))
    elif isinstance(document, list):
        for i, item in enumerate(document[:_AHEAD]):
            yield from _places(item, (*place, i))


def _with(document: Any, place: tuple, value: Any) -> Any:
    if not place:
        return value
    made = copy.deepcopy(document)
    at = made
    for k in place[:-1]:
        at = at[k]
    if value is _DROPPED:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return made
