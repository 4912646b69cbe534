"""`whet prune` with invalid data, labels and flags: each mistake is named before anything is cut."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from whet import zoo
from whet.cli.prune import command
from whet.errors import PruneError, UsageError, WhetError
from whet.frontends import network_from_onnx, save_onnx
from whet.pruning import PruneConfig, Target, prune, recover, reestimate_batch_norms


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, samples for it and files with one mistake each."""
    folder = tmp_path_factory.mktemp("mistakes")
    zoo.save("lenet5", folder / "m.onnx")
    x = np.random.default_rng(0).standard_normal((12, 1, 32, 32)).astype(np.float32)
    bad = x.copy()
    bad[5, 0, 3, 3] = np.inf
    for name, a in (("good", x), ("bad", bad), ("none", x[:0])):
        np.savez(folder / f"{name}.npz", input=a)
    (folder / "empty.npy").touch()
    y = np.arange(12) % 10
    for name, a in (("y", y), ("floats", y * 1.0), ("few", y[:3]), ("far", y + 90)):
        np.save(folder / f"{name}.npy", a)
    return folder


TAYLOR = ("--importance=taylor1", "--calibData=good.npz")


@pytest.mark.parametrize(("flags", "message"), [
    (["--calibData=bad.npz"], "sample 5 of 'input' has NaN or infinite values"),
    (["--calibData=none.npz"], "none.npz has no samples"),
    ([*TAYLOR, "--labels=floats.npy"], "labels must be a vector of class indices, one per sample, not float64"),
    ([*TAYLOR, "--labels=few.npy"], "there are 3 labels for 12 samples"),
    ([*TAYLOR, "--labels=far.npy"], "labels range from 90 to 99"),
    ([*TAYLOR, "--labels=nothing.npy"], "--labels=nothing.npy cannot be read as NumPy arrays: no such file"),
    ([*TAYLOR, "--labels=m.onnx"], "--labels=m.onnx cannot be read as NumPy arrays: it is no array file"),
    ([*TAYLOR, "--labels=good.npz"], "--labels=good.npz is an .npz file"),
    ([*TAYLOR, "--labels=empty.npy"], "--labels=empty.npy cannot be read as NumPy arrays: it is no array file"),
    (["--labels=y.npy"], "--labels has no effect here: labels are for --importance=taylor1 and taylor2"),
    (["--samples=3"], "--samples has no effect here: there is no data"),
    (["--ratio=0.3", "--flops=0.5x"], "--ratio has no effect here: --flops sets the amount"),
    (["--scope=group", "--flops=0.5x"], "--scope has no effect here"),
    (["--fp16"], "--fp16 has no effect here: nothing is built or timed"),
    (["--flops=0.5x", "--latencyTable=t.json"], "--latencyTable has no effect here"),
    (["--noDepth"], "--depth has no effect here: with --ratio alone no branch is removed"),
    (["--skip=conv2.wieght"], "no prunable group, branch or layer is called 'conv2.wieght'. Did you mean 'conv2.weight'"),
    (["--width=conv2.weight"], "--width=conv2.weight: write GROUP=N"),
    (["--width=conv2.weight=-3"], "write GROUP=N, N the units to keep"),
    (["--width=conv2.wieght=8"], "which is not a prunable group. Did you mean 'conv2.weight'"),
    (["--width=conv2.weight=17"], "the width 17 is invalid for 'conv2.weight' with 16 units: give 1 to 16"),
    (["--width=conv2.weight=0"], "the width 0 is invalid"),
    (["--width=conv2.weight=8", "--flops=0.5x"], "--width has no effect here: --flops chooses the widths"),
    (["--skip=onv2"], "Names that contain it: /conv2/Conv, conv2.weight."),
    (["-o", "m.onnx"], "--output=m.onnx would overwrite a file that this command reads"),
    (["--recipe=m.onnx"], "--recipe=m.onnx would overwrite a file"),
    (["--calibData=good.npz", "--weights=good.npz"], "--weights=good.npz would overwrite a file"),
    (["--flops=0.01x"], r"unreachable \(0.01 of the present cost\)"),
])  # fmt: skip
def test_each_mistake_is_named(flags, message, home, monkeypatch):
    monkeypatch.chdir(home)
    with pytest.raises(WhetError, match=message):
        CliRunner().invoke(command, ["m.onnx", "-o", "x.onnx", *flags], catch_exceptions=False)
    assert not (home / "x.onnx").exists()
    assert network_from_onnx("m.onnx").constants


