"""A recipe: which channels of which groups were kept, as JSON that can be read, edited and applied to other weights of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import PruneError
from whet.network import Network
from whet.pruning.coupling import Group, find_group, groups
from whet.pruning.cut import Kept, cut

FORMAT, VERSION = "whet.pruning.recipe", 1


@dataclass(frozen=True)
class Entry:
    """One group: its size before, its layers (for people), and the channels that stay."""

    size: int
    layers: tuple[str, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """Kept channels by group name; `about` says how they were chosen, in the chooser's own words."""

    groups: Mapping[str, Entry]
    about: Mapping[str, Any] = field(default_factory=dict)

    def kept(self) -> dict[str, np.ndarray]:
        """What cut() takes."""
        return {name: np.array(e.kept, np.int64) for name, e in self.groups.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        entries = [{"name": n, "size": e.size, "layers": list(e.layers), "kept": list(e.kept)} for n, e in self.groups.items()]
        return {"format": FORMAT, "version": VERSION, "about": dict(self.about), "groups": entries}


def recipe_of(net: Network, kept: Kept, *, about: Mapping[str, Any] | None = None, found: Sequence[Group] | None = None) -> Recipe:
    """The recipe of a choice for `net`. Raises PruneError for a group that is not there."""
    known = list(found) if found is not None else groups(net)
    entries = {}
    for name, at in kept.items():
        g = find_group(known, name)
        entries[name] = Entry(g.size, g.layers, tuple(int(k) for k in at))
    return Recipe(entries, dict(about or {}))


def apply_recipe(net: Network, recipe: Recipe) -> Network:
    """`net` cut as the recipe says. Raises PruneError where its groups are not those the recipe was made for."""
    known = groups(net)
    for name, e in recipe.groups.items():
        g = find_group(known, name)
        if g.size != e.size:
            raise PruneError(
                f"group {name!r} has {g.size} channels here, {e.size} in the recipe: it was made for another width. Choose again."
            )
    return cut(net, recipe.kept(), known)


def recipe_from_json(data: Any) -> Recipe:
    """The recipe in parsed JSON. Raises PruneError that says what is wrong with it."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PruneError(f"this is no pruning recipe: its 'format' is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise PruneError(f"the recipe has version {data.get('version')!r}; this whet reads version {VERSION}")
    entries = {}
    for one in data.get("groups", []):
        try:
            name, size, kept = str(one["name"]), one["size"], tuple(one["kept"])
            layers = tuple(str(n) for n in one.get("layers", ()))
        except (TypeError, KeyError, AttributeError) as e:
            raise PruneError(f"a group of the recipe needs 'name', 'size' and 'kept': {str(one)[:120]}") from e
        if not isinstance(size, int) or not all(isinstance(k, int) and not isinstance(k, bool) and 0 <= k < size for k in kept):
            raise PruneError(f"group {name!r} of the recipe: 'kept' must be whole numbers from 0 to below 'size'")
        entries[name] = Entry(size, layers, kept)
    return Recipe(entries, data.get("about") or {})


def save_recipe(recipe: Recipe, path: str | os.PathLike) -> Path:
    """Writes the recipe as JSON. Raises PruneError when the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(recipe.to_json(), indent=1) + "\n")
    except OSError as e:
        raise PruneError(f"cannot write {path}: {e.strerror}. Check that the folder exists and can be written.") from e
    return Path(path)


def load_recipe(path: str | os.PathLike) -> Recipe:
    """Reads a recipe. Raises PruneError for a file that is missing, no JSON, or no recipe."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as e:
        raise PruneError(f"cannot read {path}: {e.strerror}. Check the path.") from e
    except (ValueError, RecursionError) as e:
        raise PruneError(f"{path} is no JSON: {e}") from e
    return recipe_from_json(data)
