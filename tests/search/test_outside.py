"""External events during a search: kills, power failures, moved folders, other versions, devices in use by others."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.search_case import recipe_with
from whet.report.stage import STAGE, WAITING
from whet.search import search
from whet.search.jobs import job as j
from whet.search.jobs.device_locks import DeviceLock, hold_file_lock
from whet.search.jobs.workers import LocalWorkers

SMALL = {"search__trials": 2, "survivor__count": 1}


@pytest.fixture(scope="module")
def finished_project(case, tmp_path_factory):
    """A finished search in its own project folder: PROJECT/model.onnx, data, and work/."""
    project = tmp_path_factory.mktemp("project")
    for name in ("model.onnx", "calibrate.npz", "score.npz", "judge.npz"):
        shutil.copy(case / name, project / name)
    search(recipe_with(project, project / "work", **SMALL))
    return project


@pytest.fixture
def project(finished_project, tmp_path):
    """A copy of it at another path, with file times preserved."""
    return Path(shutil.copytree(finished_project, tmp_path / "moved"))


def jobs_of(project: Path, **changes) -> list[str]:
    """The jobs that run again after a resume."""
    before = (project / "work" / "events.jsonl").read_text()
    search(recipe_with(project, project / "work", **SMALL, **changes))
    new = (project / "work" / "events.jsonl").read_text()[len(before) :]
    return [e["job"] for e in map(json.loads, new.splitlines()) if e["event"] == "begin" and e["job"]]


@pytest.mark.slow
def test_a_moved_search_resumes_and_repeats_nothing(project):
    assert jobs_of(project) == []


@pytest.mark.slow
def test_files_truncated_by_a_power_failure_are_rebuilt(project):
    work = project / "work"
    (engine,) = work.glob("survivors/*/model.engine")
    for short in (engine, work / "baselines" / "fp32-b1" / "model.engine", work / "scouts" / "0001" / "result.json"):
        os.truncate(short, 100)
    assert jobs_of(project) == ["baselines/fp32-b1", "scouts/0001", f"survivors/{engine.parent.name}", "final"]
    assert j.read_result(work / "scouts" / "0001")["state"] == "done"
    assert "reproduces this engine" in (work / "deploy" / "README.md").read_text()


@pytest.mark.slow
def test_engines_of_another_version_are_rebuilt_with_a_note(project, monkeypatch):
    from whet.search.jobs import run_jobs

    monkeypatch.setattr(run_jobs, "__version__", "9.9")
    again = jobs_of(project)
    assert again[0] == "baselines/fp32-b1"
    assert again[-1] == "final"
    assert not any(job.startswith("scouts") for job in again)
    assert "2 trials were measured with another whet" in (project / "work" / "deploy" / "report.json").read_text()


LINGERS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
open(sys.argv[1] + "/begun", "w").close()
time.sleep(600)
"""


def lingering(folder: Path) -> list[int]:
    """Processes with the folder in their command line."""
    found = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in p.read_bytes():
                found.append(int(p.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def until(true, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def test_child_processes_end_with_their_trial(tmp_path, monkeypatch):
    """A metric with child processes, in a trial that hangs."""
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", LINGERS, str(tmp_path)], **more))
    with LocalWorkers(1, job_timeout=600.0) as workers:
        workers.start(tmp_path)
        assert until(lambda: (tmp_path / "begun").exists() and len(lingering(tmp_path)) == 2)
    assert until(lambda: lingering(tmp_path) == [])


def test_a_trial_without_parent_ends_its_child_processes(tmp_path):
    script = "import threading\nfrom whet.search.jobs.child import wait_for_end_of_parent\n"
    script += f"threading.Thread(target=wait_for_end_of_parent).start()\n{LINGERS}"
    p = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, start_new_session=True)
    assert until(lambda: (tmp_path / "begun").exists() and len(lingering(tmp_path)) == 2)
    p.stdin.close()  # as the system does when the parent has ended
    assert p.wait(60) == -signal.SIGKILL
    assert until(lambda: lingering(tmp_path) == [])


def test_waiting_for_the_device_is_reported_and_not_counted_as_run_time(tmp_path, monkeypatch):
    said: list[str | None] = []
    with DeviceLock("cpu", tmp_path).timing():
        script = "import sys, time\nfrom whet.search.jobs.device_locks import DeviceLock\n"
        script += "with DeviceLock('cpu', sys.argv[1], print).timing():\n    print('had')"
        p = subprocess.Popen([sys.executable, "-uc", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        said.append(p.stdout.readline().strip())
    said += p.communicate()[0].split()
    assert said == [f"process {os.getpid()} is timing", "None", "had"]
    folder = tmp_path / "job"
    folder.mkdir()
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", "import time; time.sleep(600)"], **more))
    with LocalWorkers(1, job_timeout=0.5) as workers:
        (folder / STAGE).write_text(f"{WAITING} (process 1 is timing)")
        workers.start(folder)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert workers.collect_finished() == []
            time.sleep(0.05)
        (folder / STAGE).write_text("building")
        assert until(lambda: bool(said.extend(workers.collect_finished()) or len(said) > 3))
    assert said[-1][1].startswith("exceeded search.trial_timeout")


def test_a_free_lock_names_no_holder(tmp_path):
    lock = DeviceLock("cpu", tmp_path)
    with lock.timing():
        assert (tmp_path / "cpu.lock").read_text() == str(os.getpid())
    with lock.hold_for_work():
        assert (tmp_path / "cpu.lock").read_text() == ""
        with hold_file_lock(tmp_path / "cpu.turn", fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            assert free


def test_a_long_wait_is_a_line_without_a_terminal(tmp_path):
    import io

    from rich.console import Console

    from whet.report import search_live

    out = io.StringIO()
    live = search_live.SearchLive(live=False, console=Console(file=out, width=200), long_wait_s=0.0)
    (tmp_path / "0003").mkdir()
    (tmp_path / "0003" / STAGE).write_text(f"{WAITING} (process 7 is timing)")
    live.running[tmp_path / "0003"] = ("int8", 0.0)
    for _ in range(4):
        live.tick()
        time.sleep(0.01)
    assert out.getvalue().count("0003: waiting for the device (process 7 is timing)") == 1
