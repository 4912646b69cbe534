"""Pruning recipes: kept channels by group and removed branches, as JSON that can be edited and applied to other weights.

Masks (fixed zeros such as 2:4 patterns) are boolean tensors in an accompanying safetensors file: `model.recipe.json` and
`model.recipe.safetensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import PruneError
from whet.files import read_json_text, replace_atomically
from whet.network import Network, Origin, Weight
from whet.pruning.coupling import Group, find_group, groups, list_groups_for
from whet.pruning.cut import Kept, cut
from whet.pruning.order import check_order, note
from whet.pruning.permute import reorder

FORMAT, VERSION = "whet.pruning.recipe", 3  # 1 had no branches and no masks, 2 no orders; both are read, and 2 is written without orders


@dataclass(frozen=True)
class Entry:
    """One group: its original size, its layers (informative), and the kept channels."""

    size: int
    layers: tuple[str, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """Kept channels by group name and removed branches; `about` is free-form data on their selection.

    `masks` are bool arrays by weight name with the shapes after the cut: False for a fixed zero. `orders` are permutations of groups (the old
    index of each channel), to be made after the cut and before the masks.
    """

    groups: Mapping[str, Entry]
    about: Mapping[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def kept(self) -> dict[str, np.ndarray]:
        """The argument for cut()."""
        return {name: np.array(e.kept, np.int64) for name, e in self.groups.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        entries = [{"name": n, "size": e.size, "layers": list(e.layers), "kept": list(e.kept)} for n, e in self.groups.items()]
        masks = {name: list(m.shape) for name, m in self.masks.items()}
        orders = {"orders": {name: list(order) for name, order in self.orders.items()}} if self.orders else {}
        version = VERSION if orders else 2
        data = {"format": FORMAT, "version": version, "about": dict(self.about), "groups": entries, "removed": list(self.removed), **orders}
        return {**data, "masks": masks} if masks else data


def make_pruning_recipe(
    net: Network,
    kept_channels: Kept,
    *,
    about: Mapping[str, Any] | None = None,
    channel_groups: Sequence[Group] | None = None,
    removed: Sequence[str] = (),
    masks: Mapping[str, np.ndarray] | None = None,
) -> Recipe:
    """The recipe of a selection for `net`. Raises PruneError for an unknown group."""
    known = list(channel_groups) if channel_groups is not None else list_groups_for(net, kept_channels)
    entries = {}
    for name, at in kept_channels.items():
        g = find_group(known, name)
        entries[name] = Entry(g.size, g.layers, tuple(int(k) for k in at))
    return Recipe(entries, dict(about or {}), tuple(removed), dict(masks or {}))


def apply_recipe(net: Network, recipe: Recipe, *, insist: bool = False, name: str = "") -> Network:
    """Applies the recipe to `net` (`name`: its name in the record).

    Raises PruneError when the groups differ from the recipe's, or the order of steps is wrong (unless `insist`).
    """
    check_order(net, "prune", insist)
    known = list_groups_for(net, recipe.groups)
    for name, e in recipe.groups.items():
        g = find_group(known, name)
        if g.size != e.size:
            raise PruneError(
                f"group {name!r} has {g.size} channels here, {e.size} in the recipe: it was made for another width. Choose again."
            )
    made = _apply_masks(_reorder(cut(net, recipe.kept(), known, removed=recipe.removed), recipe.orders), recipe.masks)
    if recipe.groups or recipe.removed:
        note(made, "prune", **({"recipe": name} if name else {}), about=dict(recipe.about))
    return made


def _reorder(net: Network, orders: Mapping[str, tuple[int, ...]]) -> Network:
    """`net` with its channels in the recipe's orders."""
    if not orders:
        return net
    known = groups(net)
    for name, order in orders.items():
        if (size := find_group(known, name).size) != len(order):
            raise PruneError(f"group {name!r} has {size} channels here, {len(order)} in the recipe's order: it was made for another width")
    return reorder(net, {name: np.array(order, np.int64) for name, order in orders.items()}, known)


def _apply_masks(net: Network, masks: Mapping[str, np.ndarray]) -> Network:
    """Zeroes masked weights of `net` in place."""
    for name, mask in masks.items():
        t = net.constants.get(name)
        if t is None or t.shape != mask.shape:
            raise PruneError(f"the recipe masks {name!r} of shape {list(mask.shape)}, the network has {t and t.type}: it is of another model")
        t.weight = Weight(np.where(mask, t.array(), 0).astype(t.dtype.numpy), Origin("source", name))
    return net


