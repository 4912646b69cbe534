"""A new CPU tactic needs no list entry: the example of docs/adding.md passes the contract tests; with a wrong result they fail and name it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whet.tactics.cpu._llvm import jit

ROOT = Path(__file__).parents[2]
FILE = "src/whet/tactics/cpu/move/negate.py"


@pytest.fixture
def contract(tmp_path):
    """Runs the contract tests of `negate` in a copy of the package with one additional file."""
    shutil.copytree(ROOT / "src" / "whet", tmp_path / "src" / "whet", ignore=shutil.ignore_patterns("__pycache__"))

    def run(code: str) -> subprocess.CompletedProcess:
        (tmp_path / FILE).write_text(code)
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "tactics" / "test_cpu_contract.py"), "-k", "negate"]
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
        return subprocess.run([sys.executable, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)

    return run


def example() -> str:
    (code,) = re.findall(rf"^```python\n# {re.escape(FILE)}\n(.*?)^```", (ROOT / "docs" / "adding.md").read_text(), re.MULTILINE | re.DOTALL)
    return code


@pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))
@pytest.mark.parametrize(("result", "passes"), [("-x", True), ("x + 1.0", False)])
def test_the_contract_finds_a_new_file(contract, result, passes):
    code = example()
    assert code.count("-x") == 2
    done = contract(code.replace("-x", result))
    assert done.returncode == (0 if passes else 1), done.stdout + done.stderr
    assert ("FAILED" in done.stdout and "test_samples[cpu/negate]" in done.stdout) != passes
    assert passes or "belongs" in done.stdout, done.stdout
