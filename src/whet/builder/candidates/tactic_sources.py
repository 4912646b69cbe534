"""The tactics that a build may use: those of the backend, filtered by --tacticSources."""

from __future__ import annotations

from collections.abc import Iterable

from whet.errors import UsageError
from whet.registry import nearest
from whet.tactics import Tactic, tactics_of

TF32 = "TF32"  # the family of all TF32 tactics, which `--noTF32` disables


def family(t: Tactic) -> str:
    """The family of a tactic, the first part of its file name: ONEDNN for cpu/onednn_conv."""
    return t.name.rpartition("/")[2].partition("_")[0].upper()


def _families(t: Tactic) -> set[str]:
    return {family(t), *({TF32} if t.name.endswith("_tf32") else ())}


def tactics_for(backend: str, switches: Iterable[str] = ()) -> list[Tactic]:
    """The backend's tactics after `-NAME` and `+NAME` in order; NAME is a tactic, its file, or a family (CUBLAS_LT is CUBLASLT; TF32: all
    tactics that compute in TF32).

    An `opt_in` tactic is excluded unless it is named. Raises UsageError for an unknown name.
    """
    everything = tactics_of(backend)
    chosen = {t.name for t in everything if not t.opt_in}
    for s in switches:
        name = s.lstrip("+-")
        hit = {t.name for t in everything if name in (t.name, t.name.rpartition("/")[2]) or name.upper().replace("_", "") in _families(t)}
        if not hit:
            names = sorted({f for t in everything for f in _families(t)} | {t.name for t in everything})
            raise UsageError(f"no tactic or family of tactics is called {name!r}.{nearest(name, names)} There are {', '.join(names)}.")
        chosen = chosen - hit if s.startswith("-") else chosen | hit
    return [t for t in everything if t.name in chosen]
