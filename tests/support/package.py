"""Checks that the sdist and the wheel of a folder are complete. Usage: python package.py DIST"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

SDIST = (
    "LICENSE", "NOTICE", "tests/conftest.py", "docs/index.md", "docs/images/report_graph.png", "examples/digits/demo.py", "benchmarks/tables.py",
    "mkdocs.yml",
)  # fmt: skip
WHEEL = (
    "whet/py.typed", "whet/cli/exec.py", ".dist-info/licenses/LICENSE", ".cu", ".cuh", "whet/report/page.html", "whet/report/page.css",
    "whet/report/page.js",
)  # fmt: skip


def main() -> int:
    dist = Path(sys.argv[1])
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        sources = archive.getnames()
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        installed = wheel.namelist()
    missing = [name for name in SDIST if not any(s.endswith("/" + name) for s in sources)]
    missing += [name for name in WHEEL if not any(i.endswith(name) for i in installed)]
    if missing:
        print(f"missing in the packages: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
