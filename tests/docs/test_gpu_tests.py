"""The runner of GPU tests counts tests as they end: after an interruption the file lists finished tests with outcomes, and unfinished ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TESTS = """
import os, signal, time
import pytest
pytestmark = pytest.mark.GPU

def test_right():
    pass

def test_wrong():
    assert 1 == 2, "not these"

def test_other_device():
    pytest.skip("no such GPU")

def test_long():
    if "STOP" in os.environ:
        os.kill(int(os.environ["STOP"]), signal.SIGTERM)
        time.sleep(100)

def test_after():
    pass
"""
LOSING = """
import os
import pytest
pytestmark = pytest.mark.GPU

def test_first():
    pass

def test_losing():
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS of the kernel")

@pytest.mark.parametrize("i", range(2))
def test_in_another_process(i):
    pass

def test_dying():
    os._exit(3)

def test_last():
    pass
"""
TESTS, LOSING = (text.replace(".GPU", ".gpu") for text in (TESTS, LOSING))  # this file itself contains no marker
RUN = """
import os, sys, json, pathlib, gpu_tests
class Folder:
    def __enter__(self): return sys.argv[1]
    def __exit__(self, *_): pass
gpu_tests.tempfile.TemporaryDirectory = Folder
gpu_tests.HERE = pathlib.Path(sys.argv[1], "benchmarks")
if sys.argv[2] == "stop": os.environ["STOP"] = str(os.getpid())
print("ROWS", json.dumps(gpu_tests.run_tests(1, ["0"], [sys.argv[1]], None)))
"""


def run_tests(folder, text, how="whole"):
    """Counts by outcome, the rows, and what the runner prints for a file of tests."""
    (folder / "test_some.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "PYTEST_ADDOPTS": ""}
    ran = subprocess.run([sys.executable, "-c", RUN, str(folder), how], capture_output=True, text=True, env=environment, timeout=90, check=True)
    rows = json.loads(ran.stdout.split("ROWS ")[1])
    return {r["what"].removeprefix("tests marked gpu that "): r["value"] for r in rows}, rows, ran.stdout


def test_a_lost_gpu_fails_one_test(tmp_path):
    counts, _, printed = run_tests(tmp_path, LOSING)
    assert counts == {"passed": 4, "failed": 2, "skipped": 0}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS of the kernel" in printed
    assert "its process ended with code 3 before the test did" in printed
    assert [line.rpartition("::")[2] for line in printed.splitlines() if line.startswith("its process lost the GPU")] == ["test_losing"]


@pytest.mark.parametrize("how", ["stop", "whole"])
def test_an_interrupted_run_is_counted(tmp_path, how):
    counts, rows, printed = run_tests(tmp_path, TESTS, how)
    if how == "whole":
        assert counts == {"passed": 3, "failed": 1, "skipped": 1}
    else:
        assert counts == {"passed": 1, "failed": 1, "skipped": 1, "had not ended when the run was cut off": 2}
        assert [t.rpartition("::")[2] for t in rows[-1]["which"]] == ["test_long", "test_after"]
        assert rows[-1]["bar"] == 1, "an interrupted run does not pass"
    assert "not these" in printed
    assert "skipped, 1: Skipped: no such GPU" in printed


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_crashed_and_uncollected_tests_count_as_failed(tmp_path, benchmarks):
    from _outcomes import read

    def ended(test, phase, how, seconds, why=""):
        return {"test": test, "phase": phase, "how": how, "seconds": seconds, "why": why}

    lines = [{"listed": ["a", "b", "c"]}, {"began": "a"}, ended("a", "teardown", "failed", 0, "died"), ended("d.py", "teardown", "failed", 0, "x")]
    lines += [{"began": "b"}, ended("b", "setup", "passed", 1), ended("b", "call", "failed", 2, "x"), ended("b", "teardown", "passed", 0.5)]
    (tmp_path / "o").write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "c", "pha')
    found = read(tmp_path / "o")
    assert found.how == {"a": "failed", "d.py": "failed", "b": "failed"}
    assert (found.open, found.longest(1), found.why["b"]) == (["c"], [(3.5, "b")], "x")
    assert read(tmp_path / "none").how == {}


def test_long_files_run_first_and_files_without_the_marker_not_at_all(benchmarks):
    from _outcomes import FIRST, LAST, turn
    from gpu_tests import marked

    files = marked()
    stems = [Path(f).stem for f in files]
    assert {*FIRST, *LAST} <= set(stems), "a removed or renamed file"
    assert min(map(turn, files)) == turn("tests/cuda/test_large.py::test_x[a::b]")
    assert turn("tests/cuda/test_float8.py") < turn("tests/cuda/test_moves.py") < turn("tests/cuda/test_tactics.py")
    assert 20 < len(files) < 60
    assert not [f for f in files if not f.startswith(("tests/cuda/", "tests/training/", "tests/trt/"))], "only these folders contain GPU tests"
