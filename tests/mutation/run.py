"""Mutation testing: how many small breaks of the source the tests notice. Mutants are drawn with Cosmic Ray (mutation_plan.py).

`make mutants` or `python tests/mutation/run.py [--packages pruning,engine] [--sample 40] [--seed 1] [--workers N] [--resume FOLDER] [--out FILE]`

A package is a folder of src/whet; `builder` is its lock, memory and verification and the timing cache with its keys (PARTS in mutation_plan.py).
Of all mutants of a package, `--sample` are drawn with `--seed`. One process collects the tests and imports the package (warm.py); the source files
are never changed. A first child records which functions each test enters; a mutant then runs, in a child of its own, only the tests that enter its
function: those named after the module first, then quick ones first, up to `--budget` seconds of them. A mutant that takes too long counts as killed,
one that no test enters as survived. Mutants listed in equivalent.txt (the behaviour cannot differ) do not count, and some are not drawn
(mutation_plan.py). The percentage is of a sample, so its 95 % interval (Wilson) is given.

With `--unrecorded` nothing is recorded first: tests are selected by names and imports (order_tests), which takes less time for few mutants and kills
fewer of them.

`--resume` goes on with a folder that an earlier run printed. `--draw FILE` only draws mutants; `--plan FILE` runs drawn ones, also where Cosmic
Ray is not installed; mutants of files that have changed since are left out. No further mutant starts after `--seconds`. The exit code is 1 if a
package is below `--least` percent.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mutation_plan import Mutant, digest, draw, from_data, function_at, to_data

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
TESTS = {
    "pruning": ["tests/pruning", "tests/sparsity", "tests/report", "tests/cli"],
    "precision": ["tests/precision", "tests/builder", "tests/cli"],
    "passes": ["tests/passes", "tests/frontends", "tests/composites", "tests/precision"],
    "builder": ["tests/builder", "tests/precision", "tests/measure", "tests/inspector", "tests/cli", "tests/test_api.py"],
    "whole_builder": ["tests/builder", "tests/precision", "tests/measure", "tests/inspector", "tests/cli", "tests/test_api.py"],
    "engine": ["tests/engine", "tests/runtime", "tests/inspector"],
}
PYTEST = ("-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow and not gpu")


def environment(**more: str) -> dict[str, str]:
    """Of the process that runs the tests."""
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "mutation"), *(p for p in os.environ.get("PYTHONPATH", "").split(":") if p and p != "src")]
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **threads, "PYTHONPATH": ":".join(paths), **more}


def read_touched(path: Path) -> dict[str, list[tuple[float, str]]]:
    """The tests that enter each function, as FILE:NAME -> (seconds, test), quick ones first; by FILE for any function of a file."""
    tests: dict[str, set[tuple[float, str]]] = defaultdict(set)
    for text in path.read_text().splitlines():
        row = json.loads(text)
        for function in row["entered"]:
            for key in (function, function.partition(":")[0]):
                tests[key].add((row["seconds"], row["test"]))
    return {k: sorted(v) for k, v in tests.items()}


def choose_tests(mutant: Mutant, root: Path, touched: dict[str, list[tuple[float, str]]], budget: float) -> list[str]:
    """The tests that a mutant runs, in this order, until `budget` seconds are full; empty if none enters its function."""
    named = Path(mutant.module).stem.strip("_")
    function = function_at((root / mutant.module).read_text(), mutant.edits[0][0] + 1)
    found = touched.get(f"{mutant.module}:{function}" if function else mutant.module, [])
    total, chosen = 0.0, []
    for seconds, test in sorted(found, key=lambda t: (named not in t[1].split("::")[0], t)):
        if total < budget:
            total += seconds
            chosen.append(test)
    return chosen


def order_tests(mutant: Mutant, root: Path, tests: Sequence[str], seconds: Mapping[str, float], budget: float) -> list[str]:
    """The tests of a package for a mutant, without a record of what they enter: of files named after the module, of files that import it or a name
    that it defines, then the others; quick ones first, until `budget` seconds are full. If any seconds are known, tests without are left out.
    """
    named, text = Path(mutant.module).stem.strip("_"), (root / mutant.module).read_text()
    dotted = ".".join(Path(mutant.module).with_suffix("").parts[1:])
    defined = {x.name for x in ast.parse(text).body if isinstance(x, ast.FunctionDef | ast.ClassDef)}

    def rank(file: str) -> int:
        if f"_{named}" in Path(file).stem:
            return 0
        imported = (x for x in ast.walk(ast.parse((root / file).read_text())) if isinstance(x, ast.ImportFrom) and x.module)
        own = any(x.module == dotted or (dotted.startswith(f"{x.module}.") and defined & {a.name for a in x.names}) for x in imported)
        return 1 if own else 2

    ranks = {file: rank(file) for file in {t.split("::")[0] for t in tests}}
    total, chosen = 0.0, []
    for test in sorted((t for t in tests if t in seconds or not seconds), key=lambda t: (ranks[t.split("::")[0]], seconds.get(t, 0.0), t)):
        if total < budget:
            total += seconds.get(test, 0.0)
            chosen.append(test)
    return chosen


def summarize(records: list[dict[str, Any]], equivalent: set[str]) -> dict[str, Any]:
    """Counts of one package's mutants, and the survivors."""
    alive = [r for r in records if r["outcome"] in ("survived", "no tests")]
    same = [r for r in alive if r["difference"] in equivalent]
    keys = ("module", "line", "operator", "difference", "outcome")
    survivors = [{k: r[k] for k in keys} for r in sorted(alive, key=lambda r: (r["module"], r["line"])) if r["difference"] not in equivalent]
    return {"killed": len(records) - len(alive), "survived": len(survivors), "equivalent": len(same), "survivors": survivors}


