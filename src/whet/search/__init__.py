"""The automated search for the best model on a machine: prune, recover, build and measure until the target is met. `whet auto` runs it.

    from whet.search import load_recipe, search
    result = search(load_recipe("recipe.yaml"))
    result.met, result.folder.deploy
"""

from __future__ import annotations

from typing import Any

from whet.registry import on_demand

_HOME = {
    "AutoRecipe": "whet.search.recipe.recipe",
    "Candidate": "whet.search.recipe.space",
    "SearchResult": "whet.search.outcome.result",
    "dry_run": "whet.search.loop",
    "load_recipe": "whet.search.recipe.recipe",
    "rebuild": "whet.search.outcome.rebuild",
    "recipe_from": "whet.search.recipe.recipe",
    "search": "whet.search.loop",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
