"""Finds code by name: modules that register themselves, lazy imports of packages, and user functions as python:MODULE:FUNCTION."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from whet.errors import UsageError

PYTHON_PREFIX = "python:"  # of the name of a user function


def load_folder(package: str, path: Iterable[str], *, deep: bool = True) -> None:
    """Imports every module of `package` and, when `deep`, of its sub-packages, except names that start with `_`."""
    for m in sorted(iter_modules(list(path)), key=lambda m: m.name):
        if not m.name.startswith("_"):
            module = import_module(f"{package}.{m.name}")
            if m.ispkg and deep:
                load_folder(module.__name__, module.__path__)


def import_on_demand(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Implements a package's `__getattr__`: imports `name` from its module `homes[name]`, or the sub-module `name`.

    Raises AttributeError with the nearest of the package's names.
    """
    if name not in homes:
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}.{suggest_name(name, homes)} It has {', '.join(homes)}.")
    module = import_module(homes[name])
    return module if homes[name] == f"{package}.{name}" else getattr(module, name)


def suggest_name(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'x'?` or an empty string."""
    close = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def import_user_function(source: str, subject: str = "") -> Callable[..., Any]:
    """The function that `python:MODULE:FUNCTION` names, also from modules in the working folder. `subject` (a flag, a key) prefixes errors.

    Raises UsageError for another syntax, a missing module or function, or an object that is not callable.
    """
    prefix = f"{subject}: " if subject else ""
    parts = source.split(":")
    if len(parts) != 3 or parts[0] + ":" != PYTHON_PREFIX or not all(parts):
        raise UsageError(f"{prefix}{source} is not python:MODULE:FUNCTION")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(parts[1]), parts[2])
    except (ImportError, AttributeError) as e:
        raise UsageError(f"{prefix}{source}: {e}. Modules are searched in the working folder and on sys.path.") from e
    if not callable(function):
        raise UsageError(f"{prefix}{source} is not a function but of type {type(function).__name__}")
    return function
