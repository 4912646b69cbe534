"""A work folder with damaged or changed files: damaged results count as missing, so that jobs are repeated; other damage is named."""

import copy
import errno
import json
import os

import pytest

from whet.errors import UsageError
from whet.search.jobs.job import JOB, RESULT, Job, is_complete, read_fields, read_result
from whet.search.jobs.result_check import is_result
from whet.search.outcome.folder import WorkFolder

FIGURES = {
    "metric": {"value": 97.0, "low": None, "high": None, "samples": 100}, "drop": {"value": 0.0},
    "latency": {"median_ms": 0.007, "p99_ms": 0.008, "mean_ms": 0.0075, "runs": 12, "ratio": 1.0},
    "throughput": 1e5, "memory_bytes": 1000, "engine_bytes": 2000,
}  # fmt: skip
MEASURED = {
    "state": "done", "role": "scout", "name": "trial 0", "candidate": {}, "kept": {}, "removed": [], **FIGURES, "load": {"disturbed": False},
    "energy": {}, "steps": [], "branches": [], "notes": [], "precision": {}, "layers": [], "seconds": 1.0,
}  # fmt: skip
FAILED = {"state": "failed", "role": "scout", "name": "trial 0", "candidate": {}, "reason": "out of memory"}
FINAL = {"state": "done", "role": "final", "name": "comparison", "candidate": {}, "load": {}, "rows": [{"folder": "fp32-b1", **FIGURES}]}
REBUILT = {"state": "done", "role": "survivor", "name": "trial 0", "model": "model.onnx", "differs": None, "digest": "ab"}


def changed(result, *path, to):
    made = copy.deepcopy(result)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return made


@pytest.mark.parametrize("result", [MEASURED, FAILED, FINAL, REBUILT], ids=["measured", "failed", "final", "rebuilt"])
def test_results_are_read(result, tmp_path):
    (tmp_path / RESULT).write_text(json.dumps(result))
    assert read_result(tmp_path) == result


@pytest.mark.parametrize(
    "result",
    [
        [], {}, {"state": "done"}, "done", None,
        changed(MEASURED, "state", to="maybe"), changed(MEASURED, "state", to=["done"]),
        changed(MEASURED, "latency", to="fast"), changed(MEASURED, "latency", "ratio", to="1"), changed(MEASURED, "latency", "ratio", to=True),
        changed(MEASURED, "latency", "median_ms", to=float("nan")), changed(MEASURED, "metric", to=None), changed(MEASURED, "drop", "value", to="x"),
        changed(MEASURED, "load", to=[]), changed(MEASURED, "layers", to={}), changed(MEASURED, "engine_bytes", to=None),
        changed(FAILED, "reason", to=None), changed(FAILED, "candidate", to=[]),
        changed(FINAL, "rows", to=None), changed(FINAL, "rows", to=[]), changed(FINAL, "rows", to=[1]),
        changed(FINAL, "rows", 0, "folder", to="../../etc"), changed(FINAL, "rows", 0, "folder", to=""), changed(FINAL, "rows", 0, "metric", to={}),
        changed(REBUILT, "model", to=None),
    ],
)  # fmt: skip
def test_damaged_results_count_as_missing(result, tmp_path):
    assert not is_result(result)
    (tmp_path / RESULT).write_text(json.dumps(result))
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("files", [[1, 2], {"../../etc/passwd": 1}, {"/etc/passwd": 1}, {"": 0}, None, {"missing": 3}])
def test_files_of_other_folders_do_not_complete_a_result(files, tmp_path):
    assert not is_complete(tmp_path, {"files": files})
    assert is_complete(tmp_path, {})


@pytest.mark.parametrize("stored", ["[1]", "{", '{"role": 1}', '{"role": "scout", "recipe": 5}', '{"role": "scout", "name": "x", "unknown": 1}'])
def test_damaged_jobs_are_written_again(stored, tmp_path):
    (tmp_path / JOB).write_text(stored)
    assert not Job("scout", "trial 0", {"model": "m"}, {}).same_as(tmp_path)
    assert isinstance(read_fields(tmp_path / JOB), dict)
    with pytest.raises(UsageError, match=r"contains no job .job.json is missing or damaged"):
        Job.read(tmp_path)


def test_misplaced_files_are_named(tmp_path):
    folder = WorkFolder(tmp_path)
    (tmp_path / "scouts").write_text("a file")
    with pytest.raises(UsageError, match=r"is damaged: .*scouts/0000: Not a directory\. Remove that file, restart with --fresh"), folder.usable():
        folder.scout(0).mkdir(parents=True)
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(UsageError, match=r"work folder .* is damaged: .*loop"), folder.usable():
        (tmp_path / "loop").read_text()


def test_a_full_disk_and_files_of_others_stay_as_they_are(tmp_path):
    folder = WorkFolder(tmp_path)
    with pytest.raises(OSError, match="No space"), folder.usable():
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
    with pytest.raises(FileNotFoundError), folder.usable():
        open(tmp_path.parent / "elsewhere")
