"""docs/commands.md: each command of its blocks runs, in order, with a small network in place of ResNet-18."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.standin_model import standin
from whet.frontends.onnx_writer import save_onnx

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text()
LINES = [x for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for x in block.splitlines() if x.strip()]
NEEDS = {"finetune": ["torch"], "auto": ["optuna", "yaml"], "rebuild": ["optuna", "yaml"], "run": ["onnxruntime"]}
CODES = {"diff": (1,), "auto": (0, 3)}  # whet diff: 1 if they differ; whet auto: 3 if the target is missed
SHORT = {"exec": ["--builderOptimizationLevel=1", "--iterations=2"], "compare": ["--seconds=0.1"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the data files that the page names."""
    made = tmp_path_factory.mktemp("commands")
    rng = np.random.default_rng(0)
    samples = {"input": rng.standard_normal((32, 1, 32, 32)).astype(np.float32)}
    (made / "DIR").mkdir()
    np.savez(made / "DIR" / "a.npz", **samples)
    for name in ("train", "score", "judge"):
        np.savez(made / f"{name}.npz", **samples, labels=rng.integers(0, 10, 32))
    np.savez(made / "calibrate.npz", **samples)
    recipe = {
        "model": "resnet18.onnx", "data": {"calibrate": "calibrate.npz", "score": "score.npz", "judge": "judge.npz"}, "baselines": ["fp32"],
        "target": {"latency": "0.9x", "accuracy_drop": 100}, "search": {"trials": 2}, "finetune": False, "threads": 1,
        "space": {"precision": ["fp32"]}, "scout": {"samples": 16, "rows": 64, "level": 1, "seconds": 0.05},
        "survivor": {"samples": 16, "rows": 64, "level": 1, "seconds": 0.05, "count": 1},
    }  # fmt: skip
    (made / "recipe.yaml").write_text(json.dumps(recipe))
    return made


def whet(folder: Path, line: str) -> None:
    words = shlex.split(line, comments=True)
    name = words[1]
    assert words[0] == "whet"
    if not all(map(importlib.util.find_spec, NEEDS.get(name, []))):
        return
    if name == "zoo":
        save_onnx(standin(), folder / "resnet18.onnx")
        return
    if name == "exec" and any(w.startswith("--loadEngine") for w in words):
        words = [w for w in words if not w.startswith("--duration")] + ["--duration=0.1"]
    else:
        words += SHORT.get(name, [])
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "whet", *words[1:]]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in CODES.get(name, (0,)), f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    if name == "exec" and "r.engine" in line:
        for other in ("a.engine", "b.engine"):
            if (folder / "r.engine").exists():
                (folder / other).write_bytes((folder / "r.engine").read_bytes())
    if name == "compare" and "a.engine" in line:  # the next line compares engines that differ
        built = ["exec", "--onnx=resnet18.onnx", "--passes=none", "--builderOptimizationLevel=0", "--saveEngine=b.engine", "--skipInference"]
        subprocess.run([sys.executable, "-m", "whet", *built], cwd=folder, env=env, capture_output=True, timeout=600, check=True)


@pytest.mark.slow
def test_every_command_runs(folder):
    assert len(LINES) > 18
    for line in LINES:
        whet(folder, line)
