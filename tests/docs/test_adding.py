"""docs/adding.md: each section's example is written into a copy of the package, works there, and edits no other file."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text()
SECTIONS = {title: body for title, body in re.findall(r"^## (.+?)$\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)}


def examples(body: str) -> tuple[dict[str, str], list[str]]:
    """Files of a section by path (blocks that start with `# src/...` or `# tests/...`), and the Python blocks that use them."""
    files, uses = {}, []
    for code in re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL):
        first, _, rest = code.partition("\n")
        if found := re.fullmatch(r"# ((?:src|tests)/\S+)", first):
            files[found[1]] = rest
        else:
            uses.append(code)
    return files, uses


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy with the same time on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture
def package(tmp_path):
    """A copy of the package under `src`, with its compiled files. The files may be links: the test only adds files."""
    shutil.copytree(ROOT / "src" / "whet", tmp_path / "src" / "whet", copy_function=link_or_copy)
    return tmp_path


def run(root: Path, *command: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "XDG_CACHE_HOME": str(root / "cache")}
    done = subprocess.run([sys.executable, *command], cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


WITH_EXAMPLE = [title for title, body in SECTIONS.items() if examples(body)[0]]


@pytest.mark.parametrize("title", WITH_EXAMPLE)
def test_an_example_works_and_touches_one_source_file(title, package):
    files, uses = examples(SECTIONS[title])
    sources = [Path(path) for path in files if path.startswith("src/")]
    if title.startswith("A backend"):
        folder = Path("src/whet/backends/toy")
        assert all(folder in path.parents for path in sources), "a backend is one folder"
    else:
        assert len(sources) == 1
    for path, text in files.items():
        target = package / path
        assert not target.exists(), f"the example edits {path}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    assert uses, "the section shows how its example is used"
    for k, code in enumerate(uses):
        (package / f"use{k}.py").write_text(code)
        run(package, f"use{k}.py")
    if title.startswith("A backend"):
        run(package, "-c", "from whet import zoo; import pathlib; pathlib.Path('model.onnx').write_bytes(zoo.build('lenet5').SerializeToString())")
        contract = ROOT / "tests" / "backends" / "test_backend_contract.py"
        run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), str(contract), "-k", "toy")
        run(package, "-m", "whet", "exec", "--onnx=model.onnx", "--backend=toy", "--noVerify", "--iterations=1", "--duration=0")
