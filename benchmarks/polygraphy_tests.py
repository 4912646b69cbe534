"""Polygraphy's own tests with whet.trt as `tensorrt`, on the CPU: how many pass, and why the others do not.

    python benchmarks/polygraphy_tests.py CHECKOUT [--paths tests/backend/trt,...] [--limit SECONDS] [--workers N] [--processes N]

CHECKOUT is the folder tools/Polygraphy of a checkout of github.com/NVIDIA/TensorRT; nothing is fetched. Needs whet[test,export],
pip install onnx-graphsurgeon onnxmltools "pytest<9" pytest-xdist pytest-console-scripts pytest-rerunfailures pytest-virtualenv.

Each test file of --paths (files or folders) runs in a process of its own, or in --processes, and --workers files at a time. There `import tensorrt`
gives whet.trt and Polygraphy allocates host memory in place of CUDA's. `failures` are a test file's failed tests: id, end of the error, and reason,
one of REASONS. Tests that need hardware or software that this machine lacks (`elsewhere`) are listed, and not counted. Writes
results/cpu/polygraphy_tests.json, and keeps the rows of test files that do not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from _record import alone, provenance

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))
RESULT = Path(__file__).parent / "results" / "cpu" / "polygraphy_tests.json"
PATHS = "tests/backend/trt,tests/backend/common,tests/comparator,tests/common,tests/tools"
SHIM = """import sys
import whet.trt
del sys.modules["tensorrt"]  # this file's module
whet.trt.install()
try:
    whet.trt.connect_polygraphy()
except ImportError:  # Polygraphy itself imports tensorrt first: it is connected by its next import
    pass
"""
PLUGIN = """import json, os

def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        with open(os.environ["OUTCOMES"], "a") as file:
            text = report.longreprtext if report.failed else ""
            file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "text": text}) + "\\n")

def pytest_collectreport(report):
    if report.outcome != "passed":
        with open(os.environ["OUTCOMES"], "a") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "text": report.longreprtext}) + "\\n")
"""
COMMAND = "#!{python}\nimport sys\nfrom polygraphy.tools import main\nsys.exit(main())\n"
# (kind, pattern of the test's id and its error, reason). `elsewhere`: the test does not count.
REASONS = (
    ("elsewhere", r"Torch not compiled with CUDA|found no NVIDIA driver|test_torch_tensors.cpu-False", "tensors of PyTorch on a GPU"),
    ("elsewhere", r"libnvinfer|nvinfer_lean|lean_runtime|conftest.py:194|custom_runtime", "libraries of NVIDIA's package"),
    ("elsewhere", r"DLA|EngineCapability.SAFETY|gpu_fallback", "a DLA, or the safety runtime"),
    ("elsewhere", r"FileExistsError: External data file", "an older onnx package, which overwrites files"),
    ("elsewhere", r"test_warn_if_impl|test_fold_constants", "a process of its own: Polygraphy logs the message once in a process"),
    ("elsewhere", r"test_fp_to_fp16", "the older package onnxmltools 1.11"),
    ("elsewhere", r"TestTrt::test_plugins", "libraries of NVIDIA's package"),
    ("elsewhere", r"virtualenv|sandboxed_install|Could not find a version", "packages that the test installs"),
    ("elsewhere", r"weight_reconstruct.*bf16", "BF16 arrays that onnx-graphsurgeon can write (NumPy refuses its buffer)"),
    ("not served", r"TestBuild::test_good_bad|TestInspectTactics::test_show_tactics", "algorithm selectors, which TensorRT 11 removed"),
    ("not served", r"IAlgorithmSelector|AlgorithmSelector|tactic.replay", "algorithm selectors, which TensorRT 11 removed"),
    ("not served", r"VERSION_COMPATIBLE|version.compatib|EXCLUDE_LEAN|VCEngine", "engines that other versions of TensorRT load"),
    ("not served", r"STRIP_PLAN|strip_plan|strip-plan", "engines without weights"),
    ("not served", r"WEIGHT_STREAMING|weight.streaming", "weight streaming"),
    ("not served", r"mark_debug|mark-debug|debug.tensors", "debug tensors; inner tensors can be marked as outputs"),
    ("not served", r"empty_tensor_expand|nonzero|NonZero|add_non_zero|data.dependent|depends on data", "shapes that depend on data"),
    ("differs", r"TestTrt::test_allocation_strategies", "sums in another order: outputs differ by more than 1e-5 from ONNX Runtime's"),
    ("not served", r"LayerType\.", "classes of layers that are not served"),
    ("not served", r"DataType.FP4|DataType.E8M0|float4", "FP4 and E8M0"),
    ("not served", r"runtime_platform|WINDOWS", "engines for Windows"),
    ("not served", r"allowed_formats", "inputs and outputs in vectorized layouts"),
    ("not served", r"shape_tensor|is_shape_tensor", "inputs whose values are shapes"),
)


def make_shim(folder: Path) -> dict[str, str]:
    """The environment of a test process: `tensorrt` and the command `polygraphy` come from `folder`."""
    (folder / "tensorrt").mkdir()
    (folder / "tensorrt" / "__init__.py").write_text(SHIM)
    (folder / "record_outcomes.py").write_text(PLUGIN)
    command = folder / "polygraphy"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = {"PYTHONPATH": [str(folder), str(SOURCE), *given], "PATH": [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]}
    return {
        **os.environ,
        **{k: os.pathsep.join(v) for k, v in paths.items()},
        "XDG_CACHE_HOME": str(folder / "cache"),
        "POLYGRAPHY_INTERNAL_CORRECTNESS_CHECKS": "1",
    }  # as in Polygraphy's Makefile


def list_test_files(checkout: Path, paths: str) -> list[str]:
    """The test files of files and folders that are separated by commas, relative to the checkout, largest first: those take longest."""
    found: set[Path] = set()
    for path in filter(None, paths.split(",")):
        found |= set((checkout / path).rglob("test_*.py")) if (checkout / path).is_dir() else {checkout / path}
    return [str(p.relative_to(checkout)) for p in sorted(found, key=lambda p: (-p.stat().st_size, p))]


def run_tests(checkout: Path, path: str, environment: dict[str, str], limit: float, processes: int) -> dict[str, Any]:
    """Runs a test file in processes of its own (0: in one); the counts and failures by file. Tests that ran before a time-out are kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes = folder / "outcomes.jsonl"
        outcomes.write_text("")
        env = environment | {"PYTHONPATH": f"{checkout}{os.pathsep}{environment['PYTHONPATH']}", "OUTCOMES": str(outcomes)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "record_outcomes", "-n", str(processes), path]
        with open(folder / "log", "w") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=checkout, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False)
        return count_outcomes(path, outcomes.read_text(), (folder / "log").read_text())


