"""The whole search on a small real case, killed twice: nothing is lost or done twice, and the result can be deployed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support.search_case import recipe_with
from whet.errors import BuildError, UsageError
from whet.search import dry_run, search
from whet.search.jobs.job import read_result
from whet.search.loop import pick
from whet.search.outcome.folder import IDENTITY, WorkFolder
from whet.search.outcome.progress import Silent


def command(case: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "whet.cli", "auto", str(case / "recipe.yaml"), "--out", str(out), *more]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "OPENBLAS_NUM_THREADS": "1"}


def count_events(out: Path) -> int:
    """Lines in the log of a search."""
    log = out / "events.jsonl"
    return len(log.read_text().splitlines()) if log.is_file() else 0


@pytest.fixture(scope="module")
def finished(case, tmp_path_factory):
    """A search that was killed with SIGKILL during two random jobs, at random times, and then resumed to its end; in a project folder of its own."""
    project, cache = Path(shutil.copytree(case, tmp_path_factory.mktemp("out") / "project")), tmp_path_factory.mktemp("cache")
    out = project / "work"
    seed = int(time.time())
    moments = random.Random(seed)
    kills = []
    for events in sorted(moments.sample(range(1, 11), 2)):
        p = subprocess.Popen(command(project, out), env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while p.poll() is None and count_events(out) < events:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        if p.poll() is None:
            os.kill(p.pid, signal.SIGKILL)
            kills.append(events)
        p.communicate()
    done = subprocess.run(command(project, out, "--json"), env=environment(cache), capture_output=True, text=True, check=False, timeout=300)
    return out, done, kills, seed


def test_it_ends_and_reports_if_the_target_is_met(finished):
    _, done, kills, seed = finished
    assert done.returncode in (0, 3), f"killed after {kills} events (seed {seed})\n{done.stderr[-3000:]}"
    data = json.loads(done.stdout)
    assert data["met"] == (done.returncode == 0)
    chosen = data["rows"][data["chosen"]]
    assert chosen["met"] == data["met"]
    assert all(c["met"] for c in chosen["checks"]) == data["met"]


def test_no_trial_is_lost_or_done_twice(finished):
    import optuna

    out, _, kills, seed = finished
    study = optuna.load_study(study_name="whet", storage=f"sqlite:///{out / 'study.sqlite3'}")
    trials = [t for t in study.get_trials() if t.state.name != "WAITING"]
    assert [t.number for t in trials] == list(range(len(trials)))
    assert all(t.state.name in ("COMPLETE", "FAIL") for t in trials), f"killed after {kills} events (seed {seed})"
    own = [t for t in trials if "same_as" not in t.user_attrs]
    assert len(own) == 5
    assert len({json.dumps(t.params, sort_keys=True) for t in own}) == len(own)
    for t in own:
        result = read_result(out / "scouts" / f"{t.number:04d}")
        assert result["state"] == "done", result
        assert t.values[1] == result["metric"]["value"]
        assert t.user_attrs["candidate"] == result["candidate"]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    ended = [e["job"] for e in events if e["event"] == "end"]
    assert len(ended) == len(set(ended)), "a job that had ended ran again"


def test_the_deploy_folder_runs(finished, case):
    out, done, *_ = finished
    deploy, data = out / "deploy", json.loads(done.stdout)
    for name in ("model.engine", "model.onnx", "lock.json", "recipe.json", "report.html", "report.json", "README.md"):
        assert (deploy / name).stat().st_size > 0
    assert "Verified: the lock reproduces this engine" in (deploy / "README.md").read_text()
    import whet

    with np.load(case / "judge.npz") as f:
        x, y = f["x"], f["labels"]
    with whet.Runtime(threads=1).load(deploy / "model.engine").create_context() as context:
        guesses = [int(context.run({"x": x[i : i + 1]}).popitem()[1].argmax()) for i in range(len(x))]
    chosen = data["rows"][data["chosen"]]
    assert 100 * np.mean(np.array(guesses) == y) == pytest.approx(chosen["metric"]["value"])
    assert chosen["metric"]["samples"] == len(y)
    assert (deploy / "model.engine").stat().st_size == chosen["engine_bytes"]
    pruned = whet.network_from_onnx(deploy / "model.onnx")
    assert sum(t.array().size for t in pruned.constants.values()) < 96 * 64 + 64 * 96 + 64 * 10


def test_everything_is_measured(finished):
    data = json.loads(finished[1].stdout)
    original, *others = data["rows"]
    assert original["latency"]["ratio"] == 1
    front = [(r["cost"], -r["metric"]["value"]) for r in data["rows"] if r["front"]]
    assert front
    for r in data["rows"]:
        better = [p for p in front if p[0] <= r["cost"] and p[1] <= -r["metric"]["value"]]
        assert better, "each engine is on the Pareto set, or one of the set is as good in both"
    assert len(others) == 2
    assert data["axes"] == [{"name": "size of the engine file", "key": "engine_bytes", "limit": 0.6}]
    assert set(data["classes"]) == {"96 inner", "64 inner"}
    for row in [*data["rows"], *(t for t in data["trials"] if t["same_as"] is None)]:
        assert 0 < row["latency"]["median_ms"] <= row["latency"]["p99_ms"]
        assert row["throughput"] > 0
        assert row["memory_bytes"] > 0
        assert row["engine_bytes"] > 0
        assert row["build_seconds"] > 0
        assert row["energy"]["mj"] is None or row["energy"]["mj"] > 0
        assert row["energy"]["mj"] is not None or "not measurable" in row["energy"]["about"]
        assert 0 <= row["metric"]["low"] <= row["metric"]["value"] <= row["metric"]["high"] <= 100
    assert all(t["verdict"] for t in data["trials"])
    assert data["steps"][0]["step"] == "original"
    assert all(s["ms"] > 0 for s in data["steps"]), "each step has a time"
    assert len(data["layers"]) >= 3


def test_resuming_a_finished_search_repeats_nothing(finished):
    out = finished[0]
    before = (out / "events.jsonl").read_text()
    found = search(recipe_with(out.parent, out), deploy=False)
    assert found.chosen == json.loads((out / "deploy" / "report.json").read_text())["chosen"]
    new = (out / "events.jsonl").read_text()[len(before) :]
    assert [json.loads(line)["event"] for line in new.splitlines()] == ["resume", "done"]


def test_an_engine_damaged_after_it_was_built_is_not_deployed(finished, tmp_path):
    project = finished[0].parent
    out = shutil.copytree(finished[0], tmp_path / "work")
    for engine in [*out.glob("survivors/*/model.engine"), *out.glob("baselines/*/model.engine")]:
        data = bytearray(engine.read_bytes())
        data[len(data) // 2] ^= 0xFF
        engine.write_bytes(bytes(data))
    with pytest.raises(BuildError, match=r"model\.engine was damaged after it was built: .* Delete the folder .* and run the same command"):
        search(recipe_with(project, out))


def test_another_recipe_is_refused_in_the_same_folder(finished):
    with pytest.raises(UsageError, match=r"search of another recipe \(changed: space;.*--fresh"):
        search(recipe_with(finished[0].parent, finished[0], space__batch=[1, 4]))


def test_a_recipe_may_change_only_before_the_first_measurement(finished, case, tmp_path):
    project = Path(shutil.copytree(finished[0].parent, tmp_path / "moved"))
    (project / "score.npz").write_bytes((project / "judge.npz").read_bytes())
    with pytest.raises(UsageError, match=r"another recipe \(changed: data\.score; files and functions are compared by content\)"):
        search(recipe_with(project, project / "work"))
    with WorkFolder(tmp_path / "w").open_locked(recipe_with(case, tmp_path / "w")) as resumed:
        assert not resumed
    with WorkFolder(tmp_path / "w").open_locked(recipe_with(case, tmp_path / "w", space__batch=[2])) as resumed:
        assert resumed
    assert json.loads((tmp_path / "w" / IDENTITY).read_text())["space"]["batch"] == [2]


def test_a_damaged_identity_is_reported_and_can_be_discarded(finished, tmp_path):
    work = Path(shutil.copytree(finished[0], tmp_path / "work"))
    recipe = recipe_with(finished[0].parent, work)
    os.truncate(work / IDENTITY, 10)
    with pytest.raises(UsageError, match=r"search\.json is damaged or missing.*--fresh"), WorkFolder(work).open_locked(recipe):
        pass
    with WorkFolder(work).open_locked(recipe, fresh=True) as resumed:
        assert not resumed
    assert not (work / "study.sqlite3").exists()


def test_survivors_are_those_nearest_to_the_target(finished):
    found = search(recipe_with(finished[0].parent, finished[0]), deploy=False)
    picked = pick(found.trials, found.judging, 99)
    met = [all(c.met for c in found.judging.trial_checks(t)) for t in picked]
    assert met == sorted(met, reverse=True)


def test_a_dry_run_builds_nothing(case, tmp_path):
    facts = dry_run(recipe_with(case, tmp_path / "work"))
    assert not (tmp_path / "work").exists()
    assert facts["classes"] == {"96 inner": ["w0"], "64 inner": ["w1"]}
    assert facts["data"] == {"calibrate": {"x": [64]}, "score": 400, "judge": 397}
    assert facts["points"] == 16


def test_a_trial_whose_process_dies_fails_with_the_reason(case, tmp_path):
    (tmp_path / "metric_that_dies.py").write_text(
        "import os\n\n\ndef metric(predict):\n    if os.path.exists('die'):\n        os.abort()\n    return 1.0\n"
    )
    recipe = recipe_with(
        case, tmp_path / "work", metric="python:metric_that_dies:metric", folder=str(tmp_path), model=str(case / "model.onnx"),
        data__calibrate=str(case / "calibrate.npz"), data__score=str(case / "score.npz"), data__judge=str(case / "judge.npz"), search__trials=1,
    )  # fmt: skip

    class KillsScouts(Silent):
        def start_job(self, folder, description):
            (tmp_path / "die").unlink(missing_ok=True)
            if folder.parent.name == "scouts":
                (tmp_path / "die").touch()

    with pytest.raises(BuildError, match="all 1 trials failed; first failure: the trial's process was killed by SIGABRT"):
        search(recipe, watcher=KillsScouts())
    assert read_result(tmp_path / "work" / "scouts" / "0000")["reason"].startswith("the trial's process was killed by SIGABRT")


@pytest.mark.slow
def test_a_failed_survivor_is_replaced_by_the_next_best(case, tmp_path):
    (tmp_path / "metric_of_survivors.py").write_text(
        "import os\n\n\ndef metric(predict):\n    if os.path.exists('refuse'):\n        raise ValueError('not\\nthis one')\n    return 1.0\n"
    )
    recipe = recipe_with(
        case, tmp_path / "work", metric="python:metric_of_survivors:metric", folder=str(tmp_path), model=str(case / "model.onnx"),
        data={"calibrate": str(case / "calibrate.npz")}, search__trials=2, survivor__count=1,
    )  # fmt: skip

    class RefusesTheFirst(Silent):
        seen = 0

        def start_job(self, folder, description):
            (tmp_path / "refuse").unlink(missing_ok=True)
            if folder.parent.name == "survivors":
                RefusesTheFirst.seen += 1
                if RefusesTheFirst.seen == 1:
                    (tmp_path / "refuse").touch()

    found = search(recipe, watcher=RefusesTheFirst())
    verdicts = [t["verdict"] for t in json.loads((found.folder.deploy / "report.json").read_text())["trials"]]
    assert sum(v.startswith("survivor, but failed with full effort: ValueError: not this one") for v in verdicts) == 1
    states = [read_result(p)["state"] for p in sorted((tmp_path / "work" / "survivors").iterdir())]
    assert sorted(states) == ["done", "failed"]
    assert len(found.final["rows"]) == 2
    assert any("failed as a survivor: ValueError: not this one" in note for note in found.notes)
