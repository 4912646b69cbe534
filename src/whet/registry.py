"""Finding code by a name: files register themselves, packages import when a name is asked for, users' functions are python:MODULE:FUNCTION."""

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

OWN = "python:"  # how the name of a user's function begins


def load_folder(package: str, path: Iterable[str], *, deep: bool = True) -> None:
    """Imports every module of `package` and, when `deep`, of its sub-packages, except those whose name starts with `_`."""
    for m in sorted(iter_modules(list(path)), key=lambda m: m.name):
        if not m.name.startswith("_"):
            module = import_module(f"{package}.{m.name}")
            if m.ispkg and deep:
                load_folder(module.__name__, module.__path__)


def on_demand(package: str, homes: Mapping[str, str], name: str) -> Any:
    """The answer of a package's `__getattr__`: `name` from the module that `homes` has for it, or the sub-module `name`, imported now.

    Raises AttributeError with the nearest of the package's names.
    """
    if name not in homes:
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}.{nearest(name, homes)} It has {', '.join(homes)}.")
    module = import_module(homes[name])
    return module if homes[name] == f"{package}.{name}" else getattr(module, name)


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'x'?` or an empty string."""
    close = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def own_function(source: str, what: str = "") -> Callable[..., Any]:
    """The function that `python:MODULE:FUNCTION` names; modules in the working folder are found too. `what` (a flag, a key) leads in errors.

    Raises UsageError for another text, a module or function that is not there, or something that cannot be called.
    """
    lead = f"{what}: " if what else ""
    parts = source.split(":")
    if len(parts) != 3 or parts[0] + ":" != OWN or not all(parts):
        raise UsageError(f"{lead}{source} is not python:MODULE:FUNCTION")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(parts[1]), parts[2])
    except (ImportError, AttributeError) as e:
        raise UsageError(f"{lead}{source}: {e}. The module is looked for in the working folder and where Python looks.") from e
    if not callable(found):
        raise UsageError(f"{lead}{source} cannot be called: it is {type(found).__name__}, and a function is needed")
    return found
