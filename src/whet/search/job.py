"""A job is a folder: job.json says what to do, result.json what came of it. Files appear whole or not at all, so a kill costs one job at most."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whet.errors import UsageError
from whet.files import replacing

JOB, RESULT, LOG, STAGE, LOCK = "job.json", "result.json", "log.txt", "stage.txt", "lock"
_ELSEWHERE = ("target", "search", "prefer", "survivor", "scout", "out", "folder")  # keys of the recipe that a job does not depend on
_TRAINING = ("finetune", "qat")  # and those that survivors alone depend on
ROLES = ("baseline", "scout", "survivor", "final")


@dataclass(frozen=True)
class Job:
    """What a child process does. `reference` is the folder of the original's FP32 baseline at the same batch (none: this is it).

    `kept` are channels by group; `allowed` is the drop that the target permits, which says whether a survivor is trained for INT8; a `final`
    job compares the engines in `folders`.
    """

    role: str
    name: str
    recipe: dict[str, Any]
    candidate: dict[str, Any]
    kept: dict[str, int] = field(default_factory=dict)
    effort: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    folders: list[str] = field(default_factory=list)
    allowed: float | None = None

    def write(self, folder: Path) -> None:
        """Makes the folder; an unfinished one is used again."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JOB, asdict(self))

    def same_as(self, folder: Path) -> bool:
        """Whether the folder holds this very job; how long the search goes on and what its target is make no difference."""
        found = read_json(folder / JOB)
        if not isinstance(found, dict):
            return False
        mine = asdict(self)
        apart = _ELSEWHERE if self.role == "survivor" else _ELSEWHERE + _TRAINING
        either = [{**job, "recipe": {k: v for k, v in job.get("recipe", {}).items() if k not in apart}} for job in (mine, {"allowed": None, **found})]
        return json.dumps(either[0], sort_keys=True) == json.dumps(either[1], sort_keys=True)

    @staticmethod
    def read(folder: Path) -> Job:
        """Raises UsageError for a folder that holds no job."""
        found = read_json(folder / JOB)
        if not isinstance(found, dict):
            raise UsageError(f"{folder} holds no job ({JOB})")
        return Job(**found)


def result_of(folder: Path) -> dict[str, Any] | None:
    """The result, or None while there is none."""
    found = read_json(folder / RESULT)
    return found if isinstance(found, dict) else None


def write_json(path: Path, data: Any) -> None:
    """Writes to a file beside it and renames: readers see the old or the new file, never a part."""
    with replacing(path) as part, part.open("w") as f:
        json.dump(data, f, indent=1, allow_nan=False)
        f.flush()
        os.fsync(f.fileno())


def read_json(path: Path) -> Any:
    """Parsed JSON; None for a file that is missing or no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def failed(job: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The result of a job that did not come to an end."""
    return {"state": "failed", "role": job["role"], "name": job["name"], "candidate": job["candidate"], "reason": reason}
