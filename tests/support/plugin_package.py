"""The example of a plugin package: installed into a folder, its model, and fresh processes that use both."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_package"
SOURCE = Path(__file__).parents[2] / "src"
OP = "com.example.vision.DeformableConv"


def model(channels=6, filters=8):
    """Conv -> ReLU -> DeformableConv (offsets from a Conv) -> Conv."""
    rng = np.random.default_rng(0)
    weights = {
        "stem": rng.standard_normal((channels, 3, 3, 3)) * 0.2, "shift": rng.standard_normal((18, 3, 3, 3)) * 0.3,
        "w": rng.standard_normal((filters, channels, 3, 3)) * 0.2, "b": rng.standard_normal(filters),
        "head": rng.standard_normal((4, filters, 1, 1)),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "stem"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["x", "shift"], ["offset"], pads=[1] * 4),
        helper.make_node("DeformableConv", ["r", "w", "offset", "b"], ["d"], name="deform", domain="com.example.vision", pads=[1, 1]),
        helper.make_node("Conv", ["d", "head"], ["y"]),
    ]
    tensors = [helper.make_tensor(n, TensorProto.FLOAT, a.shape, a.astype("f4").tobytes(), raw=True) for n, a in weights.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 12, 10])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, 12, 10])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example.vision", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, tensors), opset_imports=opsets, ir_version=9).SerializeToString()


def install(folder):
    """Makes `folder` like site-packages, in which the example package is installed."""
    (folder / "whet_deformable").symlink_to(EXAMPLE / "src" / "whet_deformable")
    info = folder / "whet_deformable-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: whet-deformable\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[whet.plugins]\ndeformable = whet_deformable\n")
    (info / "top_level.txt").write_text("whet_deformable\n")
    (info / "RECORD").write_text("whet_deformable/__init__.py,,\n")
    return folder


def run(code, *paths, check=True):
    """Runs Python code in a fresh process, so that registered ops stay out of this one."""
    found = ":".join(filter(None, (*map(str, (SOURCE, *paths)), os.environ.get("PYTHONPATH", ""))))
    env = os.environ | {"PYTHONPATH": found, "OPENBLAS_NUM_THREADS": "1", "WHET_FAILED_VERIFICATIONS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def site_of(name):
    """The folder that a package of this process is imported from, for a fresh process."""
    return [Path(importlib.util.find_spec(name).origin).parents[1]]
