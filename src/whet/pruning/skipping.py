"""What is to stay whole, by the names that a user has for it."""

from __future__ import annotations

from collections.abc import Sequence

from whet.errors import PruneError
from whet.network import Network
from whet.pruning.coupling import groups
from whet.pruning.depth import branches
from whet.registry import nearest


def stay_whole(net: Network, skip: str | Sequence[str]) -> frozenset[str]:
    """The groups and branches that are meant: by their own names (`whet prune MODEL --list`), or by a layer that they cut or take out.

    Raises PruneError for a name that is none of these, with the nearest.
    """
    if not skip:
        return frozenset()
    skip = (skip,) if isinstance(skip, str) else skip
    meant: dict[str, set[str]] = {}
    parts = [*((g.name, g.layers) for g in groups(net)), *((b.name, b.layers) for b in branches(net))]
    for own, layers in parts:
        for name in (own, *layers):
            meant.setdefault(name, set()).add(own)
    for name in skip:
        if name not in meant:
            raise PruneError(f"nothing that could be cut is called {name!r}.{_near(name, meant, parts)} `whet prune MODEL --list` has the names.")
    return frozenset().union(*(meant[name] for name in skip))


def _near(name: str, known: dict[str, set[str]], parts: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """The nearest name; else those that hold the one given (`conv1` is part of many), else the first groups."""
    within = sorted(k for k in known if name and name in k)
    what, names = ("Names with it:", within) if within else ("The groups are", [own for own, _ in parts])
    return nearest(name, known) or (f" {what} {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}." if names else "")
