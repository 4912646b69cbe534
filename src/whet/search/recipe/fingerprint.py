"""Content digests of a search's inputs: a moved search resumes; a changed model, data set or function is detected.

Files count by their bytes (a model with its external data), a folder by the names and sizes of its files, python:MODULE:FUNCTION by its text
and the bytes of the module in the recipe's folder. Paths are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from whet.registry import PYTHON_PREFIX

if TYPE_CHECKING:
    from whet.search.recipe.recipe import AutoRecipe

SOURCES = ("calibrate", "score", "judge", "train")  # keys of `data`


def digest_contents(recipe: AutoRecipe) -> dict[str, str]:
    """A digest of each input named by the recipe, by key. Raises FrontendError for a malformed model, OSError."""
    from whet.frontends import external_files

    digests = {"model": _digest_files([Path(recipe.model), *external_files(recipe.model)])}
    for name in SOURCES:
        if source := getattr(recipe.data, name):
            digests[f"data.{name}"] = _digest_source(source, recipe.folder)
    if recipe.data.preprocess and Path(recipe.data.preprocess).is_file():
        digests["data.preprocess"] = _digest_files([Path(recipe.data.preprocess)])
    digests["metric"] = _digest_source(recipe.metric, recipe.folder)
    for name in recipe.space.importance:
        if name.startswith(PYTHON_PREFIX):
            digests[f"space.importance {name}"] = _digest_source(name, recipe.folder)
    return digests


def find_module_file(source: str, folder: str) -> Path | None:
    """The module file of python:MODULE:FUNCTION in the recipe's folder; None for an installed module."""
    way = Path(folder, *source.split(":")[1].split("."))
    return next((p for p in (way.with_suffix(".py"), way / "__init__.py") if p.is_file()), None)


def _digest_source(source: str, folder: str) -> str:
    if source.startswith(PYTHON_PREFIX):
        module = find_module_file(source, folder)
        return f"{source} {_digest_files([module])}" if module else source
    path = Path(source)
    if path.is_dir():
        return _compute_digest(f"{p.relative_to(path)} {p.stat().st_size}\n".encode() for p in sorted(path.rglob("*")) if p.is_file())
    return _digest_files([path]) if path.is_file() else source


def _digest_files(paths: Iterable[Path]) -> str:
    return _compute_digest(part for p in paths for part in _read_parts(p))


def _read_parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        while part := f.read(1 << 20):
            yield part


def _compute_digest(parts: Iterable[bytes]) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return h.hexdigest()