def interval(killed: int, of: int) -> tuple[float, float]:
    """The 95 % interval of the killed percentage (Wilson 1927, JASA 22)."""
    if not of:
        return 0.0, 100.0
    z, p = 1.959964, killed / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return 100 * max(0.0, (middle - half) / (1 + z * z / of)), 100 * min(1.0, (middle + half) / (1 + z * z / of))


def to_row(package: str, counts: dict[str, Any]) -> dict[str, Any]:
    """Counts with percentage and interval."""
    of = counts["killed"] + counts["survived"]
    low, high = interval(counts["killed"], of)
    row = {"package": package, **{k: counts[k] for k in ("killed", "survived", "equivalent")}}
    return {**row, "percent": round(100 * counts["killed"] / max(1, of), 1), "95 % interval": f"{low:.0f} to {high:.0f}"}


def to_record(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The result file: a row per package and one of all, and the survivors."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from _record import provenance

    rows = [to_row(package, r) for package, r in results.items()]
    rows.append(to_row("all", {k: sum(r[k] for r in results.values()) for k in ("killed", "survived", "equivalent")}))
    survivors = [s for r in results.values() for s in r["survivors"]]
    command = f"python tests/mutation/run.py --packages {','.join(results)} --sample {options.sample} --seed {options.seed}"
    command += f" --budget {options.budget:g}" + (" --unrecorded" if options.unrecorded else "")
    return {**provenance(("numpy", "onnx", "pytest", "cosmic-ray")), "command": command, "rows": rows, "survivors": survivors}


def equivalent_mutants() -> set[str]:
    """The differences listed in equivalent.txt; lines of a block that begin with # give the reason."""
    blocks = ["\n".join(x for x in block.splitlines() if not x.startswith("#")) for block in EQUIVALENT.read_text().split("\n\n")]
    return {b.strip("\n") for b in blocks if b.strip("\n")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default="pruning,precision,passes,builder,engine", help="which packages, separated by commas")
    parser.add_argument("--sample", type=int, default=40, help="mutants per package (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds of processor time for one mutant (default 120)")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests that a mutant runs (default 60)")
    parser.add_argument("--longest", type=float, default=60, help="tests of more seconds of processor time are left out (default 60)")
    parser.add_argument("--unrecorded", action="store_true", help="do not record first which functions each test enters: go by names and imports")
    parser.add_argument("--durations", type=Path, help="JSON of the seconds of tests, for --unrecorded")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further mutant after this time")
    parser.add_argument("--least", type=float, default=90, help="percent of the mutants that must be killed (default 90)")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run that was interrupted")
    parser.add_argument("--draw", type=Path, help="write the drawn mutants to a file and stop")
    parser.add_argument("--plan", type=Path, help="run the mutants of such a file")
    parser.add_argument("--report", action="store_true", help="run nothing: only the counts of the folder of --resume, also while it is in use")
    parser.add_argument("--out", type=Path, help="write the counts and survivors as JSON")
    options = parser.parse_args()
    packages = options.packages.split(",")
    folder = options.resume or Path(tempfile.mkdtemp(prefix="whet-mutants-"))
    folder.mkdir(parents=True, exist_ok=True)
    plan = options.draw or folder / "plan.json"
    if options.plan:
        plan.write_text(json.dumps(to_data(unchanged(from_data(json.loads(options.plan.read_text()))))))
    elif options.draw or not plan.exists():
        plan.write_text(json.dumps(to_data(m for p in packages for m in draw(ROOT, p, options.sample, options.seed)), indent=0))
    if options.draw:
        return 0
    if not options.report:
        run_mutants(folder, packages, options)
    return report_outcomes(folder, packages, options)


def run_mutants(folder: Path, packages: list[str], options: argparse.Namespace) -> None:
    """Runs the mutants of the folder's plan that have no outcome yet. SystemExit if pytest fails or the time ended before the first."""
    print(f"working in {folder}; --resume {folder} goes on after an interruption", flush=True)
    limits = {k: getattr(options, k) for k in ("workers", "timeout", "budget", "longest", "seconds", "unrecorded")}
    durations = json.loads(options.durations.read_text()) if options.durations else {}
    (folder / "options.json").write_text(json.dumps(limits | {"durations": durations, "packages": packages}))
    tests = dict.fromkeys(t for p in packages for t in TESTS[p])
    command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "warm", *tests]
    code = subprocess.run(command, cwd=ROOT, env=environment(WHET_MUTATION=str(folder)), check=False).returncode
    if code not in (0, 1):  # 1: pytest has listed files that it cannot collect here
        raise SystemExit(f"pytest ended with {code}")
    if not (folder / "outcomes.jsonl").exists():
        raise SystemExit(f"--seconds={options.seconds:g} ended before the first mutant: go on with --resume {folder}")