def parse_recipe(data: Any) -> Recipe:
    """Parses a recipe from JSON data. Raises PruneError describing the defect."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        other = " (in the folder that whet auto deploys it is pruning.json)" if isinstance(data, dict) and "pruning" in data else ""
        raise PruneError(f"this is not a pruning recipe: its 'format' is not {FORMAT!r}{other}")
    if data.get("version") not in range(1, VERSION + 1):
        raise PruneError(f"the recipe has version {data.get('version')!r}; this whet reads versions 1 to {VERSION}")
    groups, entries = data.get("groups", []), {}
    if not isinstance(groups, list):
        raise PruneError("'groups' of the recipe must be a list: 'name', 'size' and 'kept' of each")
    for one in groups:
        try:
            name, size, kept = str(one["name"]), one["size"], tuple(one["kept"])
            layers = tuple(str(n) for n in one.get("layers", ()))
        except (TypeError, KeyError, AttributeError) as e:
            raise PruneError(f"a group of the recipe needs 'name', 'size' and 'kept': {str(one)[:120]}") from e
        if not isinstance(size, int) or not all(isinstance(k, int) and not isinstance(k, bool) and 0 <= k < size for k in kept):
            raise PruneError(f"group {name!r} of the recipe: 'kept' must be integers from 0 to below 'size'")
        if name in entries:
            raise PruneError(f"the recipe names group {name!r} twice: remove one entry")
        entries[name] = Entry(size, layers, kept)
    removed = data.get("removed", [])
    if not isinstance(removed, list) or not all(isinstance(n, str) for n in removed):
        raise PruneError("'removed' of the recipe must be a list of branch names")
    orders = data.get("orders", {})
    if not isinstance(orders, dict) or not all(isinstance(o, list) and _is_permutation(o) for o in orders.values()):
        raise PruneError("'orders' of the recipe must have a permutation of 0 to size - 1 for each group")
    about = data.get("about") or {}
    if not isinstance(about, dict):
        raise PruneError("'about' of the recipe must be an object")
    return Recipe(entries, about, tuple(removed), orders={name: tuple(order) for name, order in orders.items()})


def _is_permutation(order: list[Any]) -> bool:
    return all(isinstance(i, int) and not isinstance(i, bool) for i in order) and sorted(order) == list(range(len(order)))


def save_recipe(recipe: Recipe, path: str | os.PathLike) -> Path:
    """Writes the recipe as JSON. Raises PruneError when the file cannot be written."""
    if recipe.masks:
        _write(_get_masks_path(path), _import_safetensors().save({n: np.ascontiguousarray(m, bool) for n, m in recipe.masks.items()}))
    return _write(path, (json.dumps(recipe.to_json(), indent=1) + "\n").encode())


def load_recipe(path: str | os.PathLike) -> Recipe:
    """Reads a recipe. Raises PruneError for a missing file, invalid JSON, or another format."""
    try:
        data = json.loads(read_json_text(path))
    except OSError as e:
        raise PruneError(f"cannot read {path}: {e.strerror}. Check the path.") from e
    except (ValueError, RecursionError) as e:
        raise PruneError(f"{path} is not JSON: {e}") from e
    try:
        recipe = parse_recipe(data)
    except PruneError as e:
        raise PruneError(f"{path}: {e}") from None
    if not data.get("masks"):
        return recipe
    library = _import_safetensors()
    try:
        masks = library.load_file(_get_masks_path(path))
    except (OSError, ValueError, _get_safetensors_error()) as e:
        raise PruneError(f"the recipe's masks cannot be read from {_get_masks_path(path)}: {e}. Keep both files together.") from e
    if {n: list(m.shape) for n, m in masks.items()} != data["masks"]:
        raise PruneError(f"{_get_masks_path(path)} does not hold the masks that {path} names: keep both files together")
    return replace(recipe, masks=masks)


def save_weights(net: Network, path: str | os.PathLike) -> Path:
    """Writes the source weights as safetensors under their model names, loadable as the state dict of a module with the smaller widths.
    Raises PruneError when the file cannot be written, or without safetensors."""
    arrays = {n: np.ascontiguousarray(t.array()) for n, t in net.constants.items() if t.dtype.is_float and t.type.rank}
    return _write(path, _import_safetensors().save(arrays))


def _write(path: str | os.PathLike, data: bytes) -> Path:
    """Writes a file atomically. Raises PruneError when it cannot be written."""
    try:
        with replace_atomically(path) as part:
            part.write_bytes(data)
    except OSError as e:
        raise PruneError(f"cannot write {path}: {e.strerror}. Free some space, or check that the folder exists and is writable.") from e
    return Path(path)


def _get_safetensors_error() -> type[Exception]:
    from safetensors import SafetensorError

    return SafetensorError


def _get_masks_path(path: str | os.PathLike) -> Path:
    return Path(path).with_suffix(".safetensors")


def must_have_safetensors() -> None:
    """Raises PruneError early when safetensors is missing."""
    _import_safetensors()


def _import_safetensors():
    """Imports safetensors. Raises PruneError without it."""
    try:
        import safetensors.numpy
    except ImportError as e:
        raise PruneError("masks and weights are stored as safetensors: pip install safetensors (it comes with whet[train])") from e
    return safetensors.numpy
