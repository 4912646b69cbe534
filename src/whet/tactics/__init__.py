"""Ways to compute a layer on a backend. `tactics/<backend>/<family>/<name>.py` is the tactic `<backend>/<name>`.

A backend that is added as one folder brings its tactics along: `backends/<backend>/tactics/<name>.py`.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from whet.backends import get_backend_class
from whet.plugin_packages import load_installed
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
    ViewKernel,
    count_operand_bytes,
    count_stored_bytes,
    get_tactic,
    iterate_shifted_pairs,
    tactic,
    view_shifts,
)
from whet.tactics._fused import (
    EpilogueStep,
    find_epilogue_steps,
    get_operand_indices,
    get_root_layer,
    get_source_index,
    is_quantized,
    outer_input,
    remove_quantization,
)

__all__ = [
    "TACTICS",
    "Args",
    "Call",
    "Config",
    "EpilogueStep",
    "Kernel",
    "Operand",
    "Packed",
    "PlanRefused",
    "Signature",
    "Stream",
    "Tactic",
    "ViewKernel",
    "count_operand_bytes",
    "count_stored_bytes",
    "find_epilogue_steps",
    "get_operand_indices",
    "get_root_layer",
    "get_source_index",
    "get_tactic",
    "is_quantized",
    "iterate_shifted_pairs",
    "list_tactics",
    "load_tactic",
    "load_tactics",
    "outer_input",
    "remove_quantization",
    "tactic",
    "view_shifts",
]  # fmt: skip


def load_tactics(backend: str) -> None:
    """Imports the tactics of one backend (libraries are loaded when a tactic first needs them). Raises BackendError for an unknown backend."""
    get_backend_class(backend)
    _import_tactics(backend)
    load_installed()


def load_tactic(name: str) -> None:
    """Imports the module of one tactic, so that an engine is opened without importing all tactics of its backend. Imports all of them if no file
    has this name, as for a plugin's tactic. Raises BackendError for an unknown backend."""
    backend, _, stem = name.partition("/")
    if name not in TACTICS and (module := list_modules(backend).get(stem)) is not None:
        import_module(module)
    if name not in TACTICS:
        load_tactics(backend)


@cache
def list_modules(backend: str) -> dict[str, str]:
    """Modules of a backend's tactics by file name, from the names of files only: importing their packages takes ten times as long."""
    get_backend_class(backend)
    modules: dict[str, str] = {}
    for parent, name in ((__name__, backend), (f"whet.backends.{backend}", "tactics")):
        spec = find_spec(f".{name}", parent)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            modules |= _list_files(folder, f"{parent}.{name}")
    return modules


def _list_files(folder: str, package: str) -> dict[str, str]:
    modules: dict[str, str] = {}
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda e: e.name)
    for entry in entries:
        if entry.name.startswith(("_", ".")):
            continue
        if entry.is_dir():
            modules |= _list_files(entry.path, f"{package}.{entry.name}")
        elif entry.name.endswith(".py"):
            stem = entry.name.removesuffix(".py")
            modules[stem] = f"{package}.{stem}"
    return modules


@cache
def _import_tactics(backend: str) -> None:
    """Once for a backend: to list its folders takes milliseconds, and each layer without its tactic asks for all tactics."""
    for parent, name in ((__name__, backend), (f"whet.backends.{backend}", "tactics")):
        if find_spec(f".{name}", parent) is not None:
            package = import_module(f"{parent}.{name}")
            load_folder(package.__name__, package.__path__)


def list_tactics(backend: str) -> list[Tactic]:
    """All tactics of a backend, loaded, by name."""
    load_tactics(backend)
    return [t for n, t in sorted(TACTICS.items()) if t.backend == backend]
