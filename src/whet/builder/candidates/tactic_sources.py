"""Which tactics a build may use: all of the backend's, cut by --tacticSources."""

from __future__ import annotations

from collections.abc import Iterable

from whet.errors import UsageError
from whet.registry import suggest_name
from whet.tactics import Tactic, list_tactics

TF32 = "TF32"  # a family across libraries and whet's kernels: `--noTF32` switches it off
#: first words of the names of tactics that call other code than whet's kernels
LIBRARIES = {"CUBLASLT", "CUDNN", "CUSPARSELT", "HOST", "NUMPY", "ONEDNN"}
OWN = "OWN"  # the family of whet's kernels


def get_family(t: Tactic) -> str:
    """The library that a tactic calls, by the first word of its file's name (ONEDNN for cpu/onednn_conv), or OWN for whet's kernels."""
    return _get_first_word(t) if _get_first_word(t) in LIBRARIES else OWN


def _get_first_word(t: Tactic) -> str:
    return t.name.rpartition("/")[2].partition("_")[0].upper()


def _list_families(t: Tactic) -> set[str]:
    return {get_family(t), _get_first_word(t), *({TF32} if t.name.endswith("_tf32") else ())}


def has_family(backend: str, family: str) -> bool:
    """True if a tactic of the backend belongs to a family."""
    return any(family in _list_families(t) for t in list_tactics(backend))


def list_enabled_tactics(backend: str, switches: Iterable[str] = ()) -> list[Tactic]:
    """The backend's tactics after `-NAME` and `+NAME` in order; NAME is a tactic, its file, or else a family: the first word of
    files' names (CUBLAS_LT is CUBLASLT), OWN for whet's kernels, TF32 for all that compute in it.

    A tactic that is there for those who ask for it (`opt_in`) is left out until then, unless it replaces a family (`instead_of`) of which nothing is
    left. A tactic whose library cannot be loaded is left out.
    Raises UsageError for a name that none has.
    """
    everything = list_tactics(backend)
    chosen, excluded = {t.name for t in everything if not t.opt_in}, set[str]()
    for s in switches:
        name = s.lstrip("+-")
        hit = {t.name for t in everything if name in (t.name, t.name.rpartition("/")[2])}  # `-conv` is that tactic, not all of the family CONV
        hit = hit or {t.name for t in everything if name.upper().replace("_", "") in _list_families(t)}
        if not hit:
            names = sorted({f for t in everything for f in _list_families(t)} | {t.name for t in everything})
            raise UsageError(f"no tactic or family of tactics is called {name!r}.{suggest_name(name, names)} There are {', '.join(names)}.")
        chosen, excluded = (chosen - hit, excluded | hit) if s.startswith("-") else (chosen | hit, excluded - hit)
    usable = {t.name for t in everything if t.name in chosen and t.missing_library() is None}
    families = {get_family(t) for t in everything if t.name in usable}
    usable |= {t.name for t in everything if t.instead_of and t.instead_of not in families and t.name not in excluded}
    return [t for t in everything if t.name in usable]


def find_missing_libraries(backend: str, switches: Iterable[str] = ()) -> list[str]:
    """One sentence for each library of the backend's tactics that cannot be loaded, with the reason; none for those switched off by `-NAME`."""
    off = {s[1:].upper().replace("_", "") for s in switches if s.startswith("-")}
    concerned = [t for t in list_tactics(backend) if t.library and not t.opt_in and not _list_families(t) & off]
    reasons = {t.library: reason for t in concerned if (reason := t.missing_library()) is not None}
    return [f"No tactic of {name} is used: {reason}" for name, reason in sorted(reasons.items())]
