"""Lists published results that are older than the code they measure, or whose origin is incomplete.

    python benchmarks/check_results.py [NAME...]  a line per commit of every result file (or of the named ones), then the counts
    python benchmarks/check_results.py --strict   exit 1 if any result is stale or has no clean commit
    python benchmarks/check_results.py --json     the same as JSON

A result measures the script of its command and the paths that MEASURED names for that script; other scripts measure DEFAULT and, by the folder
of the result, the tactics of one backend. It is stale if one of these files has other code than at the commit of the result: comments,
docstrings and the layout of lines are no code. What the number of changed files means for a result, a reader decides.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from _record import find_gaps, runs_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEFAULT = ("passes", "composites", "builder", "runtime", "precision", "measure")
TACTICS = {"cpu": ("tactics/cpu", "backends/cpu"), "h100": ("tactics/cuda", "backends/cuda"), "h200": ("tactics/cuda", "backends/cuda")}
PRUNING = (*DEFAULT, "pruning", "sparsity")
WHOLE = ("",)  # the package
#: script -> folders of src/whet; the second value: also the backend's tactics; the third: other paths of the repository
MEASURED: dict[str, tuple[tuple[str, ...], bool, tuple[str, ...]]] = {
    "accuracy_precision": (DEFAULT, False, ()),
    "accuracy_real": (("frontends", "passes", "precision", "ops"), False, ()),
    "auto_digits": ((*PRUNING, "search"), True, ()),
    "claims": (PRUNING, True, ()),
    "demo": (PRUNING, True, ()),
    "fuzz_engine": (("engine", "runtime", "network", "ops", "files.py", "array_files.py"), False, ("tests/engine",)),
    "fuzz_files": (WHOLE, False, ()),
    "gpu_tests": (WHOLE, True, ("tests",)),
    "new_user": (WHOLE, False, ()),
    "polygraphy_tests": (("trt", "frontends", "ops", "builder", "runtime"), False, ()),
    "pruned_architectures": (("pruning", "frontends", "ops"), False, ()),
    "pruned_detectors": (PRUNING, True, ()),
    "pruning_defaults": (("pruning", "ops"), False, ()),
    "pruning_finetuned": (("pruning", "training", "ops"), False, ()),
    "pruning_tools": (("pruning", "ops"), False, ()),
    "recognition": (("frontends", "passes", "rewrite", "ops"), False, ()),
    "run": (PRUNING, True, ()),  # examples/resnet56 and examples/yolov5s
    "qat": (PRUNING, True, ()),
    "search_samplers": (("search", "pruning"), False, ()),
    "selected_tactics": (("tactics", "builder", "measure"), True, ()),
    "soak": (WHOLE, False, ()),
    "tensorrt_samples": (("trt", "frontends", "ops", "builder", "runtime"), False, ()),
    "torch_networks": (("frontends", "passes", "torch_compile", "ops"), False, ()),
    "two_four_accuracy": (("sparsity", "pruning", "training", "precision"), True, ()),
}
MUTATED = ("pruning", "precision", "passes", "builder", "engine")


def of_command(command: str, device: str) -> tuple[str, ...]:
    """The paths that a result with this command measures, on the device whose folder it is in."""
    script = next(iter(re.findall(r"\S+\.py\b", command)), "")
    if script == "tests/mutation/run.py":
        return (*(f"src/whet/{p}" for p in MUTATED), "tests")
    folders, tactics, others = MEASURED.get(Path(script).stem, (DEFAULT, True, ()))
    folders += TACTICS.get(device, ()) if tactics else ()
    return (*(f"src/whet/{f}".rstrip("/") for f in folders), *others, *([script] if script else []))


def code_of(text: str, path: str) -> str:
    """What is compared of a file: a Python file without comments, docstrings and layout."""
    if not path.endswith(".py"):
        return text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [x for x in node.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)


@cache
def changed_files(commit: str, paths: tuple[str, ...], repository: Path) -> int | None:
    """How many files under `paths` differ between `commit` and HEAD, 0 if none differs in code; None if the history has no such commit."""
    listed = _git(repository, "diff", "--name-only", commit, "HEAD", "--", *paths)
    if listed is None:
        return None
    files = listed.splitlines()
    return len(files) if any(_code_at(commit, f, repository) != _code_at("HEAD", f, repository) for f in files) else 0


@cache
def _code_at(commit: str, path: str, repository: Path) -> str | None:
    text = _git(repository, "show", f"{commit}:{path}")
    return None if text is None else code_of(text, path)


def _git(repository: Path, *words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, errors="replace", check=False)
    return None if done.returncode else done.stdout


def state_of(run: dict[str, Any], device: str, repository: Path) -> str:
    """Why a run should be measured again, or "" if nothing that it measures has changed since and its origin is complete."""
    commit = str(run.get("commit") or "")
    reasons = find_gaps(run)
    if commit:
        plain = commit.removesuffix("+changes")
        changed = changed_files(plain, of_command(str(run.get("command", "")), device), repository)
        if changed is None:
            reasons.append(f"its commit {plain} is not in the history")
        elif changed:
            reasons.append(f"{changed} of the files that it measures have changed since {plain}")
    return "; ".join(reasons)


def check(results: Path, repository: Path, names: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Result file (folder/name) -> distinct reasons to measure it again; empty if it is current."""
    found = {}
    for path in sorted(results.glob("*/*.json")):
        if names and not any(name in str(path.relative_to(results)) for name in names):
            continue
        runs = list(runs_of(json.loads(path.read_text())))
        reasons = dict.fromkeys(state_of(run, path.parent.name, repository) for run in runs)
        found[str(path.relative_to(results))] = [r for r in reasons if r]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only result files whose folder/name contains one of these")
    parser.add_argument("--strict", action="store_true", help="exit 1 if any result should be measured again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = check(RESULTS, ROOT, tuple(options.names))
    again = {name: reasons for name, reasons in found.items() if reasons}
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, reasons in found.items():
            print(f"{name:40} {reasons[0] if reasons else 'current'}")
            for reason in reasons[1:]:  # rows of other commits
                print(f"{'':40} {reason}")
        print(f"{len(found) - len(again)} of {len(found)} result files are current")
    return 1 if options.strict and again else 0


if __name__ == "__main__":
    sys.exit(main())
