"""Ways to compute a layer on a backend. `tactics/<backend>/<family>/<name>.py` is the tactic `<backend>/<name>`."""

from importlib import import_module

from whet.registry import load_folder
from whet.tactics._base import (
    TACTICS,
    Args,
    Call,
    Config,
    Kernel,
    Operand,
    Packed,
    PlanRefused,
    Signature,
    Stream,
    Tactic,
    get_tactic,
    operand_bytes,
    stored_bytes,
    tactic,
)
from whet.tactics._fused import Post, anchor, epilogue, is_quantized, outer_input, places, source_place, unquantized

__all__ = [
    "TACTICS", "Args", "Call", "Config", "Kernel", "Operand", "Packed", "PlanRefused", "Post", "Signature", "Stream", "Tactic",
    "anchor", "epilogue", "get_tactic", "is_quantized", "load_tactics", "operand_bytes", "outer_input", "places", "source_place", "stored_bytes",
    "tactic", "tactics_of", "unquantized",
]  # fmt: skip


def load_tactics(backend: str) -> None:
    """Imports the tactics of one backend (libraries are loaded when a tactic first needs them)."""
    package = import_module(f"whet.tactics.{backend}")
    load_folder(package.__name__, package.__path__)


def tactics_of(backend: str) -> list[Tactic]:
    """All tactics of a backend, loaded, by name."""
    load_tactics(backend)
    return [t for n, t in sorted(TACTICS.items()) if t.backend == backend]
