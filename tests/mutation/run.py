"""Mutation testing: how many small breaks of the source the tests notice. Mutants are drawn with Cosmic Ray (mutation_plan.py).

`make mutants` or `python tests/mutation/run.py [--packages pruning,engine] [--sample 40] [--seed 1] [--workers N] [--resume FOLDER] [--out FILE]`

Each worker has a copy of the tree, so the working tree is never mutated. Of all mutants of a package, `--sample` are drawn with `--seed`. With
Python 3.12 one run of all tests records which functions each test enters (touched.py), and a mutant runs only the tests that enter its function,
quick ones first; otherwise it runs the tests that TESTS names for the package, those named after the mutated module first. A mutant that
hangs is stopped and counts as killed. Mutants listed in equivalent.txt (the behaviour cannot differ) do not count.

`--resume` goes on with a folder that an earlier run printed. `--draw FILE` only draws mutants; `--plan FILE` runs drawn ones, also where Cosmic
Ray is not installed, and starts no further mutant after `--seconds`. The exit code is 1 if a package is below `--least` percent.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mutation_plan import Mutant, draw, from_data, function_at, to_data

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
TESTS = {
    "pruning": ["tests/pruning"],
    "precision": ["tests/precision", "tests/builder/test_quantized_build.py"],
    "passes": ["tests/passes", "tests/frontends"],
    "builder": ["tests/builder", "tests/precision"],
    "engine": ["tests/engine", "tests/runtime"],
}
PART_OF_TREE = ("src", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "mkdocs.yml")
TOUCHED_SECONDS = 90.0  # total of the tests that a mutant runs, if their seconds are known
PYTEST = ("-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow and not gpu")


def copy_tree(target: Path) -> Path:
    """A copy of the parts of the tree that tests need."""
    for name in PART_OF_TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif source.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Of a test process in a copy of the tree."""
    paths = [str(tree / "src"), str(tree / "tests" / "mutation"), *(p for p in os.environ.get("PYTHONPATH", "").split(":") if p and p != "src")]
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **threads, "PYTHONPATH": ":".join(paths), **more}


def test_files(tree: Path, package: str) -> list[str]:
    """The test files of a package, relative to the tree."""
    found = [f for path in TESTS[package] for f in ([tree / path] if path.endswith(".py") else sorted((tree / path).rglob("test_*.py")))]
    return [str(f.relative_to(tree)) for f in found]


def record_tests(tree: Path, packages: list[str], folder: Path, workers: int, seconds: float) -> None:
    """Runs all tests of the packages; writes which functions each enters to `folder`. After `seconds` the rest is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    files = list(dict.fromkeys(f for p in packages for f in test_files(tree, p)))
    parallel = ("-n", str(workers), "--dist", "loadfile") if workers > 1 else ()
    command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "touched", *parallel, *files]
    process = subprocess.Popen(command, cwd=tree, env=environment(tree, WHET_TOUCHED=str(folder)), stdout=open(folder / "log", "w"))
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(20)


def read_touched(folder: Path) -> dict[str, list[tuple[float, str]]]:
    """The tests that enter each function, as FILE:NAME -> (seconds, test), quick ones first; by FILE for any function of a file."""
    tests: dict[str, set[tuple[float, str]]] = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        for text in path.read_text().splitlines():
            record = json.loads(text)
            for function in record["entered"]:
                for key in (function, function.partition(":")[0]):
                    tests[key].add((record["seconds"], record["test"]))
    return {k: sorted(v) for k, v in tests.items()}


def choose_tests(mutant: Mutant, tree: Path, touched: dict[str, list[tuple[float, str]]] | None) -> list[str]:
    """The tests that a mutant runs, in this order; empty if none enters its function."""
    named = Path(mutant.module).stem.strip("_")
    if touched is None:
        return sorted(test_files(tree, mutant.package), key=lambda f: named not in f)
    function = function_at((tree / mutant.module).read_text(), mutant.edits[0][0] + 1)
    found = touched.get(f"{mutant.module}:{function}" if function else mutant.module, [])
    total, chosen = 0.0, []
    for seconds, test in sorted(found, key=lambda t: (named not in t[1].split("::")[0], t)):
        if total < TOUCHED_SECONDS:
            total += seconds
            chosen.append(test)
    return chosen


def run_mutant(mutant: Mutant, tree: Path, tests: list[str], timeout: float) -> dict[str, Any]:
    """Applies a mutant in a copy of the tree, runs the tests and takes it back. `outcome`: killed, survived, timeout or no tests."""
    path = tree / mutant.module
    source = path.read_text()
    mutated = mutant.apply(source)
    record = {"name": mutant.name, "package": mutant.package, "module": mutant.module, "line": mutant.line, "operator": mutant.operator}
    record["difference"] = mutant.difference(source)
    if not tests:
        return {**record, "outcome": "no tests", "seconds": 0.0}
    arguments, begun = tree / "tests.txt", time.monotonic()
    arguments.write_text("\n".join(tests) + "\n")
    modified = path.stat().st_mtime
    try:
        path.write_text(mutated)
        _touch(path, modified)
        command = [sys.executable, "-m", "pytest", "-x", *PYTEST, f"@{arguments}"]
        code = subprocess.run(command, cwd=tree, env=environment(tree), timeout=timeout, capture_output=True, check=False).returncode
        outcome = "survived" if code == 0 else "killed"
    except subprocess.TimeoutExpired:
        outcome = "timeout"
    finally:
        path.write_text(source)
        _touch(path, modified)
    return {**record, "outcome": outcome, "seconds": round(time.monotonic() - begun, 1), "tests": len(tests)}


_changes = itertools.count(1)


def _touch(path: Path, after: float) -> None:
    """A modification time that no bytecode file of an earlier content can have."""
    moment = after + 2 * next(_changes)
    os.utime(path, (moment, moment))


def summarize(records: list[dict[str, Any]], equivalent: set[str]) -> dict[str, Any]:
    """Counts of one package's mutants, and the survivors."""
    alive = [r for r in records if r["outcome"] in ("survived", "no tests")]
    same = [r for r in alive if r["difference"] in equivalent]
    keys = ("module", "line", "operator", "difference", "outcome")
    survivors = [{k: r[k] for k in keys} for r in sorted(alive, key=lambda r: (r["module"], r["line"])) if r["difference"] not in equivalent]
    return {"killed": len(records) - len(alive), "survived": len(survivors), "equivalent": len(same), "survivors": survivors}


