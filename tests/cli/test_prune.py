"""`whet prune` on the digits network: a smaller ONNX file that ONNX Runtime runs, and a recipe that reproduces the cut."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import whet
from whet.cli.prune import command
from whet.errors import UsageError
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network, parse_type
from whet.pruning import branches, count_params, groups

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def test_a_user_importance_is_loaded_from_the_working_folder(tmp_path, monkeypatch):
    """Run as by a user: the working folder is not on the console script's path."""
    (tmp_path / "my_scores.py").write_text("import numpy as np\n\n\ndef last(net, group):\n    return np.arange(group.size, dtype=float)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    args = [str(DIGITS / "digits_resnet.onnx"), "-o", "s.onnx", "--recipe", "r.json", "--importance", "python:my_scores:last", "--scope", "group"]
    done = CliRunner().invoke(command, args, catch_exceptions=False)
    assert "by python:my_scores:last" in done.output
    kept = json.loads(Path("r.json").read_text())["groups"][0]
    assert kept["kept"] == list(range(kept["size"] - len(kept["kept"]), kept["size"]))


def grouped_network():
    """Two convolutions around one of eight groups with eight channels each, a layer whose groups and channels inside are both cut."""
    net, rng = Network("grouped"), np.random.default_rng(0)
    y = net.add_input("x", parse_type("f32[N,3,8,8]"))
    for n, (cin, cout, k, group) in enumerate([(3, 64, 3, 1), (64, 64, 3, 8), (64, 64, 1, 1), (64, 64, 3, 8), (64, 64, 1, 1)]):
        w = net.constant(rng.standard_normal((cout, cin // group, k, k)).astype(np.float32), f"w{n}")
        y = net.add("Relu", net.add("Conv", y, w, group=group, pads=(k // 2,) * 4))
    w = net.constant(rng.standard_normal((64, 5)).astype(np.float32), "out")
    net.mark_output(net.add("MatMul", net.add("Flatten", net.add("GlobalAveragePool", y)), w), "y")
    return net


def test_a_ratio_is_one_of_channels_and_params_is_one_of_parameters(tmp_path):
    model, small = str(tmp_path / "m.onnx"), str(tmp_path / "s.onnx")
    save_onnx(grouped_network(), model)
    before = count_params(network_from_onnx(model))

    def run_prune(flag: str) -> tuple[str, float]:
        done = CliRunner().invoke(command, [model, "-o", small, flag, "--multiple=1"], catch_exceptions=False)
        return done.output, count_params(network_from_onnx(small)) / before

    said, left = run_prune("--ratio=0.5")
    assert left < 0.4, "both axes of most layers are cut"
    assert f"--ratio=0.5 is the share of channels to remove; {left:.2f} of the parameters are left. For a share of these: --params=0.5x" in said
    said, left = run_prune("--params=0.5x")
    assert 0.45 < left <= 0.5
    assert "--ratio" not in said


def test_groups_are_listed():
    done = CliRunner().invoke(command, [str(DIGITS / "digits_resnet.onnx"), "--list"], catch_exceptions=False)
    lines = done.output.splitlines()
    assert lines[0].startswith("7 groups")
    named = [line.split(":")[0].strip() for line in lines[1:8]]
    net = whet.network_from_onnx(DIGITS / "digits_resnet.onnx")
    assert named == [g.name for g in groups(net)]
    assert [line.split(":")[0].strip() for line in lines[9:]] == [b.name for b in branches(net)]


@pytest.mark.slow
def test_cut_recover_and_recipe(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DIGITS))
    data = __import__("data")
    training, _ = data.load_train()
    images, labels = data.load_heldback()
    np.save(tmp_path / "train.npy", training[:48])
    small, recipe = tmp_path / "small.onnx", tmp_path / "r.json"
    args = [str(DIGITS / "digits_resnet.onnx"), "-o", str(small), "--recipe", str(recipe), "--calibData", str(tmp_path / "train.npy")]
    done = CliRunner().invoke(command, [*args, "--samples", "48"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "of 656 channels" in done.output
    assert small.stat().st_size < 0.6 * (DIGITS / "digits_resnet.onnx").stat().st_size
    assert (run(small, images).argmax(1) == labels).mean() > 0.98
    again = CliRunner().invoke(command, [str(DIGITS / "digits_resnet.onnx"), "-o", str(tmp_path / "again.onnx"), "--applyRecipe", str(recipe)])
    assert again.exit_code == 0, again.output
    bare = CliRunner().invoke(command, [str(DIGITS / "digits_resnet.onnx"), "-o", str(tmp_path / "bare.onnx")], catch_exceptions=False)
    assert "nothing was recovered" in bare.output
    np.testing.assert_array_equal(run(tmp_path / "again.onnx", images[:8]), run(tmp_path / "bare.onnx", images[:8]))
    recovered = ["--applyRecipe", str(recipe), "--weights", str(tmp_path / "w.safetensors"), *args[5:], "--samples", "48"]
    done = CliRunner().invoke(command, [args[0], "-o", str(tmp_path / "third.onnx"), *recovered], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(run(tmp_path / "third.onnx", images[:8]), run(small, images[:8]))
    weights = load_file(tmp_path / "w.safetensors")
    model = onnx.load(tmp_path / "third.onnx")
    for t in model.graph.initializer:
        if t.name in weights:
            np.testing.assert_array_equal(weights[t.name], onnx.numpy_helper.to_array(t))
    assert sum(t.name in weights for t in model.graph.initializer) == len(weights) > 10
    sys.modules.pop("data", None)


def test_a_recipe_excludes_other_options_and_is_written_again(tmp_path):
    model, recipe = str(DIGITS / "digits_resnet.onnx"), tmp_path / "r.json"
    CliRunner().invoke(command, [model, "-o", str(tmp_path / "a.onnx"), "--recipe", str(recipe), "--ratio", "0.5"], catch_exceptions=False)
    again = [model, "-o", str(tmp_path / "b.onnx"), "--applyRecipe", str(recipe)]
    for flag in (["--ratio", "0.9"], ["--latency", "0.5x"], ["--importance", "l2"], ["--skip", "conv1.weight"], ["--noDepth"]):
        done = CliRunner().invoke(command, [*again, *flag])
        assert isinstance(done.exception, UsageError)
        assert f"--applyRecipe defines the cuts, so {flag[0].replace('noDepth', 'depth')} has no effect" in str(done.exception)
    done = CliRunner().invoke(command, [*again, "--recipe", str(tmp_path / "copy.json")], catch_exceptions=False)
    assert (tmp_path / "copy.json").read_text() == recipe.read_text(), done.output


def test_two_outputs_cannot_have_the_same_file(tmp_path):
    model, both = str(DIGITS / "digits_resnet.onnx"), str(tmp_path / "x.onnx")
    done = CliRunner().invoke(command, [model, "-o", both, "--recipe", both])
    assert "--output and --recipe are both" in str(done.exception)
    done = CliRunner().invoke(command, [model, "-o", both, "--weights", str(tmp_path)])
    assert "is a directory" in done.output
    assert not Path(both).exists()
