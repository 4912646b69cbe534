"""Lists published results that are older than the code they measure, or that name no clean commit.

    python benchmarks/check_results.py            a line per result file, then the counts
    python benchmarks/check_results.py --strict   exit 1 if any result is stale or has no clean commit
    python benchmarks/check_results.py --json     the same as JSON

A result depends on the paths that DEPENDS names for its folder. It is stale if a commit after the result's own
changed one of them. The report counts these commits; some change only comments, so a reader decides whether they matter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMON = (
    "src/whet/passes", "src/whet/composites", "src/whet/builder", "src/whet/runtime", "src/whet/precision",
    "src/whet/pruning", "src/whet/measure",
)
DEPENDS = {
    "cpu": (*COMMON, "src/whet/tactics/cpu", "src/whet/backends/cpu"),
    "h100": (*COMMON, "src/whet/tactics/cuda", "src/whet/backends/cuda"),
    "h200": (*COMMON, "src/whet/tactics/cuda", "src/whet/backends/cuda"),
}


def runs_of(data: Any) -> Iterator[dict[str, Any]]:
    """Every record of a result file that names, or should name, a commit: runs, and rows measured by themselves."""
    for run in data if isinstance(data, list) else [data]:
        own = [row for row in run.get("rows", []) if isinstance(row, dict) and "commit" in row]
        yield from own or [run]


def state_of(run: dict[str, Any], paths: tuple[str, ...], repository: Path) -> str:
    """Why a run should be measured again, or "" if nothing that it measures has changed since."""
    commit = str(run.get("commit") or "")
    if not commit:
        return "names no commit"
    plain = commit.removesuffix("+changes")
    asked = subprocess.run(
        ["git", "rev-list", "--count", "--no-merges", f"{plain}..HEAD", "--", *paths], cwd=repository, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        return f"its commit {plain} is not in the history"
    since = int(asked.stdout)
    notes = ["uncommitted changes were measured"] if plain != commit else []
    if since:
        notes.append(f"{since} commits since changed what it measures")
    return "; ".join(notes)


def check(results: Path, repository: Path) -> dict[str, list[str]]:
    """Result file (folder/name) -> distinct reasons to measure it again; empty if it is current."""
    found = {}
    for path in sorted(results.glob("*/*.json")):
        runs = list(runs_of(json.loads(path.read_text())))
        reasons = dict.fromkeys(state_of(run, DEPENDS.get(path.parent.name, COMMON), repository) for run in runs)
        found[str(path.relative_to(results))] = [r for r in reasons if r]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="exit 1 if any result should be measured again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = check(RESULTS, ROOT)
    again = {name: reasons for name, reasons in found.items() if reasons}
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, reasons in found.items():
            print(f"{name:40} {'; '.join(reasons) or 'current'}")
        print(f"{len(found) - len(again)} of {len(found)} result files are current")
    return 1 if options.strict and again else 0


if __name__ == "__main__":
    sys.exit(main())
