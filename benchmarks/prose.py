"""Numbers in prose against the results: numbers in README, docs/results and the examples' pages must occur in a result file of the section.

    python benchmarks/prose.py        exit 1 and one line per number that does not

A number with at least two decimals, in a section that shows a table or names `results/NAME.json`, must be a value of one of those files, rounded to
the same decimals (or scaled by 0.01, 0.001 or 1000: percent, milliseconds, microseconds). Numbers without a file are listed in the
section, with the reason: `<!-- no file: 1.43 1.42: the kernels of the day before -->`.
"""

from __future__ import annotations

import bisect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import BLOCK, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
NUMBER = re.compile(r"(?<![\w.,])\d+\.\d{2,}(?![\w])")
EXEMPT = re.compile(r"<!-- no file: ([\d. ]+): .+? -->", re.DOTALL)
SCALES = (1.0, 0.01, 1e3, 1e-3)


def unknown(page: Path) -> list[str]:
    """`number: surrounding words` of every number of the page that no result file of its section contains."""
    found = []
    for section in re.split(r"^(?=#)", page.read_text(), flags=re.MULTILINE):
        files = [f for name in _named(section) for f in _files(name)]
        if not files:
            continue
        values = sorted({abs(v) for f in files for v in _numbers(json.loads(f.read_text()))})
        exempt = {n for m in EXEMPT.finditer(section) for n in m[1].split()}
        prose = re.sub(r"```.*?```|<!--.*?-->", "", BLOCK.sub("", section), flags=re.DOTALL)
        for m in NUMBER.finditer(prose):
            if m[0] not in exempt and not _known(m[0], values):
                words = " ".join(prose[max(0, m.start() - 50) : m.end() + 20].split())
                found.append(f"{m[0]}: ...{words}...")
    return found


def _named(section: str) -> list[str]:
    return [m[2] for m in BLOCK.finditer(section)] + re.findall(r"results/([\w/]+)\.json", section)


def _files(name: str) -> list[Path]:
    """A table's file; a table with a part of another's rows (`resnet56_short`) also has that one."""
    return [f for n in (name, name.rpartition("_")[0]) if (f := RESULTS / f"{n}.json").is_file()]


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _numbers(v)
    elif isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+\.\d+", value))


def _known(text: str, values: list[float]) -> bool:
    """True if one of the values is the number at its decimals."""
    half = 0.5001 * 10.0 ** -len(text.partition(".")[2])
    for scale in SCALES:
        at = bisect.bisect_left(values, (float(text) - half) * scale)
        if at < len(values) and values[at] <= (float(text) + half) * scale:
            return True
    return False


def main() -> int:
    """Prints unknown numbers; returns the exit code."""
    bad = [f"{page.relative_to(ROOT)}: {text}" for page in PAGES for text in unknown(page)]
    print("\n".join(bad) or "every number of the prose is one of the results")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
