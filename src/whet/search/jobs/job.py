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
from whet.report.stage import STAGE

JOB, RESULT, LOG, LOCK = "job.json", "result.json", "log.txt", "lock"
CHECKPOINT = ".safetensors"  # how the name of a training's checkpoint ends, which a killed job goes on from
#: keys of the recipe that a job does not depend on; what `model`, `data` and `metric` name is the search's identity (contents.py), wherever it lies
_ELSEWHERE = ("target", "search", "prefer", "survivor", "scout", "out", "folder", "timing_cache", "model", "data")
_TRAINING = ("finetune", "qat")  # and those that survivors alone depend on


@dataclass(frozen=True)
class Job:
    """What a child process does, in the `role` of baseline, scout, survivor or final. `reference` is the folder of the
    original's FP32 baseline at the same batch (none: this is it).

    `kept` are channels by group; `allowed` is the drop that the target permits, which says whether a survivor is trained for INT8; a `final`
    job compares the engines in `folders`. `made_by` is the version of whet, and the processor where that is known: engines and times of
    another count no more.
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
    made_by: str = ""

    def write(self, folder: Path) -> None:
        """Makes the folder; an unfinished one is used again."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JOB, asdict(self))

    def same_as(self, folder: Path) -> bool:
        """Whether the folder holds this very job; how long the search goes on and what its target is make no difference."""
        found = read_json(folder / JOB)
        if not isinstance(found, dict):
            return False
        apart = _ELSEWHERE if self.role == "survivor" else _ELSEWHERE + _TRAINING
        return _compared(asdict(self), apart) == _compared({"allowed": None, "made_by": "", **found}, apart)

    @staticmethod
    def read(folder: Path) -> Job:
        """Raises UsageError for a folder that holds no job."""
        found = read_json(folder / JOB)
        if not isinstance(found, dict):
            raise UsageError(f"{folder} holds no job ({JOB})")
        return Job(**found)


def _compared(job: Mapping[str, Any], apart: tuple[str, ...]) -> str:
    """What two jobs are compared by. Other jobs go by the names of their folders, so that a moved search is the same."""
    recipe = {k: v for k, v in job.get("recipe", {}).items() if k not in apart}
    reference = Path(job["reference"]).name if job.get("reference") else None
    names = {"reference": reference, "folders": [Path(p).name for p in job.get("folders", [])]}
    return json.dumps({**job, "recipe": recipe, **names}, sort_keys=True)


def sealed(folder: Path, found: dict[str, Any]) -> None:
    """Writes the result after everything else in the folder has reached the disk, with the sizes of those files: power may go at any moment."""
    files = [p for p in folder.iterdir() if p.is_file() and p.name not in (JOB, LOG, STAGE, LOCK, RESULT)]
    for path in files:
        with path.open("rb") as f:
            os.fsync(f.fileno())
    write_json(folder / RESULT, {**found, "files": {p.name: p.stat().st_size for p in files if p.suffix != CHECKPOINT}})


def whole(folder: Path, found: Mapping[str, Any]) -> bool:
    """Whether the files that a result was sealed with are there, none of them cut off."""
    sizes: Mapping[str, int] = found.get("files", {})
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


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
    return {"state": "failed", "role": job["role"], "name": job["name"], "candidate": job["candidate"], "reason": " ".join(reason.split())}
