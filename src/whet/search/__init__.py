"""The automated search for the best model on a machine: prune, recover, build and measure until the target is met. `whet auto` runs it.

    from whet.search import load_recipe, search
    result = search(load_recipe("recipe.yaml"))
    result.met, result.folder.deploy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.registry import import_on_demand

if TYPE_CHECKING:
    from whet.search.loop import dry_run as dry_run
    from whet.search.loop import search as search
    from whet.search.outcome.rebuild import rebuild as rebuild
    from whet.search.outcome.result import SearchResult as SearchResult
    from whet.search.recipe.recipe import AutoRecipe as AutoRecipe
    from whet.search.recipe.recipe import load_recipe as load_recipe
    from whet.search.recipe.recipe import recipe_from as recipe_from
    from whet.search.recipe.space import Candidate as Candidate

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

if not TYPE_CHECKING:  # where it is defined, type checkers take every name for Any

    def __getattr__(name: str) -> Any:
        return import_on_demand(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
