"""Numbers in prose: those with at least two decimals must be references to result files (references.py), or be listed as numbers without one.

    python benchmarks/prose.py        exit 1 and one line per number that is neither

Pages: README, docs and the examples' pages. docs/claims.md is generated as a whole; docs/notes are dated notes about single measurements, without
result files. Numbers without a file are listed in their section, with the reason: `<!-- no file: 1.43 1.42: the kernels of the day before -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from references import VALUE
from tables import BLOCK, PAGES, ROOT

WITHOUT = (ROOT / "docs" / "claims.md", ROOT / "docs" / "notes")
NUMBER = re.compile(r"(?<![\w.,])\d+\.\d{2,}(?![\w]|\.\d)")
EXEMPT = re.compile(r"<!-- no file: ([\d.\s]+): .+? -->", re.DOTALL)


def unknown(page: Path) -> list[str]:
    """`number: surrounding words` of every number of the page that is no reference and not listed as without a file."""
    lines = []
    for section in re.split(r"^(?=#)", page.read_text(), flags=re.MULTILINE):
        exempt = {n for m in EXEMPT.finditer(section) for n in m[1].split()}
        prose = re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->", "", VALUE.sub("", BLOCK.sub("", section)), flags=re.DOTALL)
        for m in NUMBER.finditer(prose):
            if m[0] not in exempt and not prose[: m.start()].endswith(("Python ", "arXiv:")):
                words = " ".join(prose[max(0, m.start() - 50) : m.end() + 20].split())
                lines.append(f"{m[0]}: ...{words}...")
    return lines


def main() -> int:
    """Prints unknown numbers; returns the exit code."""
    pages = [p for p in PAGES if not any(p == w or w in p.parents for w in WITHOUT)]
    bad = [f"{page.relative_to(ROOT)}: {text}" for page in pages for text in unknown(page)]
    print("\n".join(bad) or "every number of the prose refers to a result file")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
