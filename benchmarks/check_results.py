"""Lists published results that are older than the code they measure, or whose origin is incomplete.

    python benchmarks/check_results.py            the current records of each result file, and the changes since its newest record
    python benchmarks/check_results.py NAME...    every reason of the result files whose folder/name contains one of these
    python benchmarks/check_results.py --strict   exit 1 if any result is stale or has no clean commit
    python benchmarks/check_results.py --json     the same as JSON
    python benchmarks/check_results.py --files    also each changed file with the last commit that changed it
    python benchmarks/check_results.py --renames N   the commits among the last N that rename, as lines for same_behaviour.txt

A record is a result file, or a row of it with a commit of its own. It measures the script of its command and the paths that MEASURED names for
that script; other scripts measure DEFAULT and, by the folder of the result, the tactics of one backend. A record is stale if a commit after its
own changed the code of one of these files and that change is still there. Comments, docstrings, layout, types, imports and texts of errors
do not count (see _code_changes.py), nor do files of commits of same_behaviour.txt that change names only. The reader decides whether a
changed file matters for a result.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from _code_changes import Commit, History, read_same_behaviour
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


def list_measured(command: str, device: str) -> tuple[str, ...]:
    """The paths that a result with this command measures, on the device whose folder it is in."""
    script = next(iter(re.findall(r"\S+\.py\b", command)), "")
    if script == "tests/mutation/run.py":
        return (*(f"src/whet/{p}" for p in MUTATED), "tests")
    folders, tactics, others = MEASURED.get(Path(script).stem, (DEFAULT, True, ()))
    folders += TACTICS.get(device, ()) if tactics else ()
    return (*(f"src/whet/{f}".rstrip("/") for f in folders), *others, *([script] if script else []))


def explain_state(run: dict[str, Any], device: str, history: History, files: bool = False) -> str:
    """Why a run should be measured again, or "" if nothing that it measures has changed since and its origin is complete."""
    commit = str(run.get("commit") or "")
    reasons = find_gaps(run)
    if commit:
        plain = commit.removesuffix("+changes")
        changed = history.list_changes(plain, list_measured(str(run.get("command", "")), device))
        if changed is None:
            reasons.append(f"its commit {plain} is not in the history")
        elif changed:
            reasons.append(describe_changes(plain, changed, history, files))
    return "; ".join(reasons)


def describe_changes(since: str, changed: dict[str, Commit], history: History, files: bool = False) -> str:
    """Changed files by folder, and the latest commit among them."""
    folders = Counter("/".join(Path(name).parent.parts[:3]).removeprefix("src/whet/") or name for name in changed)
    last = min({c.id for c in changed.values()}, key=[c.id for c in history.commits].index)
    subject = next(c.subject for c in changed.values() if c.id == last)
    said = f"since {since} changed: {', '.join(f'{folder} {n}' for folder, n in folders.most_common())}; last in {last[:12]} ({subject[:60]})"
    return said + "".join(f"\n{'':8}{commit.id[:12]} {name}" for name, commit in changed.items() if files)


def check(results: Path, history: History, names: tuple[str, ...] = (), files: bool = False) -> dict[str, dict[str, int]]:
    """Result file (folder/name) -> distinct reasons to measure rows again, with the number of records; "" counts the current ones."""
    found = {}
    for path in sorted(results.glob("*/*.json")):
        if names and not any(name in str(path.relative_to(results)) for name in names):
            continue
        runs = sorted(runs_of(json.loads(path.read_text())), key=lambda run: str(run.get("date") or ""), reverse=True)
        found[str(path.relative_to(results))] = dict(Counter(explain_state(run, path.parent.name, history, files) for run in runs))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only result files whose folder/name contains one of these")
    parser.add_argument("--strict", action="store_true", help="exit 1 if any result should be measured again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--files", action="store_true", help="list the changed files")
    parser.add_argument("--renames", type=int, metavar="N", help="list the commits among the last N that rename")
    options = parser.parse_args()
    history = History(ROOT, read_same_behaviour(), ROOT / "build" / "code_digests.json")
    try:
        if options.renames:
            print("\n".join(history.list_renames(options.renames)))
            return 0
        found = check(RESULTS, history, tuple(options.names), options.files)
    finally:
        history.close()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_states(found, bool(options.names or options.files))
    return 1 if options.strict and any(set(reasons) != {""} for reasons in found.values()) else 0


def print_states(found: dict[str, dict[str, int]], every_reason: bool) -> None:
    for name, reasons in found.items():
        records, current = sum(reasons.values()), reasons.get("", 0)
        print(f"{name:40} {'current' if current == records else f'{current} of {records} records are current'}")
        stale = [(n, reason) for reason, n in reasons.items() if reason]
        for n, reason in stale if every_reason else stale[:1]:  # the newest first
            print(f"    {f'{n} of {records}: ' if records > 1 else ''}{reason}")
    files = sum(set(reasons) == {""} for reasons in found.values())
    records = sum(sum(reasons.values()) for reasons in found.values())
    print(f"{files} of {len(found)} result files and {sum(r.get('', 0) for r in found.values())} of {records} records are current")


if __name__ == "__main__":
    sys.exit(main())
