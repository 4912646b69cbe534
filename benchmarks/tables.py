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

from _record import find_gaps, neutral, runs_of
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
    return markdown(keys, [[_cell(r.get(k)) for k in keys] for r in flat])


def _cell(v: Any) -> str:
    return "" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)


def table(name: str, columns: str | None = None) -> str:
    """The table of benchmarks/results/<name>.json, with a line of date, commit, device and versions.

    A file may contain several runs: a list of results, each with its own date, which become rows of one table.
    """
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        return "Not measured yet.\n"
    data = json.loads(path.read_text())
    runs = data if isinstance(data, list) else [data]
    whole = runs[0] if len(runs) == 1 else {"rows": [{"run": r["date"], **row} for r in runs for row in r["rows"]]}
    made = ratios(whole) if "ratio" in whole["rows"][0] and not columns else plain(whole, columns)
    marked, notes = mark_gaps(made, [(run, row) for run in runs for row in run["rows"]])
    return "\n\n".join([marked, *notes, *(text for r in runs for text in _origin(r))]) + "\n"


def mark_gaps(table: str, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[str, list[str]]:
    """The table with a mark at each row of an incomplete origin, if others of its run are complete, and the text of each mark.

    `rows`: the run and the row of every line of the table.
    """
    lines, texts = table.split("\n"), []
    for i, (run, row) in enumerate(rows):
        gaps = find_gaps({**run, **row})
        if not gaps or all(find_gaps(r) == gaps for r in runs_of(run)):
            continue  # complete, or said once for the whole run
        text = f"{', '.join(gaps)} (commit {str(row.get('commit', run.get('commit'))).removesuffix('+changes')})"
        if text not in texts:
            texts.append(text)
        first, rest = lines[i + 2].removeprefix("| ").split(" |", 1)
        lines[i + 2] = f"| {first} [{texts.index(text) + 1}] |{rest}"
    return "\n".join(lines), [f"[{n}] Incomplete origin: {text}." for n, text in enumerate(texts, 1)]


def _origin(run: dict[str, Any]) -> list[str]:
    """The provenance of a run, what is missing of it, and its note."""
    machine = run.get("machine", "")
    device = run.get("device") or (machine if isinstance(machine, str) else machine.get("model", ""))
    said = [run["note"]] if "note" in run else []
    records = list(runs_of(run))
    gaps = list(dict.fromkeys(g for r in records for g in find_gaps(r)))
    if gaps:
        of = "" if all(set(gaps) == set(find_gaps(r)) for r in records) else " of the rows with a mark"
        said.insert(0, f"Incomplete origin{of}: {', '.join(gaps)}. The result is kept until it is measured again.")
    commits = dict.fromkeys(str(r["commit"]) for r in records if "commit" in r)
    dates = sorted({r["date"][:16] for r in records if "date" in r})
    if not dates:
        return said
    versions = ", ".join(f"{k} {v}" for k, v in run.get("versions", {}).items())
    when = dates[0] if len(dates) == 1 else f"{dates[0][:10]} to {dates[-1][:10]}" if dates[0][:10] != dates[-1][:10] else dates[0][:10]
    where = ", ".join(x for x in (when, device, f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}") if x)
    command = " ".join(map(neutral, run.get("command", "").split()))  # older files contain folders of the machine
    first = "; ".join(x for x in (where, versions) if x) + "."
    return [f"{first} `{command}`" if command else first, *said]


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
