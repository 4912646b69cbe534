"""Makes the README's and the docs' tables from benchmarks/results: between `<!-- table: NAME -->` and `<!-- end -->`.

    python benchmarks/tables.py          write them
    python benchmarks/tables.py --check  exit 1 when one is out of date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    return markdown(["network", "batch", "type", "whet ms", *(f"{p} ms" for p in peers), "best peer / whet (lowest-highest process)", "bar"], rows)


def _verdict(r: dict[str, Any]) -> str:
    met = "met" if r["ratio"] >= r["bar"] else "missed" if r["ratio_high"] < r["bar"] else "undecided"
    return f"{r['bar']:g}: {met}"


def plain(data: dict[str, Any]) -> str:
    """Any flat rows, their numbers and words as columns; what is nested stays in the file."""
    keys = list(dict.fromkeys(k for r in data["rows"] for k, v in r.items() if isinstance(v, int | float | str | None)))
    return markdown(keys, [[_cell(r.get(k)) for k in keys] for r in data["rows"]])


def _cell(v: Any) -> str:
    return "" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)


def table(name: str) -> str:
    """The table of benchmarks/results/<name>.json, with a line that says date, commit, device and versions."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    found = json.loads(path.read_text())
    data = found if isinstance(found, dict) else {"rows": found}
    how: Callable[[dict[str, Any]], str] = ratios if "ratio" in data["rows"][0] else plain
    versions = ", ".join(f"{k} {v}" for k, v in data.get("versions", {}).items())
    machine = data.get("machine", "")
    device = data.get("device") or (machine if isinstance(machine, str) else machine.get("model", ""))
    where = f"{data.get('date', '')[:10]}, {device}, commit {data.get('commit', '')[:9]}"
    said = f"\n\n{data['note']}" if "note" in data else ""
    if "date" not in data:
        return f"{how(data)}{said}\n"
    return f"{how(data)}\n\n{where}; {versions}. `{data.get('command', '')}`{said}\n"


def main() -> None:
    stale = []
    for page in PAGES:
        if not page.exists():
            continue
        old = page.read_text()
        new = BLOCK.sub(lambda m: m[1] + table(m[2]) + m[3], old)
        if new != old:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new)
    if stale:
        print(("out of date: " if "--check" in sys.argv else "wrote: ") + ", ".join(stale))
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
