"""Prints pip constraints that pin each dependency of the core, `jit`, `search` and `test` to the lowest release that pyproject.toml allows.

`make test-oldest` installs these. A bound ">=1.17" becomes "==1.17.*": the last patch release of the lowest minor version.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("jit", "search", "test")


def oldest_pins(project: dict) -> Iterator[str]:
    """One "name==major.minor.*" per dependency with a lower bound; exact pins and references to other extras are left as they are."""
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(r for extra in EXTRAS for r in extras[extra])]:
        bound = re.fullmatch(r"([\w-]+)>=(\d+(?:\.\d+)?)[\d.]*(?:,.*)?", requirement)
        if bound:
            name, version = bound.groups()
            yield f"{name}=={version}{'' if '.' in version else '.0'}.*"


if __name__ == "__main__":
    print(*oldest_pins(tomllib.loads(PYPROJECT.read_text())["project"]), sep="\n")
