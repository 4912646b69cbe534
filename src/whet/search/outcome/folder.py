"""The work folder of a search: its layout, its exclusive lock, and the check that it belongs to one recipe.

    search.json      the recipe's identity         baselines/ scouts/ survivors/ final/   jobs (job.py)
    study.sqlite3    Optuna's trials               deploy/                                the deployable result
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whet.errors import UsageError
from whet.files import resolve_path
from whet.search.jobs import job as j
from whet.search.jobs.device_locks import hold_file_lock
from whet.search.recipe.recipe import AutoRecipe

_MISPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTEMPTY)
IDENTITY, STUDY = "search.json", "study.sqlite3"
_OURS = (IDENTITY, STUDY, "baselines", "scouts", "survivors", "final", "deploy", "deploy.new", "deploy.old", "events.jsonl")


class WorkFolder:
    """Paths of a search."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = resolve_path(path)

    @property
    def study(self) -> Path:
        return self.path / STUDY

    @property
    def deploy(self) -> Path:
        return self.path / "deploy"

    def baseline(self, precision: str, batch: int) -> Path:
        return self.path / "baselines" / f"{precision}-b{batch}"

    def scout(self, number: int) -> Path:
        return self.path / "scouts" / f"{number:04d}"

    def survivor(self, number: int) -> Path:
        return self.path / "survivors" / f"{number:04d}"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Raises UsageError where a file of the folder is a folder, a link to itself, not permitted, or the like; a full disk stays an OSError."""
        try:
            yield
        except OSError as e:
            inside = isinstance(e.filename, str | os.PathLike) and Path(os.path.abspath(e.filename)).is_relative_to(self.path)
            if not inside or e.errno not in _MISPLACED:
                raise
            raise UsageError(
                f"the work folder {self.path} is damaged: {e.filename}: {e.strerror}. Remove that file, restart with --fresh, or give another folder "
                "with --out"
            ) from e

    @contextmanager
    def open_locked(self, recipe: AutoRecipe, fresh: bool = False) -> Iterator[bool]:
        """Locks the folder for this process; yields True if a search is resumed. Raises UsageError if it is in use or belongs to another recipe.

        `fresh` deletes the results of an earlier search.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"cannot create the work folder {self.path}: {e.strerror}") from e
        with hold_file_lock(self.path / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as acquired:
            if not acquired:
                raise UsageError(f"another search is running in {self.path}: wait for it, stop it, or give another folder with --out")
            if fresh:
                self._clear()
            yield self._belongs(recipe)

    def _belongs(self, recipe: AutoRecipe) -> bool:
        identity, stored = recipe.identity(), j.read_json(self.path / IDENTITY)
        if not isinstance(stored, dict):
            if (self.path / IDENTITY).exists() or self.study.exists():
                raise UsageError(
                    f"{self.path / IDENTITY} is damaged or missing, so the recipe of the search in this folder is unknown: "
                    "--fresh deletes the search, --out selects another folder"
                )
            if strangers := [p.name for p in self.path.iterdir() if p.name != "lock" and p.suffix != ".part"]:
                raise UsageError(f"{self.path} contains other files ({', '.join(sorted(strangers)[:4])}): give an empty folder with --out")
            j.write_json(self.path / IDENTITY, identity)
            return False
        moved = [k for k in {**identity, **stored} if stored.get(k) != identity.get(k)]
        if moved and self._has_results():
            raise UsageError(
                f"{self.path} contains a search of another recipe (changed: {', '.join(moved)}; files and functions are compared by content): "
                "--fresh deletes it, --out selects another folder"
            )
        if moved:
            j.write_json(self.path / IDENTITY, identity)
        return True

    def _has_results(self) -> bool:
        """True if the folder has results that another recipe would invalidate."""
        results = (j.read_result(p) for p in (self.path / "baselines").glob("*"))
        return self.study.exists() or any(r is not None and r["state"] == "done" for r in results)

    def _clear(self) -> None:
        ours = (self.path / IDENTITY).exists() or self.study.exists()
        if not ours and [p for p in self.path.iterdir() if p.name != "lock"]:
            raise UsageError(f"{self.path} contains no search: --fresh deletes only a search's files")
        for name in _OURS:
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        for extra in self.path.glob(f"{STUDY}-*"):
            extra.unlink()
