"""The loop that finds the best model for a machine: search, prune, recover, build, measure, until the target is met. `whet auto` runs it.

    from whet.search import load_recipe, search
    found = search(load_recipe("recipe.yaml"))
    found.met, found.folder.deploy
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "AutoRecipe": "recipe",
    "Candidate": "space",
    "SearchResult": "loop",
    "dry_run": "loop",
    "load_recipe": "recipe",
    "recipe_from": "recipe",
    "search": "loop",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'whet.search' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
