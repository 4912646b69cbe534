"""Errors of the examples without data or packages: one sentence with the remedy, before any work; and the exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def needs(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "resnet56"))
    monkeypatch.delitem(sys.modules, "needs", raising=False)
    import needs

    yield needs
    sys.modules.pop("needs", None)


@pytest.mark.parametrize(("script", "data"), [("resnet56", "cifar10"), ("faces", "faces")])
def test_the_error_without_data_says_how_to_get_them(script, data, tmp_path):
    got = subprocess.run(
        [sys.executable, str(EXAMPLES / script / "run.py"), "--data", str(tmp_path), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert got.returncode == 1
    assert "Traceback" not in got.stderr
    assert f"python examples/fetch.py {data} --to {tmp_path}" in got.stderr
    assert not (tmp_path / "out").exists()


def test_only_requirements_of_the_steps_are_checked(needs, tmp_path, monkeypatch):
    assert not needs.lacking(["time", "table"], tmp_path, True)
    for name in (needs.JPEGS, needs.EXACT):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == "torch" else name)
    assert not needs.lacking(["build", "judge"], tmp_path, False)
    said = needs.lacking(["build", "judge"], tmp_path, True)
    assert needs.WEIGHTS in said
    assert "torch cannot be imported: pip install" in said
    assert "--no-published" in said
    said = needs.lacking(["prune", "build"], tmp_path, True)
    assert needs.WEIGHTS in said
    assert "--no-published" not in said, "cutting needs the published network in any case"
