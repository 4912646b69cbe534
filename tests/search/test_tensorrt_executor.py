"""A search whose engines TensorRT builds, times and scores; tested on whet.trt under TensorRT's name."""

import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest

import whet.trt
from support.search_case import recipe_with
from whet.engine import write_engine
from whet.errors import EngineError, UsageError
from whet.frontends import network_from_onnx
from whet.measure.tensorrt_engine import build_tensorrt, load_tensorrt
from whet.ops import run_network
from whet.search import search
from whet.search.recipe.space import Candidate
from whet.search.stages.build_engine import build_config, build_engine_plan
from whet.search.stages.executor import find_executed_file, load_executor, move_engine, remove_engine, write_tensorrt_plan

UNDER_ITS_NAME = "import sys, whet.trt\nsys.modules['tensorrt'] = whet.trt\n"

@pytest.fixture
def project(case, tmp_path, monkeypatch):
    """A folder with the case's files and a module `tensorrt`, which jobs import too."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("model.onnx", "calibrate.npz", "score.npz", "judge.npz"):
        shutil.copy(case / name, folder / name)
    (folder / "tensorrt.py").write_text(UNDER_ITS_NAME)
    monkeypatch.setitem(sys.modules, "tensorrt", whet.trt)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_plan_computes_the_network_of_the_engine(project, precision):
    recipe = recipe_with(project, project / "work", executor="tensorrt")
    net, data = network_from_onnx(project / "model.onnx"), dict(np.load(project / "calibrate.npz"))
    config = build_config(net, recipe, Candidate(precision=precision), 0)
    path = project / "model.engine"
    plan = build_engine_plan(net, config, {"x": data["x"][:32]}, project)
    write_engine(plan, path)
    write_tensorrt_plan(path, net, config, plan)
    outputs = []
    for executor in ("whet", "tensorrt"):
        with load_executor(path, dataclasses.replace(recipe, executor=executor)).create_context() as context:
            outputs.append(context.run({"x": data["x"][:1]})[context.output_names[0]])
    ours, theirs = outputs
    np.testing.assert_allclose(theirs, ours, atol=1e-4 * np.abs(ours).max())
    exact = run_network(net, {"x": data["x"][:1]})[net.outputs[0].name]
    assert (np.abs(theirs - exact).max() > 1e-4 * np.abs(exact).max()) == (precision == "int8"), "an INT8 plan computes with the ranges of the engine"
    assert not list(project.glob("*.tensorrt.onnx"))
    assert find_executed_file(path) == project / "model.plan"


@pytest.mark.slow
def test_its_engines_are_timed_scored_and_deployed(project):
    few = {
        "search__trials": 1, "survivor__count": 1, "scout__level": 0, "survivor__level": 0, "target": {"engine_size": "0.9x"}, "executor": "tensorrt",
        "space": {"width": {"step": 0.5, "most": 0.5}, "precision": ["int8"]},
    }  # fmt: skip
    deploy = search(recipe_with(project, project / "work", **few)).folder.deploy
    report = json.loads((deploy / "report.json").read_text())
    assert report["device"].endswith(f"tensorrt {whet.trt.__version__}")
    assert any("are those of tensorrt" in note for note in report["notes"])
    assert "`model.plan`: TensorRT's plan" in (deploy / "README.md").read_text()
    chosen = report["rows"][report["chosen"]]
    assert chosen["engine_bytes"] == (deploy / "model.plan").stat().st_size
    data = np.load(project / "judge.npz")
    with load_tensorrt(deploy / "model.plan").create_context() as context:
        name, = context.output_names
        right = [int(context.run({"x": x[None]})[name].argmax()) == label for x, label in zip(data["x"], data["labels"], strict=True)]
    assert chosen["metric"]["value"] == pytest.approx(100 * np.mean(right), abs=1e-6)


def test_mistakes_are_named(project, monkeypatch):
    with pytest.raises(UsageError, match=r"'executor' is one of whet, tensorrt, not 'tensort'. Did you mean 'tensorrt'"):
        recipe_with(project, project / "work", executor="tensort")
    with pytest.raises(UsageError, match=r"'baselines': with TensorRT as executor fp8 is not searched"):
        recipe_with(project, project / "work", executor="tensorrt", device="cuda", baselines=["fp8"])
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UsageError, match="TensorRT's Python package is not installed"):
        search(recipe_with(project, project / "work", executor="tensorrt"))


def test_a_plan_is_read_back_moved_and_removed(project):
    path = project / "model.engine"
    path.write_bytes(b"whet's engine")
    engine = build_tensorrt(str(project / "model.onnx"), shapes={"x": (1, 64)}, optimization_level=0)
    engine.save(project / "model.plan")
    again = load_tensorrt(project / "model.plan")
    with again.create_context() as context:
        assert again.memory(context).peak > (project / "model.plan").stat().st_size
    move_engine(path, project / "other.engine")
    assert sorted(p.name for p in project.glob("*.plan")) == ["other.plan"]
    remove_engine(project / "other.engine")
    assert not [*project.glob("*.plan"), *project.glob("*.engine")]
    (project / "broken.plan").write_bytes(b"no plan")
    with pytest.raises(EngineError, match="does not read"):
        load_tensorrt(project / "broken.plan")
