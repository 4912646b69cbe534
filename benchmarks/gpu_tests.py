"""All tests marked `gpu`, and the growth of GPU memory over builds and loads, on a machine with a GPU: results/<device>/tests.json.

    python benchmarks/gpu_tests.py [--workers N] [--limit S] [--builds N] [--networks A,B:N] [--seconds S] [FILE OR FOLDER OF TESTS ...]
    python benchmarks/gpu_tests.py --merge FILE...      merges runs of several files into results/h200/tests.json

About two minutes of tests on 16 cores (--workers 0 omits them), and up to a second per build. Tests that have not ended after --limit
seconds, or when this program is terminated (SIGTERM), are counted as such and named: an interrupted run writes its file too.
Tests run in batches of one file, each batch in a process of its own; after a kernel's fault the rest of the batch runs in a new process. The
memory test runs in parallel if CUDA_VISIBLE_DEVICES names two GPUs: memory on the last, tests on all others (on all without the memory test); its
output is passed through. Failed tests are printed with their errors. The file is written to $OUT, or to the current folder, after each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NoReturn

from _isolated_tests import IsolatedTests
from _outcomes import Outcomes
from _record import provenance

HERE = Path(__file__).parent
RESULT = HERE / "results" / "h200" / "tests.json"


def main() -> None:
    """Runs both, then writes the file; exit code 1 if a test failed or did not end, or the memory grew by at least 1 MiB per build."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--workers", type=int, default=12, help="test processes at once; most of a test is compiling")
    p.add_argument("--limit", type=float, help="seconds after which the tests are cut off")
    p.add_argument("--builds", type=int, default=200, help="builds and loads of the memory test; 0 leaves it out")
    p.add_argument("--networks", default="resnet18", help="networks of the memory test, each in a process of its own; NAME:N for N builds instead")
    p.add_argument("--seconds", type=float, default=1e9, help="the memory test of a network ends after this long, with the builds that it got to")
    p.add_argument("--merge", action="store_true", help="the files named are results of this command, which become one")
    p.add_argument("tests", nargs="*", help="all that are marked, if none are named")
    args = p.parse_args()
    if args.merge:
        RESULT.write_text(json.dumps([json.loads(Path(f).read_text()) for f in args.tests], indent=1) + "\n")
        return
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    cases = [(n, int(b or args.builds)) for n, _, b in (w.partition(":") for w in args.networks.split(","))] if args.builds else []
    growing = start_memory(*cases[0], args.seconds, gpus[-1]) if cases and len(gpus) > 1 else None
    rows = run_tests(args.workers, gpus[:-1] if growing else gpus, args.tests or marked(), args.limit) if args.workers else []
    write(rows)
    for name, builds in cases:
        rows.append(memory(name, growing or start_memory(name, builds, args.seconds, gpus[-1])))
        growing = None
        write(rows)
    for row in rows:
        print(f"{row['value']:>10} {row['unit']}: {row['what']}")
    if any(row["value"] >= row["bar"] for row in rows if row.get("bar") is not None):
        raise SystemExit(1)


def write(rows: list[dict]) -> None:
    """The result file."""
    from whet.backends import get_backend

    record = {**provenance(("numpy", "cuda-bindings")), "device": get_backend("cuda").describe()["model"], "rows": rows}
    (Path(os.environ.get("OUT", ".")) / "tests.json").write_text(json.dumps(record, indent=1) + "\n")


class CutOff(Exception):
    """Raised by SIGTERM."""


def marked() -> list[str]:
    """The files that contain the marker: workers need not import the others."""
    return sorted(str(f.relative_to(HERE.parent)) for f in (HERE.parent / "tests").rglob("test_*.py") if "mark.gpu" in f.read_text())


def run_tests(workers: int, gpus: list[str], which: list[str], limit: float | None) -> list[dict]:
    """Rows of the test run, counted as tests end. Failed and unfinished tests, reasons of skips and the twenty longest tests are printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", "--no-header", "-p", "_outcomes", "-p", "no:cacheprovider",
                   "-p", "no:benchmark", "-p", "no:xdist", "-W", "ignore",
                   f"--rootdir={HERE.parent}"]  # fmt: skip
        threads = str(max(1, (os.cpu_count() or 1) // workers))  # of the reference's products: more threads than cores slow all workers
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        more = {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        tests = IsolatedTests(Path(folder), command, HERE.parent, {**os.environ, **more}, gpus)
        before = signal.signal(signal.SIGTERM, stop)
        try:
            tests.run(which, workers, limit)
        except CutOff:
            print("\ncut off", flush=True)
        finally:
            signal.signal(signal.SIGTERM, before)
        outcomes = tests.outcomes
    tell(outcomes)
    rows = [{"what": f"tests marked gpu that {how}", "value": len(outcomes.which(how)), "unit": "tests", "bar": 1 if how == "failed" else None}
            for how in ("passed", "failed", "skipped")]  # fmt: skip
    if outcomes.open or not outcomes.how:
        rows.append({"what": "tests marked gpu that had not ended when the run was cut off", "value": len(outcomes.open), "unit": "tests", "bar": 1,
                     "which": outcomes.open})  # fmt: skip
    return rows


def stop(*_: object) -> NoReturn:
    """The handler of SIGTERM."""
    raise CutOff


def tell(outcomes: Outcomes) -> None:
    """Prints failures, skips, long and unfinished tests."""
    for test in outcomes.which("failed"):
        print(f"\nFAILED {test}\n{outcomes.why[test]}")
    for reason, count in Counter(outcomes.why[t] for t in outcomes.which("skipped")).items():
        print(f"skipped, {count}: {reason}")
    for seconds, test in outcomes.longest(20):
        print(f"{seconds:7.1f} s  {test}")
    for test in outcomes.open[:100]:
        print(f"not ended: {test}")
    if len(outcomes.open) > 100:
        print(f"... and {len(outcomes.open) - 100} more that had not ended")
    for test in outcomes.lost_context:
        print(f"its process lost the GPU: {test}")
    sys.stdout.flush()


def start_memory(network: str, builds: int, seconds: float, gpu: str) -> subprocess.Popen[str]:
    """Starts the memory test."""
    words = [sys.executable, str(HERE / "gpu_memory.py"), network, str(builds), str(seconds)]
    return subprocess.Popen(words, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu})


def memory(network: str, child: subprocess.Popen[str]) -> dict:
    """The row of the memory test, after its end."""
    said = ""
    assert child.stdout is not None
    for line in child.stdout:
        print(line, end="", flush=True)
        said = line
    match = re.search(r"after (\d+) builds and loads, ([-\d.]+) MiB a round", said)
    if child.wait() or match is None:
        raise SystemExit(f"the memory test ended with code {child.returncode}; its output stands above")
    what = f"growth of GPU memory a build and load, over {match[1]} of them ({network})"
    return {"what": what, "value": float(match[2]), "unit": "MiB", "bar": 1.0}


if __name__ == "__main__":
    main()
