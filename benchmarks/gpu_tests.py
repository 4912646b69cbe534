"""The tests marked `gpu`, whole, and the growth of GPU memory over builds and loads, on a machine with a GPU: results/<device>/tests.json.

    python benchmarks/gpu_tests.py [--workers N] [--builds N] [--networks A,B:N] [--seconds S] [FILE OR FOLDER OF TESTS ...]
    python benchmarks/gpu_tests.py --merge FILE...      runs of several files into results/h200/tests.json

About two minutes of tests on 16 cores (--workers 0 leaves them out), and up to a second a build.

Both run in processes of their own, side by side where CUDA_VISIBLE_DEVICES names two GPUs: memory on the last, tests on all others (on all,
without the memory test). What they print goes through. The file is written to $OUT, or to the current folder, after each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from _record import provenance

HERE = Path(__file__).parent
RESULT = HERE / "results" / "h200" / "tests.json"


def main() -> None:
    """Runs both, then writes the file; exit code 1 where a test failed or the memory grew by 1 MiB a build or more."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--workers", type=int, default=12, help="test processes (pytest-xdist); most of a test is compiling")
    p.add_argument("--builds", type=int, default=200, help="builds and loads of the memory test; 0 leaves it out")
    p.add_argument("--networks", default="resnet18", help="networks of the memory test, each in a process of its own; NAME:N for N builds instead")
    p.add_argument("--seconds", type=float, default=1e9, help="the memory test of a network ends after this long, with the builds that it got to")
    p.add_argument("--merge", action="store_true", help="the files named are results of this command, which become one")
    p.add_argument("tests", nargs="*", default=["tests"], help="all of them, if none are named")
    args = p.parse_args()
    if args.merge:
        RESULT.write_text(json.dumps([json.loads(Path(f).read_text()) for f in args.tests], indent=1) + "\n")
        return
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    cases = [(n, int(b or args.builds)) for n, _, b in (w.partition(":") for w in args.networks.split(","))] if args.builds else []
    growing = start_memory(*cases[0], args.seconds, gpus[-1]) if cases and len(gpus) > 1 else None
    rows = tests(args.workers, gpus[:-1] if growing else gpus, args.tests) if args.workers else []
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

    found = {**provenance(("numpy", "cuda-bindings")), "device": get_backend("cuda").describe()["model"], "rows": rows}
    (Path(os.environ.get("OUT", ".")) / "tests.json").write_text(json.dumps(found, indent=1) + "\n")


def tests(workers: int, gpus: list[str], which: list[str]) -> list[dict]:
    """Rows of the test run, counted from its JUnit file. What failed, why tests were skipped and the twelve longest are printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *which, "-n", str(workers), "-q", "-rs", "--durations=12", "--no-header",
                   f"--junitxml={report}", "-p", "no:cacheprovider", "-p", "no:benchmark", "-W", "ignore"]  # fmt: skip
        threads = str(max(1, (os.cpu_count() or 1) // workers))  # of the reference's products: more than cores starve all workers
        more = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        subprocess.run(command, cwd=HERE.parent, check=False, env={**os.environ, **more})
        counts = {"passed": 0, "failed": 0, "skipped": 0}
        for case in ElementTree.parse(report).iter("testcase"):
            tags = {child.tag for child in case}
            counts["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
    return [{"what": f"tests marked gpu that {how}", "value": n, "unit": "tests", "bar": 1 if how == "failed" else None} for how, n in counts.items()]


def start_memory(network: str, builds: int, seconds: float, gpu: str) -> subprocess.Popen[str]:
    """The memory test, begun."""
    words = [sys.executable, str(HERE / "gpu_memory.py"), network, str(builds), str(seconds)]
    return subprocess.Popen(words, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu})


def memory(network: str, child: subprocess.Popen[str]) -> dict:
    """The row of the memory test, once it has ended."""
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
