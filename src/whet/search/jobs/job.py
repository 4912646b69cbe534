"""A job is a folder with job.json (the task) and result.json (the outcome). Files are written atomically, so a kill costs one job at most."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whet.errors import UsageError
from whet.files import read_json_text, replace_atomically
from whet.report.stage import STAGE
from whet.search.jobs.result_check import is_result

JOB, RESULT, LOG, LOCK = "job.json", "result.json", "log.txt", "lock"
CHECKPOINT = ".safetensors"  # suffix of training checkpoints, from which a killed job resumes
#: recipe keys on which no job depends; the files named by `model`, `data` and `metric` count by content (fingerprint.py)
_ELSEWHERE = ("target", "search", "prefer", "survivor", "scout", "out", "folder", "timing_cache", "model", "data")
_TRAINING = ("finetune", "qat")  # recipe keys on which only survivors depend


@dataclass(frozen=True)
class Job:
    """The task of a child process; `role` is baseline, scout, survivor or final. `reference` is the folder of the original's FP32 baseline at the
    same batch (None for that baseline itself).

    `kept` is the number of channels by group; `allowed` is the target's accuracy drop, which decides on INT8 training of a survivor; a `final`
    job compares the engines in `folders`. A scout that loses more than `stop_above` ends before its engine is built.
    `made_by` is the version of whet and the processor where known: results of another are discarded.
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
    stop_above: float | None = None
    made_by: str = ""

    def write(self, folder: Path) -> None:
        """Creates the folder and writes job.json; an unfinished folder is reused."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JOB, asdict(self))

    def same_as(self, folder: Path) -> bool:
        """True if the folder holds this job; the search's budget and target are ignored."""
        stored = read_json(folder / JOB)
        if not isinstance(stored, dict):
            return False
        ignored = _ELSEWHERE if self.role == "survivor" else _ELSEWHERE + _TRAINING
        try:
            whole = {"allowed": None, "stop_above": None, "made_by": "", **stored}
            return _make_comparison_key(asdict(self), ignored) == _make_comparison_key(whole, ignored)
        except (TypeError, AttributeError):  # a damaged job
            return False

    @staticmethod
    def read(folder: Path) -> Job:
        """Raises UsageError for a folder that holds no job."""
        try:
            return Job(**read_json(folder / JOB))
        except TypeError as e:
            raise UsageError(f"{folder} contains no job ({JOB} is missing or damaged). Run the search again: it writes its jobs.") from e


def _make_comparison_key(job: Mapping[str, Any], ignored: tuple[str, ...]) -> str:
    """The comparison key of a job. Referenced jobs count by folder name, so that a moved search compares equal."""
    recipe = {k: v for k, v in job.get("recipe", {}).items() if k not in ignored}
    reference = Path(job["reference"]).name if job.get("reference") else None
    names = {"reference": reference, "folders": [Path(p).name for p in job.get("folders", [])]}
    return json.dumps({**job, "recipe": recipe, **names}, sort_keys=True)


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Writes the result with the sizes of the folder's other files after those are synced to disk, so that a power failure leaves no torn result."""
    files = [p for p in folder.iterdir() if p.is_file() and p.name not in (JOB, LOG, STAGE, LOCK, RESULT)]
    for path in files:
        with path.open("rb") as f:
            os.fsync(f.fileno())
    write_json(folder / RESULT, {**result, "files": {p.name: p.stat().st_size for p in files if p.suffix != CHECKPOINT}})


def is_complete(folder: Path, result: Mapping[str, Any]) -> bool:
    """True if all files recorded in a result exist with their recorded sizes."""
    sizes = result.get("files", {})
    if not isinstance(sizes, Mapping) or not all(Path(name).name == name for name in sizes):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result, or None if there is none or its file is damaged."""
    result = read_json(folder / RESULT)
    return result if is_result(result) else None


def write_json(path: Path, data: Any) -> None:
    """Writes JSON atomically (temporary file, then rename)."""
    with replace_atomically(path) as part, part.open("w", encoding="utf-8") as f:
        json.dump(data, f, indent=1, allow_nan=False)
        f.flush()
        os.fsync(f.fileno())


def read_fields(path: Path) -> dict[str, Any]:
    """Parsed JSON; {} for a missing or malformed file, or one that holds no object."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def read_json(path: Path) -> Any:
    """Parsed JSON; None for a missing or malformed file."""
    try:
        return json.loads(read_json_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def make_failed_result(job: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The result of a failed job."""
    return {"state": "failed", "role": job["role"], "name": job["name"], "candidate": job["candidate"], "reason": " ".join(reason.split())}