def count_outcomes(path: str, outcomes: str, log: str) -> dict[str, Any]:
    """The row of each test file of a run: from its outcomes, a JSON object a line, or from the end of its log if there is none."""
    files: dict[str, Any] = {}
    for line in outcomes.splitlines():
        found = json.loads(line)
        row = files.setdefault(f"tests/{found['test'].partition('::')[0].removeprefix('tests/')}", {"passed": 0, "skipped": 0, "failures": []})
        if found["outcome"] == "failed":
            row["failures"].append(failure(found["test"], found["text"]))
        else:
            row[found["outcome"]] += 1
    return files or {path: {"passed": 0, "skipped": 0, "failures": [failure(path, log[-600:])]}}


def failure(name: str, text: str) -> dict[str, str]:
    """The row of a test that failed, with its reason."""
    lines = [line for line in text.splitlines() if re.match(r"(E |.*\[E\]|.*\[!\]|.*Error)", line)]
    error = re.sub(r"/[^\s'\"]*/", "", " | ".join(line.strip() for line in (lines or text.splitlines())[-4:]))[:400]
    return explain({"test": name, "error": error})


def explain(failed: dict[str, str]) -> dict[str, str]:
    """The row with its reason."""
    for kind, pattern, reason in REASONS:
        if re.search(pattern, f"{failed['test']}\n{failed['error']}"):
            return failed | {"kind": kind, "reason": reason}
    return failed | {"kind": "unexplained", "reason": ""}


def summarize(files: dict[str, Any]) -> dict[str, Any]:
    """The counts over all files, by kind and reason."""
    for row in files.values():
        row["failures"] = [explain(f) for f in row["failures"]]
    failures = [f for row in files.values() for f in row["failures"]]
    counted = [f for f in failures if f["kind"] != "elsewhere"]
    passed = sum(row["passed"] for row in files.values())
    reasons = Counter((f["kind"], f["reason"]) for f in failures)
    return {
        "passed": passed,
        "counted": passed + len(counted),
        "percent": round(100 * passed / max(passed + len(counted), 1), 1),
        "elsewhere": len(failures) - len(counted),
        "skipped": sum(row["skipped"] for row in files.values()),
        "test_files": len(files),
        "rows": [{"kind": kind, "reason": reason, "tests": n} for (kind, reason), n in sorted(reasons.items(), key=lambda r: (r[0][0], -r[1]))],
    }


def main() -> None:
    """Runs the files, and adds each one's row when it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--paths", default=PATHS)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of a test file")
    parser.add_argument("--workers", type=int, default=1, help="test files that run side by side")
    parser.add_argument("--processes", type=int, default=0, help="processes that share the tests of a file (pytest-xdist); 0: the file's own")
    o = parser.parse_args()
    checkout = o.checkout.resolve()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(o.workers) as pool:
        environment = make_shim(Path(name))
        write_rows({})
        runs = [pool.submit(run_tests, checkout, path, environment, o.limit, o.processes) for path in list_test_files(checkout, o.paths)]
        for run in as_completed(runs):
            for file, row in run.result().items():
                print(json.dumps({"file": file, **row, "failures": len(row["failures"])}), flush=True)
            write_rows(run.result())


def write_rows(rows: dict[str, Any]) -> None:
    """Adds the rows of test files to the result file, and computes its reasons and counts again."""
    with alone(RESULT):
        files = json.loads(RESULT.read_text())["files"] if RESULT.exists() else {}
        files = dict(sorted((files | rows).items()))
        data = provenance(["whet", "polygraphy", "onnx", "onnxruntime", "onnx_graphsurgeon", "torch", "numpy", "pytest"])
        RESULT.write_text(json.dumps(data | summarize(files) | {"files": files}, indent=1) + "\n")


if __name__ == "__main__":
    main()
