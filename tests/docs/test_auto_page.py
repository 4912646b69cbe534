"""docs/auto.md: its recipes are read without complaint, and its Python example searches."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.search_case import case as case  # a fixture

pytest.importorskip("optuna")
pytest.importorskip("yaml")

PAGE = (Path(__file__).parents[2] / "docs" / "auto.md").read_text()
RECIPES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", RECIPES, ids=lambda text: text.split(":")[0])
def test_every_recipe_is_read(text, tmp_path):
    from whet.search import load_recipe

    for name in ("model.onnx", "m.onnx", "c.npz", "s.npz", "score.npz", "judge.npz", "train.npz", "images/a.npz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    base = "" if text.startswith("model:") else "model: m.onnx\ndata: {calibrate: c.npz, score: s.npz}\ntarget: {latency: 0.5x}\n"
    (tmp_path / "r.yaml").write_text(base + text)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.target.latency is not None
    if "threshold" in text:
        assert recipe.qat is not None
        assert (recipe.qat["threshold"], recipe.qat["lr"]) == (0.3, 1e-4)


def test_the_example_recipe_is_described(tmp_path):
    """`whet auto examples/auto/digits.yaml --dry-run`, on a copy of the examples."""
    shutil.copytree(Path(__file__).parents[2] / "examples" / "auto", tmp_path / "examples" / "auto")
    shutil.copytree(Path(__file__).parents[2] / "examples" / "digits", tmp_path / "examples" / "digits")
    pytest.importorskip("sklearn")
    (line,) = [x for x in PAGE.splitlines() if "--dry-run" in x and x.startswith("whet auto")]
    command = [sys.executable, "-m", *line.partition("#")[0].split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "48 joined: 0 to 0.8" in done.stdout


@pytest.mark.slow
def test_the_python_example_searches(case, tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    shutil.copytree(case, tmp_path / "project")
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "project" / "half.auto" / "deploy" / "model.engine").exists()
