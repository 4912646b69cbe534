"""Lists published results whose figures something that they measured has changed since, oldest first, with the command that makes each again.

    python benchmarks/check_results.py            one screen: the oldest stale results, and how many others there are
    python benchmarks/check_results.py --all      every one
    python benchmarks/check_results.py NAME...    the result files whose folder/name contains one of these, with every changed function
    python benchmarks/check_results.py --json     every record as JSON
    python benchmarks/check_results.py --renames N   the commits among the last N that rename, as lines for same_behaviour.txt

A record is a result file, or a row of it with a commit of its own. It is

    current      nothing that its figures are made of has changed (_measured.py: the kernels of its layers, the code that runs them, the benchmark)
    selection    only passes, the builder or the calibration changed: what it measured is as it was, a new build may select other kernels
    stale        a function that it ran, or may have run, was changed or removed
    origin       commit, date, command or machine is missing, or uncommitted changes were measured

A function counts as changed if its syntax tree did: comments, docstrings, layout, types, imports and texts of errors do not count, nor do files of
commits of same_behaviour.txt that change names only, nor code that was added. The exit code is 1 if a record is stale or of an incomplete origin.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _code_changes import History, read_same_behaviour
from _measured import find_footprint
from _record import find_gaps, neutral, runs_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCREEN = 16  # results of the short list
AGAIN = ("stale", "origin")  # states of records to measure again


@dataclass(frozen=True)
class State:
    """Of one record: `word` as above; `changed` are its files with the functions that differ."""

    word: str
    commit: str
    date: str
    command: str
    gaps: tuple[str, ...] = ()
    changed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kernels_known: bool = True


def judge(record: dict[str, Any], device: str, history: History) -> State:
    """The state of a record of a result in the folder `device`."""
    gaps, footprint = find_gaps(record), find_footprint(record, device, history.repository)
    commit = str(record.get("commit") or "")
    plain = commit.removesuffix("+changes")
    figure = history.list_changed_definitions(plain, footprint.figure) if plain else {}
    if figure is None:
        gaps.append(f"its commit {plain} is not in the history")
    selection = history.list_changed_definitions(plain, footprint.selection) if plain and not figure else {}
    word = "origin" if gaps else "stale" if figure else "selection" if selection else "current"
    changed = tuple((path, tuple(names)) for path, names in (figure or selection or {}).items())
    command = " ".join(map(neutral, str(record.get("command") or "").split()))
    return State(word, commit, str(record.get("date") or ""), command, tuple(gaps), changed, footprint.kernels_known)


def check(results: Path, history: History, names: tuple[str, ...] = ()) -> dict[str, list[State]]:
    """Result file (folder/name) -> the states of its records."""
    found = {}
    for path in sorted(results.glob("*/*.json")):
        name = str(path.relative_to(results))
        if not names or any(n in name for n in names):
            found[name] = [judge(record, path.parent.name, history) for record in runs_of(json.loads(path.read_text()))]
    return found


def describe(states: list[State], every: bool = False) -> list[str]:
    """Lines about the records of a file that should be measured again: how many and why, and the commands."""
    bad = [s for s in states if s.word in AGAIN]
    gaps = Counter(g for s in bad for g in s.gaps)
    folders: Counter[str] = Counter()
    for path, names in {path: names for s in bad for path, names in s.changed}.items():
        parts = path.removeprefix("src/whet/").split("/")
        folders["/".join(parts[: 2 if parts[0] == "tactics" else 1])] += len(names)
    said = [f"{n} x {gap}" if n > 1 else gap for gap, n in gaps.items()]
    if folders:
        said.append("changed functions: " + ", ".join(f"{folder} {n}" for folder, n in folders.most_common(4)))
    if bad and not all(s.kernels_known for s in bad):
        said.append("its tactics are unknown")
    lines = ["; ".join(said)]
    if every:
        lines += sorted({f"{path}: {', '.join(names)}" for s in bad for path, names in s.changed})
    commands = Counter(s.command for s in bad if s.command)
    return [*lines, *(f"$ {command}" for command, _ in commands.most_common(None if every else 1))]


def print_list(found: dict[str, list[State]], limit: int | None, every: bool = False) -> None:
    """The results to measure again, oldest first, at most `limit` of them, and the counts of all."""
    today = datetime.datetime.now(datetime.UTC).date()
    bad = {name: [s for s in states if s.word in AGAIN] for name, states in found.items()}
    listed = sorted((min(s.date for s in states), name) for name, states in bad.items() if states)
    for date, name in listed[:limit]:
        states = found[name]
        age = f"{(today - datetime.date.fromisoformat(date[:10])).days} d" if date[:4].isdigit() else "?"
        first, *more = describe(states, every)
        print(f"{age:>5}  {name.removesuffix('.json'):32} {len(bad[name])} of {len(states)}: {first}"[: None if every else 170])
        for line in more:
            print(f"{'':7}{line}"[: None if every else 170])
    if limit is not None and len(listed) > limit:
        print(f"... and {len(listed) - limit} newer ones (--all)")
    words = Counter(s.word for states in found.values() for s in states)
    records = ", ".join(f"{n} {word}" for word, n in words.most_common())
    print(f"{len(found) - len(listed)} of {len(found)} result files need no new run. Records: {records}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only result files whose folder/name contains one of these, with all details")
    parser.add_argument("--all", action="store_true", help="list every result that should be measured again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--renames", type=int, metavar="N", help="list the commits among the last N that rename")
    options = parser.parse_args()
    history = History(ROOT, read_same_behaviour(), ROOT / "build" / "code_digests.json")
    try:
        if options.renames:
            print("\n".join(history.list_renames(options.renames)))
            return 0
        found = check(RESULTS, history, tuple(options.names))
    finally:
        history.close()
    if options.json:
        print(json.dumps({name: [asdict(s) for s in states] for name, states in found.items()}, indent=1))
    else:
        print_list(found, None if options.all or options.names else SCREEN, bool(options.names))
    return int(any(s.word in AGAIN for states in found.values() for s in states))


if __name__ == "__main__":
    sys.exit(main())
