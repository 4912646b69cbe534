"""Generates the README's and the docs' tables from benchmarks/results: between `<!-- table: NAME -->` and `<!-- end -->`.

`<!-- table: NAME columns: a,b.c -->` shows only those columns; b.c is the value c of the row's b. Numbers in prose: see references.py.

    python benchmarks/tables.py          writes them
    python benchmarks/tables.py --check  exits with 1 if one is out of date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from _record import list_gaps, neutral, runs_of
from references import UnknownValue, update

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples").rglob("README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- table: (\S+)(?: columns: (.*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(r) + " |" for r in rows)])


def _ms(v: Any) -> str:
    return "-" if v is None else f"{v:.2f}"


def ratios(data: dict[str, Any]) -> str:
    """Rows of (case, batch, precision, whet_ms, <peer>_ms..., ratio, interval, bar)."""
    peers = [k[:-3] for k in data["rows"][0] if k.endswith("_ms") and k != "whet_ms"]
    rows = []
    for r in data["rows"]:
        interval = f"{r['ratio']:.3f} ({r['ratio_low']:.3f}-{r['ratio_high']:.3f})"
        verdict = "" if r.get("bar") is None else _verdict(r)
        rows.append([r["case"], str(r["batch"]), r["precision"], _ms(r["whet_ms"]), *(_ms(r[f"{p}_ms"]) for p in peers), interval, verdict])
    return markdown(["network", "batch", "type", "whet ms", *(f"{p} ms" for p in peers), "best peer / whet (95 % interval)", "bar"], rows)


def _verdict(r: dict[str, Any]) -> str:
    met = "met" if r["ratio_low"] >= r["bar"] else "lost" if r["ratio_high"] < r["bar"] else "undecided"
    return f"{r['bar']:g}: {met}"


def plain(data: dict[str, Any], columns: str | None = None) -> str:
    """Any flat rows, their numbers and words as columns (or the requested ones); nested values are shown only on request."""
    flat = [{**r, **{f"{k}.{inner}": x for k, v in r.items() if isinstance(v, dict) for inner, x in v.items()}} for r in data["rows"]]
    keys = list(dict.fromkeys(k for r in (flat if columns else data["rows"]) for k, v in r.items() if isinstance(v, int | float | str)))
    if columns:
        unknown = [c for c in columns.split(",") if c not in keys]
        if unknown:
            raise SystemExit(f"no row has a column {unknown[0]!r}; there are {', '.join(keys)}")
        keys = columns.split(",")
    else:
        keys = [k for k in keys if k != "command"]
    return markdown(keys, [[_cell(r.get(k)) for k in keys] for r in flat])


def _cell(v: Any) -> str:
    return "" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)


def table(name: str, columns: str | None = None) -> str:
    """The table of benchmarks/results/<name>.json, with a line of date, commit, device and versions.

    A file may contain several runs: a list of results, each with its own date, which become rows of one table. Raises UnknownValue for a file whose
    origin is incomplete.
    """
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        return "Not measured yet.\n"
    data = json.loads(path.read_text())
    if gaps := list_gaps(data):
        raise UnknownValue(f"{name} is not published: {', '.join(gaps)}")
    runs = data if isinstance(data, list) else [data]
    whole = runs[0] if len(runs) == 1 else {"rows": [{"run": r["date"], **row} for r in runs for row in r["rows"]]}
    made = ratios(whole) if "ratio" in whole["rows"][0] and not columns else plain(whole, columns)
    return "\n\n".join([made, *(text for r in runs for text in _origin(r))]) + "\n"


def _origin(run: dict[str, Any]) -> list[str]:
    """The provenance of a run, and its notes."""
    records = list(runs_of(run))
    machines = dict.fromkeys(filter(None, (_machine(r) for r in records)))
    commits = dict.fromkeys(str(r["commit"]) for r in records)
    dates = sorted({r["date"][:16] for r in records})
    versions = ", ".join(f"{k} {v}" for k, v in run.get("versions", {}).items())
    when = dates[0] if len(dates) == 1 else f"{dates[0][:10]} to {dates[-1][:10]}" if dates[0][:10] != dates[-1][:10] else dates[0][:10]
    where = ", ".join(x for x in (when, *machines, f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}") if x)
    commands = list(dict.fromkeys(" ".join(map(neutral, r["command"].split())) for r in records))  # older files contain folders of the machine
    first = "; ".join(x for x in (where, versions) if x) + f". `{commands[0]}`"
    if len(commands) > 1:
        first += " repeats the first row; the result file has the command of each"
    return [first, *(run[key] for key in ("note", "machine_source") if key in run)]


def _machine(record: dict[str, Any]) -> str:
    """The device, or the model of the CPU."""
    named = next((record[key] for key in ("device", "machine", "cpu") if record.get(key)), "")
    return named if isinstance(named, str) else str(named.get("model", ""))


def main() -> None:
    stale = []
    for page in PAGES:
        if not page.exists():
            continue
        old = page.read_text()
        try:
            new = update(BLOCK.sub(lambda m: m[1] + table(m[2], m[3]) + m[4], old))
        except UnknownValue as e:
            sys.exit(f"{page.relative_to(ROOT)}: {e}")
        if new != old:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new)
    if stale:
        print(("out of date: " if "--check" in sys.argv else "wrote: ") + ", ".join(stale))
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
