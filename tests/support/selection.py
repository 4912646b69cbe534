"""A part of long lists of similar cases runs in `make test`; `make test-long` runs the others."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import pytest


def with_long_variants(cases: Sequence[Any], kind: Callable[[Any], Hashable] | None = None, *, every: int = 3) -> list[Any]:
    """The cases as parameters; those that are not the first of their `kind` are marked `slow`. Without `kind`, each `every`-th one is unmarked.

    A case is a tuple of arguments, or one argument.
    """
    seen: set[Hashable] = set()
    out = []
    for i, case in enumerate(cases):
        key = i // every if kind is None else kind(case)
        arguments = case if isinstance(case, tuple) else (case,)
        out.append(pytest.param(*arguments, marks=[pytest.mark.slow] if key in seen else []))
        seen.add(key)
    return out


def with_slow_names(cases: Sequence[Any], slow: Collection[str]) -> list[Any]:
    """The cases as parameters; a case is marked slow if its name, the first argument, is in `slow`. A smaller network of the same layers is not."""
    arguments = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*a, marks=[pytest.mark.slow] if a[0] in slow else []) for a in arguments]
