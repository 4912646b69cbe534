"""`make demo` as users run it: its printed lines, its files, and its acceptance criteria."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import whet
from whet.pruning import apply_recipe, load_recipe

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The output of the demo and its folder."""
    out = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, DIGITS / "demo.py", "--out", out, "--rounds", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, out


def row(text, step):
    """The cells of the table's row that starts with `step`."""
    (line,) = (line for line in text.splitlines() if re.match(rf"│\s*{step}", line))
    return [c.strip() for c in line.strip("│").split("│")]


@pytest.mark.slow
def test_the_pruned_engine_is_faster_at_no_more_than_a_point_lost(demo):
    text, _ = demo
    original, pruned = row(text, "original"), row(text, "and recovered")
    assert float(original[3].rstrip(" %")) - float(pruned[3].rstrip(" %")) <= 1.0
    assert float(pruned[7].rstrip("x")) >= 1.6
    assert float(original[4]) / float(pruned[4]) >= 1.6


@pytest.mark.slow
def test_the_counter_example_shows_no_gain_and_says_why(demo):
    text, _ = demo
    original, sparse = row(text, "original"), row(text, "50% zeros")
    assert sparse[1:3] == original[1:3]
    assert float(sparse[7].rstrip("x")) < 1.2
    assert "a dense kernel multiplies by zero as by any other number" in " ".join(text.split())


@pytest.mark.slow
def test_every_step_is_shown(demo):
    text, _ = demo
    cut = row(text, "39% of channels cut")
    assert cut[4:] == ["-"] * 5
    assert "ONNX Runtime runs it" in text
    assert "Layers of the pruned engine" in text
    assert "/conv1/Conv" in text


@pytest.mark.slow
def test_its_files_are_usable(demo):
    _, out = demo
    engine = whet.Runtime().load(out / "digits_pruned.engine")
    pruned = whet.network_from_onnx(out / "digits_pruned.onnx")
    assert list(engine.inputs) == [t.name for t in pruned.inputs]
    again = apply_recipe(whet.network_from_onnx(DIGITS / "digits_resnet.onnx"), load_recipe(out / "digits_pruned.recipe.json"))
    assert [str(x.output.type) for x in again.layers] == [str(x.output.type) for x in pruned.layers]
