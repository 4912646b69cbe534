"""Packages outside whet that add ops and tactics: those registered in this process, those installed, and those that an engine needs.

An installed package names its module under the entry point group `whet.plugins`; it is imported when an op or the tactics of a backend are first
looked up. An engine file only names packages: whet imports none because a file asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whet.errors import EngineError, UsageError
from whet.forks import make_reentrant_lock

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "whet.plugins"


@dataclass
class PluginPackage:
    """A package with the names of its registered ops and tactics."""

    name: str
    version: str
    ops: list[str] = field(default_factory=list)
    tactics: list[str] = field(default_factory=list)


PACKAGES: dict[str, PluginPackage] = {}
"""Registered packages by name."""
FAILED: dict[str, str] = {}
"""Installed packages that could not be imported: entry point -> reason."""

_lock = make_reentrant_lock()
_loaded = False


def get_or_add_package(name: str, version: str) -> PluginPackage:
    """The registered package of this name, added if it is new. Raises UsageError if another version of it is registered already."""
    known = PACKAGES.setdefault(name, PluginPackage(name, version))
    if known.version != version:
        raise UsageError(f"the plugin package {name} registers ops as version {known.version} and as version {version}; give all of them one version")
    return known


def load_installed() -> None:
    """Imports the modules that installed packages name under `whet.plugins`, once a process. An entry point of a function is also called.

    A package that fails does not stop the others: its reason is kept in FAILED and shown where one of its ops is missing.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        _loaded = True  # before the imports: plugins look up ops themselves
        from importlib.metadata import entry_points  # takes 10 ms; most engines need no plugin

        for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
            _load(point)


def _load(point: EntryPoint) -> None:
    try:
        loaded = point.load()
        if callable(loaded):
            loaded()
    except Exception as e:  # noqa: BLE001 - code of others may raise anything; other plugins and all models without its ops still work
        FAILED[f"{point.name} = {point.value}"] = f"{type(e).__name__}: {e}"


def make_advice() -> str:
    """What to do about an op that no registered package has, with the packages that are here."""
    failed = "".join(f" {point} failed to load: {reason}." for point, reason in FAILED.items())
    known = ", ".join(f"{p.name} {p.version}" for p in PACKAGES.values())
    return f"{failed} Plugin packages here: {known or 'none'}. Install the op's package, or import the module that calls whet.register."


def list_package_versions(ops: Iterable[str], tactics: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that registered some of these ops and tactics, by name."""
    wanted_ops, wanted_tactics = set(ops), set(tactics)
    return {p.name: p.version for p in PACKAGES.values() if wanted_ops & set(p.ops) or wanted_tactics & set(p.tactics)}


def require(needed: Mapping[str, str]) -> None:
    """Raises EngineError if a needed package (name -> version) is not registered, after installed packages are loaded."""
    if not needed:
        return
    load_installed()
    missing = [f"{name} {version}" for name, version in needed.items() if name not in PACKAGES]
    if missing:
        names = f"package{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise EngineError(f"the engine needs the plugin {names}, not found here.{make_advice()}")


def list_version_changes(needed: Mapping[str, str]) -> list[str]:
    """Registered packages of another version than the needed one, as `plugin NAME: 1.0 there, 1.1 here`."""
    return [f"plugin {n}: {v} there, {PACKAGES[n].version} here" for n, v in needed.items() if n in PACKAGES and PACKAGES[n].version != v]
