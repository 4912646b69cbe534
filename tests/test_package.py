"""Contents of `pip install .`: every file that the code reads, every package that it imports; extras name the optional dependencies."""

import re
import tomllib
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "whet"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = [p.relative_to(SOURCES) for p in SOURCES.rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_files_other_than_python_are_package_data():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["whet"]
    others = [p for p in FILES if p.suffix != ".py"]
    assert {p.suffix for p in others} == {".cu", ".cuh", ".css", ".html", ".js", ".typed"}
    left_out = [p for p in others if not any(PurePosixPath("whet", p).match(pattern.removeprefix("**/")) for pattern in patterns)]
    assert left_out == []


def test_folders_with_python_are_packages():
    folders = {p.parent for p in FILES if p.suffix == ".py"}
    assert [f for f in folders if not (SOURCES / f / "__init__.py").exists()] == []


def test_extras_named_in_messages_exist():
    extras = PROJECT["project"]["optional-dependencies"]
    pages = [*SOURCES.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    named = {name for page in pages for group in re.findall(r"(?:whet|-e '\.)\[([a-z,-]+)\]", page.read_text()) for name in group.split(",")}
    assert {"train", "jit", "search", "test"} <= named
    assert named <= set(extras)


def test_the_wheel_has_its_licence():
    files = PROJECT["project"]["license-files"]
    assert [f for f in files if not (ROOT / f).is_file()] == []
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