def test_an_excluded_layer_is_not_cut(home, monkeypatch):
    monkeypatch.chdir(home)
    flags = ["-o", "s.onnx", "--ratio=0.5", "--skip=/conv2/Conv", *TAYLOR, "--labels=y.npy"]
    done = CliRunner().invoke(command, ["m.onnx", *flags], catch_exceptions=False)
    assert "recovered without labels on 12 samples" in done.output
    whole, small = network_from_onnx("m.onnx"), network_from_onnx("s.onnx")
    assert small.constants["conv2.weight"].shape == whole.constants["conv2.weight"].shape
    assert small.constants["fc1.weight"].shape != whole.constants["fc1.weight"].shape


def test_given_widths_are_kept(home, monkeypatch):
    monkeypatch.chdir(home)
    flags = ["-o", "w.onnx", "--ratio=0.5", "--width=conv1.weight=5", "--width=conv2.weight=16", "--recipe=w.json"]
    CliRunner().invoke(command, ["m.onnx", *flags], catch_exceptions=False)
    small = network_from_onnx("w.onnx").constants
    assert small["conv1.weight"].shape[0] == 5
    assert small["conv2.weight"].shape[:2] == (16, 5), "the whole width, independent of the ratio"
    assert small["fc1.weight"].shape[0] < 120, "the ratio applies to the others"
    assert json.loads((home / "w.json").read_text())["about"]["widths"] == {"conv1.weight": 5, "conv2.weight": 16}
    with pytest.raises(PruneError, match=r"the width 2\.5 is invalid .* give 1 to 6"):
        prune(network_from_onnx("m.onnx"), PruneConfig(widths={"conv1.weight": 2.5}))
    with pytest.raises(PruneError, match="with a target widths are selected automatically"):
        prune(network_from_onnx("m.onnx"), PruneConfig(target=Target("flops", ratio=0.5), widths={"conv1.weight": 5}))


def test_mistakes_are_named_from_python_too(home):
    net = network_from_onnx(home / "m.onnx")
    with np.load(home / "bad.npz") as f:
        bad = {"input": f["input"]}
    calls = (lambda: prune(net, PruneConfig(importance="taylor1"), bad), lambda: recover(net, net, {}, bad), lambda: reestimate_batch_norms(net, bad))
    for call in calls:
        with pytest.raises(PruneError, match="sample 5 of 'input' holds NaN"):
            call()


def test_nan_weights_are_refused(home):
    net = network_from_onnx(home / "m.onnx")
    t = net.constants["conv1.weight"]
    t.weight = type(t.weight)(np.where(t.array() > 0, t.array(), np.nan).astype(np.float32), t.weight.origin)
    save_onnx(net, home / "nan.onnx")
    for kind in ("l1", "l2", "fpgm"):
        with pytest.raises(PruneError, match=rf"{kind} gives 'conv1.weight' scores that are not finite"):
            CliRunner().invoke(command, [str(home / "nan.onnx"), f"--importance={kind}", "-o", str(home / "x.onnx")], catch_exceptions=False)


def test_a_missing_library_is_reported_before_the_work(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(PruneError, match="masks and weights are stored as safetensors: pip install safetensors"):
        CliRunner().invoke(command, ["m.onnx", "-o", "x.onnx", "--recipe=x.json", "--weights=x.safetensors"], catch_exceptions=False)
    assert not (home / "x.json").exists()


@pytest.mark.parametrize(("call", "message"), [
    (lambda net: prune("m.onnx"), "not str: whet.network_from_onnx reads one from a file"),
    (lambda net: prune(net, None, np.zeros((4, 1, 32, 32), np.float32)), "data must be arrays by input name"),
    (lambda net: prune(net, PruneConfig(skip="conv9")), "no prunable group, branch or layer is called 'conv9'"),
])  # fmt: skip
def test_arguments_of_other_kinds_are_named(call, message, home):
    with pytest.raises(PruneError, match=message):
        call(network_from_onnx(home / "m.onnx"))


def test_usage_errors_are_usage_errors(home, monkeypatch):
    monkeypatch.chdir(home)
    with pytest.raises(UsageError):
        CliRunner().invoke(command, ["m.onnx", "--samples=3"], catch_exceptions=False)
