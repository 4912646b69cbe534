"""Polygraphy's own tests with whet.trt as `tensorrt`, on the CPU: how many pass, and why the others do not.

    python benchmarks/polygraphy_tests.py CHECKOUT [--paths tests/backend/trt,...] [--limit SECONDS]

CHECKOUT is the folder tools/Polygraphy of a checkout of github.com/NVIDIA/TensorRT; nothing is fetched. Needs whet[test,export],
pip install onnx-graphsurgeon onnxmltools "pytest<9" pytest-console-scripts pytest-rerunfailures pytest-virtualenv.

Each test file runs in a process of its own, in which `import tensorrt` gives whet.trt and Polygraphy allocates host memory in place of CUDA's. A row is
a test that failed: its id, the end of its error, and the reason, one of REASONS. Tests that need a GPU or a feature that TensorRT alone has (`elsewhere`
in REASONS) are listed, and not counted. Writes results/cpu/polygraphy_tests.json, and keeps the files that --paths does not name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from _record import alone, provenance

SOURCE = Path(__file__).resolve().parents[1] / "src"
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
COMMAND = "#!{python}\nimport sys\nfrom polygraphy.tools import main\nsys.exit(main())\n"
# (kind, pattern of the test's id and its error, reason). `elsewhere`: the test does not count.
REASONS: tuple[tuple[str, str, str], ...] = ()


def make_shim(folder: Path) -> dict[str, str]:
    """The environment of a test process: `tensorrt` and the command `polygraphy` come from `folder`."""
    (folder / "tensorrt").mkdir()
    (folder / "tensorrt" / "__init__.py").write_text(SHIM)
    command = folder / "polygraphy"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    paths = {"PYTHONPATH": [str(folder), str(SOURCE)], "PATH": [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]}
    return {**os.environ, **{k: os.pathsep.join(v) for k, v in paths.items()}, "XDG_CACHE_HOME": str(folder / "cache")}


def run_file(checkout: Path, path: str, environment: dict[str, str], limit: float) -> dict[str, Any]:
    """Runs a test file; its counts and its failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        env = environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{checkout}"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1", path]
        began = time.perf_counter()
        try:
            done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=limit, check=False)
            ended = f"{done.stdout[-300:]}{done.stderr[-300:]}"
        except subprocess.TimeoutExpired:
            ended = f"no end after {limit:.0f} s"
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
        row: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1), "passed": 0, "skipped": 0, "failures": []}
        if not cases:
            row["failures"].append(failure(path, ended))
        for case in cases:
            broken = [*case.findall("failure"), *case.findall("error")]
            if broken:
                row["failures"].append(failure(f"{path}::{case.get('classname', '').split('.')[-1]}::{case.get('name')}", broken[0].text or ""))
            else:
                row["skipped" if case.find("skipped") is not None else "passed"] += 1
    return row


def failure(name: str, text: str) -> dict[str, str]:
    """The row of a test that failed, with its reason."""
    lines = [line for line in text.splitlines() if re.match(r"(E |.*\[E\]|.*\[!\]|.*Error)", line)]
    error = re.sub(r"/[^\s'\"]*/", "", " | ".join(line.strip() for line in (lines or text.splitlines())[-4:]))[:400]
    for kind, pattern, reason in REASONS:
        if re.search(pattern, f"{name}\n{text}"):
            return {"test": name, "kind": kind, "reason": reason, "error": error}
    return {"test": name, "kind": "unexplained", "reason": "", "error": error}


def summarize(files: dict[str, Any]) -> dict[str, Any]:
    """The counts over all files, by kind and reason."""
    failures = [f for row in files.values() for f in row["failures"]]
    counted = [f for f in failures if f["kind"] != "elsewhere"]
    passed = sum(row["passed"] for row in files.values())
    return {
        "passed": passed,
        "counted": passed + len(counted),
        "percent": round(100 * passed / max(passed + len(counted), 1), 1),
        "elsewhere": len(failures) - len(counted),
        "skipped": sum(row["skipped"] for row in files.values()),
        "reasons": {f"{kind}: {reason}": n for (kind, reason), n in Counter((f["kind"], f["reason"]) for f in failures).most_common()},
    }


def main() -> None:
    """Runs the files one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--paths", default=PATHS)
    parser.add_argument("--limit", type=float, default=3600.0)
    o = parser.parse_args()
    checkout = o.checkout.resolve()
    found = [q for p in o.paths.split(",") for q in ([checkout / p] if p.endswith(".py") else sorted((checkout / p).rglob("test_*.py")))]
    with tempfile.TemporaryDirectory() as folder:
        environment = make_shim(Path(folder))
        for path in (str(q.relative_to(checkout)) for q in found):
            row = run_file(checkout, path, environment, o.limit)
            print(json.dumps({"file": path, **row, "failures": len(row["failures"])}), flush=True)
            with alone(RESULT):
                files = json.loads(RESULT.read_text())["files"] if RESULT.exists() else {}
                files = dict(sorted((files | {path: row}).items()))
                data = provenance(["whet", "polygraphy", "onnx", "onnxruntime", "onnx_graphsurgeon", "torch", "numpy", "pytest"])
                RESULT.write_text(json.dumps(data | summarize(files) | {"files": files}, indent=1) + "\n")


if __name__ == "__main__":
    main()
