"""Golden engines on the null machine: a change of passes, selection or memory plan appears as a text diff.

After an intended change: `WHET_UPDATE_GOLDEN=1 pytest tests/builder/test_golden_engines.py`, and review the diff.
"""

import os
from pathlib import Path

import pytest
from engine_text import engine_text

import whet.zoo
from whet.builder import BuildConfig, build
from whet.engine.check import check_plan
from whet.frontends import network_from_onnx

FOLDER = Path(__file__).parents[1] / "golden" / "engines"
UPDATE = os.environ.get("WHET_UPDATE_GOLDEN") == "1"
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits_resnet.onnx"


def source(name: str, tmp_path: Path):
    if name == "digits":
        if not DIGITS.exists():
            pytest.skip("the digits model is not there")
        return network_from_onnx(DIGITS)
    path = tmp_path / f"{name}.onnx"
    whet.zoo.save(name, path)
    return network_from_onnx(path)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "digits"])
def test_golden_engine(name, tmp_path):
    plan = build(source(name, tmp_path), BuildConfig(backend="null", timing_cache=""))
    check_plan(plan)
    text, path = engine_text(plan), FOLDER / f"{name}.txt"
    if UPDATE:
        path.write_text(text)
    assert path.read_text() == text
