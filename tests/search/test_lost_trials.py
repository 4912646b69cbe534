"""Trials that Ray loses (its worker was killed, its node left the cluster) are reported; those that ended are stored whole, the result last."""

import os
from types import SimpleNamespace

import pytest

from whet.search.jobs import job as j
from whet.search.jobs.ray_workers import RayWorkers


class LostError(Exception):
    pass


@pytest.fixture
def workers(tmp_path):
    """Ray's part that is used: `ended` maps references of ended jobs to their files, or to the error that their worker's death raises."""
    ended = {}

    def wait(refs, num_returns, timeout):
        assert (num_returns, timeout) == (len(refs), 0)
        return [r for r in refs if r in ended], [r for r in refs if r not in ended]

    def get(ref):
        if isinstance(ended[ref], Exception):
            raise ended[ref]
        return ended[ref]

    made = RayWorkers(SimpleNamespace(search=SimpleNamespace(trial_timeout=1.0)), "auto")
    cancelled = []
    made.ray = SimpleNamespace(
        wait=wait, get=get, cancel=lambda ref, force: cancelled.append((ref, force)), exceptions=SimpleNamespace(RayError=LostError)
    )
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        made.running[name] = tmp_path / name
    return made, ended, cancelled


def test_a_killed_worker_loses_its_trial_alone(workers, tmp_path):
    made, ended, cancelled = workers
    assert made.collect_finished() == []
    ended["a"] = LostError("The worker died unexpectedly\n while executing this task:   SIGKILL")
    ended["b"] = {"model.engine": b"engine", j.RESULT: b"{}"}
    ended["c"] = {"problem": b"the trial's process exited with code -9 after 3 s: it said nothing"}
    found = {folder.name: problem for folder, problem in made.collect_finished()}
    assert found == {
        "a": "Ray lost the trial: The worker died unexpectedly while executing this task: SIGKILL",
        "b": None,
        "c": "the trial's process exited with code -9 after 3 s: it said nothing",
    }
    assert (tmp_path / "b/model.engine").read_bytes() == b"engine"
    assert list((tmp_path / "a").iterdir()) == []
    assert made.collect_finished() == []
    made.stop()
    assert cancelled == [("d", True)]


def test_the_result_is_written_last(workers, tmp_path, monkeypatch):
    """A search that is killed while files are written must not find a result without the files that it names."""
    made, ended, _ = workers
    ended["a"] = {j.RESULT: b"{}", "a.txt": b"1", "z.txt": b"2"}
    written = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda part, path: (written.append(path.name), replace(part, path))[1])
    made.collect_finished()
    assert written[-1] == j.RESULT
    assert sorted(written) == sorted([j.RESULT, "a.txt", "z.txt"])


def test_an_error_that_is_not_rays_is_not_swallowed(workers):
    made, ended, _ = workers
    ended["a"] = ZeroDivisionError("a fault of the program")
    with pytest.raises(ZeroDivisionError):
        made.collect_finished()
