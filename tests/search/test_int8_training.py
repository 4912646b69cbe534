"""Training for INT8 as a step of the search: its conditions, its recovery of accuracy lost to poor ranges, and its resumption after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from support.isa import VNNI
from support.search_case import RECIPE, perceptron, recipe_with
from whet.frontends import network_from_onnx
from whet.search import search
from whet.search.jobs.job import read_result
from whet.search.recipe.space import Candidate
from whet.search.stages.build_engine import build_config, build_engine_plan
from whet.search.stages.finetune import run_resumable
from whet.search.stages.qat import decide_int8_training, explain_skip, train_for_int8

AUTO = {"when": "auto", "epochs": 2.0}
#: a loss that waits from the first checkpoint on until the file `go` exists: the search is killed then, however fast it trains
LOSS = """
import time
from pathlib import Path

from torch.nn.functional import cross_entropy

HERE = Path(__file__).parent


def loss(outputs, labels):
    while list(HERE.rglob("qat.safetensors")) and not (HERE / "go").exists():
        time.sleep(0.05)
    return cross_entropy(outputs, labels)
"""


@pytest.mark.parametrize(("qat", "allowed", "lost", "drop", "train"), [
    (AUTO, 1.0, 0.6, 0.6, True),  # more than half of what the target allows
    (AUTO, 1.0, 0.4, 0.4, False),
    (AUTO, 1.0, 0.4, 1.2, True),  # the cut lost most of it, but the total is too much
    (AUTO, 1.0, -0.1, 1.2, False),  # calibration lost nothing: training for INT8 cannot gain anything
    (AUTO, None, 0.6, 0.6, True),  # half of one percent of 99
    (AUTO, None, 0.4, 0.4, False),
    ({**AUTO, "threshold": 0.1}, 1.0, 0.2, 0.2, True),
    ({**AUTO, "threshold": 2.0}, 1.0, 0.9, 0.9, False),
    ({**AUTO, "when": "always"}, 1.0, -0.5, -0.5, True),
])  # fmt: skip
def test_training_runs_only_after_a_large_loss_by_calibration(qat, allowed, lost, drop, train):
    wanted, why = decide_int8_training(qat, allowed, lost, drop, 99.0)
    assert wanted == train
    assert f"{lost:.3g}" in why


def test_the_loss_by_calibration_is_relative_to_the_calibrated_network():
    from whet.search.stages.prepare import Prepared

    steps = [{"step": "recovered", "metric": {"value": 98.7}}, {"step": "fine-tuned (worse, not used)", "metric": {"value": 96.0}, "used": False}]
    assert Prepared(perceptron()[0], steps=steps).metric["value"] == 98.7
    steps[1]["used"] = True
    assert Prepared(perceptron()[0], steps=steps).metric["value"] == 96.0


@pytest.fixture(scope="module")
def poor(case, tmp_path_factory):
    """The digits with calibration images five times too dark, so that ranges saturate; nothing is cut, and every layer is in INT8."""
    folder = tmp_path_factory.mktemp("poor")
    _, d = perceptron()
    np.savez(folder / "dark.npz", x=d["x"][:256] / 5)
    np.savez(folder / "train.npz", x=d["x"][:1000], labels=d["y"][:1000])
    recipe = json.loads(json.dumps(RECIPE)) | {
        "model": str(case / "model.onnx"), "target": {"engine_size": "0.9x", "accuracy_drop": 1}, "baselines": ["fp32"],
        "data": {"calibrate": "dark.npz", "score": str(case / "score.npz"), "judge": str(case / "judge.npz"), "train": "train.npz"},
        "space": {"width": False, "depth": False, "precision": ["int8"]},
        "qat": {"epochs": 24, "lr": 0.01, "batch": 32, "loss": "python:waiting:loss"},
    }  # fmt: skip
    recipe["scout"]["level"] = recipe["survivor"]["level"] = 0  # nothing is timed for the selection of kernels: integers wherever possible
    recipe["survivor"]["count"] = 1
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    (folder / "waiting.py").write_text(LOSS)
    return folder


@pytest.fixture(scope="module")
def trained(poor, tmp_path_factory):
    """A search that was killed during its training for INT8, and then resumed to its end."""
    pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")
    out = poor / "work"
    words = [sys.executable, "-m", "whet.cli", "auto", str(poor / "recipe.yaml"), "--out", str(out), "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    checkpoint = out / "survivors" / "0000" / "qat.safetensors"
    p = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    began = time.monotonic()
    while not checkpoint.exists() and p.poll() is None and time.monotonic() - began < 300:
        time.sleep(0.02)
    assert p.poll() is None, p.communicate()[1]
    os.kill(p.pid, signal.SIGKILL)
    p.communicate()
    (poor / "go").touch()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 3), done.stderr[-3000:]
    return out, json.loads(done.stdout), read_result(out / "survivors" / "0000")


@pytest.mark.slow
@VNNI
def test_training_recovers_the_loss_by_poor_ranges(trained):
    _, data, result = trained
    qat = result["qat"]
    assert qat["kept"] == "trained"
    assert qat["trained"]["value"] > qat["calibrated"]["value"] + 2
    assert result["metric"] == qat["trained"]
    assert data["met"], data["rows"][data["chosen"]]["checks"]


@pytest.mark.slow
def test_it_resumes_after_a_kill_and_leaves_no_checkpoint(trained):
    out, _, result = trained
    assert 0 < result["qat"]["resumed_at"] < 24 * 32
    assert not list(out.rglob("*.safetensors"))


@pytest.mark.slow
@VNNI
def test_both_scores_are_in_the_report(trained):
    out, data, result = trained
    steps = {s["step"]: s for s in data["steps"]}
    before, after = steps["calibrated for INT8"], steps["trained for INT8"]
    assert (before["metric"], after["metric"]) == (result["qat"]["calibrated"], result["qat"]["trained"])
    assert before["ms"] > 0
    assert after["ms"] > 0
    row = data["rows"][data["chosen"]]
    assert row["qat"] == result["qat"]
    assert f"trained for INT8: {after['metric']['value']:.4g} (calibrated: {before['metric']['value']:.4g})" in row["what"]
    page = (out / "deploy" / "report.html").read_text()
    assert "calibrated for INT8" in page
    assert "trained for INT8" in page
    assert json.loads((out / "deploy" / "recipe.json").read_text())["qat"]["kept"] == "trained"


@pytest.mark.slow
@VNNI
def test_the_deployed_model_has_the_trained_ranges_and_its_lock_builds_it(trained, case):
    import whet

    out, data, _ = trained
    deploy = out / "deploy"
    assert "Verified: the lock reproduces this engine" in (deploy / "README.md").read_text()
    net = network_from_onnx(deploy / "model.int8.onnx")
    scales = {x.inputs[0].name: float(x.inputs[1].array().reshape(-1)[0]) for x in net.layers if x.op == "QuantizeLinear"}
    ranges = json.loads((deploy / "calibration.json").read_text())["tensors"]
    learned = {n: float.fromhex(r["high"]) / 255 for n, r in ranges.items()}
    for name, scale in scales.items():
        assert scale == pytest.approx(learned[name], rel=1e-5)
    assert scales["x"] > 1.3 * 0.2 / 255, "the input's range grew from a fifth, that of the dark images"
    with np.load(case / "judge.npz") as f:
        x, y = f["x"], f["labels"]
    with whet.Runtime(threads=1).load(deploy / "model.engine").create_context() as context:
        guesses = [int(context.run({"x": x[i : i + 1]}).popitem()[1].argmax()) for i in range(len(x))]
    assert 100 * np.mean(np.array(guesses) == y) == pytest.approx(data["rows"][data["chosen"]]["metric"]["value"])
    other = pytest.importorskip("onnxruntime").InferenceSession(deploy / "model.int8.onnx", providers=["CPUExecutionProvider"])
    theirs = other.run(None, {"x": x})[0].argmax(1)
    assert np.mean(theirs == np.array(guesses)) > 0.98, "another runtime computes the same Q/DQ"


@VNNI
def test_an_untrained_calibrated_engine_gives_the_reason_and_its_lock_builds_it(case, tmp_path):
    level = {"scout__level": 0, "survivor__level": 0, "survivor__count": 1}
    recipe = recipe_with(case, tmp_path / "w", space={"width": False, "depth": False, "precision": ["int8"]}, **level)
    found = search(recipe)
    data = json.loads((found.folder.deploy / "report.json").read_text())
    assert data["rows"][data["chosen"]]["name"] == "trial 0"
    assert "not trained for INT8: the recipe gives no data.train" in data["notes"]
    assert [s["step"].partition(" ")[0] for s in data["steps"]] == ["original", "engine"]
    words = (found.folder.deploy / "README.md").read_text()
    assert "Verified: the lock reproduces this engine" in words
    assert "--onnx=model.onnx" in words
    assert (found.folder.deploy / "model.int8.onnx").is_file(), "for other runtimes"


@pytest.mark.slow
def test_a_looser_target_keeps_the_calibrated_engine(trained, poor, case, tmp_path):
    """Another target is another job: decisions under the old one are not reused."""
    from whet.search.jobs.job import Job

    survivor = poor / "work" / "survivors" / "0000"
    job = Job.read(survivor)
    assert job.allowed == 1
    assert job.same_as(survivor)
    assert not Job(**{**vars(job), "allowed": 40.0}).same_as(survivor)
    more = {**job.recipe, "qat": False}
    assert not Job(**{**vars(job), "recipe": more}).same_as(survivor)
    original = Job.read(poor / "work" / "baselines" / "fp32-b1")
    assert Job(**{**vars(original), "recipe": {**original.recipe, "qat": False}}).same_as(poor / "work" / "baselines" / "fp32-b1")


def test_untrainable_models_are_reported(case, tmp_path):
    pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")
    net = network_from_onnx(case / "model.onnx")
    _, d = perceptron()
    c = Candidate(precision="int8")
    recipe = recipe_with(case, tmp_path, space__precision=["int8"])
    config = build_config(net, recipe, c, 0)
    plan = build_engine_plan(net, config, {"x": d["x"][:32]}, tmp_path)
    assert explain_skip(recipe, c, plan) == "the recipe gives no data.train"
    with_data = recipe_with(case, tmp_path, data__train="score.npz")
    assert explain_skip(with_data, c, plan) is None
    assert "not FP8" in explain_skip(with_data, Candidate(precision="fp8"), plan)
    assert explain_skip(recipe_with(case, tmp_path, qat="never"), c, plan) == "the recipe says qat: never"
    floats = build_engine_plan(net, build_config(net, recipe, Candidate(), 0), {}, tmp_path)
    assert "the engine computes in floating point" in explain_skip(with_data, c, floats)


def test_floating_point_layers_are_not_trained_for_integers(case, tmp_path):
    pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")
    from whet.search.stages.prepare import Prepared

    net = network_from_onnx(case / "model.onnx")
    _, d = perceptron()
    c = Candidate(precision="int8")
    recipe = recipe_with(case, tmp_path, data__train="score.npz", qat={"epochs": 0.2}, threads=1)
    config = build_config(net, recipe, c, 0)
    plan = build_engine_plan(net, config, {"x": d["x"][:32]}, tmp_path)
    first = next(x.name for x in net.layers if x.op == "Gemm")
    plan.report.quantized.float_layers, plan.report.quantized.small_weights = [first], False  # the target has an engine_size
    got = train_for_int8(Prepared(net), net, plan.report.quantized, config, recipe, c, tmp_path, say=lambda text: None)
    made = {x.name: x for x in got.quantized.layers}
    assert made[first].inputs[1].maker is None, "its weights are floats"
    others = [x for x in got.quantized.layers if x.op == "Gemm" and x.name != first]
    assert all(x.inputs[1].maker.op == "DequantizeLinear" for x in others)
    assert len(others) == 2


def test_an_incompatible_checkpoint_is_discarded_and_reported(tmp_path):
    from whet.errors import TrainingError

    path, notes = tmp_path / "c.safetensors", []

    def train():
        if path.exists():
            raise TrainingError("the checkpoint is of another model")
        return "trained"

    path.touch()
    assert run_resumable(path, train, notes) == "trained"
    assert notes == ["training restarted: the checkpoint is of another model"]

    def broken():
        raise TrainingError("the loss is nan")

    with pytest.raises(TrainingError, match="loss is nan"):
        run_resumable(path, broken, notes)