def equivalent_mutants() -> set[str]:
    """The differences listed in equivalent.txt; lines of a block that begin with # give the reason."""
    blocks = ["\n".join(x for x in block.splitlines() if not x.startswith("#")) for block in EQUIVALENT.read_text().split("\n\n")]
    return {b.strip("\n") for b in blocks if b.strip("\n")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default=",".join(TESTS), help="which packages, separated by commas")
    parser.add_argument("--sample", type=int, default=40, help="mutants per package (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that the tests of one mutant may take (default 600)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further mutant after this time")
    parser.add_argument("--map-seconds", type=float, default=1e9, help="how long the run may take that records which functions tests enter")
    parser.add_argument("--least", type=float, default=90, help="percent of the mutants that must be killed (default 90)")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run that was interrupted")
    parser.add_argument("--trees", type=Path, help="folder for the workers' copies of the tree (default: the run's folder)")
    parser.add_argument("--draw", type=Path, help="write the drawn mutants to a file and stop")
    parser.add_argument("--plan", type=Path, help="run the mutants of such a file")
    parser.add_argument("--out", type=Path, help="write the counts and survivors as JSON")
    options = parser.parse_args()
    begun, packages = time.monotonic(), options.packages.split(",")
    folder = options.resume or Path(tempfile.mkdtemp(prefix="whet-mutants-"))
    folder.mkdir(parents=True, exist_ok=True)
    plan = options.plan or options.draw or folder / "plan.json"
    if options.draw or not plan.exists():
        plan.write_text(json.dumps(to_data(m for p in packages for m in draw(ROOT, p, options.sample, options.seed)), indent=0))
    if options.draw:
        return 0
    print(f"working in {folder}; --resume {folder} goes on after an interruption", flush=True)
    mutants = [m for m in from_data(json.loads(plan.read_text())) if m.package in packages]
    trees: Queue[Path] = Queue()
    for k in range(options.workers):
        tree = (options.trees or folder) / f"tree{k}"
        shutil.rmtree(tree, ignore_errors=True)
        trees.put(copy_tree(tree))
    touched = None
    if sys.version_info >= (3, 12):
        if not (folder / "touched").exists():
            record_tests((options.trees or folder) / "tree0", packages, folder / "touched", options.workers, options.map_seconds)
        touched = read_touched(folder / "touched")
        if not touched:
            raise SystemExit(f"no test passed or none was recorded, see {folder / 'touched' / 'log'}")
        print(f"{len(touched)} functions and files entered by tests, after {time.monotonic() - begun:.0f} s", flush=True)
    outcomes = folder / "outcomes.jsonl"
    known = {r["name"]: r for r in map(json.loads, outcomes.read_text().splitlines())} if outcomes.exists() else {}

    def attempt(mutant: Mutant) -> None:
        if mutant.name in known or time.monotonic() - begun > options.seconds:
            return
        tree = trees.get()
        try:
            record = run_mutant(mutant, tree, choose_tests(mutant, tree, touched), options.timeout)
        except ValueError as e:
            print(e, flush=True)  # the file has changed since the mutants were drawn
            return
        finally:
            trees.put(tree)
        known[mutant.name] = record
        with open(outcomes, "a") as log:
            log.write(json.dumps(record) + "\n")

    by_package = [[m for m in mutants if m.package == p] for p in packages]
    order = [group[i] for i in range(max(map(len, by_package))) for group in by_package if i < len(group)]  # an early end leaves all packages counted
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(attempt, order))
    results = {p: summarize([known[m.name] for m in mutants if m.package == p and m.name in known], equivalent_mutants()) for p in packages}
    for package, r in results.items():
        percent = 100 * r["killed"] / max(1, r["killed"] + r["survived"])
        print(f"{package:10} {r['killed']} killed, {r['survived']} survived, {r['equivalent']} equivalent: {percent:.0f} %", flush=True)
        for s in r["survivors"]:
            print(f"  {s['module']}:{s['line']} {s['operator']} ({s['outcome']})\n    " + s["difference"].replace("\n", "\n    "), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"seed": options.seed, "sample": options.sample, "packages": results}, indent=1) + "\n")
    below = [p for p, r in results.items() if 100 * r["killed"] < options.least * (r["killed"] + r["survived"])]
    return bool(below)


if __name__ == "__main__":
    sys.exit(main())