def report_outcomes(folder: Path, packages: list[str], options: argparse.Namespace) -> int:
    """Prints the counts per package and the survivors, writes them to --out; the exit code is 1 if a package is below --least percent."""
    plan = folder / "plan.json"
    mutants = [m for m in from_data(json.loads(plan.read_text())) if m.package in packages]
    known = {r["name"]: r for r in map(json.loads, (folder / "outcomes.jsonl").read_text().splitlines())}
    found = {p: [describe(m, known[m.name]) for m in mutants if m.package == p and m.name in known] for p in packages}
    results = {p: summarize(records, equivalent_mutants()) for p, records in found.items()}
    for package, r in results.items():
        row, counts = to_row(package, r), ", ".join(f"{r[k]} {k}" for k in ("killed", "survived", "equivalent"))
        print(f"{package:10} {counts}: {row['percent']} % ({row['95 % interval']})")
        for s in r["survivors"]:
            print(f"  {s['module']}:{s['line']} {s['operator']} ({s['outcome']})\n    " + s["difference"].replace("\n", "\n    "), flush=True)
    if options.out:
        options.out.write_text(json.dumps(to_record(results, options), indent=1) + "\n")
    return int(any(100 * r["killed"] < options.least * (r["killed"] + r["survived"]) for r in results.values()))


def unchanged(mutants: list[Mutant]) -> list[Mutant]:
    """Those whose file is the one that they were drawn from; says how many are not."""
    kept = [m for m in mutants if (ROOT / m.module).exists() and digest((ROOT / m.module).read_text()) == m.original]
    if len(kept) < len(mutants):
        print(f"{len(mutants) - len(kept)} of {len(mutants)} drawn mutants are left out: their files have changed since", flush=True)
    return kept


def describe(mutant: Mutant, outcome: dict[str, Any]) -> dict[str, Any]:
    """An outcome with what the mutant changes."""
    about = {k: getattr(mutant, k) for k in ("package", "module", "line", "operator")}
    return {**outcome, **about, "difference": mutant.difference((ROOT / mutant.module).read_text())}


if __name__ == "__main__":
    sys.exit(main())
