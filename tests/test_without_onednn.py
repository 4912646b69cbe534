"""Where oneDNN's package is not installed (ARM, macOS), whet imports and builds with its own kernels and NumPy."""

import subprocess
import sys

CODE = """
import ctypes

class WithoutOneDNN(ctypes.CDLL):
    def __init__(self, name, *rest, **named):
        if "dnnl" in str(name):
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *rest, **named)

ctypes.CDLL = WithoutOneDNN
import numpy as np
import whet

whet.zoo.save("lenet5", "lenet5.onnx", num_classes=10, batch=1)
plan = whet.build(whet.network_from_onnx("lenet5.onnx"), whet.BuildConfig(optimization_level=1, timing_cache=""))
whet.write_engine(plan, "lenet5.engine")
with whet.Runtime().load("lenet5.engine").create_context() as context:
    print(context.run({"input": np.ones((1, 1, 32, 32), np.float32)})["output"].shape)
print(sorted({choice.tactic for choice in plan.choices.values() if "onednn" in choice.tactic}))
"""


def test_a_network_builds_and_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WHET_ONEDNN", raising=False)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["(1, 10)", "[]"]
