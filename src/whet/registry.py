"""Loading a folder registers what is in it: one file, one thing, named after the file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules


def load_folder(package: str, path: Iterable[str]) -> None:
    """Imports every module of `package` whose name does not start with `_`."""
    for m in sorted(iter_modules(list(path)), key=lambda m: m.name):
        if not m.name.startswith("_"):
            import_module(f"{package}.{m.name}")


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'x'?` or an empty string."""
    close = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
