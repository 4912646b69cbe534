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


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """Runs the contract tests of `negate` in a copy of the package with one additional file."""
    folder = tmp_path_factory.mktemp("contract")
    shutil.copytree(ROOT / "src" / "whet", folder / "src" / "whet")  # with its bytecode: a file's time of change is copied too

    def run(code: str) -> subprocess.CompletedProcess:
        (folder / FILE).write_text(code)
        flags = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        tests = [*flags, str(ROOT / "tests" / "tactics" / "test_cpu_contract.py"), "-k", "negate"]
        env = {**os.environ, "PYTHONPATH": str(folder / "src")}
        return subprocess.run([sys.executable, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)

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
    assert passes or re.search(r"cpu/negate .*: off by", done.stdout), done.stdout
