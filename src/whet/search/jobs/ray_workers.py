"""Jobs on a Ray cluster. Jobs and results are sent as bytes, so no shared file system is needed.

The remote machine runs the same child process (child.py), which holds that machine's device lock and fills that machine's timing cache.
Files named by the recipe (model, .npz and .npy data) and the Python modules in the recipe's folder are sent along; data folders and
installed packages must exist on the remote machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.backends import get_capabilities
from whet.errors import UsageError
from whet.frontends import external_files
from whet.report.stage import STAGE
from whet.search.jobs import job as j
from whet.search.jobs.workers import end_session
from whet.search.recipe.fingerprint import SOURCES
from whet.search.recipe.recipe import AutoRecipe

_STAYS = (j.LOCK, STAGE)  # files of a job's folder that are not sent back


class RayWorkers:
    """Workers on a Ray cluster, as a context manager. `address` is the cluster's address, or `auto`: a running cluster, else a local one.

    Raises UsageError when Ray is not installed or the cluster does not respond.
    """

    def __init__(self, recipe: AutoRecipe, address: str):
        self.recipe, self.address, self.timeout = recipe, address, recipe.search.trial_timeout
        self.slots = 1
        self.running: dict[Any, Path] = {}
        self._ours = False

    def __enter__(self) -> RayWorkers:
        try:
            import ray
        except ImportError:
            raise UsageError("--ray needs Ray: pip install 'whet[ray]' (on every machine of the cluster)") from None
        self.ray = ray
        if not ray.is_initialized():
            where = os.environ.get("PYTHONPATH")
            options = {"runtime_env": {"env_vars": {"PYTHONPATH": where}}} if where else {}
            try:
                ray.init(None if self.address in ("auto", "local") else self.address, log_to_driver=False, include_dashboard=False, **options)
            except (ConnectionError, ValueError, RuntimeError) as e:
                raise UsageError(f"--ray={self.address}: the cluster does not respond: {e}") from e
            self._ours = True
        cpu = not get_capabilities(self.recipe.backend).numbered_devices
        nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
        places = sum(1 for n in nodes if n.get("CPU", 0)) if cpu else int(sum(n.get("GPU", 0) for n in nodes))
        if not places:
            raise UsageError(f"--ray={self.address}: the cluster has no {'CPUs' if cpu else 'GPUs'}")
        self.slots = self.recipe.search.workers or places
        shared = self._collect_files()
        self._shared = ray.put(shared)
        # one job per machine on CPUs (two would wait for each other's timings), one per GPU
        share = {"num_cpus": max(1, int(min(n["CPU"] for n in nodes if n.get("CPU", 0)))) if not self.recipe.search.workers else 1}
        remote = ray.remote(max_retries=2, **(share if cpu else {"num_cpus": 1, "num_gpus": 1}))
        self._run = remote(run_remote)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._ours:
            self.ray.shutdown()

    def start(self, folder: Path) -> None:
        """Starts a job and sends its files and those of the baselines it refers to."""
        job = j.read_json(folder / j.JOB)
        files = {f"{Path(p).name}/{f.name}": f.read_bytes() for p in (job["reference"], *job["folders"]) if p for f in sorted(Path(p).iterdir())
                 if f.is_file() and f.name not in _STAYS}  # fmt: skip
        ref = self._run.remote(job, files, self._shared, self.timeout)
        self.running[ref] = folder

    def collect_finished(self) -> list[tuple[Path, str | None]]:
        """Jobs that ended since the last call; their files are written into their folders, the result last."""
        ended: list[tuple[Path, str | None]] = []
        done, _ = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=0) if self.running else ([], [])
        for ref in done:
            folder = self.running.pop(ref)
            try:
                files: Mapping[str, bytes] = self.ray.get(ref)
            except self.ray.exceptions.RayError as e:
                ended.append((folder, f"Ray lost the trial: {' '.join(str(e).split())[:300]}"))
                continue
            for name, data in sorted(files.items(), key=lambda x: x[0] == j.RESULT):
                part = folder / f"{name}.part"
                part.write_bytes(data)
                os.replace(part, folder / name)
            problem = None if j.RESULT in files else files.get("problem", b"the trial left no result").decode()
            ended.append((folder, problem))
        return ended

    def stop(self) -> None:
        """Cancels running jobs; they restart when the search resumes."""
        for ref in self.running:
            self.ray.cancel(ref, force=True)
        self.running.clear()

    def _collect_files(self) -> dict[str, bytes]:
        """Files needed by every job, by path: `model/` with external weights, `data.score/`, ..., `modules/`."""
        model_folder = Path(self.recipe.model).resolve().parent
        files = {f"model/{p.relative_to(model_folder)}": p.read_bytes() for p in external_files(self.recipe.model)}
        for key, path in _list_file_entries(self.recipe.to_plain()).items():
            if os.path.isfile(path) and not path.endswith(".csv"):  # the images listed in a CSV file are not sent
                files[f"{key}/{Path(path).name}"] = Path(path).read_bytes()
        for module in sorted(Path(self.recipe.folder).glob("*.py")):
            files[f"modules/{module.name}"] = module.read_bytes()
        return files


def _list_file_entries(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Recipe entries that may name files, by key."""
    return {"model": recipe["model"]} | {f"data.{n}": v for n in (*SOURCES, "preprocess") if (v := recipe["data"].get(n))}


def run_remote(job: dict[str, Any], files: Mapping[str, bytes], shared: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
    """Runs a job on the Ray worker's machine; returns the files of its folder, or {"problem": reason} if its process left no result."""
    base = Path(tempfile.mkdtemp(prefix="whet-"))
    try:
        folder = _unpack(base, job, files, shared)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        with (folder / j.LOG).open("ab") as log:
            command = [sys.executable, "-m", "whet.search.jobs.child", str(folder), "--watch"]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                end_session(child)
                return {"problem": f"exceeded search.trial_timeout ({timeout:g} s) and was terminated".encode()}
        if not (folder / j.RESULT).is_file():
            tail = (folder / j.LOG).read_text(errors="replace", encoding="utf-8").strip().splitlines()[-1:]
            said = tail[0] if tail else "it said nothing"
            return {"problem": f"the trial's process exited with code {code} after {time.monotonic() - began:.0f} s: {said}".encode()}
        return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file() and f.name not in (*_STAYS, j.JOB)}
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _unpack(base: Path, job: dict[str, Any], files: Mapping[str, bytes], shared: Mapping[str, bytes]) -> Path:
    """Writes all files under `base` and the job with paths adapted to it; returns the job's folder."""
    for name, data in (*((f"refers/{n}", d) for n, d in files.items()), *shared.items()):
        target = base / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    recipe = {**job["recipe"], "data": dict(job["recipe"]["data"])}
    for key, path in _list_file_entries(job["recipe"]).items():
        if (name := f"{key}/{Path(path).name}") in shared:
            section, _, last = key.rpartition(".")
            (recipe[section] if section else recipe)[last] = str(base / name)
    (base / "modules").mkdir(exist_ok=True)
    recipe["folder"] = str(base / "modules")
    recipe.pop("timing_cache", None)  # each machine has its own
    made = {**job, "recipe": recipe, "folders": [str(base / "refers" / Path(p).name) for p in job["folders"]],
            "reference": str(base / "refers" / Path(job["reference"]).name) if job["reference"] else None}  # fmt: skip
    folder = base / "job"
    folder.mkdir()
    j.write_json(folder / j.JOB, made)
    return folder
