"""`--dumpProfile` on devices with known peaks: time, bytes, operations, the limiting resource and the share of its peak per layer."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet import zoo
from whet.backends.cuda import driver
from whet.builder import BuildConfig, build
from whet.cli._infer import print_profile_table
from whet.network import Network, parse_type


def test_a_row_has_bytes_operations_bound_and_share_of_the_peak():
    net = Network("net")
    x = net.add_input("x", parse_type("f32[1,64,32,32]"))
    y = net.add("Conv", x, net.constant(np.ones((128, 64, 3, 3), np.float32)), None, pads=(1, 1, 1, 1), name="/conv")
    net.mark_output(net.add("Softmax", y, axis=1, name="/softmax"), "y")
    plan = build(net, BuildConfig(timing_cache="", optimization_level=0, verify=False))
    peaks = {"bytes": 1e12, "f32": 1e12, "tf32": 4e12, "f16": 8e12, "bf16": 8e12, "i8": 0.0, "f8": 0.0}
    context = SimpleNamespace(engine=SimpleNamespace(plan=plan, backend=SimpleNamespace(peaks=lambda: peaks)), profile_index=0)
    names = {layer.op: layer.name for layer in plan.network.layers}
    records = [
        {"name": layer.name, "timeMs": 10.0, "averageMs": 1.0, "medianMs": 0.5, "percentage": 100 / len(plan.network.layers)}
        for layer in plan.network.layers
    ]
    lines: list[str] = []
    print_profile_table(SimpleNamespace(requested=lines.append), context, records, {"x": (1, 64, 32, 32)})
    assert lines[0].split() == ["Time(ms)", "Avg.(ms)", "Median(ms)", "Time(%)", "MB", "GFLOP", "Bound", "Peak(%)", "Layer"]
    rows = {words[-1]: words for words in map(str.split, lines[1:-1])}
    conv = rows[names["Conv"]]
    operations, moved = 2 * 32 * 32 * 128 * 64 * 9, 4 * (64 * 32 * 32 + 128 * 64 * 9 + 128 * 32 * 32)
    assert conv[4:8] == [f"{moved / 1e6:.2f}", f"{operations / 1e9:.3f}", "compute", f"{100 * operations / 1e12 / 0.5e-3:.1f}"]
    softmax = rows[names["Softmax"]]
    assert softmax[6:8] == ["memory", f"{100 * 2 * 4 * 128 * 32 * 32 / 1e12 / 0.5e-3:.1f}"]
    assert lines[-1].split()[-1] == "Total"


@pytest.mark.gpu
@pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable()))
def test_a_profile_on_a_gpu(tmp_path):
    zoo.save("lenet5", tmp_path / "lenet.onnx")
    flags = "--onnx=lenet.onnx --backend=cuda --device=0 --fp16 --pure --builderOptimizationLevel=1 --shapes=input:64x1x32x32 --duration=0.1"
    command = [sys.executable, "-m", "whet.cli", "exec", *flags.split(), "--dumpProfile", "--exportProfile=p.json", "--timingCacheFile=t.cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = re.findall(r"^(?:\[.*?\] )*\s*[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+) +(memory|compute) +([\d.]+) +\S", done.stdout, re.M)
    profile = json.loads((tmp_path / "p.json").read_text())
    assert len(rows) == len(profile) - 1 >= 5, done.stdout[-3000:]
    assert all(0 <= float(share) <= 110 for *_, share in rows)
    assert any(float(share) > 0.1 for *_, share in rows)
    assert 0.95 <= sum(float(gflop) for _, gflop, *_ in rows) / (64 * 852370 / 1e9) <= 1.5, "channels may be padded"
