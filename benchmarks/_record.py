"""Provenance of every result file: date, commit, command, machine, versions; and the confidence interval of a median."""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

#: keys under which results name the machine
MACHINES = ("machine", "device", "cpu")


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """Date (UTC), commit (see `read_commit`), command, CPU and versions, as keys of a result file."""
    commit = read_commit(Path(__file__).parent)
    if commit.endswith("+changes"):
        print("note: this result is of uncommitted changes, so it cannot be published: commit, and run again", file=sys.stderr)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command(f"benchmarks/{Path(sys.argv[0]).name}"),
        "machine": describe_machine(),
        "versions": {n: _version(n) for n in packages} | {"python": sys.version.split()[0]},
    }


def read_commit(benchmarks: Path) -> str:
    """The commit of this copy of the project, 12 digits, with `+changes` if the package or a benchmark differs from it.

    A copy made by `git archive` has no history; git has written its commit to archived_commit.txt (.gitattributes). "" if neither says it.
    """
    archive = benchmarks / "archived_commit.txt"
    archived = archive.read_text().strip() if archive.exists() else "$"
    if not archived.startswith("$"):
        return archived[:12]
    changed = _git(benchmarks, "status", "--porcelain", "--untracked-files=no", "../src", ":(glob)*.py")
    return _git(benchmarks, "rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")


def describe_machine() -> str:
    """The CPU's model and how many CPUs this process may use."""
    from whet.backends.cpu.info import get_cpu_model

    return f"{get_cpu_model()}, {len(os.sched_getaffinity(0))} CPUs"


def describe_origin(made: dict[str, Any]) -> dict[str, Any]:
    """Date, commit, command and machine of `provenance`, for a row of a file whose other rows may be of other runs."""
    return {key: made[key] for key in ("date", "commit", "command", "machine")}


def count_tactics(plan: Any) -> dict[str, int]:
    """How many layers of an engine each tactic has: check_results.py judges a row with these by the code of its kernels alone."""
    return dict(Counter(choice.tactic for choice in plan.choices.values()).most_common())


def replace_row(row: dict[str, Any], out: Path, key: Iterable[str], packages: Iterable[str], machine: Any = None) -> list[dict[str, Any]]:
    """Puts a row into a result file in the place of an older row with the same values of `key`, and returns all rows, sorted by `key`.

    The row gets its own date, commit and command, since the other rows may have been measured earlier. Rows of another machine are dropped.
    `machine` describes this one (`describe_machine` if not given). Several processes may write to one file.
    """
    keys = tuple(key)
    with alone(out):
        old = json.loads(out.read_text()) if out.exists() else {}
        made = provenance(packages)
        made["machine"] = machine or made["machine"]
        rows = [r for r in old.get("rows", ()) if any(r[k] != row[k] for k in keys)] if old.get("machine") == made["machine"] else []
        rows.append(row | {key: made[key] for key in ("date", "commit", "command")})
        rows.sort(key=lambda r: [r[k] for k in keys])
        out.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")
    return rows


def runs_of(data: Any) -> Iterator[dict[str, Any]]:
    """Every record of a result file that names, or should name, a commit: rows measured by themselves, and runs for their other rows.

    A row with a commit of its own was measured by itself, so it does not inherit the date and the command of its file.
    """
    for run in data if isinstance(data, list) else [data]:
        rows = run.get("rows", [])
        rows = [row for row in (rows.values() if isinstance(rows, dict) else rows) if isinstance(row, dict)]
        own = [row for row in rows if "commit" in row]
        yield from ({**{k: v for k, v in run.items() if k not in ("rows", "date", "command")}, **row} for row in own)
        if not own or len(own) < len(rows):
            yield run


def find_gaps(run: dict[str, Any]) -> list[str]:
    """What is missing to repeat a run of a result file and to judge it; empty if its origin is complete."""
    said = [f"no {key} was stored" for key in ("commit", "date", "command") if not run.get(key)]
    if not any(run.get(key) for key in MACHINES):
        said.append("no machine was stored")
    if str(run.get("commit", "")).endswith("+changes"):
        said.append("uncommitted changes were measured")
    return said


def list_gaps(data: Any) -> list[str]:
    """What the records of a result file lack, each gap once; a file with gaps is not published."""
    return list(dict.fromkeys(gap for run in runs_of(data) for gap in find_gaps(run)))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def command(script: str) -> str:
    """This command line as typed in the repository's root: `script` and the arguments.

    Paths inside the repository become relative. Others are replaced: a folder by FOLDER, a file by FOLDER/<its name>.
    """
    return " ".join(["python", script, *map(neutral, sys.argv[1:])])


def neutral(word: str) -> str:
    """One argument; a path in it (also after `--flag=`) is written without folders of this machine and hidden folders."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path, root = Path(value), Path(__file__).resolve().parents[1]
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    hidden = "/" in value and any(part.startswith(".") and part != ".." for part in path.parts)
    if not path.is_absolute() and not hidden:
        said = str(path) if Path(value).is_absolute() else value
    elif path.is_dir() or not path.suffix:
        said = "FOLDER"
    else:
        said = f"FOLDER/{path.name}"
    return f"{flag}{equals}{said}"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Exclusive access to the result file `path` among all processes that use this function.

    Two runs that add rows to one file each read, extend and replace it: without a lock the later one would lose the earlier one's rows.
    The lock is on a separate file (`.<name>.lock`, ignored by git), since the result file itself is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=folder).stdout.strip()


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(median, low, high): the smallest interval between order statistics that contains the median with at least `confidence`.

    Distribution-free: the number of samples below the median is binomial with p = 1/2 (David and Nagaraja, Order Statistics, 7.1). Raises
    ValueError for fewer than six samples at 95 %, since no pair has that coverage.
    """
    ordered, n = sorted(values), len(values)
    best = None
    for k in range(n // 2):  # low = the k-th smallest, high = the k-th largest (from 0)
        outside = 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n
        if 1 - outside >= confidence:
            best = k
    if best is None:
        raise ValueError(f"{n} samples hold no {confidence:.0%} interval of the median: take more processes (six are enough for 95 %)")
    return median(ordered), ordered[best], ordered[n - 1 - best]
