"""Every code block of the README and the docs runs: here in order, page by page, or in the test that PAGES_ELSEWHERE or LINES_ELSEWHERE names."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_ELSEWHERE = {
    "docs/python.md": "test_python_page.py", "docs/adding.md": "test_adding.py", "docs/questions.md": "test_questions.py",
    "docs/tutorial.md": "test_docs.py", "docs/auto.md": "test_auto_page.py", "docs/commands.md": "test_commands_page.py",
}  # fmt: skip
RUN = ("sh", "python")
LINES_ELSEWHERE = {  # lines of blocks marked `elsewhere`, by their first words -> what runs them, and a text of that file
    "make demo": ("tests/pruning/test_demo.py", "demo.py"), "make test": (".ci/run", "make test\n"),
    "pip install '.[jit]'": ("benchmarks/new_user.py", "whet[jit]"), "pip install '.[cuda]'": ("Makefile", "cuda-test"),
    "pip install '.[search]'": ("Makefile", "test,search"), "pip install '.[jit,search,train]'": ("Makefile", "test,search,torch-test"),
    "whet auto examples/auto/digits.yaml --dry-run": ("tests/docs/test_auto_page.py", "--dry-run"),
    "whet auto examples/auto/digits.yaml": ("benchmarks/auto_digits.py", "digits.yaml"),
    "whet exec --onnx=model.onnx ... --lock=lock.json": ("tests/search/test_made_again.py", "lock"),
    "whet rebuild .": ("tests/search/test_made_again.py", "whet rebuild"),
}  # fmt: skip
STANDIN = ROOT / "tests" / "support" / "standin_model.py"
NEEDS = {  # the second word of a block -> its imports
    "gpu": [], "elsewhere": [], "polygraphy": ["polygraphy", "onnxruntime"], "torch": ["torch", "onnxscript", "sklearn"],
    "search": ["optuna", "yaml"],
}  # fmt: skip


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, requirement, code) of the fenced blocks that have a language."""
    return re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


HERE = [p for p in PAGES if str(p.relative_to(ROOT)) not in PAGES_ELSEWHERE and any(b[0] in RUN for b in blocks(p))]


def run_blocks(code_blocks: list[tuple[str, str, str]], folder: Path) -> None:
    """Runs the blocks in order in one folder and one Python process: a block may use names of those before it. Shell blocks stop at the first
    command that fails. A small network replaces ResNet-18."""
    lines = ["import subprocess"]
    for k, (language, needs, code) in enumerate(code_blocks):
        if language not in RUN or needs in ("gpu", "elsewhere") or not all(map(importlib.util.find_spec, NEEDS.get(needs, []))):
            continue
        if language == "sh":
            shell = ["bash", "-e", "-o", "pipefail", "-c", code.replace("whet zoo resnet18 -o", f"{sys.executable} {STANDIN}")]
            lines.append(f"subprocess.run({shell!r}, check=True)")
        else:
            lines.append(f"exec(compile({code!r}, 'block {k}', 'exec'))")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_run(page, tmp_path):
    run_blocks(blocks(page), tmp_path)


def test_a_block_that_fails_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match="exit status 3"):
        run_blocks([("sh", "", "exit 3\ntrue\n")], tmp_path)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_blocks([("python", "", "x = 0"), ("python", "", "1 / x")], tmp_path)


def test_the_other_pages_have_their_tests():
    for page, test in PAGES_ELSEWHERE.items():
        text = (Path(__file__).parent / test).read_text()
        assert Path(page).name in text, f"{test} does not read {page}"
    assert len(HERE) >= 10


def test_lines_that_run_elsewhere_are_named():
    found = "".join(code for page in PAGES for _, needs, code in blocks(page) if needs == "elsewhere")
    lines = [x.partition("#")[0].strip() for x in found.splitlines()]
    assert lines
    for line in lines:
        known = max((k for k in LINES_ELSEWHERE if line.startswith(k)), key=len, default=None)
        assert known, f"no test runs: {line}"
        file, text = LINES_ELSEWHERE[known]
        assert text in (ROOT / file).read_text(), f"{file} does not run: {line}"


def test_no_block_is_only_indented():
    """Such a block would have no language, and no test would run it. Continuations of list items are indented by two or three spaces."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"\n\n((?: {4}|\t)\S.*)", text) == [], page.name


def test_blocks_have_a_known_language_and_requirement():
    for page in PAGES:
        for language, needs, _ in blocks(page):
            assert language in (*RUN, "yaml", "toml", "text", "json", "c"), f"{page.name}: {language}"
            assert needs in ("", *NEEDS), f"{page.name}: {language} {needs}"
