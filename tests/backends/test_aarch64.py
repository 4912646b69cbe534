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
SECONDS = "1"  # per tactic; it always computes one sample of each op
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the emulator reads /proc/self/maps")


def run(*arguments):
    """The harness's lines: tactics, and the summary of modules."""
    path = os.pathsep.join([str(TESTS), str(TESTS / "tactics"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "support.aarch64", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    *tactics, compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {t["tactic"]: t["failures"] for t in tactics if "failures" in t} == {}
    assert compiled["undefined"] == []
    return {t["tactic"]: t for t in tactics}, compiled


@LINUX
def test_kernels_compile_and_run_as_aarch64_code():
    """Every tactic that does not refuse this CPU computes samples: of each op and composite at least one."""
    tactics, compiled = run(SECONDS)
    assert {name for name, t in tactics.items() if not t["computed"]} == {name for name, t in tactics.items() if t["refused"]}
    assert compiled["ran"] >= 100
    expected = "attention", "indirect_conv", "indirect_qconv", "integer_matmul", "interleave_image", "linear_row", "recurrent", "winograd_conv"
    assert {f"cpu/{name}" for name in expected} <= {name for name, t in tactics.items() if t["computed"]}
    assert tactics["cpu/elementwise"]["kinds"] > 20


@LINUX
def test_products_of_bytes_without_the_instruction_for_them():
    """CPUs before ARMv8.2 have no sdot."""
    names = ["cpu/indirect_qconv", "cpu/linear_qlayer"]
    tactics, _ = run("--cpu=generic", "inf", *names)
    assert sorted(tactics) == names
    assert all(t["computed"] >= 5 for t in tactics.values())
