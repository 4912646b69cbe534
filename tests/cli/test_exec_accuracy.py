"""--accuracy, --layerPrecisions=...:int8 and --best with data, through the command line."""

import pytest
from test_exec_int8 import run

from whet.tactics.cpu.onednn import _api as dnn

VNNI = pytest.mark.skipif(not dnn.has_isa("avx512_core_vnni"), reason="this CPU has no VNNI: quantized layers are refused")


def test_a_budget_is_kept_and_reported(model):
    code, out = run(model, "--int8", f"--calibData={model}/data.npz", "--accuracy=snr:20")
    assert code == 0, out
    assert "Accuracy: output SNR at least 20 dB" in out


def test_the_users_metric(model, monkeypatch):
    (model / "whet_cli_metric.py").write_text(
        "import numpy as np\n"
        "def spread(run):\n"
        f"    data = np.load({str(model / 'data.npz')!r})['x']\n"
        "    return float(np.mean([np.abs(run({'x': x[None]})['y']).mean() for x in data]))\n"
    )
    monkeypatch.chdir(model)
    code, out = run(model, "--int8", f"--calibData={model}/data.npz", "--accuracy=python:whet_cli_metric:spread:0.05")
    assert code == 0, out
    assert "whet_cli_metric:spread may fall by 0.05" in out
    assert "against FP32's" in out


@VNNI
def test_int8_binds_for_one_layer(model):
    code, out = run(
        model, f"--calibData={model}/data.npz", "--precisionConstraints=obey", "--layerPrecisions=conv_1:int8", "--dumpLayerInfo",
        "--builderOptimizationLevel=1",
    )  # fmt: skip
    assert code == 0, out
    assert "int8 where it is demanded (1 layers)" in out


def test_best_with_data_chooses_among_all(model):
    code, out = run(model, "--best", f"--calibData={model}/data.npz", "--builderOptimizationLevel=1")
    assert code == 0, out
    assert "INT8 pays" in out or "does not pay here" in out


REFUSED = {
    "nothing to bound": (["--accuracy=snr:30"], "none of them is given"),
    "no data": (["--bf16", "--accuracy=snr:30"], "give --calibData"),
    "no such form": (["--int8", "--accuracy=psnr:30"], "none of python:MODULE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name, model):
    flags, words = REFUSED[name]
    code, out = run(model, *flags)
    assert code == 2, out
    assert words in out
