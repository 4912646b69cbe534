"""Puts a mutant into the imported package: into the code of functions that exist, or into a module that is not imported yet.

As a pytest plugin (`-p mutated`, with WHET_MUTANT naming a file of one drawn mutant) it changes the module when that is imported.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mutation_plan import Mutant, from_data

ROOT = Path(__file__).parents[2]
_SHAPE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount", "co_kwonlyargcount", "co_posonlyargcount")
_FUNCTION = 1  # CO_OPTIMIZED: bodies of classes and modules do not have it


def changed_functions(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The code objects of functions that differ, and all within them; None if code differs that runs at import."""
    if old.co_flags & _FUNCTION:
        return [] if _same(old, new) else list(_within(old, new))
    if not _same_here(old, new):
        return None
    found: list[tuple[CodeType, CodeType]] = []
    for a, b in zip(_nested(old), _nested(new), strict=True):
        inner = changed_functions(a, b)
        if inner is None:
            return None
        found += inner
    return found


def _nested(code: CodeType) -> list[CodeType]:
    return [c for c in code.co_consts if isinstance(c, CodeType)]


def _same_here(a: CodeType, b: CodeType) -> bool:
    """True if two code objects are equal except for line numbers and the code objects in them."""
    if any(getattr(a, k) != getattr(b, k) for k in _SHAPE) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(_same_constant(x, y) for x, y in zip(a.co_consts, b.co_consts, strict=True))


def _same_constant(x: object, y: object) -> bool:
    if isinstance(x, CodeType) or isinstance(x, frozenset):
        return type(x) is type(y) and (isinstance(x, CodeType) or x == y)
    return type(x) is type(y) and repr(x) == repr(y)  # 0.0 is not -0.0


def _same(a: CodeType, b: CodeType) -> bool:
    return _same_here(a, b) and all(_same(x, y) for x, y in zip(_nested(a), _nested(b), strict=True))


def _within(a: CodeType, b: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield a, b
    if len(_nested(a)) == len(_nested(b)):
        for x, y in zip(_nested(a), _nested(b), strict=True):
            yield from _within(x, y)


def _key(code: CodeType) -> tuple[str, str, int]:
    return _real_path(code.co_filename), code.co_name, code.co_firstlineno


@cache
def _real_path(name: str) -> str:
    return os.path.realpath(name)


def existing_functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """The package's functions, methods and closures in this process, by file, name and line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and "src/whet/" in thing.__code__.co_filename:
            found.setdefault(_key(thing.__code__), []).append(thing)
    return found


def replace_code(mutant: Mutant, functions: dict[tuple[str, str, int], list[FunctionType]]) -> bool:
    """Gives existing functions the mutant's code. False, with nothing changed, if the mutant changes more than functions that exist."""
    path = ROOT / mutant.module
    source = path.read_text()
    old = compile(source, str(path), "exec", dont_inherit=True)
    pairs = changed_functions(old, compile(mutant.apply(source), str(path), "exec", dont_inherit=True))
    if not pairs or not functions.get(_key(pairs[0][0])):
        return False
    targets = [(f, new) for a, new in pairs for f in functions.get(_key(a), [])]
    if any(len(f.__code__.co_freevars) != len(new.co_freevars) for f, new in targets):
        return False
    for f, new in targets:
        f.__code__ = new
    return True


class _MutatedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from changed source, past its bytecode file."""

    def __init__(self, name: str, path: str, source: str):
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class MutatedFinder(importlib.abc.MetaPathFinder):
    """Finds the mutated module before anyone else does."""

    def __init__(self, mutant: Mutant):
        path = ROOT / mutant.module
        words = Path(mutant.module).with_suffix("").parts[1:]
        self.name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        self.path, self.source = str(path), mutant.apply(path.read_text())

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        package = [str(Path(self.path).parent)] if self.path.endswith("__init__.py") else None
        loader = _MutatedLoader(fullname, self.path, self.source)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader, submodule_search_locations=package)


if os.environ.get("WHET_MUTANT"):
    (_mutant,) = from_data([json.loads(Path(os.environ["WHET_MUTANT"]).read_text())])
    sys.meta_path.insert(0, MutatedFinder(_mutant))
