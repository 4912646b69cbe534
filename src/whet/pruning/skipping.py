"""Resolves user-given names of groups, branches or layers to exclude from pruning."""

from __future__ import annotations

from collections.abc import Sequence

from whet.errors import PruneError
from whet.network import Network
from whet.pruning.coupling import groups
from whet.pruning.depth import branches
from whet.registry import suggest_name


def resolve_skipped(net: Network, skip: str | Sequence[str], *, hidden: bool = False) -> frozenset[str]:
    """Names of the groups and branches to keep whole, given by their names (`whet prune MODEL --list`) or by a layer that they cut or remove.

    Raises PruneError for an unknown name, suggesting the nearest.
    """
    if not skip:
        return frozenset()
    skip = (skip,) if isinstance(skip, str) else skip
    targets: dict[str, set[str]] = {}
    parts = [*((g.name, g.layers) for g in groups(net, hidden=hidden)), *((b.name, b.layers) for b in branches(net))]
    for part, layers in parts:
        for name in (part, *layers):
            targets.setdefault(name, set()).add(part)
    for name in skip:
        if name not in targets:
            near = _suggest_name(name, targets, parts)
            raise PruneError(f"no prunable group, branch or layer is called {name!r}.{near} `whet prune MODEL --list` prints the names.")
    return frozenset().union(*(targets[name] for name in skip))


def _suggest_name(name: str, known: dict[str, set[str]], parts: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """The nearest name; else names that contain the given one (`conv1` is part of many), else the first groups."""
    within = sorted(k for k in known if name and name in k)
    label, names = ("Names that contain it:", within) if within else ("The groups are", [part for part, _ in parts])
    return suggest_name(name, known) or (f" {label} {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}." if names else "")
