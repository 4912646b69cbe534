"""`whet rebuild`: the engine rebuilt from the original model and its data equals the lock's engine, or the reason is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from support.search_case import perceptron, recipe_with
from whet.builder.lock.lock import plan_digest, read_lock
from whet.cli.rebuild import command
from whet.engine import read_engine
from whet.errors import LockError, UsageError
from whet.frontends import network_from_onnx, save_onnx
from whet.search import rebuild, search


def searched(case: Path, project: Path, **changes) -> Path:
    """The deploy folder of a small search in its own project folder."""
    project.mkdir()
    for name in ("model.onnx", "calibrate.npz", "score.npz", "judge.npz"):
        shutil.copy(case / name, project / name)
    _, d = perceptron()
    np.savez(project / "train.npz", x=d["x"][:400], labels=d["y"][:400])
    return search(recipe_with(project, project / "work", **{"prefer": "latency", "target": {"engine_size": "0.9x"}, **changes})).folder.deploy


@pytest.fixture(scope="module")
def deployed(case, tmp_path_factory):
    """The result of a search over channels: cut, recovered, in INT8."""
    few = {"search__trials": 1, "survivor__count": 1, "scout__level": 0, "survivor__level": 0}
    few["space"] = {"width": {"step": 0.5, "most": 0.5}, "precision": ["int8"]}
    return searched(case, tmp_path_factory.mktemp("again") / "project", **few)


def lock_of(deploy: Path) -> dict:
    return read_lock(deploy / "lock.json")


def test_the_engine_equals_the_locks_engine(deployed, tmp_path):
    assert json.loads((deployed / "recipe.json").read_text())["pruning"]["groups"], "something was cut"
    done = CliRunner().invoke(command, [str(deployed), "--out", str(tmp_path / "again")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    plan = read_engine(tmp_path / "again" / "model.engine")
    lock = lock_of(deployed)
    assert plan_digest(plan) == lock["digest"] == plan_digest(read_engine(deployed / "model.engine"))
    assert [(x.name, plan.choices[x.name].tactic) for x in plan.network.layers] == [(e["name"], e["tactic"]) for e in lock["layers"]]
    assert lock["digest"][:16] in done.output
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (deployed / "model.onnx").read_bytes()
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == ["model.engine", "model.onnx"]


def test_its_recipe_is_distinguished_from_those_of_searches_and_of_pruning(deployed):
    from whet.errors import PruneError
    from whet.pruning import load_recipe as pruning_recipe
    from whet.search import load_recipe

    with pytest.raises(UsageError, match="`whet rebuild` of its folder rebuilds that engine"):
        load_recipe(deployed / "recipe.json")
    with pytest.raises(PruneError, match=r"in the folder that whet auto deploys it is pruning\.json"):
        pruning_recipe(deployed / "recipe.json")
    assert pruning_recipe(deployed / "pruning.json").groups


def test_files_of_an_interrupted_rebuild_are_no_obstacle(deployed, tmp_path):
    left = tmp_path / "again" / "work"
    left.mkdir(parents=True)
    (left / "log.txt").write_text("ended")
    assert rebuild(deployed, tmp_path / "again").digest == lock_of(deployed)["digest"]
    assert not left.exists()


def test_the_folder_has_instructions(deployed):
    line = "whet rebuild .  # the same engine from the original model and its data: cut and recovered, then built under lock.json"
    assert line in (deployed / "README.md").read_text()
    assert line in json.loads((deployed / "report.json").read_text())["commands"]


def test_a_moved_project_is_named(deployed, tmp_path):
    moved = Path(shutil.copytree(deployed.parents[1], tmp_path / "moved"))
    hidden = deployed.parents[1].rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(UsageError, match=r"'model': no such file: .*give the new folder with --project"):
            rebuild(moved / "work" / "deploy", tmp_path / "a")
        assert rebuild(moved / "work" / "deploy", tmp_path / "b", project=moved).digest == lock_of(moved / "work" / "deploy")["digest"]
    finally:
        hidden.rename(deployed.parents[1])


def test_other_contents_and_other_folders_are_refused(deployed, tmp_path):
    project = Path(shutil.copytree(deployed.parents[1], tmp_path / "p"))
    deploy = project / "work" / "deploy"
    with np.load(project / "calibrate.npz") as f:
        np.savez(project / "calibrate.npz", x=f["x"][::-1])
    with pytest.raises(UsageError, match=r"^data.calibrate: the contents changed since the search"):
        rebuild(deploy, tmp_path / "a", project=project)
    with pytest.raises(UsageError, match="is not a deploy folder of whet auto"):
        rebuild(project, tmp_path / "a")
    with pytest.raises(UsageError, match="exists already"):
        rebuild(deployed, project)
    with pytest.raises(UsageError, match="--project=nowhere: no such folder"):
        rebuild(deployed, tmp_path / "a", project="nowhere")
    held = json.loads((deploy / "recipe.json").read_text())
    del held["contents"]
    (deploy / "recipe.json").write_text(json.dumps(held))
    with pytest.raises(UsageError, match="was written by an older whet"):
        rebuild(deploy, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_different_weights_are_reported_with_their_difference(deployed, tmp_path):
    deploy = Path(shutil.copytree(deployed, tmp_path / "deploy"))
    net = network_from_onnx(deploy / "model.onnx")
    t = net.constants["b1"]
    t.weight = type(t.weight)(t.array() * np.float32(1 + 1e-5), t.weight.origin)
    save_onnx(net, deploy / "model.onnx")
    with pytest.raises(LockError, match=r"1 of 6 rebuilt weights differ from the lock's model, by at most 1e-05 of the largest in each: recovery"):
        rebuild(deploy, tmp_path / "again")
    assert (tmp_path / "again" / "model.onnx").is_file(), "it is kept"
    assert not (tmp_path / "again" / "model.engine").exists()


@pytest.mark.slow
def test_training_is_repeated_too(case, tmp_path):
    pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")
    short = {"epochs": 2, "batch": 100, "lr": 0.02, "device": "cpu"}
    deploy = searched(
        case, tmp_path / "project", data__train="train.npz", finetune=short, qat={"when": "always", "epochs": 8, "lr": 0.01, "batch": 32},
        space={"width": {"step": 0.5, "most": 0.5}, "precision": ["int8"]}, search__trials=1, survivor__count=1, scout__level=0, survivor__level=0,
    )  # fmt: skip
    held = json.loads((deploy / "recipe.json").read_text())
    assert held["finetuned"] or held["roundings"], "at least one training was used, otherwise this test shows nothing"
    again = rebuild(deploy, tmp_path / "again")
    assert again.digest == lock_of(deploy)["digest"]
