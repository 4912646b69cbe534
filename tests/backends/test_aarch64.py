"""whet's CPU kernels compiled for AArch64 and run there: by Unicorn, in a process that takes this machine for an ARM one (support/aarch64.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llvmlite")
pytest.importorskip("unicorn", reason="unicorn, which emulates AArch64, is not installed")
TESTS = Path(__file__).parents[1]
SECONDS = "1"  # per tactic; it always computes one sample


@pytest.mark.skipif(sys.platform != "linux", reason="the emulator reads /proc/self/maps")
def test_kernels_compile_and_run_as_aarch64_code():
    path = os.pathsep.join([str(TESTS), str(TESTS / "tactics"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "support.aarch64", SECONDS]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    *tactics, compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert {t["tactic"]: t["failures"] for t in tactics if "failures" in t} == {}
    assert compiled["undefined"] == []
    assert compiled["ran"] >= 100
    ran = {t["tactic"] for t in tactics if t["computed"]}
    expected = "attention", "elementwise", "indirect_conv", "linear_layer", "linear_row", "recurrent", "winograd_conv"
    assert {f"cpu/{name}" for name in expected} <= ran
