"""Mutation testing with Cosmic Ray: how many small breaks of the source the tests notice.

`make mutants` or `python tests/mutation/run.py [--packages pruning,engine] [--sample 40] [--seed 1] [--resume FOLDER] [--out FILE]`

Works on a clone of the last commit, so the working tree is never mutated. Of all mutants of a package, `--sample` are drawn with `--seed`;
each runs the tests that TESTS names for the package, those named after the mutated module first, until one fails. A mutant that
hangs is stopped after `--timeout` seconds and counts as killed. Mutants listed in equivalent.txt (the behaviour cannot differ) do
not count. `--resume` goes on with a folder that an earlier run printed. The exit code is 1 if a package is below `--least` percent.

Operators that mostly cannot change behaviour are left out, see SKIPPED and SKIPPED_PAIRS: `X | None` in annotations, `==` of small integers to `is`.
"""

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
TESTS = {
    "pruning": ["tests/pruning"],
    "precision": ["tests/precision", "tests/builder/test_quantized_build.py"],
    "passes": ["tests/passes", "tests/frontends"],
    "builder": ["tests/builder", "tests/precision"],
    "engine": ["tests/engine", "tests/runtime"],
}
SKIPPED = ("core/ReplaceBinaryOperator_BitOr_", "core/RemoveDecorator", "core/ZeroIterationForLoop")
SKIPPED_PAIRS = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")


def create_session(folder: Path, package: str, sample: int, seed: int, timeout: float) -> Path:
    """Writes the Cosmic Ray session of `sample` mutants of one package and returns its path; an existing session is kept."""
    session = folder / f"{package}.sqlite"
    if session.exists():
        return session
    config = folder / f"{package}.toml"
    runner = f"{sys.executable} {Path(__file__).resolve()} --run-tests {package}"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "src/whet/{package}"\ntimeout = {timeout}\nexcluded-modules = []\ntest-command = {json.dumps(runner)}\n'
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    unfinished = session.with_suffix(".new")
    cosmic_ray(folder, "init", str(config), str(unfinished))
    with sqlite3.connect(unfinished) as db:
        mutants = db.execute("SELECT job_id, operator_name FROM mutation_specs ORDER BY module_path, operator_name, occurrence").fetchall()
        usable = [job for job, operator in mutants if not operator.startswith(SKIPPED) and not operator.endswith(SKIPPED_PAIRS)]
        drawn = set(random.Random(seed).sample(usable, min(sample, len(usable))))
        for table in ("mutation_specs", "work_items"):
            db.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(job,) for job, _ in mutants if job not in drawn])
    unfinished.rename(session)
    return session


def cosmic_ray(folder: Path, *arguments: str) -> None:
    """Runs one Cosmic Ray command in the clone. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "cosmic_ray.cli", *arguments], cwd=folder / "clone", check=True)


def run_tests(package: str) -> int:
    """The test command of a mutant, run in the clone: test files named after the mutated module first, then the package's others."""
    changed = subprocess.run(["git", "diff", "--name-only"], capture_output=True, text=True, check=True).stdout.split()
    names = {Path(f).stem.strip("_") for f in changed}
    files = sorted(f for path in TESTS[package] for f in ([Path(path)] if path.endswith(".py") else Path(path).rglob("test_*.py")))
    files.sort(key=lambda f: not any(n in f.stem for n in names))
    environment = {**os.environ, "PYTHONPATH": "src", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow", *map(str, files)]
    return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def summarize(session: Path, equivalent: set[str]) -> dict:
    """Counts of one package's session, and the survivors as (module, line, operator, difference)."""
    with sqlite3.connect(session) as db:
        rows = db.execute(
            "SELECT module_path, start_pos_row, operator_name, test_outcome, worker_outcome, diff "
            "FROM mutation_specs JOIN work_results USING (job_id) ORDER BY module_path, start_pos_row"
        ).fetchall()
    killed, survivors, same = 0, [], 0
    for module, line, operator, outcome, worker, diff in rows:
        changed = "\n".join(x for x in (diff or "").splitlines() if x[:1] in "+-" and x[:3] not in ("+++", "---"))
        if str(outcome).upper().endswith("SURVIVED") and str(worker).upper().endswith("NORMAL"):
            if changed in equivalent:
                same += 1
            else:
                survivors.append({"module": module, "line": line, "operator": operator, "difference": changed})
        else:
            killed += 1
    return {"killed": killed, "survived": len(survivors), "equivalent": same, "survivors": survivors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default=",".join(TESTS), help="which packages, separated by commas")
    parser.add_argument("--sample", type=int, default=40, help="mutants per package (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that the tests of one mutant may take (default 600)")
    parser.add_argument("--least", type=float, default=90, help="percent of the mutants that must be killed (default 90)")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run that was interrupted")
    parser.add_argument("--out", type=Path, help="write the counts and survivors as JSON")
    parser.add_argument("--run-tests", metavar="PACKAGE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_tests:
        return run_tests(options.run_tests)
    folder = options.resume or Path(tempfile.mkdtemp(prefix="whet-mutants-"))
    print(f"working in {folder}; --resume {folder} goes on after an interruption", flush=True)
    if not (folder / "clone").exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "clone")], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder / "clone", capture_output=True, text=True, check=True).stdout.strip()
    equivalent = {block.strip("\n") for block in EQUIVALENT.read_text().split("\n\n") if not block.startswith("#")}
    results = {}
    for package in options.packages.split(","):
        session = create_session(folder, package, options.sample, options.seed, options.timeout)
        cosmic_ray(folder, "exec", str(session.with_suffix(".toml")), str(session))
        results[package] = summarize(session, equivalent)
        r = results[package]
        percent = 100 * r["killed"] / max(1, r["killed"] + r["survived"])
        print(f"{package:10} {r['killed']} killed, {r['survived']} survived, {r['equivalent']} equivalent: {percent:.0f} %", flush=True)
        for s in r["survivors"]:
            print(f"  {s['module']}:{s['line']} {s['operator']}\n    " + s["difference"].replace("\n", "\n    "), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"commit": commit, "seed": options.seed, "sample": options.sample, "packages": results}, indent=1) + "\n")
    below = [p for p, r in results.items() if 100 * r["killed"] < options.least * (r["killed"] + r["survived"])]
    return bool(below)


if __name__ == "__main__":
    sys.exit(main())
