"""`whet finetune` from files to a file."""

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from test_finetune import digits_net

import whet
from whet.cli import group
from whet.errors import PruneError, UsageError
from whet.ops import run_network
from whet.pruning import PruneConfig, apply_recipe, load_recipe, prune, recover, save_recipe
from whet.pruning.order import check_order, read_history
from whet.sparsity import list_eligible_layers


@pytest.fixture
def files(tmp_path):
    found = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = (found.images[:, None] / 16).astype(np.float32), found.target.astype(np.int64)
    np.savez(tmp_path / "train.npz", x=x[:1200], y=y[:1200])
    np.savez(tmp_path / "test.npz", x=x[1200:], y=y[1200:])
    whet.save_onnx(digits_net(), tmp_path / "digits.onnx")
    return tmp_path


def run(*args):
    return CliRunner().invoke(group, ["finetune", *map(str, args)])


def test_a_model_is_trained_then_made_ready_for_int8(files):
    common = ["--data", files / "train.npz", "--test", files / "test.npz", "--device", "cpu", "--batch", 60]
    done = run(files / "digits.onnx", *common, "--epochs", 3, "--lr", 0.1, "-o", files / "tuned.onnx", "--checkpoint", files / "c.safetensors")
    assert done.exit_code == 0, done.output
    assert "epoch 3: loss" in done.output
    assert "57 steps" in done.output
    again = run(files / "digits.onnx", *common, "--epochs", 3, "--lr", 0.1, "-o", files / "again.onnx", "--checkpoint", files / "c.safetensors")
    assert "continued from step 57" in again.output
    assert (files / "again.onnx").read_bytes() == (files / "tuned.onnx").read_bytes()
    done = run(files / "tuned.onnx", *common, "--qat", "--teacher", files / "tuned.onnx", "--distill", 0.5, "--epochs", 0.5, "--lr", 0.001,
               "--optimizer", "adamw", "-o", files / "int8.onnx")  # fmt: skip
    assert done.exit_code == 0, done.output
    net = whet.network_from_onnx(files / "int8.onnx")
    assert any(x.op == "QuantizeLinear" for x in net.layers)
    with np.load(files / "test.npz") as f:
        right = run_network(net, {"x": f["x"]})["out"].argmax(1) == f["y"]
    assert right.mean() > 0.85


def test_the_order_of_steps_is_recorded_in_the_files(files):
    """prune, fine-tune, calibrate: each step reads the earlier steps from the file, and refuses another order unless forced."""
    steps = ["--data", files / "train.npz", "--device", "cpu", "--batch", 300, "--epochs", 0.5]
    whole = whet.network_from_onnx(files / "digits.onnx")
    cut = prune(whole, PruneConfig(ratio=0.4, multiple=2)).network
    whet.save_onnx(cut, files / "cut.onnx")
    with pytest.raises(PruneError, match="neither recovered nor fine-tuned since"):
        check_order(whet.network_from_onnx(files / "cut.onnx"), "calibrate")
    early = run(files / "cut.onnx", *steps, "--qat")
    assert "neither recovered nor fine-tuned since" in str(early.exception)
    assert run(files / "cut.onnx", *steps, "-o", files / "tuned.onnx").exit_code == 0
    tuned = whet.network_from_onnx(files / "tuned.onnx")
    assert [s["step"] for s in read_history(tuned)] == ["prune", "finetune"]
    check_order(tuned, "calibrate")
    with pytest.raises(PruneError, match="was fine-tuned after it was cut"):
        recover(tuned, whole, {}, {"x": np.zeros((1, 1, 8, 8), np.float32)})
    assert run(files / "tuned.onnx", *steps, "--qat", "--lr", 0.0001, "-o", files / "int8.onnx").exit_code == 0
    quantized = whet.network_from_onnx(files / "int8.onnx")
    assert [s["step"] for s in read_history(quantized)] == ["prune", "finetune", "calibrate"]
    late = run(files / "int8.onnx", *steps, "-o", files / "late.onnx")
    assert isinstance(late.exception, PruneError)
    assert "--insist" in str(late.exception)
    assert run(files / "int8.onnx", *steps, "-o", files / "late.onnx", "--insist").exit_code == 0


def test_held_masks_are_stored_in_the_recipe_and_restored(files):
    steps = ["--data", files / "train.npz", "--device", "cpu", "--batch", 300, "--epochs", 0.5]
    whole = whet.network_from_onnx(files / "digits.onnx")
    made = prune(whole, PruneConfig(ratio=0.4, multiple=4))
    save_recipe(made.recipe, files / "r.json")
    whet.save_onnx(made.network, files / "cut.onnx")
    done = run(files / "cut.onnx", *steps, "--masks", "2:4", "--recipe", files / "r.json", "-o", files / "t.onnx")
    assert done.exit_code == 0, done.output
    recipe = load_recipe(files / "r.json")
    assert recipe.groups.keys() == made.recipe.groups.keys()
    again, tuned = apply_recipe(whole, recipe), whet.network_from_onnx(files / "t.onnx")
    assert recipe.masks
    for name in recipe.masks:
        assert ((again.constants[name].array() == 0) == (tuned.constants[name].array() == 0)).all()
    assert list_eligible_layers(again)[0] == list_eligible_layers(tuned)[0] != []
    assert "--masks=2:4" in str(run(files / "cut.onnx", *steps, "--recipe", files / "r.json").exception)


def test_a_user_training_function_is_recorded(files, monkeypatch):
    (files / "my_own_training.py").write_text("def train(module, data, config):\n    next(module.parameters()).data.mul_(2)\n")
    monkeypatch.chdir(files)
    done = run("digits.onnx", "--data", "train.npz", "--train", "python:my_own_training:train", "-o", "own.onnx")
    assert "own.onnx: trained by python:my_own_training:train in" in done.output
    was, now = (whet.network_from_onnx(n).constants for n in ("digits.onnx", "own.onnx"))
    assert any(not np.array_equal(t.array(), now[n].array()) for n, t in was.items())


def test_mistakes_are_explained(files):
    done = run(files / "digits.onnx", "--data", files / "none.npz")
    assert isinstance(done.exception, UsageError)
    assert "FILE.npz" in str(done.exception)
    done = run(files / "digits.onnx", "--data", files / "train.npz", "--qat", "--train", "python:a:b")
    assert "--train is for floating point" in str(done.exception)
